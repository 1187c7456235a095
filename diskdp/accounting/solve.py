"""What releases spend together, and how much noise, how many steps or how large a batch a budget allows.

Assumes noise of standard deviation sigma times what one record can contribute. A `Release` says what a step is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

from diskdp.accounting import gaussian, pld, renyi
from diskdp.accounting.releases import Gaussian, Release
from diskdp.accounting.search import largest_count, largest_within, smallest_noise
from diskdp.errors import PlanError

Parts = tuple[tuple[Release, float, int], ...]

_DELTA_MARGIN = 1e-4  # searches aim this fraction below delta, since other machines round differently
_STEERING_POINTS = 2**14  # and are steered on a grid this coarse; the last word is that of pld.GRID


def epsilon_of(parts: Parts, delta: float, accountant: str) -> float:
    """The epsilon that all parts spend together at `delta`."""
    check_delta(delta)
    parts = tuple(part for part in parts if part[2] > 0)
    if not parts:
        return 0.0
    if any(sigma == 0 for _, sigma, _ in parts):
        return math.inf
    _check_resolved(parts, delta, accountant)
    return _epsilon(merged(parts), float(delta), accountant)


def delta_of(parts: Parts, epsilon: float, accountant: str) -> float:
    """The delta that all parts spend together at `epsilon`."""
    if not epsilon >= 0:
        raise PlanError(f"epsilon must be zero or more, got {epsilon}")
    parts = tuple(part for part in parts if part[2] > 0)
    if not parts:
        return 0.0
    if any(sigma == 0 for _, sigma, _ in parts):
        return 1.0
    return math.exp(_log_delta(merged(parts), float(epsilon), accountant))


def merged(parts: Parts) -> Parts:
    """The same releases, like ones counted together: those of the full batch are one Gaussian."""
    counts: dict[tuple[Release, float], int] = {}
    squared_mu = 0.0
    for step, sigma, count in parts:
        if isinstance(step, Gaussian):
            squared_mu += count * (step.shift / sigma) ** 2
        else:
            counts[step, sigma] = counts.get((step, sigma), 0) + count
    whole: Parts = ((Gaussian(1.0), 1 / math.sqrt(squared_mu), 1),) if squared_mu > 0 else ()
    return tuple((step, sigma, count) for (step, sigma), count in counts.items()) + whole


@lru_cache(maxsize=256)
def calibrate(step: Release, steps: int, epsilon: float, delta: float, accountant: str) -> float:
    """The smallest noise multiplier (to 0.1%) whose `steps` releases spend at most `epsilon` at `delta`."""
    check_budget(epsilon, delta)
    if steps == 0 or math.isinf(epsilon):
        return 0.0
    _check_resolved(((step, 1.0, steps),), delta, accountant)
    if step.chance < 1 and delta >= -math.expm1(steps * math.log1p(-step.chance)):
        raise PlanError(
            f"delta={delta:g} is no less than a record's chance of ever being sampled: batches in the clear, "
            "without noise, would satisfy it; choose a smaller delta"
        )
    goal_delta = _goal(delta, steps, accountant)
    mu = gaussian.largest_mu(epsilon, goal_delta)
    if isinstance(step, Gaussian) and accountant == "pld":
        return math.sqrt(steps) * step.shift / mu
    start = _central_limit(step, mu**2 / steps)
    goal = _deviate(goal_delta)

    def exact(sigma: float) -> float:
        return goal - _deviate(_log_delta(((step, sigma, steps),), epsilon, accountant, library=True))

    grid = pld.loss_range(step, start) / _STEERING_POINTS

    @cache
    def rough(sigma: float) -> float:
        return goal - _deviate(_log_delta(((step, sigma, steps),), epsilon, accountant, grid))

    return smallest_noise(exact, rough, start)


def largest(
    parts_of: Callable[[int], Parts], low: int, high: int, epsilon: float, delta: float, accountant: str
) -> int | None:
    """The largest count in [low, high] whose parts, `parts_of(count)`, spend at most `epsilon` at `delta`.

    Assumes that more spends more. None if not even `low` fits.
    """
    check_budget(epsilon, delta)
    squared_mu = gaussian.largest_mu(epsilon, math.log(delta)) ** 2

    def in_the_limit(count: int) -> bool:
        """By the central limit, which asks for slightly too little noise."""
        parts = ((times, step.log_second_moment(sigma)) for step, sigma, times in parts_of(count))
        return sum(times * math.expm1(min(moment, 700.0)) for times, moment in parts) <= squared_mu

    start = largest_within(in_the_limit, low, high)

    def exact(count: int) -> float:
        parts = merged(parts_of(count))
        goal = _deviate(_goal(delta, sum(part[2] for part in parts), accountant))
        return goal - _deviate(_log_delta(parts, epsilon, accountant, library=True))

    @cache
    def rough(count: int) -> float:
        parts = merged(parts_of(count))
        grid = max(pld.loss_range(step, sigma) for step, sigma, _ in parts) / _STEERING_POINTS
        return _deviate(math.log(delta)) - _deviate(_log_delta(parts, epsilon, accountant, grid))

    return largest_count(exact, rough, start, low, high)


def check_budget(epsilon: float, delta: float) -> None:
    """Raise `PlanError` unless both are numbers that can be a budget."""
    if not epsilon > 0:
        raise PlanError(f"epsilon must be positive, got {epsilon}")
    check_delta(delta)


def check_delta(delta: float) -> None:
    """Raise `PlanError` unless delta is one."""
    if not 0 < delta < 1:
        raise PlanError(f"delta must be strictly between 0 and 1, got {delta}")


def _check_resolved(parts: Parts, delta: float, accountant: str) -> None:
    steps = sum(count for step, _, count in parts if not isinstance(step, Gaussian))
    resolved = max(1000 * pld.TAIL * len(parts), 100 * pld.ROUNDING * steps)
    if accountant == "pld" and steps and delta < resolved:
        raise PlanError(
            f"delta={delta:g} is below what the PLD accountant resolves over {steps} steps ({resolved:g}); "
            "use accountant='rdp' or a larger delta"
        )


@lru_cache(maxsize=1024)
def _epsilon(parts: Parts, delta: float, accountant: str) -> float:
    if accountant == "rdp":
        return renyi.epsilon_at(renyi.divergences(parts), delta)
    if (mu := _only_gaussian(parts)) is not None:
        return gaussian.epsilon_at(mu, delta)
    losses = pld.composed(parts)
    return math.inf if losses is None else max(order.epsilon(delta) for order in losses)


def _log_delta(parts: Parts, epsilon: float, accountant: str, grid: float = pld.GRID, library: bool = False) -> float:
    if accountant == "rdp":
        return renyi.log_delta(renyi.divergences(parts, library), epsilon)
    if (mu := _only_gaussian(parts)) is not None:
        return gaussian.log_delta(mu, epsilon)
    losses = pld.composed(parts, grid)
    return 0.0 if losses is None else math.log(max(1e-300, *(order.delta(epsilon) for order in losses)))


def _only_gaussian(parts: Parts) -> float | None:
    """The mu of parts that are a single Gaussian."""
    step, sigma, count = parts[0]
    return math.sqrt(count) * step.shift / sigma if len(parts) == 1 and isinstance(step, Gaussian) else None


def _goal(delta: float, steps: int, accountant: str) -> float:
    margin = max(_DELTA_MARGIN, 3 * pld.ROUNDING * steps / delta) if accountant == "pld" else _DELTA_MARGIN
    return math.log(delta) + math.log1p(-margin)


def _central_limit(step: Release, squared_mu: float) -> float:
    """Where E exp(loss) of one step is 1 + squared_mu (Bu et al. 2020): slightly too little noise."""
    low, high = -20.0, 20.0  # the logarithm of sigma; the moment falls with it
    goal = math.log1p(squared_mu)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if step.log_second_moment(math.exp(middle)) > goal else (low, middle)
    return math.exp(high)


def _deviate(log_delta: float) -> float:
    """The Gaussian deviate that goes with a tail of mass delta: nearly a straight line in sigma."""
    return math.sqrt(-2 * min(log_delta, 0.0))
