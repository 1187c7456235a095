"""Which noise a plan names, made from the run's secret."""

from __future__ import annotations

from typing import TypeAlias

from diskdp.errors import NoiseError
from diskdp.noise.discrete import DiscreteNoise
from diskdp.noise.gaussian import GaussianNoise
from diskdp.noise.keys import Secret
from diskdp.noise.secure import SecureNoise

NoiseSource: TypeAlias = "GaussianNoise | SecureNoise | DiscreteNoise"

KEYED_BY_SUM = ("secure", "discrete")
"""Noise that is another one for another sum: only with these may the secret outlive a process."""


def noise_source(kind: str, secret: Secret) -> NoiseSource:
    """The source of a plan's `noise`.

    >>> type(noise_source("gaussian", Secret.from_seed(0))).__name__
    'GaussianNoise'
    """
    if kind == "gaussian":
        return GaussianNoise(secret)
    if kind == "secure":
        return SecureNoise(secret)
    if kind == "discrete":
        return DiscreteNoise(secret)
    raise NoiseError(f"noise={kind!r} is not built; choose gaussian, secure or discrete")
