"""Solving for one number of a plan: steered by a cheap function, settled by few evaluations of the exact one.

Assumes functions of one variable that rise or fall throughout. What is returned has been evaluated itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize

from diskdp.errors import PlanError

SIGMA_TOLERANCE = 5e-4  # a calibrated sigma is at most this fraction above the smallest one
COUNT_TOLERANCE = 1e-4  # a count of steps or records is at most this fraction below the largest one
_MAX_EXACT_EVALUATIONS = 30


def smallest_noise(exact: Callable[[float], float], rough: Callable[[float], float], start: float) -> float:
    """Smallest sigma, within tolerance, with exact(sigma) <= 0: the secant method from the root of `rough`.

    Both fall as sigma grows, nearly along a line; `rough` is cheap and gives the first slope.
    """
    sigma = _root(rough, start) * (1 + SIGMA_TOLERANCE / 2)
    slope = (rough(1.01 * sigma) - rough(sigma)) / (0.01 * sigma)
    value = exact(sigma)
    low, high = 0.0, math.inf
    for _ in range(_MAX_EXACT_EVALUATIONS):
        low, high = (sigma, high) if value > 0 else (low, sigma)
        if high <= low * (1 + SIGMA_TOLERANCE):
            return high
        proposal = math.nan
        if slope < 0:
            drop = -slope * sigma * SIGMA_TOLERANCE
            if -drop <= value <= 0:
                return sigma
            proposal = sigma - (value + drop / 2) / slope
        if not max(low, sigma / 2) < proposal < min(high, 2 * sigma):  # far off, or flat
            proposal = 2 * low if math.isinf(high) else math.sqrt(max(low, high / 4) * high)
        previous, value = value, exact(proposal)
        slope = (value - previous) / (proposal - sigma)
        sigma = proposal
    raise PlanError(
        "this accountant finds no noise multiplier for this epsilon and delta; "
        "use another accountant or a larger epsilon"
    )


def largest_count(
    exact: Callable[[int], float],
    rough: Callable[[int], float],
    start: int,
    low: int,
    high: int,
    tolerance: float = COUNT_TOLERANCE,
) -> int | None:
    """The largest count in [low, high] with exact(count) <= 0, both functions rising; None if there is none.

    `rough` is cheap, and looked at from `start` on.
    Exact up to 1 / tolerance, and at most that fraction low beyond. What is returned has itself been evaluated.
    """
    fits, fails = low - 1, high + 1
    values: dict[int, float] = {}
    guess = _crossing(rough, start, low, high)
    while fails - fits > max(1, int(tolerance * fits)):
        guess = min(max(guess, fits + 1), fails - 1)
        values[guess] = exact(guess)
        fits, fails = (guess, fails) if values[guess] <= 0 else (fits, guess)
        if fits in values and fails in values:
            share = values[fits] / (values[fits] - values[fails])
            logs = math.log(fits), math.log(fails)
            guess = int(math.exp(logs[0] + share * (logs[1] - logs[0])))
            if guess <= fits and fails - fits > 4:  # the crossing is close above: settle it there
                guess = fits + max(1, int(tolerance * fits / 2))
            if len(values) % 4 == 0:  # never worse than halving for long
                guess = (fits + fails) // 2
        else:  # one-sided: walk outwards from the guess, faster each time
            stride = max(1, int(guess * 0.002 * 4 ** len(values)) if len(values) > 1 else int(guess * 0.0005))
            guess += stride if values[guess] <= 0 else -stride
    return fits if fits >= low else None


def _crossing(rising: Callable[[int], float], start: int, low: int, high: int) -> int:
    """Where `rising` crosses zero, roughly, found outwards from `start`."""
    below, above, factor = start, start, 1.1
    while rising(below) > 0 and below > low:
        below, above, factor = max(low, int(below / factor)), below, factor**1.5
    while rising(above) <= 0 and above < high:
        below, above, factor = above, min(high, math.ceil(above * factor)), factor**1.5
    while above - below > max(1, below // 1000):
        share = rising(below) / (rising(below) - rising(above)) if rising(below) < 0 < rising(above) else 0.5
        share = min(max(share, 0.1), 0.9)
        middle = min(max(round(below ** (1 - share) * above**share), below + 1), above - 1)
        below, above = (middle, above) if rising(middle) <= 0 else (below, middle)
    return below if rising(above) > 0 else above


def largest_within(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest count in [low, high] that fits, if smaller ones do; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _root(falling: Callable[[float], float], start: float) -> float:
    """Where `falling` crosses zero, roughly; at most a factor of two below `start` or eight above it."""
    low = high = start
    factor = 1.05
    while falling(high) > 0 and high < 8 * start:
        low, high, factor = high, high * factor, factor * 1.5
    while falling(low) <= 0 and low > start / 2:
        low, high = low / 1.1, low
    if falling(low) <= 0 or falling(high) > 0:
        return math.sqrt(low * high)
    return float(optimize.brentq(falling, low, high, xtol=1e-4 * low, rtol=1e-4))
