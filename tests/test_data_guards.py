"""Data sets, collate functions and loaders that would put one record into several examples; and honest ones."""

from __future__ import annotations

import collections
import copy
import functools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.profiler import ProfilerActivity
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from diskdp import Plan, privatize
from diskdp.errors import SamplingError
from diskdp.memory import _quiet_profiler
from diskdp.noise import Secret
from diskdp.sampling import PoissonSampler, PrivateLoader, refuse_mixing
from diskdp.sampling.generators import Randomness
from tests.models import classify

SIZE = 40
OWN = np.random.default_rng(7)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(SIZE, 3, 8, 8, generator=generator), torch.randint(0, 5, (SIZE,), generator=generator)
    )


# --- loaders ----------------------------------------------------------------------------------------------------------


def test_data_loaders_are_refused() -> None:
    data = images()
    loaders: dict[str, Any] = {
        "SequentialSampler": DataLoader(data),
        "RandomSampler": DataLoader(data, batch_size=4, shuffle=True),
        "WeightedRandomSampler": DataLoader(data, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    }
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    plan = Plan(dataset_size=SIZE, batch_size=4, steps=3, noise_multiplier=1.0, delta=1e-3)
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    for name, loader in loaders.items():
        with pytest.raises(SamplingError, match=rf"DataLoader.*\({name}\).*pass loader\.dataset"):
            private.loader(loader)
        private.loader(loader.dataset, collate_fn=loader.collate_fn)


def test_other_things_that_sample_are_refused() -> None:
    class Shard:  # such as wrappers of loaders that are none themselves
        def __init__(self, loader: Any) -> None:
            self.batch_sampler, self.dataset = loader.batch_sampler, loader.dataset

        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            return self.dataset[index]

    with pytest.raises(SamplingError, match=r"Shard.*BatchSampler"):
        PrivateLoader(
            Shard(DataLoader(images(), batch_size=4)),
            PoissonSampler(SIZE, 0.1, Secret.from_seed(0)),
            plan_token="",
            first_step=0,
            last_step=1,
        )


# --- collate functions ------------------------------------------------------------------------------------------------


def mixed(examples: list[Any], weight: float, order: Any) -> tuple[Tensor, Tensor]:
    x, y = default_collate(examples)
    one_hot = torch.nn.functional.one_hot(y, 5).float()
    return tuple(weight * t + (1 - weight) * t[order] for t in (x, one_hot))  # type: ignore[return-value]


def mixup(examples: list[Any]) -> Any:
    weight = np.random.beta(0.2, 0.2)  # noqa: NPY002
    return mixed(examples, weight, torch.randperm(len(examples)))


def mixup_sometimes(examples: list[Any]) -> Any:
    return mixup(examples) if random.random() < 0.5 else default_collate(examples)


def mixup_of_own_randomness(examples: list[Any]) -> Any:
    return mixed(examples, OWN.random(), OWN.permutation(len(examples)))


class MixupObject:
    def __init__(self) -> None:
        self.draw = torch.Generator()

    def __call__(self, examples: list[Any]) -> Any:
        return mixed(examples, 0.7, torch.randperm(len(examples), generator=self.draw))


def cutmix(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    order, at = torch.randperm(len(x)), int(torch.randint(0, 5, ()))
    x[:, :, at : at + 3, at : at + 3] = x[order, :, at : at + 3, at : at + 3]
    return x, y, y[order]


def normalised(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    return (x - x.mean(0)) / (x.std(0) + 1e-3), y


def normalised_time_first(examples: list[Any]) -> Any:
    x = torch.stack([x.flatten() for x, _ in examples], 1)
    return {"x": x / x.amax(1, keepdim=True)}


def as_arrays(examples: list[Any]) -> Any:
    x = np.stack([x.numpy() for x, _ in examples])
    return {"inputs": {"x": [x - x.mean(0)]}}


def neighbours(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    return x, x.roll(1, 0), y


def lists(examples: list[Any]) -> Any:
    total = sum(float(x.sum()) for x, _ in examples)
    return [(x / total, int(y)) for x, y in examples]


def object_collate(examples: list[Any]) -> Any:
    class Batch:
        pass

    batch = Batch()
    batch.x = normalised(examples)[0]  # type: ignore[attr-defined]
    return batch


def normalised_in_place_of_twos(examples: list[Any]) -> Any:
    """Pairs alone: an odd number of examples is refused by the function itself."""
    x, y = default_collate(examples)
    first, second = x.chunk(2) if len(x) % 2 == 0 else x[:1]
    return torch.cat([first + second, first - second]), y


MIXING: dict[str, Callable[[list[Any]], Any]] = {
    f.__name__: f
    for f in (
        mixup,
        mixup_sometimes,
        mixup_of_own_randomness,
        cutmix,
        normalised,
        normalised_time_first,
        as_arrays,
        neighbours,
        lists,
        object_collate,
        normalised_in_place_of_twos,
    )
}
MIXING["object"] = MixupObject()
MIXING["partial"] = functools.partial(mixed, weight=0.5, order=[1, 2, 3, 0])
MIXING["sorted and normalised"] = lambda examples: normalised(sorted(examples, key=lambda e: float(e[0].sum())))


@pytest.mark.parametrize("name", MIXING)
def test_collate_functions_that_mix_are_refused(name: str) -> None:
    with pytest.raises(SamplingError, match="collate_fn mixes examples"):
        refuse_mixing(images(), MIXING[name])


def test_found_before_training() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    plan = Plan(dataset_size=SIZE, batch_size=4, steps=3, noise_multiplier=1.0, delta=1e-3)
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    with pytest.raises(SamplingError, match=r"collate_fn mixes examples: in \[0\]"):
        private.loader(images(), collate_fn=mixup)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_mixing_in_small_data_sets(size: int) -> None:
    data = Subset(images(), range(size))
    for collate in (normalised, mixup, neighbours):
        with pytest.raises(SamplingError, match="mixes"):
            refuse_mixing(data, collate)
    refuse_mixing(data, default_collate)
    refuse_mixing(Subset(data, range(2)), normalised)  # there is nobody to exchange


def test_mixing_now_and_then_is_found_as_often_as_stated() -> None:
    """p = .05: 16 trials find it in a share 1 - (1 - 5p/6)**16 = .494 of cases, each with its own draws."""
    found, data = 0, TensorDataset(torch.rand(SIZE, 2), torch.arange(SIZE) % 5)
    for case in range(60):

        def now_and_then(examples: list[Any], case: int = case) -> Any:
            chance = random.Random(f"{random.random()} {case}").random()  # other draws in each case
            return mixup(examples) if chance < 0.05 else default_collate(examples)

        try:
            refuse_mixing(data, now_and_then)
        except SamplingError:
            found += 1
    assert 12 <= found <= 48  # of other draws, a share of 2e-6 is beyond


class Texts(Dataset[Any]):
    """Token lists of different lengths."""

    def __init__(self, longest: int = 9) -> None:
        self.longest = longest

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"ids": torch.arange(1, 2 + (index * 7) % self.longest) + index, "label": index % 2}


def padded(examples: list[Any], left: bool = False, multiple: int = 1) -> Any:
    ids = [e["ids"] for e in examples]
    longest = -(-max(map(len, ids)) // multiple) * multiple
    rows = torch.zeros(len(ids), longest, dtype=torch.long)
    for row, own in zip(rows, ids):
        row[longest - len(own) :] = own if left else 0
        if not left:
            row[: len(own)] = own
    return {
        "input_ids": rows,
        "attention_mask": (rows > 0).long(),
        "labels": torch.tensor([e["label"] for e in examples]),
        "longest": torch.full((len(ids),), longest),  # as CTC losses want it
        "lengths": torch.tensor([len(own) for own in ids]),
        "offsets": torch.tensor([0, *(len(own) for own in ids)]).cumsum(0)[:-1],
        "flat": torch.cat(ids),
        "texts": [str(own.tolist()) for own in ids],
        "max": longest,
    }


def masked(examples: list[Any]) -> Any:
    """Masked language modelling: one draw for the whole padded batch."""
    batch = padded(examples)
    hidden = torch.bernoulli(torch.full(batch["input_ids"].shape, 0.3)).bool()
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 99), "hidden": hidden}


def noised_one_by_one(examples: list[Any]) -> Any:
    """As many draws as an example is long: those of later ones move with the length of earlier ones."""
    return padded([{**e, "ids": e["ids"] + torch.randint(0, 50, e["ids"].shape)} for e in examples])


def by_length(examples: list[Any]) -> Any:
    examples = sorted(examples, key=lambda e: -len(e["ids"]))
    order = torch.tensor([len(e["ids"]) for e in examples]).argsort()
    return padded(examples), order


def packed(examples: list[Any]) -> Any:
    labels = torch.tensor([e["label"] for e in examples])
    return pack_sequence([e["ids"] for e in examples], enforce_sorted=False), labels


def popping(examples: list[Any]) -> Any:
    """Takes examples apart, as some collators do."""
    labels = torch.tensor([e.pop("label") for e in examples])
    return pad_sequence([e.pop("ids") for e in examples]), labels


def dictionaries_of_lists(examples: list[Any]) -> Any:
    longest = max(len(e["ids"]) for e in examples)
    return collections.UserDict(
        input_ids=[[*e["ids"].tolist(), *[0] * (longest - len(e["ids"]))] for e in examples],
        label=[e["label"] for e in examples],
    )


HONEST: dict[str, Any] = {
    f.__name__: f for f in (padded, masked, noised_one_by_one, by_length, packed, popping, dictionaries_of_lists)
}
HONEST["left"] = functools.partial(padded, left=True)
HONEST["multiple"] = functools.partial(padded, multiple=8)
HONEST["as they are"] = list


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 9, 39])
@pytest.mark.parametrize("name", HONEST)
def test_honest_collation_of_texts(name: str, longest: int) -> None:
    refuse_mixing(Texts(longest), HONEST[name])


