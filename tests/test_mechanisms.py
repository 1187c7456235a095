"""Each cell of the table sampler x adjacency against the mechanism's own definition, enumerated, and dp-accounting."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from diskdp.accounting import Mechanism, composed_epsilon, renyi
from diskdp.accounting.releases import FixedSize, Group, PoissonReplaced, Truncated
from diskdp.errors import PlanError

Sums = dict[float, float]
"""The un-noised sum's distribution: value -> probability."""


def poisson_sums(records: Sequence[float], rate: float, cap: int | None = None) -> Sums:
    """Every subset with its probability; of one larger than the cap, every subset of the cap's size."""
    sums: Sums = defaultdict(float)
    for size in range(len(records) + 1):
        chance = rate**size * (1 - rate) ** (len(records) - size)
        for chosen in itertools.combinations(records, size):
            kept = list(itertools.combinations(chosen, cap)) if cap is not None and size > cap else [chosen]
            for part in kept:
                sums[round(sum(part), 9)] += chance / len(kept)
    return dict(sums)


def fixed_size_sums(records: Sequence[float], size: int) -> Sums:
    subsets = list(itertools.combinations(records, size))
    sums: Sums = defaultdict(float)
    for chosen in subsets:
        sums[round(sum(chosen), 9)] += 1 / len(subsets)
    return dict(sums)


def density(sums: Sums, sigma: float, x: np.ndarray) -> np.ndarray:
    return np.sum([p * stats.norm.pdf(x, loc=value, scale=sigma) for value, p in sums.items()], axis=0)


def brute_delta(one: Sums, other: Sums, sigma: float, epsilon: float, steps: int = 1) -> float:
    """The hockey-stick divergence in both orders, by integration on a grid of `steps` dimensions."""
    values = [*one, *other]
    points = 200_001 if steps == 1 else 2401
    x = np.linspace(min(values) - 9 * sigma, max(values) + 9 * sigma, points)
    p, q = density(one, sigma, x), density(other, sigma, x)
    if steps == 2:
        p, q = np.outer(p, p), np.outer(q, q)
    cell = (x[1] - x[0]) ** steps
    return float(max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p))))


OTHERS = (
    [0.0, 0.0, 0.0, 0.0],
    [-1.0, -1.0, -1.0, -1.0],
    [1.0, 1.0, -1.0, -1.0],
    [0.0, 0.5, -0.3, 1.0],
    [1.0, 1.0, 1.0, 1.0],
)
RECORDS = {
    "zero-out": [(1.0, 0.0), (-1.0, 0.0)],
    "replace-one": [(1.0, -1.0), (1.0, 0.0), (0.6, -0.9)],
    "add-remove": [(1.0, None), (-1.0, None)],
}


def neighbours(adjacency: str) -> list[tuple[list[float], list[float]]]:
    return [
        ([*others, one], others if other is None else [*others, other])
        for others in OTHERS
        for one, other in RECORDS[adjacency]
    ]


Sampler = Callable[[Sequence[float]], Sums]
CELLS: list[tuple[str, Mechanism, Sampler, bool]] = [
    # name, mechanism over 5 records, its definition, whether some neighbours reach the bound in one step
    *(
        (f"poisson/{adjacency}", Mechanism("poisson", adjacency, 5, 2), lambda x: poisson_sums(x, 0.4), True)
        for adjacency in RECORDS
    ),
    *(
        (
            f"truncated/{adjacency}",
            Mechanism("truncated-poisson", adjacency, 5, 2, max_batch_size=2),
            lambda x: poisson_sums(x, 0.4, cap=2),
            False,
        )
        for adjacency in RECORDS
    ),
    *(
        (
            f"untruncated/{adjacency}",
            Mechanism("truncated-poisson", adjacency, 5, 2, max_batch_size=6),
            lambda x: poisson_sums(x, 0.4),
            True,
        )
        for adjacency in RECORDS
    ),
    ("fixed-size", Mechanism("fixed-size", "replace-one", 5, 2), lambda x: fixed_size_sums(x, 2), True),
    ("fixed-size/one", Mechanism("fixed-size", "replace-one", 5, 1), lambda x: fixed_size_sums(x, 1), True),
    *(
        (f"full/{adjacency}", Mechanism("poisson", adjacency, 5, 5), lambda x: fixed_size_sums(x, len(x)), True)
        for adjacency in RECORDS
    ),
    ("full/fixed-size", Mechanism("fixed-size", "replace-one", 5, 5), lambda x: fixed_size_sums(x, 5), True),
]
BY_NAME = pytest.mark.parametrize(("mechanism", "sums", "attained"), [pytest.param(*c[1:], id=c[0]) for c in CELLS])


