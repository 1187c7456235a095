"""Tensors inside a batch, whatever container the user's collate function made.

Assumes only that tensors are reachable through mappings, sequences, dataclasses or instance attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Rebuild a batch of mappings, sequences and dataclasses with every tensor replaced by ``change(tensor)``.

    Containers of other classes are returned as they are.

    >>> import torch
    >>> map_tensors([torch.ones(2), "text"], lambda t: t + 1)
    [tensor([2., 2.]), 'text']
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(item, change) for item in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(map_tensors(item, change) for item in batch)
    if type(batch) is dict:
        return {key: map_tensors(item, change) for key, item in batch.items()}
    if isinstance(batch, Mapping):  # BatchEncoding and its like: a mapping built from a mapping
        try:
            return type(batch)({key: map_tensors(item, change) for key, item in batch.items()})  # type: ignore[call-arg]
        except TypeError:
            return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: map_tensors(getattr(batch, f.name), change) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def _children(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif hasattr(batch, "__dict__") and not isinstance(batch, type) and not callable(batch):
        yield from vars(batch).values()


def replace_examples(batch: Any, batch_size: int, replaced: Tensor, by: Tensor, axis: int) -> Any:
    """A batch in which examples ``replaced`` are copies of examples ``by``; the examples lie on ``axis``.

    >>> import torch
    >>> replace_examples([torch.tensor([5, 6, 7])], 3, torch.tensor([0]), torch.tensor([2]), 0)
    [tensor([7, 6, 7])]
    """

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() <= axis or tensor.shape[axis] != batch_size:
            axes = [i for i, size in enumerate(tensor.shape) if size == batch_size]
            if not axes:
                return tensor
            chosen = axes[0]
        else:
            chosen = axis
        index = torch.arange(batch_size, device=tensor.device)
        index[replaced.to(tensor.device)] = by.to(tensor.device)
        return tensor.index_select(chosen, index)

    return map_tensors(batch, change)


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
    """Shapes and dtypes of a batch with its size left open, so that Poisson batches of any size share one entry."""
    return batch_size == 1, tuple(
        (tuple(-1 if size == batch_size else size for size in t.shape), t.dtype) for t in tensors(batch)
    )
