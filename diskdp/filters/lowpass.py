"""Low-pass filters of any order over privatised gradients (DOPPLER)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import signal
from torch import Tensor

from diskdp.errors import CheckpointError, FilterError
from diskdp.filters.disk import DiSK, FilterState, OnePoint

# What rounding of float32 is multiplied by at most in a designed filter: Σ|a|/|Σa|, so about 1e-3 of a gradient.
_MOST_CANCELLATION = 1e4


class LowPass(OnePoint):
    """g̃_t = Σ_j b_j g_{t-j} - Σ_{j≥1} a_j g̃_{t-j}, from zero, divided by the same filter's response to a constant 1.

    Coefficients are scipy's (``a[0]`` scales both). ``LowPass(kappa=κ)`` is the first-order filter that starts at g_0,
    the same as ``DiSK(kappa=κ, gamma=None)``; ``a=[1, κ-1], b=[κ]`` starts from zero with bias correction and at first
    weighs the gradients more evenly. Both forget how they started at the rate 1-κ.

    >>> LowPass(kappa=0.5) == LowPass(kappa=0.5)
    True
    >>> state = LowPass(a=[1, -0.5], b=[0.5]).start()
    >>> [state.update([torch.tensor(1.0)])[0].item() for _ in range(3)]
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self, kappa: float | None = None, a: Sequence[float] | None = None, b: Sequence[float] | None = None
    ) -> None:
        if (kappa is None) == (a is None and b is None):
            raise FilterError("LowPass takes either kappa or coefficients a and b")
        self.kappa = kappa
        self.a: tuple[float, ...] = ()
        self.b: tuple[float, ...] = ()
        if kappa is not None:
            self._first_order = DiSK(kappa=kappa, gamma=None)
        else:
            self.a, self.b = _normalized([1.0] if a is None else a, [] if b is None else b)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DiSK):
            return self.kappa is not None and self._first_order == other
        return isinstance(other, LowPass) and (self.kappa, self.a, self.b) == (other.kappa, other.a, other.b)

    def __hash__(self) -> int:
        return hash(self._first_order) if self.kappa is not None else hash((self.a, self.b))

    def __repr__(self) -> str:
        return f"LowPass(kappa={self.kappa})" if self.kappa is not None else f"LowPass(a={self.a}, b={self.b})"

    @classmethod
    def butterworth(cls, order: int, cutoff: float) -> LowPass:
        """No ripple: falls from 1 to √½ at ``cutoff``, a fraction of the highest frequency (half a cycle a step).

        >>> [round(v, 6) for v in LowPass.butterworth(2, 0.5).b]
        [0.292893, 0.585786, 0.292893]
        """
        _check_design(order, cutoff)
        b, a = signal.butter(order, cutoff)
        return cls._designed(a, b, f"order={order}, cutoff={cutoff}")

    @classmethod
    def chebyshev(cls, order: int, ripple: float, cutoff: float) -> LowPass:
        """Steeper: varies by up to ``ripple`` decibels below ``cutoff``, from which on it falls (first kind).

        >>> len(LowPass.chebyshev(3, ripple=0.5, cutoff=0.2).a)
        4
        """
        _check_design(order, cutoff)
        if not (ripple > 0 and math.isfinite(ripple)):
            raise FilterError(f"ripple={ripple} is in decibels: it must be positive and finite")
        b, a = signal.cheby1(order, ripple, cutoff)
        return cls._designed(a, b, f"order={order}, ripple={ripple}, cutoff={cutoff}")

    @classmethod
    def _designed(cls, a: Sequence[float], b: Sequence[float], asked: str) -> LowPass:
        cancellation = sum(abs(v) for v in a) / max(abs(sum(a)), 1e-300)
        if cancellation > _MOST_CANCELLATION:
            raise FilterError(
                f"{asked}: poles so close to 1 that float32 gradients would lose {cancellation:.2g} units in the last "
                "place; choose a lower order or a higher cutoff"
            )
        # scipy leaves dust of 1e-17 where a coefficient is 0
        return cls(a=[float(v) if abs(v) > 1e-15 else 0.0 for v in a], b=[float(v) for v in b])

    def step_weights(self, steps: int) -> tuple[float, ...]:
        """How much each of the first gradients, the latest first, counts in the last of ``steps`` outputs; sums to 1.

        The squares' sum is the share of the noise's variance that is left then.

        >>> LowPass(a=[1.0, -0.5], b=[0.5]).step_weights(3)  # 1/2, 1/4, 1/8 over their sum
        (0.5714285714285714, 0.2857142857142857, 0.14285714285714285)
        """
        if steps < 1:
            raise FilterError(f"steps={steps} must be at least 1")
        if self.kappa is not None:
            kept = 1 - self.kappa
            return (*[self.kappa * kept**j for j in range(steps - 1)], kept ** (steps - 1))
        response = signal.lfilter(self.b, self.a, np.eye(1, steps)[0])
        return tuple((response / response.sum()).tolist())

    def start(self) -> FilterState:
        return self._first_order.start() if self.kappa is not None else _Recursion(self.a, self.b)