@BY_NAME
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.7, 0.1), (1.5, 0.5), (0.7, 2.0), (4.0, 0.02)])
def test_one_step_is_bounded_and_where_claimed_attained(
    mechanism: Mechanism, sums: Sampler, attained: bool, sigma: float, epsilon: float
) -> None:
    brute = max(brute_delta(sums(a), sums(b), sigma, epsilon) for a, b in neighbours(mechanism.adjacency))
    value = mechanism.delta(sigma, 1, epsilon)
    assert value >= brute * (1 - 1e-7)
    if attained:
        assert value <= brute * (1 + 1e-4) + 1e-12


@BY_NAME
def test_two_steps_are_bounded(mechanism: Mechanism, sums: Sampler, attained: bool) -> None:
    sigma, epsilon = 1.2, 0.8
    pairs = neighbours(mechanism.adjacency)[:: len(RECORDS[mechanism.adjacency])]
    brute = max(brute_delta(sums(a), sums(b), sigma, epsilon, steps=2) for a, b in pairs)
    value = mechanism.delta(sigma, 2, epsilon)
    assert value >= brute * (1 - 1e-5)  # the kink on the grid is worth 4e-6
    if attained and mechanism.sampling != "fixed-size":  # its one curve serves both orders, and composes to more
        assert value <= brute * (1 + 1e-4)
    elif attained:
        assert value <= 1.5 * brute


@BY_NAME
def test_sensitivity_in_the_plane_is_no_worse_than_on_the_line(
    mechanism: Mechanism, sums: Sampler, attained: bool
) -> None:
    """Contributions are vectors: three directions for the record, its replacement and the others."""
    sigma, epsilon = 0.9, 0.3
    axis = np.linspace(-12, 12, 801)
    x, y = np.meshgrid(axis, axis)
    worst = 0.0
    for angles in [(0.0, math.pi, 2.0), (0.0, 2.2, math.pi), (0.0, 1.3, 2.6)]:
        one, other, rest = (complex(math.cos(angle), math.sin(angle)) for angle in angles)
        records = [one, rest, rest, rest, rest]
        changed = {"zero-out": [0j, *records[1:]], "replace-one": [other, *records[1:]], "add-remove": records[1:]}
        density_of = []
        for side in (records, changed[mechanism.adjacency]):
            total = np.zeros_like(x)
            for value, chance in complex_sums(mechanism, side).items():
                squares = (x - value.real) ** 2 + (y - value.imag) ** 2
                total += chance * np.exp(-squares / (2 * sigma**2)) / (2 * math.pi * sigma**2)
            density_of.append(total)
        p, q = density_of
        cell = (axis[1] - axis[0]) ** 2
        worst = max(worst, *(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p))))
    assert mechanism.delta(sigma, 1, epsilon) >= worst * (1 - 1e-4)  # the kink on the grid is worth 6e-5


