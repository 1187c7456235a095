"""Gains κ_t that change from step to step, fixed before a step from what was released in the steps before it.

A gain is a frozen value; `start` makes its state, which knows the κ of the step that is due. `VaryingAverage` is the
filter state that runs on one, and offers the weights of the two points that go with the due κ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from diskdp.errors import CheckpointError, FilterError
from diskdp.filters.gains import GainKind, recursion, steady_state

_OUTLIER = 10.0  # times what is expected: an innovation counts no more than that


class GainState(Protocol):
    """Where a gain stands before a step."""

    @property
    def kappa(self) -> float:
        """κ of the step that is due."""
        ...

    @property
    def measures(self) -> bool:
        """Whether `advance` needs the mean square of the due step's innovation."""
        ...

    @property
    def backward(self) -> bool:
        """Whether the due step observes the gradient at x_{t-1}, c = -1/γ, in order to measure."""
        ...

    def advance(self, innovation: float | None) -> None:
        """A step was taken, with this mean square of g_t - g̃_{t-1} (None at the first, and where it is not needed)."""
        ...

    def numbers(self) -> dict[str, float]: ...

    def restore(self, numbers: Mapping[str, float]) -> None: ...


class Gain(Protocol):
    """A gain that varies, as a value."""

    def start(self, kappa: float, gamma: float | None) -> GainState: ...


@dataclass(frozen=True)
class KalmanGain:
    """k_t of `gains.recursion`, from declared variances in any common unit; p_0 = σ_w², since g̃_0 = g_0.

    >>> state = KalmanGain(observation_var=1.0, hessian_var=0.1, process_var=0.05).start(0.7, 0.5)
    >>> for _ in range(60): state.advance(None)
    >>> round(state.kappa, 6)
    0.333333
    """

    observation_var: float
    hessian_var: float
    process_var: float
    kind: GainKind = "printed"

    def __post_init__(self) -> None:
        if self.steady == 0:
            raise FilterError(
                "hessian_var and process_var are both 0, so the gain falls to 0 and new gradients stop counting; "
                "give one of them a variance"
            )

    @property
    def steady(self) -> float:
        """k_∞."""
        return steady_state(self.observation_var, self.hessian_var, self.process_var, self.kind).gain

    def start(self, kappa: float, gamma: float | None) -> GainState:
        return _KalmanState(self)


