"""Attacks on the engine and the step that were found by review: each would break a guarantee in silence."""

from __future__ import annotations

import copy
import dataclasses
from functools import cmp_to_key
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, NoFilter, Plan, clipped_gradient, privatize
from diskdp.errors import CheckpointError, GradientError, SamplingError
from diskdp.gradients import Engine
from diskdp.gradients.rules import default_rules
from diskdp.gradients.trace import Trace
from tests import oracle
from tests.models import Lambda, classify, parameter


def error(model: nn.Module, batch: tuple[Tensor, ...], loss: Any, max_norm: float = 1.0) -> float:
    exact = oracle.clipped(oracle.per_example(copy.deepcopy(model).double(), _double(batch), loss), "flat", max_norm)
    return oracle.relative_error(clipped_gradient(model, batch, loss, max_norm=max_norm)[0], exact)


def _double(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


# --- sensitivity ------------------------------------------------------------------------------------------------------


def test_cancelling_rows_are_not_longer_than_the_threshold() -> None:
    """Two large, nearly equal rows with opposite gradients: in float32 their Gram matrix says 0."""
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    x = 1000 + torch.randn(100) + 0.01 * torch.randn(4, 2, 100)
    direction = torch.randn(100)

    def loss(model: Any, batch: Any) -> Tensor:
        h = model(batch[0])
        return 100 * ((h[:, 0] - h[:, 1]) @ direction.to(h))

    for i in range(4):
        grads, norms = clipped_gradient(model, (x[i : i + 1],), loss)
        exact = oracle.norm(oracle.per_example(copy.deepcopy(model).double(), (x[i : i + 1].double(),), loss)[0])
        assert norms.item() == pytest.approx(exact, rel=0.02)
        assert 0.8 < oracle.norm(grads) <= 1.0


def test_cancelling_patches_are_not_longer_than_the_threshold() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(8, 8), nn.Flatten(), nn.Linear(8 * 36, 4))
    x, y = torch.randn(6, 3, 6, 6) * 0.1 + 50, torch.randint(0, 4, (6,))
    for i in range(6):
        grads, _ = clipped_gradient(model, (x[i : i + 1], y[i : i + 1]), classify, max_norm=1e-3)
        assert oracle.norm(grads) <= 1e-3


# --- who owns a row ---------------------------------------------------------------------------------------------------


