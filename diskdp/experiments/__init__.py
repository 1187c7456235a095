"""Figures of the paper that need no data set, run again with every method tuned on seeds of its own.

Nothing here is private or meant to be: noise is that of the simulated problem, from ordinary generators.
"""

from diskdp.experiments.ablation import Ablation, run_ablation
from diskdp.experiments.gain import GainConvergence, run_gain_convergence
from diskdp.experiments.regression import LinearRegression, run_linear_regression

__all__ = [
    "Ablation",
    "GainConvergence",
    "LinearRegression",
    "run_ablation",
    "run_gain_convergence",
    "run_linear_regression",
]
