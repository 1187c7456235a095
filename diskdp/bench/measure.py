"""Time, taken fairly: methods in turn in one process, the minimum of all repeats, wall and CPU.

A step over many microbatches may be put together from fewer: the first (the noise is drawn beside it), one in the
middle as often as it occurs, and the last with all that follows; each part's minimum counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

TURN_SECONDS = 0.1  # what a method has before it is the next one's turn
LEAST_MICROBATCHES = 3  # from which a larger number can be put together: first, middle, last

Taken = TypeVar("Taken")
Mark = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """Something to time. ``run`` marks the moments at which it takes a microbatch; ``microbatches`` is how many it
    takes, of ``stands_for`` in a whole step."""

    run: Callable[[Mark], object]
    microbatches: int = 1
    stands_for: int = 1

    @property
    def way(self) -> str:
        """How the time of a whole step is had."""
        if self.stands_for == self.microbatches:
            return "whole step"
        if self.microbatches == 1:
            return f"{self.stands_for} × one microbatch"
        return f"first + {self.stands_for - 2} × middle + last microbatch"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a whole step; ``spread`` is the median over the minimum of wall time: 1 on an idle machine."""

    wall: float
    cpu: float
    spread: float
    repeats: int
    way: str


class _Clock:
    """Wall and CPU time at the start, at each mark, and at the end."""

    def __init__(self) -> None:
        self.stamps: list[tuple[float, float]] = []

    def __call__(self) -> None:
        self.stamps.append((time.perf_counter(), time.process_time()))


def marked(items: Sequence[Taken], mark: Mark) -> Iterator[Taken]:
    """The items, a mark set whenever one is taken."""
    for item in items:
        mark()
        yield item


def interleaved(
    works: Mapping[str, Work], seconds: float, least_rounds: int, progress: Callable[[float], None] = lambda done: None
) -> dict[str, Timing]:
    """Time the works in turn until the time is over, and at least so many rounds; the caller has warmed them up."""
    runs: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in works}
    start, rounds = time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() < start + seconds:
        rounds += 1
        for turn, (name, work) in enumerate(works.items(), 1):
            turn_ends = time.perf_counter() + TURN_SECONDS
            while time.perf_counter() < turn_ends:
                runs[name].append(_segments(work))
            done = rounds - 1 + turn / len(works)
            progress(min(1.0, (time.perf_counter() - start) / seconds, done / least_rounds))
    return {name: _timing(work, runs[name]) for name, work in works.items()}


def _segments(work: Work) -> tuple[list[float], list[float]]:
    """Wall and CPU milliseconds of the parts of one run; the first begins with the run, the last ends with it."""
    clock = _Clock()
    clock()
    work.run(clock)
    clock()
    begin, *inner, end = clock.stamps
    if len(inner) > 1 and len(inner) != work.microbatches:
        raise RuntimeError(f"{len(inner)} microbatches were taken, of {work.microbatches}")
    stamps = [begin, *inner[1:], end]
    wall, cpu = ([1000 * (b[k] - a[k]) for a, b in pairwise(stamps)] for k in (0, 1))
    return wall, cpu


def _timing(work: Work, runs: Sequence[tuple[list[float], list[float]]]) -> Timing:
    wall, cpu = (_best(work, [run[kind] for run in runs]) for kind in (0, 1))
    return Timing(wall, cpu, median(_whole(work, run[0]) for run in runs) / wall, len(runs), work.way)


def _whole(work: Work, parts: Sequence[float]) -> float:
    """A whole step's time from the parts of one run."""
    if work.stands_for == work.microbatches:
        return sum(parts)
    if work.microbatches == 1:
        return parts[0] * work.stands_for
    first, *middle, last = parts
    return first + (work.stands_for - 2) * sum(middle) / len(middle) + last


def _best(work: Work, runs: Sequence[Sequence[float]]) -> float:
    """The same from the minima of the parts over all runs, where parts are put together."""
    if work.stands_for == work.microbatches or work.microbatches == 1:
        return min(_whole(work, parts) for parts in runs)
    first, last = min(parts[0] for parts in runs), min(parts[-1] for parts in runs)
    middle = min(min(parts[1:-1]) for parts in runs)
    return first + (work.stands_for - 2) * middle + last
