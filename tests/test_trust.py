"""Guards of a whole training: what would silently break the guarantee, or the training, is refused or does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, NoFilter, Plan, privatize
from diskdp.errors import GradientError, SamplingError, UncheckedUnitsWarning
from tests.models import classify

SIZE = 40


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(SIZE, 6, generator=generator)  # of each token
    return TensorDataset(
        torch.randn(SIZE, 6, 5, generator=generator),
        torch.randint(0, 3, (SIZE, 6), generator=generator),
        weights,
    )


def make_plan(**options: Any) -> Plan:
    usual: dict[str, Any] = {
        "dataset_size": SIZE,
        "batch_size": 8,
        "steps": 6,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
    }
    return Plan(**{**usual, **options})


def tokens(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), reduction="none").view(b[1].shape) * b[2]


# --- denominators -----------------------------------------------------------------------------------------------------

DENOMINATORS: dict[str, Callable[[Any, Any], Tensor]] = {
    "the number of examples": lambda m, b: tokens(m, b).mean(1) / len(b[0]),
    "the weights of the batch": lambda m, b: tokens(m, b).sum(1) / b[2].sum(),
    "the weights of the batch, in scale": lambda m, b: tokens(m, b).sum(1) * len(b[0]) / b[2].sum(),
    "how often a class is in the batch": lambda m, b: (
        tokens(m, b).mean(1) / b[1].flatten().bincount(minlength=3)[b[1][:, 0]]
    ),
    "the sum of the losses": lambda m, b: tokens(m, b).mean(1) / tokens(m, b).sum().detach(),
}


@pytest.mark.parametrize("name", DENOMINATORS)
def test_denominators_of_the_batch_are_refused_before_training(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    private = privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), make_plan(), loss_fn=DENOMINATORS[name], filter=NoFilter()
    )
    with pytest.raises(GradientError, match=r"one example changes|mixes examples"):
        private.loader(data())


def test_an_examples_own_denominator_is_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        make_plan(),
        loss_fn=lambda m, b: tokens(m, b).sum(1) / b[2].sum(1),
        filter=NoFilter(),
    )
    assert [private.step(batch).step for batch in private.loader(data())] == list(range(6))


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_sums_are_divided_by_the_public_batch_size(microbatch_size: int | None) -> None:
    """Every example has gradient 2 and norm bound 0.5: a batch of n moves the weight by lr n 0.5 / B, also n = 0."""
    model = nn.Linear(1, 1, bias=False)
    rate, size = 0.1, 8
    with pytest.warns(UserWarning, match="nothing is private"):
        plan = make_plan(noise_multiplier=0.0, max_grad_norm=0.5, steps=30)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=rate),
        plan,
        loss_fn=lambda m, b: m(torch.full((len(b[0]), 1), 2.0)).squeeze(1),
        filter=NoFilter(),
        microbatch_size=microbatch_size,
        seed=4,
    )
    sizes = set()
    for batch in private.loader(data()):
        before = model.weight.item()
        private.step(batch)
        sizes.add(batch.size)
        assert before - model.weight.item() == pytest.approx(rate * batch.size * 0.5 / size, abs=1e-6)
    assert len(sizes) > 5


# --- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def vectors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SIZE, 5, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_second_optimizer_step_moves_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = OPTIMIZERS[name](model.parameters())
    private = privatize(model, optimizer, make_plan(steps=2), loss_fn=classify, filter=DiSK())
    start = [p.detach().clone() for p in model.parameters()]
    for batch in private.loader(vectors()):
        private.step(batch)
        moved = [p.detach().clone() for p in model.parameters()]
        assert all(not torch.equal(a, b) for a, b in zip(start, moved))
        optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), moved))
        assert all(p.grad is None for p in model.parameters())
        start = moved


def test_gradients_of_the_users_own_do_not_get_into_a_step() -> None:
    """A look at the loss between steps leaves un-noised gradients on the weights."""

    def train(look: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        private = privatize(model, optimizer, make_plan(), loss_fn=classify, filter=DiSK(), seed=5)
        for batch in private.loader(vectors()):
            if look:
                classify(model, vectors().tensors).sum().backward()
            private.step(batch)
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False)))


# --- parameters that the loss does not reach --------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.unused(x)
        return self.used(x)


def test_a_trainable_parameter_without_gradient_is_refused_before_training() -> None:
    model = Branches()
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), make_plan(), loss_fn=classify)
    with pytest.raises(GradientError, match=r"unused\.weight, unused\.bias.*requires_grad_"):
        private.loader(vectors())
    model.unused.requires_grad_(False)
    again = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), make_plan(), loss_fn=classify)
    assert len(again.loader(vectors())) == 6


def test_units_are_checked_where_they_are_named() -> None:
    """At most two records of a unit: three are refused before training, and nobody's word goes unremarked."""
    model = nn.Linear(6, 3)
    plan = Plan(dataset_size=12, batch_size=4, steps=2, noise_multiplier=2.0, delta=1e-3, examples_per_unit=2)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
    )
    records = torch.utils.data.TensorDataset(torch.randn(12, 6), torch.randint(0, 3, (12,)))
    with pytest.raises(SamplingError, match="2"):
        private.loader(records, units=[0] * 3 + list(range(1, 10)))
    for batch in private.loader(records, units=[0, 0, 1, 1, *range(2, 10)]):
        private.step(batch)
    assert private.epsilon == plan.epsilon
    with pytest.warns(UncheckedUnitsWarning, match="pass units="):
        private.loader(records)
