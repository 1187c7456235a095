"""The paper's four simplifications, one function a stage: from the Kalman filter of Algorithm 2 to DiSK's recursion.

Reference mathematics for comparing the stages: these take gradients at two points as they are, before any privacy.
Only the last stage is what `DiSK` runs, on one combined gradient that was clipped and noised as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diskdp.filters.gains import GainKind, recursion
from diskdp.filters.kalman import (
    Array,
    Belief,
    GradientNoise,
    correct,
    correct_gradient,
    predict_gradient,
    printed_cov,
)


@dataclass(frozen=True, eq=False)
class Observations:
    """What a step has: the privatised gradient g_t, d_{t-1}, H̃_t, and mean gradients at x_t and x_t + γ d_{t-1}."""

    gradient: Array
    movement: Array
    curvature: Array
    here: Array
    ahead: Array
    gamma: float


@dataclass(frozen=True)
class ScalarBelief:
    """After the third simplification: P_t = p_t I."""

    mean: Array
    variance: float


def full(belief: Belief, seen: Observations, noise: GradientNoise, kind: GainKind = "printed") -> Belief:
    """Algorithm 2: noisy input H̃ d, random observation matrix C_t."""
    return correct_gradient(predict_gradient(belief, seen.curvature @ seen.movement, noise), seen.gradient, noise, kind)


def constant_observation(
    belief: Belief, seen: Observations, noise: GradientNoise, kind: GainKind = "printed"
) -> Belief:
    """First: C_t = I. Equal to `full` where E[C] = I and Σ_C = 0 (no clipping, sampling noise counted as additive)."""
    return _corrected_by_identity(belief, seen.curvature @ seen.movement, seen.gradient, noise, kind)


def finite_difference(belief: Belief, seen: Observations, noise: GradientNoise, kind: GainKind = "printed") -> Belief:
    """Second: H̃ d = (∇F(x + γd) - ∇F(x))/γ. Equal to the first where gradients are linear between the points."""
    return _corrected_by_identity(belief, _difference(seen), seen.gradient, noise, kind)


def scalar_covariance(
    belief: ScalarBelief,
    seen: Observations,
    observation_var: float,
    hessian_var: float,
    process_var: float,
    kind: GainKind = "printed",
) -> ScalarBelief:
    """Third: all covariances are multiples of I, and so are P_t and K_t. Equal to the second where they are."""
    p, k = recursion(observation_var, hessian_var, process_var, steps=1, start=belief.variance, kind=kind)
    predicted = belief.mean + _difference(seen)
    return ScalarBelief(predicted + k[0] * (seen.gradient - predicted), float(p[0]))


def constant_gain(filtered: Array, seen: Observations, kappa: float) -> Array:
    """Fourth: k_t = κ. Equal to the third where it starts from p_∞, and within (1-k_∞)^2t of it where it does not."""
    predicted = filtered + _difference(seen)
    return predicted + kappa * (seen.gradient - predicted)


def combined(seen: Observations, kappa: float) -> Array:
    """The one gradient that `constant_gain` depends on: g_t + c (∇F(x + γd) - ∇F(x)), c = (1-κ)/(κγ).

    Averaging it, g̃_t = (1-κ) g̃_{t-1} + κ combined (the paper's rearranged line has g̃_t on both sides), is DiSK.

    >>> seen = Observations(np.ones(1), np.ones(1), np.eye(1), np.ones(1), np.array([1.5]), 0.5)
    >>> bool(constant_gain(np.zeros(1), seen, 0.25) == 0.75 * np.zeros(1) + 0.25 * combined(seen, 0.25))
    True
    """
    return seen.gradient + (1 - kappa) / kappa * _difference(seen)


def _difference(seen: Observations) -> Array:
    return (seen.ahead - seen.here) / seen.gamma


def _corrected_by_identity(
    belief: Belief, curvature_step: Array, gradient: Array, noise: GradientNoise, kind: GainKind
) -> Belief:
    observation_cov = printed_cov(noise) if kind == "printed" else noise.observation
    return correct(predict_gradient(belief, curvature_step, noise), gradient, np.eye(len(gradient)), observation_cov)
