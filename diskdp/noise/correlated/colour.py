"""The colour of correlated noise, and the exponential average that is best for it.

Assumes the scalar model of filters/gains.py: a gradient that drifts as a random walk, observed under noise; here the
noise is not white.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, signal

from diskdp.errors import NoiseError
from diskdp.noise.correlated.strategies import Array, Strategy, Tree, covariance, inverse_column

_SMALLEST_GAIN = 1e-6


class ColouredGain(NamedTuple):
    """The weight of a new observation, and the stationary mean squared error with it."""

    gain: float
    error: float


def autocovariance(strategy: Strategy, lags: int) -> Array:
    """Covariances of the noise of two steps 0, 1, ..., lags - 1 apart, for z of variance 1, long after the start.

    Toeplitz: Σ_i w_i w_{i+l} over the first ``lags`` coefficients w of C⁻¹, the autocovariance of noise that forgets
    what is older. Trees: the mean over the places in a tree, as seen by who does not know when trees restart.

    >>> from diskdp.noise.correlated.strategies import Banded
    >>> autocovariance(Banded((1.0, 0.5)), 20)[:3].round(4).tolist()
    [1.3333, -0.6667, 0.3333]
    """
    if isinstance(strategy, Tree):
        found = np.zeros(lags)
        within = covariance(strategy, strategy.restart_every)
        for lag in range(min(lags, strategy.restart_every)):
            found[lag] = np.trace(within, offset=lag) / strategy.restart_every
        return found
    weights = inverse_column(strategy, lags)
    return np.asarray(signal.correlate(weights, weights)[lags - 1 :])


def filtered_error(gain: float, covariances: Array, process_var: float) -> float:
    """The stationary mean squared error of x_t = x_{t-1} + κ(g_t - x_{t-1}) for g_t = s_t + n_t, s_t = s_{t-1} + v_t.

    The error is e_t = (1-κ)(e_{t-1} - v_t) + κ n_t, so with r = 1-κ and n's autocovariance γ its mean square is
    r² q/(1-r²) + κ²/(1-r²) (γ_0 + 2 Σ_l r^l γ_l). γ is taken as 0 beyond what is given.

    >>> round(filtered_error(1 / 3, np.array([0.9]), 0.15), 12)  # white: p_∞ of the Kalman filter
    0.3
    """
    if not 0 < gain <= 1:
        raise NoiseError(f"gain={gain!r}: must be above 0 and at most 1")
    if not 0 <= process_var < math.inf:
        raise NoiseError(f"process_var={process_var!r}: must be a variance, finite and 0 or more")
    kept = 1 - gain
    powers = kept ** np.arange(len(covariances))
    noise = 2 * float(powers @ covariances) - float(covariances[0])
    if not noise >= -1e-9 * abs(float(covariances[0])) or not covariances[0] >= 0:
        raise NoiseError("these are no autocovariances: filtered noise would have a negative variance; give all lags")
    return (kept**2 * process_var + gain**2 * max(noise, 0.0)) / (gain * (2 - gain))


def best_gain(covariances: Array, process_var: float) -> ColouredGain:
    """The constant gain with the least `filtered_error`: a grid in log κ, and a bounded search around its best point.

    For white noise it is k_∞ of `filters.gains.steady_state`. Multiply ``covariances`` by the noise's variance.

    >>> found = best_gain(np.array([1.0]), process_var=0.0)
    Traceback (most recent call last):
    diskdp.errors.NoiseError: process_var=0.0: must be positive, or the best gain is none at all
    >>> found = best_gain(np.array([0.9]), process_var=0.15)
    >>> round(found.gain, 6), round(found.error, 6)
    (0.333333, 0.3)
    """
    if not process_var > 0:
        raise NoiseError(f"process_var={process_var!r}: must be positive, or the best gain is none at all")

    def error(log_gain: float) -> float:
        return filtered_error(min(1.0, math.exp(log_gain)), covariances, process_var)

    grid = np.linspace(math.log(_SMALLEST_GAIN), 0.0, 281)
    values = [error(point) for point in grid]
    best = int(np.argmin(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 1e-10})
    if values[best] <= found.fun:
        return ColouredGain(min(1.0, math.exp(grid[best])), values[best])
    return ColouredGain(min(1.0, math.exp(found.x)), float(found.fun))
