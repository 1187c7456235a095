"""Noise-aware Adam, scaling before privatisation, Muon, joined optimizers: slow references, and private runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from diskdp import DiSK, LowPass, NoFilter, Plan, clipped_gradient, privatize
from diskdp.errors import CheckpointError, FilterError, NotPrivateWarning, OptimizerError
from diskdp.filters import Filter
from diskdp.optim import (
    Joined,
    NoiseAwareAdam,
    ScaleThenPrivatise,
    correlated_noise_variance,
    noise_std,
    scale_parameters,
    unscale_parameters,
)
from tests import oracle
from tests.models import classify

N, STEPS = 60, 8
SHAPES = [(3, 4), (5,), ()]


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, 5).double(), torch.randint(0, 3, (N,)))


def make_plan(noise_multiplier: float = 1.5, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"dataset_size": N, "batch_size": 12, "steps": STEPS, "delta": 1e-3, "max_grad_norm": 0.4}
    fields.update(changes)
    if noise_multiplier == 0:
        with pytest.warns(NotPrivateWarning):
            return Plan(noise_multiplier=0.0, **fields)
    return Plan(noise_multiplier=noise_multiplier, **fields)


def slow_adam(
    start: float,
    gradients: list[float],
    variances: list[float],
    lr: Callable[[int], float],
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
    floor: float,
) -> float:
    """One coordinate, every moment summed anew over the whole past."""
    x, seen = start, []
    for t, gradient in enumerate(gradients, start=1):
        if decoupled:
            x -= lr(t) * decay * x
        seen.append(gradient if decoupled else gradient + decay * x)
        weights1 = [(1 - betas[0]) * betas[0] ** (t - s) for s in range(1, t + 1)]
        weights2 = [(1 - betas[1]) * betas[1] ** (t - s) for s in range(1, t + 1)]
        m = sum(w * g for w, g in zip(weights1, seen)) / sum(weights1)
        v = sum(w * g**2 for w, g in zip(weights2, seen)) / sum(weights2)
        n = sum(w * nu for w, nu in zip(weights2, variances)) / sum(weights2)
        x -= lr(t) * m / (math.sqrt(max(v - n, floor * n)) + eps)
    return x


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("filter", "autocovariance"),
    [(NoFilter(), [1.0]), (DiSK(kappa=0.3), [1.0]), (LowPass(a=[1.0, -0.8], b=[0.2]), [1.0, -0.4])],
)
def test_adam_against_the_slow_reference(filter: Filter, autocovariance: list[float], decoupled: bool) -> None:
    torch.manual_seed(3)
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    start = torch.cat([w.detach().reshape(-1).clone() for w in weights])
    groups = [{"params": weights[:1]}, {"params": weights[1:], "floor": 0.3}]
    settings: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "decoupled": decoupled}
    optimizer = NoiseAwareAdam(
        groups, lr=0.05, noise_std=0.7, filter=filter, autocovariance=autocovariance, floor=0.05, **settings
    )
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    steps = 12
    gradients = torch.randn(steps, len(start), dtype=torch.float64)
    for gradient in gradients:
        parts = gradient.split([w.numel() for w in weights])
        for weight, part in zip(weights, parts):
            weight.grad = part.reshape(weight.shape).clone()
        optimizer.step()
        schedule.step()
    lags = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    covariance = np.where(lags < len(autocovariance), np.take(autocovariance, lags, mode="clip"), 0.0)
    variances = (0.7**2 * correlated_noise_variance(filter, covariance)).tolist()
    found = torch.cat([w.detach().reshape(-1) for w in weights])
    floored = 0
    for i in range(len(start)):
        floor = 0.05 if i < weights[0].numel() else 0.3
        own = gradients[:, i].tolist()
        floored += np.mean(np.square(own)) < (1 + floor) * np.mean(variances)
        expected = slow_adam(
            start[i].item(), own, variances, lambda t: 0.05 / t, (0.8, 0.95), 1e-3, 0.1, decoupled, floor
        )
        assert found[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert 0 < floored < len(start) or not isinstance(filter, NoFilter)  # both sides of the maximum were taken


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_noise_it_is_torchs(decoupled: bool) -> None:
    ours, theirs = make_model(), make_model()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    mine = NoiseAwareAdam(ours.parameters(), lr=0.03, weight_decay=0.2, noise_std=0.0, decoupled=decoupled)
    reference = kind(theirs.parameters(), lr=0.03, weight_decay=0.2)
    for step in range(20):
        torch.manual_seed(step)
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("filter", "autocovariance"),
    [
        (NoFilter(), [1.0]),
        (DiSK(kappa=0.1), [1.0]),
        (DiSK(kappa=0.5), [2.0, -1.0]),
        (LowPass(a=[1.0, -0.9], b=[0.1]), [1.0]),
    ],
)
def test_subtraction_leaves_nothing_of_noise_alone(filter: Filter, autocovariance: list[float]) -> None:
    """E[v̂ - n̂] = 0 at every step from the first: 30 steps, 6.5 standard errors each: false alarms below 3e-9."""
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.zeros(200_000, dtype=torch.float64))
    optimizer = NoiseAwareAdam([weight], noise_std=0.5, filter=filter, autocovariance=autocovariance)
    state = filter.start()
    previous = torch.randn(len(weight), generator=generator, dtype=torch.float64)
    for _ in range(30):
        z = torch.randn(len(weight), generator=generator, dtype=torch.float64)
        noise = z if len(autocovariance) == 1 else z - previous
        previous = z
        [filtered] = state.update([0.5 * noise])
        weight.grad = filtered.clone()
        optimizer.step()
        held = optimizer.state[weight]
        v = held["exp_avg_sq"]
        error = (v.mean() - held["noise"]).abs().item()
        assert error < 6.5 * v.std().item() / math.sqrt(len(weight))


def test_given_variances_stand_for_any_filter() -> None:
    filter = DiSK(kappa=0.3)
    known = correlated_noise_variance(filter, np.eye(STEPS)).tolist()
    by_formula, by_hand = make_model(), make_model()
    for model, settings in ((by_formula, {"filter": filter}), (by_hand, {"variances": known})):
        optimizer = NoiseAwareAdam(model.parameters(), noise_std=0.2, **settings)  # type: ignore[arg-type]
        torch.manual_seed(0)
        for _ in range(STEPS):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
    for p, q in zip(by_formula.parameters(), by_hand.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    with pytest.raises(OptimizerError, match=f"this is step {STEPS}"):
        optimizer.step()
    optimizer.check_fits(make_plan(noise_multiplier=0.2 * 12 / 0.4), filter)
    with pytest.raises(OptimizerError, match="give one a step"):
        optimizer.check_fits(make_plan(noise_multiplier=0.2 * 12 / 0.4, steps=STEPS + 1), filter)


def test_settings_are_checked() -> None:
    weight = nn.Parameter(torch.zeros(2))
    good: dict[str, Any] = {"noise_std": 0.1}
    for name, value in (
        ("lr", -1.0),
        ("betas", (0.9, 1.0)),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("noise_std", math.nan),
        ("floor", 0.0),
        ("floor", 1.5),
        ("variances", []),
        ("variances", [-1.0]),
    ):
        with pytest.raises(OptimizerError, match=name):
            NoiseAwareAdam([weight], **{**good, name: value})
    with pytest.raises(OptimizerError, match="nothing would bound"):
        NoiseAwareAdam([weight], noise_std=0.0, eps=0.0)
    with pytest.raises(OptimizerError, match="bfloat16"):
        NoiseAwareAdam([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], noise_std=0.1)
    plan, filter = make_plan(), DiSK()
    optimizer = NoiseAwareAdam([weight], noise_std=noise_std(plan, filter), filter=filter)
    optimizer.check_fits(plan, filter)
    with pytest.raises(OptimizerError, match="same filter"):
        optimizer.check_fits(plan, DiSK(kappa=0.5))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for checked in (optimizer, Joined(other, optimizer)):
        checked.check_fits(plan, filter)
        with pytest.raises(OptimizerError, match="the plan adds"):
            checked.check_fits(make_plan(noise_multiplier=1.6), filter)


def muon_and_adam(model: nn.Module) -> Joined:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return Joined(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01))


FILTER = DiSK(kappa=0.4, gamma=0.5)
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
OPTIMIZERS = [
    pytest.param(
        lambda model: NoiseAwareAdam(
            model.parameters(), lr=0.02, noise_std=noise_std(make_plan(), FILTER), filter=FILTER
        ),
        id="noise-aware",
    ),
    pytest.param(muon_and_adam, id="muon", marks=needs_muon),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_private_training_goes_on_from_a_file(
    make: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Eight steps at once, and four, saved, and four: the same weights bit for bit, schedule included."""

    def training(model: nn.Module) -> dict[str, Any]:
        optimizer = make(model)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "scheduler": schedule, "loss_fn": classify, "filter": FILTER, "seed": 4}

    whole, parts, resumed = make_model(), make_model(), make_model(seed=9)
    private = privatize(whole, plan=make_plan(), **training(whole))
    for batch in private.loader(make_data()):
        private.step(batch)
    rates = [group["lr"] for group in private.optimizer.param_groups]
    assert all(rate < 0.003 for rate in rates)  # the schedule reached every group
    private = privatize(parts, plan=make_plan(), **training(parts))
    for batch, _ in zip(private.loader(make_data()), range(4)):
        private.step(batch)
    private.save(tmp_path / "state")
    private = privatize.resume(tmp_path / "state", resumed, plan=make_plan(), **training(resumed))
    for batch in private.loader(make_data()):
        private.step(batch)
    for p, q, r in zip(whole.parameters(), resumed.parameters(), make_model().parameters()):
        assert torch.equal(p, q)
        assert not torch.equal(p, r)


