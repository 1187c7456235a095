"""Full Kalman filters as filter values: against plain numpy on linear systems, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diskdp import DiSK
from diskdp.errors import CheckpointError, FilterError
from diskdp.filters import (
    CurvatureKalman,
    Filter,
    FullKalman,
    KalmanGain,
    due_coefficients,
    kalman,
    public_curvature,
    started,
)
from diskdp.filters.kalman import Array, Belief, LinearModel
from diskdp.filters.states import FollowsWeights


def covariance(rng: np.random.Generator, n: int, scale: float) -> Array:
    root = rng.standard_normal((n, n))
    return scale * (root @ root.T / n + 0.1 * np.eye(n))


def run(
    filter: Filter, gradients: Array, movements: Array, told: float = 1.0, shapes: tuple[tuple[int, ...], ...] = ()
) -> Array:
    """What the filter makes of gradients [T, d], the weights moving by [T, d] after each."""
    state = started(filter, told)
    shapes = shapes or ((gradients.shape[1],),)
    sizes = [int(np.prod(shape)) for shape in shapes]

    def parts(row: Array) -> list[Tensor]:
        return [part.reshape(shape) for part, shape in zip(torch.tensor(row).split(sizes), shapes)]

    found = []
    for gradient, movement in zip(gradients, movements):
        found.append(np.concatenate([g.numpy().reshape(-1) for g in state.update(parts(gradient))]))
        assert isinstance(state, FollowsWeights)
        state.moved(parts(movement))
    return np.array(found)


def plain(
    gradients: Array, inputs: Array, Q: Array, R: Array, C: Array, mean: Array, P: Array, first: bool = False
) -> Array:
    """The textbook's five lines with explicit inverses; ``inputs[t]`` moves the state before gradient t."""
    found = []
    for t, (psi, u) in enumerate(zip(gradients, inputs)):
        if not (first and t == 0):
            mean, P = mean + u, P + Q
            K = P @ C.T @ np.linalg.inv(C @ P @ C.T + R)
            mean, P = mean + K @ (psi - C @ mean), (np.eye(len(P)) - K @ C) @ P
        found.append(mean)
    return np.array(found)


def linear_problem(seed: int, d: int = 6, steps: int = 40, deviation: float = 0.5) -> tuple[Array, Array, Array]:
    """Noisy gradients of a quadratic along a course, the course's steps, and the curvature."""
    rng = np.random.default_rng(seed)
    H = covariance(rng, d, 1.0)
    x = rng.standard_normal(d)
    gradients, movements = [], []
    for _ in range(steps):
        gradients.append(H @ x + deviation * rng.standard_normal(d))
        movements.append(0.2 * rng.standard_normal(d))
        x = x + movements[-1]
    return np.array(gradients), np.array(movements), H


def inputs_of(movements: Array, H: Array) -> Array:
    return np.concatenate([np.zeros((1, len(H))), movements[:-1] @ H])


def test_against_the_plain_filter_from_the_papers_start() -> None:
    gradients, movements, H = linear_problem(0)
    rng = np.random.default_rng(1)
    Q, S, R, P = (covariance(rng, 6, scale) for scale in (0.1, 0.05, 1.0, 2.0))
    C = rng.standard_normal((6, 6))
    filter = FullKalman(R, Q, curvature=H, hessian_var=S, mean_observation=C, initial_var=P)
    exact = plain(gradients, inputs_of(movements, H), Q + S, R, C, np.zeros(6), P)
    found = run(filter, gradients, movements, shapes=((2, 2), (), (1,)))
    assert np.allclose(found, exact, rtol=1e-9, atol=1e-9)


def test_against_the_plain_filter_from_the_first_gradient() -> None:
    gradients, movements, H = linear_problem(2)
    rng = np.random.default_rng(3)
    Q, R = covariance(rng, 6, 0.1), covariance(rng, 6, 1.0)
    C = rng.standard_normal((6, 6))
    inverse = np.linalg.inv(C)
    exact = plain(
        gradients, inputs_of(movements, H), Q, R, C, inverse @ gradients[0], inverse @ R @ inverse.T, first=True
    )
    filter = FullKalman(R, torch.tensor(Q), curvature=H.tolist(), mean_observation=C)
    assert np.allclose(run(filter, gradients, movements), exact, rtol=1e-8, atol=1e-8)
    wide = FullKalman(R, Q, curvature=H, mean_observation=C, initial_var=1e9)  # nothing known before the first
    assert np.allclose(run(wide, gradients, movements), exact, rtol=0, atol=1e-5)


def test_the_printed_gain_is_the_plain_filter_with_less_noise() -> None:
    gradients, movements, H = linear_problem(4)
    eye = np.eye(6)
    filter = FullKalman(1.0, 0.05, curvature=H, hessian_var=0.3, gain="printed", initial_var=1.0)
    exact = plain(gradients, inputs_of(movements, H), 0.35 * eye, 0.7 * eye, eye, np.zeros(6), eye)
    assert np.allclose(run(filter, gradients, movements), exact, rtol=1e-9, atol=1e-9)
    with pytest.raises(FilterError, match="not positive definite"):
        run(FullKalman(1.0, hessian_var=1.5, gain="printed"), gradients, movements)


