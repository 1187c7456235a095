"""Lemma 1: how far the filtered gradient is from the gradient, one step after another.

Assumes what `constants` assumes; proved as printed in the paper, checked step by step in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from diskdp.theory.constants import Problem, contraction, drift


@dataclass(frozen=True)
class Lemma1:
    """E_t‖Δ_t‖² ≤ contraction ‖Δ_{t-1}‖² + drift ‖∇F(x_{t-1})‖² + noise, with Δ_t = ∇F(x_t) - g̃_t."""

    contraction: float
    drift: float
    noise: float

    def bound(self, squared_error: float, squared_gradient: float) -> float:
        """The right-hand side, for ‖Δ_{t-1}‖² and ‖∇F(x_{t-1})‖²."""
        return self.contraction * squared_error + self.drift * squared_gradient + self.noise


def lemma1(problem: Problem, learning_rate: float, kappa: float, gamma: float) -> Lemma1:
    """The three constants of Lemma 1.

    >>> problem = Problem(smoothness=1.0, initial_gap=1.0, initial_gradient=1.0, dimension=4, noise_std=0.5)
    >>> lemma1(problem, learning_rate=0.1, kappa=1.0, gamma=-1.0).noise
    1.0
    """
    scaled = learning_rate * problem.smoothness
    batch = (2 + abs(1 + gamma)) * problem.sampling_variance
    return Lemma1(
        contraction=contraction(kappa, gamma, scaled),
        drift=drift(kappa, gamma, scaled),
        noise=kappa**2 * (batch + problem.noise_power),
    )
