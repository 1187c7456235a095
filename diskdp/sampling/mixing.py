"""Whether a function of several examples mixes them: the rows of those that are kept when the others are exchanged.

Assumes nothing about what comes out: what has no axis of the batch's length belongs to no example and is not judged,
nor is what does not repeat itself from the same random state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diskdp.sampling.generators import Randomness

_MAX_DEPTH = 6
_MISSING = object()
_Array: TypeAlias = "npt.NDArray[Any]"
_Path: TypeAlias = "tuple[Any, ...]"


def mixes(work: Callable[[list[Any]], Any], examples: Sequence[Any], random: Randomness, trials: int) -> str | None:
    """Where the work on one example depends on the others beside it; None if that was not seen.

    Each trial exchanges one half of a batch and then the other, under one random state, and looks for what changed in
    the half that was kept. Work that draws nothing is tried once.

    >>> numbers = [torch.tensor([float(i)]) for i in range(8)]
    >>> mixes(torch.stack, numbers, Randomness(), 1)
    >>> mixes(lambda xs: torch.stack(xs) - sum(xs) / len(xs), numbers, Randomness(), 1)
    'the result'
    """
    if len(examples) < 3:
        return None
    half = 2 if len(examples) >= 8 else 1
    batch, others = list(examples[: 2 * half]), list(examples[2 * half :])

    for seed in range(trials):
        run = partial(_run, work, random, seed)
        usual, again = run(batch), run(batch)
        if usual is None or again is None:
            return None
        look = _Look(usual.result, again.result, run(batch[:-1]), run(batch[::-1]), len(batch))
        for kept, members in (
            (range(half), [*batch[:half], *others[:half]]),
            (range(half, 2 * half), [*others[-half:], *batch[half:]]),
        ):
            other = run(members)
            if other is None or other.state != usual.state:  # other draws: nothing can be said
                continue
            where = look.changed(other.result, kept)
            if where is not None:
                return "".join(f"[{key!r}]" for key in where) or "the result"
        if not usual.drew:
            break
    return None


@dataclass(frozen=True)
class _Run:
    result: Any
    state: list[Any]
    drew: bool


def _run(work: Callable[[list[Any]], Any], random: Randomness, seed: int, members: list[Any]) -> _Run | None:
    """The result from one random state; None where the work does not do with these members."""
    with random.seeded(seed):
        before = random.state()
        try:
            result = work([_copied(member) for member in members])  # collate functions may take examples apart
        except Exception:
            return None  # an odd number, too few of them: no fault of the examples
        after = random.state()
    return _Run(result, after, after != before)


def _copied(example: Any) -> Any:
    # A tensor is mostly a view of a whole data set, all of which a deep copy would copy.
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _tensors(example)}
    try:
        return copy.deepcopy(example, memo)
    except Exception:
        return example


def _tensors(node: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif depth < _MAX_DEPTH:
        for key in _keys(node):
            yield from _tensors(_child(node, key), depth + 1)


class _Look:
    """The results on a batch, once more, without its last example, and in reverse."""

    def __init__(self, usual: Any, again: Any, fewer: _Run | None, turned: _Run | None, size: int) -> None:
        self._usual, self._again, self._size = usual, again, size
        self._fewer = _MISSING if fewer is None else fewer.result
        self._turned = _MISSING if turned is None else turned.result

    def changed(self, other: Any, kept: range) -> _Path | None:
        """Where a kept example's part differs between the usual result and the other; None if nowhere."""
        alike = _outline(self._usual) == _outline(other)
        return self._compare(
            (self._usual, self._again, other, self._fewer, self._turned), _Question(kept, alike), path=()
        )

    def _compare(self, nodes: tuple[Any, ...], question: _Question, path: _Path) -> _Path | None:
        usual, again, other, fewer, turned = nodes
        if len(path) > _MAX_DEPTH or str(type(other)) != str(type(usual)):  # a class may be made anew at each call
            return None
        array = _as_array(usual)
        if array is not None:
            arrays = [_as_array(node) for node in (again, other, fewer, turned)]
            return None if self._same_rows(array, arrays, question) else path
        if _is_rows(usual, fewer, self._size) and len(other) == self._size:
            honest = not same(usual, again) or all(same(usual[i], other[i]) for i in question.kept)
            return None if honest or _is_sorted(list(usual), list(other), turned, len(question.kept)) else path
        for key in _keys(usual):
            children = tuple(_child(node, key) for node in nodes)
            if children[2] is not _MISSING:
                found = self._compare(children, question, (*path, key))
                if found is not None:
                    return found
        return None

    def _same_rows(self, usual: _Array, others: list[_Array | None], question: _Question) -> bool:
        again, other, fewer, turned = others
        if again is None or other is None or not _close(usual, again) or other.ndim != usual.ndim:
            return True
        axes = [
            axis
            for axis, length in enumerate(usual.shape)
            if length == other.shape[axis] == self._size
            and (fewer is None or fewer.ndim != usual.ndim or fewer.shape[axis] == self._size - 1)
        ]
        counts = usual.ndim == 1 and usual.dtype.kind in "iu"
        if not axes or (counts and not question.alike):  # lengths and offsets change with the others' padding
            return True
        if counts and sorted(usual) == sorted(other) == list(range(self._size)):  # an order, and no data
            return True
        if any(all(same(usual.take(i, axis), other.take(i, axis)) for i in question.kept) for axis in axes):
            return True
        turned_rows = _MISSING if turned is None else _rows(turned, axes[0])
        return _is_sorted(_rows(usual, axes[0]), _rows(other, axes[0]), turned_rows, len(question.kept))


