"""Gains that change: κ_t and c_t against the recursions written down, and what an adaptive gain finds."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from diskdp import DiSK, NoFilter
from diskdp.errors import CheckpointError, FilterError
from diskdp.filters import AdaptiveGain, GainSchedule, KalmanGain, due_coefficients, gains, started
from diskdp.filters.varying import VaryingAverage

GAINS: list[Any] = [
    KalmanGain(1.0, 0.1, 0.05),
    KalmanGain(0.2, 0.5, 0.05, kind="least-squares"),
    GainSchedule.linear(0.9, 0.2, steps=7),
    GainSchedule.geometric(0.9, 0.05, steps=7),
    GainSchedule.cosine(0.9, 0.2, steps=7),
    AdaptiveGain(noise_var=1.0, measure_every=3),
]


def kappas(gain: Any, steps: int) -> list[float]:
    """κ of each step; for the adaptive one only where it starts."""
    if isinstance(gain, KalmanGain):
        variances = (gain.observation_var, gain.hessian_var, gain.process_var)
        return [1.0, *gains.recursion(*variances, steps=steps - 1, kind=gain.kind).gain]
    return [gain.values[min(t, len(gain.values) - 1)] for t in range(steps)]


@pytest.mark.parametrize("gamma", [0.5, -1.0, None])
@pytest.mark.parametrize("gain", GAINS[:-1], ids=repr)
def test_kappa_and_c_of_each_step(gain: Any, gamma: float | None) -> None:
    filter = DiSK(gamma=gamma, gain=gain)
    state = filter.start()
    rng = np.random.default_rng(0)
    average = None
    for kappa in kappas(gain, 12):
        assert isinstance(state, VaryingAverage)
        assert state.kappa == pytest.approx(kappa)
        here, ahead = due_coefficients(filter, state)
        assert ahead == pytest.approx(0 if gamma is None else (1 - kappa) / (kappa * gamma))
        assert here == pytest.approx(1 - ahead)
        g = rng.standard_normal(5)
        average = g if average is None else (1 - kappa) * average + kappa * g
        found = state.update([torch.tensor(g[:2]), torch.tensor(g[2:])])
        assert np.allclose(torch.cat(found).numpy(), average, rtol=1e-12)


def test_c_may_be_free_of_kappa() -> None:
    filter = DiSK(c=0.25, gain=GainSchedule((1.0, 0.5, 0.1)))
    state = filter.start()
    assert filter.coefficients == (0.75, 0.25)
    for _ in range(4):
        assert due_coefficients(filter, state) == (0.75, 0.25)
        state.update([torch.ones(1)])


def test_a_constant_gain_is_as_it_was() -> None:
    assert repr(DiSK(0.5, 0.5)) == "DiSK(kappa=0.5, gamma=0.5, clip='joint', c=None)"
    assert DiSK(0.5, 0.5) == DiSK(0.5, 0.5, gain="constant")
    state, varying = DiSK(0.3, 0.5).start(), DiSK(gain=GainSchedule((0.3,))).start()
    assert set(state.state_dict()) == {"filtered"}
    assert due_coefficients(NoFilter(), NoFilter().start()) == (1.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradients = [torch.randn(7, generator=generator)]
        assert torch.equal(state.update(gradients)[0], varying.update(gradients)[0])
        assert due_coefficients(DiSK(0.3, 0.5), state) == varying.coefficients  # type: ignore[attr-defined]


def test_what_two_points_are_is_said_before_the_first_step() -> None:
    filter = DiSK(gain="adaptive")
    assert filter.lookahead == 0.5
    assert all(filter.coefficients)
    assert DiSK(gamma=None, gain="adaptive").coefficients == (1.0, 0.0)


@pytest.mark.parametrize("gain", GAINS, ids=repr)
def test_states_go_on_and_fit_no_other_gain(gain: Any) -> None:
    filter = DiSK(gain=gain)
    whole, generator = filter.start(), torch.Generator().manual_seed(1)
    stream = [torch.randn(50, generator=generator) for _ in range(20)]
    for g in stream[:9]:
        whole.update([g])
    saved = copy.deepcopy(whole.state_dict())
    resumed = filter.start()
    resumed.load_state_dict(saved)
    for g in stream[9:]:
        assert due_coefficients(filter, resumed) == due_coefficients(filter, whole)
        assert torch.equal(resumed.update([g])[0], whole.update([g])[0])
    for other in GAINS:
        if type(other) is not type(gain):
            with pytest.raises(CheckpointError):
                DiSK(gain=other).start().load_state_dict(saved)
    with pytest.raises(CheckpointError):
        DiSK(gain=gain).start().load_state_dict(DiSK().start().state_dict())
    assert len({repr(DiSK(gain=g)) for g in GAINS}) == len(GAINS)


def test_long_schedules_are_told_apart_by_their_repr() -> None:
    one, other = GainSchedule.linear(0.9, 0.2, steps=100), GainSchedule.linear(0.9, 0.2001, steps=100)
    assert repr(one) != repr(other)
    assert len(repr(one)) < 80


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiSK(gain="kalman"), "needs variances"),
        (lambda: DiSK(gain="best"), "must be 'constant'"),
        (lambda: DiSK(gain=0.5), "must be 'constant'"),
        (lambda: DiSK(gain="adaptive", clip="separate"), "joint"),
        (lambda: DiSK(gain=GAINS[0], clip="separate", c=0.5), "joint"),
        (lambda: DiSK(gain="adaptive", c=0.5), "sets c itself"),
        (lambda: DiSK(kappa=0.3, gain=GAINS[0]), "two answers"),
        (lambda: KalmanGain(1.0, 0.0, 0.0), "falls to 0"),
        (lambda: KalmanGain(1.0, 2.0, 0.0), "least-squares"),
        (lambda: KalmanGain(1.0, -2.0, 0.0), "hessian_var"),
        (lambda: GainSchedule(()), "at least one"),
        (lambda: GainSchedule((0.5, 0.0)), r"\(0, 1\]"),
        (lambda: GainSchedule((0.5, math.nan)), r"\(0, 1\]"),
        (lambda: GainSchedule("x"), "numbers"),  # type: ignore[arg-type]
        (lambda: GainSchedule.linear(0.5, 0.1, steps=1), "steps"),
        (lambda: GainSchedule.geometric(0.5, 0.0, steps=3), "first"),
        (lambda: AdaptiveGain(noise_var=-1.0), "noise_var"),
        (lambda: AdaptiveGain(smallest=0.0), "smallest"),
        (lambda: AdaptiveGain(memory=1.0), "memory"),
        (lambda: AdaptiveGain(memory="1"), "memory"),  # type: ignore[arg-type]
        (lambda: AdaptiveGain(largest_weight=0.0), "largest_weight"),
        (lambda: AdaptiveGain(largest_weight=math.nan), "largest_weight"),
        (lambda: AdaptiveGain(measure_every=1), "measure_every"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(FilterError, match=message):
        make()


def test_a_weight_that_overflows_is_refused_before_the_step() -> None:
    filter = DiSK(gamma=1e-200, gain=GainSchedule((0.5, 1e-200)))
    state = filter.start()
    state.update([torch.ones(1)])
    with pytest.raises(FilterError, match="not finite"):
        due_coefficients(filter, state)


def test_an_adaptive_gain_needs_to_know_the_noise() -> None:
    with pytest.raises(FilterError, match="noise_var"):
        DiSK(gain="adaptive").start().update([torch.ones(1)])
    told, given = started(DiSK(gain="adaptive"), 0.25), DiSK(gain=AdaptiveGain(noise_var=0.25)).start()
    overruled = started(DiSK(gain=AdaptiveGain(noise_var=0.25)), 100.0)
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        g = [torch.randn(20, generator=generator)]
        results = [state.update(g)[0] for state in (told, given, overruled)]
        assert all(torch.equal(results[0], r) for r in results)


def walk(process_var: float, noise_var: float, steps: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random walk [steps, n], and what is seen of it."""
    rng = np.random.default_rng(seed)
    truth = np.cumsum(math.sqrt(process_var) * rng.standard_normal((steps, n)), axis=0)
    return truth, truth + math.sqrt(noise_var) * rng.standard_normal((steps, n))


