"""Theorem 1, with the step that the paper takes only for γ = -1 carried out for every γ, and for both start values.

Assumes what `constants` assumes. Equation numbers are not used: docs/theory.md has the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diskdp.errors import TheoryError
from diskdp.theory.constants import Problem, contraction
from diskdp.theory.lemma import lemma1

Start: TypeAlias = Literal["first", "zero"]


@dataclass(frozen=True)
class Bound:
    """An upper bound of (1/T) Σ_{t<T} E‖∇F(x_t)‖², infinite if a condition fails; ``failed`` names those that do.

    ``beta`` weighs ‖Δ‖² in the Lyapunov function F(x_t) + β‖Δ_{t-1}‖²; ``progress`` is M_1, the part of ‖∇F‖² that
    a step keeps. ``optimization`` falls as 1/T, ``noise`` does not.
    """

    value: float
    optimization: float
    noise: float
    beta: float
    progress: float
    failed: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.failed


def convergence_bound(
    problem: Problem, learning_rate: float, kappa: float, gamma: float, steps: int, start: Start = "first"
) -> Bound:
    """Theorem 1 as it can be proved. ``start="first"`` is g̃_{-1} = g_0, as the algorithm runs; "zero" is g̃_{-1} = 0.

    For γ ≠ -1, E_t g̃_t is off by (1-κ)b with ‖b‖ ≤ rηL‖g̃_{t-1}‖, r = 2 min(1, |1+γ|/|γ|); its terms are in β and M_1.

    >>> problem = Problem(smoothness=1.0, initial_gap=1.0, initial_gradient=1.0, dimension=10, noise_std=0.1)
    >>> bound = convergence_bound(problem, learning_rate=0.05, kappa=0.5, gamma=-1.0, steps=1000)
    >>> bound.holds, round(bound.value, 4)
    (True, 0.043)
    >>> convergence_bound(problem, learning_rate=0.9, kappa=0.1, gamma=-1.0, steps=1000).failed
    ('contraction < 1',)
    """
    if steps < 1:
        raise TheoryError(f"steps={steps} must be at least 1")
    if start not in ("first", "zero"):
        raise TheoryError(f"start={start!r} must be 'first' or 'zero'")
    smoothness = problem.smoothness
    one_step = lemma1(problem, learning_rate, kappa, gamma)
    factor = contraction(kappa, gamma, learning_rate * smoothness)
    if factor >= 1:
        return Bound(math.inf, math.inf, math.inf, math.inf, -math.inf, ("contraction < 1",))
    bias = 2 * min(1.0, abs(1 + gamma) / abs(gamma)) * (1 - kappa) * learning_rate**2 * smoothness
    curvature = learning_rate**2 * smoothness
    beta = (learning_rate * (1 - kappa) / 2 + bias + curvature * factor) / (1 - factor)
    kept = 1 + kappa - 2 * learning_rate * smoothness - bias / learning_rate
    progress = kept - 2 * ((beta + curvature) * one_step.drift + bias) / learning_rate
    if progress <= 0:
        return Bound(math.inf, math.inf, math.inf, beta, progress, ("M_1 > 0",))
    scale = 2 / (progress * learning_rate)
    every_step = (beta + curvature) * one_step.noise
    if start == "zero":
        first, noise = beta * problem.initial_gradient**2, scale * every_step
    else:
        variance = problem.sampling_variance + problem.noise_power
        first, noise = (beta + curvature / 2) * variance, scale * every_step * (steps - 1) / steps
    optimization = scale * (problem.initial_gap + first) / steps
    return Bound(optimization + noise, optimization, noise, beta, progress, ())