@dataclass(frozen=True, repr=False)
class GainSchedule:
    """κ of each step, declared beforehand; the last one holds from there on. κ of step 0 is without effect.

    >>> GainSchedule.geometric(first=0.8, last=0.1, steps=4).values
    (0.8, 0.4, 0.2, 0.1)
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        except (TypeError, ValueError) as error:
            raise FilterError(f"values={self.values!r} must be a list of numbers, κ of each step") from error
        if not self.values or not all(0 < v <= 1 for v in self.values):
            raise FilterError("values: every κ must lie in (0, 1], and there must be at least one")

    def __repr__(self) -> str:
        """Short, and different for different schedules: checkpoints tell filters apart by it."""
        if len(self.values) <= 8:
            return f"GainSchedule(values={self.values})"
        digest = hashlib.sha256(repr(self.values).encode()).hexdigest()[:16]
        return f"GainSchedule({len(self.values)} values, sha256 {digest})"

    @classmethod
    def linear(cls, first: float, last: float, steps: int) -> GainSchedule:
        """From ``first`` to ``last`` in equal differences."""
        return cls(tuple(first + (last - first) * u for u in _fractions(steps)))

    @classmethod
    def geometric(cls, first: float, last: float, steps: int) -> GainSchedule:
        """From ``first`` to ``last`` in equal ratios."""
        if not (first > 0 and last > 0):
            raise FilterError(f"first={first}, last={last} must lie in (0, 1]")
        return cls(tuple(float(f"{first * (last / first) ** u:.15g}") for u in _fractions(steps)))

    @classmethod
    def cosine(cls, first: float, last: float, steps: int) -> GainSchedule:
        """From ``first`` to ``last`` along half a cosine."""
        return cls(tuple(last + (first - last) * 0.5 * (1 + math.cos(math.pi * u)) for u in _fractions(steps)))

    def start(self, kappa: float, gamma: float | None) -> GainState:
        return _ScheduleState(self.values)


@dataclass(frozen=True)
class AdaptiveGain:
    """κ_t from the innovations g_t - g̃_{t-1} of released gradients and the known variance σ_w² of their noise.

    An innovation's mean square is σ_w² + p_{t-1} + q where q is the process variance; what it has beyond σ_w² + p_{t-1}
    is averaged (weights falling by ``memory`` from one measurement to the one before it) to estimate q, and κ is the
    least-squares gain (p + q)/(p + q + σ_w²), kept within [``smallest``, 1]. An innovation counts at most as ten times
    what was expected. With two points the usual g_t holds H d/κ, which would count as process noise: every
    ``measure_every`` steps c is -1/γ instead, so that g_t observes the gradient at x_{t-1}, which g̃_{t-1} estimates.

    ``largest_weight`` bounds |c| in the other steps, and so κ, which is then at least 1/(1 + ``largest_weight`` |γ|): a
    vector of two gradients with large weights of opposite signs is mostly their difference, and clipping leaves little
    of the gradient. Where nothing is clipped, math.inf lets κ go to ``smallest``.

    ``noise_var`` is the variance of one coordinate's noise, (σS/B)²; None takes it from the plan. Sampling noise that
    is not declared in it counts as process noise, so κ comes out larger than it need be.
    """

    noise_var: float | None = None
    smallest: float = 0.03
    memory: float = 0.9
    measure_every: int = 10
    largest_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("noise_var", "smallest", "memory", "largest_weight"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, Real) or (name == "noise_var" and value is None)):
                raise FilterError(f"{name}={value!r} must be a number")
        if self.noise_var is not None:
            _check_noise(self.noise_var)
        if not 0 < self.smallest <= 1:
            raise FilterError(f"smallest={self.smallest} is the least κ: it must lie in (0, 1]")
        if not 0 <= self.memory < 1:
            raise FilterError(f"memory={self.memory} must lie in [0, 1)")
        if not self.largest_weight > 0:
            raise FilterError(f"largest_weight={self.largest_weight} bounds |c|: it must be positive")
        if isinstance(self.measure_every, bool) or not isinstance(self.measure_every, int) or self.measure_every < 2:
            raise FilterError(f"measure_every={self.measure_every!r} must be a whole number, 2 or more")

    def start(self, kappa: float, gamma: float | None) -> GainState:
        return _AdaptiveState(self, kappa, gamma)


class VaryingAverage:
    """g̃_t = (1-κ_t) g̃_{t-1} + κ_t g_t from g̃_{-1} = g_0, with the weights of the points for the due κ_t."""

    def __init__(self, gain: GainState, gamma: float | None, c: float | None) -> None:
        self._gain, self._gamma, self._c = gain, gamma, c
        self._filtered: list[Tensor] | None = None

    @property
    def kappa(self) -> float:
        """κ of the step that is due."""
        return self._gain.kappa

    @property
    def coefficients(self) -> tuple[float, float]:
        """Weights (1-c, c) of the two points in the step that is due."""
        if self._gamma is None:
            return 1.0, 0.0
        if self._c is not None:
            return 1.0 - self._c, self._c
        c = -1 / self._gamma if self._gain.backward else weight_ahead(self._gain.kappa, self._gamma)
        if not math.isfinite(c):
            raise FilterError(
                f"kappa={self._gain.kappa}, gamma={self._gamma}: c = (1-κ)/(κγ) is not finite; "
                "choose a larger kappa or gamma"
            )
        return point_weights(c)

    def know_noise(self, variance: float) -> None:
        """The variance of the noise on a coordinate of the gradients, for gains that estimate."""
        if isinstance(self._gain, _AdaptiveState):
            self._gain.know_noise(variance)

    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        kappa = self._gain.kappa
        if self._filtered is None:
            self._filtered = [g.clone() for g in gradients]
            self._gain.advance(None)
        else:
            innovation = _mean_square_difference(gradients, self._filtered) if self._gain.measures else None
            torch._foreach_lerp_(self._filtered, gradients, kappa)
            self._gain.advance(innovation)
        return self._filtered

    def state_dict(self) -> dict[str, Any]:
        filtered = None if self._filtered is None else [g.clone() for g in self._filtered]
        return {"filtered": filtered, "gain": self._gain.numbers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "filtered" not in state or "gain" not in state or state["gain"].keys() != self._gain.numbers().keys():
            raise CheckpointError("the checkpoint's filter state is not that of an average with this gain")
        filtered = state["filtered"]
        self._filtered = None if filtered is None else [g.clone() for g in filtered]
        self._gain.restore(state["gain"])


def weight_ahead(kappa: float, gamma: float) -> float:
    """c = (1-κ)/(κγ).

    >>> weight_ahead(0.5, 0.5)
    2.0
    """
    return (1 - kappa) / kappa / gamma


def point_weights(c: float) -> tuple[float, float]:
    """(1-c, c), one of them exactly 0 where c is 1 up to rounding: γ = (1-κ)/κ, the look-ahead point alone."""
    if abs(c - 1) < 1e-12:
        c = 1.0
    return 1.0 - c, c


class _KalmanState:
    measures = backward = False

    def __init__(self, gain: KalmanGain) -> None:
        self._gain = gain
        self._variance = gain.observation_var
        self._started = False

    @property
    def kappa(self) -> float:
        return self._next()[1] if self._started else 1.0

    def advance(self, innovation: float | None) -> None:
        if self._started:
            self._variance = self._next()[0]
        self._started = True

    def _next(self) -> tuple[float, float]:
        g = self._gain
        p, k = recursion(g.observation_var, g.hessian_var, g.process_var, 1, self._variance, g.kind)
        return float(p[0]), float(k[0])

    def numbers(self) -> dict[str, float]:
        return {"variance": self._variance, "started": float(self._started)}

    def restore(self, numbers: Mapping[str, float]) -> None:
        self._variance, self._started = float(numbers["variance"]), bool(numbers["started"])


class _ScheduleState:
    measures = backward = False

    def __init__(self, values: tuple[float, ...]) -> None:
        self._values = values
        self._step = 0

    @property
    def kappa(self) -> float:
        return self._values[min(self._step, len(self._values) - 1)]

    def advance(self, innovation: float | None) -> None:
        self._step += 1

    def numbers(self) -> dict[str, float]:
        return {"scheduled": self._step}

    def restore(self, numbers: Mapping[str, float]) -> None:
        self._step = int(numbers["scheduled"])


class _AdaptiveState:
    def __init__(self, gain: AdaptiveGain, kappa: float, gamma: float | None) -> None:
        self._settings = gain
        self._two_points = gamma is not None
        bounded = 0.0 if gamma is None else 1 / (1 + gain.largest_weight * abs(gamma))  # |c| = (1-κ)/(κ|γ|)
        self._smallest = max(gain.smallest, bounded)
        self._kappa = max(kappa, self._smallest)
        self._noise = gain.noise_var
        self._variance = 0.0  # p, of g̃
        self._excess = 0.0  # weighted sum of what innovations have beyond σ_w² + p
        self._weight = 0.0
        self._step = 0

    @property
    def kappa(self) -> float:
        return self._kappa

    @property
    def measures(self) -> bool:
        return self._step > 0 and (not self._two_points or (self._step - 1) % self._settings.measure_every == 0)

    @property
    def backward(self) -> bool:
        return self._two_points and self.measures

    def know_noise(self, variance: float) -> None:
        if self._settings.noise_var is None:
            _check_noise(variance)
            self._noise = variance

    def advance(self, innovation: float | None) -> None:
        noise = self._noise
        if noise is None:
            raise FilterError(
                "AdaptiveGain does not know the variance of the noise: give it noise_var=(σS/B)², "
                "or use it in privatize, which tells it"
            )
        if self._step == 0:
            self._variance = noise
        else:
            if innovation is not None:
                expected = noise + self._variance + self._drift
                memory = self._settings.memory
                excess = min(innovation, _OUTLIER * expected) - noise - self._variance
                self._excess = memory * self._excess + excess
                self._weight = memory * self._weight + 1
            predicted = self._variance + self._drift
            self._variance = (1 - self._kappa) ** 2 * predicted + self._kappa**2 * noise
        self._step += 1
        if self._weight:
            predicted = self._variance + self._drift
            best = predicted / (predicted + noise) if noise else 1.0
            self._kappa = min(1.0, max(self._smallest, best))

    @property
    def _drift(self) -> float:
        return max(0.0, self._excess / self._weight) if self._weight else 0.0

    def numbers(self) -> dict[str, float]:
        return {
            "kappa": self._kappa,
            "variance": self._variance,
            "excess": self._excess,
            "weight": self._weight,
            "steps": self._step,
            "noise": -1.0 if self._noise is None else self._noise,
        }

    def restore(self, numbers: Mapping[str, float]) -> None:
        self._kappa, self._variance = float(numbers["kappa"]), float(numbers["variance"])
        self._excess, self._weight = float(numbers["excess"]), float(numbers["weight"])
        self._step = int(numbers["steps"])
        self._noise = None if numbers["noise"] < 0 else float(numbers["noise"])


def _mean_square_difference(left: list[Tensor], right: list[Tensor]) -> float:
    coordinates = sum(g.numel() for g in left)
    if not coordinates:
        return 0.0
    # a subtraction, and a norm in float64: squares of small float32 gradients would underflow
    return sum((a - b).double().square().sum().item() for a, b in zip(left, right)) / coordinates


def _check_noise(variance: float) -> None:
    if not (variance >= 0 and math.isfinite(variance)):
        raise FilterError(f"noise_var={variance} must be a finite variance, 0 or more")


def _fractions(steps: int) -> list[float]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise FilterError(f"steps={steps!r} must be a whole number, 2 or more")
    return [t / (steps - 1) for t in range(steps)]
