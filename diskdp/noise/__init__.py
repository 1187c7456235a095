"""Where randomness comes from, and the noise made of it."""

from diskdp.noise.gaussian import GaussianNoise
from diskdp.noise.keys import Keystream, Secret
from diskdp.noise.secure import SecureNoise

__all__ = ["GaussianNoise", "Keystream", "Secret", "SecureNoise"]
