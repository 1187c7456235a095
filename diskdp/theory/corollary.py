"""The Corollary: step size and gain for γ = -1, the bound as stated, and the bound that Theorem 1 gives for them.

Assumes what `constants` assumes. M_κ depends on ‖∇F(x_0)‖ and F(x_0): declared or paid for, never read off the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diskdp.errors import TheoryError
from diskdp.theory.constants import Problem
from diskdp.theory.theorem import Bound, Start, convergence_bound


@dataclass(frozen=True)
class Choice:
    """η and κ = M_κ L η of the Corollary, with what is stated for them (``stated``) and what follows (``proved``).

    ``failed`` names the Corollary's own conditions that do not hold; ``stated`` counts only if it is empty. Even then
    ``proved`` may be larger, since M_1 can be near 0 at the stated number of steps; four times as many are enough.
    """

    learning_rate: float
    kappa: float
    stated: float
    proved: Bound
    steps_stated: float
    failed: tuple[str, ...]


def choose(problem: Problem, steps: int, start: Start = "zero") -> Choice:
    """The Corollary's choice for ``steps`` steps at γ = -1.

    >>> problem = Problem(smoothness=1.0, initial_gap=1.0, initial_gradient=1.0, dimension=100, noise_std=0.1)
    >>> choice = choose(problem, steps=100_000)
    >>> round(choice.learning_rate, 6), round(choice.kappa, 6), round(choice.stated, 4)
    (0.006325, 0.003162, 0.0179)
    >>> choice.proved.value < choice.stated
    True
    """
    flatness, smoothness, gap = problem.flatness, problem.smoothness, problem.initial_gap
    if flatness == 0 or problem.noise_power == 0:
        raise TheoryError("the Corollary needs ‖∇F(x_0)‖ > 0 and noise_std > 0: it divides by both")
    largest = 1 / (smoothness * (2 + 4 / flatness - flatness))
    # 2 M_κ L (F(x_0) - F*) = ‖∇F(x_0)‖², so the paper's numerator is 2‖∇F(x_0)‖²
    balanced = math.sqrt(problem.initial_gradient**2 / (steps * problem.noise_power)) / (flatness * smoothness)
    learning_rate = min(largest, balanced)
    kappa = flatness * smoothness * learning_rate
    polynomial = 16 / flatness**3 + 16 / flatness**2 - 4 / flatness - 4
    steps_stated = (2 * smoothness * gap * polynomial + problem.initial_gradient**2) / problem.noise_power
    failed = []
    if steps < steps_stated:
        failed.append("T large enough")
    if problem.batch_size < max(1.0, 2 * problem.gradient_variance / problem.noise_power):
        failed.append("B ≥ 2σ²_SGD/(dσ²_DP)")
    return Choice(
        learning_rate=learning_rate,
        kappa=kappa,
        stated=8 * math.sqrt(flatness * smoothness * gap * problem.noise_power / steps),
        proved=convergence_bound(problem, learning_rate, kappa, -1.0, steps, start),
        steps_stated=steps_stated,
        failed=tuple(failed),
    )


def dp_sgd_bound(problem: Problem, steps: int, learning_rate: float | None = None) -> Bound:
    """The standard bound of noisy SGD (Ghadimi and Lan 2013), at ``learning_rate`` or at the η that minimises it.

    From E F(x_{t+1}) ≤ F(x_t) - η(1 - ηL/2)‖∇F(x_t)‖² + η²Lv/2, v = σ²_SGD/B + dσ²_DP; its leading constant is
    √2 √(L(F(x_0) - F*) v/T), which the Corollary's 8√M_κ undercuts only for M_κ < 1/32.

    >>> problem = Problem(smoothness=1.0, initial_gap=1.0, initial_gradient=1.0, dimension=100, noise_std=0.1)
    >>> round(dp_sgd_bound(problem, steps=10_000).value / (2 / 10_000) ** 0.5, 2)
    1.01
    """
    if steps < 1:
        raise TheoryError(f"steps={steps} must be at least 1")
    smoothness, gap = problem.smoothness, problem.initial_gap
    variance = problem.sampling_variance + problem.noise_power
    if learning_rate is None:
        # the minimum of (gap/T + η²Lv/2) / (η(1 - ηL/2)): its derivative vanishes at one positive root
        a, b = gap / steps, smoothness * variance / 2
        learning_rate = (
            (-a * smoothness + math.sqrt((a * smoothness) ** 2 + 4 * a * b)) / (2 * b) if b else 1 / smoothness
        )
    progress = 1 - learning_rate * smoothness / 2
    if learning_rate <= 0 or progress <= 0:
        return Bound(math.inf, math.inf, math.inf, 0.0, 2 * progress, ("0 < ηL < 2",))
    optimization = gap / (steps * learning_rate * progress)
    noise = learning_rate * smoothness * variance / (2 * progress)
    return Bound(optimization + noise, optimization, noise, 0.0, 2 * progress, ())
