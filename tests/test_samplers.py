"""Truncated Poisson, fixed-size and shuffled batches: their laws, and what they depend on. Units of several records."""

from __future__ import annotations

import doctest
import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import Dataset, Subset, TensorDataset

from diskdp import Plan
from diskdp.errors import SamplingError
from diskdp.noise import Keystream, Secret
from diskdp.sampling import (
    FixedSizeSampler,
    PoissonSampler,
    PrivateLoader,
    Sampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
    bound_contributions,
    check_contributions,
    sampler_for,
)
from diskdp.sampling.samplers import uniform_order, uniform_subset, words_of

# Seeds are fixed, so that the suite is steady; FALSE_ALARM is the share of seeds with which one test, all its
# comparisons together, would fail on a correct sampler.
FALSE_ALARM = 1e-6

SAMPLERS: dict[str, Any] = {
    "poisson": lambda n, secret: PoissonSampler(n, 0.1, secret),
    "truncated-poisson": lambda n, secret: TruncatedPoissonSampler(n, 0.1, max(1, n // 10), secret),
    "fixed-size": lambda n, secret: FixedSizeSampler(n, max(1, n // 10), secret),
    "shuffled": lambda n, secret: ShuffledSampler(n, max(1, n // 7), secret),
}


def fits(found: Counter[Any], law: dict[Any, float], comparisons: int = 1) -> bool:
    """Chi-square of counts of all possible outcomes."""
    assert found.keys() <= law.keys(), found.keys() - law.keys()
    assert math.isclose(sum(law.values()), 1)
    total = sum(found.values())
    assert min(law.values()) * total > 20
    counts, expected = [found[key] for key in law], [total * p for p in law.values()]
    return stats.chisquare(counts, expected).pvalue > FALSE_ALARM / comparisons


def subsets(size: int, count: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(size), count))


def even(outcomes: list[Any]) -> dict[Any, float]:
    return dict.fromkeys(outcomes, 1 / len(outcomes))


# --- laws, over all outcomes of small cases ---------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "most"), [(0.5, 2), (0.6, 3), (0.3, 1), (1.0, 2)])
def test_truncated_poisson_has_its_law(rate: float, most: int) -> None:
    """Sets below the limit come as in Poisson sampling; those at it share the rest evenly."""
    size = 5
    sampler = TruncatedPoissonSampler(size, rate, most, Secret.from_seed(1))
    found = Counter(tuple(sampler.indices(step).tolist()) for step in range(12_000))
    law: dict[tuple[int, ...], float] = {}
    for count in range(most):
        law |= dict.fromkeys(subsets(size, count), rate**count * (1 - rate) ** (size - count))
    whole = subsets(size, most)
    law |= dict.fromkeys(whole, stats.binom.sf(most - 1, size, rate) / len(whole))
    assert fits(found, {s: p for s, p in law.items() if p > 0}, comparisons=4)


def test_truncation_keeps_everyone_below_the_limit() -> None:
    secret = Secret.from_seed(2)
    plain, cut = PoissonSampler(400, 0.1, secret), TruncatedPoissonSampler(400, 0.1, 42, secret)
    sizes = Counter()
    for step in range(300):
        members, kept = plain.indices(step), cut.indices(step)
        sizes[len(members) > 42] += 1
        assert set(kept) <= set(members)
        assert len(kept) == min(len(members), 42)
        assert (np.diff(kept) > 0).all()
    assert min(sizes[True], sizes[False]) > 50


def test_who_is_truncated_is_independent_of_who_came() -> None:
    """Membership and truncation share no words: given who came, every subset of them is as likely."""
    size, most = 4, 2
    secret = Secret.from_seed(3)
    plain, cut = PoissonSampler(size, 0.75, secret), TruncatedPoissonSampler(size, 0.75, most, secret)
    found: dict[tuple[int, ...], Counter[Any]] = {}
    for step in range(16_000):
        came = tuple(plain.indices(step).tolist())
        if len(came) > most:
            found.setdefault(came, Counter())[tuple(cut.indices(step).tolist())] += 1
    assert len(found) == 5
    for came, counts in found.items():
        assert fits(counts, even(list(itertools.combinations(came, most))), comparisons=5)


@pytest.mark.parametrize(("size", "batch"), [(6, 3), (5, 1), (5, 4), (4, 2)])
def test_fixed_size_takes_every_subset_evenly(size: int, batch: int) -> None:
    sampler = FixedSizeSampler(size, batch, Secret.from_seed(4))
    found = Counter(tuple(sampler.indices(step).tolist()) for step in range(8000))
    assert fits(found, even(subsets(size, batch)), comparisons=4)


def test_fixed_size_batches_of_different_steps_are_independent() -> None:
    sampler = FixedSizeSampler(5, 2, Secret.from_seed(5))
    batches = [tuple(sampler.indices(step).tolist()) for step in range(12_001)]
    for lag in (1, 2):
        found = Counter(zip(batches, batches[lag:]))
        assert fits(found, even(list(itertools.product(subsets(5, 2), repeat=2))), comparisons=2)


def test_fixed_size_members_exclude_one_another() -> None:
    """Two records are together in B(B-1)/N(N-1) of the batches, less than the (B/N)^2 of independent membership."""
    size, batch, steps = 20, 10, 6000
    sampler = FixedSizeSampler(size, batch, Secret.from_seed(6))
    taken = np.zeros((steps, size), bool)
    for step in range(steps):
        taken[step, sampler.indices(step)] = True
    assert (taken.sum(1) == batch).all()
    together = (taken[:, ::2] & taken[:, 1::2]).mean(1)  # of disjoint pairs; steps are independent
    error = together.std(ddof=1) / math.sqrt(steps)
    expected = batch * (batch - 1) / (size * (size - 1))
    assert abs(together.mean() - expected) < 5 * error  # one seed in 1.7 million is beyond
    assert (batch / size) ** 2 - together.mean() > 5 * error
    for count in taken.sum(0):
        assert stats.binomtest(int(count), steps, batch / size).pvalue > FALSE_ALARM / size


def test_fixed_size_in_a_large_data_set() -> None:
    size, batch, steps = 3000, 90, 1500
    sampler = FixedSizeSampler(size, batch, Secret.from_seed(7))
    counts = np.zeros(size, np.int64)
    for step in range(steps):
        members = sampler.indices(step)
        assert len(members) == batch
        assert (np.diff(members) > 0).all()
        counts[members] += 1
    for count in counts:
        assert stats.binomtest(int(count), steps, batch / size).pvalue > FALSE_ALARM / size


def test_shuffled_epochs_are_uniform_orders_cut_up() -> None:
    """5 records in batches of 2, 2 and 1: 30 ways, each as likely, and independent of the epoch before."""
    sampler = ShuffledSampler(5, 2, Secret.from_seed(8))
    epochs = [tuple(tuple(sampler.indices(3 * e + k).tolist()) for k in range(3)) for e in range(9001)]
    ways = [
        (first, second, last)
        for first in subsets(5, 2)
        for second in subsets(5, 2)
        for last in subsets(5, 1)
        if len({*first, *second, *last}) == 5
    ]
    assert len(ways) == 30
    assert fits(Counter(epochs), even(ways), comparisons=2)
    places = [next(k for k, batch in enumerate(epoch) if 0 in batch) for epoch in epochs]
    share = (0.4, 0.4, 0.2)
    law = {(a, b): share[a] * share[b] for a in range(3) for b in range(3)}
    assert fits(Counter(itertools.pairwise(places)), law, comparisons=2)


@pytest.mark.parametrize(("size", "batch"), [(10, 3), (9, 3), (7, 7), (5, 1), (1000, 64)])
def test_each_record_is_in_one_batch_an_epoch(size: int, batch: int) -> None:
    sampler = ShuffledSampler(size, batch, Secret.from_seed(9))
    each = math.ceil(size / batch)
    assert sampler.steps_per_epoch == each
    for epoch in (0, 1, 5, 2):
        parts = [sampler.indices(epoch * each + k) for k in range(each)]
        assert [len(part) for part in parts[:-1]] == [batch] * (each - 1)
        assert all((np.diff(part) > 0).all() for part in parts)
        assert sorted(np.concatenate(parts).tolist()) == list(range(size))


def test_a_shuffle_is_drawn_once_an_epoch() -> None:
    """Sorting anew at each of 2,000 steps would take half a minute."""
    sampler = ShuffledSampler(200_000, 100, Secret.from_seed(10))
    start = time.process_time()
    for step in range(2000):
        sampler.indices(step)
    assert time.process_time() - start < 5


# --- subsets and orders out of words ----------------------------------------------------------------------------------


class Coarse:
    """Words of two bits, among which equal ones are common."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(11)

    def take(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return self.source.integers(0, 4, count, dtype=np.uint64)


def test_equal_words_prefer_nobody() -> None:
    words = Coarse()
    found = Counter(tuple(uniform_subset(words, 5, 2).tolist()) for _ in range(6000))
    assert fits(found, even(subsets(5, 2)), comparisons=2)
    orders = Counter(tuple(uniform_order(words, 3).tolist()) for _ in range(6000))
    assert fits(orders, even(list(itertools.permutations(range(3)))), comparisons=2)


def test_orders_are_uniform() -> None:
    words = words_of(Secret.from_seed(12), "test")
    found = Counter(tuple(uniform_order(words, 4).tolist()) for _ in range(6000))
    assert fits(found, even(list(itertools.permutations(range(4)))))


@pytest.mark.parametrize("size", [1, 2, 1000, 70_001])
def test_the_smallest_words_are_taken(size: int) -> None:
    """Against plain sorting of the words, read from the keystream by themselves."""
    secret = Secret.from_seed(13)
    buffer = bytearray(8 * size + Keystream.SLACK)
    Keystream(secret.derive("words")).fill(memoryview(buffer), 8 * size)
    words = [int.from_bytes(buffer[8 * i : 8 * i + 8], "little") for i in range(size)]
    slow = sorted(range(size), key=words.__getitem__)
    assert uniform_order(words_of(secret, "words"), size).tolist() == slow
    for count in {1, size // 3 or 1, size}:
        assert uniform_subset(words_of(secret, "words"), size, count).tolist() == sorted(slow[:count])


# --- what they depend on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLERS)
def test_secret_and_step_decide(name: str) -> None:
    sampler: Sampler = SAMPLERS[name](500, Secret.from_seed(5))
    first = [sampler.indices(step).tolist() for step in range(20)]
    again: Sampler = SAMPLERS[name](500, Secret.from_seed(5))
    assert [again.indices(step).tolist() for step in reversed(range(20))] == first[::-1]
    assert sampler == again
    other: Sampler = SAMPLERS[name](500, Secret.from_seed(6))
    assert all(other.indices(step).tolist() != first[step] for step in range(20))
    assert len({tuple(members) for members in first}) == 20
    assert sampler.indices(3).dtype == np.int64
    assert max(map(len, first)) <= sampler.largest_batch <= 500


def test_samplers_draw_from_keys_of_their_own() -> None:
    """One secret, several ways of drawing: none is a function of another's draws."""
    secret = Secret.from_seed(14)
    fixed, shuffled = FixedSizeSampler(400, 200, secret), ShuffledSampler(400, 200, secret)
    poisson = PoissonSampler(400, 0.5, secret)
    for one, other in itertools.combinations([fixed.indices(0), shuffled.indices(0), poisson.indices(0)], 2):
        common = len(set(one) & set(other))
        assert 60 < common < 140  # 100 is expected, with a deviation of 5 (fixed) to 8


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, index / 2


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("workers", "microbatch_size"), [(0, None), (0, 7), (2, 1), (2, 7)])
def test_loading_cannot_change_membership(name: str, workers: int, microbatch_size: int | None) -> None:
    sampler = SAMPLERS[name](100, Secret.from_seed(15))
    expected = [sampler.indices(step).tolist() for step in range(2, 9)]
    for data in (Numbers(100), TensorDataset(torch.arange(100), torch.arange(100) / 2)):
        loader = PrivateLoader(
            data,
            sampler,
            plan_token="",
            first_step=2,
            last_step=9,
            microbatch_size=microbatch_size,
            num_workers=workers,
        )
        found = [[int(i) for ids, _ in batch.microbatches() for i in ids] for batch in loader]
        assert found == expected


# --- limits and choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rate"), [(100, 0.1), (60_000, 1 / 30), (50, 0.9), (10, 1e-6), (1_281_167, 0.004)])
def test_the_largest_poisson_batch(size: int, rate: float) -> None:
    most = PoissonSampler(size, rate, Secret.from_seed(0)).largest_batch
    assert stats.binom.sf(most, size, rate) < 1.01e-9
    assert most == 0 or stats.binom.sf(most - 1, size, rate) > 0.99e-9


def test_other_largest_batches() -> None:
    secret = Secret.from_seed(0)
    assert PoissonSampler(50, 1.0, secret).largest_batch == 50
    assert TruncatedPoissonSampler(50, 0.5, 30, secret).largest_batch == 30
    assert TruncatedPoissonSampler(50, 0.5, 80, secret).largest_batch == 50
    assert FixedSizeSampler(50, 20, secret).largest_batch == 20
    assert ShuffledSampler(50, 20, secret).largest_batch == 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: TruncatedPoissonSampler(10, 0.5, 0, s), "max_batch_size is 0"),
        (lambda s: TruncatedPoissonSampler(10, 1.5, 3, s), r"must be in \(0, 1\]"),
        (lambda s: TruncatedPoissonSampler(0, 0.5, 3, s), "dataset_size is 0"),
        (lambda s: FixedSizeSampler(10, 11, s), "batch_size is 11: it must be from 1 to dataset_size, which is 10"),
        (lambda s: FixedSizeSampler(10, 0, s), "batch_size is 0"),
        (lambda s: FixedSizeSampler(-1, 1, s), "dataset_size is -1"),
        (lambda s: ShuffledSampler(10, 11, s), "batch_size is 11"),
        (lambda s: ShuffledSampler(0, 1, s), "dataset_size is 0"),
    ],
)
def test_impossible_samplers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        make(Secret.from_seed(0))


@dataclass(frozen=True)
class Drawn:
    """As much of a plan as decides the sampler."""

    sampling: str
    dataset_size: int = 100
    batch_size: int = 10
    max_batch_size: int | None = None


def test_the_sampler_of_a_plan() -> None:
    secret = Secret.from_seed(0)
    plan = Plan(dataset_size=60, batch_size=7, steps=5, noise_multiplier=2.0, delta=1e-3)
    assert sampler_for(plan, secret) == PoissonSampler(60, plan.sample_rate, secret)
    assert sampler_for(Drawn("fixed-size"), secret) == FixedSizeSampler(100, 10, secret)
    assert sampler_for(Drawn("shuffled"), secret) == ShuffledSampler(100, 10, secret)
    truncated = sampler_for(Drawn("truncated-poisson", max_batch_size=20), secret)
    assert truncated == TruncatedPoissonSampler(100, 0.1, 20, secret)
    with pytest.raises(SamplingError, match="max_batch_size"):
        sampler_for(Drawn("truncated-poisson"), secret)
    with pytest.raises(SamplingError, match=r"'weighted'.*poisson, truncated-poisson, fixed-size or shuffled"):
        sampler_for(Drawn("weighted"), secret)


# --- units ------------------------------------------------------------------------------------------------------------


def test_contributions_are_bounded_and_no_more() -> None:
    source = np.random.default_rng(16)
    units = [f"unit {k}" for k in source.zipf(1.5, 3000) % 400]
    counts = Counter(units)
    assert max(counts.values()) > 100
    for most in (1, 3, 50, 10_000):
        kept = bound_contributions(units, most)
        assert kept.dtype == np.int64
        assert (np.diff(kept) > 0).all()
        assert Counter(units[i] for i in kept) == {unit: min(most, count) for unit, count in counts.items()}
        check_contributions([units[i] for i in kept], most, len(kept))
    assert bound_contributions([], 3).tolist() == []


def test_which_records_stay_is_uniform_in_each_unit_and_independent() -> None:
    """Units of 3 and 4 records, 2 kept of each: 3 x 6 outcomes."""
    units = np.array([1, 0, 1, 2, 1, 0, 0, 1])  # unit 0: 1, 5, 6; unit 1: 0, 2, 4, 7; unit 2: 3
    found: Counter[Any] = Counter()
    for seed in range(4000):
        kept = bound_contributions(units, 2, Secret.from_seed(seed)).tolist()
        assert 3 in kept
        found[tuple(i for i in kept if i != 3)] += 1
    pairs = [itertools.combinations(own, 2) for own in ((1, 5, 6), (0, 2, 4, 7))]
    ways = [tuple(sorted(a + b)) for a, b in itertools.product(*pairs)]
    assert fits(found, even(ways))


def test_contributions_come_from_the_operating_system() -> None:
    units = [0] * 200
    draws = {tuple(bound_contributions(units, 100).tolist()) for _ in range(5)}
    assert len(draws) == 5
    one = bound_contributions(units, 100, Secret.from_seed(3))
    assert one.tolist() == bound_contributions(units, 100, Secret.from_seed(3)).tolist()


def test_names_of_units() -> None:
    names: list[Any] = [("a", 1), "b", None, ("a", 1), 3, 3.0, None]  # 3 == 3.0
    with pytest.raises(SamplingError, match=r"has 2 records.*at most 1 \(3 units have more\)"):
        check_contributions(names, 1)
    check_contributions(names, 2)
    for array in (np.array([1, 2, 1]), torch.tensor([1, 2, 1]), np.array(["x", "y", "x"])):
        assert len(bound_contributions(array, 1)) == 2
        with pytest.raises(SamplingError, match="has 2 records"):
            check_contributions(array, 1)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([1.0, math.nan], "NaN"),
        (np.array([1.0, math.nan]), "NaN"),
        ([[1], [1]], "cannot be told apart"),
        (np.ones((3, 2)), "cannot be told apart"),
        ([torch.tensor(1), torch.tensor(1)], "is a tensor"),
    ],
)
def test_units_without_names_are_refused(units: Any, message: str) -> None:
    for work in (bound_contributions, check_contributions):
        with pytest.raises(SamplingError, match=message):
            work(units, 5)


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(SamplingError, match="leaves none"):
        bound_contributions([1], 0)
    with pytest.raises(SamplingError, match="leaves none"):
        check_contributions([1], 0)