def complex_sums(mechanism: Mechanism, records: Sequence[complex]) -> dict[complex, float]:
    sums: dict[complex, float] = defaultdict(float)
    size = len(records)
    if mechanism.sampling == "fixed-size" or mechanism.sample_rate == 1:
        kept = mechanism.batch_size if mechanism.sampling == "fixed-size" else size
        for chosen in itertools.combinations(range(size), kept):
            sums[sum(records[i] for i in chosen)] += 1 / math.comb(size, kept)
        return sums
    rate, cap = mechanism.sample_rate, mechanism.max_batch_size or size
    for count in range(size + 1):
        chance = rate**count * (1 - rate) ** (size - count)
        for chosen in itertools.combinations(range(size), count):
            parts = list(itertools.combinations(chosen, min(cap, count)))
            for part in parts:
                sums[sum((records[i] for i in part), 0j)] += chance / len(parts)
    return sums


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_a_shuffled_epoch_is_bounded(adjacency: str) -> None:
    """Four records in two batches: both batches' noisy sums, over all permutations."""
    sigma, epsilon = 1.0, 0.4
    mechanism = Mechanism("shuffled", adjacency, 4, 2)
    axis = np.linspace(-10, 10, 1001)
    for others in ([-1.0, -1.0, -1.0], [1.0, -1.0, 0.0]):
        changed = 0.0 if adjacency == "zero-out" else -1.0
        p, q = (
            np.mean(
                [
                    np.outer(stats.norm.pdf(axis, a + b, sigma), stats.norm.pdf(axis, c + d, sigma))
                    for a, b, c, d in itertools.permutations([record, *others])
                ],
                axis=0,
            )
            for record in (1.0, changed)
        )
        cell = (axis[1] - axis[0]) ** 2
        brute = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p)))
        # One epoch is two steps; the first step alone already counts as the epoch.
        assert brute * (1 - 1e-6) <= mechanism.delta(sigma, 2, epsilon) == mechanism.delta(sigma, 1, epsilon)
    assert mechanism.delta(sigma, 3, epsilon) > mechanism.delta(sigma, 2, epsilon)


def test_shuffled_epochs_are_gaussians() -> None:
    whole = Mechanism("poisson", "add-remove", 10, 10)
    for adjacency, factor in (("zero-out", 1), ("replace-one", 2)):
        mechanism = Mechanism("shuffled", adjacency, 10, 3)  # 4 batches an epoch, the last of one record
        assert mechanism.steps_per_epoch == 4
        for steps, epochs in ((1, 1), (4, 1), (5, 2), (12, 3)):
            expected = whole.epsilon(2.0 / factor, epochs, 1e-4)
            assert mechanism.epsilon(2.0, steps, 1e-4) == pytest.approx(expected, rel=1e-12)
        assert mechanism.calibrate(1.0, 12, 1e-4) == pytest.approx(factor * whole.calibrate(1.0, 3, 1e-4), rel=1e-9)


def test_full_batch_replaced_is_the_gaussian_of_twice_the_shift() -> None:
    for sampling in ("poisson", "fixed-size"):
        mechanism = Mechanism(sampling, "replace-one", 10, 10)
        exact = special.ndtr(0.5 - 1.0) - math.e * special.ndtr(-0.5 - 1.0)  # mu = 1 at epsilon = 1
        assert mechanism.delta(2.0, 1, 1.0) == pytest.approx(exact, rel=1e-12)
        assert mechanism.epsilon(2.0, 1, exact) == pytest.approx(1.0, rel=1e-9)
        renyi_one = Mechanism(sampling, "replace-one", 10, 10, accountant="rdp").epsilon(2.0, 1, exact)
        assert renyi_one == Mechanism("poisson", "add-remove", 10, 10, accountant="rdp").epsilon(1.0, 1, exact)
        assert renyi_one > 1.0


# ---- dp-accounting


def library(event: dp_accounting.DpEvent, steps: int, relation: NeighboringRelation, accountant: str = "pld") -> float:
    spent = (PLDAccountant if accountant == "pld" else RdpAccountant)(neighboring_relation=relation)
    spent.compose(event, steps)
    return float(spent.get_epsilon(1e-6))


@pytest.mark.parametrize(("sigma", "batch_size", "steps"), [(0.6, 2, 300), (1.2, 50, 400), (5.0, 300, 100)])
def test_poisson_cells_are_those_of_dp_accounting(sigma: float, batch_size: int, steps: int) -> None:
    event = dp_accounting.PoissonSampledDpEvent(batch_size / 1000, dp_accounting.GaussianDpEvent(sigma))
    for adjacency, relation in (
        ("add-remove", NeighboringRelation.ADD_OR_REMOVE_ONE),
        ("zero-out", NeighboringRelation.REPLACE_SPECIAL),
        ("replace-one", NeighboringRelation.REPLACE_ONE),  # it doubles the shift itself
    ):
        value = Mechanism("poisson", adjacency, 1000, batch_size).epsilon(sigma, steps, 1e-6)
        assert value == pytest.approx(library(event, steps, relation), rel=2e-6)
    with pytest.raises(Exception, match="REPLACE"):
        library(event, steps, NeighboringRelation.REPLACE_ONE, "rdp")


