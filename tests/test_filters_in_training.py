"""Filters that change, and filters that follow the weights, in a private training: against recursions written down."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, privatize, wrap_optimizer
from diskdp.errors import FilterError
from diskdp.filters import (
    AdaptiveGain,
    CurvatureKalman,
    Filter,
    FullKalman,
    GainSchedule,
    KalmanGain,
    LowPass,
    due_coefficients,
    gains,
    public_curvature,
    started,
)
from diskdp.filters.varying import VaryingAverage
from diskdp.private import PrivateTraining
from diskdp.wrapper import FilteredOptimizer
from tests import oracle
from tests.models import classify
from tests.test_private import OPTIMIZERS, STEPS, N, make_data, make_model, make_plan, members

SCHEDULE = GainSchedule.geometric(0.9, 0.2, steps=12)
KALMAN = KalmanGain(1.0, 0.1, 0.05)


def train(filter: Filter, optimizer: str = "sgd", seed: int | None = 3, **plan: Any) -> tuple[nn.Module, list[float]]:
    """A whole run: the model, and c of each step as the state offers it before."""
    model = make_model()
    private = privatize(
        model, OPTIMIZERS[optimizer](model.parameters()), make_plan(**plan), loss_fn=classify, filter=filter, seed=seed
    )
    weights = []
    for batch in private.loader(make_data()):
        weights.append(due_coefficients(filter, private._filter_state)[1])
        private.step(batch)
    return model, weights


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("gamma", [0.5, -1.0, None])
@pytest.mark.parametrize("gain", [SCHEDULE, KALMAN])
def test_follows_the_recursion(gain: Any, gamma: float | None, optimizer: str) -> None:
    """A loop over examples with explicit κ_t, c_t, d and g̃."""
    plan = make_plan()
    probe_model = make_model()
    probe = privatize(probe_model, OPTIMIZERS["sgd"](probe_model.parameters()), plan, loss_fn=classify, seed=3)
    model = make_model()
    step_of = OPTIMIZERS[optimizer](model.parameters())
    parameters = dict(model.named_parameters())
    d = {name: torch.zeros_like(p) for name, p in parameters.items()}
    average: dict[str, Tensor] | None = None
    variances = (1.0, 0.1, 0.05)
    kappas = (
        [1.0, *gains.recursion(*variances, steps=STEPS).gain]
        if gain is KALMAN
        else [0.9 * (0.2 / 0.9) ** (min(t, 11) / 11) for t in range(STEPS)]
    )
    for kappa, batch in zip(kappas, members(probe, make_data())):
        c = 0.0 if gamma is None else (1 - kappa) / (kappa * gamma)
        x = {name: p.detach().clone() for name, p in parameters.items()}
        ahead = {name: x[name] + (gamma or 0) * d[name] for name in x}
        total = oracle.clipped(
            oracle.per_example(model, batch, classify, [(1 - c, x), (c, ahead)]), plan.clipping, plan.max_grad_norm
        )
        g = {name: t / plan.batch_size for name, t in total.items()}
        average = g if average is None else {n: (1 - kappa) * average[n] + kappa * g[n] for n in g}
        for name, p in parameters.items():
            p.grad = average[name].clone()
        step_of.step()
        d = {name: p.detach() - x[name] for name, p in parameters.items()}
    found, _ = train(DiSK(gamma=gamma, gain=gain), optimizer)
    exact = {name: p.detach() for name, p in parameters.items()}
    assert oracle.relative_error({n: p.detach() for n, p in found.named_parameters()}, exact) < 1e-6


def test_an_adaptive_gain_is_told_the_noise_of_the_plan() -> None:
    """(σS/B)²: the same run as with that number given; and not the same with another."""
    sigma = 0.8
    plan = {"noise_multiplier": sigma}
    told, weights = train(DiSK(gain=AdaptiveGain(largest_weight=math.inf)), **plan)
    exact = (sigma * 0.4 / 12) ** 2
    given, same = train(DiSK(gain=AdaptiveGain(noise_var=exact, largest_weight=math.inf)), **plan)
    _, others = train(DiSK(gain=AdaptiveGain(noise_var=4 * exact, largest_weight=math.inf)), **plan)
    assert all(torch.equal(a, b) for a, b in zip(told.parameters(), given.parameters()))
    assert weights == same != others
    assert weights[1] == weights[11] == -2.0  # every tenth step measures: c = -1/γ
    assert len(set(weights)) > 5


@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized"])
def test_one_example_contributes_no_more_than_s_whatever_c_is(clipping: str) -> None:
    """κ down to .03, c up to 65; batches of one example (of 60, expected 1), no noise: ‖g_t‖ ≤ S/B."""
    filter = DiSK(gamma=0.5, gain=GainSchedule.geometric(0.9, 0.03, steps=STEPS))
    model = make_model()
    plan = make_plan(batch_size=1, sampling="fixed-size", adjacency="replace-one", clipping=clipping)
    private = privatize(model, OPTIMIZERS["sgd"](model.parameters()), plan, loss_fn=classify, filter=filter, seed=3)
    limit = private.clipper.sensitivity
    assert private.sensitivity == limit
    norms: list[float] = []
    update = private._filter_state.update

    def seen(gradients: list[Tensor]) -> list[Tensor]:
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
        return update(gradients)

    private._filter_state.update = seen  # type: ignore[method-assign]
    largest = 0.0
    for batch in private.loader(make_data()):
        largest = max(largest, *map(abs, due_coefficients(filter, private._filter_state)))
        private.step(batch)
    assert largest > 60
    assert len(norms) == STEPS
    assert max(norms) <= limit
    assert max(norms) > 0.9 * limit


def test_weights_that_change_are_refused_with_separate_clipping() -> None:
    """Also for a filter of one's own, which DiSK's own check does not see."""

    class Other:
        coefficients = (0.5, 0.5)
        lookahead = 0.5
        clip = "separate"

        def start(self) -> VaryingAverage:
            return VaryingAverage(SCHEDULE.start(0.7, 0.5), 0.5, None)

    model = make_model()
    with pytest.raises(FilterError, match="joint"):
        privatize(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            make_plan(),
            loss_fn=classify,
            filter=Other(),  # type: ignore[arg-type]
        )
    with pytest.raises(FilterError, match="joint"):
        started(Other(), 1.0)  # type: ignore[arg-type]


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 0.5 * (model(batch[0]).squeeze(1) - batch[1]).square()


def regression() -> tuple[nn.Module, TensorDataset, np.ndarray]:
    """Least squares in 4 unknowns, and its curvature."""
    torch.manual_seed(2)
    x = torch.randn(N, 4, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
    return model, TensorDataset(x, y), (x.T @ x / N).numpy()


def released_and_filtered(filter: Filter, **plan: Any) -> tuple[PrivateTraining, list[np.ndarray], list[np.ndarray]]:
    """What the filter was given and what the optimizer got, in a run on the regression."""
    model, data, _ = regression()
    private = privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.3), make_plan(**plan), loss_fn=squared, filter=filter, seed=3
    )
    given, made = [], []
    state = private._filter_state
    update = state.update

    def seen(gradients: list[Tensor]) -> list[Tensor]:
        given.append(gradients[0].double().numpy().reshape(-1).copy())
        result = update(gradients)
        made.append(result[0].double().numpy().reshape(-1).copy())
        return result

    state.update = seen  # type: ignore[method-assign]
    for batch in private.loader(data):
        private.step(batch)
    return private, given, made


def test_a_full_filter_in_training_is_the_plain_one_on_what_was_released() -> None:
    """numpy's textbook lines over the released gradients, d = -η g̃, H declared; Σ_w told by the plan."""
    H = regression()[2]
    q = 1e-4
    _, given, made = released_and_filtered(FullKalman(process_var=q, curvature=H), noise_multiplier=0.8)
    w = (0.8 * 0.4 / 12) ** 2
    mean, P = given[0], w * np.eye(4)
    for g, exact in zip(given[1:], made[1:]):
        mean, P = mean + H @ (-0.3 * mean), P + q * np.eye(4)
        K = P @ np.linalg.inv(P + w * np.eye(4))
        mean, P = mean + K @ (g - mean), (np.eye(4) - K) @ P
        assert np.allclose(mean, exact, rtol=1e-9, atol=1e-12)


