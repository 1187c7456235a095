"""DiSK's filter and its special cases, as values; `start` makes the running state.

A filter says at which points the gradient is wanted (`points`) and turns privatised gradients into the ones that the
optimizer sees. It never looks at anything that has not been privatised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from diskdp.errors import CheckpointError, FilterError
from diskdp.filters.varying import AdaptiveGain, Gain, VaryingAverage, point_weights, weight_ahead

Tensors: TypeAlias = "list[Tensor]"


class FilterState(Protocol):
    """Running state of a filter over a fixed list of tensors."""

    def update(self, gradients: Tensors) -> Tensors:
        """The filtered gradients, which may be the state's own and must not be written to.

        ``gradients`` belong to the caller again afterwards: a state that needs them keeps a copy.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Filter(Protocol):
    """What `private.step` needs to know of a filter."""

    @property
    def coefficients(self) -> tuple[float, float]:
        """Weights (1-c, c) of the gradients at x_t and at the look-ahead point."""
        ...

    @property
    def lookahead(self) -> float | None:
        """γ of the look-ahead point x_t + γ (x_t - x_{t-1}), or None if it is never used."""
        ...

    @property
    def clip(self) -> Literal["joint", "separate"]: ...

    def start(self) -> FilterState: ...


@dataclass(frozen=True, repr=False)
class DiSK:
    """The simplified Kalman filter: u = (1-c) ∇f(x_t) + c ∇f(x_t + γ d_{t-1}), g̃_t = (1-κ) g̃_{t-1} + κ g_t.

    c = (1-κ)/(κγ) unless ``c`` is given. γ = None leaves out the second point (a first-order low-pass filter), κ = 1
    is the base optimizer. ``clip="joint"`` clips u_i once; "separate" clips each point's gradient by itself and
    multiplies the sensitivity by |c| + |1-c|.

    ``gain`` makes κ, and c with it, change from step to step (`KalmanGain`, `GainSchedule`, `AdaptiveGain`, or
    "adaptive" for its defaults): the state then has the coefficients of the step that is due, from what was released
    before it, and those here only say that there are two points. It takes joint clipping, whose sensitivity is the same
    whatever c is. ``kappa`` is then where "adaptive" begins, and has no meaning with the others.

    >>> DiSK(kappa=0.5, gamma=1.0).coefficients
    (0.0, 1.0)
    >>> DiSK(gain="adaptive")
    DiSK(kappa=0.7, gamma=0.5, clip='joint', c=None, gain='adaptive')
    """

    kappa: float = 0.7
    gamma: float | None = 0.5
    clip: Literal["joint", "separate"] = "joint"
    c: float | None = None
    gain: Literal["constant", "adaptive"] | Gain = "constant"

    def __repr__(self) -> str:
        gain = "" if self.gain == "constant" else f", gain={self.gain!r}"
        return f"DiSK(kappa={self.kappa}, gamma={self.gamma}, clip={self.clip!r}, c={self.c}{gain})"

    def __post_init__(self) -> None:
        for name in ("kappa", "gamma", "c"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real | None):
                raise FilterError(f"{name}={value!r} must be a number")
        if not 0 < self.kappa <= 1:
            raise FilterError(f"kappa={self.kappa} must lie in (0, 1]; 1 means no filtering")
        if self.gamma is not None and (self.gamma == 0 or not math.isfinite(self.gamma)):
            raise FilterError(f"gamma={self.gamma} must be finite and not 0; gamma=None leaves out the second point")
        if self.clip not in ("joint", "separate"):
            raise FilterError(f"clip={self.clip!r} must be 'joint' or 'separate'")
        if self.c is not None and (self.gamma is None or not math.isfinite(self.c)):
            raise FilterError(f"c={self.c} weighs the look-ahead point: it must be finite, and gamma must be given")
        if not all(math.isfinite(a) for a in self.coefficients):
            raise FilterError(
                f"kappa={self.kappa}, gamma={self.gamma}: c = (1-κ)/(κγ) is not finite; choose a larger kappa or gamma"
            )
        if self.gain != "constant":
            self._check_gain()

    def _check_gain(self) -> None:
        given: object = self.gain
        if given == "kalman":
            raise FilterError(
                "gain='kalman' needs variances: gain=KalmanGain(observation_var, hessian_var, process_var)"
            )
        if self.gain != "adaptive" and not hasattr(self.gain, "start"):
            raise FilterError(
                f"gain={self.gain!r} must be 'constant', 'adaptive', a KalmanGain, a GainSchedule or an AdaptiveGain"
            )
        if self.clip != "joint":
            raise FilterError(
                "clip='separate' has a sensitivity that depends on c, and with this gain c changes from step to step; "
                "use clip='joint', or gain='constant'"
            )
        if self._adapts and self.c is not None:
            raise FilterError("c is given, but an adaptive gain sets c itself, also to measure; leave one of them out")
        if not self._adapts and self.kappa != DiSK.kappa:
            raise FilterError(f"kappa={self.kappa} and gain={self.gain!r} are two answers for κ; leave one of them out")

    @property
    def _adapts(self) -> bool:
        return self.gain == "adaptive" or isinstance(self.gain, AdaptiveGain)

    @property
    def coefficients(self) -> tuple[float, float]:
        if self.gamma is None:
            return 1.0, 0.0
        if self.gain != "constant" and self.c is None:
            return 0.5, 0.5
        return point_weights(weight_ahead(self.kappa, self.gamma) if self.c is None else self.c)

    @property
    def lookahead(self) -> float | None:
        return self.gamma if self.coefficients[1] != 0 else None

    def start(self) -> FilterState:
        if self.gain == "constant":
            return _Average(self.kappa)
        gain = AdaptiveGain() if self.gain == "adaptive" else self.gain
        return VaryingAverage(gain.start(self.kappa, self.gamma), self.gamma, self.c)


class OnePoint:
    """What a step asks of a filter that wants the gradient at x_t alone."""

    @property
    def coefficients(self) -> tuple[float, float]:
        return 1.0, 0.0

    @property
    def lookahead(self) -> float | None:
        return None

    @property
    def clip(self) -> Literal["joint", "separate"]:
        return "joint"


@dataclass(frozen=True)
class NoFilter(OnePoint):
    """The base DP optimizer: one point, gradients as they are.

    >>> NoFilter().start().update([torch.ones(1)])
    [tensor([1.])]
    """

    def start(self) -> FilterState:
        return _Average(1.0)


class _Average:
    """g̃_t = (1-κ) g̃_{t-1} + κ g_t from g̃_{-1} = g_0; at κ = 1 nothing is kept."""

    def __init__(self, kappa: float) -> None:
        self.kappa = kappa
        self._filtered: Tensors | None = None

    def update(self, gradients: Tensors) -> Tensors:
        if self.kappa == 1:
            return gradients
        if self._filtered is None:
            self._filtered = [g.clone() for g in gradients]
        else:
            torch._foreach_lerp_(self._filtered, gradients, self.kappa)
        return self._filtered

    def state_dict(self) -> dict[str, Any]:
        return {"filtered": None if self._filtered is None else [g.clone() for g in self._filtered]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "filtered" not in state:
            raise CheckpointError("the checkpoint's filter state is not that of an exponential average")
        filtered = state["filtered"]
        self._filtered = None if filtered is None else [g.clone() for g in filtered]