@pytest.mark.parametrize(
    ("cap", "adjacency", "relation"),
    [
        (20, "zero-out", NeighboringRelation.REPLACE_SPECIAL),
        (80, "zero-out", NeighboringRelation.REPLACE_SPECIAL),
        (35, "replace-one", NeighboringRelation.REPLACE_ONE),
    ],
)
def test_truncated_cells_are_those_of_dp_accounting(cap: int, adjacency: str, relation: NeighboringRelation) -> None:
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.02, cap, 2.1)
    value = Mechanism("truncated-poisson", adjacency, 1000, 20, cap).epsilon(2.1, 100, 1e-6)
    assert value == pytest.approx(library(event, 100, relation), rel=2e-6)


def test_truncated_and_one_record_more_or_less() -> None:
    """dp-accounting leaves out the neighbour with a record more, among which truncation is likelier."""
    spent = Mechanism("truncated-poisson", "add-remove", 1000, 20, 35).epsilon(2.1, 100, 1e-6)
    below, above = (
        library(
            dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(size, 0.02, 35, 2.1),
            100,
            NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        for size in (1000, 1001)
    )
    assert below < above * (1 - 1e-5)
    assert above * (1 - 2e-6) < spent < above * (1 + 1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_groups_are_those_of_dp_accounting(size: int) -> None:
    chances = stats.binom.pmf(range(size + 1), size, 0.02)
    event = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(4.0, range(size + 1), chances)
    expected = library(event, 200, NeighboringRelation.ADD_OR_REMOVE_ONE)
    for adjacency in ("add-remove", "zero-out"):
        value = Mechanism("poisson", adjacency, 1000, 20, examples_per_unit=size).epsilon(4.0, 200, 1e-6)
        assert value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("sigma", "batch_size"), [(1.0, 10), (3.0, 200), (20.0, 500), (0.5, 1)])
def test_fixed_size_divergences_are_those_of_dp_accounting_at_half_the_noise(sigma: float, batch_size: int) -> None:
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000,
        batch_size,
        dp_accounting.GaussianDpEvent(sigma / 2),  # it takes the sensitivity as it is
    )
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(event)
    values = renyi.curve(FixedSize(batch_size / 1000), sigma)
    exact = renyi.ORDERS <= 20  # beyond, at large sigma and rate, the library's differences are rounding alone
    np.testing.assert_allclose(values[exact], accountant.rdp[exact], rtol=1e-7)
    steps = [(FixedSize(batch_size / 1000), sigma, 3)]
    assert np.all(renyi.divergences(steps, library=True) >= 3 * np.asarray(accountant.rdp))


# ---- Group privacy, against the definition


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 0.2), (1.0, 1.5), (3.0, 0.05)])
def test_a_unit_of_several_records_against_brute_force(size: int, sigma: float, epsilon: float) -> None:
    others = [1.0, -1.0, 0.5]
    one, other = poisson_sums([*others, *[1.0] * size], 0.3), poisson_sums([*others, *[0.0] * size], 0.3)
    value = Mechanism("poisson", "zero-out", 10, 3, examples_per_unit=size).delta(sigma, 1, epsilon)
    assert value >= brute_delta(one, other, sigma, epsilon) * (1 - 1e-7)
    alone = brute_delta(poisson_sums([1.0] * size, 0.3), {0.0: 1.0}, sigma, epsilon)
    assert alone * (1 - 1e-7) <= value <= alone * (1 + 1e-4) + 1e-12


def test_units_of_one_record_and_units_in_every_batch() -> None:
    plain = Mechanism("poisson", "add-remove", 1000, 10)
    assert renyi.curve(plain.release, 1.0) is not None
    one = Group(0.01, 1)
    assert one.log_second_moment(1.3) == pytest.approx(plain.release.log_second_moment(1.3), rel=1e-9)
    whole = Mechanism("poisson", "add-remove", 10, 10, examples_per_unit=3)
    assert whole.epsilon(3.0, 5, 1e-4) == Mechanism("poisson", "add-remove", 10, 10).epsilon(1.0, 5, 1e-4)
    replaced = Mechanism("shuffled", "replace-one", 10, 5, examples_per_unit=3)
    assert replaced.epsilon(6.0, 10, 1e-4) == pytest.approx(
        Mechanism("poisson", "add-remove", 10, 10).epsilon(1.0, 5, 1e-4), rel=1e-12
    )
    spent = [
        Mechanism("poisson", "zero-out", 1000, 10, examples_per_unit=k).epsilon(2.0, 100, 1e-5) for k in range(1, 9)
    ]
    assert spent == sorted(spent)
    assert spent[0] == pytest.approx(plain.epsilon(2.0, 100, 1e-5), rel=1e-12)
    assert len(set(spent)) == len(spent)