def jittered(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    return x * torch.rand(len(x), 1, 1, 1) + torch.randn_like(x), y, np.random.rand(len(x))  # noqa: NPY002


def flipped(examples: list[Any]) -> Any:
    return default_collate([(x.flip(2) if random.random() < 0.5 else x, y) for x, y in examples])


def rejected(examples: list[Any]) -> Any:
    """Draws until it likes what it has: a number of draws that depends on the data."""

    def crop(x: Tensor) -> Tensor:
        while True:
            at = int(torch.randint(0, 6, ()))
            if float(x[0, at, at]) > 0.3 or random.random() < 0.1:
                return x[:, at : at + 2, at : at + 2]

    return torch.stack([crop(x) for x, _ in examples]), torch.tensor([int(y) for _, y in examples])


def views(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    return {"views": torch.stack([x, x + torch.randn_like(x)]), "flat": torch.cat([x, x.flip(3)]), "y": y}


def half_precision(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    return x.bfloat16(), (x.flatten(1) @ torch.ones(192, 3)).half(), y, len(x), "a batch", None


def of_an_unknown_source(examples: list[Any]) -> Any:
    """Draws that nobody can repeat."""
    x, y = default_collate(examples)
    return x + random.SystemRandom().random(), y


@pytest.mark.parametrize("collate", [jittered, flipped, rejected, views, half_precision, of_an_unknown_source, None])
def test_honest_collation_of_images(collate: Any) -> None:
    refuse_mixing(images(), collate)


def test_collation_that_does_not_do_with_a_few_examples_is_left_alone() -> None:
    def picky(examples: list[Any]) -> Any:
        assert len(examples) == 16
        return default_collate(examples)

    refuse_mixing(images(), picky)


def test_errors_of_records_are_not_the_guards() -> None:
    class Broken(Texts):
        def __getitem__(self, index: int) -> Any:
            raise OSError("disk gone")

    refuse_mixing(Broken(), padded)


# --- records fetched together -----------------------------------------------------------------------------------------


class Fetching(Texts):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class FetchingMixed(Texts):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        examples = [self[i] for i in indices]
        total = sum(float(e["ids"].sum()) for e in examples)
        return [{**e, "share": float(e["ids"].sum()) / total} for e in examples]


def test_records_fetched_together() -> None:
    refuse_mixing(Fetching())
    refuse_mixing(Fetching(), padded)
    for collate in (None, padded):
        with pytest.raises(SamplingError, match="__getitems__ mixes records"):
            refuse_mixing(FetchingMixed(), collate)


# --- data sets --------------------------------------------------------------------------------------------------------


class Base(Dataset[Any]):
    """Records in lists, arrays, tensors."""

    def __init__(self) -> None:
        self.images, self.labels = images().tensors
        self.names = [f"record {i}" for i in range(SIZE)]
        self.array = self.images.numpy() + 1
        self.mean = self.images.mean(0) + 1  # public, let us say
        self.words = ["a", "b", "c"]
        self.cache: dict[int, Any] = {}
        self.slots: list[Any] = [None] * SIZE
        self.count = 0
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


class Mixup(Base):
    def __getitem__(self, index: int) -> Any:
        other = random.randrange(SIZE)
        return 0.7 * self.images[index] + 0.3 * self.images[other], self.labels[index]


class MixupSometimes(Base):
    def __getitem__(self, index: int) -> Any:
        if random.random() < 0.4:
            return self.images[index] + self.images[int(torch.randint(0, SIZE, ()))]
        return self.images[index]


class MixupOfOwnRandomness(Base):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] + self.images[self.rng.integers(SIZE)]


class MixupOfItself(Base):
    def __getitem__(self, index: int) -> Any:
        if isinstance(index, tuple):
            return self.images[index[0]]
        return self.images[index] if torch.rand(()) < 0.5 else self[(index + 1) % SIZE][0] + self.images[index]


class Recursive(Dataset[Any]):
    """Everything through itself; nothing that holds the records can be seen."""

    def __init__(self, partner: bool = True) -> None:
        self.partner = partner

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        x = torch.full((3,), float(index))
        if self.partner and random.random() < 0.5:
            self.partner = False
            x = x + self[random.randrange(SIZE)]
            self.partner = True
        return x


class Neighbours(Base):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] - self.images[index - 1]


class Window(Base):
    def __getitem__(self, index: int) -> Any:
        return self.array[max(0, index - 2) : index + 1].mean(0)


class Fancy(Base):
    def __getitem__(self, index: int) -> Any:
        return self.images[[index, (index * 7 + 3) % SIZE]].sum(0)


class Names(Base):
    def __getitem__(self, index: int) -> Any:
        return self.names[index] + random.choice(self.names)


class Sampled(Base):
    def __getitem__(self, index: int) -> Any:
        return [self.names[index], *random.sample(self.names, 2)]


class ByLabel(Base):
    """A partner of the same class."""

    def __getitem__(self, index: int) -> Any:
        partners = np.flatnonzero(self.labels == self.labels[index])
        return self.images[index], self.images[int(np.random.choice(partners))]  # noqa: NPY002


class Resampled(Base):
    """Hands out another record altogether: a weighted sampler inside the data set."""

    def __getitem__(self, index: int) -> Any:
        return self.images[random.randrange(SIZE)]


class Seeded(Base):
    """A partner fixed for each record."""

    def __getitem__(self, index: int) -> Any:
        return torch.cat([self.images[index], self.images[int(np.random.default_rng(index).integers(SIZE - 1))]])


class Wrapped(Dataset[Any]):
    def __init__(self, base: Any, change: Callable[[Any], Any] = lambda record: record) -> None:
        self.base, self.change = base, change

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.base[index])


