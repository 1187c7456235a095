"""The constants that the theorems are stated in, and the ones that follow from κ, γ and ηL alone.

Assumes SGD as base optimizer and clipping that never acts (`required_clip`); L bounds the smoothness of every example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from diskdp.errors import TheoryError


@dataclass(frozen=True)
class Problem:
    """What a theorem is told about a problem: constants that are declared, never read off private data.

    ``smoothness`` L holds for each example's loss; ``initial_gap`` is F(x_0) - F*, ``initial_gradient`` ‖∇F(x_0)‖;
    ``gradient_variance`` σ²_SGD bounds E‖∇f_i - ∇F‖² over examples, ``noise_std`` is that of the noise on each
    coordinate of the averaged gradient. σ²_SGD/B is the variance of a batch of B examples drawn uniformly, with or
    without replacement. Under Poisson sampling with the public B as denominator, it is up to G²/B: give G² then.

    >>> Problem(smoothness=1.0, initial_gap=2.0, initial_gradient=1.0, dimension=10, noise_std=0.1).flatness
    0.25
    """

    smoothness: float
    initial_gap: float
    initial_gradient: float
    dimension: int
    noise_std: float
    gradient_variance: float = 0.0
    batch_size: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise TheoryError(f"{field.name}={value} must be finite and not negative")
        for name in ("smoothness", "initial_gap", "dimension", "batch_size"):
            if getattr(self, name) == 0:
                raise TheoryError(f"{name} must be positive")
        if self.initial_gradient**2 > 2 * self.smoothness * self.initial_gap * (1 + 1e-9):
            raise TheoryError(
                f"initial_gradient={self.initial_gradient}: ‖∇F(x_0)‖² cannot exceed 2L(F(x_0) - F*) = "
                f"{2 * self.smoothness * self.initial_gap:.6g}; L or the gap is declared too small"
            )

    @property
    def noise_power(self) -> float:
        """dσ²_DP, the expected squared norm of the privacy noise."""
        return self.dimension * self.noise_std**2

    @property
    def sampling_variance(self) -> float:
        """σ²_SGD/B."""
        return self.gradient_variance / self.batch_size

    @property
    def flatness(self) -> float:
        """M_κ = ‖∇F(x_0)‖²/(2L(F(x_0) - F*)) ≤ 1: small where the start is flat and yet far from the optimum."""
        return min(1.0, self.initial_gradient**2 / (2 * self.smoothness * self.initial_gap))


def check(kappa: float, gamma: float, scaled_rate: float) -> None:
    """Refuse κ, γ or ηL for which nothing is stated."""
    if not 0 < kappa <= 1:
        raise TheoryError(f"kappa={kappa} must lie in (0, 1]")
    if gamma == 0 or not math.isfinite(gamma):
        raise TheoryError(f"gamma={gamma} must be finite and not 0")
    if not (0 < scaled_rate < math.inf):
        raise TheoryError(f"learning rate times smoothness is {scaled_rate}: must be positive and finite")


def required_clip(kappa: float, gamma: float, gradient_norm: float) -> float:
    """The least C for which ‖(1-c)g + c g'‖ ≤ C whenever ‖g‖, ‖g'‖ ≤ G: (|c| + |1-c|) G.

    The paper states (1 + 2(1-κ)/κ)G, which is this at γ = -1 and too small for 0 < |γ| < 1 with c > 1 or c < 0.

    >>> required_clip(0.5, -1.0, 1.0), required_clip(0.5, 0.25, 1.0)
    (3.0, 7.0)
    """
    check(kappa, gamma, 1.0)
    c = (1 - kappa) / (kappa * gamma)
    return (abs(c) + abs(1 - c)) * gradient_norm


def spread(kappa: float, gamma: float) -> float:
    """M_γ = 1 + 4(2 + 1/κ + |1+γ|)/γ²."""
    return 1 + 4 * (2 + 1 / kappa + abs(1 + gamma)) / gamma**2


def contraction(kappa: float, gamma: float, scaled_rate: float) -> float:
    """Factor of ‖Δ_{t-1}‖² in Lemma 1, with ``scaled_rate`` = ηL; Theorem 1 says nothing unless it is below 1.

    >>> contraction(1.0, -1.0, 0.1)
    0.0
    """
    check(kappa, gamma, scaled_rate)
    away = abs(1 + gamma)
    square = scaled_rate**2
    return (1 - kappa) ** 2 * (1 + 4 * square + away * (kappa + 2 * square * spread(kappa, gamma)))


def drift(kappa: float, gamma: float, scaled_rate: float) -> float:
    """Factor of ‖∇F(x_{t-1})‖² in Lemma 1."""
    check(kappa, gamma, scaled_rate)
    return 2 * scaled_rate**2 * (1 - kappa) ** 2 * (2 + abs(1 + gamma) * spread(kappa, gamma))
