"""One test a slip: docs/errata.md names them. Numbers are exact fractions where they can be."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from diskdp import DiSK, LowPass
from diskdp.theory import (
    Problem,
    choose,
    contraction,
    convergence_bound,
    dp_sgd_bound,
    moments,
    privacy_utility,
    required_clip,
)
from diskdp.theory.constants import spread

VARIANCES = [(1.0, 0.1, 0.05), (1.0, 0.4, 0.2), (2.0, 0.3, 0.0), (1.0, 0.0, 0.5)]


def gain_step(variance: float, observation: float, hessian: float, process: float) -> tuple[float, float]:
    """(p_t, k_t) from p_{t-1}, as the paper prints them."""
    gain = (variance + process + hessian) / (variance + process + observation)
    return (observation - hessian) * gain, gain


@pytest.mark.parametrize(("observation", "hessian", "process"), VARIANCES)
def test_rate_of_the_gain(observation: float, hessian: float, process: float) -> None:
    variance, gains = observation, []
    for _ in range(400):
        variance, gain = gain_step(variance, observation, hessian, process)
        gains.append(gain)
    distances = [abs(gain - gains[-1]) for gain in gains]
    late = max(t for t in range(50) if distances[t + 1] > 1e-9)
    measured = distances[late + 1] / distances[late]
    root = math.sqrt((process + hessian) * (4 * observation + process - 3 * hessian))
    middle = 2 * observation + process - hessian
    printed = 2 * observation + process + 3 * hessian
    assert measured == pytest.approx((middle - root) / (middle + root), rel=1e-3)
    if hessian:
        assert measured < 0.95 * (printed - root) / (printed + root)
    assert variance == pytest.approx((root - process - hessian) / 2)


def test_nag_is_over_extended() -> None:
    """γ = (1-κ)/κ, SGD: m = -d obeys m_t = (1-κ)m_{t-1} + ηκ∇F(x_t - ((1-κ)/κ)m_{t-1}), exactly, in fractions."""

    def gradient(x: Fraction) -> Fraction:
        return x**3 / 3 - x / 2

    kappa, rate = Fraction(2, 5), Fraction(1, 10)
    x = Fraction(3, 2)
    average, moved = Fraction(0), Fraction(0)  # zero start, as in NAG
    over, x_over = Fraction(0), x
    nag, x_nag = Fraction(0), x
    for _ in range(4):
        average = (1 - kappa) * average + kappa * gradient(x + (1 - kappa) / kappa * moved)
        moved = -rate * average
        x += moved
        over = (1 - kappa) * over + rate * kappa * gradient(x_over - (1 - kappa) / kappa * over)
        x_over -= over
        assert (x, -moved) == (x_over, over)
        # Sutskever's: look-ahead by μm with μ = 1-κ, and step ε = ηκ
        nag = (1 - kappa) * nag + rate * kappa * gradient(x_nag - (1 - kappa) * nag)
        x_nag -= nag
    assert x != x_nag
    # nor with the paper's own choice η = κ, μ = 1-κ: g̃_t = μg̃_{t-1} + κ∇F(x_t - μg̃_{t-1}) is not m_t = ηg̃_t
    average, moved, x, nag, x_nag = Fraction(0), Fraction(0), Fraction(3, 2), Fraction(0), Fraction(3, 2)
    for _ in range(2):
        average = (1 - kappa) * average + kappa * gradient(x + (1 - kappa) / kappa * moved)
        moved = -kappa * average
        x += moved
        nag = (1 - kappa) * nag + kappa * gradient(x_nag - (1 - kappa) * nag)
        x_nag -= nag
    assert x != x_nag


def test_storm_is_exact() -> None:
    def gradient(x: Fraction, example: int) -> Fraction:
        return x**3 / 3 - example * x

    kappa, rate = Fraction(3, 10), Fraction(1, 7)
    x = before = Fraction(1)
    here = 1 + (1 - kappa) / kappa
    average = storm = gradient(x, 1)
    for t, example in enumerate((1, 3, 2, 5)):
        if t:
            combined = here * gradient(x, example) + (1 - here) * gradient(x - (x - before), example)
            average = (1 - kappa) * average + kappa * combined
            storm = gradient(x, example) + (1 - kappa) * (storm - gradient(before, example))
        assert average == storm
        before, x = x, x - rate * average
    assert DiSK(kappa=0.3, gamma=-1.0).coefficients == pytest.approx((float(here), 1 - float(here)))


def test_mean_of_the_filtered_gradient_holds_at_minus_one_only() -> None:
    """E_t g̃_t = ∇F(x_t) - (1-κ)Δ_{t-1}: at γ = -1 always, else for quadratics."""

    def error(gamma: float, cubic: float) -> float:
        def gradient(x: float) -> float:
            return x + cubic * x**2

        kappa, before, x, average = 0.4, 1.0, 0.3, 0.8
        c = (1 - kappa) / (kappa * gamma)
        combined = (1 - c) * gradient(x) + c * gradient(x + gamma * (x - before))
        filtered = (1 - kappa) * average + kappa * combined
        return abs(filtered - (gradient(x) - (1 - kappa) * (gradient(before) - average)))

    assert error(-1.0, cubic=1.0) < 1e-15
    for gamma in (0.5, 1.0, -0.5, 1.5):
        assert error(gamma, cubic=0.0) < 1e-15
        assert error(gamma, cubic=1.0) > 0.1


def beta_and_progress(kappa: float, gamma: float, scaled: float) -> tuple[float, float]:
    """β (its least value) and M_1 as the paper defines them, with L = 1."""
    factor = contraction(kappa, gamma, scaled)
    beta = (scaled * (1 - kappa) / 2 + scaled**2 * factor) / (1 - factor)
    more = 2 + abs(1 + gamma) * spread(kappa, gamma)
    return beta, 1 + kappa - 2 * scaled - 4 * (beta + scaled**2) * (1 - kappa) ** 2 * scaled * more


def test_stated_step_size_admits_a_negative_m_1() -> None:
    kappa, scaled = 0.7, 0.746
    beta, progress = beta_and_progress(kappa, -1.0, scaled)
    stated = (1 + kappa) / (2 * (1 + 2 * (1 - kappa) ** 2 * beta * 2))
    proved = 1 / (2 * (1 + 2 * (1 - kappa) ** 2 * beta * 2))
    assert kappa > 1 - 1 / math.sqrt(1 + 4 * scaled**2)
    assert proved < scaled < stated  # two bounds on η: one stated, another in the proof
    assert progress < -0.29
    problem = Problem(1.0, 1.0, 1.0, 1, 0.1)
    assert convergence_bound(problem, scaled, kappa, -1.0, 100).failed == ("M_1 > 0",)


def test_the_proofs_step_size_leaves_m_1_positive_on_a_grid() -> None:
    """At γ = -1 and where contraction < 1; a grid, not a proof. The code checks M_1 itself."""
    least = math.inf
    for kappa in np.linspace(0.01, 0.99, 50):
        for scaled in np.linspace(0.001, 0.6, 300):
            if contraction(kappa, -1.0, scaled) >= 1:
                continue
            beta, progress = beta_and_progress(kappa, -1.0, scaled)
            if scaled < 1 / (2 * (1 + 2 * (1 - kappa) ** 2 * beta * 2)):
                least = min(least, progress)
    assert 0 < least < 0.06


def test_corollary_needs_more_steps_than_stated() -> None:
    """At the stated T, M_1 is near 0 for small M_κ and Theorem 1 yields far more than 8√(…); from 4T on, less."""
    for flatness in (1.0, 0.5, 0.1, 0.01, 0.001):
        problem = Problem(1.0, 1.0, math.sqrt(2 * flatness), 1, 1.0, gradient_variance=0.5)  # B as small as allowed
        least = choose(problem, 1).steps_stated
        at = choose(problem, math.ceil(least * (1 + 1e-9)) + 1)
        assert not at.failed
        assert at.proved.value > 1.5 * at.stated
        assert at.proved.progress < 0.34
        for times in (4, 5, 8, 20, 100):
            later = choose(problem, math.ceil(times * least))
            assert later.proved.value < 0.9 * later.stated
    assert choose(problem, math.ceil(least * (1 + 1e-9)) + 1).proved.value > 1e5 * at.stated


def test_corollary_beats_dp_sgd_only_for_small_m_kappa() -> None:
    """8√M_κ < √2, that is M_κ < 1/32, where T is large and no examples are sampled."""
    for flatness, better in ((1.0, False), (0.1, False), (0.04, False), (0.03, True), (0.003, True)):
        problem = Problem(1.0, 1.0, math.sqrt(2 * flatness), 1, 1.0)
        steps = 10**15
        assert (choose(problem, steps).stated < dp_sgd_bound(problem, steps).value) is better


def test_two_conditions_on_the_clip_neither_right() -> None:
    def stated(kappa: float) -> float:
        return 1 + 2 * (1 - kappa) / kappa

    def in_the_proof(kappa: float, gamma: float) -> float:
        return 1 + 2 * (1 - kappa) / (kappa * gamma)

    assert stated(0.5) == required_clip(0.5, -1.0, 1.0) == 3.0
    assert in_the_proof(0.5, -1.0) < 0
    assert stated(0.5) < required_clip(0.5, 0.25, 1.0)  # too small: two gradients of norm 1 make one of norm 7
    c = 0.5 / (0.5 * 0.25)
    assert abs((1 - c) * -1.0 + c * 1.0) == required_clip(0.5, 0.25, 1.0)
    assert required_clip(0.7, 0.5, 1.0) == pytest.approx(1.0)  # and needlessly large where 0 ≤ c ≤ 1


def test_privacy_utility_grows_as_kappa_falls() -> None:
    small, large = (privacy_utility(1.0, 1.0, flatness, 1.0, 100, 10**6, 1.0, 1e-6) for flatness in (0.001, 0.1))
    assert small.kappa < large.kappa
    assert small.clip > 1e3 * large.clip
    assert small.stated < large.stated
    assert small.disk > large.disk > large.dp_sgd
    # T = √2Nε/(C√(d ln(1/δ))) makes Tdσ² = 2v for every N: "N large enough" cannot meet the Corollary's condition
    for size in (10**3, 10**9):
        utility = privacy_utility(1.0, 1.0, 0.1, 1.0, 100, size, 1.0, 1e-6)
        steps = math.sqrt(2) * size * 1.0 / math.sqrt(100 * math.log(1e6))
        noise = 0.5 * steps * math.log(1e6) / size**2
        assert steps * 100 * noise == pytest.approx(utility.accumulated_noise)
        assert utility.accumulated_noise < utility.needed_noise


def test_gain_with_minus_sigma_h_is_not_least_squares() -> None:
    """Input noise of variance σ_H² that is independent of the observation belongs into p_{t|t-1} alone. The printed
    gain takes it off the observation's variance as well, and for σ_H² > σ_w² drives p negative."""
    observation, hessian, process, before = 1.0, 0.5, 0.1, 0.3
    predicted = before + hessian + process

    def error(gain: float) -> float:
        return (1 - gain) ** 2 * predicted + gain**2 * observation

    printed = gain_step(before, observation, hessian, process)[1]
    best = predicted / (predicted + observation)
    gains = np.linspace(0, 1, 10_001)
    assert gains[np.argmin([error(g) for g in gains])] == pytest.approx(best, abs=1e-4)
    assert error(printed) > 1.05 * error(best)
    assert gain_step(before, observation, hessian, process)[0] < error(printed)  # its p is not its error either
    variance = gain_step(1.0, observation=1.0, hessian=1.5, process=0.0)[0]
    assert variance < 0


