"""Rows of a table of parameters picked by number; the numbers are never expanded to one-hot vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.rules.fallback import per_example_vjp
from diskdp.gradients.terms import Outer, Term
from diskdp.gradients.trace import Call, Rule, Source


def embedding(call: Call) -> Tensor:
    """F.embedding(ids, table)."""
    ids, table, padding_idx, max_norm, _, by_frequency, _ = call.bind(
        "input",
        "weight",
        padding_idx=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    )
    source = call.source(table)
    if source is None:
        return per_example_vjp(call)
    if max_norm is not None:
        raise call.refuse("max_norm rewrites the rows that the batch happens to use; set max_norm=None")
    if by_frequency:
        raise call.refuse("scale_grad_by_freq divides by counts over the whole batch; set it to False")
    return _pick(call, source, ids, F.embedding(ids, source.value), padding_idx)


def getitem(call: Call) -> Tensor:
    """table[ids] with one tensor of row numbers."""
    table, index = call.args
    source = call.source(table)
    if source is None or not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        return per_example_vjp(call)
    return _pick(call, source, index.remainder(source.value.shape[0]), source.value[index], None)


def _pick(call: Call, source: Source, ids: Tensor, output: Tensor, padding_idx: int | None) -> Tensor:
    if source.value.dim() != 2:
        return per_example_vjp(call)
    rows = source.value.shape[0]
    padding = padding_idx % rows if padding_idx is not None else None

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        numbers = owner.by_example(saved[0]).reshape(owner.batch, -1).long()
        values = owner.rows(grad)
        if padding is not None:
            values = values.masked_fill((numbers == padding).unsqueeze(2), 0)
        return [(source, Outer(numbers, values, rows))]

    return call.tap(output, [source], [ids], build)


RULES: list[tuple[list[Callable[..., object]], Rule]] = [
    ([F.embedding, torch.embedding], embedding),
    ([torch.Tensor.__getitem__], getitem),
]