def test_a_unit_of_many_records_drops_no_chance() -> None:
    """Counts that are left out are counted as lost: the curve stays above one with all counts."""
    group = Group(0.3, 60)
    remove, add = group.curves(4.0)
    counts = np.arange(61)
    chances = stats.binom.pmf(counts, 60, 0.3)
    x = np.linspace(-60, 120, 400_001)
    with_unit = sum(chance * stats.norm.pdf(x, count, 4.0) for count, chance in zip(counts, chances))
    without = stats.norm.pdf(x, 0.0, 4.0)
    step = x[1] - x[0]
    for order, curve, p, q in ((0, remove, with_unit, without), (1, add, without, with_unit)):
        epsilons = np.linspace(max(curve.lowest, -5.0), curve.highest, 40)
        brute = np.array([np.maximum(p - math.exp(e) * q, 0).sum() * step for e in epsilons])
        # Riemann's sum is right to some 1e-9 at the kink.
        np.testing.assert_array_less(brute * (1 - 1e-8), curve.divergence(epsilons) + 1e-12, err_msg=str(order))
        np.testing.assert_allclose(curve.divergence(epsilons), brute, rtol=1e-5, atol=1e-12)


# ---- Renyi divergences of the new cells


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.6), (0.9, 3.0)])
def test_replaced_divergences_against_the_definition(q: float, sigma: float) -> None:
    x = np.linspace(-30 * sigma - 30, 30 * sigma + 60, 2_000_001)
    p = (1 - q) * stats.norm.pdf(x, 0, sigma) + q * stats.norm.pdf(x, 1, sigma)
    r = (1 - q) * stats.norm.pdf(x, 0, sigma) + q * stats.norm.pdf(x, -1, sigma)
    inside = (p > 0) & (r > 0)
    for order in (1.5, 2.0, 7.3, 12.0):
        ratio = np.log(p[inside]) - np.log(r[inside])
        moment_less_one = (np.exp(order * ratio + np.log(r[inside])) - r[inside]).sum() * (x[1] - x[0])
        value = renyi.at_orders(PoissonReplaced(q), sigma, [order])[0]
        assert value == pytest.approx(math.log1p(moment_less_one) / (order - 1), rel=1e-7, abs=1e-11)


@pytest.mark.parametrize(
    ("mechanism", "sigma", "steps"),
    [
        (Mechanism("poisson", "replace-one", 1000, 10), 0.8, 500),
        (Mechanism("poisson", "replace-one", 1000, 300), 4.0, 30),
        (Mechanism("fixed-size", "replace-one", 1000, 10), 1.5, 500),
        (Mechanism("fixed-size", "replace-one", 1000, 300), 9.0, 30),
        (Mechanism("fixed-size", "replace-one", 1000, 1), 1.0, 1),
    ],
)
def test_renyi_is_never_below_the_loss_distribution(mechanism: Mechanism, sigma: float, steps: int) -> None:
    by_renyi = Mechanism(**{**vars(mechanism), "accountant": "rdp"})
    assert mechanism.epsilon(sigma, steps, 1e-5) < by_renyi.epsilon(sigma, steps, 1e-5)


# ---- Releases of one sample, and runs together


