"""What correlated noise costs with sampling: the cyclic scheme of banded strategies, as what it is accounted as."""

from __future__ import annotations

import math
from typing import NamedTuple

from diskdp.errors import NoiseError
from diskdp.noise.correlated.sensitivity import Participation, sensitivity
from diskdp.noise.correlated.strategies import Banded, Strategy


class SampledGaussian(NamedTuple):
    """``steps`` compositions of a Gaussian on a Poisson sample at ``rate``, at the noise multiplier σ.

    For z of deviation σ · S · ``sensitivity``, S being what one record contributes to a sum at most.
    """

    rate: float
    steps: int
    sensitivity: float


def cyclic_poisson(
    strategy: Strategy, steps: int, batch_size: int, dataset_size: int, parts: int | None = None
) -> SampledGaussian:
    """Records are dealt to ``parts`` parts (bands, unless more); step t samples part t mod parts at rate parts · B/N.

    Proof (Choquette-Choo et al. 2023) in docs/correlated.md. What it rests on: a record's part depends on nothing but
    the record's name or place and public randomness; the rate is this one whatever the sizes of the parts; coins are
    independent; and a column of C is zero from ``bands`` rows below the diagonal on.

    >>> found = cyclic_poisson(Banded.square_root(8), steps=1000, batch_size=250, dataset_size=50_000)
    >>> found.rate, found.steps, round(found.sensitivity, 4)
    (0.04, 125, 1.3109)
    """
    if not isinstance(strategy, Banded):
        raise NoiseError(f"{type(strategy).__name__} is not banded: sampling is not known to amplify it; use Banded")
    for name, value in (("batch_size", batch_size), ("dataset_size", dataset_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NoiseError(f"{name}={value!r}: must be a whole number, 1 or more")
    dealt = strategy.bands if parts is None else parts
    if not (isinstance(dealt, int) and dealt >= strategy.bands):
        raise NoiseError(
            f"parts={parts!r}: with fewer than bands={strategy.bands} a record's steps would overlap in C g"
        )
    if dealt * batch_size > dataset_size:
        raise NoiseError(
            f"{dealt} parts of {dataset_size} records have fewer than batch_size={batch_size} each; use fewer bands"
        )
    rate = dealt * batch_size / dataset_size
    if rate * dataset_size < dealt * batch_size:
        rate = math.nextafter(rate, 1.0)  # rounded up, never below what is sampled
    return SampledGaussian(rate, -(-steps // dealt), sensitivity(strategy, Participation(steps)))