def test_algorithm_2_without_process_noise_stops_listening() -> None:
    """With Σ_v left out and no Hessian noise the gain falls as 1/t, and the filter ends up ignoring what it sees."""
    variance = 1.0
    for _ in range(1000):
        variance, gain = gain_step(variance, 1.0, 0.0, 0.0)
    assert gain == pytest.approx(1 / 1001)
    for _ in range(1000):
        variance, kept = gain_step(variance, 1.0, 0.0, 0.05)
    assert kept > 0.19


def test_rearranged_update_with_g_t_on_both_sides() -> None:
    """g̃_t = (1-κ)g̃_t + κg_t says g̃_t = g_t: no filter. The library's has g̃_{t-1} there."""
    state = DiSK(kappa=0.25, gamma=0.5).start()
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    state.update([first])
    assert state.update([second])[0].item() == 0.75 * 1.0 + 0.25 * 2.0 != 2.0


def test_sign_of_the_lookahead_in_the_privacy_section() -> None:
    """x_t - γd is not x_t + γd: with it the finite difference has the wrong sign."""
    curvature, moved, gamma = 2.0, -0.1, 0.5
    difference = (curvature * (1.0 + gamma * moved) - curvature * 1.0) / gamma
    assert difference == pytest.approx(curvature * moved)
    assert (curvature * (1.0 - gamma * moved) - curvature * 1.0) / gamma == pytest.approx(-curvature * moved)