class WrappedMix(Wrapped):
    def __getitem__(self, index: int) -> Any:
        return self.base[index][0] + self.base[random.randrange(len(self.base))][0]


class Remapped(Base):
    """Another order, and partners in it."""

    def __init__(self, partners: bool) -> None:
        super().__init__()
        self.order, self.partners = np.random.default_rng(2).permutation(SIZE), partners

    def __getitem__(self, index: int) -> Any:
        x = self.images[self.order[index]]
        return x + self.images[random.randrange(SIZE)] if self.partners else x


LOOKING: dict[str, Callable[[], Any]] = {
    c.__name__: c
    for c in (
        Mixup,
        MixupSometimes,
        MixupOfOwnRandomness,
        MixupOfItself,
        Recursive,
        Neighbours,
        Window,
        Fancy,
        Names,
        Sampled,
        ByLabel,
        Resampled,
        Seeded,
    )
}
LOOKING["remapped"] = lambda: Remapped(True)
LOOKING["over tensors"] = lambda: WrappedMix(images())
LOOKING["over a list"] = lambda: WrappedMix([(torch.full((3,), float(i)), 0) for i in range(SIZE)])
LOOKING["inside another"] = lambda: Wrapped(Wrapped(Mixup()), change=lambda record: record[0])
LOOKING["inside a subset"] = lambda: Subset(Mixup(), range(5, 30))
LOOKING["inside a concatenation"] = lambda: ConcatDataset([Base(), Neighbours()])
LOOKING["inside a stack"] = lambda: StackDataset(x=Base(), y=WrappedMix(images()))
LOOKING["over a subset"] = lambda: WrappedMix(Subset(images(), range(3, 33)))


