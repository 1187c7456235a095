"""Tensors inside a batch, whatever container the user's collate function made.

Assumes only that tensors are reachable through mappings, sequences, dataclasses or instance attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diskdp.errors import GradientError

_MAX_DEPTH = 6


def tensors(batch: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor in ``batch``, in a fixed order.

    >>> import torch
    >>> [t.shape[0] for t in tensors({"x": torch.zeros(3), "y": (torch.zeros(4), None)})]
    [3, 4]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif depth < _MAX_DEPTH:
        for child in _children(batch):
            yield from tensors(child, depth + 1)


def replace_examples(batch: Any, batch_size: int, replaced: Tensor, by: Tensor, axis: int) -> tuple[Any, int]:
    """A batch in which examples ``replaced`` are copies of examples ``by``, and how many of its parts that changed.

    Examples lie on ``axis`` of each tensor and array, or else on the first axis of the batch's length.

    >>> import torch
    >>> replace_examples([torch.tensor([5, 6, 7]), "text"], 3, torch.tensor([0]), torch.tensor([2]), 0)
    ([tensor([7, 6, 7]), 'text'], 1)
    """
    index = torch.arange(batch_size)
    index[replaced.cpu()] = by.cpu()
    return _picked(batch, batch_size, index, axis)


def select_examples(batch: Any, batch_size: int, kept: Tensor) -> Any:
    """The batch of some of its examples alone.

    >>> import torch
    >>> select_examples((torch.tensor([5, 6, 7]), ["a", "b", "c"]), 3, torch.tensor([2, 0]))
    (tensor([7, 5]), ['c', 'a'])
    """
    return _picked(batch, batch_size, kept.cpu(), 0)[0]


def scrambled(batch: Any, generator: torch.Generator, depth: int = 0) -> Any:
    """Other data of the same kind, for where there is no other example: every tensor's elements in another order.

    >>> import torch
    >>> scrambled((torch.ones(2), "text"), torch.Generator())
    (tensor([0.7500, 0.7500]), 'text')
    """
    if isinstance(batch, Tensor | np.ndarray):
        elements = torch.as_tensor(batch).flatten()
        order = torch.randperm(len(elements), generator=generator)
        mixed = elements[order.to(elements.device)].reshape(batch.shape)
        if mixed.is_floating_point():
            mixed = mixed * 0.75
        return mixed if isinstance(batch, Tensor) else mixed.numpy()
    if depth >= _MAX_DEPTH:
        return batch
    return _rebuilt(batch, lambda item: scrambled(item, generator, depth + 1))


def kind(batch: Any) -> object:
    """What of a batch is known before its size: types and shapes, of the first axes the scale alone.

    >>> kind(torch.zeros(9, 2)) == kind(torch.zeros(15, 2)) != kind(torch.zeros(1, 2))
    True
    """
    return tuple((t.dtype, t.shape[1:], *(size.bit_length() for size in t.shape[:1])) for t in tensors(batch))


def _picked(batch: Any, batch_size: int, index: Tensor, axis: int, depth: int = 0) -> tuple[Any, int]:
    """Rows ``index`` of everything that has one row an example; containers are rebuilt, unknown ones copied."""
    if isinstance(batch, Tensor | np.ndarray):
        axes = [i for i, size in enumerate(batch.shape) if size == batch_size]
        if not axes:
            return batch, 0
        chosen = axis if axis in axes else axes[0]
        if isinstance(batch, Tensor):
            return batch.index_select(chosen, index.to(batch.device)), 1
        return np.take(batch, index.numpy(), axis=chosen), 1
    if depth >= _MAX_DEPTH:
        return batch, 0
    if isinstance(batch, list) and len(batch) == batch_size and not any(isinstance(item, Tensor) for item in batch):
        return [batch[i] for i in index.tolist()], 1
    counts: list[int] = []

    def change(item: Any) -> Any:
        result, count = _picked(item, batch_size, index, axis, depth + 1)
        counts.append(count)
        return result

    return _rebuilt(batch, change), sum(counts)


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with every item changed; what is no container as it is."""
    result: Any = batch
    if isinstance(batch, Mapping):
        result = copy.copy(batch)
        for key, item in batch.items():
            result[key] = change(item)
    elif isinstance(batch, tuple) and hasattr(batch, "_make"):
        result = batch._make(change(item) for item in batch)
    elif isinstance(batch, list | tuple):
        result = type(batch)(change(item) for item in batch)
    elif _opaque(batch):
        result = copy.copy(batch)
        for key, item in vars(batch).items():
            object.__setattr__(result, key, change(item))
    return result


def _opaque(batch: Any) -> bool:
    """An object whose attributes may hold tensors."""
    return hasattr(batch, "__dict__") and not isinstance(batch, type) and not callable(batch)


def _children(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif _opaque(batch):
        yield from vars(batch).values()


def checked_losses(losses_B: Any) -> Tensor:
    """The losses, if they are one number an example."""
    if not isinstance(losses_B, Tensor) or losses_B.dim() != 1 or not losses_B.is_floating_point():
        what = f"a tensor of shape {tuple(losses_B.shape)}" if isinstance(losses_B, Tensor) else type(losses_B).__name__
        raise GradientError(
            f"loss_fn returned {what}; it must return one floating-point loss an example, shape [B] "
            '(with reduction="none", averaged over everything but the examples)'
        )
    if not losses_B.requires_grad:
        raise GradientError(
            "the losses do not depend on any trainable parameter: nothing to differentiate. "
            "Check requires_grad and that loss_fn calls the model it is given, outside torch.no_grad()"
        )
    return losses_B


def signature(batch: Any, batch_size: int) -> object:
    """Shapes and dtypes of a batch with its size left open, so that Poisson batches of any size share one entry.

    Where another axis happens to have the batch's length the size is part of it: the axis could be either.

    >>> import torch
    >>> signature(torch.zeros(5, 3), 5) == signature(torch.zeros(6, 3), 6)
    True
    >>> signature(torch.zeros(5, 5), 5) == signature(torch.zeros(6, 6), 6)
    False
    """
    shapes = [(tuple(-1 if size == batch_size else size for size in t.shape), t.dtype) for t in tensors(batch)]
    ambiguous = any(shape.count(-1) > 1 for shape, _ in shapes)
    return batch_size == 1, batch_size if ambiguous else None, tuple(shapes)


def family(batch: Any) -> object:
    """What batches of other lengths have in common.

    >>> import torch
    >>> family(torch.zeros(5, 3)) == family(torch.zeros(6, 7))
    True
    """
    return tuple((t.dim(), t.dtype) for t in tensors(batch))