def test_with_equal_variances_and_no_curvature_it_is_disks_average_at_the_kalman_gain() -> None:
    gradients, movements, _ = linear_problem(5)
    full = run(FullKalman(0.8, 0.1), gradients, movements)
    state = DiSK(gamma=None, gain=KalmanGain(0.8, 0.0, 0.1)).start()
    average = np.array([state.update([torch.tensor(g)])[0].numpy().copy() for g in gradients])
    assert np.allclose(full, average, rtol=1e-10, atol=1e-12)


def test_random_factors_are_those_of_the_matrix_form() -> None:
    gradients, movements, H = linear_problem(6)
    for kind, factors in (("least-squares", 0.4 * np.ones((6, 6))), ("printed", 0.4 * np.eye(6))):
        noise = kalman.GradientNoise(np.eye(6), 0.1 * np.eye(6), 0.05 * np.eye(6), factors, 0.9 * np.eye(6))
        belief, exact = Belief(np.zeros(6), np.eye(6)), []
        for g, u in zip(gradients, inputs_of(movements, H)):
            belief = kalman.correct_gradient(kalman.predict_gradient(belief, u, noise), g, noise, kind)  # type: ignore[arg-type]
            exact.append(belief.mean)
        filter = FullKalman(1.0, 0.1, H, 0.05, 0.9, 0.4, gain=kind, initial_var=1.0)  # type: ignore[arg-type]
        assert np.allclose(run(filter, gradients, movements), np.array(exact), rtol=1e-12)


def test_learning_the_curvature_is_the_textbook_filter_of_gradient_and_rows() -> None:
    """State (∇F, all entries of H), with its full covariance and transition: d + d² coordinates."""
    gradients, movements, _ = linear_problem(7, d=3, steps=15)
    d, w, v, prior, drift = 3, 0.25, 0.01, 2.0, 0.003
    eye = np.eye(d)
    belief = Belief(np.concatenate([gradients[0], np.zeros(9)]), np.diag([w] * 3 + [prior] * 9))
    exact = [gradients[0]]
    for g, movement in zip(gradients[1:], movements):
        transition = np.block([[eye, np.kron(eye, movement[None])], [np.zeros((9, 3)), np.eye(9)]])
        model = LinearModel(transition, np.eye(3, 12), np.diag([v] * 3 + [drift] * 9), w * eye)
        [belief] = kalman.filtered(model, belief, g[None])
        exact.append(belief.mean[:3])
    filter = CurvatureKalman(prior, w, v, drift)
    assert np.allclose(run(filter, gradients, movements), np.array(exact), rtol=1e-9, atol=1e-9)


def test_a_learned_curvature_comes_near_the_known_one() -> None:
    """Late errors of the gradient along a random course, as shares of the noise: known < learned < none used."""
    gradients, movements, H = linear_problem(8, d=5, steps=600)
    truth = linear_problem(8, d=5, steps=600, deviation=0.0)[0]
    drift = float(np.square(movements @ H).mean())
    filters: dict[str, Filter] = {
        "known": FullKalman(0.25, 1e-6, curvature=H),
        "learned": CurvatureKalman(1.0, 0.25),
        "none": FullKalman(0.25, drift),
    }
    error = {
        name: float(np.square(run(f, gradients, movements) - truth)[300:].mean()) / 0.25 for name, f in filters.items()
    }
    assert error["known"] < 0.05
    assert error["known"] < error["learned"] < 0.2
    assert 2 * error["learned"] < error["none"] < 1


def test_the_noise_is_told_unless_it_is_given() -> None:
    gradients, movements, H = linear_problem(9)
    for told, given in (
        (FullKalman(None, 0.1, H), FullKalman(0.5, 0.1, H)),
        (CurvatureKalman(1.0), CurvatureKalman(1.0, 0.5)),
    ):
        assert np.array_equal(run(told, gradients, movements, told=0.5), run(given, gradients, movements, told=7.0))
        with pytest.raises(FilterError, match="observation_var"):
            told.start().update([torch.ones(6)])


@pytest.mark.parametrize("make", [lambda H: FullKalman(0.5, 0.1, H), lambda H: CurvatureKalman(1.0, 0.5)])
def test_the_movement_must_be_told(make: Callable[[Array], Filter]) -> None:
    gradients, _, H = linear_problem(10)
    state = make(H).start()
    state.update([torch.tensor(gradients[0])])
    with pytest.raises(FilterError, match="moved"):
        state.update([torch.tensor(gradients[1])])


