"""Privacy loss distributions on a grid: one step by connecting the dots, many by Fourier transforms.

The grid, the tails and the composition are dp-accounting's defaults, so its own values come out; building the
first distribution point by point, as it does, was most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from diskdp.accounting.releases import Array, Curve, Release

GRID = 1e-4  # losses are multiples of this: the default of dp_accounting.pld.PLDAccountant
TAIL = 1e-15  # the mass that dp-accounting moves from the tails of a composed loss to infinity
ROUNDING = 1e-16  # error of delta for each step composed by Fourier transforms: measured at half of this
_MAX_GRID_POINTS = 2**22  # what would need more gets a coarser grid, which can only raise the answer
_COARSEST_GRID = 0.1  # what would need a coarser one than this counts as infinite

Parts = Sequence[tuple[Release, float, int]]
"""What was released: which step, with what noise, how often."""


def composed(parts: Parts, grid: float = GRID) -> Any | None:
    """The loss distribution of all parts together; None if it is beyond measure."""
    # Two Chernoff bounds of the composed loss, from log E exp(loss) and E loss of one step; 35 is log(1 / TAIL).
    widths = [loss_range(step, sigma) for step, sigma, _ in parts]
    second = sum(count * step.log_second_moment(sigma) for step, sigma, count in parts)
    mean = sum(2 * count * step.mean_loss(sigma) for step, sigma, count in parts)
    support = 2 * min(second + 35, mean + 35 * max(widths)) + 5 * sum(widths)
    needed = support / _MAX_GRID_POINTS
    if needed > _COARSEST_GRID:
        return None
    grid = max(grid, GRID, needed)
    (step, sigma, count), *others = parts
    together = one_step(step, sigma, grid).self_compose(count, TAIL)
    for step, sigma, count in others:
        together = together.compose(one_step(step, sigma, grid).self_compose(count, TAIL), TAIL)
    return together


@lru_cache(maxsize=4)
def one_step(step: Release, sigma: float, grid: float) -> Any:
    """The loss distribution of one step, put on `grid` by connecting the dots (Doroshenko et al. 2022)."""
    return privacy_loss_distribution.PrivacyLossDistribution(*(_on_grid(curve, grid) for curve in step.curves(sigma)))


def loss_range(step: Release, sigma: float) -> float:
    """Roughly the width of the privacy loss of one step."""
    return max(curve.highest - curve.lowest for curve in step.curves(sigma))


def _on_grid(curve: Curve, grid: float) -> Any:
    low, high = math.floor(curve.lowest / grid), math.ceil(curve.highest / grid)
    epsilons: Array = np.arange(low, high + 1).astype(np.float64) * grid
    divergences = curve.divergence(epsilons)
    mass = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, low, high, _falling(divergences))
    return mass.to_dense_pmf()


def _falling(divergences: Array) -> Array:
    """Hockey-stick curves fall; rounding is put right upwards."""
    falling: Array = np.maximum.accumulate(divergences[::-1])[::-1]
    return falling
