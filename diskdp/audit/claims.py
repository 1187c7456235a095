"""What a plan claims: the curve δ(ε) of a number of its steps, and of the same steps with less noise.

The one place of the audit that asks the accountant.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from scipy import special

from diskdp.audit.bounds import Array, Event, largest_falling
from diskdp.errors import DiskDPWarning
from diskdp.plan import Plan

GRID = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)  # ε at which the claimed curve is looked at
_LEAST_NOISE = 0.1  # noise multipliers below are taken for this one, which bounds ε from below all the same


@dataclass(frozen=True)
class Claim:
    """The guarantee of a plan's first steps, whatever their number.

    >>> claim = Claim(Plan(dataset_size=100, batch_size=100, steps=4, noise_multiplier=2.0, delta=1e-5))
    >>> round(claim.epsilon(4), 3), round(claim.epsilon(4, noise_multiplier=1.0), 3)
    (4.377, 9.997)
    """

    plan: Plan

    def epsilon(self, steps: int, noise_multiplier: float | None = None) -> float:
        """ε at the plan's δ: as claimed, or had the plan this noise (never overstated)."""
        if noise_multiplier is None:
            return self.plan.epsilon_after(steps)
        sigma = max(_LEAST_NOISE, _rounded_up(noise_multiplier))
        while math.isinf(value := _with_noise(self.plan, sigma, self.plan.batch_size).epsilon_after(steps)):
            sigma *= 2
        return value

    def epsilon_at_rate(self, steps: int, sample_rate: float) -> float:
        """ε at the plan's δ, had its batches this sample rate (rounded down to whole batches)."""
        batch = max(1, min(math.floor(sample_rate * self.plan.dataset_size), self.plan.dataset_size))
        return _with_noise(self.plan, self.plan.noise_multiplier, batch).epsilon_after(steps)

    def delta(self, steps: int, epsilon: float) -> float:
        """δ at ε, as claimed."""
        return _delta(self.plan, steps, epsilon)

    def broken_by(self, event: Event, steps: int) -> float | None:
        """Where on the claimed curve an event's divergence exceeds it most, or None if nowhere."""
        largest, where, known = 0.0, None, 0.0
        for epsilon in reversed(GRID):
            divergence = event.divergence(epsilon)
            if divergence > known:  # the curve falls: below, it is at least what was found above
                known = self.delta(steps, epsilon)
                if divergence - known > largest:
                    largest, where = divergence - known, epsilon
        return where

    def noise_of(self, event: Event, epsilon: float, steps: int) -> float:
        """The noise multiplier at which the event would just be allowed (about; never below)."""
        goal = event.divergence(epsilon)

        def excess(sigma: float) -> float:
            return _delta(_with_noise(self.plan, sigma, self.plan.batch_size), steps, epsilon) - goal

        return largest_falling(excess, _LEAST_NOISE, self.plan.noise_multiplier)


def fixed_size_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """A lower bound of ε where each batch is exactly as large as the last, each record in ``sample_rate`` of them.

    The worst case of Chua et al. 2024: all other records contribute -C, so that a batch betrays a record that it
    holds even if that contributes nothing, by one contribution less; the record itself contributes C or nothing, and
    moves the sum by 2C or C. The event is that some step exceeds a threshold. The smaller of two values: for
    membership drawn anew each step, and for batches that are the parts of a shuffle.

    >>> round(fixed_size_epsilon(0.8, 0.01, 100, 1e-5), 1)
    5.6
    """
    cuts = np.linspace(-5 * noise_multiplier, 2 + 9 * noise_multiplier, 4000)
    exactly_once = min(1.0, steps * sample_rate)

    def tails(shift: float) -> tuple[Array, Array]:
        outside, inside = (special.ndtr((s - cuts) / noise_multiplier) for s in (0.0, shift))  # above the threshold
        drawn_anew = _any_of(steps, (1 - sample_rate) * outside + sample_rate * inside)
        held = 1 - (1 - _any_of(steps - 1, outside)) * (1 - inside)
        return drawn_anew, exactly_once * held + (1 - exactly_once) * _any_of(steps, outside)

    bounds = [
        np.max(np.log(np.maximum(likely - delta, 1e-300)) - np.log(np.maximum(unlikely, 1e-300)))
        for likely, unlikely in zip(tails(2.0), tails(1.0))
    ]
    return max(0.0, float(min(bounds)))


def _any_of(times: int, probability: Array) -> Array:
    """The probability that it happens at least once."""
    return -np.expm1(times * np.log1p(-np.minimum(probability, 1 - 1e-12)))


@lru_cache(maxsize=4096)
def _delta(plan: Plan, steps: int, epsilon: float) -> float:
    return plan.delta_after(steps, epsilon)


@lru_cache(maxsize=64)
def _with_noise(plan: Plan, noise_multiplier: float, batch_size: int) -> Plan:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    del values["epochs"], values["epsilon"]
    values.update(noise_multiplier=noise_multiplier, batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiskDPWarning)
        return Plan(**values)


def _rounded_up(x: float) -> float:
    """To three digits: fewer distinct plans to account for."""
    if not 0 < x < math.inf:
        return x
    unit = 10.0 ** (math.floor(math.log10(x)) - 2)
    return math.ceil(x / unit) * unit
