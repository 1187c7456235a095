"""Fetching and collating a microbatch with randomness of its own, in whatever process that happens.

Covers the global generators of torch (on the CPU), numpy and Python, which transforms draw from; a generator that a
data set made for itself goes on as it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate


@dataclass(frozen=True)
class Part:
    """Members of a batch to be loaded together, and the key of what is drawn on the way."""

    key: bytes
    members: npt.NDArray[np.int64]


class Fetched(Dataset[Any]):
    """The data set of microbatches: asked for a `Part`, it gives its members, collated.

    >>> data = Fetched([torch.zeros(2)] * 5, lambda examples: torch.stack(examples) + torch.rand(()))
    >>> bool((data[Part(bytes(32), np.array([0, 3]))] == data[Part(bytes(32), np.array([1, 2]))]).all())
    True
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate_fn is None else collate_fn

    def __getitem__(self, part: Part) -> Any:
        with seeded(part.key):
            return self._collate(fetch(self._dataset, part.members.tolist()))


def fetch(dataset: Any, indices: list[int]) -> Any:
    """These records, as a torch `DataLoader` fetches them: together where the data set can."""
    together = getattr(dataset, "__getitems__", None)
    return together(indices) if together else [dataset[index] for index in indices]


def as_it_is(microbatch: Any) -> Any:
    """Collates nothing: what comes is a microbatch already."""
    return microbatch


@contextmanager
def seeded(key: bytes) -> Iterator[None]:
    """Inside, the global generators start from `key`; afterwards they are where they were.

    >>> before = torch.get_rng_state()
    >>> with seeded(bytes(32)):
    ...     first = torch.rand(3)
    >>> bool((torch.get_rng_state() == before).all())
    True
    """
    torchs, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(int.from_bytes(key[:8], "little"))  # torch.manual_seed moves devices' too
    np.random.seed(np.frombuffer(key, "<u4"))  # noqa: NPY002
    random.seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)
