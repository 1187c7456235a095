"""What is wanted of the noised gradients, the weights after each step, and how far off noise leaves it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import signal

from diskdp.errors import NoiseError
from diskdp.noise.correlated.sensitivity import Participation, sensitivity
from diskdp.noise.correlated.strategies import (
    Array,
    Banded,
    Strategy,
    Tree,
    decoder,
    inverse_column,
)


@dataclass(frozen=True)
class Workload:
    """A g = what SGD with (heavy-ball) momentum has moved the weights by after each step; at momentum 0 prefix sums.

    ``learning_rates`` are relative ones, a step each; None for a constant rate.

    >>> Workload(steps=3, momentum=0.5).matrix().tolist()
    [[1.0, 0.0, 0.0], [1.5, 1.0, 0.0], [1.75, 1.5, 1.0]]
    >>> Workload(steps=2, learning_rates=(1.0, 0.5)).matrix().tolist()
    [[1.0, 0.0], [1.0, 0.5]]
    """

    steps: int
    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        Participation(self.steps)
        if not 0 <= self.momentum < 1:
            raise NoiseError(f"momentum={self.momentum!r}: must be from 0 to below 1")
        rates = self.learning_rates
        if rates is not None and (len(rates) != self.steps or not all(0 <= r < math.inf for r in rates)):
            raise NoiseError(f"learning_rates: one for each of {self.steps} steps, finite and not negative")

    def first_column(self) -> Array:
        """Of A, which is Toeplitz where the learning rate is constant."""
        if self.learning_rates is not None:
            raise NoiseError("a workload with a schedule is not Toeplitz: use matrix()")
        return np.cumsum(self.momentum ** np.arange(self.steps))

    def matrix(self) -> Array:
        """A, written out."""
        velocity = decoder(Banded((1.0,)), self.steps)
        for lag in range(1, self.steps):
            velocity += self.momentum**lag * np.eye(self.steps, k=-lag)
        rates = np.ones(self.steps) if self.learning_rates is None else np.array(self.learning_rates)
        return np.cumsum(rates[:, None] * velocity, axis=0)


@dataclass(frozen=True)
class Errors:
    """Standard deviations of A times the noise at noise multiplier 1 and S = 1: at the worst step, and overall."""

    largest: float
    root_mean_square: float


def squared_errors(strategy: Strategy, workload: Workload) -> Array:
    """The variance of (A noise)_t for each step t, for z of variance 1.

    >>> squared_errors(Banded((1.0,)), Workload(steps=4)).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    steps = workload.steps
    if isinstance(strategy, Tree) or workload.learning_rates is not None:
        product = workload.matrix() @ decoder(strategy, steps)
        return np.asarray((product**2).sum(axis=1))
    return np.cumsum(applied(workload, inverse_column(strategy, steps)) ** 2)


def applied(workload: Workload, column: Array) -> Array:
    """The first column of A times a Toeplitz matrix of this first column, for a constant learning rate."""
    return np.cumsum(signal.lfilter([1.0], [1.0, -workload.momentum], column))


def errors(strategy: Strategy, workload: Workload, participation: Participation) -> Errors:
    """How far off A's results are, at noise multiplier 1: with the noise that the participation asks for.

    >>> errors(Banded((1.0,)), Workload(steps=4), Participation(steps=4, times=4))
    Errors(largest=4.000000004, root_mean_square=3.1622776633...)
    """
    if participation.steps != workload.steps:
        raise NoiseError(f"a workload of {workload.steps} steps and participation in {participation.steps}: the same")
    variances = squared_errors(strategy, workload)
    std = sensitivity(strategy, participation)
    return Errors(std * math.sqrt(float(variances.max())), std * math.sqrt(float(variances.mean())))
