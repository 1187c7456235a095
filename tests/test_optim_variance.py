"""The filtered noise's variance: against the filters' own states, dense matrices, simulation and a private step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import signal, stats
from scipy.linalg import toeplitz
from torch import Tensor, nn

from diskdp import DiSK, LowPass, NoFilter, Plan, privatize
from diskdp.errors import FilterError
from diskdp.filters import Filter
from diskdp.filters.disk import FilterState
from diskdp.optim import (
    NoiseVariance,
    correlated_noise_variance,
    filtered_noise_variance,
    noise_std,
    response_matrix,
    second_moment_spread,
    steady_noise_variance,
)

BUTTERWORTH = LowPass(a=signal.butter(3, 0.2)[1].tolist(), b=signal.butter(3, 0.2)[0].tolist())
FILTERS: list[Filter] = [
    NoFilter(),
    DiSK(kappa=0.7, gamma=0.5),
    DiSK(kappa=0.05, gamma=-1.0),
    LowPass(kappa=0.3),
    LowPass(a=[1.0, -0.9], b=[0.1]),
    LowPass(a=[1.0, -1.2, 0.5], b=[0.2, 0.3, -0.05]),
    LowPass(a=[1.0], b=[0.5, 0.3, 0.2]),
    BUTTERWORTH,
]
# white, of a moving average, of differences (blue noise), of an exponential decay cut where it is below 1e-12
AUTOCOVARIANCES = [[1.0], [1.0, 0.4, -0.1], [2.0, -1.0], [0.5**lag for lag in range(40)]]


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
@pytest.mark.parametrize("autocovariance", AUTOCOVARIANCES, ids=lambda r: f"r{len(r)}")
def test_recursion_is_the_filters_matrix(filter: Filter, autocovariance: list[float]) -> None:
    steps = 120
    covariance = toeplitz(np.pad(autocovariance, (0, steps - len(autocovariance))))
    found = filtered_noise_variance(filter, steps, autocovariance)
    np.testing.assert_allclose(found, correlated_noise_variance(filter, covariance), rtol=1e-9)
    last = NoiseVariance(filter, autocovariance)(3000)
    np.testing.assert_allclose(last, steady_noise_variance(filter, autocovariance), rtol=1e-9)


def test_closed_forms_of_the_average() -> None:
    for kappa in (1.0, 0.7, 0.3, 0.01):
        beta, steps = 1 - kappa, np.arange(200)
        found = filtered_noise_variance(DiSK(kappa=kappa), 200)
        # from g_0: κ/(2-κ) + β^{2t} (1 - κ/(2-κ)), the recursion's solution
        steady = kappa / (2 - kappa)
        np.testing.assert_allclose(found, steady + beta ** (2 * steps) * (1 - steady), rtol=1e-12)
        assert steady_noise_variance(DiSK(kappa=kappa)) == pytest.approx(steady, rel=1e-12)
        # from zero with bias correction, another transient: κ/(2-κ) (1-β^{2t+2}) / (1-β^{t+1})²
        from_zero = filtered_noise_variance(LowPass(a=[1, -beta], b=[kappa]), 200)
        expected = steady * (1 - beta ** (2 * steps + 2)) / (1 - beta ** (steps + 1)) ** 2
        np.testing.assert_allclose(from_zero, expected, rtol=1e-9)
        # coloured: κ/(2-κ) (r_0 + 2 Σ β^l r_l)
        colored = steady_noise_variance(LowPass(kappa=kappa), [1.0, 0.4, -0.1])
        assert colored == pytest.approx(steady * (1 + 2 * (0.4 * beta - 0.1 * beta**2)), rel=1e-12)


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
def test_matrix_against_scipy(filter: Filter) -> None:
    response = response_matrix(filter, 30)
    if isinstance(filter, LowPass) and filter.kappa is None:
        expected = signal.lfilter(filter.b, filter.a, np.eye(30), axis=0)
    else:
        kappa = getattr(filter, "kappa", 1.0)  # started at g_0: the state that makes the first output g_0
        expected = signal.lfilter([kappa], [1, kappa - 1], np.eye(30), axis=0, zi=np.eye(30)[:1] * (1 - kappa))[0]
    expected = expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(response, expected, atol=1e-12)


@pytest.mark.parametrize("filter", [DiSK(kappa=0.2), BUTTERWORTH], ids=repr)
def test_simulated_noise(filter: Filter) -> None:
    """False alarms: 1e-7 a step at most by the exact χ² law of the sum of squares, 24 steps, two noises: below 5e-6."""
    coordinates, steps = 200_000, 24
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(steps + 1, coordinates, generator=generator, dtype=torch.float64)
    for noise, autocovariance in ((z[1:], [1.0]), (z[1:] - 0.8 * z[:-1], [1.64, -0.8])):
        state = filter.start()
        variance = NoiseVariance(filter, autocovariance)
        for step in range(steps):
            [filtered] = state.update([noise[step].clone()])
            ratio = filtered.square().sum().item() / variance(step)
            assert 5e-8 < stats.chi2.cdf(ratio, coordinates) < 1 - 5e-8, (filter, step)


def test_second_moment_spread() -> None:
    """v_t of noise alone, over 100,000 coordinates: its deviation to 2%.

    A deviation over n samples of kurtosis k has relative error √((k-1)/4n). v_t, with some 20 squares in it, has k < 5:
    2% is six times that. False alarms below 1e-8.
    """
    filter, beta2, autocovariance = DiSK(kappa=0.3), 0.9, [1.0, -0.4]
    generator = torch.Generator().manual_seed(1)
    theta = 0.5  # w = z_t - θ z_{t-1}, θ/(1+θ²) = .4
    previous = torch.randn(100_000, generator=generator)
    state, v = filter.start(), torch.zeros(100_000)
    for _ in range(150):
        z = torch.randn(100_000, generator=generator)
        [filtered] = state.update([(z - theta * previous) / math.sqrt(1 + theta**2)])
        previous = z
        v.mul_(beta2).addcmul_(filtered, filtered, value=1 - beta2)
    mean = steady_noise_variance(filter, autocovariance)
    assert v.mean().item() == pytest.approx(mean, rel=0.01)
    assert v.std().item() / mean == pytest.approx(second_moment_spread(filter, beta2, autocovariance), rel=0.02)


class _Recorder(torch.optim.SGD):
    """Keeps the gradients that the private step hands over."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).double())
        super().step(closure)


