"""Who is in a batch: one sampler for each way of drawing that the accountant knows.

Membership comes from the secret and the step alone: workers, collation, microbatches and global random states cannot
touch it. Batch sizes are data of the training set without noise: they are for the data holder, not for release.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from diskdp.errors import SamplingError
from diskdp.noise.keys import Keystream, Secret

_RECORDS_AT_ONCE = 1 << 16
_RARE = 1e-9

Members: TypeAlias = "npt.NDArray[np.int64]"


class Sampler(Protocol):
    """What a loader needs to know of a sampler: members in ascending order, from the secret and the step alone."""

    @property
    def dataset_size(self) -> int: ...

    @property
    def secret(self) -> Secret: ...

    @property
    def largest_batch(self) -> int:
        """The most members that a batch has, but for one in 10**9 where there is no limit."""
        ...

    def indices(self, step: int) -> Members:
        """The members of the batch of a step, in ascending order; possibly none."""
        ...


class SamplingPlan(Protocol):
    """What decides the sampler."""

    @property
    def sampling(self) -> str: ...

    @property
    def dataset_size(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def max_batch_size(self) -> int | None: ...


@dataclass(frozen=True)
class PoissonSampler:
    """Takes each of `dataset_size` records with probability `sample_rate`, independently, at each step.

    A 64-bit word for each record is compared with floor(sample_rate * 2**64): exact for a rate that is a
    multiple of 2**-64, else too low by less than that, never too high.

    >>> sampler = PoissonSampler(1000, 0.01, Secret.from_seed(0))
    >>> members = sampler.indices(step=3)
    >>> members.dtype, bool((members == sampler.indices(step=3)).all()), len(members) < 40
    (dtype('int64'), True, True)
    """

    dataset_size: int
    sample_rate: float
    secret: Secret

    def __post_init__(self) -> None:
        _check_size(self.dataset_size)
        if not 0 < self.sample_rate <= 1:
            raise SamplingError(f"the sample rate is {self.sample_rate}: it must be in (0, 1]")

    @property
    def largest_batch(self) -> int:
        """More than this many members come with probability below 1e-9."""
        if self.sample_rate == 1:
            return self.dataset_size
        return min(self.dataset_size, int(stats.binom.isf(_RARE, self.dataset_size, self.sample_rate)))

    def indices(self, step: int) -> Members:
        """The members of the batch of a step, in ascending order; possibly none."""
        if self.sample_rate == 1:
            return np.arange(self.dataset_size, dtype=np.int64)
        threshold = np.uint64(int(math.ldexp(self.sample_rate, 64)))
        words, start, members = _Words(self.secret.derive("sampling", step)), 0, []
        for block in words.blocks(self.dataset_size):
            members.append(np.flatnonzero(block < threshold) + start)
            start += len(block)
        return np.concatenate(members)


@dataclass(frozen=True)
class TruncatedPoissonSampler:
    """As `PoissonSampler`; where more than `max_batch_size` came, as many of them stay, every subset equally likely.

    >>> sampler = TruncatedPoissonSampler(1000, 0.05, 50, Secret.from_seed(0))
    >>> sizes = [len(sampler.indices(step)) for step in range(100)]
    >>> max(sizes), min(sizes) < 50
    (50, True)
    """

    dataset_size: int
    sample_rate: float
    max_batch_size: int
    secret: Secret

    def __post_init__(self) -> None:
        PoissonSampler(self.dataset_size, self.sample_rate, self.secret)  # checks them
        if self.max_batch_size < 1:
            raise SamplingError(f"max_batch_size is {self.max_batch_size}: give at least 1")

    @property
    def largest_batch(self) -> int:
        """No batch has more members."""
        return min(self.dataset_size, self.max_batch_size)

    def indices(self, step: int) -> Members:
        """The members of the batch of a step, in ascending order; possibly none."""
        members = PoissonSampler(self.dataset_size, self.sample_rate, self.secret).indices(step)
        if len(members) <= self.max_batch_size:
            return members
        words = _Words(self.secret.derive("truncation", step))
        return members[uniform_subset(words, len(members), self.max_batch_size)]


@dataclass(frozen=True)
class FixedSizeSampler:
    """Takes exactly `batch_size` of `dataset_size` records, every subset equally likely, independently at each step.

    >>> FixedSizeSampler(1000, 10, Secret.from_seed(0)).indices(step=3).shape
    (10,)
    """

    dataset_size: int
    batch_size: int
    secret: Secret

    def __post_init__(self) -> None:
        _check_size(self.dataset_size)
        _check_batch(self.batch_size, self.dataset_size)

    @property
    def largest_batch(self) -> int:
        """Every batch has as many members."""
        return self.batch_size

    def indices(self, step: int) -> Members:
        """The members of the batch of a step, in ascending order."""
        words = _Words(self.secret.derive("fixed-size", step))
        return uniform_subset(words, self.dataset_size, self.batch_size)


@dataclass(frozen=True)
class ShuffledSampler:
    """Cuts a new uniformly random order of all records into batches, every epoch; its last batch may be smaller.

    An epoch is ceil(dataset_size / batch_size) steps, and each record is in exactly one of its batches, as long as
    the secret stays the same: under another one it is another order, which the ledger counts by itself.

    >>> sampler = ShuffledSampler(10, 4, Secret.from_seed(0))
    >>> [len(sampler.indices(step)) for step in range(6)]
    [4, 4, 2, 4, 4, 2]
    >>> sorted(int(i) for step in range(3, 6) for i in sampler.indices(step)) == list(range(10))
    True
    """

    dataset_size: int
    batch_size: int
    secret: Secret
    _orders: dict[int, Members] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_size(self.dataset_size)
        _check_batch(self.batch_size, self.dataset_size)

    @property
    def largest_batch(self) -> int:
        """No batch has more members."""
        return self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """ceil(dataset_size / batch_size)."""
        return -(-self.dataset_size // self.batch_size)

    def indices(self, step: int) -> Members:
        """The members of the batch of a step, in ascending order."""
        epoch, part = divmod(step, self.steps_per_epoch)
        start = part * self.batch_size
        return np.sort(self._order(epoch)[start : start + self.batch_size])

    def _order(self, epoch: int) -> Members:
        order = self._orders.get(epoch)
        if order is None:
            order = uniform_order(_Words(self.secret.derive("shuffle", epoch)), self.dataset_size)
            self._orders.clear()  # steps go up: one epoch's order is what is asked for
            self._orders[epoch] = order
        return order


def sampler_for(plan: SamplingPlan, secret: Secret) -> Sampler:
    """The sampler of a plan.

    >>> from diskdp import Plan
    >>> plan = Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-3)
    >>> sampler_for(plan, Secret.from_seed(0))
    PoissonSampler(dataset_size=100, sample_rate=0.1, secret=Secret(reproducible=True))
    """
    size, batch = plan.dataset_size, plan.batch_size
    if plan.sampling == "poisson":
        return PoissonSampler(size, batch / size, secret)
    if plan.sampling == "truncated-poisson":
        most = plan.max_batch_size
        if most is None:
            raise SamplingError("truncated Poisson sampling needs a limit: give the plan a max_batch_size")
        return TruncatedPoissonSampler(size, batch / size, most, secret)
    if plan.sampling == "fixed-size":
        return FixedSizeSampler(size, batch, secret)
    if plan.sampling == "shuffled":
        return ShuffledSampler(size, batch, secret)
    raise SamplingError(
        f"there is no sampler for sampling={plan.sampling!r}; use poisson, truncated-poisson, fixed-size or shuffled"
    )


class _Words:
    """Independent uniform 64-bit words of a key, one after another."""

    def __init__(self, key: bytes) -> None:
        self._stream = Keystream(key)

    def blocks(self, count: int) -> Iterator[npt.NDArray[np.uint64]]:
        """The next `count` words in pieces, each valid until the next is asked for."""
        buffer = bytearray(8 * min(count, _RECORDS_AT_ONCE) + Keystream.SLACK)
        for start in range(0, count, _RECORDS_AT_ONCE):
            size = min(_RECORDS_AT_ONCE, count - start)
            self._stream.fill(memoryview(buffer), 8 * size)
            yield np.frombuffer(buffer, "<u8", size)

    def take(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` words."""
        buffer = bytearray(8 * count + Keystream.SLACK)
        self._stream.fill(memoryview(buffer), 8 * count)
        return np.frombuffer(buffer, "<u8", count)


