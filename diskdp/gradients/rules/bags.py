"""Sums, means and maxima of rows of a table, picked in bags: the rows of a bag share one output gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.rules.fallback import per_example_vjp
from diskdp.gradients.terms import Outer, Term
from diskdp.gradients.trace import Call, Rule, Source


def embedding_bag(call: Call) -> Tensor:
    """F.embedding_bag(ids, table): bags of one length [N, L], or one after the other with offsets."""
    ids, table, offsets, max_norm, _, by_frequency, mode, _, weights, last_offset, padding_idx = call.bind(
        "input",
        "weight",
        offsets=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        mode="mean",
        sparse=False,
        per_sample_weights=None,
        include_last_offset=False,
        padding_idx=None,
    )
    source = call.source(table)
    if source is None:  # the weights of the items are the only parameter
        return per_example_vjp(call)
    if max_norm is not None:
        raise call.refuse("max_norm rewrites the rows that the batch happens to use; set max_norm=None")
    if by_frequency:
        raise call.refuse("scale_grad_by_freq divides by counts over the whole batch; set it to False")
    if ids.is_nested:
        raise call.refuse("a nested tensor has no rows to assign to examples; pad the bags and set padding_idx")
    weights_source = call.source(weights)
    if weights_source is not None:
        weights = call.watch(weights_source)
    rows, value = source.value.shape[0], source.value
    padding = -1 if padding_idx is None else padding_idx % rows
    output = F.embedding_bag(
        ids,
        value,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=last_offset,
        padding_idx=padding_idx,
    )
    place_NL, valid_NL = _places(ids, offsets, last_offset)
    ids_NL = torch.where(valid_NL, ids.reshape(-1)[place_NL].long(), 0)
    valid_NL = valid_NL & (ids_NL != padding)
    if mode == "max":
        flat = torch.arange(0, ids.numel(), max(1, ids.shape[1]), device=ids.device) if offsets is None else offsets
        _, _, _, picked_ND = torch.ops.aten._embedding_bag(
            value, ids.reshape(-1), flat.to(ids.dtype), False, 2, False, None, last_offset, padding
        )
        saved = [ids_NL, valid_NL, picked_ND]
    elif weights is not None:
        saved = [ids_NL, torch.where(valid_NL, weights.detach().reshape(-1)[place_NL], 0)]
    elif mode == "mean":
        saved = [ids_NL, valid_NL.to(value.dtype) / valid_NL.sum(1, keepdim=True).clamp(min=1)]
    else:
        saved = [ids_NL, valid_NL.to(value.dtype)]

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        if owner.layout.axis != 0:
            raise call.refuse("the examples are not on the axis of the bags; give each bag to one example")
        ids, factors, grads = (owner.by_example(t) for t in (*saved[:2], grad))
        if mode == "max":  # the first item of the bag that is the largest in a column has that column's gradient
            hit = (ids.unsqueeze(3) == owner.by_example(saved[2]).unsqueeze(2)) & factors.unsqueeze(3)
            factors = (hit & (hit.cumsum(2) == 1)).to(grad.dtype)
        else:
            factors = factors.unsqueeze(3)
        values = (factors * grads.unsqueeze(2)).flatten(1, 2)
        return [(source, Outer(ids.flatten(1), values, rows))]

    return call.tap(output if output.grad_fn is None else output.clone(), [source], saved, build)


def _places(ids: Tensor, offsets: Tensor | None, last_offset: bool) -> tuple[Tensor, Tensor]:
    """Where each bag's items stand in the flattened ids, [N, L], and which of these places are items of the bag."""
    if offsets is None:
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return places, torch.ones_like(places, dtype=torch.bool)
    ends = offsets[1:] if last_offset else F.pad(offsets[1:], (0, 1), value=len(ids))
    starts = offsets[: len(ends)].long()
    lengths = ends - starts
    steps = torch.arange(int(lengths.max()) if len(lengths) else 0, device=ids.device)
    valid = steps < lengths.unsqueeze(1)
    return torch.where(valid, starts.unsqueeze(1) + steps, 0), valid


RULES: list[tuple[list[Callable[..., object]], Rule]] = [([F.embedding_bag], embedding_bag)]
