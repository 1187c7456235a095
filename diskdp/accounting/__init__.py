"""What a run spends and how much noise a budget needs.

Thin over dp-accounting. Assumes Gaussian noise with a standard deviation of `noise_multiplier` times what one record
can contribute. `Mechanism` covers all samplers; the functions on plain numbers are for Poisson batches, add-remove.
"""

from __future__ import annotations

from collections.abc import Sequence

from diskdp.accounting import renyi, solve
from diskdp.accounting.mechanism import Mechanism, composed_epsilon, require_built
from diskdp.accounting.releases import Array, Gaussian, Poisson, Release
from diskdp.errors import PlanError

__all__ = ["Mechanism", "calibrate", "composed_epsilon", "delta", "epsilon", "rdp", "require_built"]


def epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld") -> float:
    """The epsilon spent at `delta` by `steps` releases, each of a Poisson sample of rate `sample_rate`.

    >>> round(epsilon(0.7, 0.01, 120, 1e-5), 6)
    2.461238
    >>> round(epsilon(0.7, 1.0, 2, 1e-5), 6)  # the full batch: exact
    10.122495
    """
    step = _checked(noise_multiplier, sample_rate, steps, accountant)
    return solve.epsilon_of(((step, float(noise_multiplier), int(steps)),), delta, accountant)


def delta(noise_multiplier: float, sample_rate: float, steps: int, epsilon: float, accountant: str = "pld") -> float:
    """The delta spent at `epsilon`: the inverse of `epsilon`.

    >>> round(delta(3**0.5, 1.0, 3, 1.0), 6)
    0.126937
    """
    step = _checked(noise_multiplier, sample_rate, steps, accountant)
    return solve.delta_of(((step, float(noise_multiplier), int(steps)),), epsilon, accountant)


def calibrate(epsilon: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld") -> float:
    """The smallest noise multiplier (to 0.1%) whose `steps` releases spend at most `epsilon` at `delta`.

    Never less than enough by dp-accounting's own accountant of that name. An infinite epsilon gives 0.

    >>> sigma = calibrate(2.0, 0.01, 1000, 1e-5)
    >>> 1.998 < epsilon(sigma, 0.01, 1000, 1e-5) <= 2.0
    True
    """
    step = _checked(1.0, sample_rate, steps, accountant)
    return solve.calibrate(step, int(steps), float(epsilon), float(delta), accountant)


def rdp(noise_multiplier: float, sample_rate: float, orders: Sequence[float] | Array) -> Array:
    """Renyi divergences of one step, at `orders` > 1 (Mironov, Talwar, Zhang 2019).

    >>> [float(f"{x:.6g}") for x in 50 * rdp(2.5, 0.01, [1.5, 5, 100])]
    [0.000650071, 0.00218076, 167.416]
    """
    return renyi.at_orders(_poisson(sample_rate), noise_multiplier, orders)


def _checked(noise_multiplier: float, sample_rate: float, steps: int, accountant: str) -> Release:
    if not 0 <= noise_multiplier < float("inf"):
        raise PlanError(f"noise_multiplier must be a finite number, zero or more, got {noise_multiplier}")
    if not 0 < sample_rate <= 1:
        raise PlanError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if steps < 0 or steps != int(steps):
        raise PlanError(f"steps must be a whole number, zero or more, got {steps}")
    require_built(clipping="flat", sampling="poisson", adjacency="add-remove", accountant=accountant, noise="gaussian")
    return _poisson(float(sample_rate))


def _poisson(sample_rate: float) -> Release:
    return Poisson(sample_rate) if sample_rate < 1 else Gaussian(1.0)
