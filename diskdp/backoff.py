"""Summing over a logical batch in parts that get smaller where memory runs out. Who is in the batch never changes."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from diskdp.errors import MemoryLimitError, MemoryWarning
from diskdp.memory import free_unused, out_of_memory
from diskdp.sampling import LogicalBatch


class Sums(Protocol):
    """What examples are added to; ``intact`` says whether it holds all that was added and nothing of what failed."""

    intact: bool

    def add(self, microbatch: Any, examples: int) -> None:
        """Add a microbatch's examples."""

    def clear(self) -> None:
        """Start from nothing."""


def add_all(batch: LogicalBatch, sums: Sums, most: int, device: torch.device) -> int:
    """Add every member of the batch once, at most ``most`` at a time; returns the size that was small enough.

    Where memory runs out, the microbatch at hand is loaded again in halves; if the sums had been touched, everything so
    far is. Members keep their order.
    """
    handed_out = zip(_spans(batch.sizes), batch.microbatches())
    again: list[range] = []  # to be loaded by themselves, the next ones last
    while True:
        if again:
            span, microbatch = again.pop(), None
        else:
            span, microbatch = next(handed_out, (range(0), None))
        if not span:
            return most
        if len(span) > most:
            again += _cut(span, most)
            continue
        if _added(sums, batch, span, microbatch):
            continue
        del microbatch
        free_unused(device)
        if len(span) == 1:
            raise MemoryLimitError(
                f"step {batch.step}: memory ran out with a single example at work. Nothing was charged and no weight "
                "has moved: free some memory (a smaller model, shorter inputs, checkpointing of activations), then go "
                "on with a new private.loader(dataset), which begins with this step"
            )
        most = (len(span) + 1) // 2
        warnings.warn(
            f"step {batch.step}: memory ran out with {len(span)} examples at once; going on with {most}. The result is "
            "the same",
            MemoryWarning,
            stacklevel=2,
        )
        if sums.intact:
            again += _cut(span, most)
        else:
            sums.clear()
            again += _cut(range(span.stop), most)


def _added(sums: Sums, batch: LogicalBatch, span: range, microbatch: Any) -> bool:
    """Whether there was memory for it. Nothing of a failure outlives the call: its traceback holds tensors."""
    try:
        sums.add(batch.members(span.start, span.stop) if microbatch is None else microbatch, len(span))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def _spans(sizes: tuple[int, ...]) -> list[range]:
    """
    >>> _spans((3, 2))
    [range(0, 3), range(3, 5)]
    """
    spans: list[range] = []
    for size in sizes:
        start = spans[-1].stop if spans else 0
        spans.append(range(start, start + size))
    return spans


def _cut(span: range, most: int) -> list[range]:
    """Parts of at most ``most``, the first of them last.

    >>> _cut(range(2, 7), 2)
    [range(6, 7), range(4, 6), range(2, 4)]
    """
    return [span[start : start + most] for start in range(0, len(span), most)][::-1]