def test_a_public_curvature_and_a_learned_one_run_in_training() -> None:
    model, data, H = regression()
    public = (data.tensors[0], data.tensors[1])  # here as if it were public
    filter = FullKalman(process_var=1e-4, curvature=public_curvature(model, public, squared))
    _, given, exact = released_and_filtered(FullKalman(process_var=1e-4, curvature=H), noise_multiplier=0.8)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        make_plan(noise_multiplier=0.8),
        loss_fn=squared,
        filter=filter,
        seed=3,
    )
    for batch in private.loader(data):
        private.step(batch)
    ending = next(p.detach().numpy().reshape(-1) for p in model.parameters())
    assert np.allclose(ending, -0.3 * np.sum(exact, axis=0), rtol=1e-7)  # linear: differences are H d
    _, _, learned = released_and_filtered(CurvatureKalman(curvature_var=1.0), noise_multiplier=0.8)
    assert len(learned) == STEPS
    assert not np.allclose(learned[-1], given[-1])


@pytest.mark.parametrize(
    "filter",
    [
        DiSK(gain=KALMAN),
        DiSK(gain=SCHEDULE),
        DiSK(gain=AdaptiveGain(measure_every=4)),
        LowPass.butterworth(2, 0.3),
        FullKalman(process_var=0.01, curvature=np.diag(np.linspace(0.1, 1.0, 66))),
        CurvatureKalman(0.5),
    ],
    ids=lambda f: type(getattr(f, "gain", f)).__name__,
)
def test_a_seeded_run_goes_on_bit_for_bit(filter: Filter, tmp_path: Path) -> None:
    whole, _ = train(filter, "adamw", noise_multiplier=1.0)
    plan, data = make_plan(noise_multiplier=1.0), make_data()
    model = make_model()
    private = privatize(model, OPTIMIZERS["adamw"](model.parameters()), plan, loss_fn=classify, filter=filter, seed=3)
    for batch in private.loader(data):
        private.step(batch)
        if private.steps_done == 9:
            break
    private.save(tmp_path / "state")
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    private = privatize.resume(tmp_path / "state", model, optimizer, plan, loss_fn=classify, filter=filter, seed=3)
    for batch in private.loader(data):
        private.step(batch)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters()))


