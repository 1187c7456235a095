"""Batches as a sampler draws them, loaded as they are asked for: a loader that cannot disagree with its sampler.

Assumes a data set that gives the same record for the same index, but for what it draws from global generators: that is
made to depend on the secret, the step and the place in the batch alone, so that a resumed run sees what it would have.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from diskdp.errors import SamplingError
from diskdp.sampling.fetching import Fetched, Part, as_it_is
from diskdp.sampling.guards import refuse_loaders, refuse_mixing
from diskdp.sampling.samplers import Members, Sampler
from diskdp.sampling.units import Units, check_contributions


class LogicalBatch:
    """The batch of one step, handed out once, in microbatches that are loaded as they are asked for.

    `sizes` are the numbers of members of the microbatches, `size` is their sum (without noise: for the data holder
    only), `consumed` whether they were asked for or the loader has moved on; `plan_token` and `loader_id` name the
    plan and the loader. `members` loads some of them again, for work that has to be taken in smaller parts.
    """

    def __init__(
        self,
        step: int,
        sizes: Sequence[int],
        plan_token: str,
        loader_id: str,
        source: Iterator[Any],
        load: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.step = step
        self.sizes = tuple(sizes)
        self.size = sum(sizes)
        self.plan_token = plan_token
        self.loader_id = loader_id
        self.consumed = False
        self._source = source
        self._load = load
        self._dropped = False
        self._closed = False

    def microbatches(self) -> Iterator[Any]:
        """The members, collated, in the order of the data set; no microbatch if there are no members."""
        if self.consumed:
            raise SamplingError(
                f"the batch of step {self.step} has been used already: take each batch once, while it is the "
                "loader's current one (`for batch in loader: private.step(batch)`)"
            )
        self.consumed = True
        return self._hand_out()

    def members(self, start: int, stop: int) -> Any:
        """The members `start` to `stop - 1`, in the order of the data set, fetched and collated anew.

        Works in this process, and while the batch is the loader's current one.
        """
        if self._load is None or self._closed or not 0 <= start < stop <= self.size:
            raise SamplingError(
                f"members {start} to {stop} of the batch of step {self.step} cannot be loaded: it has {self.size}, and "
                "they can be had while it is the loader's current batch"
            )
        return self._load(start, stop)

    def _hand_out(self) -> Iterator[Any]:
        for microbatch in self._source:
            yield microbatch
            if self._dropped:
                raise SamplingError(
                    f"the loader moved past step {self.step} before its batch was used up: finish one batch "
                    "before taking the next"
                )

    def _close(self) -> None:
        """Pass over what was not taken, so that the next batch starts with its own members."""
        self.consumed = self._closed = True
        for _ in self._source:
            self._dropped = True


class PrivateLoader:
    """The batches of steps `first_step` .. `last_step - 1`, exactly as the sampler draws them.

    The data set is any object with `__len__` and `__getitem__`; a torch `DataLoader` fetches and collates in
    `num_workers` processes (a plain `TensorDataset` is indexed directly, with the same result).
    Each iteration over the loader goes through the same steps with the same members, and the same random augmentation
    as far as it is drawn from the global generators of torch (CPU), numpy and Python. `microbatch_size` may be changed
    on the way: it decides how members are grouped, from the next step on that has not been begun to load.

    Data sets and collate functions that mix records are refused as far as `refuse_mixing` sees them. `units` names the
    unit of each record: none may have more than `examples_per_unit`.

    >>> from diskdp.noise import Secret
    >>> from diskdp.sampling import PoissonSampler
    >>> data = torch.utils.data.TensorDataset(torch.arange(100))
    >>> sampler = PoissonSampler(100, 0.2, Secret.from_seed(0))
    >>> loader = PrivateLoader(data, sampler, plan_token="", first_step=0, last_step=3, microbatch_size=8)
    >>> for batch in loader:
    ...     assert sum(len(x) for [x] in batch.microbatches()) == batch.size
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler,
        *,
        plan_token: str,
        first_step: int,
        last_step: int,
        microbatch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        units: Units | None = None,
        examples_per_unit: int = 1,
    ) -> None:
        refuse_loaders(dataset)
        _check_length(dataset, sampler.dataset_size)
        if units is not None:
            check_contributions(units, examples_per_unit, sampler.dataset_size)
        if microbatch_size is not None and microbatch_size < 1:
            raise SamplingError(f"microbatch_size is {microbatch_size}: give at least 1, or None")
        refuse_mixing(dataset, collate_fn)
        self.loader_id = secrets.token_hex(8)
        self.plan_token = plan_token
        self._dataset = dataset
        self._sampler = sampler
        self._steps = range(first_step, last_step)
        self.microbatch_size = microbatch_size
        self._collate_fn = collate_fn
        self._num_workers = num_workers

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[LogicalBatch]:
        drawn: dict[int, tuple[Members, int]] = {}

        def draw(step: int) -> tuple[Members, int]:
            """Members and size of microbatches. Each step is asked for twice, here and by the parts, in either order
            (workers run ahead)."""
            if step in drawn:
                return drawn.pop(step)
            drawn[step] = self._sampler.indices(step), self.microbatch_size or self._sampler.dataset_size
            return drawn[step]

        def parts() -> Iterator[Part]:
            for step in self._steps:
                members, most = draw(step)
                for start in range(0, len(members), most):
                    yield self._part(members, step, start, start + most)

        stream = self._load(parts(), self._num_workers)
        for step in self._steps:
            members, most = draw(step)
            sizes = [min(most, len(members) - start) for start in range(0, len(members), most)]
            source, load = islice(stream, len(sizes)), self._loading(members, step)
            batch = LogicalBatch(step, sizes, self.plan_token, self.loader_id, source, load)
            yield batch
            batch._close()

    def collated(self, indices: npt.NDArray[np.int64]) -> Any:
        """These records of the data set as one microbatch, loaded in this process."""
        return next(self._load(iter([Part(self._sampler.secret.derive("loading", "probe"), indices)])))

    def _part(self, members: Members, step: int, start: int, stop: int) -> Part:
        return Part(self._sampler.secret.derive("loading", step, start), members[start:stop])

    def _loading(self, members: Members, step: int) -> Callable[[int, int], Any]:
        return lambda start, stop: next(self._load(iter([self._part(members, step, start, stop)])))

    def _load(self, parts: Iterator[Part], num_workers: int = 0) -> Iterator[Any]:
        if type(self._dataset) is TensorDataset and self._collate_fn is None:
            tensors = self._dataset.tensors
            chunks = (torch.from_numpy(part.members) for part in parts)
            return ([t.index_select(0, chunk) for t in tensors] for chunk in chunks)
        fetched = Fetched(self._dataset, self._collate_fn)
        if num_workers == 0:
            return (fetched[part] for part in parts)
        seed = int.from_bytes(self._sampler.secret.derive("workers")[:8], "little")
        loader = DataLoader(
            fetched,
            sampler=parts,
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(seed),  # else it would draw from the model's
        )
        return iter(loader)


def _check_length(dataset: Any, expected: int) -> None:
    indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise SamplingError(
            f"{type(dataset).__name__} cannot be sampled: batches are drawn by index, so the data set needs "
            "__len__ and __getitem__ (a map-style data set; read a stream into one first)"
        )
    length = len(dataset)
    if length != expected:
        raise SamplingError(
            f"the plan is for N = {expected} records but this data set has {length}: pass the data set that "
            f"the plan was made for, or make a plan with dataset_size={length}"
        )