def test_two_releases_of_one_sample_are_one_event_at_less_noise() -> None:
    """Against a quadrature in two dimensions: the record is in both noisy sums or in neither."""
    q, sigma, epsilon = 0.3, 1.4, 0.6
    mechanism = Mechanism("poisson", "add-remove", 10, 3)
    x = np.linspace(-9 * sigma, 1 + 9 * sigma, 2001)
    out, within = stats.norm.pdf(x, 0, sigma), stats.norm.pdf(x, 1, sigma)
    p, r = (1 - q) * np.outer(out, out) + q * np.outer(within, within), np.outer(out, out)
    cell = (x[1] - x[0]) ** 2
    brute = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, r), (r, p)))
    assert mechanism.epsilon_of(sigma, {2: 1}, brute) == pytest.approx(epsilon, rel=1e-4)
    assert mechanism.epsilon_of(sigma, {1: 2}, brute) < epsilon
    replaced = Mechanism("poisson", "replace-one", 10, 3)
    other = stats.norm.pdf(x, -1, sigma)
    r = (1 - q) * np.outer(out, out) + q * np.outer(other, other)
    x_wide = np.linspace(-1 - 9 * sigma, 1 + 9 * sigma, 2001)
    out, within, other = (stats.norm.pdf(x_wide, mean, sigma) for mean in (0, 1, -1))
    p = (1 - q) * np.outer(out, out) + q * np.outer(within, within)
    r = (1 - q) * np.outer(out, out) + q * np.outer(other, other)
    brute = np.maximum(p - math.exp(epsilon) * r, 0).sum() * (x_wide[1] - x_wide[0]) ** 2
    assert replaced.epsilon_of(sigma, {2: 1}, brute) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("name", ["poisson", "replaced", "fixed-size", "full", "shuffled"])
def test_releases_add_up(name: str, accountant: str) -> None:
    mechanism = {
        "poisson": Mechanism("poisson", "add-remove", 1000, 20, accountant=accountant),
        "replaced": Mechanism("poisson", "replace-one", 1000, 20, accountant=accountant),
        "fixed-size": Mechanism("fixed-size", "replace-one", 1000, 20, accountant=accountant),
        "full": Mechanism("poisson", "add-remove", 20, 20, accountant=accountant),
        "shuffled": Mechanism("shuffled", "zero-out", 1000, 20, accountant=accountant),
    }[name]
    spent = lambda releases: mechanism.epsilon_of(3.0, releases, 1e-5)  # noqa: E731
    assert spent({}) == spent({1: 0}) == 0
    assert spent({1: 60}) == spent({1: 60, 3: 0}) == mechanism.epsilon(3.0, 60, 1e-5)
    assert spent({1: 60}) < spent({1: 59, 2: 1}) < spent({1: 58, 2: 2}) < spent({1: 59, 5: 1}) < spent({5: 60})
    assert spent({5: 60}) == pytest.approx(mechanism.epsilon(3.0 / math.sqrt(5), 60, 1e-5), rel=1e-9)
    if name == "full":
        assert spent({1: 3, 2: 4}) == pytest.approx(mechanism.epsilon(3.0, 11, 1e-5), rel=1e-12)
    if name == "shuffled":  # 50 batches an epoch: two epochs at worst meet the two batches that were repeated
        gaussian = Mechanism("poisson", "add-remove", 20, 20, accountant=accountant)
        assert spent({1: 58, 4: 2}) == pytest.approx(gaussian.epsilon(3.0, 8, 1e-5), rel=1e-9)
        assert spent({1: 58, 4: 9}) == pytest.approx(gaussian.epsilon(3.0, 8, 1e-5), rel=1e-9)
    with pytest.raises(PlanError, match="releases must map"):
        spent({0: 3})


def test_heterogeneous_releases_against_two_dimensions() -> None:
    """One sample released once, another twice: a quadrature over the two sufficient statistics."""
    q, sigma, epsilon = 0.4, 1.5, 0.5
    mechanism = Mechanism("poisson", "zero-out", 10, 4)
    x = np.linspace(-13, 14, 3001)

    def pair(noise: float) -> tuple[np.ndarray, np.ndarray]:
        out = stats.norm.pdf(x, 0, noise)
        return (1 - q) * out + q * stats.norm.pdf(x, 1, noise), out

    (p1, r1), (p2, r2) = pair(sigma), pair(sigma / math.sqrt(2))
    p, r = np.outer(p1, p2), np.outer(r1, r2)
    cell = (x[1] - x[0]) ** 2
    brute = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, r), (r, p)))
    assert mechanism.epsilon_of(sigma, {1: 1, 2: 1}, brute) == pytest.approx(epsilon, rel=1e-4)


