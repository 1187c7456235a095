"""Kalman filters with full covariances as filters of a private training, for models of a few hundred weights.

They see privatised gradients and the weights' movement, which is computed from those: post-processing, at no cost of
privacy. What else they are given (covariances, a curvature) must be declared or come from public data. A curvature or
Hessian-vector product of the *private* data, without noise, is not covered by the guarantee, and there is no way to ask
for one here; `CurvatureKalman` learns the curvature from the privatised gradients instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diskdp.errors import CheckpointError, FilterError
from diskdp.filters.disk import FilterState, OnePoint
from diskdp.filters.gains import GainKind
from diskdp.filters.kalman import (
    Array,
    Belief,
    GradientNoise,
    as_matrix,
    correct,
    correct_gradient,
    predict,
    predict_gradient,
    printed_cov,
)
from diskdp.gradients import LossFunction, clipped_gradient

MAX_COORDINATES = 1000

CurvatureProduct = Callable[[Array], Array]


class FullKalman(OnePoint):
    """The filter of the paper's Algorithm 2 over privatised gradients: full P and K, input H d, random factors in C.

    - ``observation_var``: Σ_w, a number or a matrix; None takes the noise's (σS/B)² from the plan.
    - ``process_var``, ``hessian_var``: Σ_v and Σ_H, numbers or matrices: how far ∇F moves beyond H d, and how wrong H d
      is. Both add to P_{t|t-1}.
    - ``curvature``: H, a declared symmetric matrix, or a function d -> H d (`public_curvature`), which is called with
      the model at the new weights; None for a gradient that is taken to stay (process_var says how much it moves).
    - ``mean_observation``, ``factor_var``: E[C] and Σ_C (see `kalman.effective_cov`).
    - ``gain``: "least-squares", or "printed" with the paper's -Σ_H, refused unless Σ_w - Σ_H is positive definite.
    - ``initial_var``: P_{-1} of a start from 0 (the paper's is Σ_w); None starts at the first gradient, as DiSK does.

    Coordinates are those of the model's trainable parameters, in order, flattened.

    >>> filter = FullKalman(observation_var=1.0, process_var=0.5)
    >>> state = filter.start()
    >>> [round(state.update([torch.tensor([g])])[0].item(), 4) for g in (4.0, 0.0, 0.0)]
    [4.0, 1.6, 0.7619]
    """

    def __init__(
        self,
        observation_var: Any = None,
        process_var: Any = 0.0,
        curvature: Any = None,
        hessian_var: Any = 0.0,
        mean_observation: Any = 1.0,
        factor_var: Any = 0.0,
        gain: GainKind = "least-squares",
        initial_var: Any = None,
    ) -> None:
        if gain not in ("printed", "least-squares"):
            raise FilterError(f"gain={gain!r} must be 'printed' or 'least-squares'")
        self.gain: GainKind = gain
        self.curvature: Array | CurvatureProduct | None
        if curvature is None or (callable(curvature) and not isinstance(curvature, Tensor)):
            self.curvature = curvature
        else:
            self.curvature = _symmetric("curvature", _values("curvature", curvature))
        self._given = {
            "observation_var": None if observation_var is None else _values("observation_var", observation_var),
            "process_var": _values("process_var", process_var),
            "hessian_var": _values("hessian_var", hessian_var),
            "mean_observation": _values("mean_observation", mean_observation),
            "factor_var": _values("factor_var", factor_var),
            "initial_var": None if initial_var is None else _values("initial_var", initial_var),
        }

    def __repr__(self) -> str:
        """Different for different settings: checkpoints tell filters apart by it. Matrices are hashed."""
        if callable(self.curvature):
            curvature = "function"
        else:
            curvature = _shown(self.curvature)
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self._given.items())
        return f"FullKalman({given}, curvature={curvature}, gain={self.gain!r})"

    def start(self) -> FilterState:
        return _FullState(self)

    def noise(self, dimension: int, told_variance: float | None) -> GradientNoise:
        """The covariances for so many coordinates; FilterError if they do not fit, or the noise is not known."""
        given = self._given
        observation = given["observation_var"]
        if observation is None:
            if told_variance is None:
                raise FilterError("observation_var: give Σ_w, or use the filter in privatize, which tells the noise")
            observation = np.array(told_variance)
        noise = GradientNoise(
            as_matrix("observation_var", observation, dimension),
            as_matrix("process_var", given["process_var"], dimension),
            as_matrix("hessian_var", given["hessian_var"], dimension),
            self._factors(dimension),
            _square("mean_observation", given["mean_observation"], dimension),
        )
        if self.gain == "printed":
            printed_cov(noise)
        return noise

    def _factors(self, dimension: int) -> Array:
        """A number is one factor common to all coordinates: σ_C² S, which the printed product has from σ_C² I."""
        value = self._given["factor_var"]
        assert value is not None
        if value.ndim == 0 and self.gain == "least-squares":
            value = value * np.ones((dimension, dimension))
        return as_matrix("factor_var", value, dimension)

    def initial(self, dimension: int) -> Belief | None:
        value = self._given["initial_var"]
        return None if value is None else Belief(np.zeros(dimension), as_matrix("initial_var", value, dimension))


class _FullState:
    def __init__(self, filter: FullKalman) -> None:
        self._filter = filter
        self._told: float | None = None
        self._noise: GradientNoise | None = None
        self._belief: Belief | None = None
        self._input: Array | None = None  # H d of the next prediction

    def know_noise(self, variance: float) -> None:
        self._told = variance

    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        observed = _flat(gradients)
        if self._noise is None:
            self._noise = self._filter.noise(len(observed), self._told)
        noise, belief = self._noise, self._belief
        if belief is None:
            initial = self._filter.initial(len(observed))
            if initial is None:
                self._belief = _from_first(observed, noise, self._filter.gain)
            else:
                first = predict_gradient(initial, np.zeros(len(observed)), noise)
                self._belief = correct_gradient(first, observed, noise, self._filter.gain)
        else:
            step = self._input
            if step is None:
                if self._filter.curvature is not None:
                    raise _untold()
                step = np.zeros(len(observed))
            predicted = predict_gradient(belief, step, noise)
            self._belief = correct_gradient(predicted, observed, noise, self._filter.gain)
        self._input = None
        return _like(self._belief.mean, gradients)

    def moved(self, movement: list[Tensor]) -> None:
        """The optimizer moved the weights by so much."""
        curvature = self._filter.curvature
        if curvature is None:
            return
        d = _flat(movement)
        if callable(curvature):
            product = np.asarray(curvature(d), dtype=np.float64)
        else:
            if len(curvature) != len(d):
                raise FilterError(f"curvature is for {len(curvature)} coordinates, but the model has {len(d)}")
            product = curvature @ d
        if product.shape != d.shape or not np.isfinite(product).all():
            raise FilterError(f"curvature must give {len(d)} finite numbers for a movement of {len(d)} coordinates")
        self._input = product

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean": None if self._belief is None else torch.tensor(self._belief.mean),
            "covariance": None if self._belief is None else torch.tensor(self._belief.covariance),
            "input": None if self._input is None else torch.tensor(self._input),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not {"mean", "covariance", "input"} <= state.keys():
            raise CheckpointError("the checkpoint's filter state is not that of a full Kalman filter")
        mean, covariance, pending = state["mean"], state["covariance"], state["input"]
        self._belief = None if mean is None else Belief(_numbers(mean), _numbers(covariance))
        self._input = None if pending is None else _numbers(pending)
        self._noise = None


class CurvatureKalman(OnePoint):
    """A Kalman filter of gradient and curvature together, both learned from privatised gradients.

    The state is (∇F(x_t), H), moved by ∇F += H d: the appendix's third model without the symmetry of H, so that all
    rows share one covariance of (1 + d)² numbers. What finite differences of privatised gradients say about H is used
    with the weight that their noise leaves it, and what is not known of H counts as noise of the input.

    ``observation_var`` is σ_w² (None: from the plan), ``curvature_var`` the variance of an entry of H about 0 before
    anything is seen, ``process_var`` how far a coordinate of ∇F moves in a step beyond H d, ``curvature_drift`` how far
    an entry of H moves in a step. All are declared numbers.
    """

    def __init__(
        self,
        curvature_var: float,
        observation_var: float | None = None,
        process_var: float = 0.0,
        curvature_drift: float = 0.0,
    ) -> None:
        self.curvature_var = _number("curvature_var", curvature_var)
        self.observation_var = None if observation_var is None else _number("observation_var", observation_var)
        self.process_var = _number("process_var", process_var)
        self.curvature_drift = _number("curvature_drift", curvature_drift)

    def __repr__(self) -> str:
        return (
            f"CurvatureKalman(curvature_var={self.curvature_var}, observation_var={self.observation_var}, "
            f"process_var={self.process_var}, curvature_drift={self.curvature_drift})"
        )

    def start(self) -> FilterState:
        return _CurvatureState(self)


class _CurvatureState:
    """Rows (∇F_i, H_i) as one matrix [d, 1 + d], with the covariance [1 + d, 1 + d] that they share."""

    def __init__(self, filter: CurvatureKalman) -> None:
        self._filter = filter
        self._variance = filter.observation_var
        self._rows: Array | None = None
        self._covariance: Array | None = None
        self._movement: Array | None = None

    def know_noise(self, variance: float) -> None:
        if self._filter.observation_var is None:
            self._variance = variance

    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        observed = _flat(gradients)
        d, noise, settings = len(observed), self._variance, self._filter
        if noise is None:
            raise FilterError("observation_var: give σ_w², or use the filter in privatize, which tells the noise")
        if self._rows is None or self._covariance is None:
            self._rows = np.concatenate([observed[:, None], np.zeros((d, d))], axis=1)
            self._covariance = np.diag([noise, *[settings.curvature_var] * d])
        else:
            if self._movement is None:
                raise _untold()
            transition = np.eye(1 + d)
            transition[0, 1:] = self._movement
            process = np.diag([settings.process_var, *[settings.curvature_drift] * d])
            prior = predict(Belief(np.zeros(1 + d), self._covariance), transition, process)
            rows = self._rows @ transition.T
            if prior.covariance[0, 0] + noise > 0:
                first = np.eye(1, 1 + d)
                posterior = correct(prior, np.zeros(1), first, np.array([[noise]]))
                weights = prior.covariance[:, 0] / (prior.covariance[0, 0] + noise)
                rows = rows + np.outer(observed - rows[:, 0], weights)
                self._covariance = posterior.covariance
            else:
                self._covariance = prior.covariance  # nothing is unknown, and there is no noise
            self._rows = rows
        self._movement = None
        return _like(self._rows[:, 0], gradients)

    def moved(self, movement: list[Tensor]) -> None:
        """The optimizer moved the weights by so much."""
        self._movement = _flat(movement)

    def state_dict(self) -> dict[str, Any]:
        named = {"rows": self._rows, "covariance": self._covariance, "movement": self._movement}
        return {name: None if value is None else torch.tensor(value) for name, value in named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not {"rows", "covariance", "movement"} <= state.keys():
            raise CheckpointError("the checkpoint's filter state is not that of a filter that learns the curvature")
        values = {name: None if state[name] is None else _numbers(state[name]) for name in state}
        self._rows, self._covariance, self._movement = values["rows"], values["covariance"], values["movement"]


def public_curvature(
    model: nn.Module, batch: Any, loss_fn: LossFunction, gamma: float = -1.0
) -> Callable[[Array], Array]:
    """d -> (∇F(x + γd) - ∇F(x))/γ on *public* data at the model's weights, by exchanging tensors.

    γ = -1 is the change that the public gradient made along the step. ``batch`` must be public: its gradients enter
    without noise. Nothing can check that; whoever passes private records here loses the guarantee.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> half_square = lambda model, x: model(x).square().sum(1) / 2  # H is the mean of x²
    >>> public_curvature(model, torch.tensor([[1.0], [3.0]]), half_square)(np.array([2.0])).round(4).tolist()
    [10.0]
    """
    if gamma == 0 or not math.isfinite(gamma):
        raise FilterError(f"gamma={gamma} must be finite and not 0")

    def product(d: Array) -> Array:
        parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        moved = dict(zip(parameters, _like(d, list(parameters.values()))))
        ahead = {name: p + gamma * moved[name] for name, p in parameters.items()}
        points = [(1 / gamma, ahead), (-1 / gamma, None)]
        sums, norms = clipped_gradient(model, batch, loss_fn, points=points, max_norm=math.inf)
        return _flat([sums[name] for name in parameters]) / len(norms)

    return product


def _from_first(observed: Array, noise: GradientNoise, kind: GainKind) -> Belief:
    """All that is known is the first gradient: E[C] g̃_0 = g_0, and the error that its noise leaves."""
    C = noise.mean_observation
    try:
        inverse = np.linalg.inv(C)
    except np.linalg.LinAlgError as error:
        raise FilterError(
            "mean_observation has no inverse, so nothing can start at the first gradient: give initial_var"
        ) from error
    mean = inverse @ observed
    spread = noise.factors @ np.outer(mean, mean) if kind == "printed" else noise.factors * np.outer(mean, mean)
    covariance = inverse @ noise.observation @ inverse.T + (spread + spread.T) / 2
    return Belief(mean, (covariance + covariance.T) / 2)


def _untold() -> FilterError:
    return FilterError(
        "the filter was not told how the weights moved since the last gradient: call state.moved(movement) after each "
        "step of the optimizer, as privatize does"
    )


def _flat(tensors: list[Tensor]) -> Array:
    size = sum(t.numel() for t in tensors)
    if size > MAX_COORDINATES:
        raise FilterError(
            f"a full Kalman filter keeps a matrix of all coordinates squared, and the model has {size} of them, more "
            f"than {MAX_COORDINATES}: use DiSK, which is its form for large models"
        )
    return torch.cat([t.detach().reshape(-1).to("cpu", torch.float64) for t in tensors]).numpy()


def _like(values: Array, tensors: list[Tensor]) -> list[Tensor]:
    parts = torch.from_numpy(np.ascontiguousarray(values)).split([t.numel() for t in tensors])
    return [part.reshape(t.shape).to(t.device, t.dtype, copy=True) for part, t in zip(parts, tensors)]


def _numbers(tensor: Tensor) -> Array:
    return tensor.detach().cpu().double().numpy().copy()


def _values(name: str, value: Any) -> Array:
    """A private copy of a number or an array, so that a filter stays what it was made as."""
    try:
        if isinstance(value, str | bool):
            raise TypeError
        array = np.array(value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value, np.float64)
    except (TypeError, ValueError) as error:
        raise FilterError(f"{name} must be a number or a matrix of numbers") from error
    if array.ndim not in (0, 2) or not np.isfinite(array).all():
        raise FilterError(f"{name} must be a finite number or matrix")
    array.flags.writeable = False
    return array


def _square(name: str, value: Array | None, dimension: int) -> Array:
    assert value is not None
    matrix = value * np.eye(dimension) if value.ndim == 0 else value
    if matrix.shape != (dimension, dimension):
        raise FilterError(f"{name} has shape {list(matrix.shape)}, but the filter has {dimension} coordinates")
    return matrix


def _symmetric(name: str, matrix: Array) -> Array:
    """The symmetric part of a matrix that is symmetric up to rounding."""
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    if not square or not np.allclose(matrix, matrix.T, rtol=0, atol=1e-10 * float(np.abs(matrix).max(initial=0.0))):
        raise FilterError(f"{name} must be a symmetric matrix [d, d], or a function that multiplies by one")
    symmetric = (matrix + matrix.T) / 2
    symmetric.flags.writeable = False
    return symmetric


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value >= 0 and math.isfinite(value)):
        raise FilterError(f"{name}={value!r} must be a variance: a finite number, 0 or more")
    return float(value)


def _shown(value: Array | None) -> str:
    if value is None or value.ndim == 0:
        return repr(None if value is None else float(value))
    digest = hashlib.sha256(value.tobytes()).hexdigest()[:16]
    return f"[{'×'.join(map(str, value.shape))}, sha256 {digest}]"
