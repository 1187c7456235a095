"""What is drawn while a microbatch is loaded: from the secret, the step and its place in the batch alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from diskdp import DiSK, Plan, privatize
from diskdp.noise import Secret
from diskdp.sampling import FixedSizeSampler, PoissonSampler, PrivateLoader, ShuffledSampler
from tests.models import classify

SIZE = 60


class Augmented(Dataset[Any]):
    """Each record with a number from each global generator."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, Any, float, float]:
        return index, torch.rand(2), float(np.random.normal()), random.random()  # noqa: NPY002


class Together(Augmented):
    """Fetches several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shift = torch.rand(())
        return [(i, draw + shift, a, b) for i, draw, a, b in (self[i] for i in indices)]


def collate(examples: list[Any]) -> Any:
    index, *drawn = default_collate(examples)
    return index, *drawn, torch.rand(len(index))


def loaded(
    dataset: Any = None, *, seed: int = 1, first: int = 0, workers: int = 0, size: int | None = 5, sampler: Any = None
) -> dict[tuple[int, int], list[torch.Tensor]]:
    """What comes in each microbatch, by the step and the place of its first member."""
    sampler = sampler or PoissonSampler(SIZE, 0.2, Secret.from_seed(seed))
    loader = PrivateLoader(
        Augmented() if dataset is None else dataset,
        sampler,
        plan_token="",
        first_step=first,
        last_step=6,
        microbatch_size=size,
        collate_fn=collate,
        num_workers=workers,
    )
    found = {}
    for batch in loader:
        start = 0
        for microbatch in batch.microbatches():
            found[batch.step, start] = list(microbatch)
            start += len(microbatch[0])
    return found


def equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(
        all(torch.equal(a, b) for a, b in zip(one[key], other[key], strict=True)) for key in one
    )


@pytest.mark.parametrize("dataset", [Augmented(), Together()])
def test_augmentation_is_that_of_the_place(dataset: Any) -> None:
    usual = loaded(dataset)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    random.seed(99)
    assert equal(loaded(dataset), usual)
    assert equal(loaded(dataset, workers=2), usual)
    for workers in (0, 2):
        resumed = loaded(dataset, first=3, workers=workers)
        assert equal(resumed, {key: value for key, value in usual.items() if key[0] >= 3})


def test_steps_places_and_secrets_see_other_augmentations() -> None:
    everyone = FixedSizeSampler(SIZE, SIZE, Secret.from_seed(1))
    found = loaded(sampler=everyone)
    other = loaded(sampler=FixedSizeSampler(SIZE, SIZE, Secret.from_seed(2)))
    assert found.keys() == other.keys()
    drawn = [value for parts in (found, other) for microbatch in parts.values() for value in microbatch[1:]]
    for kind in range(4):
        firsts = [float(torch.as_tensor(value).flatten()[0]) for value in drawn[kind::4]]
        assert len(firsts) == 2 * 6 * 12
        assert len(set(firsts)) == len(firsts)


def test_a_part_loaded_again_is_that_of_its_place() -> None:
    """A reload in smaller parts: where a part starts decides."""
    usual = loaded(size=4)
    loader = PrivateLoader(
        Augmented(),
        PoissonSampler(SIZE, 0.2, Secret.from_seed(1)),
        plan_token="",
        first_step=0,
        last_step=6,
        collate_fn=collate,
    )
    for batch in loader:
        for start in range(0, batch.size, 4):
            part = batch.members(start, min(start + 4, batch.size))
            assert all(torch.equal(a, b) for a, b in zip(part, usual[batch.step, start]))


def streams() -> list[Any]:
    states = [torch.get_rng_state(), np.random.get_state()[1], np.random.get_state()[2]]  # noqa: NPY002
    return [*(torch.as_tensor(np.asarray(state)).long() for state in states), random.getstate()]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_own_random_streams_stand_still(workers: int) -> None:
    before = streams()
    loaded(workers=workers)
    loaded(TensorDataset(*(torch.zeros(SIZE) for _ in range(4))), workers=workers)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, streams()))


def test_streams_stand_still_after_an_error() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            torch.rand(1), random.random()
            raise OSError("disk gone")

    before = streams()
    with pytest.raises(OSError, match="disk gone"):
        loaded(Broken())
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, streams()))


def test_what_comes_is_what_a_data_loader_gives() -> None:
    """But for the augmentation: containers, types, and records fetched together."""

    class Records(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.tensor([index, 1.5]), "y": (index, f"name {index}"), "z": np.float64(index)}

    class Fetching(Records):
        def __getitems__(self, indices: list[int]) -> Any:
            return [{**self[i], "of": len(indices)} for i in indices]

    sampler = ShuffledSampler(SIZE, 9, Secret.from_seed(3))
    chunks = [sampler.indices(step).tolist() for step in range(7)]
    for data in (Records(), Fetching(), [(i, str(i)) for i in range(SIZE)]):
        for workers in (0, 2):
            loader = PrivateLoader(data, sampler, plan_token="", first_step=0, last_step=7, num_workers=workers)
            ours = [microbatch for batch in loader for microbatch in batch.microbatches()]
            theirs = list(DataLoader(data, batch_sampler=chunks))  # type: ignore[arg-type]
            assert str(ours) == str(theirs)


def test_a_record_that_stops_iteration_does_not_shorten_a_batch() -> None:
    class Stops(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        loaded(Stops())


class Noisy(Dataset[Any]):
    """Vectors with noise on them, from every global generator."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(SIZE, 5, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(5) + np.random.rand() + random.random()  # noqa: NPY002
        return self.x[index] + 0.5 * noise, self.y[index]


def test_a_resumed_run_with_augmentation_is_bit_exact(tmp_path: Any) -> None:
    plan = Plan(dataset_size=SIZE, batch_size=12, steps=6, noise_multiplier=1.0, delta=1e-4)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))

    def steps(private: Any, until: int, workers: int) -> Iterator[int]:
        for batch in private.loader(Noisy(), num_workers=workers):
            private.step(batch)
            if private.steps_done == until:
                return
            yield batch.step

    def start(make: Callable[..., Any]) -> Any:
        own = model()
        optimizer = torch.optim.Adam(own.parameters(), lr=0.05)
        return make(own, optimizer, plan, loss_fn=classify, filter=DiSK(), microbatch_size=4, seed=3)

    whole = start(privatize)
    list(steps(whole, 6, 0))
    begun = start(privatize)
    list(steps(begun, 3, 2))
    begun.save(tmp_path / "state")
    torch.manual_seed(1234)
    random.seed(5)
    resumed = start(lambda *args, **options: privatize.resume(tmp_path / "state", *args, **options))
    list(steps(resumed, 6, 0))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters()))
