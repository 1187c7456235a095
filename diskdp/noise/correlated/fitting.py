"""Strategies fitted to a workload: what is minimised is the error at a given privacy.

Fits are heuristics; whatever they come to is checked and accounted as any other strategy.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from scipy import optimize, signal, special

from diskdp.errors import NoiseError
from diskdp.noise.correlated.sensitivity import Participation, sensitivity
from diskdp.noise.correlated.strategies import BLT, Array, Banded, reciprocal
from diskdp.noise.correlated.workloads import Workload, applied, squared_errors

Objective = Literal["mean", "max"]

_MOST_BANDS = 256
_MOST_BUFFERS = 6
_MOST_STEPS = 20_000


def fit_banded(bands: int, workload: Workload, objective: Objective = "mean") -> Banded:
    """The bands with the least |c|² · squared error: best for participations ``bands`` or more apart, and for one.

    With h = A's column applied to 1/c and weights m (the mean's are (T - i)/T, the maximum's 1), the error is
    Σ m_i h_i², and its derivative by c_j is -2 Σ_i m_i h_i (h/c)_{i-j}. Ratios of neighbours are from 0 to 1.

    >>> fitted = fit_banded(4, Workload(steps=64))
    >>> [round(c, 3) for c in fitted.coefficients]
    [1.0, 0.67, 0.562, 0.479]
    """
    _check(workload, objective)
    if not 1 <= bands <= min(_MOST_BANDS, workload.steps):
        raise NoiseError(f"bands={bands}: fitted are 1 to {_MOST_BANDS}, and no more than the {workload.steps} steps")
    if bands == 1:
        return Banded((1.0,))
    steps = workload.steps
    emphasis = np.arange(steps, 0, -1) / steps if objective == "mean" else np.ones(steps)

    def loss(ratios: Array) -> tuple[float, Array]:
        c = np.concatenate(([1.0], np.cumprod(ratios)))
        inverse = reciprocal(np.pad(c, (0, steps - bands)))
        moved = applied(workload, inverse)
        error, norm = float(emphasis @ moved**2), float(c @ c)
        sliding = signal.fftconvolve(moved, inverse)[:steps]
        back = signal.fftconvolve((emphasis * moved)[::-1], sliding)[:steps][::-1]  # Σ_i (mh)_i sliding_{i-j}
        slope = 2 * c / norm - 2 * back[:bands] / error  # of the logarithm
        return math.log(norm * error), np.cumsum((slope * c)[:0:-1])[::-1] / ratios

    start = np.array(Banded.square_root(bands).coefficients)
    found = optimize.minimize(
        loss, start[1:] / start[:-1], jac=True, method="L-BFGS-B", bounds=[(1e-4, 1.0)] * (bands - 1)
    )
    return Banded(tuple(float(c) for c in np.concatenate(([1.0], np.cumprod(np.clip(found.x, 0.0, 1.0))))))


def fit_blt(
    buffers: int, workload: Workload, participation: Participation | None = None, objective: Objective = "mean"
) -> BLT:
    """The buffers with the least sensitivity² · squared error, by a local search from decays that are spread out.

    >>> blt = fit_blt(2, Workload(steps=64))
    >>> [round(d, 2) for d in blt.decays], [round(w, 2) for w in blt.weights]
    ([0.96, 0.59], [0.25, 0.25])
    """
    _check(workload, objective)
    if not 1 <= buffers <= _MOST_BUFFERS:
        raise NoiseError(f"buffers={buffers}: fitted are 1 to {_MOST_BUFFERS}")
    who = participation or Participation(workload.steps)
    if who.steps != workload.steps:
        raise NoiseError(f"a workload of {workload.steps} steps and participation in {who.steps}: the same")

    def strategy(parameters: Array) -> BLT:
        shares = special.softmax(np.append(parameters[:buffers], 0.0))[:buffers]
        decays = np.minimum(special.expit(parameters[buffers:]), 1 - 2.0**-40)
        order = np.argsort(-decays)
        weights = shares[order] * (1 - 1e-12)  # so that rounding does not take their sum past 1
        return BLT(tuple(weights.tolist()), tuple(decays[order].tolist()))

    def loss(parameters: Array) -> float:
        tried = strategy(parameters)
        found = squared_errors(tried, workload)
        return math.log(float(found.mean() if objective == "mean" else found.max()) * sensitivity(tried, who) ** 2)

    gaps = np.geomspace(2 / workload.steps, 0.5, buffers + 1)[:-1] if workload.steps > 4 else np.full(buffers, 0.5)
    start = np.concatenate((np.full(buffers, -math.log(buffers)), special.logit(1 - gaps)))
    bounds = [(-12.0, 12.0)] * buffers + [(-6.0, 20.0)] * buffers
    return strategy(optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds).x)


def _check(workload: Workload, objective: str) -> None:
    if objective not in ("mean", "max"):
        raise NoiseError(f"objective={objective!r}: choose mean or max")
    if workload.learning_rates is not None:
        raise NoiseError("strategies are fitted to workloads with a constant learning rate: leave the schedule out")
    if workload.steps > _MOST_STEPS:
        raise NoiseError(f"steps={workload.steps}: strategies are fitted to at most {_MOST_STEPS} steps")
