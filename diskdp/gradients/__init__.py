"""Per-example gradients without materialising them: one list of terms for every parameter."""

from diskdp.gradients.clipped import ClippedSum, clipped_gradient, clipped_sum
from diskdp.gradients.engine import Engine, LossFunction, Point
from diskdp.gradients.explain import Explanation, ParameterRow, explain
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.structure import refuse_modules

__all__ = [
    "ClippedSum",
    "Engine",
    "Explanation",
    "LossFunction",
    "ParameterRow",
    "Point",
    "RandomState",
    "clipped_gradient",
    "clipped_sum",
    "explain",
    "refuse_modules",
]