def test_runs_on_one_dataset_together() -> None:
    base = Mechanism("poisson", "add-remove", 1000, 20)
    zeroed = Mechanism("poisson", "zero-out", 1000, 50)
    whole = Mechanism("poisson", "add-remove", 1000, 1000)
    both = composed_epsilon([(base, 1.5, {1: 40}), (zeroed, 2.5, {1: 10})], 1e-5)
    assert max(base.epsilon(1.5, 40, 1e-5), zeroed.epsilon(2.5, 10, 1e-5)) < both
    assert both < base.epsilon(1.5, 40, 5e-6) + zeroed.epsilon(2.5, 10, 5e-6)
    halves = composed_epsilon([(base, 1.5, {1: 20}), (base, 1.5, {1: 20})], 1e-5)
    assert halves == base.epsilon(1.5, 40, 1e-5)
    library = PLDAccountant()
    for event, count in (
        (dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5)), 40),
        (dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.5)), 10),
        (dp_accounting.GaussianDpEvent(9.0), 3),
    ):
        library.compose(event, count)
    three = composed_epsilon([(base, 1.5, {1: 40}), (zeroed, 2.5, {1: 10}), (whole, 9.0, {1: 3})], 1e-5)
    assert three == pytest.approx(library.get_epsilon(1e-5), rel=1e-5)
    assert composed_epsilon([], 1e-5) == 0
    assert composed_epsilon([(whole, 2.0, {1: 3}), (whole, 4.0, {1: 4})], 1e-5) == pytest.approx(
        whole.epsilon(2.0, 4, 1e-5), rel=1e-12
    )
    by_renyi = Mechanism("poisson", "add-remove", 1000, 20, accountant="rdp")
    assert composed_epsilon([(by_renyi, 1.5, {1: 40}), (by_renyi, 1.5, {1: 5})], 1e-5) == pytest.approx(
        by_renyi.epsilon(1.5, 45, 1e-5), rel=1e-9
    )
    for other, what in (
        (by_renyi, "accountants"),
        (Mechanism("poisson", "replace-one", 1000, 20), "adjacencies"),
        (Mechanism("poisson", "add-remove", 1000, 20, examples_per_unit=2), "examples_per_unit"),
    ):
        with pytest.raises(PlanError, match=f"differ in {what}"):
            composed_epsilon([(base, 1.5, {1: 40}), (other, 1.5, {1: 40})], 1e-5)
    paper = Mechanism("fixed-size", "add-remove", 1000, 20, paper_accounting=True)
    with pytest.raises(PlanError, match="paper_accounting"):
        composed_epsilon([(base, 1.5, {1: 40}), (paper, 1.5, {1: 40})], 1e-5)


# ---- All cells: monotone, calibrated, solved


def cells(batch_size: int, accountant: str, size: int = 1) -> list[Mechanism]:
    """Every cell of the table at this batch size of 1000."""
    found = []
    for sampling, adjacency in itertools.product(
        ("poisson", "truncated-poisson", "fixed-size", "shuffled"), ("add-remove", "zero-out", "replace-one")
    ):
        cap = batch_size + 15 if sampling == "truncated-poisson" else None
        try:
            found.append(Mechanism(sampling, adjacency, 1000, batch_size, cap, size, accountant))
        except PlanError:
            continue
    return found


def test_the_table_has_the_cells_that_the_page_lists() -> None:
    names = lambda accountant, size: {(m.sampling, m.adjacency) for m in cells(20, accountant, size)}  # noqa: E731
    poisson = {("poisson", "add-remove"), ("poisson", "zero-out")}
    shuffled = {("shuffled", "zero-out"), ("shuffled", "replace-one")}
    rdp = {*poisson, ("poisson", "replace-one"), ("fixed-size", "replace-one"), *shuffled}
    assert names("rdp", 1) == rdp
    assert names("pld", 1) == rdp | {("truncated-poisson", a) for a in ("add-remove", "zero-out", "replace-one")}
    assert names("pld", 3) == poisson | shuffled
    assert names("rdp", 3) == shuffled


