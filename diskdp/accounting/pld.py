"""Privacy loss distributions on a grid: one step by connecting the dots, many by Fourier transforms.

Grid, tails and formulas are the defaults of dp-accounting, so that its values come out; it visits the grid point by
point, which was most of its time. Everything is rounded so that delta can only grow, but for `ROUNDING`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft, signal

from diskdp.accounting.releases import Array, Curve, Release

GRID = 1e-4  # losses are multiples of this: the default of dp_accounting.pld.PLDAccountant
TAIL = 1e-15  # the mass of the tails of a composed loss that is moved to infinity
ROUNDING = 1e-16  # error of delta for each step composed by Fourier transforms: measured at half of this
_MAX_GRID_POINTS = 2**22  # what would need more gets a coarser grid, which can only raise the answer
_COARSEST_GRID = 0.1  # what would need a coarser one than this counts as infinite
_CHERNOFF_ORDERS = 20  # tail bounds are tried at these multiples, up and down, of one over the grid's width

Parts = Sequence[tuple[Release, float, int]]
"""What was released: which step, with what noise, how often."""


@dataclass(frozen=True, eq=False)
class Losses:
    """The distribution of a privacy loss: masses at (lowest + i) * grid, and `infinite` at infinity."""

    grid: float
    lowest: int
    masses: Array
    infinite: float

    def repeated(self, count: int) -> Losses:
        """The loss of `count` independent releases."""
        if count == 1:
            return self
        first, last = self._support(count)
        length = fft.next_fast_len(max(last - first + 1, len(self.masses)), real=True)
        wrapped = fft.irfft(fft.rfft(self.masses, length) ** count, length)
        masses: Array = np.roll(wrapped, -first)[: last - first + 1]
        infinite = TAIL - math.expm1(count * math.log1p(-self.infinite))
        return Losses(self.grid, self.lowest * count + first, masses, infinite)

    def beside(self, other: Losses) -> Losses:
        """The loss of both together."""
        masses: Array = signal.fftconvolve(self.masses, other.masses)
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        return Losses(self.grid, self.lowest + other.lowest, masses, infinite)

    def delta(self, epsilon: float) -> float:
        """The mass beyond `epsilon`, each part of it by how far: sum of (1 - exp(epsilon - loss)) mass."""
        first = max(0, math.floor(epsilon / self.grid) - self.lowest)
        above = (np.arange(first, len(self.masses)) + self.lowest) * self.grid - epsilon
        return float(self.infinite - np.expm1(-np.maximum(above, 0.0)) @ self.masses[first:])

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 at which no more than `delta` is spent."""
        if self.infinite > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0, self.lowest + len(self.masses)  # in steps of the grid: above delta, and not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.delta(middle * self.grid) > delta else (low, middle)
        # From here to the next point of the grid, delta is infinite + sum mass - exp(epsilon) sum exp(-loss) mass.
        masses = self.masses[max(0, high - self.lowest) :]
        losses = (np.arange(len(masses)) + max(high, self.lowest) - low) * self.grid
        return low * self.grid + math.log((self.infinite + masses.sum() - delta) / (np.exp(-losses) @ masses))

    def _support(self, count: int) -> tuple[int, int]:
        """Where the sum of `count` losses lies, but for a mass of `TAIL`, by Chernoff's bound."""
        width = len(self.masses)
        first, last = 0, (width - 1) * count
        tilt = np.exp(np.arange(width) / width)
        up, down = self.masses, self.masses
        for multiple in range(1, _CHERNOFF_ORDERS + 1):
            up, down = up * tilt, down / tilt
            last = min(last, math.ceil((count * math.log(up.sum()) + math.log(2 / TAIL)) * width / multiple))
            first = max(first, math.floor(-(count * math.log(down.sum()) + math.log(2 / TAIL)) * width / multiple))
        return first, last


def composed(parts: Parts, grid: float = GRID) -> tuple[Losses, ...] | None:
    """The losses of all parts together, in each order of the neighbours; None if they are beyond measure."""
    # Two Chernoff bounds of the composed loss, from log E exp(loss) and E loss of one step; 35 is log(1 / TAIL).
    widths = [loss_range(step, sigma) for step, sigma, _ in parts]
    second = sum(count * step.log_second_moment(sigma) for step, sigma, count in parts)
    mean = sum(2 * count * step.mean_loss(sigma) for step, sigma, count in parts)
    support = 2 * min(second + 35, mean + 35 * max(widths)) + 5 * sum(widths)
    needed = support / _MAX_GRID_POINTS
    if needed > _COARSEST_GRID:
        return None
    grid = max(grid, GRID, needed)
    together: tuple[Losses, ...] = ()
    for step, sigma, count in parts:
        losses = tuple(order.repeated(count) for order in one_step(step, sigma, grid))
        if not together:
            together = losses
        elif len(together) == len(losses):
            together = tuple(one.beside(other) for one, other in zip(together, losses))
        else:  # a single entry is the same in both orders
            together = tuple(one.beside(other) for one in together for other in losses)
    return together


@lru_cache(maxsize=4)
def one_step(step: Release, sigma: float, grid: float) -> tuple[Losses, ...]:
    """The loss of one step in each order of the neighbours; a single one if they are the same."""
    return tuple(_on_grid(curve, grid) for curve in step.curves(sigma))


def loss_range(step: Release, sigma: float) -> float:
    """Roughly the width of the privacy loss of one step."""
    return max(curve.highest - curve.lowest for curve in step.curves(sigma))


def _on_grid(curve: Curve, grid: float) -> Losses:
    """The pessimistic discretisation by connecting the dots (Doroshenko et al. 2022, Algorithm 1)."""
    low = math.floor(curve.lowest / grid)
    high = max(math.ceil(curve.highest / grid), low + 1)
    epsilons: Array = np.arange(low, high + 1).astype(np.float64) * grid
    # Hockey-stick curves fall; where rounding says otherwise it is put right upwards.
    divergences = np.maximum.accumulate(curve.divergence(epsilons)[::-1])[::-1]
    steps = np.diff(divergences)
    masses = np.empty_like(divergences)
    masses[0] = 1 - divergences[0] + steps[0] / math.expm1(grid)
    masses[1:-1] = (steps[1:] - steps[:-1] * math.exp(grid)) / math.expm1(grid)
    masses[-1] = steps[-1] / math.expm1(-grid)
    return Losses(grid, low, np.maximum(masses, 0.0), float(divergences[-1]))
