"""Accounting against published values, brute-force integrals, and dp-accounting as it comes."""

from __future__ import annotations

import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from diskdp import accounting
from diskdp.accounting import pld, renyi, solve
from diskdp.accounting.releases import poisson_divergence
from diskdp.errors import PlanError


def library_epsilon(sigma: float, q: float, steps: int, delta: float, accountant: str) -> float:
    """dp-accounting with its defaults, as an outsider would run it."""
    spent = PLDAccountant() if accountant == "pld" else RdpAccountant()
    spent.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    return float(spent.get_epsilon(delta))


def clear_caches() -> None:
    for cached in (solve.calibrate, solve._epsilon, pld.one_step, renyi.curve, renyi._library_curve):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "expected"),
    [
        (0.7, 0.01, 120, 1e-5, 2.4612381),
        (0.8, 0.001, 100, 1e-6, 0.260339),
        (1.5, 0.05, 100, 1e-6, 1.943736),
        (2.0, 0.2, 100, 1e-6, 5.661788),
        (0.8, 0.05, 1000, 1e-6, 19.515033),
        (1.5, 0.05, 1000, 1e-6, 6.199695),
        (3.0, 0.05, 1000, 1e-6, 2.517457),
        (1.5, 0.001, 20_000, 1e-6, 0.427622),
        (2.0, 0.001, 50_000, 1e-6, 0.482802),
        (0.7, 1.0, 2, 1e-5, 10.1224946),
    ],
)
def test_published_pld_epsilons(sigma: float, q: float, steps: int, delta: float, expected: float) -> None:
    assert accounting.epsilon(sigma, q, steps, delta) == pytest.approx(expected, abs=6e-7)


def test_published_prv_upper_bound_is_not_passed() -> None:
    # The published PRV values bound the truth from above and include about .010 of stated error.
    assert 73.190177 - 0.02 < accounting.epsilon(1.5, 0.05, 50_000, 1e-6) < 73.190177
    assert 6.777395712 - 0.02 < accounting.epsilon(1.5, 0.04, 2249, 1e-5) < 6.777395712


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "expected", "tolerance"),
    [
        (1.5, 0.04, 2250, 7.32911117143, 1e-11),
        (0.7, 1.0, 2, 10.8602036, 1e-8),
        # The published value has dp-accounting's upper bound at a fractional order; see the test below.
        (0.7, 0.01, 120, 3.2392676, 2.5e-5),
    ],
)
def test_published_rdp_epsilons(sigma: float, q: float, steps: int, expected: float, tolerance: float) -> None:
    assert accounting.epsilon(sigma, q, steps, 1e-5, "rdp") == pytest.approx(expected, rel=tolerance)


def test_published_renyi_divergences() -> None:
    values = 50 * accounting.rdp(2.5, 0.01, [5, 50, 100])
    assert values == pytest.approx([2.18075656e-3, 2.38460375e-2, 167.416308], rel=5e-9)


@pytest.mark.parametrize(("sigma", "q", "order"), [(2.5, 0.01, 1.5), (2.5, 0.01, 2.5), (0.5, 0.3, 3.7), (20, 0.5, 1.1)])
def test_fractional_orders_against_quadrature_and_below_dp_accounting(sigma: float, q: float, order: float) -> None:
    def integrand(z: float) -> float:
        ratio = 1 - q + q * math.exp((2 * z - 1) / (2 * sigma**2))
        return stats.norm.pdf(z, scale=sigma) * (math.expm1(order * math.log(ratio)))

    ends = (-12 * sigma, order + 12 * sigma)
    moment = integrate.quad(integrand, *ends, points=[0, order], epsabs=0, epsrel=1e-9, limit=500)[0]
    value = accounting.rdp(sigma, q, [order])[0]
    assert value == pytest.approx(math.log1p(moment) / (order - 1), rel=1e-7)
    library = RdpAccountant(orders=[order])
    library.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)))
    assert value < library.rdp[0]


def test_published_deltas() -> None:
    assert accounting.delta(math.sqrt(3), 1.0, 3, 1.0) == pytest.approx(0.126936, abs=1e-6)
    assert accounting.delta(0.5, 0.2, 3, 1.0) == pytest.approx(0.15594, abs=1e-5)


