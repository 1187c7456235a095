"""Optimizers that know the noise in the gradients they get; each an ordinary `torch.optim.Optimizer`."""

from diskdp.optim.adam import NoiseAwareAdam
from diskdp.optim.joined import Joined
from diskdp.optim.scaled import ScaleThenPrivatise, scale_parameters, unscale_parameters
from diskdp.optim.variance import (
    NoiseVariance,
    correlated_noise_variance,
    filtered_noise_variance,
    noise_std,
    response_matrix,
    second_moment_spread,
    steady_noise_variance,
)

__all__ = [
    "Joined",
    "NoiseAwareAdam",
    "NoiseVariance",
    "ScaleThenPrivatise",
    "correlated_noise_variance",
    "filtered_noise_variance",
    "noise_std",
    "response_matrix",
    "scale_parameters",
    "second_moment_spread",
    "steady_noise_variance",
    "unscale_parameters",
]
