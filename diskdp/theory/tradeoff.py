"""The privacy-utility theorem, with the clipping norm that its own choice of κ requires.

Noise enters as σ²_DP = v C² T ln(1/δ)/(N²ε²), the form of the moments accountant; v is the caller's constant. For a
real budget use `Plan`: this is asymptotics, not accounting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diskdp.errors import TheoryError
from diskdp.theory.constants import required_clip


@dataclass(frozen=True)
class Utility:
    """Bounds of the average squared gradient norm at budget (ε, δ), each with the clipping norm it needs.

    ``stated`` is the paper's, with C = G as if κ did not matter; ``disk`` uses C = (|c| + |1-c|)G = (2/κ - 1)G at the
    largest κ that the Corollary admits, ``dp_sgd`` is √2 √(L(F(x_0) - F*)dσ²/T) at C = G. ``accumulated_noise`` is
    Tdσ²_DP at the T that the paper states: 2v, whatever N is, while the Corollary needs ``needed_noise``.
    """

    stated: float
    disk: float
    dp_sgd: float
    kappa: float
    clip: float
    accumulated_noise: float
    needed_noise: float
    failed: tuple[str, ...]


def privacy_utility(
    smoothness: float,
    initial_gap: float,
    flatness: float,
    gradient_norm: float,
    dimension: int,
    dataset_size: int,
    epsilon: float,
    delta: float,
    accountant_constant: float = 0.5,
) -> Utility:
    """Both bounds at one budget; T cancels from each. ``accountant_constant`` v = 1/2 is what the paper's 4√2 implies.

    >>> u = privacy_utility(1.0, 1.0, 0.01, 1.0, dimension=1000, dataset_size=100_000, epsilon=1.0, delta=1e-6)
    >>> u.stated < u.dp_sgd < u.disk
    True
    """
    positive = {"smoothness": smoothness, "initial_gap": initial_gap, "gradient_norm": gradient_norm}
    positive |= {"dimension": dimension, "dataset_size": dataset_size, "epsilon": epsilon, "v": accountant_constant}
    for name, value in positive.items():
        if not (0 < value < math.inf):
            raise TheoryError(f"{name}={value} must be positive and finite")
    if not 0 < flatness <= 1 or not 0 < delta < 1:
        raise TheoryError(f"flatness={flatness} must lie in (0, 1], delta={delta} in (0, 1)")
    # √(dσ²/T) for C = 1
    unit = math.sqrt(accountant_constant * dimension * math.log(1 / delta)) / (dataset_size * epsilon)
    scale = math.sqrt(smoothness * initial_gap) * unit
    kappa = flatness / (2 + 4 / flatness - flatness)  # M_κ L η at the largest η of the Corollary: the smallest C
    clip = required_clip(kappa, -1.0, gradient_norm)
    polynomial = 16 / flatness**3 + 16 / flatness**2 - 4 / flatness - 4
    needed = 2 * smoothness * initial_gap * (polynomial + flatness)
    accumulated = 2 * accountant_constant
    return Utility(
        stated=8 * math.sqrt(flatness) * scale * gradient_norm,
        disk=8 * math.sqrt(flatness) * scale * clip,
        dp_sgd=math.sqrt(2) * scale * gradient_norm,
        kappa=kappa,
        clip=clip,
        accumulated_noise=accumulated,
        needed_noise=needed,
        failed=("T large enough",) if accumulated < needed else (),
    )