@needs_muon
@pytest.mark.parametrize("filter", [NoFilter(), DiSK(), LowPass(a=[1.0, -0.9], b=[0.1])], ids=repr)
def test_muon_learns_privately(filter: Filter) -> None:
    """A separable task under mild noise is learned, with Muon stepping along filtered gradients."""
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x[:, :3].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    plan = Plan(dataset_size=400, batch_size=100, steps=60, noise_multiplier=1.0, delta=1e-4)
    private = privatize(model, muon_and_adam(model), plan, loss_fn=classify, filter=filter, seed=0)
    for batch in private.loader(TensorDataset(x, y)):
        private.step(batch)
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def test_joined_steps_as_its_parts_do() -> None:
    one, other = make_model(), make_model()
    groups = [list(one[0].parameters()), list(one[2].parameters())]  # type: ignore[index]
    joined = Joined(torch.optim.SGD(groups[0], lr=0.1, momentum=0.9), torch.optim.Adam(groups[1], lr=0.01))
    sgd = torch.optim.SGD(other[0].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    adam = torch.optim.Adam(other[2].parameters(), lr=0.01)  # type: ignore[index]
    for step in range(5):
        for p, q in zip(one.parameters(), other.parameters()):
            torch.manual_seed(step)
            p.grad, q.grad = torch.randn_like(p), None
            q.grad = p.grad.clone()
        assert joined.step(lambda: 3.0) == 3.0
        sgd.step()
        adam.step()
        state = copy.deepcopy(joined.state_dict())
        joined.load_state_dict(state)
        joined.param_groups[0]["lr"] = sgd.param_groups[0]["lr"] = 0.1 / (1 + step)  # still the part's own group
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))
    with pytest.raises(CheckpointError, match="2 joined"):
        joined.load_state_dict(sgd.state_dict())
    with pytest.raises(OptimizerError, match="two of the joined"):
        Joined(sgd, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="at least one"):
        Joined()
    with pytest.raises(OptimizerError, match="join them then"):
        joined.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def with_random_scales(model: nn.Module) -> dict[str, Tensor]:
    """Scales from 1/20 to 20, weights kept; by the weight's plain name."""
    scale_parameters(model)
    scales = {}
    for path, module in model.named_modules():
        if path.endswith(("parametrizations.weight", "parametrizations.bias")):
            torch.manual_seed(len(scales))
            held = module[0]  # type: ignore[index]
            factor = torch.exp(torch.empty_like(held.scale).uniform_(-3, 3))
            held.scale.mul_(factor)
            module.original.data.div_(factor)
            scales[path.replace("parametrizations.", "")] = held.scale
    return scales


