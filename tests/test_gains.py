"""Gains: closed forms against direct iteration in long arithmetic, refusals, and the range of the rate."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskdp.errors import FilterError
from diskdp.filters import gains

CASES = [(1.0, 0.1, 0.05), (1.0, 0.0, 0.05), (1.0, 0.9, 0.0), (4.0, 1e-3, 1e-4), (0.2, 0.1, 7.0), (1e6, 10.0, 3.0)]


def iterate(w: float, h: float, v: float, steps: int, p: float, kind: str) -> list[tuple[Fraction, Fraction]]:
    """The formulas of the paper (or of least squares) as they are written, in rationals cut to 200 bits."""
    w, h, v, p = (Fraction(x) for x in (w, h, v, p))
    found = []
    for _ in range(steps):
        if kind == "printed":
            k = (p + v + h) / (p + v + w)
            p = (w - h) * (p + v + h) / (p + v + w)
        else:
            k = (p + v + h) / (p + v + h + w)
            p = (1 - k) ** 2 * (p + v + h) + k**2 * w  # the error of any gain, for independent noises
        p, k = (Fraction(round(x * 2**200), 2**200) for x in (p, k))
        found.append((p, k))
    return found


@pytest.mark.parametrize("kind", ["printed", "least-squares"])
@pytest.mark.parametrize("case", CASES)
def test_recursion_is_the_iteration(case: tuple[float, float, float], kind: gains.GainKind) -> None:
    for start in (None, 0.0, 123.0):
        p, k = gains.recursion(*case, steps=50, start=start, kind=kind)
        exact = iterate(*case, 50, case[0] if start is None else start, kind)
        assert p.shape == k.shape == (50,)
        for t, (p_t, k_t) in enumerate(exact):
            assert p[t] == pytest.approx(float(p_t), rel=1e-12)
            assert k[t] == pytest.approx(float(k_t), rel=1e-12)


@pytest.mark.parametrize("kind", ["printed", "least-squares"])
@pytest.mark.parametrize("case", CASES)
def test_steady_state_is_where_the_iteration_ends(case: tuple[float, float, float], kind: gains.GainKind) -> None:
    steady = gains.steady_state(*case, kind=kind)
    steps = 20 + math.ceil(40 / -math.log(steady.rate)) if 0 < steady.rate < 1 else 20
    exact = iterate(*case, steps, case[0], kind)
    assert steady.variance == pytest.approx(float(exact[-1][0]), rel=1e-12)
    assert steady.gain == pytest.approx(float(exact[-1][1]), rel=1e-12)
    assert steady.rate == pytest.approx((1 - steady.gain) ** 2, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_corrected_rate_is_the_measured_one_and_the_printed_one_is_not(case: tuple[float, float, float]) -> None:
    w, h, v = case
    root = math.sqrt((v + h) * (4 * w + v - 3 * h))
    corrected = (2 * w + v - h - root) / (2 * w + v - h + root)
    printed = (2 * w + 3 * h + v - root) / (2 * w + 3 * h + v + root)
    rate = gains.steady_state(w, h, v).rate
    assert rate == pytest.approx(corrected, rel=1e-9)
    t = math.ceil(40 / -math.log(rate))
    iterates = [k for _, k in iterate(w, h, v, 3 * t, w, "printed")]
    measured = float((iterates[t] - iterates[-1]) / (iterates[t - 1] - iterates[-1]))
    assert measured == pytest.approx(rate, rel=1e-9)
    if h > 1e-2 * w:
        assert abs(measured - printed) > 0.01


def test_the_worked_example() -> None:
    steady = gains.steady_state(observation_var=1.0, hessian_var=0.1, process_var=0.05)
    assert steady.rate == pytest.approx(4 / 9, rel=1e-12)
    assert steady.gain == pytest.approx(1 / 3, rel=1e-12)
    assert steady.variance == pytest.approx(0.3, rel=1e-12)


@given(st.floats(1e-12, 1e12), st.floats(0, 1), st.floats(0, 1e12), st.sampled_from(["printed", "least-squares"]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_steady_state_is_a_fixed_point(w: float, share: float, v: float, kind: gains.GainKind) -> None:
    h = share * w
    steady = gains.steady_state(w, h, v, kind=kind)
    assert 0 <= steady.gain <= 1
    assert 0 <= steady.rate <= 1
    p, k = gains.recursion(w, h, v, steps=1, start=steady.variance, kind=kind)
    assert p[0] == pytest.approx(steady.variance, rel=1e-9, abs=1e-300)
    assert k[0] == pytest.approx(steady.gain, rel=1e-9, abs=1e-12)


def test_limits() -> None:
    assert gains.steady_state(1.0, 0.0, 0.0) == gains.SteadyState(0.0, 0.0, 1.0)
    assert gains.steady_state(0.0, 0.0, 1.0) == gains.SteadyState(1.0, 0.0, 0.0)
    assert gains.steady_state(1.0, 1.0, 0.5).gain == 1.0
    assert gains.recursion(1.0, 0.0, 0.0, steps=4).gain == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert len(gains.recursion(1.0, 0.0, 0.0, steps=0).gain) == 0
    assert gains.steady_state(1e300, 1e299, 1e300).gain == pytest.approx(gains.steady_state(1, 0.1, 1).gain)


def test_what_would_be_negative_or_complex_is_refused() -> None:
    for call in (gains.steady_state, lambda *a: gains.recursion(*a, steps=3)):
        with pytest.raises(FilterError, match="least-squares"):
            call(1.0, 1.1, 0.1)
        with pytest.raises(FilterError, match="least-squares"):
            call(1.0, 5.0, 0.1)  # complex as well: 4σ_w² + σ_v² - 3σ_H² < 0
        for bad in (-1.0, math.nan, math.inf, "1", None, True):
            with pytest.raises(FilterError, match="process_var"):
                call(1.0, 0.1, bad)
        with pytest.raises(FilterError, match="0/0"):
            call(0.0, 0.0, 0.0)
    assert gains.steady_state(1.0, 5.0, 0.1, kind="least-squares").gain < 1
    with pytest.raises(FilterError, match="steps"):
        gains.recursion(1.0, 0.1, 0.1, steps=-1)
    with pytest.raises(FilterError, match="start"):
        gains.recursion(1.0, 0.1, 0.1, steps=1, start=-1.0)
    with pytest.raises(FilterError, match="kind"):
        gains.steady_state(1.0, 0.1, 0.1, kind="optimal")  # type: ignore[arg-type]
    with pytest.raises(FilterError, match="larger unit"):
        gains.steady_state(1e308, 0.0, 1e308)


def test_the_printed_gain_is_not_the_best_for_independent_noise() -> None:
    """One step from p = 1: the error of each gain, (1-k)²(p + σ_v² + σ_H²) + k²σ_w²."""
    w, h, v, p = 1.0, 0.5, 0.1, 1.0
    error = {}
    for kind in ("printed", "least-squares"):
        k = float(gains.recursion(w, h, v, steps=1, start=p, kind=kind).gain[0])  # type: ignore[arg-type]
        error[kind] = (1 - k) ** 2 * (p + v + h) + k**2 * w
    assert error["least-squares"] < 0.98 * error["printed"]


def test_suggested_kappa() -> None:
    assert gains.suggest_kappa(0.5, 2.0, 0.3) == pytest.approx(0.3)
    assert gains.suggest_kappa(0.5, 20.0, 0.3) == 1.0
    for bad in (0.0, -1.0, math.nan, math.inf, True, "1"):
        for arguments in ((bad, 1.0, 1.0), (1.0, bad, 1.0), (1.0, 1.0, bad)):
            with pytest.raises(FilterError, match="positive"):
                gains.suggest_kappa(*arguments)  # type: ignore[arg-type]
    with pytest.raises(FilterError, match="smallest"):
        gains.suggest_kappa(1e-200, 1e-200, 1.0)
