"""From terms on tensors that were computed from parameters to terms on the parameters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.terms import Direct, Outer, Term
from diskdp.gradients.trace import Source, Use, first_row

Key: TypeAlias = "tuple[int, int]"
"""The use, and which of its terms: the same at every point, so that points can be paired."""


def source_terms(use: Use, saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Key, Source, Term]]:
    """The terms of one use, from the gradient that reached its tap; sums are taken in float32 or better."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    factors = [t.to(dtype) if t.is_floating_point() else t for t in saved]
    terms = use.build(factors, grad.to(dtype), owner)
    return [((use.index, position), source, term) for position, (source, term) in enumerate(terms)]


def parameter_terms(collected: Sequence[tuple[Key, Source, Term]]) -> dict[str, dict[Key, Term]]:
    """Terms by parameter. Views keep their factors; anything else is pulled back an example at a time."""
    result: dict[str, dict[Key, Term]] = {}
    for key, source, term in collected:
        for name, pulled in _pulled_back(source, term):
            result.setdefault(name, {})[key] = pulled
    return result


def _pulled_back(source: Source, term: Term) -> list[tuple[str, Term]]:
    while not source.parameter:
        if source.base is not None and source.view == "same":
            source = source.base
        elif source.base is not None and source.view == "transpose":
            source, term = source.base, _transposed(term)
        elif source.base is not None and source.view == "rows":
            term = _among_rows(source.base.node, source.node, term)
            source = source.base
        else:
            grads = term.per_example()
            names, leaves = list(source.leaves), list(source.leaves.values())
            found = torch.autograd.grad(
                source.node,
                leaves,
                grads.to(source.node.dtype),
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,  # a leaf may have lent its shape alone
            )
            return [(name, Direct(g.to(grads.dtype))) for name, g in zip(names, found) if g is not None]
    return [(source.name, term)]


def _transposed(term: Term) -> Term:
    if isinstance(term, Outer) and not term.one_hot:
        return Outer(term.right, term.left, term.right.shape[2], term.scale)
    return Direct(term.per_example().transpose(1, 2))


def _among_rows(whole: Tensor, part: Tensor, term: Term) -> Term:
    """The term of some rows of a matrix (attention's packed projections) as one of all its rows."""
    first = first_row(whole, part)
    if first is None:
        raise ValueError("not a view of rows")
    around = (first, len(whole) - len(part) - first)
    if isinstance(term, Outer):
        left = term.left + first if term.one_hot else F.pad(term.left, around)
        return Outer(left, term.right, len(whole), term.scale)
    return Direct(F.pad(term.per_example(), (0, 0, *around)))
