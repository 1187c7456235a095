"""Gains of the scalar Kalman filter behind DiSK: the recursion of the paper, its limit, and how fast it gets there.

The state is one coordinate of the gradient, p_t its error's variance, k_t the weight of the new observation. Variances
enter through their ratios alone, so any unit will do; all of them are declared by the user, none is read off data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from diskdp.errors import FilterError

GainKind = Literal["printed", "least-squares"]


@dataclass(frozen=True)
class SteadyState:
    """Where the recursion ends: k_∞, p_∞, and the factor by which the distance to them shrinks in a step."""

    gain: float
    variance: float
    rate: float


class GainRecursion(NamedTuple):
    """p_t and k_t for t = 0, 1, ...: arrays of one length."""

    variance: npt.NDArray[np.float64]
    gain: npt.NDArray[np.float64]


def steady_state(
    observation_var: float, hessian_var: float, process_var: float, kind: GainKind = "printed"
) -> SteadyState:
    """The fixed point of `recursion`, from σ_w² (noise of an observation: privacy's and sampling's), σ_H² and σ_v².

    p_∞ = (S - σ_H² - σ_v²)/2 with S = √((σ_v² + σ_H²)(4σ_w² + σ_v² - 3σ_H²)). The rate is the derivative of the
    recursion there, (1 - k_∞)² = (2σ_w² + σ_v² - σ_H² - S)/(2σ_w² + σ_v² - σ_H² + S); the paper prints +3σ_H² for
    -σ_H². Without process noise (σ_H² = σ_v² = 0) the gain falls to 0 like 1/t, and the rate is 1.

    >>> steady = steady_state(observation_var=1.0, hessian_var=0.1, process_var=0.05)
    >>> round(steady.gain, 4), round(steady.variance, 4), round(steady.rate, 4)
    (0.3333, 0.3, 0.4444)
    """
    noise, drift = _noise_and_drift(observation_var, hessian_var, process_var, kind)
    unit = max(noise, drift)  # so that nothing overflows
    noise, drift = noise / unit, drift / unit
    root = math.sqrt(drift) * math.sqrt(4 * noise + drift)
    variance = 2 * noise * drift / (root + drift) if drift else 0.0  # (root - drift)/2 without its cancellation
    kept = noise / (variance + drift + noise)
    return SteadyState((variance + drift) / (variance + drift + noise), variance * unit, kept * kept)


def recursion(
    observation_var: float,
    hessian_var: float,
    process_var: float,
    steps: int,
    start: float | None = None,
    kind: GainKind = "printed",
) -> GainRecursion:
    """p_t and k_t for t = 0 ... steps - 1 from p_{-1} = ``start``, by default σ_w² as in the paper's Algorithm 2.

    As printed, k_t = (p_{t-1} + σ_v² + σ_H²)/(p_{t-1} + σ_v² + σ_w²) and p_t = (σ_w² - σ_H²) k_t: the best gain if the
    observation's noise were only σ_w² - σ_H². For an input noise independent of it, the gain of least squares
    (``kind="least-squares"``) has σ_w² + σ_H² in the denominator, and p_t = σ_w² k_t. The printed one is refused where
    σ_H² > σ_w², since p_t would be negative.

    >>> p, k = recursion(observation_var=1.0, hessian_var=0.1, process_var=0.05, steps=3)
    >>> k.round(4).tolist()
    [0.561, 0.4212, 0.3702]
    """
    noise, drift = _noise_and_drift(observation_var, hessian_var, process_var, kind)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise FilterError(f"steps={steps!r} must be a whole number, 0 or more")
    p = observation_var if start is None else _variance("start", start)
    if p + drift + noise == 0:
        raise FilterError("start=0 with no noise and no drift: nothing is left to weigh; give one of them a variance")
    variance, gain = np.empty(steps), np.empty(steps)
    for t in range(steps):
        predicted = p + drift
        gain[t] = predicted / (predicted + noise)
        variance[t] = p = noise * float(gain[t])
    return GainRecursion(variance, gain)


def suggest_kappa(m_kappa: float, smoothness: float, learning_rate: float) -> float:
    """κ = M_κ L η of the paper's Corollary (γ = -1, SGD), at most 1, from constants that the user declares.

    M_κ = ‖∇F(x_0)‖² / (2L (F(x_0) - F*)) is at most 1. It must come from public knowledge or public data: reading it
    off the private data, without noise, is not covered by the guarantee.

    >>> suggest_kappa(m_kappa=0.25, smoothness=4.0, learning_rate=0.1)
    0.1
    >>> suggest_kappa(m_kappa=1.0, smoothness=4.0, learning_rate=3.0)
    1.0
    """
    for name, value in (("m_kappa", m_kappa), ("smoothness", smoothness), ("learning_rate", learning_rate)):
        if isinstance(value, bool) or not isinstance(value, Real) or not (value > 0 and math.isfinite(value)):
            raise FilterError(f"{name}={value!r} must be a positive, finite number")
    kappa = min(1.0, m_kappa * smoothness * learning_rate)
    if kappa == 0:
        raise FilterError(f"m_kappa·smoothness·learning_rate is below the smallest number: {m_kappa}, {learning_rate}")
    return kappa


def _noise_and_drift(
    observation_var: float, hessian_var: float, process_var: float, kind: GainKind
) -> tuple[float, float]:
    """(r, q) of the textbook filter p⁻ = p + q, k = p⁻/(p⁻ + r), p = (1-k) p⁻ to which both kinds come down."""
    observation = _variance("observation_var", observation_var)
    hessian = _variance("hessian_var", hessian_var)
    drift = hessian + _variance("process_var", process_var)
    if kind not in ("printed", "least-squares"):
        raise FilterError(f"kind={kind!r} must be 'printed' or 'least-squares'")
    if kind == "printed" and hessian > observation:
        raise FilterError(
            f"hessian_var={hessian:g} is above observation_var={observation:g}: with the gain as printed the error's "
            "variance would be negative; use kind='least-squares', or smaller steps (they make hessian_var smaller)"
        )
    noise = observation - hessian if kind == "printed" else observation
    if noise + drift == 0:
        raise FilterError("all variances are 0, so the gain is 0/0; at least one must be positive")
    if not math.isfinite(4 * (noise + drift)):
        raise FilterError("the variances are too large to be added; use a larger unit, only their ratios matter")
    return noise, drift


def _variance(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not (value >= 0 and math.isfinite(value)):
        raise FilterError(f"{name}={value!r} must be a variance: a finite number, 0 or more")
    return float(value)