@pytest.mark.parametrize("ratio", [1e-3, 1e-2, 0.1, 1.0, 30.0])
def test_at_one_point_the_adaptive_gain_finds_the_best_one(ratio: float) -> None:
    """Process variances over three decades and more, 20,000 coordinates: κ within 5% of k_∞ (or at its floor)."""
    noise = 0.3
    _, seen = walk(ratio * noise, noise, 300, 20_000, seed=3)
    state = DiSK(gamma=None, gain=AdaptiveGain(noise_var=noise, smallest=0.02)).start()
    assert isinstance(state, VaryingAverage)
    for row in seen:
        state.update([torch.tensor(row, dtype=torch.float32)])
    best = gains.steady_state(1.0, 0.0, ratio).gain
    assert state.kappa == pytest.approx(max(best, 0.02), rel=0.05)


def test_an_adaptive_gain_follows_a_change() -> None:
    _, calm = walk(1e-3, 1.0, 300, 5_000, seed=4)
    truth, wild = walk(1.0, 1.0, 100, 5_000, seed=5)
    state = DiSK(gamma=None, gain=AdaptiveGain(noise_var=1.0)).start()
    assert isinstance(state, VaryingAverage)
    for row in calm:
        state.update([torch.tensor(row)])
    before = state.kappa
    for row in calm[-1] - truth[0] + wild:
        state.update([torch.tensor(row)])
    assert before < 0.1
    assert state.kappa == pytest.approx(gains.steady_state(1.0, 0.0, 1.0).gain, rel=0.1)


