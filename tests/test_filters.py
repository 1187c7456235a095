"""Filters alone: ranges, the recursion, and scipy behind the low-pass filter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import signal

from diskdp import DiSK, LowPass, NoFilter
from diskdp.errors import CheckpointError, FilterError


@pytest.mark.parametrize(
    ("kappa", "gamma", "c"),
    [(0.7, 0.5, 0.3 / 0.35), (0.5, 1.0, 1.0), (0.03, 0.97 / 0.03, 1.0), (0.3, -1.0, -0.7 / 0.3)],
)
def test_coefficients(kappa: float, gamma: float, c: float) -> None:
    here, ahead = DiSK(kappa=kappa, gamma=gamma).coefficients
    assert ahead == pytest.approx(c)
    assert here == pytest.approx(1 - c, abs=1e-12)


def test_c_is_free_if_given() -> None:
    assert DiSK(kappa=0.5, gamma=0.5, c=0.25).coefficients == (0.75, 0.25)
    assert DiSK(kappa=1.0, gamma=0.5).lookahead is None


@pytest.mark.parametrize("kappa", [0.0, -0.1, 1.1, float("nan")])
def test_kappa_out_of_range(kappa: float) -> None:
    with pytest.raises(FilterError, match=r"\(0, 1\]"):
        DiSK(kappa=kappa)
    with pytest.raises(FilterError, match=r"\(0, 1\]"):
        LowPass(kappa=kappa)


@pytest.mark.parametrize("gamma", [0.0, float("inf"), float("nan")])
def test_gamma_out_of_range(gamma: float) -> None:
    with pytest.raises(FilterError, match="gamma"):
        DiSK(gamma=gamma)


def test_other_bad_settings() -> None:
    with pytest.raises(FilterError, match="joint"):
        DiSK(clip="both")  # type: ignore[arg-type]
    with pytest.raises(FilterError, match="look-ahead"):
        DiSK(gamma=None, c=0.5)
    for arguments in ({}, {"kappa": 0.5, "a": [1.0]}):
        with pytest.raises(FilterError, match="either"):
            LowPass(**arguments)
    with pytest.raises(FilterError, match="unstable"):
        LowPass(a=[1, -1.01], b=[0.1])
    with pytest.raises(FilterError, match="constant"):
        LowPass(a=[1, -0.5], b=[1, -1])
    with pytest.raises(FilterError, match="finite"):
        LowPass(a=[0, 1], b=[1])
    for a, b in ((["x"], [1]), ([1], [None]), (1.0, [1]), ([1], "b")):
        with pytest.raises(FilterError, match="lists of numbers"):
            LowPass(a=a, b=b)  # type: ignore[arg-type]
    with pytest.raises(FilterError, match="must be a number"):
        DiSK(kappa="0.5")  # type: ignore[arg-type]
    with pytest.raises(FilterError, match="not finite"):
        DiSK(kappa=1e-200, gamma=1e-200)


def test_coefficients_may_be_arrays() -> None:
    assert LowPass(a=np.array([2.0, -1.0]), b=np.array([1.0])) == LowPass(a=[1, -0.5], b=[0.5])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0, -0.9], [0.1]),
        ([2.0, -1.0, 0.2], [0.6, 0.6]),
        ([1.0], [0.5, 0.3, 0.2]),
        (signal.butter(3, 0.2)[1].tolist(), signal.butter(3, 0.2)[0].tolist()),
    ],
)
def test_low_pass_is_scipys_filter_over_its_response_to_one(a: list[float], b: list[float]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4))
    exact = signal.lfilter(b, a, x, axis=0) / signal.lfilter(b, a, np.ones(30))[:, None]
    state = LowPass(a=a, b=b).start()
    found = [state.update([torch.tensor(row[:3]), torch.tensor(row[3])]) for row in x]
    assert np.allclose([torch.cat([u, v.view(1)]).numpy() for u, v in found], exact, rtol=1e-12)


DESIGNS = [
    (LowPass.butterworth(1, 0.3), signal.butter(1, 0.3)),
    (LowPass.butterworth(2, 0.1), signal.butter(2, 0.1)),
    (LowPass.butterworth(4, 0.25), signal.butter(4, 0.25)),
    (LowPass.chebyshev(2, 1.0, 0.1), signal.cheby1(2, 1.0, 0.1)),  # even order: -1 dB at frequency 0, corrected
    (LowPass.chebyshev(3, 0.5, 0.4), signal.cheby1(3, 0.5, 0.4)),
]


@pytest.mark.parametrize(("filter", "coefficients"), DESIGNS, ids=lambda v: repr(v) if isinstance(v, LowPass) else "")
def test_designs_are_scipys_with_the_bias_corrected(filter: LowPass, coefficients: tuple[np.ndarray, ...]) -> None:
    b, a = coefficients
    x = np.random.default_rng(1).standard_normal((200, 3))
    exact = signal.lfilter(b, a, x, axis=0) / signal.lfilter(b, a, np.ones(200))[:, None]
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        state = filter.start()
        found = torch.stack([state.update([torch.tensor(row, dtype=dtype)])[0] for row in x]).double().numpy()
        assert np.allclose(found, exact, rtol=0, atol=tolerance)
    assert max(abs(np.roots(filter.a))) < 1
    weights = np.array(filter.step_weights(200))
    assert np.allclose(weights @ x[::-1], exact[-1], rtol=0, atol=1e-11)
    assert weights.sum() == pytest.approx(1)


def test_designs_pass_the_slow_and_stop_the_fast() -> None:
    """-3 dB at a Butterworth filter's cutoff, the ripple at a Chebyshev filter's."""
    for filter, decibels in ((LowPass.butterworth(3, 0.2), 10 * np.log10(2)), (LowPass.chebyshev(3, 0.5, 0.2), 0.5)):
        _, response = signal.freqz(filter.b, filter.a, worN=[0.0, 0.2 * np.pi, 0.9 * np.pi])
        assert abs(response[0]) == pytest.approx(1)
        assert -20 * np.log10(abs(response[1])) == pytest.approx(decibels, rel=1e-6)
        assert abs(response[2]) < 1e-3


def test_designs_that_cannot_be() -> None:
    for order in (0, -1, 2.5, True):
        with pytest.raises(FilterError, match="order"):
            LowPass.butterworth(order, 0.5)  # type: ignore[arg-type]
    for cutoff in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(FilterError, match="cutoff"):
            LowPass.chebyshev(2, 1.0, cutoff)
    with pytest.raises(FilterError, match="ripple"):
        LowPass.chebyshev(2, 0.0, 0.5)
    with pytest.raises(FilterError, match="lower order"):
        LowPass.butterworth(4, 0.02)
    with pytest.raises(FilterError, match="steps"):
        LowPass(kappa=0.5).step_weights(0)


def test_from_zero_and_from_the_first_gradient_differ_at_first_alone() -> None:
    """kappa: weights κ(1-κ)^j and (1-κ)^t for g_0; a, b: κ(1-κ)^j over 1 - (1-κ)^(t+1)."""
    kappa = 0.2
    first, zero = LowPass(kappa=kappa), LowPass(a=[1, kappa - 1], b=[kappa])
    for steps in (1, 2, 5, 60):
        j = np.arange(steps)
        exact = kappa * (1 - kappa) ** j
        assert zero.step_weights(steps) == pytest.approx(exact / exact.sum())
        exact[-1] = (1 - kappa) ** (steps - 1)
        assert first.step_weights(steps) == pytest.approx(exact)
    states = first.start(), zero.start()
    values = np.random.default_rng(2).standard_normal(60)
    found = [[s.update([torch.tensor(v)])[0].item() for v in values] for s in states]
    assert found[0][0] == found[1][0] == pytest.approx(values[0])
    assert abs(found[0][3] - found[1][3]) > 1e-3
    assert abs(found[0][-1] - found[1][-1]) < 2 * 0.8**59 * 60
    assert np.dot(first.step_weights(60), values[::-1]) == pytest.approx(found[0][-1])


def test_the_average_starts_at_the_first_gradient() -> None:
    state = DiSK(kappa=0.25, gamma=0.5).start()
    values = [4.0, 0.0, 8.0]
    expected = [4.0, 3.0, 4.25]
    assert [state.update([torch.tensor(v)])[0].item() for v in values] == expected


def test_states_do_not_fit_other_filters() -> None:
    first, second = DiSK().start(), LowPass(a=[1, -0.5], b=[0.5]).start()
    for state in (first, second):
        state.update([torch.ones(2)])
    with pytest.raises(CheckpointError):
        first.load_state_dict(second.state_dict())
    with pytest.raises(CheckpointError):
        second.load_state_dict(first.state_dict())


def test_no_filter_keeps_nothing() -> None:
    gradients = [torch.ones(2)]
    assert NoFilter().start().update(gradients) is gradients
    assert LowPass(kappa=0.5) == DiSK(kappa=0.5, gamma=None)
