"""Exact moments of filtered noisy gradient descent on a quadratic, eigenvalue by eigenvalue.

Assumes ½λx² in each direction, fresh noise of one deviation in each step, SGD and no clipping. The gradient is then
linear and the finite difference exact: γ enters only through h = κcγ, which is 1-κ for DiSK and 0 for a low pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diskdp.errors import TheoryError
from diskdp.filters import DiSK, LowPass, NoFilter

Array: TypeAlias = "NDArray[np.float64]"
FirstOrder: TypeAlias = "DiSK | LowPass | NoFilter"


@dataclass(frozen=True)
class Moments:
    """Mean and variance of x_t in each eigendirection, [steps + 1, directions]; x_0 is known."""

    mean: Array
    variance: Array

    def loss(self, eigenvalues: ArrayLike) -> Array:
        """E ½ Σ λ x_t², [steps + 1]."""
        return 0.5 * (self.mean**2 + self.variance) @ np.asarray(eigenvalues, dtype=np.float64)

    def squared_gradient(self, eigenvalues: ArrayLike) -> Array:
        """E Σ (λ x_t)², [steps + 1]."""
        return (self.mean**2 + self.variance) @ np.asarray(eigenvalues, dtype=np.float64) ** 2


def gain_and_lookahead(filter: FirstOrder) -> tuple[float, float]:
    """(κ, h): g̃_t = (1-κ)g̃_{t-1} + κλx_t + hλ(x_t - x_{t-1}) + κw_t.

    >>> gain_and_lookahead(DiSK(kappa=0.25, gamma=-3.0)), gain_and_lookahead(NoFilter())
    ((0.25, 0.75), (1.0, 0.0))
    """
    if isinstance(filter, NoFilter):
        return 1.0, 0.0
    if filter.kappa is None:
        raise TheoryError(f"{filter!r}: only first-order filters have moments here; give LowPass(kappa=...)")
    if isinstance(filter, DiSK) and filter.gain != "constant":
        raise TheoryError(f"{filter!r}: only filters whose gain is constant have moments here")
    gamma = filter.lookahead
    return filter.kappa, 0.0 if gamma is None else filter.kappa * filter.coefficients[1] * gamma


def moments(
    eigenvalues: ArrayLike,
    initial: ArrayLike,
    filter: FirstOrder,
    learning_rate: float | Sequence[float],
    noise_std: float,
    steps: int,
    start: Literal["first", "zero"] = "first",
) -> Moments:
    """Mean and variance of x_0 … x_T by the linear recursion of (x_t, g̃_{t-1}) itself, one 2x2 system a direction.

    ``learning_rate`` may be a schedule of ``steps`` values.

    >>> m = moments([1.0], [1.0], NoFilter(), learning_rate=0.5, noise_std=2.0, steps=2)
    >>> m.mean.ravel().tolist(), m.variance.ravel().tolist()
    ([1.0, 0.5, 0.25], [0.0, 1.0, 1.25])
    """
    lam = np.asarray(eigenvalues, dtype=np.float64)
    kappa, ahead = gain_and_lookahead(filter)
    rates = np.broadcast_to(np.asarray(learning_rate, dtype=np.float64), (steps,))
    mean = np.broadcast_to(np.asarray(initial, dtype=np.float64), lam.shape).copy()
    average = np.zeros_like(lam)  # E g̃_{t-1}
    variance, covariance, average_variance = np.zeros_like(lam), np.zeros_like(lam), np.zeros_like(lam)
    means, variances = [mean], [variance]
    previous_rate = 0.0
    for t, rate in enumerate(rates):
        keep, take, pass_noise = 1 - kappa - ahead * lam * previous_rate, kappa * lam, kappa
        if t == 0 and start == "first":
            keep, take, pass_noise = np.zeros_like(lam), lam, 1.0
        # g̃_t = keep g̃_{t-1} + take x_t + pass_noise w_t, then x_{t+1} = x_t - η g̃_t
        filtered = keep * average + take * mean
        with_position = keep * covariance + take * variance
        filtered_variance = (
            keep**2 * average_variance
            + 2 * keep * take * covariance
            + take**2 * variance
            + (pass_noise * noise_std) ** 2
        )
        mean = mean - rate * filtered
        variance = variance - 2 * rate * with_position + rate**2 * filtered_variance
        covariance = with_position - rate * filtered_variance
        average, average_variance, previous_rate = filtered, filtered_variance, float(rate)
        means.append(mean)
        variances.append(variance)
    return Moments(np.array(means), np.array(variances))


def stationary_variance(
    eigenvalues: ArrayLike, filter: FirstOrder, learning_rate: float, noise_std: float = 1.0
) -> Array:
    """Var x_t as t → ∞ in each direction, from the AR(2) recursion that x_t obeys; refused where that is unstable.

    >>> stationary_variance([1.0], NoFilter(), learning_rate=0.5)
    array([0.33333333])
    """
    lam = np.asarray(eigenvalues, dtype=np.float64)
    kappa, ahead = gain_and_lookahead(filter)
    scaled = learning_rate * lam
    # x_{t+1} = first x_t + second x_{t-1} - ηκ w_t
    first = 2 - kappa - (kappa + ahead) * scaled
    second = -(1 - kappa) + ahead * scaled
    stable = (np.abs(second) < 1) & (first + second < 1) & (second - first < 1)
    if not stable.all():
        worst = float(lam[~stable].flat[0])
        raise TheoryError(f"learning_rate={learning_rate} with {filter!r} is unstable at eigenvalue {worst:.6g}")
    shape = (1 - second) / ((1 + second) * ((1 - second) ** 2 - first**2))
    return np.asarray(shape * (learning_rate * kappa * noise_std) ** 2)


def variance_ratio(scaled_rate: ArrayLike, kappa: float) -> Array:
    """DiSK's stationary variance over that of noisy gradient descent at the same η, as a function of ηλ and κ.

    κ(2 - κ - (1-κ)ηλ) / ((2-κ)(κ + (1-κ)ηλ)): 1 at ηλ = 0, about ½ at ηλ = κ, κ/(2-κ) at ηλ = 1.

    >>> variance_ratio([0.0, 1.0], kappa=0.5).round(4)
    array([1.    , 0.3333])
    """
    if not 0 < kappa <= 1:
        raise TheoryError(f"kappa={kappa} must lie in (0, 1]")
    u = np.asarray(scaled_rate, dtype=np.float64)
    return np.asarray(kappa * (2 - kappa - (1 - kappa) * u) / ((2 - kappa) * (kappa + (1 - kappa) * u)))