def test_a_loader_checks_units() -> None:
    data, units = TensorDataset(torch.arange(6)), ["a", "b", "a", "c", "a", "b"]
    options: dict[str, Any] = {"plan_token": "", "first_step": 0, "last_step": 1}
    secret = Secret.from_seed(0)
    PrivateLoader(data, PoissonSampler(6, 0.5, secret), units=units, examples_per_unit=3, **options)
    with pytest.raises(SamplingError, match=r"has 3 records.*bound_contributions\(units, 2\).*examples_per_unit=3"):
        PrivateLoader(data, PoissonSampler(6, 0.5, secret), units=units, examples_per_unit=2, **options)
    with pytest.raises(SamplingError, match="names 5 records but there are 6"):
        PrivateLoader(data, PoissonSampler(6, 0.5, secret), units=units[:5], examples_per_unit=3, **options)
    kept = bound_contributions(units, 2)
    bounded = Subset(data, kept.tolist())
    own = [units[i] for i in kept]
    PrivateLoader(bounded, PoissonSampler(5, 0.5, secret), units=own, examples_per_unit=2, **options)


def test_the_page_is_true() -> None:
    page = (Path(__file__).parents[1] / "docs" / "sampling.md").read_text()
    example = doctest.DocTestParser().get_doctest(page.replace("```", ""), {}, "docs/sampling.md", None, 0)
    assert len(example.examples) == 9
    assert doctest.DocTestRunner().run(example).failed == 0