@pytest.mark.parametrize("name", LOOKING)
def test_data_sets_that_look_at_other_records_are_refused(name: str) -> None:
    with pytest.raises(SamplingError, match="makes an example of several records"):
        refuse_mixing(LOOKING[name]())


def test_the_container_is_named() -> None:
    with pytest.raises(SamplingError, match=r"Neighbours\.images is asked for others"):
        refuse_mixing(Neighbours())
    with pytest.raises(SamplingError, match=r"Recursive\[\.\.\.\] is asked for others"):
        refuse_mixing(Recursive())


class Augmenting(Base):
    def __getitem__(self, index: int) -> Any:
        x = self.images[index] if random.random() < 0.5 else self.images[index].flip(2)
        return x + torch.randn_like(x) - self.mean, self.labels[index], self.names[index], self.rng.random()


class Caching(Base):
    def __getitem__(self, index: int) -> Any:
        self.count += 1
        if index not in self.cache:
            self.cache[index] = self.images[index] * 2
        if self.slots[index] is None:
            self.slots[index] = self.array[index : index + 1][0] - 0.5
        return self.cache[index], self.slots[index], self.array[index, 0], self.words[random.randrange(3)]


class ReadingAhead(Base):
    """Blocks of eight, of which each record takes its own."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep

    def __getitem__(self, index: int) -> Any:
        start = index // 8 * 8
        if start not in self.cache:
            block = self.images[start : start + 8]
            if not self.keep:
                return block[index - start], random.random()
            self.cache[start] = block
        return self.cache[start][index - start], random.random()


class Indexing(Base):
    """Goes through everything once, on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.starts is None:
            self.starts = np.cumsum([len(name) for name in self.names])
        return self.images[index], int(self.starts[index]) - len(self.names[index]), random.random()


