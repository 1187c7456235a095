"""The Kalman filter in matrix form, in float64 numpy: the reference behind DiSK, for a few hundred coordinates.

Functions on frozen states. `correct` uses Joseph's form, so covariances stay symmetric and positive however long it
runs. Nothing here knows about privacy: what may be fed to it is said in `diskdp.filters.full`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from diskdp.errors import FilterError
from diskdp.filters.gains import GainKind

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Belief:
    """What is known of a state: its mean [n] and its error's covariance [n, n]."""

    mean: Array
    covariance: Array


@dataclass(frozen=True, eq=False)
class LinearModel:
    """θ_t = A θ_{t-1} + u_t + v_t,  ψ_t = C θ_t + w_t, with covariances Q of v and R of w."""

    transition: Array
    observation: Array
    process_cov: Array
    observation_cov: Array


def predict(belief: Belief, transition: Array, process_cov: Array, known_input: Array | float = 0.0) -> Belief:
    """θ̃_{t|t-1} = A θ̃_{t-1} + u_t,  P_{t|t-1} = A P_{t-1} Aᵀ + Q.

    >>> predict(Belief(np.ones(1), np.eye(1)), np.array([[2.0]]), np.eye(1), 0.5)
    Belief(mean=array([2.5]), covariance=array([[5.]]))
    """
    mean = transition @ belief.mean + known_input
    return Belief(mean, _symmetric(transition @ belief.covariance @ transition.T + process_cov))


def gain(belief: Belief, observation: Array, observation_cov: Array) -> Array:
    """K = P Cᵀ (C P Cᵀ + R)⁻¹; FilterError unless C P Cᵀ + R is positive definite."""
    spread = _symmetric(observation @ belief.covariance @ observation.T + observation_cov)
    try:
        factor = np.linalg.cholesky(spread)
    except np.linalg.LinAlgError as error:
        raise FilterError(
            "the innovation's covariance C P Cᵀ + R is not positive definite, so there is no gain: give the "
            "observations noise, or leave out those that are sums of others"
        ) from error
    half = np.linalg.solve(factor, observation @ belief.covariance)
    return np.linalg.solve(factor.T, half).T


def correct(belief: Belief, observed: Array, observation: Array, observation_cov: Array) -> Belief:
    """θ̃_t = θ̃ + K(ψ - C θ̃),  P_t = (I - KC) P (I - KC)ᵀ + K R Kᵀ.

    >>> correct(Belief(np.zeros(1), np.eye(1)), np.ones(1), np.eye(1), np.eye(1))
    Belief(mean=array([0.5]), covariance=array([[0.5]]))
    """
    K = gain(belief, observation, observation_cov)
    left = np.eye(len(belief.mean)) - K @ observation
    mean = belief.mean + K @ (observed - observation @ belief.mean)
    return Belief(mean, _symmetric(left @ belief.covariance @ left.T + K @ observation_cov @ K.T))


def filtered(model: LinearModel, belief: Belief, observations: Array, inputs: Array | None = None) -> list[Belief]:
    """The textbook filter over observations [T, m] (and known inputs [T, n]): the belief after each of them."""
    beliefs = []
    for t, observed in enumerate(observations):
        belief = predict(belief, model.transition, model.process_cov, 0.0 if inputs is None else inputs[t])
        belief = correct(belief, observed, model.observation, model.observation_cov)
        beliefs.append(belief)
    return beliefs


@dataclass(frozen=True, eq=False)
class GradientNoise:
    """Σ_w of the observation, Σ_v of the process, Σ_H of the input H̃ d, Σ_C of the observation's factors.

    All are [d, d], and E[C] ``mean_observation`` too. `as_matrix` makes one from a number.
    """

    observation: Array
    process: Array
    hessian: Array
    factors: Array
    mean_observation: Array


def predict_gradient(belief: Belief, curvature_step: Array, noise: GradientNoise) -> Belief:
    """g̃_{t|t-1} = g̃_{t-1} + H̃_t d_{t-1},  P_{t|t-1} = P_{t-1} + Σ_H + Σ_v (the printed algorithm drops Σ_v)."""
    return Belief(belief.mean + curvature_step, _symmetric(belief.covariance + noise.hessian + noise.process))


def correct_gradient(belief: Belief, observed: Array, noise: GradientNoise, kind: GainKind = "least-squares") -> Belief:
    """The correction of the paper's Algorithm 2 from a prediction: noisy input, multiplicative observation noise.

    It is `correct` with another covariance R in the place of the observation's (`effective_cov`): the printed gain
    K = P E[C]ᵀ (E[C] P E[C]ᵀ + R)⁻¹ and the printed P_t = (I - K E[C]) P_{t|t-1} are those of an observation whose
    noise has that covariance.
    """
    return correct(belief, observed, noise.mean_observation, effective_cov(belief, noise, kind))