@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized", "per-layer"])
def test_scaled_gradients_are_what_is_clipped(clipping: str) -> None:
    """Against a loop over examples of the plain model: no example contributes more than S, whatever the scales."""
    plain, scaled = make_model(), make_model()
    scales = with_random_scales(scaled)
    data = make_data()
    batch = tuple(t[:20] for t in data.tensors)
    inner = {n: ".parametrizations.".join(n.split(".")) + ".original" for n in scales}
    gradients = [{inner[n]: g * scales[n] for n, g in e.items()} for e in oracle.per_example(plain, batch, classify)]
    lengths = [math.sqrt(sum(t.square().sum().item() for t in g.values())) for g in gradients]
    threshold = float(np.median(lengths))
    expected = oracle.clipped(gradients, clipping, threshold)
    found, norms = clipped_gradient(scaled, batch, classify, max_norm=threshold, clipping=clipping)
    assert oracle.relative_error(found, expected) < 1e-10
    torch.testing.assert_close(norms.reshape(-1), torch.tensor(lengths, dtype=norms.dtype), rtol=1e-9, atol=0)
    bound = 1.0 if clipping == "normalized" else threshold
    for i in range(20):
        alone, _ = clipped_gradient(
            scaled, tuple(t[i : i + 1] for t in batch), classify, max_norm=threshold, clipping=clipping
        )
        assert math.sqrt(sum(g.square().sum().item() for g in alone.values())) <= bound * (1 + 1e-12)


