"""Confidence bounds, and the search for events that tell two worlds apart.

Knows arrays of numbers alone: nothing of training, plans or canaries. A bound fails with the probability it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special, stats

Array: TypeAlias = "npt.NDArray[Any]"

_SCREENED = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # ε for each of which an event is chosen
_CANDIDATES = 400  # thresholds looked at, at most


def proportion_above(successes: int, trials: int, error: float) -> float:
    """The Clopper-Pearson lower bound: the true proportion is smaller with probability at most ``error``.

    >>> round(proportion_above(40, 100, 0.025), 4)
    0.3033
    """
    return float(special.betaincinv(successes, trials - successes + 1, error)) if successes else 0.0


def proportion_below(successes: int, trials: int, error: float) -> float:
    """The Clopper-Pearson upper bound.

    >>> round(proportion_below(0, 1000, 0.05), 5)  # "the rule of three"
    0.00299
    """
    return 1.0 - proportion_above(trials - successes, trials, error)


def scale_below(mean_square: float, count: int, error: float) -> float:
    """An upper bound of the standard deviation of centred normals, of which ``count`` have this mean square.

    >>> round(scale_below(1.0, 1000, 1e-3), 3)
    1.074
    """
    return math.sqrt(mean_square * count / float(stats.chi2.ppf(error, count)))


@dataclass(frozen=True)
class Event:
    """An event "low < x < high", or its opposite, with bounds of its probability in two worlds.

    ``likely`` bounds its probability from below in the world that makes it likely, ``unlikely`` from above in the
    other; ``reversed`` says that it is the world without the record that makes it likely.
    """

    low: float
    high: float
    reversed: bool
    likely: float
    unlikely: float

    def divergence(self, epsilon: float) -> float:
        """A lower bound of δ at ε: P(event) - exp(ε) Q(event)."""
        return self.likely - math.exp(epsilon) * self.unlikely

    def epsilon(self, delta: float) -> float:
        """A lower bound of ε at δ."""
        if self.likely <= delta:
            return 0.0
        return max(0.0, math.log((self.likely - delta) / self.unlikely))

    def __str__(self) -> str:
        side = f"> {self.low:.3g}" if math.isinf(self.high) else f"< {self.high:.3g}"
        worlds = ("without", "with") if self.reversed else ("with", "without")
        return f"P({side}): at least {self.likely:.3g} {worlds[0]} the record, at most {self.unlikely:.3g} {worlds[1]}"


def telling_events(without: Array, with_record: Array, error: float) -> list[Event]:
    """Events that tell the worlds apart; all bounds hold together with probability 1 - ``error``.

    They are chosen on every third draw and measured on the others, so that choosing costs nothing. Draws of a world
    must be independent and identically distributed; their law may be any.

    >>> generator = np.random.default_rng(0)
    >>> events = telling_events(generator.normal(size=9000), generator.normal(size=9000) + 1, 1e-3)
    >>> 0.3 < max(event.divergence(0.0) for event in events) < 0.383  # the total variation is .383
    True
    """
    chosen: set[tuple[float, float, bool]] = set()
    train_0, test_0 = _split(without)
    train_1, test_1 = _split(with_record)
    values = np.concatenate([train_0, train_1])
    cuts = np.unique(values)
    if len(cuts) > _CANDIDATES:
        tail = np.geomspace(1 / len(values), 0.01, _CANDIDATES // 4)  # events that are rare in both worlds tell most
        cuts = np.unique(np.quantile(values, np.concatenate([np.linspace(0, 1, _CANDIDATES // 2), tail, 1 - tail])))
    # halfway between values: an atom, such as an exact 0 without noise, is then on one side
    cuts = np.concatenate([[cuts[0] - 1], (cuts[1:] + cuts[:-1]) / 2, [cuts[-1] + 1]])
    below_0, below_1 = (np.searchsorted(np.sort(x), cuts) / len(x) for x in (train_0, train_1))
    for p, q, is_reversed in ((below_1, below_0, False), (below_0, below_1, True)):
        n_p, n_q = (len(train_0), len(train_1)) if is_reversed else (len(train_1), len(train_0))
        for upper in (False, True):
            p_event, q_event = (1 - p, 1 - q) if upper else (p, q)
            doubt_p = np.sqrt((p_event * (1 - p_event) + 1 / n_p) / n_p)
            doubt_q = np.sqrt((q_event * (1 - q_event) + 1 / n_q) / n_q)
            for epsilon in _SCREENED:
                factor = math.exp(epsilon)
                gain = p_event - factor * q_event - 2 * np.hypot(doubt_p, factor * doubt_q)
                cut = float(cuts[int(np.argmax(gain))])
                chosen.add((cut, math.inf, is_reversed) if upper else (-math.inf, cut, is_reversed))
    share = error / (2 * 4 * len(_SCREENED))  # as many as could have been chosen, each with two bounds
    events = []
    for low, high, is_reversed in sorted(chosen):
        counts = [int(np.count_nonzero((x > low) & (x < high))) for x in (test_0, test_1)]
        sizes = [len(test_0), len(test_1)]
        likely, unlikely = (0, 1) if is_reversed else (1, 0)
        events.append(
            Event(
                low,
                high,
                is_reversed,
                proportion_above(counts[likely], sizes[likely], share),
                proportion_below(counts[unlikely], sizes[unlikely], share),
            )
        )
    return events


def quietest(mean_squares: Sequence[float], counts: Sequence[int], error: float) -> tuple[int, float]:
    """Which of several groups of centred normals has the smallest bound of its deviation, and the bound."""
    bounds = [scale_below(square, count, error / len(counts)) for square, count in zip(mean_squares, counts)]
    least = int(np.argmin(bounds))
    return least, bounds[least]


def largest_falling(excess: Callable[[float], float], low: float, high: float) -> float:
    """About where a falling function crosses zero, never below; ``high`` must be beyond.

    >>> 0.5 <= largest_falling(lambda x: 0.5 - x, 0.01, 1.0) < 0.501
    True
    """
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _split(values: Array) -> tuple[Array, Array]:
    chosen = np.arange(len(values)) % 3 == 0
    return values[chosen], values[~chosen]
