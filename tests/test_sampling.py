"""Membership of batches: the law, what it depends on, and the loader on top of it."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from diskdp.errors import SamplingError
from diskdp.noise import Keystream, Secret
from diskdp.sampling import LogicalBatch, PoissonSampler, PrivateLoader

# Statistical tests draw from a fresh secret of the operating system; FALSE_ALARM is the chance that one test,
# all its comparisons together, fails on a correct sampler.
FALSE_ALARM = 1e-6


class Numbers(Dataset):
    """A map-style data set that is not a TensorDataset: record i is (i, i / 2)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        assert type(index) is int
        self.fetched.append(index)
        return index, index / 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def make_loader(dataset, *, rate=0.1, secret=None, steps=(0, 10), **options) -> PrivateLoader:
    sampler = PoissonSampler(len(dataset), rate, secret or Secret.from_seed(0))
    return PrivateLoader(dataset, sampler, plan_token="plan", first_step=steps[0], last_step=steps[1], **options)


def membership(loader: PrivateLoader) -> list[list[int]]:
    """The records of each batch, as they arrive through the default collate function."""
    return [[int(i) for ids, _ in batch.microbatches() for i in ids] for batch in loader]


# --- the law ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 0.03, 1 / 3, 1 - 2**-10])
def test_each_record_is_taken_at_the_rate(rate):
    """Exact binomial tests: the total, each record over the steps, each step over the records."""
    records, steps = 200, 400
    sampler = PoissonSampler(records, rate, Secret.from_os())
    taken = np.zeros((steps, records), bool)
    for step in range(steps):
        taken[step, sampler.indices(step)] = True
    comparisons = 1 + records + steps
    counts = [(int(taken.sum()), taken.size)]
    counts += [(int(k), steps) for k in taken.sum(0)] + [(int(k), records) for k in taken.sum(1)]
    for k, n in counts:
        assert stats.binomtest(k, n, rate).pvalue > FALSE_ALARM / comparisons


def test_batch_sizes_are_binomial():
    """The sizes' variance tells independent membership from fixed-size or block-wise draws."""
    records, rate, steps = 5000, 0.02, 4000
    sampler = PoissonSampler(records, rate, Secret.from_os())
    sizes = np.array([len(sampler.indices(step)) for step in range(steps)])
    variance = records * rate * (1 - rate)
    score = (sizes.var(ddof=1) / variance - 1) / math.sqrt(2 / steps)
    assert abs(score) < 6
    edges = stats.binom.ppf(np.linspace(0, 1, 17)[1:-1], records, rate)
    expected = steps * np.diff([0, *stats.binom.cdf(edges, records, rate), 1])
    found = np.bincount(np.searchsorted(edges, sizes), minlength=16)
    assert stats.chisquare(found, expected).pvalue > FALSE_ALARM / 2