@pytest.mark.parametrize(
    ("budget", "q", "steps", "accountant", "published", "tolerance"),
    [
        (1.0, 0.01, 1, "pld", 0.67379294682, 1e-3),
        # Published searches stopped within .01 of epsilon; PRV includes its error term.
        (8.0, 0.04, 2250, "rdp", 1.416, 2e-3),
        (8.0, 0.04, 2000, "rdp", 1.3562, 2e-3),
        (8.0, 0.04, 2250, "pld", 1.34766, 3e-3),
        (8.0, 0.04, 2000, "pld", 1.2915, 3e-3),
    ],
)
def test_published_noise_multipliers(
    budget: float, q: float, steps: int, accountant: str, published: float, tolerance: float
) -> None:
    assert accounting.calibrate(budget, q, steps, 1e-5, accountant) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.2), (0.7, 0.01), (1.0, 0.5), (5.0, 0.9), (2.0, 1.0)])
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_one_step_against_brute_force(sigma: float, q: float, epsilon: float) -> None:
    x = np.linspace(-14 * sigma, 1 + 14 * sigma, 2_000_001)
    without = stats.norm.pdf(x, scale=sigma)
    with_record = (1 - q) * without + q * stats.norm.pdf(x, loc=1, scale=sigma)
    brute = max(
        integrate.trapezoid(np.maximum(p - math.exp(epsilon) * r, 0), x)
        for p, r in ((with_record, without), (without, with_record))
    )
    value = accounting.delta(sigma, q, 1, epsilon)
    assert brute * (1 - 1e-8) < value < brute * (1 + 1e-5) + 2e-15


def test_two_steps_against_brute_force() -> None:
    sigma, q, epsilon = 0.8, 0.3, 0.7
    x = np.linspace(-9 * sigma, 1 + 9 * sigma, 4001)
    without = stats.norm.pdf(x, scale=sigma)
    with_record = (1 - q) * without + q * stats.norm.pdf(x, loc=1, scale=sigma)
    excess = np.maximum(np.outer(with_record, with_record) - math.exp(epsilon) * np.outer(without, without), 0)
    brute = excess.sum() * (x[1] - x[0]) ** 2
    assert accounting.delta(sigma, q, 2, epsilon) == pytest.approx(brute, rel=1e-5)


@pytest.mark.parametrize(("sigma", "q"), [(0.3, 0.0005), (1.0, 0.01), (2.0, 0.999), (300.0, 0.4)])
@pytest.mark.parametrize("direction", [AdjacencyType.REMOVE, AdjacencyType.ADD])
def test_hockey_stick_is_that_of_dp_accounting(sigma: float, q: float, direction: AdjacencyType) -> None:
    loss = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=direction)
    bounds = loss.connect_dots_bounds()
    epsilons = np.linspace(bounds.epsilon_lower, bounds.epsilon_upper, 501)
    values = poisson_divergence(epsilons, sigma, q, remove=direction is AdjacencyType.REMOVE)
    np.testing.assert_allclose(values, loss.get_delta_for_epsilon(epsilons), rtol=1e-9, atol=2e-15)


@pytest.mark.parametrize(
    ("sigma", "q", "steps"), [(0.6, 0.002, 3000), (1.2, 0.05, 400), (0.4, 0.1, 1), (900.0, 0.5, 10_000)]
)
def test_epsilon_is_that_of_dp_accounting(sigma: float, q: float, steps: int) -> None:
    expected = library_epsilon(sigma, q, steps, 1e-6, "pld")
    assert accounting.epsilon(sigma, q, steps, 1e-6) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.03, 0.05), (0.5, 1.0), (3.0, 8.0)])
def test_full_batch_is_the_analytic_gaussian(mu: float, epsilon: float) -> None:
    below, above = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
    delta = below - math.exp(epsilon) * above
    for steps in (1, 10_000):
        sigma = math.sqrt(steps) / mu
        assert accounting.delta(sigma, 1.0, steps, epsilon) == pytest.approx(delta, rel=1e-9)
        assert accounting.epsilon(sigma, 1.0, steps, delta) == pytest.approx(epsilon, rel=1e-9)
        calibrated = accounting.calibrate(epsilon, 1.0, steps, delta)
        assert sigma < calibrated < sigma * 1.001
        library = PLDAccountant()
        library.compose(dp_accounting.GaussianDpEvent(calibrated), steps)
        assert library.get_epsilon(delta) <= epsilon


CALIBRATIONS = [
    (0.1, 0.0005, 10_000, 1e-5),
    (10.0, 0.0005, 10_000, 1e-5),
    (1.0, 0.01, 400, 1e-6),
    (3.0, 0.03, 10_000, 1e-7),
    (0.3, 0.3, 10_000, 1e-5),
    (8.0, 0.9, 50, 1e-5),
    (1.0, 0.01, 1, 1e-5),
]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("budget", "q", "steps", "delta"), CALIBRATIONS)
def test_calibrated_noise_is_enough_and_no_more(
    budget: float, q: float, steps: int, delta: float, accountant: str
) -> None:
    sigma = accounting.calibrate(budget, q, steps, delta, accountant)
    assert accounting.epsilon(sigma, q, steps, delta, accountant) <= budget
    assert library_epsilon(sigma, q, steps, delta, accountant) <= budget
    assert library_epsilon(sigma * 0.999, q, steps, delta, accountant) > budget


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("budget", "q"), [(10.0, 0.0005), (0.3, 0.0005), (3.0, 0.03), (10.0, 0.5)])
def test_calibration_over_ten_thousand_steps_takes_less_than_a_second_and_a_half(
    budget: float, q: float, accountant: str
) -> None:
    seconds = []
    for _ in range(2):
        clear_caches()
        start = time.process_time()
        accounting.calibrate(budget, q, 10_000, 1e-5, accountant)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.5


