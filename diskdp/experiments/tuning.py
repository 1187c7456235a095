"""Each method at its own best: filters and learning rates compared on seeds that are not used again.

Assumes a function from (filter, learning rates) to one final loss a seed and rate, lower being better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diskdp.filters import DiSK, KalmanGain, LowPass
from diskdp.filters.disk import Filter

KAPPAS = (0.03, 0.1, 0.3, 0.7)
GAMMAS = (-1.0, 0.5, 1.0)


@dataclass(frozen=True)
class Tuned:
    """The setting of the least mean loss; ``at_edge`` if its learning rate is an end of the grid."""

    filter: Filter
    learning_rate: float
    loss: float
    at_edge: bool


def tune(
    final_losses_RE: Callable[[Filter, Tensor], Tensor],
    filters: Sequence[Filter],
    rates_E: Tensor,
    advance: Callable[[], None] = lambda: None,
) -> Tuned:
    """The best filter and learning rate by mean loss over seeds; a run that diverged counts as infinite.

    >>> from diskdp.filters import NoFilter
    >>> tune(lambda _, rates: (rates - 0.2)[None] ** 2, [NoFilter()], torch.tensor([0.1, 0.2, 0.4])).learning_rate
    0.2...
    """
    best: Tuned | None = None
    for filter in filters:
        means = final_losses_RE(filter, rates_E).mean(0).nan_to_num(nan=torch.inf)
        i = int(means.argmin())
        if best is None or float(means[i]) < best.loss:
            best = Tuned(filter, float(rates_E[i]), float(means[i]), i in (0, len(rates_E) - 1))
        advance()
    assert best is not None
    return best


def low_pass_filters(kappas: Sequence[float]) -> list[Filter]:
    return [LowPass(kappa=kappa) for kappa in kappas]


def two_point_filters(kappas: Sequence[float], gammas: Sequence[float]) -> list[Filter]:
    return [DiSK(kappa=kappa, gamma=gamma) for kappa in kappas for gamma in gammas]


def kalman_gain_filters(steady: Sequence[float], gammas: Sequence[float]) -> list[Filter]:
    """DiSK with the gains of a Kalman filter, which fall from 1 to a steady one: σ_v²/σ_w² = κ²/(1-κ), σ_H = 0.

    >>> [filter] = kalman_gain_filters([0.1], [0.5])
    >>> describe(filter)
    'k∞=0.1 γ=0.5'
    """
    gains = [KalmanGain(1.0, 0.0, kappa**2 / (1 - kappa)) for kappa in steady]
    return [DiSK(gamma=gamma, gain=gain) for gain in gains for gamma in gammas]


def describe(filter: Filter) -> str:
    """κ and γ, as the tables show them.

    >>> from diskdp.filters import NoFilter
    >>> describe(DiSK(kappa=0.1, gamma=0.5)), describe(LowPass(kappa=0.1)), describe(NoFilter())
    ('κ=0.1 γ=0.5', 'κ=0.1', '')
    """
    if isinstance(filter, DiSK):
        ahead = "" if filter.gamma is None else f" γ={filter.gamma:g}"
        if isinstance(filter.gain, KalmanGain):
            return f"k∞={filter.gain.steady:.3g}{ahead}"
        return f"κ={filter.kappa:g}{ahead}" + ("" if filter.c is None else f" c={filter.c:.4g}")
    return f"κ={filter.kappa:g}" if isinstance(filter, LowPass) and filter.kappa is not None else ""
