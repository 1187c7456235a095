"""The method's theory as functions: bounds from declared constants, and exact moments on quadratics.

Nothing here looks at data: every constant is declared by the caller.
"""

from diskdp.theory.constants import Problem, contraction, required_clip
from diskdp.theory.corollary import Choice, choose, dp_sgd_bound
from diskdp.theory.lemma import Lemma1, lemma1
from diskdp.theory.quadratic import Moments, moments, stationary_variance, variance_ratio
from diskdp.theory.theorem import Bound, convergence_bound
from diskdp.theory.tradeoff import Utility, privacy_utility

__all__ = [
    "Bound",
    "Choice",
    "Lemma1",
    "Moments",
    "Problem",
    "Utility",
    "choose",
    "contraction",
    "convergence_bound",
    "dp_sgd_bound",
    "lemma1",
    "moments",
    "privacy_utility",
    "required_clip",
    "stationary_variance",
    "variance_ratio",
]