def test_scale_then_privatise_against_the_slow_reference() -> None:
    """A whole run without noise, by hand on the plain weights: scale, clip, average, unscale, Adam, new scales."""
    plan = make_plan(noise_multiplier=0, batch_size=N, sampling="poisson")
    model, plain = make_model(), make_model()
    scale_parameters(model)
    optimizer = ScaleThenPrivatise(model, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1, damping=0.2)
    optimizer.check_fits(plan, NoFilter())
    private = privatize(model, optimizer, plan, loss_fn=classify, filter=NoFilter(), seed=0)
    data = make_data()
    for batch in private.loader(data):
        private.step(batch)

    weights = dict(plain.named_parameters())
    scales = {n: torch.ones_like(p) for n, p in weights.items()}
    past: list[dict[str, Tensor]] = []
    for t in range(1, STEPS + 1):
        examples = oracle.per_example(plain, data.tensors, classify)
        total = oracle.clipped([{n: g * scales[n] for n, g in e.items()} for e in examples], "flat", 0.4)
        past.append({n: g / N / scales[n] for n, g in total.items()})
        sizes = {}
        for n, p in weights.items():
            weights1 = [0.8 ** (t - s) for s in range(1, t + 1)]
            weights2 = [0.95 ** (t - s) for s in range(1, t + 1)]
            m = sum(w * g[n] for w, g in zip(weights1, past)) / sum(weights1)
            sizes[n] = (sum(w * g[n] ** 2 for w, g in zip(weights2, past)) / sum(weights2)).sqrt()
            p.data = p.data * (1 - 0.05 * 0.1) - 0.05 * m / (sizes[n] + 1e-8)
        everything = torch.cat([v.reshape(-1) for v in sizes.values()])
        inverse = 1 / (everything + 0.2 * everything.square().mean().sqrt())
        norm = inverse.square().mean().sqrt()
        scales = {n: 1 / (v + 0.2 * everything.square().mean().sqrt()) / norm for n, v in sizes.items()}
    unscale_parameters(model)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert "parametrizations" not in name
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def test_scales_go_on_from_a_file(tmp_path: Path) -> None:
    def training(model: nn.Module) -> dict[str, Any]:
        scale_parameters(model)
        optimizer = ScaleThenPrivatise(model, lr=0.05)
        return {"optimizer": optimizer, "loss_fn": classify, "filter": NoFilter(), "seed": 4}

    whole, parts, resumed = make_model(), make_model(), make_model(seed=9)
    private = privatize(whole, plan=make_plan(), **training(whole))
    for batch in private.loader(make_data()):
        private.step(batch)
    private = privatize(parts, plan=make_plan(), **training(parts))
    for batch, _ in zip(private.loader(make_data()), range(4)):
        private.step(batch)
    private.save(tmp_path / "state")
    private = privatize.resume(tmp_path / "state", resumed, plan=make_plan(), **training(resumed))
    for batch in private.loader(make_data()):
        private.step(batch)
    for (name, t), other in zip(whole.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(t, other), name


def test_what_cannot_be_scaled_is_refused() -> None:
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    with pytest.raises(OptimizerError, match=r"0\.weight: shared"):
        scale_parameters(tied)
    with pytest.raises(OptimizerError, match="recurrent"):
        scale_parameters(nn.LSTM(3, 3))
    model = make_model()
    with pytest.raises(OptimizerError, match="call scale_parameters"):
        ScaleThenPrivatise(model)
    scale_parameters(model)
    with pytest.raises(OptimizerError, match="already"):
        scale_parameters(model)
    with pytest.raises(OptimizerError, match="damping"):
        ScaleThenPrivatise(model, damping=0.0)
    with pytest.raises(OptimizerError, match="NoFilter"):
        ScaleThenPrivatise(model).check_fits(make_plan(), DiSK())


def test_privatize_asks_optimizers_that_count_on_some_noise() -> None:
    model, plan = make_model(), make_plan()
    wrong = NoiseAwareAdam(model.parameters(), lr=0.1, noise_std=1.0, filter=NoFilter())
    with pytest.raises(OptimizerError, match="the plan adds"):
        privatize(model, wrong, plan, loss_fn=classify, filter=NoFilter())
    std = noise_std(plan, NoFilter())
    other = NoiseAwareAdam(model.parameters(), lr=0.1, noise_std=std, filter=NoFilter())
    with pytest.raises(OptimizerError, match="give both the same filter"):
        privatize(model, other, plan, loss_fn=classify, filter=DiSK())
    with pytest.raises(FilterError, match="not known by a formula"):
        NoiseAwareAdam(model.parameters(), lr=0.1, noise_std=std, filter=DiSK(gain="adaptive"))
    privatize(model, other, plan, loss_fn=classify, filter=NoFilter())


def test_joined_optimizers_pass_the_question_on_to_every_part() -> None:
    """Whatever part can answer is asked, scaling too, which takes no filter."""
    model, plan = make_model(), make_plan()
    scale_parameters(model)
    both = Joined(ScaleThenPrivatise(model, lr=0.1))
    with pytest.raises(OptimizerError, match="different scales"):
        both.check_fits(plan, DiSK())
    both.check_fits(plan, NoFilter())