class WholeArrays(Base):
    """More than indexing: a recording container does not do here."""

    def __getitem__(self, index: int) -> Any:
        return torch.nn.functional.normalize(self.images)[index]


class Vocabulary(Base):
    """As many words as records, by coincidence."""

    def __getitem__(self, index: int) -> Any:
        return [self.names[(index * k) % SIZE] for k in (3, 5, 11)], random.random()


class Locked(Base):
    """Cannot be copied deeply."""

    def __init__(self) -> None:
        super().__init__()
        self.pulse = (i for i in range(3))

    def __getitem__(self, index: int) -> Any:
        start = index // 8 * 8
        return self.images[start : start + 8][index - start] + random.random()


class Closing(Base):
    """Copies would close what is shared."""

    closed = 0

    def __del__(self) -> None:
        Closing.closed += 1


class Views(Base):
    """Two views of the same record, through itself."""

    def __getitem__(self, index: int) -> Any:
        if isinstance(index, str):
            return self.images[int(index)] + torch.randn(())
        return self[str(index)], self[str(index)]


class Negative(Base):
    def __getitem__(self, index: int) -> Any:
        return self.images[index - SIZE], self.labels[index], random.random()


SOUND: dict[str, Callable[[], Any]] = {
    c.__name__: c
    for c in (Base, Augmenting, Caching, Indexing, WholeArrays, Vocabulary, Locked, Closing, Views, Negative)
}
SOUND["reading ahead"] = lambda: ReadingAhead(keep=False)
SOUND["reading ahead, kept"] = lambda: ReadingAhead(keep=True)
SOUND["without partner"] = lambda: Recursive(partner=False)
SOUND["remapped"] = lambda: Remapped(False)
SOUND["wrapped"] = lambda: Wrapped(Subset(Wrapped(Caching()), [3, 1, 4, 1, 5, 9, 2, 6] * 3))
SOUND["concatenated"] = lambda: ConcatDataset([Base(), Augmenting(), Caching()])
SOUND["stacked"] = lambda: StackDataset(Base(), Augmenting())
SOUND["a list"] = lambda: [(torch.rand(3), i) for i in range(SIZE)]
SOUND["an array"] = lambda: np.random.default_rng(0).random((SIZE, 3))
SOUND["one record"] = lambda: Subset(Base(), [3])


