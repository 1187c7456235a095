"""Element-wise operations with broadcasting, and operations that only move elements.

The parameter is watched in the shape in which it meets the data (`Call.watch`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diskdp.gradients.rules.fallback import per_example_vjp
from diskdp.gradients.trace import Call, Rule, flat_tensors, replaced


def elementwise(call: Call) -> Tensor:
    """Any operation that works element by element on the broadcast shape of its tensors."""
    if call.in_place and call.source(call.args[0]) is not None:
        raise call.refuse("writes data into a tensor computed from parameters; write the operation out of place")
    dtypes = {t.dtype for t in flat_tensors(call.args, call.kwargs) if t.is_floating_point()}
    if len(dtypes) > 1 and any(source.value.dim() == 0 for source in call.sources()):
        return per_example_vjp(call)  # an expanded scalar would take part in type promotion
    shape = torch.broadcast_shapes(*(t.shape for t in flat_tensors(call.args, call.kwargs)))

    def watch(value: Tensor) -> Tensor:
        source = call.source(value)
        return value if source is None else call.watch(source, shape)

    result: Tensor = call.function(*replaced(call.args, watch), **replaced(call.kwargs, watch))
    return result


def moving(call: Call) -> Tensor:
    """Concatenation and its like: sources that were expanded along the batch are watched as they stand."""

    def watch(value: Tensor) -> Tensor:
        source = call.source(value)
        return value if source is None else call.watch(source)

    result: Tensor = call.function(*replaced(call.args, watch), **replaced(call.kwargs, watch))
    return result


def assignment(call: Call) -> None:
    """x[index] = parameter: the parameter in the shape of what it is written to."""
    target, index, value = call.args
    source = call.source(value)
    if source is None or call.source(target) is not None:
        raise call.refuse("writes data into a tensor computed from parameters; write the operation out of place")
    target[index] = call.watch(source, target[index].shape)


def expanded_or_vjp(call: Call) -> Tensor:
    """Without a rule: watch sources that were expanded over the batch, else differentiate the operation."""
    sources = call.sources()
    if sources and all(source.expanded for source in sources):
        return moving(call)
    return per_example_vjp(call)


_BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "multiply",
    "divide",
    "subtract",
    "maximum",
    "minimum",
    "pow",
)
_TERNARY = ("where", "lerp", "addcmul", "addcdiv", "clamp")
_DUNDERS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow")
_IN_PLACE = (
    "add_",
    "sub_",
    "mul_",
    "div_",
    "addcmul_",
    "lerp_",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
)


def _named(*names: str) -> list[Callable[..., object]]:
    owners = (torch, torch.Tensor)
    return [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]


RULES: list[tuple[list[Callable[..., object]], Rule]] = [
    (_named(*_BINARY, *_TERNARY, *_IN_PLACE, *(f"__{name}__" for name in _DUNDERS), "rsub"), elementwise),
    ([torch.Tensor.__setitem__], assignment),
    (_named("cat", "concat", "concatenate", "stack", "hstack", "vstack"), moving),
]