def test_one_wild_gradient_does_not_carry_the_gain_away() -> None:
    """1e12 times the usual squares count as ten times what was expected: κ stays below the base optimizer's 1."""
    _, seen = walk(1e-2, 1.0, 200, 2_000, seed=6)
    gain = AdaptiveGain(noise_var=1.0)
    state = DiSK(gamma=None, gain=gain).start()
    assert isinstance(state, VaryingAverage)
    for row in seen:
        state.update([torch.tensor(row)])
    before = state.kappa
    other = DiSK(gamma=None, gain=gain).start()
    other.load_state_dict(state.state_dict())
    assert isinstance(other, VaryingAverage)
    other.update([torch.full((2_000,), 1e6, dtype=torch.float64)])
    assert before < other.kappa < 0.8


def test_without_noise_there_is_nothing_to_filter() -> None:
    state = DiSK(gamma=None, gain=AdaptiveGain(noise_var=0.0)).start()
    for value in (1.0, 3.0, -2.0):
        state.update([torch.tensor([value])])
    assert state.update([torch.tensor([7.0])])[0].item() == 7.0


def descend(
    filter: DiSK, curvatures: np.ndarray, rate: float, deviation: float, steps: int, seed: int
) -> dict[str, Any]:
    """SGD on a quadratic whose gradients carry noise, at the points that the filter asks for."""
    rng = np.random.default_rng(seed)
    state = started(filter, deviation**2)
    x, d = np.full(len(curvatures), 3.0), np.zeros(len(curvatures))
    errors, used = [], []
    for _ in range(steps):
        here, ahead = due_coefficients(filter, state)
        g = here * curvatures * x + ahead * curvatures * (x + (filter.gamma or 0.0) * d)
        g = g + deviation * rng.standard_normal(len(x))
        used.append(getattr(state, "kappa", None))
        estimate = state.update([torch.tensor(g)])[0].numpy().copy()
        errors.append(float(np.square(estimate - curvatures * x).mean()))
        d = -rate * estimate
        x = x + d
    return {"error": np.mean(errors[steps // 2 :]), "kappa": used, "loss": float(np.sum(curvatures * x**2) / 2)}


@pytest.mark.parametrize("gamma", [0.5, -1.0])
def test_with_two_points_a_gradient_that_moves_as_predicted_counts_as_none(gamma: float) -> None:
    """On a quadratic H d is exact, so κ may fall to its floor, where one point alone must keep up with the gradient."""
    curvatures = np.linspace(0.05, 1.0, 2_000)
    settings: dict[str, Any] = {"curvatures": curvatures, "rate": 0.2, "deviation": 0.5, "steps": 600, "seed": 7}
    two = descend(DiSK(gamma=gamma, gain=AdaptiveGain(smallest=0.05, largest_weight=math.inf)), **settings)
    one = descend(DiSK(gamma=None, gain=AdaptiveGain(smallest=0.05)), **settings)
    base = descend(DiSK(kappa=1.0), **settings)
    assert np.mean(two["kappa"][300:]) < np.mean(one["kappa"][300:])
    assert two["error"] < 0.5 * base["error"]
    assert two["error"] < one["error"]


@pytest.mark.parametrize(("gamma", "bound"), [(0.5, 1.0), (2.3, 1.0), (-1.0, 3.0)])
def test_the_weight_ahead_is_bounded(gamma: float, bound: float) -> None:
    """Hardly any signal: κ falls as far as it may, which is where |c| is at its bound."""
    filter = DiSK(gamma=gamma, gain=AdaptiveGain(noise_var=1.0, largest_weight=bound))
    state = filter.start()
    rng = np.random.default_rng(0)
    weights = []
    for t in range(100):
        if (t - 1) % 10:
            weights.append(abs(due_coefficients(filter, state)[1]))
        state.update([torch.tensor(rng.standard_normal(2_000))])
    assert max(weights) <= bound * (1 + 1e-9)
    assert weights[-1] == pytest.approx(bound)


def test_a_step_that_measures_observes_the_gradient_before() -> None:
    """c = -1/γ: (1 + 1/γ)∇f(x) - ∇f(x + γd)/γ is ∇f(x - d) where gradients are linear."""
    gamma, H, x, d = 0.5, 3.0, 1.0, 0.2
    filter = DiSK(gamma=gamma, gain=AdaptiveGain(noise_var=1.0, measure_every=4))
    state = filter.start()
    measured = []
    for t in range(12):
        here, ahead = due_coefficients(filter, state)
        if ahead == -1 / gamma:
            measured.append(t)
            assert here * H * x + ahead * H * (x + gamma * d) == pytest.approx(H * (x - d))
        state.update([torch.ones(3)])
    assert measured == [1, 5, 9]