def effective_cov(belief: Belief, noise: GradientNoise, kind: GainKind) -> Array:
    """R of the observation ψ = C s + w given a prediction of s.

    "printed": Σ_w - Σ_H + E[C] Σ_C S E[C]ᵀ with S = g̃_{t|t-1} g̃_{t|t-1}ᵀ (the paper's S uses g̃_t, which is not known
    yet). Refused unless Σ_w - Σ_H is positive definite and the product Σ_C S symmetric, which takes a multiple of the
    identity for Σ_C (or S that commutes).

    "least-squares": Σ_w + E[C] (Σ_C ∘ E[s sᵀ]) E[C]ᵀ with E[s sᵀ] = g̃ g̃ᵀ + P_{t|t-1}: the exact covariance for
    C = E[C] diag(f), factors f of mean 1 and covariance Σ_C. One factor for all coordinates is Σ_C = σ_C² 11ᵀ.
    """
    if kind == "printed":
        base = printed_cov(noise)
        moment = np.outer(belief.mean, belief.mean)
        factors = noise.factors @ moment
        if not np.allclose(factors, factors.T, rtol=0, atol=1e-10 * float(np.abs(factors).max(initial=0.0))):
            raise FilterError(
                "Σ_C S is not symmetric, so the printed gain has no covariance that it belongs to; give a multiple of "
                "the identity for Σ_C, or use gain='least-squares'"
            )
    elif kind == "least-squares":
        base = noise.observation
        factors = noise.factors * (np.outer(belief.mean, belief.mean) + belief.covariance)
    else:
        raise FilterError(f"gain={kind!r} must be 'printed' or 'least-squares'")
    C = noise.mean_observation
    return _symmetric(base + C @ _symmetric(factors) @ C.T)


def printed_cov(noise: GradientNoise) -> Array:
    """Σ_w - Σ_H, refused unless it is positive definite."""
    difference = _symmetric(noise.observation - noise.hessian)
    if not is_positive(difference):
        raise FilterError(
            "Σ_w - Σ_H is not positive definite, so the gain as printed would drive the error's covariance negative; "
            "use gain='least-squares'"
        )
    return difference


def predict_extended(
    belief: Belief, transition: Callable[[Array], Array], jacobian: Callable[[Array], Array], process_cov: Array
) -> Belief:
    """Extended form: the mean goes through f, the covariance through f's Jacobian at the mean."""
    A = jacobian(belief.mean)
    return Belief(transition(belief.mean), _symmetric(A @ belief.covariance @ A.T + process_cov))


def correct_extended(
    belief: Belief,
    observed: Array,
    observation: Callable[[Array], Array],
    jacobian: Callable[[Array], Array],
    observation_cov: Array,
) -> Belief:
    """Extended form of `correct`: linear in the deviation from the predicted mean."""
    C = jacobian(belief.mean)
    linear = observed - observation(belief.mean) + C @ belief.mean
    return correct(belief, linear, C, observation_cov)


@dataclass(frozen=True, eq=False)
class Transformed:
    """A function of a random vector, by its mean, covariance, and covariance with the vector [n, m]."""

    mean: Array
    covariance: Array
    cross: Array


def unscented(belief: Belief, function: Callable[[Array], Array], spread: float = 3.0) -> Transformed:
    """Mean and covariances of function(θ) from 2n + 1 sigma points θ̃ ± √spread · column of P's root.

    ``spread`` = n + λ. The mean is exact for polynomials of third degree if θ is symmetric about its mean.

    >>> square = unscented(Belief(np.array([2.0]), np.array([[0.5]])), lambda x: x * x)
    >>> square.mean.round(12).tolist(), square.covariance.round(12).tolist()  # N(m, P): m² + P, 4m²P + 2P²
    ([4.5], [[8.5]])
    """
    n = len(belief.mean)
    if spread <= 0:
        raise FilterError(f"spread={spread} must be positive")
    root = np.linalg.cholesky(belief.covariance) * np.sqrt(spread)
    points = np.concatenate([belief.mean[None], belief.mean + root.T, belief.mean - root.T])
    weights = np.array([1 - n / spread, *[0.5 / spread] * (2 * n)])
    images = np.array([function(point) for point in points])
    mean = weights @ images
    from_mean = images - mean
    return Transformed(
        mean,
        _symmetric((weights[:, None] * from_mean).T @ from_mean),
        (weights[:, None] * (points - belief.mean)).T @ from_mean,
    )