def test_start_values_differ() -> None:
    """From g_0 the error starts with all of w_0, from 0 with (1-κ)∇F: two algorithms, two first terms in Theorem 1."""
    from_first = DiSK(kappa=0.1).start().update([torch.tensor([4.0])])[0].item()
    from_zero = 0.1 * 4.0
    assert from_first == 4.0 != from_zero
    filter = DiSK(kappa=0.1, gamma=-1.0)
    quiet = moments([1.0], [1.0], filter, 0.1, 0.0, 5, start="zero").mean[1, 0]
    assert quiet == pytest.approx(1 - 0.1 * 0.1)
    assert moments([1.0], [1.0], filter, 0.1, 0.0, 5, start="first").mean[1, 0] == pytest.approx(0.9)
    noisy = [moments([0.0], [0.0], filter, 1.0, 1.0, 1, start=s).variance[1, 0] for s in ("first", "zero")]
    assert noisy == pytest.approx([1.0, 0.01])
    problem = Problem(1.0, 1.0, 1.0, 100, 1.0)
    first, zero = (convergence_bound(problem, 0.02, 0.05, -1.0, 100, start) for start in ("first", "zero"))
    assert first.optimization > 5 * zero.optimization
    # a low pass by coefficients starts from zero with its bias corrected: a third one
    low, kappa_form = LowPass(a=[1, -0.9], b=[0.1]).start(), LowPass(kappa=0.1).start()
    for value in (1.0, 3.0):
        a, b = (state.update([torch.tensor([value])])[0].item() for state in (low, kappa_form))
    assert (a, b) == (pytest.approx((0.09 + 0.3) / 0.19), pytest.approx(1.2))


