"""Per-example gradients without materialising them: one list of terms for every parameter."""

from diskdp.gradients.buffers import advance_buffers
from diskdp.gradients.clipped import Clipped, clip, clip_in_float64, clipped_gradient
from diskdp.gradients.engine import Engine, LossFunction, Point
from diskdp.gradients.explain import Explanation, ParameterRow, explain
from diskdp.gradients.planner import choose
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.structure import refuse_modules
from diskdp.gradients.tuning import Tuner

__all__ = [
    "Clipped",
    "Engine",
    "Explanation",
    "LossFunction",
    "ParameterRow",
    "Point",
    "RandomState",
    "Tuner",
    "advance_buffers",
    "choose",
    "clip",
    "clip_in_float64",
    "clipped_gradient",
    "explain",
    "refuse_modules",
]
