"""The search over runs: against dp-accounting's own event, its distributions, and what it refuses."""

from __future__ import annotations

import math
import random
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from diskdp.errors import PlanError
from diskdp.plan import Plan
from diskdp.search import Search

PLAN = Plan(dataset_size=60_000, batch_size=600, steps=1000, noise_multiplier=1.2, delta=1e-6, accountant="rdp")
DISTRIBUTIONS = [
    ("poisson", None, math.inf),
    ("geometric", None, 1.0),
    ("logarithmic", None, 0.0),
    ("negative-binomial", 0.5, 0.5),
    ("negative-binomial", 3.0, 3.0),
]
EACH = pytest.mark.parametrize(("distribution", "shape", "library_shape"), DISTRIBUTIONS)


@EACH
@pytest.mark.parametrize("trials", [1.0, 2.5, 10.0, 300.0])
@pytest.mark.parametrize("score_noise", [None, 8.0])
def test_divergences_are_those_of_dp_accounting(
    distribution: str, shape: float | None, library_shape: float, trials: float, score_noise: float | None
) -> None:
    run: list[dp_accounting.DpEvent] = []
    if score_noise is not None:
        run.append(dp_accounting.GaussianDpEvent(score_noise))
    settings = (trials, distribution, shape, "free" if score_noise is None else "noised", score_noise)

    def library(step: dp_accounting.DpEvent, steps: int) -> RdpAccountant:
        whole = dp_accounting.ComposedDpEvent([*run, dp_accounting.SelfComposedDpEvent(step, steps)])
        accountant = RdpAccountant()
        accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(whole, trials, library_shape))
        return accountant

    whole_batch = Plan(dataset_size=60_000, batch_size=60_000, steps=50, noise_multiplier=9.0, delta=1e-6)
    expected = library(dp_accounting.GaussianDpEvent(9.0), 50)
    search = Search(whole_batch, *settings)
    np.testing.assert_allclose(search.divergences, expected.rdp, rtol=1e-7)
    assert search.epsilon == pytest.approx(expected.get_epsilon(1e-6), rel=1e-7)
    # For Poisson batches the library has upper bounds between integer orders.
    expected = library(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.2)), 1000)
    search = Search(PLAN, *settings)
    assert np.all(search.divergences <= np.asarray(expected.rdp) * (1 + 1e-7))
    assert expected.get_epsilon(1e-6) * 0.99 < search.epsilon <= expected.get_epsilon(1e-6) * (1 + 1e-7)


def test_a_run_alone_costs_what_it_does() -> None:
    """One run for certain is still charged as a search, but little more than twice."""
    once = Search(PLAN, 1, "geometric", score="free").epsilon
    assert PLAN.epsilon < once < 2 * PLAN.epsilon


def test_poisson_costs_least_for_few_trials_and_logarithmic_for_many() -> None:
    few, many = (
        [Search(PLAN, trials, name, shape, "free").epsilon for name, shape, _ in DISTRIBUTIONS] for trials in (2, 100)
    )
    assert few.index(min(few)) == 0
    assert many.index(min(many)) == 2


@EACH
def test_more_trials_more_noise_on_the_score_and_less_on_the_run(
    distribution: str, shape: float | None, library_shape: float
) -> None:
    spent = [Search(PLAN, trials, distribution, shape, "free").epsilon for trials in (1, 1.5, 2, 5, 20, 100, 1000)]
    assert spent == sorted(spent)
    assert spent[0] > PLAN.epsilon
    noised = [Search(PLAN, 5, distribution, shape, "noised", noise).epsilon for noise in (1.0, 5.0, 50.0)]
    assert noised == sorted(noised, reverse=True)
    assert noised[-1] > spent[3]
    louder = Plan(dataset_size=60_000, batch_size=600, steps=1000, noise_multiplier=2.0, delta=1e-6)
    assert Search(louder, 5, distribution, shape, "free").epsilon < spent[3]


def chances(distribution: str, shape: float, trials: float, counts: np.ndarray) -> np.ndarray:
    if distribution == "poisson":
        return stats.poisson.pmf(counts, trials)
    if distribution == "geometric":
        return stats.geom.pmf(counts, 1 / trials)
    # Found anew: the stopping probability whose distribution, summed up, has this mean.
    k = np.arange(1, 200_000)
    low, high = 1e-6, 1 - 1e-9
    for _ in range(80):
        gamma = (low + high) / 2
        if distribution == "logarithmic":
            mass = stats.logser.pmf(k, 1 - gamma)
        else:
            mass = stats.nbinom.pmf(k, shape, gamma) / (1 - gamma**shape)
        low, high = (gamma, high) if mass @ k > trials else (low, gamma)
    return mass[counts - 1]