class Words(Protocol):
    """A source of independent uniform 64-bit words."""

    def take(self, count: int) -> npt.NDArray[np.uint64]: ...


def words_of(secret: Secret, *labels: str | int) -> Words:
    """The words of a key derived from a secret."""
    return _Words(secret.derive(*labels))


def uniform_subset(words: Words, size: int, count: int) -> Members:
    """`count` of range(size) in ascending order, every such subset with the same probability, exactly.

    The members are those with the `count` smallest of `size` words. Where the last of them equals one left out, all
    are drawn anew; whether that happens does not depend on who has which word, so that no subset is preferred.

    >>> uniform_subset(words_of(Secret.from_seed(0), "example"), 5, 5)
    array([0, 1, 2, 3, 4])
    """
    if count == size:
        return np.arange(size, dtype=np.int64)
    while True:
        drawn = words.take(size)
        chosen = np.flatnonzero(drawn <= np.partition(drawn, count - 1)[count - 1])
        if len(chosen) == count:
            return chosen.astype(np.int64, copy=False)


def uniform_order(words: Words, size: int) -> Members:
    """A permutation of range(size), every one with the same probability, exactly: that of its words, if all differ.

    >>> sorted(uniform_order(words_of(Secret.from_seed(0), "example"), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    while True:
        drawn = words.take(size)
        order = np.argsort(drawn, kind="stable")
        ranked = drawn[order]
        if (ranked[1:] != ranked[:-1]).all():
            return order.astype(np.int64, copy=False)


def _check_size(dataset_size: int) -> None:
    if dataset_size < 1:
        raise SamplingError(f"dataset_size is {dataset_size}: sampling needs at least one record")


def _check_batch(batch_size: int, dataset_size: int) -> None:
    if not 1 <= batch_size <= dataset_size:
        raise SamplingError(f"batch_size is {batch_size}: it must be from 1 to dataset_size, which is {dataset_size}")
