"""Recurrent layers (LSTM, GRU, plain RNN) and their cells, whole sequences at once.

The input's part of every gate is one matrix product for all time steps, and the gradient that reaches it is the
gradient at the gates: with the inputs and the hidden states before each step it gives every weight one single term.
The recurrence itself is a loop without an autograd graph; its backward pass is written out below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.products import times_transposed
from diskdp.gradients.terms import Direct, Outer, Term
from diskdp.gradients.trace import Call, Rule, Source

Unrolled: TypeAlias = "tuple[Tensor, Tensor, Tensor | None]"
"""Hidden states [T, B, P] of one layer and direction, the last of them, and an LSTM's last cell."""

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class _Weights:
    """The tensors of one layer and direction, as they stood among the arguments."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


def layers(call: Call) -> tuple[Tensor, ...]:
    """torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu on a padded batch."""
    kind = call.name
    if len(call.args) > 3 and isinstance(call.args[3], list | tuple):
        raise call.refuse(
            "a PackedSequence keeps the rows of all examples interleaved and sorted by length, so they cannot be "
            "assigned to examples; pass the padded sequence and mask the outputs beyond each length"
        )
    x, state, params, biased, count, dropout, training, both_ways, batch_first = call.bind(
        "input",
        "hx",
        "params",
        "has_biases",
        "num_layers",
        "dropout",
        "train",
        "bidirectional",
        batch_first=False,
    )
    x_TBI = _data(call, x)
    if x_TBI.dim() != 3:
        raise call.refuse("the input has no batch axis; give it the shape [time, batch, features]")
    states = [_data(call, s) for s in (state if kind == "lstm" else (state,))]
    dtype = _autocast_dtype(x_TBI)
    if batch_first:
        x_TBI = x_TBI.transpose(0, 1)
    directions = 2 if both_ways else 1
    each = len(params) // (count * directions)
    lasts: list[list[Tensor]] = [[], []]
    for layer in range(count):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = _weights(params[index * each : (index + 1) * each], biased)
            first = [s[index] for s in states]
            output, *last = _unrolled(call, kind, x_TBI, first, weights, direction == 1, dtype)
            outputs.append(output)
            for found, one in zip(lasts, last):
                if one is not None:
                    found.append(one)
        x_TBI = outputs[0] if directions == 1 else torch.cat(outputs, 2)
        if dropout and training and layer < count - 1:
            x_TBI = F.dropout(x_TBI, dropout)
    output = x_TBI.transpose(0, 1) if batch_first else x_TBI
    return (output, *(torch.stack(found) for found in lasts if found))


def cell(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """torch.lstm_cell and its like: one time step."""
    kind = call.name.removesuffix("_cell")
    x, state, input_weight, hidden_weight, input_bias, hidden_bias = call.bind(
        "input", "hx", "w_ih", "w_hh", b_ih=None, b_hh=None
    )
    x = _data(call, x)
    states = [_data(call, s) for s in (state if kind == "lstm" else (state,))]
    weights = _Weights(input_weight, hidden_weight, input_bias, hidden_bias)
    output, _, memory = _unrolled(call, kind, x.unsqueeze(0), states, weights, False, _autocast_dtype(x))
    return output.squeeze(0) if memory is None else (output.squeeze(0), memory)


def _data(call: Call, value: Tensor) -> Tensor:
    """An input or first state; one that is a parameter (expanded over the batch) is watched."""
    source = call.source(value)
    return value if source is None else call.watch(source)


def _weights(tensors: Sequence[Tensor], biased: bool) -> _Weights:
    bias = tensors[2:4] if biased else (None, None)
    rest = tensors[4 if biased else 2 :]
    return _Weights(tensors[0], tensors[1], bias[0], bias[1], rest[0] if rest else None)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def _unrolled(
    call: Call,
    kind: str,
    x_TBI: Tensor,
    states: Sequence[Tensor],
    weights: _Weights,
    reverse: bool,
    dtype: torch.dtype | None,
) -> Unrolled:
    """One layer in one direction; ``dtype`` is the one of autocast, if it is on."""
    given = (weights.input, weights.hidden, weights.input_bias, weights.hidden_bias, weights.projection)
    if any(call.is_data(w) for w in given):
        raise call.refuse("its weights are computed from data; write the recurrence with linear operations")
    with torch.autocast(x_TBI.device.type, enabled=False):

        def cast(value: Any) -> Any:
            return value if dtype is None or value is None else value.to(dtype)

        w_ih, w_hh, b_ih, b_hh, w_hr = (cast(call.value(w)) for w in given)
        x_TBI, first = cast(x_TBI), [cast(s) for s in states]
        if (b_ih is None) != (b_hh is None):
            b_ih, b_hh = (torch.zeros_like(w_ih[:, 0]) if b is None else b for b in (b_ih, b_hh))
        if b_ih is not None and kind == "gru":  # the candidate's hidden part is multiplied by r: its bias with it
            b_ih = b_ih + F.pad(b_hh[: 2 * w_hh.shape[1]], (0, w_hh.shape[1]))
            b_hh = b_hh[2 * w_hh.shape[1] :]
        elif b_ih is not None:
            b_ih = b_ih + b_hh
        gates = _Project.apply(x_TBI, w_ih, b_ih)  # type: ignore[no-untyped-call]
        with torch.no_grad():  # ``gates`` holds the activated gates from here on
            if kind == "lstm":
                kept = _run_lstm(gates.detach(), first[0], first[1], w_hh, w_hr, reverse)
            elif kind == "gru":
                kept = _run_gru(gates.detach(), first[0], w_hh, b_hh, reverse)
            else:
                kept = _run_plain(gates.detach(), first[0], w_hh, kind == "rnn_tanh", reverse)
        h_prev = kept[0][1:] if reverse else kept[0][:-1]
        gates = _tap_gates(call, weights, gates, x_TBI, h_prev, gated=kind == "gru")
        if kind == "lstm":
            shift = None if w_hr is None else _tap_projection(call, weights, kept[3], w_hr)
            output, memory = _Lstm.apply(gates, shift, *first, w_hh, w_hr, *kept, reverse)  # type: ignore[no-untyped-call]
        elif kind == "gru":
            output, memory = _Gru.apply(gates, *first, w_hh, *kept, reverse), None  # type: ignore[no-untyped-call]
        else:
            arguments = (gates, *first, w_hh, *kept, kind == "rnn_tanh", reverse)
            output, memory = _Plain.apply(*arguments), None  # type: ignore[no-untyped-call]
    return output, output[0 if reverse else -1], memory


def _tap_gates(call: Call, weights: _Weights, gates: Tensor, x: Tensor, h_prev: Tensor, gated: bool) -> Tensor:
    """Watch the gates' input. ``gated``: the last third's hidden part was multiplied by the first gate (GRU)."""
    sources = [call.source(w) for w in (weights.input, weights.hidden, weights.input_bias, weights.hidden_bias)]
    if not any(sources):
        return gates
    width = h_prev.shape[2]
    saved = {"x": x} if sources[0] is not None else {}
    if sources[1] is not None:
        saved["h"] = h_prev
    if gated and (sources[1] is not None or sources[3] is not None):
        saved["r"] = gates.detach()[:, :, :width].clone()
    places = {name: number for number, name in enumerate(saved)}

    def build(values: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        rows = _rows(call, owner, grad).contiguous()  # shared by all terms
        hidden_rows = rows
        if "r" in places:
            reset = _rows(call, owner, values[places["r"]])
            hidden_rows = torch.cat([rows[..., : 2 * width], rows[..., 2 * width :] * reset], 2)
        terms: list[tuple[Source, Term]] = []
        for source, name, at_gates in ((sources[0], "x", rows), (sources[1], "h", hidden_rows)):
            if source is not None:
                terms.append((source, Outer(at_gates, _rows(call, owner, values[places[name]]), rows.shape[2])))
        for source, at_gates in ((sources[2], rows), (sources[3], hidden_rows)):
            if source is not None:
                terms.append((source, Direct(at_gates.sum(1))))
        return terms

    return call.tap(gates, sources, list(saved.values()), build)


def _tap_projection(call: Call, weights: _Weights, projected: Tensor, w_hr: Tensor) -> Tensor:
    """Zeros that are added to the projected states: their gradient is the one at the projection's output."""
    source = call.source(weights.projection)
    zeros = projected.new_zeros(()).expand(*projected.shape[:2], w_hr.shape[0])
    if source is None:
        return zeros
    target = source

    def build(values: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        rows = _rows(call, owner, grad)
        return [(target, Outer(rows, _rows(call, owner, values[0]), rows.shape[2]))]

    return call.tap(zeros, [source], [projected], build)


def _rows(call: Call, owner: Owner, values: Tensor) -> Tensor:
    if owner.layout.axis == 2:
        raise call.refuse("the examples lie on the axis of the features; put them on the batch axis")
    return owner.rows(values)


def _steps(reverse: bool, *values: Tensor) -> list[tuple[Tensor, ...]]:
    """The time steps of each tensor [T, ...], in the order in which the layer takes them."""
    return list(zip(*(v.unbind()[::-1] if reverse else v.unbind() for v in values)))


def _chain(first: Tensor, length: int, reverse: bool) -> Tensor:
    """Memory for the states before and after each step, ``first`` in its place: [T + 1, B, H]."""
    chain = first.new_empty(length + 1, *first.shape)
    chain[length if reverse else 0] = first
    return chain


def _unseen(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass on saved tensors: the trace that is active has nothing to learn from its operations.

    Reading what was saved may run a checkpointed segment again, which the trace has to see.
    """

    @functools.wraps(backward)
    def unseen(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return backward(ctx, saved, *grads)

    return unseen


class _Project(torch.autograd.Function):
    """x Wᵀ + b for all time steps; the weights are constants here."""

    @staticmethod
    def forward(ctx: Any, x_TBI: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        rows = x_TBI.reshape(-1, x_TBI.shape[2])
        product = times_transposed(weight, len(rows))(rows)
        if bias is not None:
            product.add_(bias)
        # no view: the gates are activated in place
        return torch.ops.aten._unsafe_view.default(product, [*x_TBI.shape[:2], len(weight)])

    @staticmethod
    @_unseen
    def backward(ctx: Any, saved: Sequence[Tensor], grad_TBG: Tensor) -> Any:  # type: ignore[override]
        if not ctx.needs_input_grad[0]:
            return None, None, None
        [weight] = saved
        rows = grad_TBG.reshape(-1, grad_TBG.shape[2])
        return times_transposed(weight.t(), len(rows))(rows).view(*grad_TBG.shape[:2], weight.shape[1]), None, None


def _run_lstm(
    gates_TBG: Tensor, hidden: Tensor, memory: Tensor, w_hh: Tensor, w_hr: Tensor | None, reverse: bool
) -> tuple[Tensor, ...]:
    """Activates the gates in place; hidden states, cells, their tanh, and the outputs to be projected."""
    length, width = len(gates_TBG), memory.shape[-1]
    hiddens, cells = _chain(hidden, length, reverse), _chain(memory, length, reverse)
    tanhs = torch.empty_like(cells[1:])
    outputs = tanhs.new_empty(0) if w_hr is None else torch.empty_like(tanhs)
    after = slice(0, length) if reverse else slice(1, length + 1)
    targets = hiddens[after] if w_hr is None else outputs
    recurrent = times_transposed(w_hh, len(hidden), uses=length)
    parts = gates_TBG, gates_TBG[..., : 2 * width], *gates_TBG.split(width, 2)
    for gates, i_f, i, f, g, o, h, c, tanh, out in _steps(
        reverse, *parts, hiddens[after], cells[after], tanhs, targets
    ):
        gates.add_(recurrent(hidden))
        i_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, memory, out=c).addcmul_(i, g)
        torch.tanh(c, out=tanh)
        torch.mul(o, tanh, out=out)
        hidden, memory = h, c
        if w_hr is not None:
            torch.mm(out, w_hr.t(), out=h)
    return hiddens, cells, tanhs, outputs


class _Lstm(torch.autograd.Function):
    """Hidden states [T, B, P] and the last cell, from states that have been computed."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        shift: Tensor | None,
        hidden: Tensor,
        memory: Tensor,
        w_hh: Tensor,
        w_hr: Tensor | None,
        hiddens: Tensor,
        cells: Tensor,
        tanhs: Tensor,
        outputs: Tensor,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gates, w_hh, w_hr, cells, tanhs)
        ctx.reverse = reverse
        ctx.set_materialize_grads(False)
        return (hiddens[:-1] if reverse else hiddens[1:]).clone(), cells[0 if reverse else -1].clone()

    @staticmethod
    @_unseen
    def backward(ctx: Any, saved: Sequence[Tensor], grad_TBP: Tensor | None, d_memory: Tensor | None) -> Any:  # type: ignore[override]
        gates_TBG, w_hh, w_hr, cells, tanhs = saved
        reverse, width = ctx.reverse, cells.shape[2]
        i, f, g, o = gates_TBG.split(width, 2)
        c_prev = cells[1:] if reverse else cells[:-1]
        grad_TBP = _or_zeros(grad_TBP, (*gates_TBG.shape[:2], w_hh.shape[1]), gates_TBG)
        d_memory = cells.new_zeros(cells.shape[1:]) if d_memory is None else d_memory.clone()
        # what the gradient of the cell (of the output, for the output gate) is to be multiplied by
        d_gates = torch.empty_like(gates_TBG)
        d_i, d_f, d_g, d_o = d_gates.split(width, 2)
        aten = torch.ops.aten
        aten.sigmoid_backward.grad_input(g, i, grad_input=d_i)
        aten.sigmoid_backward.grad_input(c_prev, f, grad_input=d_f)
        aten.tanh_backward.grad_input(i, g, grad_input=d_g)
        aten.sigmoid_backward.grad_input(tanhs, o, grad_input=d_o)
        through = aten.tanh_backward(o, tanhs)
        d_shift = None if w_hr is None else torch.empty_like(grad_TBP)
        back = times_transposed(w_hh.t(), gates_TBG.shape[1], uses=len(gates_TBG))
        d_hidden = torch.zeros_like(grad_TBP[0])
        d_cell_gates = d_gates[..., : 3 * width].unflatten(2, (3, width))
        spread = d_memory.unsqueeze(1)
        steps = _steps(
            not reverse, grad_TBP if d_shift is None else d_shift, grad_TBP, d_gates, d_cell_gates, d_o, through, f
        )
        for shift, grad, d_gate, d_cell_gate, d_out, opened, kept in steps:
            d_hidden += grad
            d_output = d_hidden
            if w_hr is not None:
                shift.copy_(d_hidden)
                d_output = d_hidden @ w_hr
            d_memory.addcmul_(d_output, opened)
            d_cell_gate.mul_(spread)
            d_out.mul_(d_output)
            d_memory.mul_(kept)
            d_hidden = back(d_gate)
        return d_gates, d_shift, d_hidden, d_memory, *[None] * 7


def _run_gru(gates_TBG: Tensor, hidden: Tensor, w_hh: Tensor, b_hn: Tensor | None, reverse: bool) -> tuple[Tensor, ...]:
    """Activates the gates in place; hidden states, and the hidden parts of the candidates."""
    length, width = len(gates_TBG), hidden.shape[-1]
    hiddens = _chain(hidden, length, reverse)
    parts = torch.empty_like(hiddens[1:])
    after = slice(0, length) if reverse else slice(1, length + 1)
    recurrent = times_transposed(w_hh, len(hidden), uses=length)
    gates = gates_TBG[..., : 2 * width], *gates_TBG.split(width, 2)
    for r_z, r, z, n, h, part in _steps(reverse, *gates, hiddens[after], parts):
        to_gates, to_candidate = recurrent(hidden).split((2 * width, width), 1)
        r_z.add_(to_gates).sigmoid_()
        if b_hn is None:
            part.copy_(to_candidate)
        else:
            torch.add(to_candidate, b_hn, out=part)
        n.addcmul_(r, part).tanh_()
        torch.lerp(n, hidden, z, out=h)
        hidden = h
    return hiddens, parts


class _Gru(torch.autograd.Function):
    """Hidden states [T, B, H], from states that have been computed."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, w_hh: Tensor, hiddens: Tensor, parts: Tensor, reverse: bool
    ) -> Tensor:
        ctx.save_for_backward(gates, w_hh, hiddens, parts)
        ctx.reverse = reverse
        return (hiddens[:-1] if reverse else hiddens[1:]).clone()

    @staticmethod
    @_unseen
    def backward(ctx: Any, saved: Sequence[Tensor], grad_TBH: Tensor) -> Any:  # type: ignore[override]
        gates_TBG, w_hh, hiddens, parts = saved
        reverse, width = ctx.reverse, w_hh.shape[1]
        r, z, n = gates_TBG.split(width, 2)
        h_prev = hiddens[1:] if reverse else hiddens[:-1]
        # the gradient of the state becomes that of the gates, at the input and (``d_hiddens``) at the hidden part
        d_gates, d_hiddens = torch.empty_like(gates_TBG), torch.empty_like(gates_TBG)
        d_r, d_z, d_part = d_hiddens.split(width, 2)
        aten = torch.ops.aten
        d_n = aten.tanh_backward(1 - z, n)
        aten.sigmoid_backward.grad_input(d_n * parts, r, grad_input=d_r)
        aten.sigmoid_backward.grad_input(h_prev - n, z, grad_input=d_z)
        torch.mul(d_n, r, out=d_part)
        back = times_transposed(w_hh.t(), gates_TBG.shape[1], uses=len(gates_TBG))
        d_hidden = torch.zeros_like(grad_TBH[0])
        spread = d_hiddens.unflatten(2, (3, width))
        for grad, at_hidden, at_three, at_candidate, kept in _steps(not reverse, grad_TBH, d_hiddens, spread, d_n, z):
            d_hidden += grad
            at_three.mul_(d_hidden.unsqueeze(1))
            at_candidate.mul_(d_hidden)
            d_hidden = back(at_hidden).addcmul_(d_hidden, kept)
        d_gates[:, :, : 2 * width] = d_hiddens[:, :, : 2 * width]
        d_gates[:, :, 2 * width :] = d_n
        return d_gates, d_hidden, *[None] * 4


def _run_plain(gates_TBH: Tensor, hidden: Tensor, w_hh: Tensor, tanh: bool, reverse: bool) -> tuple[Tensor, ...]:
    length = len(gates_TBH)
    hiddens = _chain(hidden, length, reverse)
    recurrent = times_transposed(w_hh, len(hidden), uses=length)
    for gate, h in _steps(reverse, gates_TBH, hiddens[:-1] if reverse else hiddens[1:]):
        torch.add(gate, recurrent(hidden), out=h)
        if tanh:
            h.tanh_()
        else:
            h.relu_()
        hidden = h
    return (hiddens,)


class _Plain(torch.autograd.Function):
    """Hidden states [T, B, H] of a recurrence with tanh or relu, from states that have been computed."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, w_hh: Tensor, hiddens: Tensor, tanh: bool, reverse: bool
    ) -> Tensor:
        ctx.save_for_backward(w_hh, hiddens)
        ctx.tanh, ctx.reverse = tanh, reverse
        return (hiddens[:-1] if reverse else hiddens[1:]).clone()

    @staticmethod
    @_unseen
    def backward(ctx: Any, saved: Sequence[Tensor], grad_TBH: Tensor) -> Any:  # type: ignore[override]
        w_hh, hiddens = saved
        states = hiddens[:-1] if ctx.reverse else hiddens[1:]
        d_gates = 1 - states.square() if ctx.tanh else (states > 0).to(states.dtype)
        back = times_transposed(w_hh.t(), hiddens.shape[1], uses=len(grad_TBH))
        d_hidden = torch.zeros_like(grad_TBH[0])
        for grad, d_gate in _steps(not ctx.reverse, grad_TBH, d_gates):
            d_gate.mul_(d_hidden.add_(grad))
            d_hidden = back(d_gate)
        return d_gates, d_hidden, *[None] * 4


def _or_zeros(grad: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_zeros(()).expand(shape) if grad is None else grad


RULES: list[tuple[list[Callable[..., object]], Rule]] = [
    ([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu], layers),
    ([torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell], cell),
]
