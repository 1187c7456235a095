"""Where randomness comes from, and the noise made of it."""

from diskdp.noise.binding import bound_key
from diskdp.noise.discrete import DiscreteNoise, Grid
from diskdp.noise.gaussian import GaussianNoise
from diskdp.noise.keys import Keystream, Secret
from diskdp.noise.secure import SecureNoise
from diskdp.noise.source import KEYED_BY_SUM, NoiseSource, noise_source

__all__ = [
    "KEYED_BY_SUM",
    "DiscreteNoise",
    "GaussianNoise",
    "Grid",
    "Keystream",
    "NoiseSource",
    "Secret",
    "SecureNoise",
    "bound_key",
    "noise_source",
]
