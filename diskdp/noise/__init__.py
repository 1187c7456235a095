"""Where randomness comes from, and the noise made of it."""

from diskdp.noise.gaussian import GaussianNoise
from diskdp.noise.keys import Keystream, Secret

__all__ = ["GaussianNoise", "Keystream", "Secret"]