class SortedByLength(nn.Module):
    """Examples are reordered by their data, as packed sequences are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        h = torch.tanh(self.inner(x[order]))
        return self.head(h[order.argsort()])


def test_rows_that_the_data_reorders() -> None:
    """A batch in order is exact; one out of order is refused aloud, although its shapes were seen before."""
    torch.manual_seed(2)
    model, labels = SortedByLength(), torch.randint(0, 4, (6,))
    ordered = torch.arange(6.0)[:, None] + torch.randn(6, 6) * 0.1
    assert error(model, (ordered, labels), classify, 0.2) < 1e-5
    with pytest.raises(GradientError, match="mixes examples"):
        error(model, (ordered.flip(0), labels), classify, 0.2)


def test_rows_that_a_mask_packs() -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"inner": nn.Linear(6, 5), "head": nn.Linear(5, 4)})

    def loss(model: Any, batch: Any) -> Tensor:
        x, mask, y = batch
        h = torch.zeros(*x.shape[:2], 5, dtype=x.dtype).masked_scatter(
            mask.unsqueeze(2), model["inner"](x[mask]).tanh()
        )
        return F.cross_entropy(model["head"](h.sum(1)), y, reduction="none")

    x, y = torch.randn(4, 3, 6), torch.randint(0, 4, (4,))
    assert error(model, (x, torch.ones(4, 3, dtype=torch.bool), y), loss, 0.3) < 1e-5
    ragged = torch.arange(3)[None] < torch.tensor([1, 3, 2, 2])[:, None]
    with pytest.raises(GradientError):
        error(model, (x, ragged, y), loss, 0.3)


def picks(forward: Any, *data: Tensor, batch: int = 4) -> bool:
    """Whether a forward pass over ``data`` is taken to pick among examples."""
    head = nn.Parameter(torch.ones(3))
    trace = Trace({"head": head}, {}, data, default_rules())
    with torch.enable_grad(), trace:
        forward(head, *data)
    return trace.moves(batch)


@pytest.mark.parametrize(
    ("moves", "forward"),
    [
        (False, lambda w, x, n: (x * w).gather(1, n[:, None])),  # a score by its label
        (False, lambda w, x, n: (x * w)[torch.arange(4), n]),
        (False, lambda w, x, n: (x * w)[:, n]),
        (False, lambda w, x, n: (x * w)[..., n]),
        (False, lambda w, x, n: n[:2].float() * w[0]),  # whole numbers cut at fixed places
        (False, lambda w, x, n: torch.zeros(4, 3)[n] * x * w),  # a constant table, row for row of the numbers
        (True, lambda w, x, n: torch.arange(12.0).view(4, 3)[n > 0] * w),
        (True, lambda w, x, n: (x * w)[n]),
        (True, lambda w, x, n: (x * w)[None, n]),
        (True, lambda w, x, n: (x * w).index_select(0, n)),
        (True, lambda w, x, n: (x * w).gather(0, n[:, None])),
        (True, lambda w, x, n: (x * w)[n > 1]),
        (True, lambda w, x, n: (x * w).masked_select(x > 0)),
        (True, lambda w, x, n: torch.zeros(4, 3).index_add(0, n, x * w)),
        (True, lambda w, x, n: (x * w).repeat_interleave(n, 0)),
        (True, lambda w, x, n: torch.split(x * w, n.tolist())),
        (True, lambda w, x, n: w[torch.where(x > 0)[1]]),
        (True, lambda w, x, n: (x * w)[: int(n.max())]),
    ],
)
def test_what_counts_as_picking_among_examples(moves: bool, forward: Any) -> None:
    numbers = torch.tensor([1, 0, 2, 1])
    assert picks(forward, torch.randn(4, 3), numbers) is moves


def test_picks_along_an_axis_that_could_hold_the_examples_count() -> None:
    """Three classes and a batch of three: which axis the labels picked from cannot be told from lengths."""
    assert picks(lambda w, x, n: (x * w).gather(1, n[:, None]), torch.randn(3, 3), torch.tensor([1, 0, 2]), batch=3)


class TwoViews(nn.Module):
    """Two views of each example on the batch axis, tokens flattened with it; only the first token is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(10, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        views = torch.cat([x, x.flip(2)], 0)
        h = self.inner(views.reshape(-1, 10)).view(2 * len(x), -1, 4)[:, 0]
        return self.head(torch.cat(h.chunk(2, 0), 1))


@pytest.mark.parametrize("first", [2, 4, 8])
def test_an_owner_found_at_one_batch_size_holds_at_others(first: int) -> None:
    """17 tokens, 1 beyond a multiple of 8: at 8 examples row % 8 explains the live rows too, at 34 it does not."""
    torch.manual_seed(0)
    model, x, y = TwoViews(), torch.randn(34, 17, 10), torch.randint(0, 3, (34,))
    for size in (first, 34, 11, 2):
        assert error(model, (x[:size], y[:size]), classify, 0.05) < 1e-5


class LastTokens(nn.Module):
    """Tokens flattened with the batch; the loss reads those from ``first`` on, so that the others' rows are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.backwards = nn.Linear(5, 5), 3, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.reshape(-1, 5)).view(len(x), -1, 5)
        h.register_hook(lambda grad: setattr(self, "backwards", self.backwards + 1))
        return h[:, self.first :].tanh().sum(1)


def test_rows_without_a_gradient_do_not_cost_a_second_pass_for_ever() -> None:
    torch.manual_seed(0)
    model, x, y = LastTokens(), torch.randn(8, 6, 5), torch.randint(0, 5, (8,))
    passes = []
    for size, first in ((8, 3), (7, 3), (8, 3), (4, 1), (4, 1)):
        model.first, model.backwards = first, 0
        assert error(model, (x[:size], y[:size]), classify, 0.05) < 1e-5
        passes.append(model.backwards)
    assert passes[2:] == [1, 3, 1]  # rows that come to life are measured once: found alive, then measured


def test_few_live_examples_do_not_settle_the_axis() -> None:
    """Time first, as many steps as examples, one example with a loss: every axis explains that batch."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch[0])[0].square().mean(1) * batch[1]

    x = torch.randn(4, 4, 5)
    engine = Engine(model, loss)
    engine.gradients((x, torch.tensor([1.0, 0.0, 0.0, 0.0])), [(1.0, None)])
    gradients = engine.gradients((x, torch.ones(4)), [(1.0, None)])
    for i, exact in enumerate(oracle.per_example(model, (x, torch.ones(4)), loss, axes=(1, 0))):
        for name, terms in gradients.terms.items():
            found = sum(t.per_example()[i] for t in terms)
            assert torch.allclose(torch.as_tensor(found).double(), exact[name], atol=1e-6)


def test_a_head_that_wakes_up_later() -> None:
    """Task weights that are 0 in the first batch: the head's rows are assigned when its gradient arrives."""
    torch.manual_seed(5)
    model = nn.ModuleDict({"trunk": nn.Linear(6, 5), "a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})

    def loss(model: Any, batch: Any) -> Tensor:
        h = model["trunk"](batch[0]).tanh()
        return model["a"](h).square().mean(1) + batch[1] * model["b"](h).square().mean(1)

    def once(model: Any, batch: Any) -> Tensor:
        return loss(model, batch)

    engine = Engine(model, once)
    x = torch.randn(6, 6)
    engine.gradients((x, torch.zeros(6)), [(1.0, None)])
    grads = engine.gradients((x, torch.ones(6)), [(1.0, None)])
    assert all(grads.terms.values())
    assert error(model, (x, torch.ones(6)), once) < 1e-5


@pytest.mark.parametrize("first_padded", [False, True])
def test_infinite_attention_masks_stay(first_padded: bool) -> None:
    torch.manual_seed(6)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Lambda(
        lambda m, x, mask: m.a(m.q.expand(len(x), -1, -1), x, x, key_padding_mask=mask, need_weights=False)[0].mean(1),
        a=attention,
        q=parameter(1, 2, 8),
    )

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch[0], batch[1]).square().mean(1)

    x = torch.randn(5, 4, 8)
    padded = torch.arange(4)[None] >= torch.tensor([4, 2, 3, 1, 4])[:, None]
    for mask in (padded, torch.zeros(5, 4, dtype=torch.bool))[:: 1 if first_padded else -1]:
        assert error(model, (x, mask), loss, 0.05) < 1e-5


# --- examples that look at one another --------------------------------------------------------------------------------


def standardised(m: Any, x: Tensor) -> Tensor:
    return m.l((x - x.mean(0)) / x.std(0))


MIXING: dict[str, Any] = {
    "the largest entry": lambda m, b: m(b[0] / b[0].abs().max()).square().mean(1),
    "the batch's length": lambda m, b: m(b[0]).square().mean(1) / len(b[0]),
    "small losses": lambda m, b: m((b[0] - b[0].mean(0)) / b[0].std(0)).square().mean(1) * 1e-7,
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("seed", range(4))
def test_mixing_is_found_whichever_example_carries_it(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.raises(GradientError, match="one example's data"):
        clipped_gradient(nn.Linear(6, 4), (torch.randn(8, 6),), MIXING[name])


@dataclasses.dataclass
class Record:
    x: Tensor


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("wrap", [Record, Plain, lambda x: {"x": x}, lambda x: Plain(x.numpy())])
def test_mixing_is_found_in_any_container(wrap: Any) -> None:
    def read(batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return torch.as_tensor(x)

    def honest(m: Any, b: Any) -> Tensor:
        return m(read(b)).square().mean(1)

    def mixing(m: Any, b: Any) -> Tensor:
        return m(read(b) - read(b).mean(0)).square().mean(1)

    torch.manual_seed(0)
    model, x = nn.Linear(6, 4), torch.randn(8, 6)
    grads, _ = clipped_gradient(model, wrap(x), honest)
    plain, _ = clipped_gradient(model, {"x": x}, honest)
    assert all(torch.allclose(grads[name], plain[name], atol=1e-6) for name in plain)
    with pytest.raises(GradientError, match="one example's data"):
        clipped_gradient(model, wrap(x), mixing)


def test_a_batch_that_cannot_be_taken_apart() -> None:
    def loss(m: Any, b: Any) -> Tensor:
        return m(torch.tensor(np.frombuffer(b, np.float32).reshape(8, 6).copy())).square().mean(1)

    with pytest.raises(GradientError, match="no part of the batch"):
        clipped_gradient(nn.Linear(6, 4), np.random.default_rng(0).random((8, 6), np.float32).tobytes(), loss)


def test_a_trainable_tensor_outside_the_model() -> None:
    temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(GradientError, match="trainable tensor of shape"):
        clipped_gradient(nn.Linear(6, 4), (torch.randn(8, 6),), lambda m, b: (m(b[0]) * temperature).square().mean(1))
    assert temperature.grad is None


def test_second_derivatives_in_the_loss() -> None:
    def loss(m: Any, b: Any) -> Tensor:
        x = b[0].clone().requires_grad_()
        value = m(x).square().mean(1)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value + 1e-4 * slope.square().sum(1)

    with pytest.raises(GradientError, match="create_graph"):
        clipped_gradient(nn.Linear(6, 4), (torch.randn(8, 6),), loss)


def test_a_small_hidden_use() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad

    model = Lambda(lambda m, x: x @ m.w + 1e-5 * Hidden.apply(x, m.w), w=parameter(6, 4))
    with pytest.raises(GradientError, match="custom autograd Function Hidden"):
        clipped_gradient(model, (torch.randn(8, 6),), lambda m, b: m(b[0]).square().mean(1))


def test_settings_that_change_between_calls() -> None:
    model = Lambda(lambda m, x: m.l((x - x.mean(0)) if m.centre else x), l=nn.Linear(6, 4))
    model.centre = False

    def loss(m: Any, b: Any) -> Tensor:
        return m(b[0]).square().mean(1)

    clipped_gradient(model, (torch.randn(8, 6),), loss)
    model.centre = True
    with pytest.raises(GradientError, match="one example's data"):
        clipped_gradient(model, (torch.randn(8, 6),), loss)


# --- what is not finite -----------------------------------------------------------------------------------------------


def test_a_non_finite_loss_counts_the_same_whoever_else_is_bad() -> None:
    torch.manual_seed(7)
    model, x = nn.Linear(6, 1), torch.randn(4, 6)

    def loss(m: Any, b: Any) -> Tensor:
        return m(b[0]).squeeze(1) * b[1] + b[2]

    infinite = torch.tensor([float("inf"), 0.0, 0.0, 0.0])
    one, _ = clipped_gradient(model, (x, torch.ones(4), infinite), loss)
    two, _ = clipped_gradient(model, (x, torch.tensor([1.0, 1.0, 1.0, float("nan")]), infinite), loss)
    alone, _ = clipped_gradient(model, (x[3:], torch.ones(1), torch.zeros(1)), loss)
    assert all(torch.allclose(one[name] - two[name], alone[name], atol=1e-6) for name in one)


def test_nothing_aborts_on_a_first_batch_without_finite_numbers() -> None:
    model = nn.Linear(6, 4)

    def loss(m: Any, b: Any) -> Tensor:
        return m(b[0]).square().mean(1)

    grads, norms = clipped_gradient(model, (torch.full((5, 6), float("nan")),), loss)
    assert not any(g.any() for g in grads.values())
    assert not torch.isfinite(norms).any() or not norms.any()
    assert error(model, (torch.randn(5, 6),), loss) < 1e-5


def test_a_finite_loss_with_a_gradient_that_is_not() -> None:
    torch.manual_seed(8)
    model = nn.Linear(6, 4, bias=False)
    x = torch.randn(5, 6)
    x[2] = 0  # sqrt has no slope at 0

    def loss(m: Any, b: Any) -> Tensor:
        return m(b[0]).square().sum(1).sqrt()

    grads, _ = clipped_gradient(model, (x,), loss)
    rest, _ = clipped_gradient(model, (x[[0, 1, 3, 4]],), loss)
    assert torch.allclose(grads["weight"], rest["weight"], atol=1e-6)


def test_empty_batches_and_points() -> None:
    model = nn.Linear(6, 4)
    grads, norms = clipped_gradient(model, (torch.randn(0, 6),), lambda m, b: m(b[0]).square().mean(1))
    assert norms.shape == (0,)
    assert not any(g.any() for g in grads.values())
    for points in ([], [(0.0, None)]):
        with pytest.raises(GradientError, match="no point"):
            clipped_gradient(model, (torch.randn(3, 6),), lambda m, b: m(b[0]).square().mean(1), points)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"weigth": torch.zeros(4, 6)}, "no trainable parameter"), ({"weight": torch.zeros(6)}, "has shape")],
)
def test_points_of_another_model(values: dict[str, Tensor], message: str) -> None:
    with pytest.raises(GradientError, match=message):
        clipped_gradient(nn.Linear(6, 4), (torch.randn(3, 6),), lambda m, b: m(b[0]).sum(1), [(1.0, values)])


# --- uses that were refused without need ------------------------------------------------------------------------------

USES: dict[str, tuple[nn.Module, Any]] = {
    "cosine": (Lambda(lambda m, x: F.cosine_similarity(x, m.p[None]), p=parameter(6)), None),
    "einsum-unsqueezed": (Lambda(lambda m, x: torch.einsum("bd,xd->b", x, m.p.unsqueeze(0)), p=parameter(6)), None),
    "view-as": (Lambda(lambda m, x: x @ m.a.view_as(m.b) @ m.b.t(), a=parameter(24), b=parameter(6, 4)), None),
    "type-of-weight": (Lambda(lambda m, x: m.l(x.type_as(m.l.weight)).to(m.l.weight.dtype), l=nn.Linear(6, 4)), None),
    "to-weight": (Lambda(lambda m, x: m.l(x.to(m.l.weight)), l=nn.Linear(6, 4)), None),
    "masked-fill": (Lambda(lambda m, x: m.l(x.masked_fill(x > 1, m.s)), l=nn.Linear(6, 4), s=parameter()), None),
    "small-variance": (
        Lambda(lambda m, x: m.l(x / m.v.sqrt()), l=nn.Linear(6, 4), v=nn.Parameter(torch.full((6,), 0.001))),
        None,
    ),
}


def assigned(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3, 6)
    h[:, 0] = m.token
    h[:, 1] = x
    return m.l(h.flatten(1))


USES["assignment"] = (Lambda(assigned, token=parameter(6), l=nn.Linear(18, 4)), None)


@pytest.mark.parametrize("name", USES)
def test_reasonable_uses_are_exact(name: str) -> None:
    torch.manual_seed(9)
    model, _ = USES[name]
    x = torch.randn(5, 6)
    before = x.clone()
    assert error(model, (x,), lambda m, b: m(b[0]).flatten(0).view(len(b[0]), -1).square().mean(1), 0.1) < 1e-5
    assert torch.equal(x, before)
    assert x.grad_fn is None


def test_constant_numbers_of_the_batchs_length_take_no_square_memory() -> None:
    model = Lambda(
        lambda m, x: m.l(x + m.e(torch.zeros(x.shape[:2], dtype=torch.long))), l=nn.Linear(6, 4), e=nn.Embedding(2, 6)
    )
    engine = Engine(model, lambda m, b: m(b[0]).square().mean((1, 2)))
    assert engine.gradients((torch.randn(5, 3, 6),), [(1.0, None)]).operations["e.weight"] == "embedding"


def test_sparse_gradients_in_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Flatten(), nn.Linear(15, 4))
    assert error(model, (torch.randint(0, 9, (6, 3)), torch.randint(0, 4, (6,))), classify) < 1e-5


