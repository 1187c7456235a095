"""Operations without a rule of their own: differentiate that one operation once an example.

The gradient at the output is masked to one example's rows and pulled back through the operation, all examples in one
vectorised call. Exact whatever the operation is; costs B times the operation's backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.terms import Direct, Term
from diskdp.gradients.trace import Call, Source, flat_tensors, replaced

MAX_ELEMENTS = 2**25  # of masked gradients held at once


def per_example_vjp(call: Call) -> Any:
    """Run the operation, remember its arguments, differentiate it for each example in the backward pass."""
    if call.in_place and call.source(call.args[0]) is not None:
        raise call.refuse("writes data into a tensor computed from parameters; write the operation out of place")
    sources = call.sources()
    tensors = list(dict.fromkeys(t for t in flat_tensors(call.args, call.kwargs) if call.source(t) is None))
    slots = {id(t): i for i, t in enumerate(tensors)}
    output = call.function(*replaced(call.args, call.value), **replaced(call.kwargs, call.value))
    if not isinstance(output, Tensor):
        raise call.refuse(
            "has several outputs and no rule, so its per-example gradients cannot be told apart; "
            "write the layer with operations that have one output"
        )
    function, trace_sources = (
        call.function,
        {id(t): call.source(t) for t in flat_tensors(call.args, call.kwargs)},
    )
    args, kwargs = call.args, call.kwargs

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        leaves = {id(s): s.value.detach().requires_grad_() for s in sources}

        def again(value: Tensor) -> Tensor:
            source = trace_sources[id(value)]
            return saved[slots[id(value)]].detach() if source is None else leaves[id(source)]

        with torch.enable_grad():
            output = function(*replaced(args, again), **replaced(kwargs, again))
        wanted = list(leaves.values())
        pieces: list[list[Tensor]] = [[] for _ in wanted]
        step = max(1, MAX_ELEMENTS // max(1, grad.numel()))
        for start in range(0, owner.batch, step):
            examples = torch.arange(start, min(start + step, owner.batch), device=grad.device)
            found = torch.autograd.grad(
                output, wanted, owner.masked(grad, examples), retain_graph=True, is_grads_batched=True
            )
            for piece, values in zip(pieces, found):
                piece.append(values)
        return [(source, Direct(torch.cat(piece))) for source, piece in zip(sources, pieces)]

    return call.tap(output if output.grad_fn is None else output.clone(), sources, tensors, build)
