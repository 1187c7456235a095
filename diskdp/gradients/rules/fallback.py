"""Operations without a rule of their own: differentiate that one operation once an example.

The gradient at the output is masked to one example's rows and pulled back through the operation, all examples in one
vectorised call. Exact whatever the operation is; costs B times the operation's backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.terms import Direct, Term
from diskdp.gradients.trace import Call, Source, flat_tensors, replaced

MAX_ELEMENTS = 2**25  # of masked gradients held at once


@dataclass(frozen=True)
class _Place:
    """Where a tensor stood among the arguments: the number of a saved tensor, or of a source."""

    source: bool
    number: int


def _without_bad_rows(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> Sequence[Tensor]:
    """Inputs without the rows of examples whose gradient is not finite.

    0 · NaN is NaN: they would reach the others through the masked rows. Other examples' infinities (of an attention
    mask) stay.
    """
    bad_B = ~torch.isfinite(owner.by_example(grad).flatten(1)).all(1)
    if not bool(bad_B.any()):
        return saved
    axis, size = owner.layout.axis, grad.shape[owner.layout.axis]
    bad = bad_B[owner.examples(grad)]
    cleaned = []
    for t in saved:
        if t.is_floating_point() and t.dim() > axis and t.shape[axis] == size:
            t = t.masked_fill(bad.view([-1 if i == axis else 1 for i in range(t.dim())]), 0)
        cleaned.append(t)
    return cleaned


def per_example_vjp(call: Call) -> Any:
    """Run the operation, save its arguments, differentiate it for each example in the backward pass."""
    if call.in_place:
        raise call.refuse("works in place on data and a parameter and has no rule for it; write it out of place")
    sources = call.sources()
    tensors = [t for t in dict.fromkeys(flat_tensors(call.args, call.kwargs)) if call.source(t) is None]
    output = call.function(*replaced(call.args, call.value), **replaced(call.kwargs, call.value))
    if not isinstance(output, Tensor):
        raise call.refuse(
            "has several outputs and no rule, so its per-example gradients cannot be told apart; "
            "write the layer with operations that have one output"
        )
    saved_places = {id(t): _Place(False, i) for i, t in enumerate(tensors)}
    source_places = {id(source): _Place(True, i) for i, source in enumerate(sources)}

    def place(value: Tensor) -> _Place:
        source = call.source(value)
        return saved_places[id(value)] if source is None else source_places[id(source)]

    function, args, kwargs = call.function, replaced(call.args, place), replaced(call.kwargs, place)

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        inputs = _without_bad_rows(saved, grad, owner)
        leaves = [source.value.detach().to(grad.dtype).requires_grad_() for source in sources]

        def again(at: _Place) -> Tensor:
            return leaves[at.number] if at.source else inputs[at.number]

        with torch.enable_grad():
            output = function(*replaced(args, again, _Place), **replaced(kwargs, again, _Place))
        if not output.requires_grad:
            return []  # the operation took no more than a shape or a dtype
        pieces: list[tuple[Tensor, ...]] = []
        step = max(1, MAX_ELEMENTS // max(1, grad.numel()))
        for start in range(0, owner.batch, step):
            examples = torch.arange(start, min(start + step, owner.batch), device=grad.device)
            pieces.append(_pulled_back(output, leaves, owner.masked(grad, examples)))
        return [(source, Direct(torch.cat(grads))) for source, grads in zip(sources, zip(*pieces))]

    return call.tap(output if output.grad_fn is None else output.clone(), sources, tensors, build)


def _pulled_back(output: Tensor, leaves: Sequence[Tensor], grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the leaves for each of several gradients of the output."""
    try:
        return torch.autograd.grad(output, leaves, grads, retain_graph=True, is_grads_batched=True)
    except RuntimeError:  # a backward that cannot be vectorised, such as one that leaves torch, or one too large
        pass
    each = [torch.autograd.grad(output, leaves, grad, retain_graph=True) for grad in grads]
    return tuple(torch.stack(pulled) for pulled in zip(*each))