def test_records_and_steps_are_independent():
    """Of pairs (two records in one step; one record in two steps), a share rate² must be taken together."""
    records, rate, steps = 2000, 0.3, 200
    sampler = PoissonSampler(records, rate, Secret.from_os())
    taken = np.zeros((steps, records), bool)
    for step in range(steps):
        taken[step, sampler.indices(step)] = True
    pairs = [taken[:, ::2] & taken[:, 1::2], taken[:, : records // 2] & taken[:, records // 2 :]]
    pairs += [taken[::2] & taken[1::2], taken[: steps // 2] & taken[steps // 2 :]]
    for both in pairs:  # disjoint pairs, so the counts are binomial
        assert stats.binomtest(int(both.sum()), both.size, rate**2).pvalue > FALSE_ALARM / len(pairs)


def test_sampler_reads_one_word_a_record():
    """Against a record at a time: word / 2**64 < rate, over a size of several blocks."""
    secret, records, rate = Secret.from_os(), 150_001, 0.25
    buffer = bytearray(8 * records + Keystream.SLACK)
    Keystream(secret.derive("sampling", 9)).fill(memoryview(buffer), 8 * records)
    words = (int.from_bytes(buffer[8 * i : 8 * i + 8], "little") for i in range(records))
    slow = [i for i, word in enumerate(words) if word < rate * 2**64]
    fast = PoissonSampler(records, rate, secret).indices(9)
    assert fast.dtype == np.int64
    assert fast.tolist() == slow


def test_extreme_rates():
    everyone = PoissonSampler(100, 1.0, Secret.from_os()).indices(3)
    assert everyone.tolist() == list(range(100))
    assert everyone.dtype == np.int64
    nearly = PoissonSampler(100, math.nextafter(1, 0), Secret.from_os())
    assert all(len(nearly.indices(step)) == 100 for step in range(100))  # fails once in 10**12 runs
    hardly = PoissonSampler(100, 5e-324, Secret.from_os()).indices(0)
    assert (len(hardly), hardly.dtype) == (0, np.int64)


@pytest.mark.parametrize(("size", "rate"), [(0, 0.5), (-3, 0.5), (10, 0.0), (10, -0.1), (10, 1.01), (10, math.nan)])
def test_impossible_samplers_are_refused(size, rate):
    with pytest.raises(SamplingError, match=r"dataset_size is|must be in \(0, 1\]"):
        PoissonSampler(size, rate, Secret.from_seed(0))


# --- what it depends on ----------------------------------------------------------------------------------


def test_secret_and_step_decide_and_nothing_else():
    first = [PoissonSampler(500, 0.1, Secret.from_seed(5)).indices(step).tolist() for step in range(4)]
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    sampler = PoissonSampler(500, 0.1, Secret.from_seed(5))
    assert [sampler.indices(step).tolist() for step in reversed(range(4))] == first[::-1]
    assert PoissonSampler(500, 0.1, Secret.from_seed(6)).indices(0).tolist() != first[0]
    assert first[0] != first[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("microbatch_size", [None, 1, 7, 1000])
def test_loading_cannot_change_membership(workers, microbatch_size):
    data, secret = Numbers(300), Secret.from_seed(3)
    expected = [PoissonSampler(300, 0.05, secret).indices(step).tolist() for step in range(4)]
    options = {"secret": secret, "rate": 0.05, "steps": (0, 4), "microbatch_size": microbatch_size}
    torch.manual_seed(workers)
    assert membership(make_loader(data, num_workers=workers, **options)) == expected
    tensors = TensorDataset(torch.arange(300), torch.arange(300) / 2)
    assert membership(make_loader(tensors, num_workers=workers, **options)) == expected


def test_a_range_of_steps_is_that_part_of_the_whole():
    data = Numbers(200)
    whole = membership(make_loader(data, steps=(0, 9)))
    assert membership(make_loader(data, steps=(4, 9))) == whole[4:]
    loader = make_loader(data, steps=(4, 9))
    assert len(loader) == 5
    assert [batch.step for batch in loader] == [4, 5, 6, 7, 8]
    assert membership(make_loader(data, steps=(3, 3))) == []


def test_iterating_again_gives_the_same_batches():
    loader = make_loader(Numbers(100))
    assert membership(loader) == membership(loader)


# --- the loader ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Numbers(400), TensorDataset(torch.arange(400), torch.arange(400.0))])
def test_chunks_have_the_size_asked_for_and_keep_the_order(dataset):
    for batch in make_loader(dataset, microbatch_size=8):
        parts = [ids for ids, _ in batch.microbatches()]
        sizes = [len(part) for part in parts]
        assert sum(sizes) == batch.size
        assert all(size == 8 for size in sizes[:-1])
        assert 1 <= sizes[-1] <= 8
        ids = torch.cat(parts)
        assert (ids[1:] > ids[:-1]).all()


def test_without_a_microbatch_size_a_batch_comes_whole():
    for batch in make_loader(Numbers(100), rate=1.0, steps=(0, 3)):
        [(ids, values)] = batch.microbatches()
        assert (batch.size, ids.tolist(), values.tolist()) == (
            100,
            list(range(100)),
            [i / 2 for i in range(100)],
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_count_and_never_reach_collate(workers):
    def collate(examples):
        assert examples
        return torch.utils.data.default_collate(examples)

    loader = make_loader(Numbers(50), rate=0.02, steps=(0, 60), collate_fn=collate, num_workers=workers)
    sizes = []
    for batch in loader:
        parts = list(batch.microbatches())
        assert len(parts) == (batch.size > 0)
        sizes.append(batch.size)
    assert len(sizes) == 60
    assert 0 in sizes
    assert max(sizes) > 1


def test_only_empty_batches():
    batches = list(make_loader(TensorDataset(torch.ones(5)), rate=1e-18, steps=(0, 4)))
    assert [batch.size for batch in batches] == [0] * 4


def test_custom_collate_of_dictionaries():
    class Texts(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"ids": torch.arange(index % 5 + 1), "label": index}

    def collate(examples):
        ids = torch.nn.utils.rnn.pad_sequence([e["ids"] for e in examples], batch_first=True)
        return {"ids": ids, "label": torch.tensor([e["label"] for e in examples])}

    for workers in (0, 2):
        loader = make_loader(
            Texts(), rate=0.5, steps=(0, 3), collate_fn=collate, microbatch_size=6, num_workers=workers
        )
        for step, batch in enumerate(loader):
            parts = list(batch.microbatches())
            labels = [int(label) for part in parts for label in part["label"]]
            assert labels == PoissonSampler(40, 0.5, Secret.from_seed(0)).indices(step).tolist()
            assert all(len(part["ids"]) == len(part["label"]) for part in parts)


def test_tensor_dataset_path_equals_the_data_loader():
    tensors = [torch.randn(60, 3, 2), torch.arange(60), torch.rand(60) > 0.5, torch.randn(60, 1).bfloat16()]
    data = TensorDataset(*tensors)
    sampler = PoissonSampler(60, 0.4, Secret.from_os())
    loader = PrivateLoader(data, sampler, plan_token="", first_step=0, last_step=5, microbatch_size=9)
    indices = (sampler.indices(step).tolist() for step in range(5))
    chunks = [chunk[i : i + 9] for chunk in indices for i in range(0, len(chunk), 9)]
    found = itertools.chain.from_iterable(batch.microbatches() for batch in loader)
    for ours, theirs in itertools.zip_longest(found, DataLoader(data, batch_sampler=chunks)):
        assert type(ours) is type(theirs)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_a_collate_function_is_used_for_tensor_datasets_too():
    data = TensorDataset(torch.arange(30))
    for batch in make_loader(data, rate=0.5, collate_fn=len):
        assert sum(batch.microbatches()) == batch.size


def test_examples_are_fetched_as_they_are_asked_for():
    data = Numbers(100)
    batch = next(iter(make_loader(data, rate=1.0, microbatch_size=10)))
    parts = batch.microbatches()
    assert data.fetched == []
    next(parts)
    assert data.fetched == list(range(10))


def test_what_a_batch_carries():
    data = Numbers(100)
    one, other = make_loader(data), make_loader(data)
    batch = next(iter(one))
    assert isinstance(batch, LogicalBatch)
    assert batch.plan_token == one.plan_token == "plan"
    assert batch.loader_id == one.loader_id != other.loader_id
    assert next(iter(other)).loader_id == other.loader_id


def test_a_batch_is_used_once():
    batch = next(iter(make_loader(Numbers(100))))
    assert not batch.consumed
    parts = batch.microbatches()
    assert batch.consumed
    assert len(list(parts)) == 1
    with pytest.raises(SamplingError, match="batch of step 0 has been used already"):
        batch.microbatches()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_moving_on_drops_the_rest_of_a_batch(workers, taken):
    secret = Secret.from_seed(4)
    loader = make_loader(Numbers(100), rate=0.3, secret=secret, steps=(0, 4), microbatch_size=5, num_workers=workers)
    for step, batch in enumerate(loader):
        expected = PoissonSampler(100, 0.3, secret).indices(step).tolist()
        parts = batch.microbatches() if taken else iter(())
        first = [int(i) for ids, _ in itertools.islice(parts, taken) for i in ids]
        assert first == expected[: 5 * taken]


def test_a_batch_is_closed_when_the_loader_moves_on():
    batches = iter(make_loader(Numbers(100), rate=0.5, microbatch_size=5))
    untouched = next(batches)
    begun = next(batches)
    parts = begun.microbatches()
    next(parts)
    next(batches)
    assert untouched.consumed
    with pytest.raises(SamplingError, match="step 0 has been used already"):
        untouched.microbatches()
    with pytest.raises(SamplingError, match="moved past step 1"):
        next(parts)


def test_errors_of_a_data_set_reach_the_user():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        membership(make_loader(Broken(10), rate=1.0))


# --- data sets that do not fit ---------------------------------------------------------------------------


def test_another_length_is_refused():
    sampler = PoissonSampler(100, 0.1, Secret.from_seed(0))
    with pytest.raises(SamplingError, match=r"N = 100 records.*has 99.*dataset_size=99"):
        PrivateLoader(Numbers(99), sampler, plan_token="", first_step=0, last_step=1)


@pytest.mark.parametrize("dataset", [Stream(), iter([1, 2]), {1, 2}, (i for i in range(3))])
def test_streams_are_refused(dataset):
    sampler = PoissonSampler(10, 0.1, Secret.from_seed(0))
    with pytest.raises(SamplingError, match="cannot be sampled: batches are drawn by index"):
        PrivateLoader(dataset, sampler, plan_token="", first_step=0, last_step=1)


@pytest.mark.parametrize("size", [0, -1])
def test_impossible_microbatches_are_refused(size):
    with pytest.raises(SamplingError, match="microbatch_size is"):
        make_loader(Numbers(10), microbatch_size=size)


def test_a_list_is_a_data_set():
    loader = make_loader([(i, 0.0) for i in range(20)], rate=1.0, steps=(0, 1))
    assert membership(loader) == [list(range(20))]
