"""Noise that is correlated across steps: strategies, their sensitivity, streams, errors and colour.

Used by itself; no plan takes it yet (docs/correlated.md says what that needs).
"""

from diskdp.noise.correlated.colour import ColouredGain, autocovariance, best_gain, filtered_error
from diskdp.noise.correlated.fitting import fit_banded, fit_blt
from diskdp.noise.correlated.sampled import SampledGaussian, cyclic_poisson
from diskdp.noise.correlated.sensitivity import Participation, searched_sensitivity, sensitivity
from diskdp.noise.correlated.strategies import (
    BLT,
    Banded,
    Strategy,
    Tree,
    covariance,
    decoder,
    encoder,
    inverse_column,
)
from diskdp.noise.correlated.stream import CorrelatedNoise, advance
from diskdp.noise.correlated.workloads import Errors, Workload, errors, squared_errors

__all__ = [
    "BLT",
    "Banded",
    "ColouredGain",
    "CorrelatedNoise",
    "Errors",
    "Participation",
    "SampledGaussian",
    "Strategy",
    "Tree",
    "Workload",
    "advance",
    "autocovariance",
    "best_gain",
    "covariance",
    "cyclic_poisson",
    "decoder",
    "encoder",
    "errors",
    "filtered_error",
    "fit_banded",
    "fit_blt",
    "inverse_column",
    "searched_sensitivity",
    "sensitivity",
    "squared_errors",
]