@given(
    batch_size=st.integers(2, 900),
    sigma=st.floats(1.0, 6.0),
    steps=st.integers(1, 120),
    log_delta=st.floats(-16.0, -6.0),
    accountant=st.sampled_from(["pld", "rdp"]),
    size=st.sampled_from([1, 1, 3]),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_every_cell_is_monotone(
    batch_size: int, sigma: float, steps: int, log_delta: float, accountant: str, size: int
) -> None:
    delta = math.exp(log_delta)
    for mechanism, larger in zip(cells(batch_size, accountant, size), cells(batch_size + 5, accountant, size)):
        spent = mechanism.epsilon(sigma, steps, delta)
        slack = 1 + 1e-9
        assert mechanism.epsilon(sigma * 1.05, steps, delta) <= spent * slack
        assert spent <= mechanism.epsilon(sigma, steps + 7, delta) * slack
        assert spent <= mechanism.epsilon(sigma, steps, delta / 2) * slack
        if mechanism.sampling != "truncated-poisson" and mechanism.sampling != "shuffled":
            assert spent <= larger.epsilon(sigma, steps, delta) * slack
        if mechanism.sampling == "truncated-poisson":
            roomier = Mechanism(**{**vars(mechanism), "max_batch_size": batch_size + 40})
            assert roomier.epsilon(sigma, steps, delta) <= spent * slack
        if 0 < spent < math.inf:
            assert mechanism.delta(sigma, steps, spent) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_every_cell_is_calibrated(accountant: str) -> None:
    for mechanism in [*cells(30, accountant), *cells(30, accountant, 3), *cells(1000, accountant, 2)]:
        sigma = mechanism.calibrate(1.5, 70, 1e-5)
        assert mechanism.epsilon(sigma, 70, 1e-5) <= 1.5
        # dp-accounting's looser fractional orders have the last word for Poisson batches under "rdp".
        assert mechanism.epsilon(0.997 * sigma, 70, 1e-5) > 1.5
        steps = mechanism.largest_steps(sigma, 1.5, 1e-5, 10**6)
        assert steps is not None
        assert steps >= 70
        assert mechanism.epsilon(sigma, steps, 1e-5) <= 1.5
        if accountant == "pld":
            assert mechanism.epsilon(sigma, steps + 1, 1e-5) > 1.5 * (1 - 1e-4)


def test_truncation_costs_and_a_roomy_cap_does_not() -> None:
    usual = Mechanism("poisson", "zero-out", 10_000, 100).epsilon(1.0, 100, 1e-5)
    spent = {
        cap: Mechanism("truncated-poisson", "zero-out", 10_000, 100, cap).epsilon(1.0, 100, 1e-5)
        for cap in (100, 115, 130, 150, 170)
    }
    assert list(spent.values()) == sorted(spent.values(), reverse=True)
    assert usual == pytest.approx(0.72, abs=0.005)
    assert spent[130] == pytest.approx(2.09, abs=0.005)
    assert spent[170] == pytest.approx(usual, rel=1e-4)
    full, inside = Truncated(0.01, 130, (9_999,), False).full_batch(9_999)
    assert full == pytest.approx(stats.binom.sf(129, 9_999, 0.01))
    assert 0.009 < inside < 0.01


def test_the_chance_of_a_truncated_batch_against_its_definition() -> None:
    """The record's chance given that the others fill the batch: q cap / (k + 1), averaged over k others sampled."""
    rate, cap, others = 0.3, 4, 11
    full, inside = Truncated(rate, cap, (others,), False).full_batch(others)
    k = np.arange(cap, others + 1)
    chances = stats.binom.pmf(k, others, rate)
    assert full == pytest.approx(chances.sum())
    assert inside == pytest.approx((chances * rate * cap / (k + 1)).sum() / chances.sum())


def test_a_cap_of_all_records_still_displaces_one_more() -> None:
    """Full batches cut to N records: with one more record, one of the others is left out in its place."""
    capped = Mechanism("truncated-poisson", "add-remove", dataset_size=100, batch_size=100, max_batch_size=100)
    replaced = Mechanism("poisson", "replace-one", dataset_size=100, batch_size=100)
    assert capped.epsilon(2.0, 3, 1e-5) == replaced.epsilon(2.0, 3, 1e-5)
    roomy = Mechanism("truncated-poisson", "add-remove", dataset_size=100, batch_size=100, max_batch_size=101)
    assert roomy.epsilon(2.0, 3, 1e-5) == replaced.epsilon(4.0, 3, 1e-5)