def test_writing_into_the_batch_is_refused() -> None:
    with pytest.raises(GradientError, match="writes into its batch"):
        clipped_gradient(nn.Linear(6, 4), (torch.randn(5, 6),), lambda m, b: m(b[0].mul_(2)).sum(1))


# --- the step ---------------------------------------------------------------------------------------------------------

N = 40


def training(optimizer: Any = torch.optim.SGD, ledger_path: Path | None = None, seed: int | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    plan = Plan(dataset_size=N, batch_size=10, steps=8, noise_multiplier=2.0, delta=1e-3)
    made = optimizer(model.parameters(), lr=0.1)
    return privatize(model, made, plan, loss_fn=classify, filter=NoFilter(), seed=seed, ledger_path=ledger_path)


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, 6), torch.randint(0, 4, (N,)))


class Interrupted(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise KeyboardInterrupt


def test_an_interrupted_step_uses_up_its_noise_and_its_sample() -> None:
    private = training(optimizer=Interrupted)
    batch = next(iter(private.loader(data())))
    secret = private._secret
    with pytest.raises(KeyboardInterrupt):
        private.step(batch)
    assert private.steps_charged == 1
    assert private._secret is not secret
    with pytest.raises(SamplingError):
        private.step(batch)


def test_a_training_cannot_be_copied() -> None:
    private = training()
    for make in (copy.copy, copy.deepcopy):
        with pytest.raises(SamplingError, match="same noise"):
            make(private)


def test_optimizers_cannot_write_into_the_filter() -> None:
    """Nesterov momentum in its foreach form adds into the gradients it is given."""
    weights = []
    for foreach in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        plan = Plan(dataset_size=N, batch_size=10, steps=8, noise_multiplier=2.0, delta=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
        private = privatize(model, optimizer, plan, loss_fn=classify, filter=DiSK(0.7, 0.5), seed=1)
        for batch in private.loader(data()):
            private.step(batch)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=1e-5)


def test_freezing_after_privatize_is_refused() -> None:
    private = training()
    loader = iter(private.loader(data()))
    private.model[0].requires_grad_(False)
    with pytest.raises(GradientError, match="not those that privatize"):
        private.step(next(loader))


def test_a_frozen_parameter_stays_where_it_is() -> None:
    """Optimizers move whatever has a gradient, trainable or not: one from before must not be released unnoised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 4, (8,))).backward()  # the gradients of real data
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    plan = Plan(dataset_size=N, batch_size=10, steps=3, noise_multiplier=1.0, delta=1e-3)
    private = privatize(model, optimizer, plan, loss_fn=classify)
    for batch in private.loader(data()):
        private.step(batch)
    assert all(torch.equal(before[name], value) for name, value in model[0].state_dict().items())


def test_collation_may_not_change_how_many_losses_there_are() -> None:
    """One clip an example: views of one example are not examples, and a mean over the batch is none at all."""

    def views(items: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = torch.utils.data.default_collate(items)
        return x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)

    with pytest.raises(GradientError, match="16 losses for 8 examples"):
        training().loader(data(), collate_fn=views)


def test_sparse_adam_is_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    plan = Plan(dataset_size=N, batch_size=10, steps=3, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(GradientError, match="SparseAdam"):
        privatize(model, torch.optim.SparseAdam(model.parameters()), plan, loss_fn=classify)


def test_resuming_needs_the_ledger_that_was_kept(tmp_path: Path) -> None:
    private = training(ledger_path=tmp_path / "ledger.jsonl")
    loader = iter(private.loader(data()))
    for _ in range(2):
        private.step(next(loader))
    state = private.state_dict()
    for path in (None, tmp_path / "another.jsonl"):
        with pytest.raises(CheckpointError, match="the run's own ledger"):
            training(ledger_path=path).load_state_dict(state)
    again = training(ledger_path=tmp_path / "ledger.jsonl")
    again.load_state_dict(state)
    assert again.steps_charged == 2


def test_checkpoints_of_another_model_or_optimizer_change_nothing() -> None:
    private = training()
    private.step(next(iter(private.loader(data()))))
    state = private.state_dict()
    other = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))
    before = copy.deepcopy(other.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    wider = privatize(other, optimizer, private.plan, loss_fn=classify, filter=NoFilter())
    with pytest.raises(CheckpointError, match="another model"):
        wider.load_state_dict(state)
    assert wider.steps_charged == 0
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(CheckpointError, match="another optimizer"):
        training(optimizer=torch.optim.Adam).load_state_dict(state)


def test_what_a_seed_has_touched_stays_marked() -> None:
    seeded = training(seed=1)
    seeded.step(next(iter(seeded.loader(data()))))
    unseeded = training()
    assert seeded.reproducible
    assert not unseeded.reproducible
    unseeded.load_state_dict(seeded.state_dict())
    assert unseeded.reproducible


# --- orders and layouts that shapes do not tell -----------------------------------------------------------------------

ORDERS: dict[str, Any] = {
    "floating numbers that leave": lambda x, _: sorted(range(len(x)), key=lambda i: x[i, 0].item()),
    "a list of floating numbers": lambda x, _: [i for _, i in sorted((v, i) for i, v in enumerate(x[:, 0].tolist()))],
    "numpy": lambda x, _: np.argsort(np.asarray((x[:, 0] * 100).long())).tolist(),
    "comparisons": lambda x, _: sorted(range(len(x)), key=cmp_to_key(lambda i, j: -1 if x[i, 0] < x[j, 0] else 1)),
    "a tuple in the batch": lambda x, order: list(order),
    "a constant tensor made of it": lambda x, order: torch.tensor(order),
    "sorting": lambda x, _: x[:, 0].sort().indices,
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_that_python_has_seen(name: str) -> None:
    """A batch in order settles nothing for one that is not: the second is refused, never taken for the first."""
    torch.manual_seed(4)
    model = nn.ModuleDict({"inner": nn.Linear(6, 5), "head": nn.Linear(5, 4)})

    def loss(model: Any, batch: Any) -> Tensor:
        order = ORDERS[name](batch[0], batch[2])
        back = np.argsort(np.asarray(order)).tolist()
        h = torch.tanh(model["inner"](batch[0][order]))
        return F.cross_entropy(model["head"](h)[back], batch[1], reduction="none")

    x, y = torch.arange(6.0)[:, None] + torch.randn(6, 6) * 0.1, torch.randint(0, 4, (6,))
    clipped_gradient(model, (x, y, tuple(range(6))), loss)
    for _ in range(3):
        with pytest.raises(GradientError):
            clipped_gradient(model, (x.flip(0), y, tuple(range(5, -1, -1))), loss)


class Switched(nn.Module):
    """The same operations on parameters, on rows in one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        count, length = x.shape[:2]
        if self.other:
            h = self.inner(x.transpose(0, 1).reshape(-1, 4)).view(length, count, 3).transpose(0, 1)
        else:
            h = self.inner(x.reshape(-1, 4)).view(count, length, 3)
        return h.tanh().mean(1)


def test_a_layout_that_changes_under_the_same_shapes() -> None:
    torch.manual_seed(5)
    model, x, y = Switched(), torch.randn(6, 5, 4), torch.randint(0, 3, (6,))
    for model.other in (0, 1, 0, 1):
        assert error(model, (x, y), classify, 0.05) < 1e-5


@pytest.mark.parametrize("drawn", ["bernoulli", "randn_like", "lstm"])
def test_division_by_the_batchs_length_beside_other_randomness(drawn: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 6), "r": nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)})

    def loss(model: Any, batch: Any) -> Tensor:
        h = model["a"](batch[0])
        if drawn == "bernoulli":
            h = h * torch.empty(len(h), 1, 1).bernoulli_(0.8)
        elif drawn == "randn_like":
            h = h + 0.1 * torch.randn_like(h)
        h = model["r"](h)[0] if drawn == "lstm" else h + model["r"](h)[0].detach()
        return h.square().mean((1, 2)) / len(h)

    model["r"].requires_grad_(drawn == "lstm")
    with pytest.raises(GradientError, match="left out"):
        clipped_gradient(model, (torch.randn(12, 3, 5),), loss)


