"""What one record can change of C g: bounds for who takes part when, each with its proof, and the slow search.

A record takes part in some steps, each time with a vector of length at most 1 that may depend on all that was released
before. C g changes by C u, of which the Gaussian mechanism with deviation σ·sensitivity is σ's (docs/correlated.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diskdp.errors import NoiseError
from diskdp.noise.correlated.strategies import MOST_STEPS, Array, Strategy, Tree

_MARGIN = 1e-9  # relative: 10⁶ roundings of float64 are 10⁻¹⁰
_MOST_PATTERNS = 10**6


@dataclass(frozen=True)
class Participation:
    """A record takes part in at most ``times`` of ``steps`` steps, ``separation`` or more apart.

    >>> Participation(steps=100, times=7, separation=30).most
    4
    """

    steps: int
    times: int = 1
    separation: int = 1

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("times", self.times), ("separation", self.separation)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise NoiseError(f"{name}={value!r}: must be a whole number, 1 or more")
        if self.steps > MOST_STEPS:
            raise NoiseError(f"steps={self.steps}: sensitivities are bounded up to {MOST_STEPS} steps")

    @property
    def most(self) -> int:
        """The number of times there is room for."""
        return min(self.times, -(-self.steps // self.separation))

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Every way to take part as often as there is room for from there on, and the shorter ones on the way."""

        def longer(pattern: tuple[int, ...], start: int) -> Iterator[tuple[int, ...]]:
            yield pattern
            if len(pattern) < self.times:
                for step in range(start, self.steps):
                    yield from longer((*pattern, step), step + self.separation)

        return longer((), 0)


def sensitivity(strategy: Strategy, participation: Participation) -> float:
    """An upper bound, rounded up by 10⁻⁹, on |C u| over all that one record can do.

    Toeplitz (`Banded`, `BLT`; entries neither negative nor rising): columns i < j have the inner product
    Σ_s c_s c_{s+j-i}, s < T - j, which falls with j and with j - i. In a pattern the m-th step is at least m·separation
    and any two are at least as far apart as there, so taking part at 0, separation, 2·separation, ... is the worst for
    each pair at once (Kalinin and Lampert 2024, Theorem 2), and equal vectors are, as no product is negative. Exact.

    Trees: of the nodes at level h each has at most n_h = min(times, ⌈2^h / separation⌉) of the record's steps below it,
    and together they have ``times``, so Σ (steps below)² ≤ times · n_h. Exact for one participation.

    >>> from diskdp.noise.correlated.strategies import Banded
    >>> round(sensitivity(Banded((1.0, 0.5)), Participation(steps=10, times=3, separation=2)), 6)
    1.936492
    >>> round(sensitivity(Tree(restart_every=1024), Participation(steps=1024)) ** 2, 6)
    11.0
    """
    steps, most, apart = participation.steps, participation.most, participation.separation
    if isinstance(strategy, Tree):
        squared = float(sum(most * min(most, -(-(1 << h) // apart)) for h in range(strategy.levels(steps))))
    else:
        column = strategy.first_column(steps)
        total = np.zeros(steps)
        for start in range(0, most * apart, apart):
            total[start:] += column[: steps - start]
        squared = float(total @ total)
    return math.sqrt(squared) * (1 + _MARGIN)


def searched_sensitivity(matrix: Array, participation: Participation) -> float:
    """The largest |C u| by trying every pattern: for small matrices without negative products of columns.

    >>> round(searched_sensitivity(np.array([[1.0, 0.0], [0.5, 1.0]]), Participation(steps=2, times=2)), 6)
    1.802776
    """
    products = matrix.T @ matrix
    if matrix.shape[1] != participation.steps:
        raise NoiseError(f"a matrix of {matrix.shape[1]} columns for {participation.steps} steps: they must agree")
    if products.min() < 0:
        raise NoiseError("columns with a negative product: the worst vectors are not equal ones; no search is built")
    largest = 0.0
    for number, pattern in enumerate(participation.patterns()):
        if number == _MOST_PATTERNS:
            raise NoiseError(f"more than {_MOST_PATTERNS} patterns: use fewer steps or times, or `sensitivity`")
        chosen = list(pattern)
        largest = max(largest, float(products[np.ix_(chosen, chosen)].sum()))
    return math.sqrt(largest)
