"""Strategies of correlated noise: a lower-triangular C of which C g + z is released, so that the noise of g is C⁻¹ z.

Frozen values; what they cost is in sensitivity.py, what they make of i.i.d. normals in stream.py. Matrices written out
here (`encoder`, `decoder`) are for small numbers of steps and for tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import linalg, signal

from diskdp.errors import NoiseError

Array: TypeAlias = npt.NDArray[np.float64]

MOST_STEPS = 10**6  # sums of that many numbers err by less than the margin of sensitivity.py
MOST_DENSE = 4096  # rows of a matrix that is written out


@dataclass(frozen=True)
class Banded:
    """C is Toeplitz with these first entries of its first column, c_0 = 1 first, and zeros below (BandMF).

    Columns scaled to length 1 are the same mechanism: the scale is in `sensitivity`, and so in the deviation. Entries
    must not be negative and must not rise: then equally spaced participations are the worst (sensitivity.py), and no
    zero of Σ c_i xⁱ is inside the unit circle (Eneström and Kakeya), so that the weights of C⁻¹ do not grow
    exponentially. ``Banded((1,))`` is independent noise.

    >>> Banded.square_root(4).coefficients
    (1.0, 0.5, 0.375, 0.3125)
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        c = self.coefficients
        if not c or c[0] != 1:
            raise NoiseError("the first coefficient must be 1: the scale of C goes into the noise's deviation")
        if not all(0 <= later <= earlier for earlier, later in itertools.pairwise(c)):
            raise NoiseError("coefficients must not be negative and must not rise: no sensitivity is proved for others")

    @property
    def bands(self) -> int:
        """How many diagonals of C are not zero."""
        return len(self.coefficients)

    def first_column(self, steps: int) -> Array:
        """The first column of C for that many steps."""
        column = np.zeros(_steps(steps))
        count = min(steps, self.bands)
        column[:count] = self.coefficients[:count]
        return column

    @classmethod
    def square_root(cls, bands: int) -> Banded:
        """The first ``bands`` coefficients of (1-x)^(-1/2), whose Toeplitz matrix is the prefix sums' square root.

        In full length it is the best Toeplitz factorisation of prefix sums, up to an additive constant (Henzinger and
        Upadhyay 2022; Kalinin and Lampert 2024 for the truncated one).
        """
        if not (isinstance(bands, int) and 1 <= bands <= MOST_DENSE):
            raise NoiseError(f"bands={bands!r}: must be a whole number from 1 to {MOST_DENSE}")
        ratios = [1.0] + [(2 * i - 1) / (2 * i) for i in range(1, bands)]
        return cls(tuple(float(c) for c in np.cumprod(ratios)))


@dataclass(frozen=True)
class BLT:
    """C is Toeplitz with c_0 = 1 and c_i = Σ_j weights_j decays_j^(i-1): a buffer each (Dvijotham et al. 2024).

    Weights are not negative and add up to at most 1, decays are from 0 to below 1: so the coefficients do not rise.

    >>> BLT(weights=(0.5,), decays=(0.8,)).first_column(4).round(3).tolist()
    [1.0, 0.5, 0.4, 0.32]
    """

    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.weights or len(self.weights) != len(self.decays):
            raise NoiseError(f"{len(self.weights)} weights and {len(self.decays)} decays: one of each a buffer")
        if not all(0 <= w <= 1 for w in self.weights) or math.fsum(self.weights) > 1:
            raise NoiseError("weights must be 0 or more and add up to at most 1: no sensitivity is proved for others")
        if not all(0 <= d < 1 for d in self.decays):
            raise NoiseError("decays must be from 0 to below 1: no sensitivity is proved for others")

    def first_column(self, steps: int) -> Array:
        """The first column of C for that many steps."""
        column = np.ones(_steps(steps))
        column[1:] = 0.0
        powers = np.arange(steps - 1)
        for weight, decay in zip(self.weights, self.decays):
            column[1:] += weight * np.power(decay, powers)
        return column