@dataclass(frozen=True)
class _Question:
    kept: range
    alike: bool  # whether all shapes are those of the usual result


def _rows(array: _Array, axis: int) -> list[_Array]:
    return list(np.moveaxis(array, axis, 0))


def _is_rows(usual: Any, fewer: Any, size: int) -> bool:
    """Whether a sequence has an element for each example."""
    sequences = all(isinstance(node, list | tuple) for node in (usual, fewer))
    return sequences and len(usual) == size and len(fewer) == size - 1


def _is_sorted(usual: list[Any], other: list[Any], turned: Any, kept: int) -> bool:
    """Whether rows are arranged by their own content, so that who comes where says nothing.

    The batch in reverse must give the same, and as many rows as were kept must still be there.
    """
    if turned is _MISSING or not same(usual, list(turned)):
        return False
    left = list(other)
    for row in usual:
        match = next((i for i, candidate in enumerate(left) if same(row, candidate)), None)
        if match is not None:
            del left[match]
    return len(other) - len(left) >= kept


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal but for padding and rounding."""
    first, second = _as_array(one), _as_array(other)
    if first is not None and second is not None:
        return first.ndim == second.ndim and any(
            _close(first[_common(first, second, place)], second[_common(second, first, place)])
            for place in (0.0, 1.0, 0.5)  # padded after, before, around
        )
    keys = _keys(one)
    if keys and type(one) is type(other):
        return keys == _keys(other) and all(same(_child(one, key), _child(other, key)) for key in keys)
    try:
        return one is other or bool(one == other)
    except Exception:
        return True  # values that cannot be compared say nothing


def _common(array: _Array, other: _Array, place: float) -> tuple[slice, ...]:
    """Of each axis the part that both have, at its start, its end or its middle."""
    starts = [int(place * max(0, length - own)) for length, own in zip(array.shape, other.shape)]
    lengths = [min(length, own) for length, own in zip(array.shape, other.shape)]
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths))


def _close(one: _Array, other: _Array) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc" or other.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    scale = max((float(np.abs(a[np.isfinite(a)]).max(initial=0)) for a in (one, other)), default=0.0)
    tolerance = max(1e-6, 16 * max(float(np.finfo(a.dtype).eps) for a in (one, other)))
    return bool(np.allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True))


def _as_array(value: Any) -> _Array | None:
    """Numbers in a tensor, an array or nested lists of one shape; None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return None
        plain = value.detach().cpu()
        if plain.dtype is torch.bfloat16:  # unknown to numpy
            plain = plain.float()
        return plain.resolve_conj().resolve_neg().numpy()
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind not in "biufc" else value
    if isinstance(value, list) and value and isinstance(value[0], bool | int | float | list):
        try:
            array = np.array(value)
        except ValueError:
            return None
        return array if array.dtype.kind in "biuf" else None
    return None


def _keys(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node)
    if isinstance(node, list | tuple):
        return list(range(len(node)))
    if hasattr(node, "__dict__") and not callable(node):
        return list(vars(node))
    return []


def _child(node: Any, key: Any) -> Any:
    try:
        if isinstance(node, Mapping | list | tuple):
            return node[key]
        return vars(node)[key]
    except (LookupError, TypeError):
        return _MISSING


def _outline(node: Any, depth: int = 0) -> Any:
    """Structure and shapes."""
    array = _as_array(node)
    if array is not None:
        return array.shape
    if depth > _MAX_DEPTH:
        return None
    return [(key, _outline(_child(node, key), depth + 1)) for key in _keys(node)]


def signature(example: Any, depth: int = 0) -> Any:
    """What an example has to share with another to stand for it: structure, shapes, lengths of texts.

    >>> signature((torch.zeros(3), "text")) == signature((torch.ones(3), "more"))
    True
    """
    size = getattr(example, "size", None)  # of an image that is not an array yet
    plain = len(example) if isinstance(example, str | bytes) else size if isinstance(size, tuple) else None
    array = _as_array(example)
    keys = [] if array is not None or depth > _MAX_DEPTH else _keys(example)
    children = [(str(key), signature(_child(example, key), depth + 1)) for key in keys]
    return str(type(example)), None if array is None else array.shape, plain, tuple(children)
