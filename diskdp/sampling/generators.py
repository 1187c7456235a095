"""Every generator that some code may draw from, as far as it can be found: seeded inside a block, and put back after.

For trying out a data set or a collate function: what is tried must be repeatable, and must leave no trace.
"""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from diskdp.sampling.fetching import seeded

_MAX_DEPTH = 4
_MAX_OBJECTS = 2000
_MAX_ELEMENTS = 64
_KINDS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


class Randomness:
    """The global generators and those reachable from `roots`: attributes, closures, globals that functions name.

    >>> rng = np.random.default_rng(0)
    >>> randomness = Randomness(lambda: rng.random())
    >>> with randomness.seeded(1):
    ...     first = rng.random()
    >>> with randomness.seeded(1):
    ...     rng.random() == first
    True
    """

    def __init__(self, *roots: Any) -> None:
        self._own = list(_reachable(roots))

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Inside, every generator starts from `seed`, and warnings are kept back; afterwards each is where it was."""
        before = [_state(generator) for generator in self._own]
        with seeded(seed.to_bytes(8, "little") * 4), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is tried: it will warn again when it is used
            for generator in self._own:
                _seed(generator, seed)
            try:
                yield
            finally:
                for generator, state in zip(self._own, before):
                    _restore(generator, state)

    def state(self) -> list[Any]:
        """How far the generators are, for comparison."""
        torchs = torch.get_rng_state().numpy().tobytes()
        numpys = np.random.get_state(legacy=False)  # noqa: NPY002
        states = [_state(generator) for generator in self._own]
        return [torchs, _plain(numpys), random.getstate(), *map(_plain, states)]


def _reachable(roots: tuple[Any, ...]) -> Iterator[Any]:
    seen: set[int] = set()
    queue = [(root, 0) for root in roots]
    while queue and len(seen) < _MAX_OBJECTS:
        item, depth = queue.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _KINDS):
            if not isinstance(item, random.SystemRandom):  # which has no state
                yield item
        elif depth < _MAX_DEPTH:
            queue += [(child, depth + 1) for child in _children(item)]


def _children(item: Any) -> list[Any]:
    if isinstance(item, types.ModuleType | type | torch.Tensor | np.ndarray | str | bytes):
        return []
    if isinstance(item, partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        named = [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
        return [*cells, *named, *(item.__defaults__ or ())]
    if isinstance(item, Mapping):
        return list(item.values()) if len(item) <= _MAX_ELEMENTS else []
    if isinstance(item, list | tuple):
        return list(item) if len(item) <= _MAX_ELEMENTS else []
    own = list(vars(item).values()) if hasattr(item, "__dict__") else []
    classes = [c for c in type(item).__mro__ if c.__module__.partition(".")[0] not in ("builtins", "torch")]
    return own + [part for c in classes for part in vars(c).values() if isinstance(part, types.FunctionType)]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState | torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state  # type: ignore[call-arg]
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def _plain(state: Any) -> Any:
    """The state in a form that == compares."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state
