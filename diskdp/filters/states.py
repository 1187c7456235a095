"""What a filter's state may offer beyond `FilterState`, and how a step asks for it.

Everything told to a state or read from it is made of released outputs and public constants.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from diskdp.errors import FilterError
from diskdp.filters.disk import Filter, FilterState


@runtime_checkable
class VaryingWeights(Protocol):
    """A state whose weights of the two points change: `coefficients` are those of the step that is due."""

    @property
    def coefficients(self) -> tuple[float, float]: ...


@runtime_checkable
class FollowsWeights(Protocol):
    """A state that needs the step d_t = x_{t+1} - x_t that the optimizer took."""

    def moved(self, movement: list[Tensor]) -> None: ...


@runtime_checkable
class KnowsNoise(Protocol):
    """A state that can use the variance of the noise on a coordinate of the privatised gradients."""

    def know_noise(self, variance: float) -> None: ...


def started(filter: Filter, noise_variance: float) -> FilterState:
    """The filter's state at its start, told (σS/B)² if it asks.

    Refused with separate clipping if its weights change: the sensitivity, and the noise, would have to change as well.
    """
    state = filter.start()
    if filter.clip != "joint" and isinstance(state, VaryingWeights):
        raise FilterError(
            f"{filter!r}: clip={filter.clip!r} has a sensitivity that depends on the weights of the two points, and "
            "this filter changes them from step to step; use clip='joint'"
        )
    if isinstance(state, KnowsNoise):
        state.know_noise(noise_variance)
    return state


def due_coefficients(filter: Filter, state: FilterState) -> tuple[float, float]:
    """Weights (1-c, c) of the two points in the step that is due.

    >>> from diskdp.filters import DiSK, GainSchedule
    >>> filter = DiSK(gamma=0.5, gain=GainSchedule((1.0, 0.5)))
    >>> state = filter.start()
    >>> _ = state.update([Tensor([1.0])])
    >>> due_coefficients(filter, state)
    (-1.0, 2.0)
    """
    return state.coefficients if isinstance(state, VaryingWeights) else filter.coefficients