@given(
    sigma=st.floats(0.8, 5.0),
    q=st.floats(0.001, 0.9),
    steps=st.integers(1, 200),
    log_delta=st.floats(-16.0, -5.0),
    accountant=st.sampled_from(["pld", "rdp"]),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_more_noise_less_data_fewer_steps_spend_less(
    sigma: float, q: float, steps: int, log_delta: float, accountant: str
) -> None:
    delta = math.exp(log_delta)
    spent = accounting.epsilon(sigma, q, steps, delta, accountant)
    assert accounting.epsilon(sigma * 1.05, q, steps, delta, accountant) <= spent
    assert accounting.epsilon(sigma, q * 0.95, steps, delta, accountant) <= spent
    assert spent <= accounting.epsilon(sigma, q, steps + 5, delta, accountant)
    assert spent <= accounting.epsilon(sigma, q, steps, delta / 2, accountant)
    if spent > 0:
        assert accounting.delta(sigma, q, steps, spent, accountant) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_edges(accountant: str) -> None:
    assert accounting.epsilon(1.0, 0.1, 0, 1e-5, accountant) == 0
    assert accounting.epsilon(0.0, 0.1, 0, 1e-5, accountant) == 0
    assert accounting.epsilon(0.0, 0.1, 1, 1e-5, accountant) == math.inf
    assert accounting.delta(0.0, 0.1, 1, 1.0, accountant) == 1
    assert accounting.delta(1.0, 0.1, 0, 1.0, accountant) == 0
    assert accounting.calibrate(math.inf, 0.1, 10, 1e-5, accountant) == 0


def test_hopeless_noise_is_bounded_within_bounded_memory() -> None:
    huge = accounting.epsilon(0.2, 0.5, 1000, 1e-5)
    assert 1000 < huge < accounting.epsilon(0.2, 0.5, 1000, 1e-5, "rdp")
    assert accounting.epsilon(0.01, 0.5, 10**6, 1e-5) == math.inf


def test_nothing_is_logged_by_the_way(caplog: pytest.LogCaptureFixture) -> None:
    assert accounting.calibrate(2.5, 0.5, 300, 1e-5, "rdp") > 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("setting", "value", "choices"),
    [
        ("sampling", "balls-in-bins", "poisson, truncated-poisson, fixed-size, shuffled"),
        ("noise", "correlated", "gaussian, secure, discrete"),
        ("accountant", "gdp", "pld, rdp"),
    ],
)
def test_what_is_not_built_is_refused_by_name(setting: str, value: str, choices: str) -> None:
    combination = {
        "clipping": "flat",
        "sampling": "poisson",
        "adjacency": "add-remove",
        "accountant": "pld",
        "noise": "gaussian",
    }
    accounting.require_built(**combination)
    with pytest.raises(PlanError, match=f"{setting}='{value}' is not built yet[^;]*; choose one of: {choices}"):
        accounting.require_built(**{**combination, setting: value})
    with pytest.raises(PlanError, match=f"{setting}='roulette' is unknown; choose one of: {choices}"):
        accounting.require_built(**{**combination, setting: "roulette"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 0.1, 1, 1e-5), "noise_multiplier"),
        ((math.nan, 0.1, 1, 1e-5), "noise_multiplier"),
        ((1.0, 0.0, 1, 1e-5), "sample_rate"),
        ((1.0, 1.1, 1, 1e-5), "sample_rate"),
        ((1.0, 0.1, -1, 1e-5), "steps"),
        ((1.0, 0.1, 1, 0.0), "delta must"),
        ((1.0, 0.1, 1, math.nan), "delta must"),
        ((1.0, 0.1, 10_000, 1e-11), "below what the PLD accountant resolves"),
        ((1.0, 0.1, 1, 1e-5, "moments"), "accountant='moments' is unknown"),
    ],
)
def test_bad_input(arguments: tuple[float, float, int, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        accounting.epsilon(*arguments)


def test_budgets_that_make_no_sense() -> None:
    with pytest.raises(PlanError, match="epsilon must be positive"):
        accounting.calibrate(0.0, 0.1, 10, 1e-5)
    with pytest.raises(PlanError, match="batches in the clear"):
        accounting.calibrate(1.0, 1e-4, 10, 1e-3)
    with pytest.raises(PlanError, match="finds no noise multiplier"):
        accounting.calibrate(0.01, 0.03, 1, 1e-9, "rdp")
    with pytest.raises(PlanError, match="orders"):
        accounting.rdp(1.0, 0.1, [1.0])