@dataclass(frozen=True)
class Tree:
    """Binary trees over blocks of ``restart_every`` steps, noise at each node that is complete (DP-FTRL).

    A row of C is a node, 1 at the steps below it. Each restart is another tree, independent of those before, whose
    noise stays in all later sums. ``reduced`` averages a node with what its children say of it, weighted by their
    variances (Honaker 2015, from below); otherwise only nodes that are left children are used, as they are.

    >>> encoder(Tree(restart_every=4, reduced=False), 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]]
    """

    restart_every: int
    reduced: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.restart_every, bool) or not isinstance(self.restart_every, int):
            raise NoiseError(f"restart_every={self.restart_every!r}: must be a whole number of steps")
        if not 1 <= self.restart_every <= MOST_STEPS:
            raise NoiseError(f"restart_every={self.restart_every}: must be from 1 to {MOST_STEPS}")

    def levels(self, steps: int) -> int:
        """How many complete nodes are above a step, at most, in a run of that many steps."""
        return min(self.restart_every, _steps(steps)).bit_length()

    def completes(self, step: int) -> int:
        """The highest level of a node that is complete with this step, 0 being the step alone."""
        count = step % self.restart_every + 1
        return (count & -count).bit_length() - 1

    def variances(self, levels: int) -> list[float]:
        """Of a node's estimate at each level, for noise of variance 1: also the weight of the node's own noise."""
        found = [1.0]
        while len(found) < levels:
            found.append(1 / (1 + 1 / (2 * found[-1])) if self.reduced else 1.0)
        return found[:levels]


Toeplitz: TypeAlias = "Banded | BLT"
Strategy: TypeAlias = "Banded | BLT | Tree"


def inverse_column(strategy: Toeplitz, steps: int) -> Array:
    """The first column of C⁻¹: the weights of z_t, z_{t-1}, ... in the noise of step t.

    >>> inverse_column(Banded.square_root(3), 4).round(4).tolist()
    [1.0, -0.5, -0.125, 0.25]
    """
    return reciprocal(strategy.first_column(steps))


def reciprocal(column: Array) -> Array:
    """The first coefficients of 1 / Σ column_i xⁱ, as many as are given."""
    impulse = np.zeros(len(column))
    impulse[0] = 1.0
    last = int(np.flatnonzero(column)[-1])
    return np.asarray(signal.lfilter([1.0], column[: last + 1], impulse))


def encoder(strategy: Strategy, steps: int) -> Array:
    """C, written out: a row for each fresh normal, in the order in which they are drawn.

    >>> encoder(Banded((1.0, 0.5)), 3).tolist()
    [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.5, 1.0]]
    """
    _dense(steps)
    if not isinstance(strategy, Tree):
        return np.asarray(linalg.toeplitz(strategy.first_column(steps), np.zeros(steps)))
    rows = []
    for step, level in _nodes(strategy, steps):
        rows.append(np.zeros(steps))
        rows[-1][step + 1 - (1 << level) : step + 1] = 1.0
    return np.array(rows)


def decoder(strategy: Strategy, steps: int) -> Array:
    """What turns the fresh normals into the noise of each step: C⁻¹ where C is square, a left inverse of C for trees.

    >>> matrix = decoder(Tree(restart_every=4), 6)
    >>> bool(np.allclose(matrix @ encoder(Tree(restart_every=4), 6), np.eye(6)))
    True
    """
    _dense(steps)
    if not isinstance(strategy, Tree):
        return np.asarray(linalg.toeplitz(inverse_column(strategy, steps), np.zeros(steps)))
    nodes = _nodes(strategy, steps)
    weights = strategy.variances(strategy.levels(steps))
    estimates: dict[tuple[int, int], Array] = {}  # by level and first step
    for row, (step, level) in enumerate(nodes):
        own, size = np.zeros(len(nodes)), 1 << level
        own[row] = 1.0
        start = step + 1 - size
        if level and strategy.reduced:
            below = estimates[level - 1, start] + estimates[level - 1, start + size // 2]
            own = weights[level] * own + (1 - weights[level]) * below
        estimates[level, start] = own
    sums = np.zeros((steps + 1, len(nodes)))
    for count in range(1, steps + 1):
        first = (count - 1) // strategy.restart_every * strategy.restart_every
        sums[count] = sums[first]  # the noise of finished trees stays
        rest = count - first
        for level in reversed(range(rest.bit_length())):
            if rest >> level & 1:
                sums[count] += estimates[level, first]
                first += 1 << level
    return np.diff(sums, axis=0)


def covariance(strategy: Strategy, steps: int) -> Array:
    """Of the noise of a coordinate over the steps, for z of variance 1."""
    matrix = decoder(strategy, steps)
    return np.asarray(matrix @ matrix.T)


def _nodes(strategy: Tree, steps: int) -> Sequence[tuple[int, int]]:
    """(step, level) of every node that is used, as completed."""
    nodes = []
    for step in range(steps):
        highest = strategy.completes(step)
        nodes += [(step, level) for level in range(0 if strategy.reduced else highest, highest + 1)]
    return nodes


def _steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise NoiseError(f"steps={steps!r}: must be a whole number from 1 to {MOST_STEPS}")
    return steps


def _dense(steps: int) -> None:
    if _steps(steps) > MOST_DENSE:
        raise NoiseError(f"steps={steps}: matrices are written out up to {MOST_DENSE} steps")
