"""Filters over privatised gradients: what they compute from past outputs costs no privacy."""

from diskdp.filters.disk import DiSK, Filter, FilterState, NoFilter
from diskdp.filters.full import CurvatureKalman, FullKalman, public_curvature
from diskdp.filters.gains import suggest_kappa
from diskdp.filters.lowpass import LowPass
from diskdp.filters.states import FollowsWeights, due_coefficients, started
from diskdp.filters.varying import AdaptiveGain, GainSchedule, KalmanGain

__all__ = [
    "AdaptiveGain",
    "CurvatureKalman",
    "DiSK",
    "Filter",
    "FilterState",
    "FollowsWeights",
    "FullKalman",
    "GainSchedule",
    "KalmanGain",
    "LowPass",
    "NoFilter",
    "due_coefficients",
    "public_curvature",
    "started",
    "suggest_kappa",
]