class _Recursion:
    """Transposed direct form II: as many delayed sums as the filter's order, plus the response to a constant."""

    def __init__(self, a: tuple[float, ...], b: tuple[float, ...]) -> None:
        order = max(len(a), len(b))
        self.a = (*a, *[0.0] * (order - len(a)))
        self.b = (*b, *[0.0] * (order - len(b)))
        self._delays: list[list[Tensor]] | None = None
        self._constant = [0.0] * (order - 1)

    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        if self._delays is None:
            self._delays = [[torch.zeros_like(g) for g in gradients] for _ in self._constant]
        filtered = list(torch._foreach_mul(gradients, self.b[0]))
        response = self.b[0]
        if self._delays:
            torch._foreach_add_(filtered, self._delays[0])
            response += self._constant[0]
        for j in range(len(self._delays)):
            following = self._delays[j + 1] if j + 1 < len(self._delays) else None
            delay = torch._foreach_mul(gradients, self.b[j + 1])
            torch._foreach_add_(delay, filtered, alpha=-self.a[j + 1])
            constant = self.b[j + 1] - self.a[j + 1] * response
            if following is not None:
                torch._foreach_add_(delay, following)
                constant += self._constant[j + 1]
            self._delays[j], self._constant[j] = list(delay), constant
        if response == 0:
            raise FilterError("the filter's response to a constant is 0 at this step, so its bias cannot be corrected")
        torch._foreach_div_(filtered, response)
        return filtered

    def state_dict(self) -> dict[str, Any]:
        delays = None if self._delays is None else [[d.clone() for d in delay] for delay in self._delays]
        return {"delays": delays, "constant": list(self._constant)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "constant" not in state or len(state["constant"]) != len(self._constant):
            raise CheckpointError("the checkpoint's filter state is not that of a low-pass filter of this order")
        delays = state["delays"]
        self._delays = None if delays is None else [[d.clone() for d in delay] for delay in delays]
        self._constant = list(state["constant"])


def _check_design(order: int, cutoff: float) -> None:
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise FilterError(f"order={order!r} must be a whole number, 1 or more")
    if not 0 < cutoff < 1:
        raise FilterError(f"cutoff={cutoff} is a fraction of the highest frequency: it must lie between 0 and 1")


def _normalized(a: Sequence[float], b: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    try:
        a, b = [float(v) for v in a], [float(v) for v in b]
    except (TypeError, ValueError) as error:
        raise FilterError(f"a={a!r}, b={b!r}: coefficients must be lists of numbers") from error
    values = [*a, *b]
    if not b or not a or a[0] == 0 or not all(math.isfinite(v) for v in values):
        raise FilterError(f"a={list(a)}, b={list(b)}: coefficients must be finite, b not empty and a[0] not 0")
    if len(a) > 1 and max(abs(np.roots(a)), default=0.0) >= 1:
        raise FilterError(f"a={list(a)}: the filter is unstable, a root of a lies on or outside the unit circle")
    if abs(sum(b) / sum(a)) < 1e-12:
        raise FilterError(f"b={list(b)}: the filter does not let a constant gradient pass")
    return tuple(v / a[0] for v in a), tuple(v / a[0] for v in b)