@pytest.mark.parametrize(
    ("filter", "settings"),
    [
        (NoFilter(), {}),
        (DiSK(kappa=0.3, gamma=0.5), {"clipping": "automatic", "max_grad_norm": 0.1}),
        (DiSK(kappa=0.6, gamma=0.5, clip="separate"), {"clipping": "normalized", "max_grad_norm": 3.0}),
        (LowPass(a=[1.0, -0.9], b=[0.1]), {"clipping": "per-layer"}),
        (DiSK(kappa=0.3, gamma=0.5), {"noise": "discrete"}),
        (DiSK(kappa=0.3, gamma=0.5), {"noise": "secure"}),
    ],
)
def test_what_a_private_step_hands_over(filter: Filter, settings: dict[str, Any]) -> None:
    """Losses without gradients leave the noise alone. χ² as above, 1e-7 a step: below 1e-6 a case; seeds are fixed."""
    model = nn.Linear(200, 100)
    plan = Plan(dataset_size=40, batch_size=8, steps=8, noise_multiplier=1.7, delta=1e-3, **settings)
    optimizer = _Recorder(model.parameters())
    private = privatize(
        model, optimizer, plan, loss_fn=lambda m, b: 0 * m(b[0]).sum(1), filter=filter, seed=11, microbatch_size=40
    )
    std = noise_std(plan, filter)
    assert std == pytest.approx(plan.noise_multiplier * private.sensitivity / plan.batch_size, rel=1e-15)
    assert std == private._noise_std
    if private._grid is not None:  # slightly stronger on the grid, as noise_std says
        assert 1 <= private._grid.std / (std * plan.batch_size) < 1.002
        std = private._grid.std / plan.batch_size
    for batch in private.loader(torch.utils.data.TensorDataset(torch.randn(40, 200), torch.zeros(40))):
        private.step(batch)
    variance = NoiseVariance(filter)
    assert len(optimizer.seen) == 8
    for step, gradient in enumerate(optimizer.seen):
        ratio = gradient.square().sum().item() / (std**2 * variance(step))
        assert 5e-8 < stats.chi2.cdf(ratio, len(gradient)) < 1 - 5e-8, step


