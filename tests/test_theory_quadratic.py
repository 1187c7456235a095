"""The exact moments against simulation with the library's filters, and what the spectrum view predicts from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import linalg

from diskdp import DiSK, LowPass, NoFilter
from diskdp.errors import TheoryError
from diskdp.theory import moments, stationary_variance, variance_ratio

EIGENVALUES = np.array([0.01, 0.1, 0.5, 1.0, 1.7])
FILTERS = [NoFilter(), LowPass(kappa=0.2), DiSK(kappa=0.2, gamma=0.5), DiSK(kappa=0.2, gamma=-1.0)]
FREE = DiSK(kappa=0.3, gamma=0.5, c=0.8)


@pytest.mark.parametrize("filter", [*FILTERS, FREE], ids=repr)
def test_moments_agree_with_simulation(filter: DiSK | LowPass | NoFilter) -> None:
    """20,000 runs of the filter itself; means and variances within 6 standard errors: 10 comparisons, about 2e-8."""
    runs, steps, rate, noise = 20_000, 25, 0.8, 0.7
    lam, x_0 = torch.from_numpy(EIGENVALUES), torch.tensor([3.0, -2.0, 1.0, 0.5, 1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    x = x_0.expand(runs, 5).clone()
    before, state = x.clone(), filter.start()
    here, ahead = filter.coefficients
    for _ in range(steps):
        gradient = here * lam * x
        if filter.lookahead is not None:
            gradient = gradient + ahead * lam * (x + filter.lookahead * (x - before))
        gradient = gradient + noise * torch.randn(runs, 5, generator=generator, dtype=torch.float64)
        filtered = state.update([gradient])[0]
        before, x = x, x - rate * filtered
    exact = moments(EIGENVALUES, x_0.numpy(), filter, rate, noise, steps)
    mean, variance = exact.mean[-1], exact.variance[-1]
    np.testing.assert_array_less(np.abs(x.mean(0).numpy() - mean), 6 * np.sqrt(variance / runs))
    np.testing.assert_array_less(np.abs(x.var(0).numpy() / variance - 1), 6 * np.sqrt(2 / runs))
    assert exact.loss(EIGENVALUES)[0] == pytest.approx(0.5 * float((lam * x_0**2).sum()))


@pytest.mark.parametrize("filter", [*FILTERS, FREE], ids=repr)
def test_stationary_variance_solves_the_lyapunov_equation(filter: DiSK | LowPass | NoFilter) -> None:
    rate = 0.9
    kappa = 1.0 if isinstance(filter, NoFilter) else filter.kappa
    ahead = 0.0 if filter.lookahead is None else kappa * filter.coefficients[1] * filter.lookahead
    found = stationary_variance(EIGENVALUES, filter, rate, noise_std=2.0)
    for lam, variance in zip(EIGENVALUES, found):
        filtered = np.array([kappa * lam, 1 - kappa - ahead * lam * rate])  # g̃_t from (x_t, g̃_{t-1})
        transition = np.array([np.array([1.0, 0.0]) - rate * filtered, filtered])
        noise = 2.0 * kappa * np.array([-rate, 1.0])
        solved = linalg.solve_discrete_lyapunov(transition, np.outer(noise, noise))
        assert variance == pytest.approx(solved[0, 0], rel=1e-9)
    far = moments(EIGENVALUES, 0.0, filter, rate, 2.0, steps=4000).variance[-1]
    np.testing.assert_allclose(far, found, rtol=1e-6)


def test_the_gradient_error_does_not_know_the_curvature() -> None:
    """e_t = (1-κ)e_{t-1} + κw_t for every λ and η, stable or not; its zero-frequency gain is 1."""
    draw = np.random.default_rng(0)
    noise = draw.normal(size=200)
    kappa, expected = 0.15, []
    for t, w in enumerate(noise):
        expected.append(w if t == 0 else (1 - kappa) * expected[-1] + kappa * w)
    for lam, rate in ((0.0, 1.0), (0.3, 0.5), (1.0, 1.5), (2.5, 1.0)):
        state, x, before = DiSK(kappa=kappa, gamma=-0.7).start(), 1.0, 1.0
        here, ahead = DiSK(kappa=kappa, gamma=-0.7).coefficients
        for t, w in enumerate(noise):
            gradient = here * lam * x + ahead * lam * (x - 0.7 * (x - before)) + w
            filtered = float(state.update([torch.tensor([gradient], dtype=torch.float64)])[0])
            assert filtered - lam * x == pytest.approx(expected[t], rel=1e-7, abs=1e-7 * max(1.0, abs(x)))
            before, x = x, x - rate * filtered
    frequencies = np.array([0.0, np.pi])
    gain = kappa / np.abs(1 - (1 - kappa) * np.exp(-1j * frequencies))
    np.testing.assert_allclose(gain, [1.0, kappa / (2 - kappa)])


def test_in_the_mean_disk_is_gradient_descent() -> None:
    plain = moments(EIGENVALUES, 1.0, NoFilter(), 0.9, 1.0, 50)
    disk = moments(EIGENVALUES, 1.0, DiSK(kappa=0.05, gamma=0.5), 0.9, 1.0, 50)
    np.testing.assert_allclose(disk.mean, plain.mean, atol=1e-14)
    low_pass = moments(EIGENVALUES, 1.0, LowPass(kappa=0.05), 0.9, 1.0, 50)
    assert np.abs(low_pass.mean - plain.mean).max() > 0.5


def test_steep_directions_gain_and_flat_ones_do_not() -> None:
    kappa = 0.1
    u = np.array([1e-4, 0.1, 0.5, 1.0, 1.9])
    ratio = stationary_variance(u, DiSK(kappa=kappa, gamma=0.5), 1.0) / stationary_variance(u, NoFilter(), 1.0)
    np.testing.assert_allclose(ratio, variance_ratio(u, kappa), rtol=1e-9)
    assert ratio[0] > 0.998
    assert 0.45 < ratio[1] < 0.55
    assert ratio[3] == pytest.approx(kappa / (2 - kappa))
    assert (np.diff(variance_ratio(np.linspace(0, 2, 100), kappa)) < 0).all()
    # a low pass has no such gain: (2-u)/(2 - κu/(2-κ)), at best a half at u = 1 where DiSK has κ/(2-κ)
    low = stationary_variance(u, LowPass(kappa=kappa), 1.0) / stationary_variance(u, NoFilter(), 1.0)
    np.testing.assert_allclose(low, (2 - u) / (2 - kappa * u / (2 - kappa)), rtol=1e-9)
    assert (low >= ratio).all()


def test_starting_at_the_first_gradient_costs_flat_directions() -> None:
    """w_0 keeps its full weight: in a flat direction it counts 1/κ times; Var x is about (1/κ² - 3/(2κ))η²σ² larger."""
    kappa, steps = 0.05, 1000
    plain = moments([0.0], 0.0, NoFilter(), 1.0, 1.0, steps).variance[-1, 0]
    first = moments([0.0], 0.0, DiSK(kappa=kappa, gamma=0.5), 1.0, 1.0, steps).variance[-1, 0]
    zero = moments([0.0], 0.0, DiSK(kappa=kappa, gamma=0.5), 1.0, 1.0, steps, start="zero").variance[-1, 0]
    assert plain == pytest.approx(steps)
    assert first - plain == pytest.approx(1 / kappa**2 - 1.5 / kappa, rel=0.05)
    assert zero < plain


def test_no_stationary_state_where_there_is_none() -> None:
    with pytest.raises(TheoryError, match="unstable at eigenvalue 2"):
        stationary_variance([0.5, 2.0], DiSK(kappa=0.5, gamma=1.0), 1.1)
    with pytest.raises(TheoryError, match="first-order"):
        stationary_variance([0.5], LowPass(a=[1, -0.5], b=[0.5]), 1.0)
    with pytest.raises(TheoryError, match="kappa"):
        variance_ratio([0.5], kappa=0.0)