@pytest.mark.parametrize("make", [lambda H: FullKalman(0.5, 0.1, H), lambda H: CurvatureKalman(1.0, 0.5)])
def test_states_go_on(make: Callable[[Array], Filter]) -> None:
    gradients, movements, H = linear_problem(11)
    filter = make(H)
    whole = run(filter, gradients, movements)
    state: Any = filter.start()
    for g, m in zip(gradients[:20], movements):
        state.update([torch.tensor(g)])
        state.moved([torch.tensor(m)])
    resumed: Any = filter.start()
    resumed.load_state_dict(copy.deepcopy(state.state_dict()))
    found = []
    for g, m in zip(gradients[20:], movements[20:]):
        found.append(resumed.update([torch.tensor(g)])[0].numpy())
        resumed.moved([torch.tensor(m)])
    assert np.array_equal(np.array(found), whole[20:])
    with pytest.raises(CheckpointError):
        resumed.load_state_dict(DiSK().start().state_dict())
    fresh = filter.start()
    fresh.load_state_dict(filter.start().state_dict())
    assert np.array_equal(fresh.update([torch.tensor(gradients[0])])[0].numpy(), whole[0])


def test_gradients_keep_their_type_and_shape_and_are_not_written_to() -> None:
    gradients = [torch.ones(2, 3), torch.zeros((), dtype=torch.float64)]
    held = [g.clone() for g in gradients]
    found = FullKalman(1.0, 0.1).start().update(gradients)
    assert [(g.shape, g.dtype) for g in found] == [(g.shape, g.dtype) for g in gradients]
    assert all(torch.equal(a, b) for a, b in zip(gradients, held))
    assert due_coefficients(FullKalman(1.0), FullKalman(1.0).start()) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullKalman(1.0, gain="best"), "least-squares"),  # type: ignore[arg-type]
        (lambda: FullKalman(1.0, curvature=[[1.0, 2.0], [0.0, 1.0]]), "symmetric matrix"),
        (lambda: FullKalman(1.0, curvature=2.0), "symmetric matrix"),
        (lambda: FullKalman("1"), "observation_var"),
        (lambda: FullKalman([1.0, 2.0]), "observation_var"),
        (lambda: FullKalman(float("nan")), "observation_var"),
        (lambda: FullKalman(1.0, process_var=True), "process_var"),
        (lambda: CurvatureKalman(-1.0), "curvature_var"),
        (lambda: CurvatureKalman(1.0, process_var=float("inf")), "process_var"),
    ],
)
def test_bad_settings(make: Callable[[], Filter], message: str) -> None:
    with pytest.raises(FilterError, match=message):
        make()


def test_what_does_not_fit_the_model() -> None:
    with pytest.raises(FilterError, match="more than 1000"):
        FullKalman(1.0).start().update([torch.zeros(1001)])
    with pytest.raises(FilterError, match="process_var has shape"):
        FullKalman(1.0, np.eye(3)).start().update([torch.zeros(2)])
    with pytest.raises(FilterError, match="mean_observation has shape"):
        FullKalman(1.0, mean_observation=np.eye(3)).start().update([torch.zeros(2)])
    with pytest.raises(FilterError, match="no inverse"):
        FullKalman(1.0, mean_observation=np.zeros((2, 2))).start().update([torch.zeros(2)])
    state: Any = FullKalman(1.0, curvature=np.eye(3)).start()
    with pytest.raises(FilterError, match="3 coordinates"):
        state.moved([torch.zeros(2)])
    state = FullKalman(1.0, curvature=lambda d: d * np.nan).start()
    with pytest.raises(FilterError, match="finite numbers"):
        state.moved([torch.ones(2)])


def test_filters_are_told_apart_by_their_repr() -> None:
    H = np.eye(2)
    made = [FullKalman(1.0), FullKalman(1.0, 0.1), FullKalman(1.0, curvature=H), FullKalman(1.0, curvature=2 * H)]
    made += [FullKalman(H), FullKalman(1.0, curvature=lambda d: d), FullKalman(1.0, gain="printed")]
    assert len({repr(f) for f in made}) == len(made)
    H[0, 0] = 5.0  # the filter has a copy
    assert repr(made[2]) == repr(FullKalman(1.0, curvature=np.eye(2)))


def logistic(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1], reduction="none")


@pytest.mark.parametrize(("gamma", "tolerance"), [(1e-5, 1e-4), (-1.0, 0.2)])
def test_a_public_curvature_is_the_hessian_of_the_public_loss(gamma: float, tolerance: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1)).double()
    batch = (torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 2, (30,)).double())
    before = [p.detach().clone() for p in model.parameters()]
    inputs = torch.cat([batch[0], torch.ones(30, 1, dtype=torch.float64)], dim=1)
    chance = model(batch[0]).sigmoid()
    H = (inputs.T @ (inputs * chance * (1 - chance)) / 30).detach().numpy()
    d = 0.3 * np.random.default_rng(0).standard_normal(5)
    found = public_curvature(model, batch, logistic, gamma)(d)
    assert np.allclose(found, H @ d, rtol=0, atol=tolerance * np.abs(H @ d).max())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    with pytest.raises(FilterError, match="gamma"):
        public_curvature(model, batch, logistic, gamma=0.0)
