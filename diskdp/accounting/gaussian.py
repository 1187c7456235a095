"""The Gaussian mechanism, exactly: Balle and Wang 2018, Theorem 8. T releases of mu are one of sqrt(T) mu."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special


def log_delta(mu: float, epsilon: float) -> float:
    """log of the delta at `epsilon` of N(mu, 1) against N(0, 1)."""
    upper = special.log_ndtr(mu / 2 - epsilon / mu)
    lower = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(upper + np.log(-np.expm1(min(lower - upper, -1e-300))))


def epsilon_at(mu: float, delta: float) -> float:
    """The epsilon at `delta`."""
    goal = math.log(delta)
    if log_delta(mu, 0.0) <= goal:
        return 0.0
    largest = mu**2 / 2 + mu * math.sqrt(-2 * goal)  # the tail bound of the loss, N(mu^2/2, mu^2)
    return float(optimize.brentq(lambda e: log_delta(mu, e) - goal, 0.0, largest, xtol=1e-14, rtol=1e-14))


def largest_mu(epsilon: float, goal: float) -> float:
    """The largest mu within (epsilon, exp(goal))."""

    def excess(log_mu: float) -> float:
        return max(log_delta(math.exp(log_mu), epsilon), -700.0) - goal

    return math.exp(optimize.brentq(excess, -60.0, 60.0, xtol=1e-12))