@pytest.mark.parametrize("name", SOUND)
def test_sound_data_sets_pass(name: str) -> None:
    refuse_mixing(SOUND[name]())


def test_a_torn_down_copy_is_never_made() -> None:
    data = Closing()
    before = Closing.closed
    refuse_mixing(data, default_collate)
    assert Closing.closed == before


@pytest.mark.parametrize("name", ["Caching", "Augmenting", "reading ahead", "reading ahead, kept", "Indexing"])
def test_the_data_set_is_not_touched(name: str) -> None:
    data = SOUND[name]()
    before, kept = copy.deepcopy(vars(data)), dict(vars(data))
    refuse_mixing(data)
    assert type(data) is type(SOUND[name]())
    assert vars(data).keys() == kept.keys()
    for key, value in vars(data).items():
        assert value is kept[key]
        assert str(value) == str(before[key])
    assert data.rng.bit_generator.state == before["rng"].bit_generator.state


@pytest.mark.parametrize("name", ["Caching", "reading ahead, kept"])
def test_what_is_cached_on_the_way_is_right(name: str) -> None:
    """Where the records are fetched for collation, or from inside another data set, a cache is written to as ever."""
    data = SOUND[name]()
    refuse_mixing(Wrapped(data), list)
    assert data.cache
    for index, value in data.cache.items():
        assert torch.equal(value, data.images[index] * 2 if name == "Caching" else data.images[index : index + 8])


def test_random_streams_stand_still() -> None:
    def states() -> Any:
        numpy = str(np.random.get_state())  # noqa: NPY002
        return [torch.get_rng_state().tolist(), numpy, random.getstate(), OWN.bit_generator.state]

    before = states()
    refuse_mixing(Augmenting())
    refuse_mixing(images(), jittered)
    for broken in (mixup_of_own_randomness, mixup):
        with pytest.raises(SamplingError):
            refuse_mixing(images(), broken)
    assert states() == before


def test_generators_are_found_where_code_keeps_them() -> None:
    rng, other = np.random.RandomState(3), random.Random(4)
    by_default = torch.Generator()

    class Kept:
        def __init__(self) -> None:
            self.inner = {"a": [other]}

        def draw(self) -> Any:
            return OWN.random(), self.inner["a"][0].random()

        def __call__(self, generator: torch.Generator = by_default) -> Any:
            return self.draw(), rng.rand(), torch.rand(1, generator=generator).item()

    kept = Kept()
    for root in (kept, kept.__call__, functools.partial(kept), lambda: kept()):
        randomness = Randomness(root)
        before = randomness.state()
        found = []
        for seed in (1, 1, 2):
            with randomness.seeded(seed):
                found.append(kept())
        assert found[0] == found[1]
        assert all(a != b for a, b in zip(found[0], found[2]))
        assert randomness.state() == before


def test_few_records_are_fetched_and_little_time_is_taken() -> None:
    fetched: list[int] = []

    class Counted(Augmenting):
        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    data = Counted()
    start = time.process_time()
    refuse_mixing(data, lambda examples: default_collate(examples))
    assert time.process_time() - start < 0.5
    assert len(fetched) <= 8 * 3 + 1 + 8
    assert len(set(fetched)) <= 8


def test_an_example_that_is_a_view_does_not_copy_the_data_set() -> None:
    """Of 4 examples 80 times over, 8 kB; the whole is 40 MB each time."""
    data = TensorDataset(torch.zeros(10_000, 1000))
    with _quiet_profiler(), torch.profiler.profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profile:
        refuse_mixing(data, lambda examples: [x * torch.rand(()) for [x] in examples])
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 1e6
