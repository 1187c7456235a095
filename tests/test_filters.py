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