def test_one_additional_forward_step_is_a_forward_and_a_backward() -> None:
    """A gradient at the second point needs its own backward pass: counted on a layer with hooks."""
    layer = torch.nn.Linear(3, 1)
    passes = {"forward": 0, "backward": 0}

    def forward(*_: object) -> None:
        passes["forward"] += 1

    def backward(*_: object) -> None:
        passes["backward"] += 1

    layer.register_forward_hook(forward)
    layer.register_full_backward_hook(backward)
    x = torch.randn(4, 3, requires_grad=True)
    for _ in DiSK(kappa=0.7, gamma=0.5).coefficients:
        layer(x).sum().backward()
    assert passes == {"forward": 2, "backward": 2}


def test_at_least_against_its_own_table() -> None:
    """GLUE, DP and KF-DP as printed at ε = 6.7 and ε = 1: "at least 1.3%" and "at least 3.8%"."""
    table = {
        "MNLI": (83.2, 84.8, 80.7, 82.0),
        "QNLI": (87.5, 88.9, 86.0, 88.7),
        "SST-2": (91.5, 92.8, 91.4, 91.5),
        "QQP": (85.8, 88.5, 84.2, 86.9),
    }
    gains_6, gains_1 = zip(*((b - a, d - c) for a, b, c, d in table.values()))
    assert min(gains_6) == pytest.approx(1.3)
    assert min(gains_1) == pytest.approx(0.1)
    assert max(gains_1) < 3.8


def test_noise_of_public_implementations() -> None:
    """The arithmetic of 1/√(c²+(1-c)²) at κ=.5, γ=.7, and of |1-c|/√(c²+(1-c)²) at κ=.7, γ=.5."""

    def share(kappa: float, gamma: float) -> tuple[float, float]:
        c = (1 - kappa) / (kappa * gamma)
        root = math.hypot(c, 1 - c)
        return 1 / root, abs(1 - c) / root

    assert share(0.5, 0.7)[0] == pytest.approx(0.67, abs=0.005)
    assert share(0.7, 0.5)[1] == pytest.approx(0.16, abs=0.005)


def test_weighing_the_average_by_one_minus_kappa() -> None:
    """At κ = .7 it weighs a new gradient .3: noise power κ/(2-κ) becomes (1-κ)/(1+κ)."""
    kappa = 0.7
    meant, swapped = kappa / (2 - kappa), (1 - kappa) / (1 + kappa)
    assert (round(meant, 3), round(swapped, 3)) == (0.538, 0.176)


def test_lemma_1_assumes_batches_of_a_fixed_size() -> None:
    """Two examples with equal gradients: σ²_SGD = 0, yet a Poisson batch over the public B varies."""
    gradients, q, batch = np.array([3.0, 3.0]), 0.5, 1.0
    outcomes = np.array([(a * gradients[0] + b * gradients[1]) / batch for a in (0, 1) for b in (0, 1)])
    assert gradients.var() == 0
    assert outcomes.var() == pytest.approx((1 - q) * (gradients**2).mean() / batch)