def predict_unscented(
    belief: Belief, transition: Callable[[Array], Array], process_cov: Array, spread: float = 3.0
) -> Belief:
    """Unscented form of `predict`."""
    moved = unscented(belief, transition, spread)
    return Belief(moved.mean, moved.covariance + process_cov)


def correct_unscented(
    belief: Belief,
    observed: Array,
    observation: Callable[[Array], Array],
    observation_cov: Array,
    spread: float = 3.0,
) -> Belief:
    """Unscented form of `correct`."""
    seen = unscented(belief, observation, spread)
    K = np.linalg.solve(seen.covariance + observation_cov, seen.cross.T).T
    covariance = belief.covariance - K @ (seen.covariance + observation_cov) @ K.T
    return Belief(belief.mean + K @ (observed - seen.mean), _symmetric(covariance))


def variable_and_gradient(dimension: int, learning_rate: float, noise_cov: Array) -> LinearModel:
    """The appendix's first model: state (x_t, ∇F(x_t)), the gradient taken as constant, x observed without noise.

    >>> variable_and_gradient(1, 0.1, np.eye(1)).transition.tolist()
    [[1.0, -0.1], [0.0, 1.0]]
    """
    eye, zero = np.eye(dimension), np.zeros((dimension, dimension))
    process = np.block([[learning_rate**2 * noise_cov, zero], [zero, zero]])
    transition = np.block([[eye, -learning_rate * eye], [zero, eye]])
    return LinearModel(transition, np.block([eye, zero]), process, zero)


def variable_and_gradient_with_curvature(curvature: Array, learning_rate: float, noise_cov: Array) -> LinearModel:
    """The appendix's second model: state (x_t, x_{t-1}, ∇F(x_{t-1})), the gradient moved by a known curvature H."""
    H, eye, zero = curvature, np.eye(len(curvature)), np.zeros_like(curvature)
    transition = np.block(
        [[eye - learning_rate * H, learning_rate * H, -learning_rate * eye], [eye, zero, zero], [H, -H, eye]]
    )
    process = np.zeros_like(transition)
    process[: len(H), : len(H)] = learning_rate**2 * noise_cov
    return LinearModel(transition, np.block([eye, zero, zero]), process, zero)


def gradient_and_curvature(movement: Array, noise_cov: Array) -> LinearModel:
    """The appendix's third model at one step: state (∇F(x_t), h), h the curvature's upper triangle row by row.

    The transition adds H d for the movement d = x_{t+1} - x_t; H stays. h has d(d+1)/2 entries (printed as d(d-1)/2).

    >>> gradient_and_curvature(np.array([1.0, 2.0]), np.eye(2)).transition[:2, 2:].tolist()
    [[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
    """
    d = len(movement)
    rows, columns = np.triu_indices(d)
    entries = len(rows)
    spread = np.zeros((d, entries))
    spread[rows, np.arange(entries)] += movement[columns]
    below = rows != columns
    spread[columns[below], np.arange(entries)[below]] += movement[rows[below]]
    transition = np.block([[np.eye(d), spread], [np.zeros((entries, d)), np.eye(entries)]])
    observation = np.block([np.eye(d), np.zeros((d, entries))])
    return LinearModel(transition, observation, np.zeros_like(transition), noise_cov)


def as_matrix(name: str, value: Any, dimension: int) -> Array:
    """A float64 covariance [d, d] from a number (times the identity) or a matrix; FilterError unless it is one.

    >>> as_matrix("process_var", 2, 2).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FilterError(f"{name} must be a number or a matrix of numbers") from error
    if matrix.ndim == 0:
        matrix = matrix * np.eye(dimension)
    if matrix.shape != (dimension, dimension):
        raise FilterError(f"{name} has shape {list(matrix.shape)}, but the filter has {dimension} coordinates")
    if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T, rtol=1e-10, atol=0):
        raise FilterError(f"{name} must be finite and symmetric")
    lowest = float(np.linalg.eigvalsh(matrix)[0]) if dimension else 0.0
    if lowest < -1e-12 * float(np.abs(matrix).max(initial=0.0)):
        raise FilterError(f"{name} has the eigenvalue {lowest:.3g}: a covariance has none below 0")
    return _symmetric(matrix)


def is_positive(matrix: Array) -> bool:
    """Whether a symmetric matrix is positive definite."""
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return True


def _symmetric(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2