def test_no_noise_no_deviation() -> None:
    with pytest.warns(UserWarning, match="private"):
        plan = Plan(dataset_size=10, batch_size=5, steps=1, noise_multiplier=0, delta=1e-2, max_grad_norm=math.inf)
    assert noise_std(plan, NoFilter()) == 0.0


@pytest.mark.parametrize("kappa", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("speed", [0.01, 0.1, 0.5, 1.0])
def test_closed_loop_on_a_quadratic(kappa: float, speed: float) -> None:
    """E g̃² where training has come to rest, from the loop's covariance: the closed forms that the docs state.

    The state is (x_t, g̃_{t-1}) in units of the noise, with curvature 1 and learning rate s: u = x_t - s c γ g̃_{t-1}.
    """

    def second_moment(reach: float) -> float:
        gain = np.array([kappa, (1 - kappa) - kappa * speed * reach])  # g̃_t of the state; plus κ w
        transition = np.array([[1 - speed * gain[0], -speed * gain[1]], [gain[0], gain[1]]])
        drive = np.array([-speed * kappa, kappa])
        covariance = np.zeros((2, 2))
        for _ in range(20_000):
            covariance = transition @ covariance @ transition.T + np.outer(drive, drive)
        return float(covariance[1, 1])

    low_pass = kappa / (2 - kappa - kappa * speed / 2)
    disk = kappa / (2 - kappa) * 2 * kappa / ((2 - speed) * (kappa + speed - kappa * speed))
    assert second_moment(0.0) == pytest.approx(low_pass, rel=1e-9)
    assert second_moment((1 - kappa) / kappa) == pytest.approx(disk, rel=1e-9)


class _Gain:
    """Gains 1/(t+1): linear, but of no fixed coefficients."""

    def __init__(self) -> None:
        self.count, self.mean = 0, torch.zeros(())

    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        self.count += 1
        self.mean = self.mean + (gradients[0] - self.mean) / self.count
        return [self.mean]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Normalized(_Gain):
    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        return [gradients[0] / gradients[0].norm()]


@dataclass(frozen=True)
class Averaging(NoFilter):
    state: type[_Gain] = _Gain

    def start(self) -> FilterState:
        return self.state()


def test_filters_without_a_formula() -> None:
    """Known by their kind or not, other gains are refused, and linear ones served by their matrix."""
    with pytest.raises(FilterError, match="fixed coefficients"):
        NoiseVariance(Averaging())
    found = correlated_noise_variance(Averaging(), np.eye(5))
    np.testing.assert_allclose(found, 1 / np.arange(1, 6), rtol=1e-12)
    with pytest.raises(FilterError, match="not linear"):
        response_matrix(Averaging(_Normalized), 5)
    with pytest.raises(FilterError, match="variances="):
        NoiseVariance(object())  # type: ignore[arg-type]


def test_bad_covariances() -> None:
    for bad in ([], [math.nan], [-1.0], [1.0, 0.9], [0.0, 0.1]):
        with pytest.raises(FilterError, match="autocovariance"):
            NoiseVariance(NoFilter(), bad)
    for matrix in (np.ones((2, 3)), [[1.0, 0.5], [0.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]], [[math.inf]]):
        with pytest.raises(FilterError, match="covariance"):
            correlated_noise_variance(NoFilter(), matrix)
    with pytest.raises(FilterError, match="count from 0"):
        NoiseVariance(NoFilter())(-1)
    with pytest.raises(FilterError, match="beta2"):
        second_moment_spread(NoFilter(), 1.0)