@EACH
@pytest.mark.parametrize("trials", [1.3, 12.0])
def test_trials_are_drawn_as_said(distribution: str, shape: float | None, library_shape: float, trials: float) -> None:
    """Chi-square and mean over 40,000 seeded draws; false alarms 1e-6 each, were the seed not fixed."""
    search = Search(PLAN, trials, distribution, shape, "free")
    source = random.Random(20)
    drawn = np.array([search.draw_trials(source) for _ in range(40_000)])
    first = 0 if distribution == "poisson" else 1
    assert drawn.min() >= first
    counts = np.arange(first, 200)
    expected = chances(distribution, library_shape, trials, counts) * len(drawn)
    kept = expected > 20
    observed = np.array([(drawn == count).sum() for count in counts[kept]])
    rest = len(drawn) - observed.sum(), max(len(drawn) - expected[kept].sum(), 1e-9)
    pairs = [*zip(observed, expected[kept]), *([rest] if rest[1] > 5 else [])]
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    assert stats.chi2.sf(statistic, len(pairs) - 1) > 1e-6
    assert abs(drawn.mean() - trials) < 4.9 * drawn.std() / math.sqrt(len(drawn))


def test_trials_come_from_the_system_and_large_means_are_summed() -> None:
    search = Search(PLAN, 2000, score="free")
    drawn = [search.draw_trials() for _ in range(50)]
    assert len(set(drawn)) > 5  # 50 draws of deviation 45 within five values: below 1e-40
    assert abs(np.mean(drawn) - 2000) < 4.9 * math.sqrt(2000 / 50)  # false alarms below 1e-6
    assert Search(PLAN, 1, "geometric", score="free").draw_trials() == 1


@EACH
def test_a_whole_search_is_calibrated(distribution: str, shape: float | None, library_shape: float) -> None:
    search = Search.calibrate(PLAN, 3.0, trials=20, distribution=distribution, shape=shape, score="free")
    assert 2.99 < search.epsilon <= 3.0
    assert search.plan.epsilon < 3.0
    assert (
        search.plan.noise_multiplier
        > Plan(
            dataset_size=60_000, batch_size=600, steps=1000, epsilon=3.0, delta=1e-6, accountant="rdp"
        ).noise_multiplier
    )
    assert (search.plan.steps, search.plan.batch_size, search.trials) == (1000, 600, 20)


@pytest.mark.parametrize(
    "settings",
    [
        {"adjacency": "replace-one"},
        {"adjacency": "replace-one", "sampling": "fixed-size"},
        {"adjacency": "zero-out", "sampling": "shuffled", "examples_per_unit": 2},
    ],
)
def test_every_cell_with_divergences_can_be_searched(settings: dict[str, Any]) -> None:
    plan = Plan(dataset_size=10_000, batch_size=100, steps=500, noise_multiplier=3.0, delta=1e-5, **settings)
    search = Search.calibrate(plan, 2.0, trials=5, score="noised", score_noise_multiplier=10.0)
    assert 1.98 < search.epsilon <= 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": None}, "say what ranks the runs"),
        ({"score": "accuracy"}, "score='accuracy' is unknown"),
        ({"score_noise_multiplier": 1.0}, "no meaning for score='free'"),
        ({"score": "noised"}, "needs a positive score_noise_multiplier"),
        ({"score": "noised", "score_noise_multiplier": -1.0}, "needs a positive score_noise_multiplier"),
        ({"trials": 0.5}, "1 or more"),
        ({"trials": math.inf}, "1 or more"),
        ({"trials": math.nan}, "1 or more"),
        ({"distribution": "uniform"}, "distribution='uniform' is unknown"),
        ({"distribution": "negative-binomial"}, "needs a finite shape above 0"),
        ({"shape": 2.0}, "no meaning for distribution='poisson'"),
    ],
)
def test_what_is_not_said_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Search(**{"plan": PLAN, "trials": 5, "score": "free", **settings})


@pytest.mark.filterwarnings("ignore::diskdp.errors.NotPrivateWarning")
def test_runs_without_divergences_or_guarantee_are_refused() -> None:
    base: dict[str, Any] = {"dataset_size": 1000, "batch_size": 10, "steps": 10, "delta": 1e-5}
    truncated = Plan(**base, noise_multiplier=2.0, sampling="truncated-poisson", max_batch_size=60)
    people = Plan(**base, noise_multiplier=2.0, examples_per_unit=2)
    paper = Plan(**base, noise_multiplier=2.0, sampling="fixed-size", paper_accounting=True)
    nothing = Plan(**base, noise_multiplier=0.0)
    for plan, message in (
        (truncated, "no Renyi accounting"),
        (people, "no Renyi accounting"),
        (paper, "without a guarantee"),
        (nothing, "without a guarantee"),
    ):
        with pytest.raises(PlanError, match=message):
            Search(plan, 5, score="free")
    with pytest.raises(PlanError, match="no noise keeps this search"):
        Search.calibrate(PLAN, 0.5, trials=5, score="noised", score_noise_multiplier=0.5)
    with pytest.raises(PlanError, match="epsilon must be positive and finite"):
        Search.calibrate(PLAN, math.inf, trials=5, score="free")
