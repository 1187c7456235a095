"""What a model's modules are and how they are set, as a key: whatever changes it may change the forward pass.

Assumes that a forward pass is decided by which modules there are, the flags, names and functions that they keep, and
their hooks; numbers are left out, since a module may count its calls.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_VALUES = frozenset({bool, str})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def settings(model: nn.Module) -> object:
    """A key that differs when a module is replaced, a flag, name or function of it is set anew, or a hook added.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    >>> before = settings(model)
    >>> settings(model) == before
    True
    >>> model[1] = nn.Identity()
    >>> settings(model) == before
    False
    """
    return tuple((_number(module), _number(type(module)), *_kept(module)) for module in modules(model))


def modules(model: nn.Module) -> list[nn.Module]:
    """All modules, a shared one once; `nn.Module.modules` without its names, which take most of its time."""
    found, stack, seen = [], [model], set()
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            stack += [child for child in module._modules.values() if child is not None]
    return found


def _kept(module: nn.Module) -> Iterator[object]:
    attributes = vars(module)
    for value in attributes.values():
        kind = type(value)
        if kind in _VALUES:
            yield value
        elif kind in _FUNCTIONS:
            yield _number(value)
    for name in _HOOKS:
        yield from [_number(hook) for hook in attributes.get(name, {}).values()]


_numbers = itertools.count()
_known: dict[int, tuple[weakref.ref[Any], int]] = {}


def _number(thing: object) -> int:
    """A number that this object alone ever has: an address is used again, the weak reference says whose it is now."""
    key = id(thing)
    entry = _known.get(key)
    if entry is not None and entry[0]() is thing:
        return entry[1]
    number = next(_numbers)
    _known[key] = weakref.ref(thing, functools.partial(_forget, key)), number
    return number


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    if key in _known and _known[key][0] is ref:
        del _known[key]
