"""The scalar gain recursion p_t, k_t of the simplified Kalman filter, against its limit and its rate.

Iterates the recursion itself; nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diskdp.experiments.results import Row


@dataclass(frozen=True)
class GainConvergence:
    """Settings: variances (σ_w², σ_H², σ_v²) of each curve; the recursion starts at p_{-1} = σ_w²."""

    variances: tuple[tuple[float, float, float], ...] = ((1.0, 0.1, 0.05), (1.0, 0.02, 0.005), (1.0, 0.4, 0.2))
    steps: int = 40


def limit_and_rates(observation: float, hessian: float, process: float) -> tuple[float, float, float, float]:
    """(p_∞, k_∞, rate by the derivative at the fixed point, rate as the paper prints it).

    >>> [round(v, 4) for v in limit_and_rates(1.0, 0.1, 0.05)]
    [0.3, 0.3333, 0.4444, 0.5161]
    """
    added = hessian + process
    root = math.sqrt(added * (4 * observation + process - 3 * hessian))
    variance = (root - added) / 2
    gain = (variance + added) / (variance + observation + process)
    middle = 2 * observation + process - hessian
    printed = 2 * observation + process + 3 * hessian
    return variance, gain, (middle - root) / (middle + root), (printed - root) / (printed + root)


def run_gain_convergence(settings: GainConvergence) -> list[Row]:
    """A row a step and curve: p_t, k_t, their distance from the limit, and both rates."""
    rows: list[Row] = []
    for observation, hessian, process in settings.variances:
        _, limit, rate, printed = limit_and_rates(observation, hessian, process)
        variance = observation
        for t in range(settings.steps):
            predicted = variance + hessian + process
            gain = predicted / (predicted + observation - hessian)
            variance = (1 - gain) * predicted
            rows.append(
                {
                    "observation_var": observation,
                    "hessian_var": hessian,
                    "process_var": process,
                    "step": t,
                    "variance": variance,
                    "gain": gain,
                    "distance": abs(gain - limit),
                    "gain_limit": limit,
                    "rate": rate,
                    "rate_as_printed": printed,
                }
            )
    return rows
