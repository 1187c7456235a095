"""Differentially private training for PyTorch with filtered gradients.

State the budget once in a `Plan`, hand model, optimizer and plan to `privatize`, iterate over its loader.
"""

from diskdp.errors import DiskDPError, DiskDPWarning
from diskdp.filters import DiSK, LowPass, NoFilter
from diskdp.gradients import clipped_gradient, explain
from diskdp.plan import Plan
from diskdp.private import PrivateTraining, StepResult, privatize
from diskdp.wrapper import wrap_optimizer

__version__ = "0.1.0"

__all__ = [
    "DiSK",
    "DiskDPError",
    "DiskDPWarning",
    "LowPass",
    "NoFilter",
    "Plan",
    "PrivateTraining",
    "StepResult",
    "__version__",
    "clipped_gradient",
    "explain",
    "privatize",
    "wrap_optimizer",
]
