"""Kalman filters in matrix form, against the conditional law of the whole history; and the way down to DiSK."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from diskdp import DiSK
from diskdp.errors import FilterError
from diskdp.filters import gains, kalman, simplifications
from diskdp.filters.kalman import Array, Belief, GradientNoise, LinearModel
from diskdp.filters.simplifications import Observations, ScalarBelief

KINDS: list[gains.GainKind] = ["printed", "least-squares"]


def random_covariance(rng: np.random.Generator, n: int, scale: float = 1.0) -> Array:
    root = rng.standard_normal((n, n))
    return scale * (root @ root.T / n + 0.1 * np.eye(n))


def linear_system(seed: int, n: int = 4, m: int = 3) -> LinearModel:
    rng = np.random.default_rng(seed)
    return LinearModel(
        0.5 * rng.standard_normal((n, n)),
        rng.standard_normal((m, n)),
        random_covariance(rng, n),
        random_covariance(rng, m),
    )


def conditional(model: LinearModel, start: Belief, observations: Array, inputs: Array) -> Belief:
    """Mean and covariance of θ_T given all observations, from the joint normal law of everything: no recursion."""
    T, n = inputs.shape
    m = observations.shape[1]
    # θ_t and ψ_t as linear maps of the independent (θ_{-1}, v_0.., w_0..), plus known means
    state = np.concatenate([np.eye(n), np.zeros((n, T * (n + m)))], axis=1)
    mean = start.mean
    sources = np.zeros((n + T * (n + m), n + T * (n + m)))
    sources[:n, :n] = start.covariance
    maps, means = [], []
    for t in range(T):
        v, w = n + t * n, n + T * n + t * m
        sources[v : v + n, v : v + n] = model.process_cov
        sources[w : w + m, w : w + m] = model.observation_cov
        state = model.transition @ state
        state[:, v : v + n] += np.eye(n)
        mean = model.transition @ mean + inputs[t]
        seen = model.observation @ state
        seen[:, w : w + m] += np.eye(m)
        maps.append(seen)
        means.append(model.observation @ mean)
    seen, expected = np.concatenate(maps), np.concatenate(means)
    weights = np.linalg.solve(seen @ sources @ seen.T, seen @ sources @ state.T).T
    return Belief(
        mean + weights @ (observations.reshape(-1) - expected),
        state @ sources @ state.T - weights @ seen @ sources @ state.T,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_textbook_filter_is_the_conditional_law(seed: int) -> None:
    model, rng = linear_system(seed), np.random.default_rng(seed + 100)
    start = Belief(rng.standard_normal(4), random_covariance(rng, 4))
    observations, inputs = rng.standard_normal((6, 3)), rng.standard_normal((6, 4))
    exact = conditional(model, start, observations, inputs)
    found = kalman.filtered(model, start, observations, inputs)[-1]
    assert np.allclose(found.mean, exact.mean, rtol=1e-10, atol=1e-10)
    assert np.allclose(found.covariance, exact.covariance, rtol=1e-10, atol=1e-10)


def test_extended_and_unscented_are_the_textbook_filter_on_linear_systems() -> None:
    model, rng = linear_system(5), np.random.default_rng(5)
    plain = extended = sigma = Belief(rng.standard_normal(4), random_covariance(rng, 4))
    A, C = model.transition, model.observation
    for observed in rng.standard_normal((10, 3)):
        plain = kalman.correct(kalman.predict(plain, A, model.process_cov), observed, C, model.observation_cov)
        extended = kalman.predict_extended(extended, lambda x: A @ x, lambda x: A, model.process_cov)
        extended = kalman.correct_extended(extended, observed, lambda x: C @ x, lambda x: C, model.observation_cov)
        sigma = kalman.predict_unscented(sigma, lambda x: A @ x, model.process_cov)
        sigma = kalman.correct_unscented(sigma, observed, lambda x: C @ x, model.observation_cov)
    for other in (extended, sigma):
        assert np.allclose(other.mean, plain.mean, rtol=0, atol=1e-10)
        assert np.allclose(other.covariance, plain.covariance, rtol=0, atol=1e-10)


def test_extended_linearises_at_the_mean_and_unscented_sees_the_curve() -> None:
    belief = Belief(np.array([0.5, -1.0]), np.array([[0.4, 0.1], [0.1, 0.3]]))

    def f(x: Array) -> Array:
        return np.array([x[0] * x[1], x[0] ** 2])

    def jacobian(x: Array) -> Array:
        return np.array([[x[1], x[0]], [2 * x[0], 0.0]])

    extended = kalman.predict_extended(belief, f, jacobian, np.zeros((2, 2)))
    assert np.allclose(extended.mean, [-0.5, 0.25])
    J = jacobian(belief.mean)
    assert np.allclose(extended.covariance, J @ belief.covariance @ J.T)
    # means of products of normals: E[xy] = mx my + cov, E[x²] = mx² + var; the sigma points have both moments
    found = kalman.unscented(belief, f)
    assert np.allclose(found.mean, [-0.5 + 0.1, 0.25 + 0.4], rtol=1e-12)
    exact_cross = np.array([[0.4 * -1.0 + 0.1 * 0.5, 2 * 0.5 * 0.4], [0.1 * -1.0 + 0.3 * 0.5, 2 * 0.5 * 0.1]])
    assert np.allclose(found.cross, exact_cross, rtol=1e-12)
    with pytest.raises(FilterError, match="spread"):
        kalman.unscented(belief, f, spread=0.0)


def test_unscented_follows_a_curved_observation_better_than_extended() -> None:
    """θ ~ N(1, .5) seen through θ² + N(0, .01); the exact conditional mean by a fine grid, over seen values."""
    grid = np.linspace(-6, 8, 200_001)
    belief, noise = Belief(np.array([1.0]), np.array([[0.5]])), np.array([[0.01]])
    errors = {"extended": 0.0, "unscented": 0.0}
    rng = np.random.default_rng(0)
    for _ in range(40):
        theta = 1 + np.sqrt(0.5) * rng.standard_normal(1)
        seen = theta**2 + 0.1 * rng.standard_normal(1)
        likelihood = -((grid - 1) ** 2) / (2 * 0.5) - (seen - grid**2) ** 2 / (2 * 0.01)
        weights = np.exp(likelihood - likelihood.max())
        exact = weights @ grid / weights.sum()
        extended = kalman.correct_extended(belief, seen, lambda x: x**2, lambda x: np.diag(2 * x), noise)
        sigma = kalman.correct_unscented(belief, seen, lambda x: x**2, noise)
        errors["extended"] += float((extended.mean[0] - exact) ** 2)
        errors["unscented"] += float((sigma.mean[0] - exact) ** 2)
    assert errors["unscented"] < errors["extended"]


def gradient_noise(rng: np.random.Generator, n: int, printed: bool) -> GradientNoise:
    hessian = random_covariance(rng, n, 0.2)
    observation = random_covariance(rng, n) + hessian
    factors = 0.3 * np.eye(n) if printed else random_covariance(rng, n, 0.3)
    return GradientNoise(observation, random_covariance(rng, n, 0.1), hessian, factors, rng.standard_normal((n, n)))


def test_the_printed_algorithm_as_it_is_printed() -> None:
    """P_t = (I - K E[C]) P_{t|t-1} and K with its inverse, written down; S from the prediction."""
    rng = np.random.default_rng(1)
    noise = gradient_noise(rng, 5, printed=True)
    belief = Belief(rng.standard_normal(5), random_covariance(rng, 5))
    mean, P = belief.mean, belief.covariance
    for _ in range(20):
        step, g = 0.1 * rng.standard_normal(5), rng.standard_normal(5)
        mean = mean + step
        P = P + noise.hessian + noise.process
        C, S = noise.mean_observation, np.outer(mean, mean)
        K = P @ C.T @ np.linalg.inv(noise.observation + C @ (noise.factors @ S + P) @ C.T - noise.hessian)
        mean, P = (np.eye(5) - K @ C) @ mean + K @ g, (np.eye(5) - K @ C) @ P
        belief = kalman.correct_gradient(kalman.predict_gradient(belief, step, noise), g, noise, "printed")
        assert np.allclose(belief.mean, mean, rtol=1e-10, atol=1e-10)
        assert np.allclose(belief.covariance, P, rtol=1e-10, atol=1e-10)


def test_the_printed_gain_is_refused_where_it_has_no_covariance() -> None:
    rng = np.random.default_rng(2)
    noise = gradient_noise(rng, 3, printed=True)
    belief = Belief(rng.standard_normal(3), np.eye(3))
    bad = replace(noise, hessian=noise.observation + 0.01 * np.eye(3))
    with pytest.raises(FilterError, match="not positive definite"):
        kalman.correct_gradient(belief, np.ones(3), bad, "printed")
    kalman.correct_gradient(belief, np.ones(3), bad, "least-squares")
    with pytest.raises(FilterError, match="not symmetric"):
        kalman.correct_gradient(belief, np.ones(3), replace(noise, factors=np.diag([1.0, 2, 3])), "printed")
    with pytest.raises(FilterError, match="printed"):
        kalman.correct_gradient(belief, np.ones(3), noise, "best")  # type: ignore[arg-type]


def test_what_the_refusal_prevents() -> None:
    """The formulas of the paper with σ_H² > σ_w², iterated as they are: a negative variance at once."""
    p, w, h, v = 1.0, 1.0, 1.5, 0.1
    p = (w - h) * (p + v + h) / (p + v + w)
    assert p < 0


def test_least_squares_with_random_factors_is_the_best_linear_estimate() -> None:
    """Second moments by Gauss-Hermite cubature, exact for these polynomials; K and P from them as least squares has."""
    rng = np.random.default_rng(3)
    noise = gradient_noise(rng, 2, printed=False)
    belief = Belief(rng.standard_normal(2), random_covariance(rng, 2))
    C = noise.mean_observation
    roots = [np.linalg.cholesky(m) for m in (belief.covariance, noise.factors, noise.observation)]
    total = 0.0
    seen_cov, cross = np.zeros((2, 2)), np.zeros((2, 2))
    nodes, weights = np.sqrt(3) * np.array([-1.0, 0, 1]), np.array([1, 4, 1]) / 6
    for index in product(range(3), repeat=6):
        z, weight = nodes[list(index)], weights[list(index)].prod()
        deviation = roots[0] @ z[:2]
        state = belief.mean + deviation
        seen = C @ ((1 + roots[1] @ z[2:4]) * state) + roots[2] @ z[4:]
        off = seen - C @ belief.mean
        seen_cov += weight * np.outer(off, off)
        cross += weight * np.outer(deviation, off)
        total += weight
    assert total == pytest.approx(1)
    K = cross @ np.linalg.inv(seen_cov)
    found = kalman.correct_gradient(belief, np.array([0.3, -2.0]), noise)
    assert np.allclose(found.mean, belief.mean + K @ (np.array([0.3, -2.0]) - C @ belief.mean), rtol=1e-10)
    assert np.allclose(found.covariance, belief.covariance - K @ seen_cov @ K.T, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_covariances_stay_symmetric_and_positive_over_ten_thousand_steps(kind: gains.GainKind) -> None:
    """Ten decades of noise, hardly any process noise: there P = (I - KC)P loses its symmetry, as shown too."""
    n = 8
    rotation = np.linalg.qr(np.random.default_rng(4).standard_normal((n, n)))[0]

    def spectrum(low: float, high: float) -> Array:
        matrix = rotation @ np.diag(np.logspace(low, high, n)) @ rotation.T
        return (matrix + matrix.T) / 2

    noise = GradientNoise(spectrum(-9, 1), spectrum(-14, -12), 0.1 * spectrum(-9, -6), np.zeros((n, n)), np.eye(n))
    belief, naive = Belief(np.zeros(n), 1e4 * np.eye(n)), 1e4 * np.eye(n)
    broken = False
    R = noise.observation - noise.hessian if kind == "printed" else noise.observation
    for _ in range(10_000):
        belief = kalman.correct_gradient(kalman.predict_gradient(belief, np.zeros(n), noise), np.ones(n), noise, kind)
        naive = naive + noise.hessian + noise.process
        naive = (np.eye(n) - naive @ np.linalg.inv(naive + R)) @ naive
        broken = broken or not np.array_equal(naive, naive.T)
        assert np.array_equal(belief.covariance, belief.covariance.T)
        assert kalman.is_positive(belief.covariance)
    assert broken


def a_run(n: int, steps: int, seed: int, gamma: float) -> tuple[list[Observations], Array]:
    """Gradients of a quadratic along a course, exact at both points, seen with noise."""
    rng = np.random.default_rng(seed)
    H = random_covariance(rng, n)
    x, d = rng.standard_normal(n), np.zeros(n)
    seen = []
    for _ in range(steps):
        here = H @ x
        seen.append(Observations(here + rng.standard_normal(n), d, H, here, H @ (x + gamma * d), gamma))
        d = 0.1 * rng.standard_normal(n)
        x = x + d
    return seen, H


@pytest.mark.parametrize("kind", KINDS)
def test_each_simplification_is_the_stage_before_under_its_assumption(kind: gains.GainKind) -> None:
    n, gamma = 4, 0.5
    seen, _ = a_run(n, 30, 7, gamma)
    rng = np.random.default_rng(8)
    zero, eye = np.zeros((n, n)), np.eye(n)
    hessian = random_covariance(rng, n, 0.1)
    general = GradientNoise(random_covariance(rng, n) + hessian, random_covariance(rng, n, 0.1), hessian, zero, eye)
    start = Belief(rng.standard_normal(n), random_covariance(rng, n))

    a = b = c = start
    for observations in seen:  # 1: E[C] = I, Σ_C = 0;  2: the gradient is linear, so the difference is H d
        a = simplifications.full(a, observations, general, kind)
        b = simplifications.constant_observation(b, observations, general, kind)
        c = simplifications.finite_difference(c, observations, general, kind)
        for one, other in ((a, b), (b, c)):
            assert np.allclose(one.mean, other.mean, rtol=0, atol=1e-10)
            assert np.allclose(one.covariance, other.covariance, rtol=0, atol=1e-10)

    w, h, v = 1.3, 0.2, 0.05  # 3: multiples of I
    multiples = GradientNoise(w * eye, v * eye, h * eye, zero, eye)
    steady = gains.steady_state(w, h, v, kind)
    c, s = Belief(start.mean, 0.7 * eye), ScalarBelief(start.mean, 0.7)
    t, filtered = ScalarBelief(start.mean, steady.variance), start.mean
    state = DiSK(kappa=steady.gain, gamma=gamma).start()
    state.load_state_dict({"filtered": [torch.tensor(start.mean)]})
    for observations in seen:
        c = simplifications.finite_difference(c, observations, multiples, kind)
        s = simplifications.scalar_covariance(s, observations, w, h, v, kind)
        assert np.allclose(c.mean, s.mean, rtol=0, atol=1e-10)
        assert np.allclose(c.covariance, s.variance * eye, rtol=0, atol=1e-10)
        t = simplifications.scalar_covariance(t, observations, w, h, v, kind)  # 4: from p_∞ the gain is constant
        filtered = simplifications.constant_gain(filtered, observations, steady.gain)
        assert np.allclose(t.mean, filtered, rtol=0, atol=1e-10)
        g = simplifications.combined(observations, steady.gain)
        disk = state.update([torch.tensor(g)])[0].numpy()  # and that is DiSK
        assert np.allclose(disk, filtered, rtol=0, atol=1e-10)


def test_the_combined_gradient_is_what_disk_asks_for() -> None:
    [*_, seen], _ = a_run(3, 5, 9, -0.7)
    filter = DiSK(kappa=0.3, gamma=-0.7)
    here, ahead = filter.coefficients
    noise = seen.gradient - seen.here
    assert np.allclose(
        simplifications.combined(seen, 0.3), here * seen.here + ahead * seen.ahead + noise, rtol=0, atol=1e-12
    )


def test_a_simplification_is_another_filter_where_its_assumption_fails() -> None:
    seen, _ = a_run(3, 5, 10, 0.5)
    rng = np.random.default_rng(11)
    noise = gradient_noise(rng, 3, printed=True)
    a = b = Belief(np.zeros(3), np.eye(3))
    for observations in seen:
        a = simplifications.full(a, observations, noise)
        b = simplifications.constant_observation(b, observations, noise)
    assert not np.allclose(a.mean, b.mean, atol=1e-2)


def squared_errors(
    learning_rate: float = 0.05, deviation: float = 0.3, steps: int = 200, seed: int = 0
) -> dict[str, float]:
    """Mean squared error of gradients of a quadratic in 3 dimensions, seen with noise along SGD on the noisy ones."""
    rng = np.random.default_rng(seed)
    n, eye = 3, np.eye(3)
    H = np.diag([2.0, 1.0, 0.3])
    noise_cov = deviation**2 * eye
    first = kalman.variable_and_gradient(n, learning_rate, noise_cov)
    # a constant gradient is never right: without process noise in it the first model's gain goes to 0
    drift = np.zeros((2 * n, 2 * n))
    drift[n:, n:] = (0.1 * deviation) ** 2 * eye
    drifting = replace(first, process_cov=first.process_cov + drift)
    second = kalman.variable_and_gradient_with_curvature(H, learning_rate, noise_cov)
    x = np.array([3.0, -2.0, 4.0])
    small = 1e-9 * eye

    def blocks(*parts: Array) -> Array:
        size = sum(len(p) for p in parts)
        matrix, place = np.zeros((size, size)), 0
        for p in parts:
            matrix[place : place + len(p), place : place + len(p)] = p
            place += len(p)
        return matrix

    wide = 100 * eye
    constant = Belief(np.concatenate([x, np.zeros(n)]), blocks(small, wide))
    curved = Belief(np.concatenate([x, x, np.zeros(n)]), blocks(small, small, wide))
    entries = n * (n + 1) // 2
    both = Belief(np.zeros(n + entries), blocks(wide, 4 * np.eye(entries)))
    known = Belief(np.zeros(n), wide)
    noise = GradientNoise(noise_cov, 0 * eye, 0 * eye, 0 * eye, eye)
    errors = dict.fromkeys(("noisy", "constant", "curvature", "estimated", "known"), 0.0)
    d = np.zeros(n)
    for t in range(steps):
        exact = H @ x
        seen = exact + deviation * rng.standard_normal(n)
        if t:  # the models of the variable say what the gradient was when x was left, x being where it was left for
            moving = kalman.gradient_and_curvature(d, noise_cov)
            both = kalman.predict(both, moving.transition, moving.process_cov)
            known = kalman.predict_gradient(known, H @ d, noise)
        both = kalman.correct(both, seen, kalman.gradient_and_curvature(d, noise_cov).observation, noise_cov)
        known = kalman.correct_gradient(known, seen, noise)
        following = x - learning_rate * seen
        R = 1e-12 * eye
        constant = kalman.predict(constant, drifting.transition, drifting.process_cov)
        constant = kalman.correct(constant, following, drifting.observation, R)
        curved = kalman.predict(curved, second.transition, second.process_cov)
        curved = kalman.correct(curved, following, second.observation, R)
        estimates = {
            "noisy": seen,
            "constant": constant.mean[n:],
            "curvature": curved.mean[2 * n :],
            "estimated": both.mean[:n],
            "known": known.mean,
        }
        if t >= 20:
            for name, estimate in estimates.items():
                errors[name] += float(np.square(estimate - exact).mean()) / (steps - 20)
        d, x = following - x, following
    return errors


def test_models_of_the_appendix_in_the_order_of_what_they_know() -> None:
    errors = squared_errors()
    assert errors["curvature"] == pytest.approx(errors["known"], rel=1e-3)  # the same filter, by another state
    assert errors["known"] < errors["estimated"] < errors["noisy"]
    assert errors["known"] < 0.5 * errors["constant"]
    assert errors["constant"] < errors["noisy"]


def test_the_curvature_is_found_from_noisy_gradients() -> None:
    rng = np.random.default_rng(12)
    H = random_covariance(rng, 3)
    belief = Belief(np.zeros(9), 100 * np.eye(9))
    x, d = rng.standard_normal(3), np.zeros(3)
    for _ in range(400):
        model = kalman.gradient_and_curvature(d, 0.01 * np.eye(3))
        belief = kalman.predict(belief, model.transition, model.process_cov)
        belief = kalman.correct(belief, H @ x + 0.1 * rng.standard_normal(3), model.observation, model.observation_cov)
        d = rng.standard_normal(3)
        x = x + d
    assert np.allclose(belief.mean[3:], H[np.triu_indices(3)], atol=0.05)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0, 0.5], [0.4, 1.0]], "symmetric"),
        ([[1.0, 2.0], [2.0, 1.0]], "eigenvalue"),
        (-1.0, "eigenvalue"),
        (float("nan"), "finite"),
        ([1.0, 2.0], "shape"),
        ("many", "numbers"),
        (np.eye(3), "2 coordinates"),
    ],
)
def test_what_is_no_covariance(value: object, message: str) -> None:
    with pytest.raises(FilterError, match=message):
        kalman.as_matrix("process_var", value, 2)


def test_an_innovation_without_noise_has_no_gain() -> None:
    with pytest.raises(FilterError, match="no gain"):
        kalman.gain(Belief(np.zeros(2), np.zeros((2, 2))), np.eye(2), np.zeros((2, 2)))