def test_examples_that_only_mix_in_large_batches_of_a_new_length() -> None:
    """Examined on a few of its examples, a new length is still looked at as a whole."""

    def loss(model: Any, batch: Any) -> Tensor:
        h = model(batch[0])
        return (h - h.mean(0) if h.shape[1] > 8 and len(h) > 16 else h - 0 * h).square().mean((1, 2))

    found = Engine(nn.Linear(3, 4), loss)
    found.gradients((torch.randn(32, 5, 3),), [(1.0, None)])
    with pytest.raises(GradientError):
        found.gradients((torch.randn(32, 12, 3),), [(1.0, None)])


def test_data_written_in_the_backward_pass_is_taken_back() -> None:
    class Kept(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.register_buffer("kept", torch.zeros(5))

        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            y.register_hook(lambda grad: grad + 0 * self.kept.copy_(input[0].detach()).sum())
            return y

    model = Kept()
    with pytest.raises(GradientError):
        clipped_gradient(model, (torch.randn(6, 5), torch.randint(0, 3, (6,))), classify)
    assert not model.kept.any()


def test_parameters_used_in_another_precision() -> None:
    """Sums have the parameter's precision, whatever the model computed in."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(4, 3)), "v": nn.Parameter(torch.randn(3).double())})

    def loss(model: Any, batch: Any) -> Tensor:
        return ((batch[0].double() @ model["w"].double()).float() * model["v"].float()).square().sum(1)

    plan = Plan(dataset_size=12, batch_size=6, steps=4, noise_multiplier=1.0, delta=1e-3)
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=loss, microbatch_size=2)
    for batch in private.loader(TensorDataset(torch.randn(12, 4))):
        private.step(batch)
    assert private.steps_charged == 4
    assert (model["w"].dtype, model["v"].dtype) == (torch.float32, torch.float64)