def test_a_wrapped_optimizer_reads_the_due_weights() -> None:
    """Quadratic without noise: κ_t of the schedule, by hand."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    gain = GainSchedule((1.0, 0.5, 0.25))
    optimizer = FilteredOptimizer(torch.optim.SGD([weight], lr=0.1), DiSK(gamma=0.5, gain=gain))

    def closure() -> None:
        weight.grad = weight.detach().clone()

    x, d, average = 2.0, 0.0, None
    for kappa in (1.0, 0.5, 0.25, 0.25):
        c = (1 - kappa) / (kappa * 0.5)
        g = (1 - c) * x + c * (x + 0.5 * d)
        average = g if average is None else (1 - kappa) * average + kappa * g
        d = -0.1 * average
        x += d
        optimizer.prestep(closure)
        optimizer.step()
        assert weight.item() == pytest.approx(x, rel=1e-12)


def test_nesterovs_form_as_it_really_holds() -> None:
    """γ = (1-κ)/κ, SGD: m = -d obeys m_t = (1-κ) m_{t-1} + ηκ ∇F(x_t - ((1-κ)/κ) m_{t-1}).

    That is Nesterov's form (momentum μ = 1-κ) looking ahead by m/κ·μ where it looks ahead by μ m: 1/κ times as far.
    """
    kappa, rate = 0.4, 0.2
    weight = nn.Parameter(torch.tensor([1.5, -0.5], dtype=torch.float64))
    optimizer = wrap_optimizer(torch.optim.SGD([weight], lr=rate), kappa=kappa, gamma=(1 - kappa) / kappa)

    def gradient(x: Tensor) -> Tensor:
        return x + 0.3 * torch.sin(3 * x)

    def closure() -> None:
        weight.grad = gradient(weight.detach())

    x = weight.detach().clone()
    m = rate * gradient(x)  # the first step starts at g̃ = g_0
    nesterov, held = x - m, m.clone()
    x = x - m
    apart = 0.0
    optimizer.prestep(closure)
    optimizer.step()
    for _ in range(20):
        m = (1 - kappa) * m + rate * kappa * gradient(x - (1 - kappa) / kappa * m)
        x = x - m
        held = (1 - kappa) * held + rate * kappa * gradient(nesterov - (1 - kappa) * held)
        nesterov = nesterov - held
        optimizer.prestep(closure)
        optimizer.step()
        assert torch.allclose(weight.detach(), x, rtol=1e-12, atol=0)
        apart = max(apart, float((x - nesterov).abs().max()))
    assert apart > 0.01
