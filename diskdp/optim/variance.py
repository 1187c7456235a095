"""How much of the privacy noise is left in a filtered gradient, step by step.

Variances are of one coordinate, in units of (σS/B)², the variance of the noise on one mean (`noise_std`). Steps count
from 0. Assumes filters that are linear in the gradients they have had, with gains that do not depend on them. What is
computed here depends on the plan and the filter alone, never on data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import solve_discrete_lyapunov

from diskdp.clipping import Clipper
from diskdp.errors import FilterError, OptimizerError
from diskdp.filters import DiSK, Filter, LowPass, NoFilter
from diskdp.plan import Plan

Floats = npt.NDArray[np.float64]

WHITE = (1.0,)  # autocovariance of noise that is independent from step to step
_PROBED = 64  # steps over which a filter's own state is compared with the formula for its kind
_NEGLIGIBLE = 1e-18


def noise_std(plan: Plan, filter: Filter) -> float:
    """σS/B, the standard deviation of the noise that `privatize` adds to each coordinate of the mean gradient.

    S is the clipper's sensitivity, times |c| + |1-c| if the filter's points are clipped separately. With
    ``noise="discrete"`` the noise on the grid is stronger by up to about 0.1%, since rounding to the grid adds to S.

    >>> plan = Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-5, max_grad_norm=0.5)
    >>> noise_std(plan, NoFilter()), noise_std(plan, DiSK(kappa=0.5, gamma=-1.0, clip="separate"))
    (0.1, 0.3)
    """
    if plan.noise_multiplier == 0:
        return 0.0  # also where nothing is clipped and S is infinite
    if plan.clipping == "adaptive":
        raise OptimizerError("clipping='adaptive' changes the noise with its threshold; choose another clipping")
    sensitivity = Clipper(plan.clipping, plan.max_grad_norm).sensitivity
    if filter.clip == "separate":
        sensitivity *= sum(abs(a) for a in filter.coefficients)
    return plan.noise_multiplier * sensitivity / plan.batch_size


class NoiseVariance:
    """The filtered noise's variance at a step, for as many steps as are asked for.

    ``autocovariance`` is that of the noise before the filter, r_0, r_1, ..., and 0 beyond: white noise has (1,).

    DiSK and `LowPass(kappa)` average from g_0 on, g̃_t = (1-κ) g̃_{t-1} + κ g_t, so that

        v_0 = r_0,  v_t = (1-κ)² v_{t-1} + κ² r_0 + 2κ(1-κ) Σ_l r_l α_{t-1,l},

    α_{t-1,l} being the weight of g_{t-l} in g̃_{t-1}: κ(1-κ)^{l-1}, and (1-κ)^{t-1} for g_0. `LowPass(a, b)` has
    g̃_t = Σ_j h_j g_{t-j} / Σ_{j≤t} h_j with its impulse response h, so that

        v_t = Σ_{i,j≤t} h_i h_j r_{|i-j|} / (Σ_{j≤t} h_j)².

    Both are computed in constant work a step and lag. DiSK's second point changes u_i, not how noise goes through.

    >>> variance = NoiseVariance(DiSK(kappa=0.5))
    >>> variance(0), variance(1), round(variance(50), 6)
    (1.0, 0.5, 0.333333)
    """

    def __init__(self, filter: Filter, autocovariance: Sequence[float] = WHITE) -> None:
        self._covariance = _checked_autocovariance(autocovariance)
        self._kappa = _kappa(filter)
        self._a, self._b = _coefficients(filter)
        self._variances: list[float] = []
        self._weights: list[float] = []  # of the last gradients in the last output (before division), newest first
        self._sum = self._squares = 0.0
        _check_response(filter, self._kappa, self._a, self._b)

    def __call__(self, step: int) -> float:
        if step < 0:
            raise FilterError(f"step={step}: steps count from 0")
        while len(self._variances) <= step:
            self._variances.append(self._averaged() if self._kappa is not None else self._recursed())
        return self._variances[step]

    def _averaged(self) -> float:
        kappa, covariance = self._kappa, self._covariance
        assert kappa is not None
        if not self._variances:
            self._weights = [1.0]
            return covariance[0]
        past = sum(a * r for a, r in zip(self._weights, covariance[1:]))
        self._weights = [kappa, *((1 - kappa) * a for a in self._weights[: len(covariance) - 1])]
        return (1 - kappa) ** 2 * self._variances[-1] + kappa**2 * covariance[0] + 2 * kappa * (1 - kappa) * past

    def _recursed(self) -> float:
        step, covariance = len(self._variances), self._covariance
        response = self._b[step] if step < len(self._b) else 0.0
        response -= sum(a * h for a, h in zip(self._a[1:], self._weights))
        past = sum(h * r for h, r in zip(self._weights, covariance[1:]))
        self._squares += response**2 * covariance[0] + 2 * response * past
        self._sum += response
        self._weights = [response, *self._weights[: max(len(self._a), len(covariance)) - 1]]
        if self._sum == 0:
            raise FilterError(f"the filter's response to a constant is 0 at step {step}, so it has no output there")
        return self._squares / self._sum**2


def filtered_noise_variance(filter: Filter, steps: int, autocovariance: Sequence[float] = WHITE) -> Floats:
    """The variance at steps 0, ..., steps-1, as `NoiseVariance` gives it.

    >>> filtered_noise_variance(LowPass(a=[1.0], b=[0.5, 0.5]), 3).tolist()
    [1.0, 0.5, 0.5]
    >>> filtered_noise_variance(LowPass(a=[1.0], b=[0.5, 0.5]), 3, autocovariance=[1.0, -0.5]).tolist()
    [1.0, 0.25, 0.25]
    """
    variance = NoiseVariance(filter, autocovariance)
    return np.array([variance(step) for step in range(steps)])


def correlated_noise_variance(filter: Filter, covariance: npt.ArrayLike) -> Floats:
    """The variance at each step for noise of any covariance matrix Σ over the steps: the diagonal of F Σ Fᵀ.

    For noise w = M z of a matrix mechanism Σ is M Mᵀ. F is `response_matrix`, so any linear filter will do, at T³ cost.

    >>> correlated_noise_variance(LowPass(kappa=0.5), np.eye(3)).tolist()
    [1.0, 0.5, 0.375]
    """
    matrix = np.asarray(covariance, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
        raise FilterError(f"covariance has shape {matrix.shape}: it must be a finite T by T matrix")
    scale = float(np.abs(matrix).max(initial=0.0))
    if not np.allclose(matrix, matrix.T, atol=1e-9 * scale) or np.linalg.eigvalsh(matrix).min() < -1e-9 * scale:
        raise FilterError("covariance must be symmetric and have no negative eigenvalue: it is that of no noise")
    response = response_matrix(filter, len(matrix))
    return ((response @ matrix) * response).sum(1)


def response_matrix(filter: Filter, steps: int) -> Floats:
    """F with g̃ = F g over ``steps`` steps, read off the filter's own state by giving it one unit impulse a coordinate.

    Refuses a filter whose outputs are not such a product, as one whose gains depend on what it is given.

    >>> response_matrix(DiSK(kappa=0.5), 3).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]
    """
    response = _outputs(filter, torch.eye(steps, dtype=torch.float64))
    probed = _outputs(filter, _probe(steps)[:, None])[:, 0]  # by itself: gains may come from all coordinates together
    if not np.allclose(response @ _probe(steps).numpy(), probed, rtol=1e-9, atol=1e-9):
        raise FilterError(
            f"{filter!r}: not linear in the gradients it is given, so the variance of the noise that it lets through "
            "is no function of the step; use a filter with fixed gains"
        )
    return response


def steady_noise_variance(filter: Filter, autocovariance: Sequence[float] = WHITE) -> float:
    """What the variance tends to: κ/(2-κ) (r_0 + 2 Σ_l (1-κ)^l r_l) for the average, by a Lyapunov equation in general.

    >>> round(steady_noise_variance(DiSK(kappa=0.5)) * 3, 12), steady_noise_variance(NoFilter())
    (1.0, 1.0)
    """
    return float(_steady_covariance(filter, autocovariance, 1)[0])


def second_moment_spread(filter: Filter, beta2: float, autocovariance: Sequence[float] = WHITE) -> float:
    """The standard deviation of Adam's v_t over its mean, for Gaussian noise alone, in the steady state.

    Squares of normals with correlation ρ have correlation ρ². So it is √(2(1-β₂)/(1+β₂) (1 + 2 Σ_k β₂^k ρ_k²)), with
    ρ_k the filtered noise's correlation over k steps: what a floor under v_t minus the noise should not be far below.

    >>> round(second_moment_spread(NoFilter(), 0.999), 4), round(second_moment_spread(DiSK(kappa=0.1), 0.999), 4)
    (0.0316, 0.0974)
    """
    if not 0 <= beta2 < 1:
        raise FilterError(f"beta2={beta2} must lie in [0, 1)")
    a, b = _coefficients(filter)
    radius = max(abs(np.roots(a)), default=0.0)
    decay = beta2 * radius**2
    lags = len(a) + len(b) + len(autocovariance) + (math.ceil(math.log(_NEGLIGIBLE) / math.log(decay)) if decay else 0)
    covariance = _steady_covariance(filter, autocovariance, lags)
    correlation = covariance / covariance[0]
    weights = beta2 ** np.arange(1, lags)
    return math.sqrt(2 * (1 - beta2) / (1 + beta2) * (1 + 2 * float(weights @ correlation[1:] ** 2)))


def _steady_covariance(filter: Filter, autocovariance: Sequence[float], lags: int) -> Floats:
    """The filtered noise's autocovariance in the steady state, at lags 0, ..., lags-1.

    For white noise the state s of y = s_1 + b_0 w, s ← A s + B w has covariance P = A P Aᵀ + B Bᵀ, and y has
    c_0 = P_11 + b_0², c_l = e_1ᵀ A^{l-1} (A P e_1 + b_0 B); for coloured noise these are convolved with r.
    """
    covariance = _checked_autocovariance(autocovariance)
    _check_response(filter, _kappa(filter), *_coefficients(filter))
    a, b = (np.asarray(c) for c in _coefficients(filter))
    order = max(len(a), len(b)) - 1
    a, b = (np.pad(c, (0, order + 1 - len(c))) for c in (a, b))
    needed = lags + len(covariance)
    white = np.zeros(needed)
    if order == 0:
        white[0] = b[0] ** 2
    else:
        transition = np.diag(np.ones(order - 1), 1)
        transition[:, 0] -= a[1:]
        drive = b[1:] - a[1:] * b[0]
        state = solve_discrete_lyapunov(transition, np.outer(drive, drive))
        white[0] = state[0, 0] + b[0] ** 2
        reach = transition @ state[:, 0] + b[0] * drive
        for lag in range(1, needed):
            white[lag] = reach[0]
            reach = transition @ reach
    white /= (b.sum() / a.sum()) ** 2
    span = range(1 - len(covariance), len(covariance))
    return np.array([sum(covariance[abs(m)] * white[abs(lag - m)] for m in span) for lag in range(lags)])


def _kappa(filter: Filter) -> float | None:
    """The gain of an average that starts at g_0; None for a filter that starts from zero."""
    if isinstance(filter, NoFilter):
        return 1.0
    if isinstance(filter, LowPass) or (isinstance(filter, DiSK) and filter.gain == "constant"):
        return filter.kappa
    raise FilterError(
        f"{filter!r}: the noise that it lets through is not known by a formula; compute it by "
        "correlated_noise_variance and pass it to the optimizer as variances="
    )


def _coefficients(filter: Filter) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """a and b of the filter, after the start."""
    kappa = _kappa(filter)
    if kappa is not None:
        return ((1.0,) if kappa == 1 else (1.0, kappa - 1.0)), (kappa,)
    assert isinstance(filter, LowPass)
    return filter.a, filter.b


def _check_response(filter: Filter, kappa: float | None, a: tuple[float, ...], b: tuple[float, ...]) -> None:
    """The filter's own state does, over some steps, what the formula for its kind says: no other gains or start."""
    inputs = _probe(_PROBED).tolist()
    outputs = _outputs(filter, _probe(_PROBED)[:, None])[:, 0]
    expected: list[float] = []
    ones: list[float] = []  # the recursion's response to a constant
    for step, value in enumerate(inputs):
        if kappa is not None:
            expected.append(value if step == 0 else (1 - kappa) * expected[-1] + kappa * value)
            ones.append(1.0)
            continue
        for series, given in ((expected, inputs), (ones, [1.0] * _PROBED)):
            drive = sum(c * given[step - j] for j, c in enumerate(b) if j <= step)
            series.append(drive - sum(c * series[step - j] for j, c in enumerate(a) if 1 <= j <= step))
    if not np.allclose(outputs, np.array(expected) / ones, rtol=1e-6, atol=1e-9):
        raise FilterError(
            f"{filter!r}: its outputs are not those of fixed coefficients, so the formula for the noise that it lets "
            "through does not hold; pass the optimizer what correlated_noise_variance gives, as variances="
        )


def _outputs(filter: Filter, inputs: torch.Tensor) -> Floats:
    state = filter.start()
    return np.stack([state.update([row.clone()])[0].numpy().copy() for row in inputs])


def _probe(steps: int) -> torch.Tensor:
    """Fixed numbers of both signs and several sizes."""
    return torch.sin(torch.arange(1, steps + 1, dtype=torch.float64) ** 2) * 3


def _checked_autocovariance(values: Sequence[float]) -> tuple[float, ...]:
    """r_0, ..., if there is noise that has it: its spectrum is nowhere negative (looked at on a fine grid)."""
    covariance = tuple(float(v) for v in values)
    if not covariance or not all(math.isfinite(v) for v in covariance) or covariance[0] < 0:
        raise FilterError(f"autocovariance={list(covariance)}: give finite numbers, the variance first")
    angles = np.linspace(0, math.pi, 64 * len(covariance))
    lags = np.arange(1, len(covariance))
    spectrum = covariance[0] + 2 * np.cos(np.outer(angles, lags)) @ np.array(covariance[1:])
    if spectrum.min() < -1e-9 * covariance[0]:
        raise FilterError(f"autocovariance={list(covariance)}: its spectrum is negative somewhere, so no noise has it")
    return covariance
