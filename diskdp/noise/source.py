"""Which noise a plan names, made from the run's secret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from diskdp.errors import NoiseError
from diskdp.noise.gaussian import GaussianNoise
from diskdp.noise.keys import Secret
from diskdp.noise.secure import SecureNoise

KEYED_BY_SUM = ("secure", "discrete")
"""Noise that is another one for another sum: only with these may the secret outlive a process."""


class NoiseSource(Protocol):
    """Adds noise to sums in their own memory."""

    def add_to(self, sums: Mapping[str, Tensor], std: float, step: int) -> None: ...


def noise_source(kind: str, secret: Secret) -> NoiseSource:
    """The source of a plan's `noise`.

    >>> type(noise_source("gaussian", Secret.from_seed(0))).__name__
    'GaussianNoise'
    """
    if kind == "gaussian":
        return GaussianNoise(secret)
    if kind == "secure":
        return SecureNoise(secret)
    raise NoiseError(f"noise={kind!r} is not built; choose gaussian, secure or discrete")
