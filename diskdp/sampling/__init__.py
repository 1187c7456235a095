"""Who is in a batch, and loaders that cannot disagree with it."""

from diskdp.sampling.guards import refuse_mixing
from diskdp.sampling.loader import LogicalBatch, PrivateLoader
from diskdp.sampling.samplers import (
    FixedSizeSampler,
    Members,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
    sampler_for,
)
from diskdp.sampling.units import Units, bound_contributions, check_contributions

__all__ = [
    "FixedSizeSampler",
    "LogicalBatch",
    "Members",
    "PoissonSampler",
    "PrivateLoader",
    "Sampler",
    "ShuffledSampler",
    "TruncatedPoissonSampler",
    "Units",
    "bound_contributions",
    "check_contributions",
    "refuse_mixing",
    "sampler_for",
]
