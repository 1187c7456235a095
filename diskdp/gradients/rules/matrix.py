"""Products with a matrix of parameters: linear layers in all their spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients import products
from diskdp.gradients.ownership import Owner
from diskdp.gradients.rules.fallback import per_example_vjp
from diskdp.gradients.terms import Direct, Outer, Term
from diskdp.gradients.trace import Call, Rule, Source


def linear(call: Call) -> Tensor:
    """y = x Wᵀ + b: rows of the output gradient times rows of the input."""
    x, weight, bias = call.bind("input", "weight", bias=None)
    weight_source, bias_source = call.source(weight), call.source(bias)
    if call.source(x) is not None or call.is_data(weight) or call.is_data(bias) or weight.dim() != 2:
        return per_example_vjp(call)
    output = products.linear(x, call.value(weight), call.value(bias))

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        rows = owner.rows(grad)
        terms: list[tuple[Source, Term]] = []
        if weight_source is not None:
            terms.append((weight_source, Outer(rows, owner.rows(saved[0]), rows.shape[2])))
        if bias_source is not None:
            terms.append((bias_source, Direct(rows.squeeze(1) if rows.shape[1] == 1 else rows.sum(1))))
        return terms

    return call.tap(output, [weight_source, bias_source], [x] if weight_source is not None else [], build)


def matmul(call: Call) -> Tensor:
    """x @ W with a matrix W on either side."""
    left, right = call.bind("input", "other") if "other" in call.kwargs else call.bind("input", "mat2")
    source = call.source(right)
    if source is not None and right.dim() == 2 and left.dim() >= 2 and call.source(left) is None:
        return _times_matrix(call, left, source)
    source = call.source(left)
    if source is not None and left.dim() == 2 and right.dim() >= 2 and call.source(right) is None:
        return _matrix_times(call, source, right)
    return per_example_vjp(call)


def reversed_matmul(call: Call) -> Tensor:
    """The reflected operator: ``a.__rmatmul__(b)`` is b @ a."""
    return matmul(Call(call.trace, torch.matmul, (call.args[1], call.args[0]), {}))


def addmm(call: Call) -> Tensor:
    """β b + α x @ W, as Hugging Face's Conv1D spells a linear layer."""
    bias, left, right, beta, alpha = call.bind("input", "mat1", "mat2", beta=1, alpha=1)
    weight_source, bias_source = call.source(right), call.source(bias)
    if call.source(left) is not None or call.is_data(right) or call.is_data(bias):
        return per_example_vjp(call)
    output = _plus_product(call.value(bias), left, call.value(right), beta=beta, alpha=alpha)

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        terms: list[tuple[Source, Term]] = []
        if weight_source is not None:
            rows = owner.rows(saved[0])
            terms.append((weight_source, Outer(rows * alpha if alpha != 1 else rows, owner.rows(grad), rows.shape[2])))
        if bias_source is not None:
            terms.append((bias_source, Direct(owner.sum_to(grad, bias_source.value.shape) * beta)))
        return terms

    return call.tap(output, [weight_source, bias_source], [left] if weight_source is not None else [], build)


def _plus_product(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`torch.addmm`, faster where the matrix and the bias need no gradient."""
    plain = all(type(t) in products.PLAIN for t in (bias, left, right))
    if plain and beta == alpha == 1 and left.dim() == 2 and bias.shape == right.shape[1:]:
        return products.linear(left, right.t(), bias)
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha)


def bilinear(call: Call) -> Tensor:
    """y_k = x₁ᵀ W_k x₂ + b_k: rows of the output gradient times the products of the two inputs' rows."""
    first, second, weight, bias = call.bind("input1", "input2", "weight", bias=None)
    weight_source, bias_source = call.source(weight), call.source(bias)
    inputs_given = call.source(first) is None and call.source(second) is None
    if not inputs_given or call.is_data(weight) or call.is_data(bias):
        return per_example_vjp(call)
    output = F.bilinear(first, second, call.value(weight), call.value(bias))

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        rows = owner.rows(grad)
        terms: list[tuple[Source, Term]] = []
        if weight_source is not None:
            a, b = (owner.rows(x) for x in saved)
            products = (a.unsqueeze(3) * b.unsqueeze(2)).flatten(2)
            grads = torch.bmm(rows.transpose(1, 2), products)
            terms.append((weight_source, Direct(grads.view(owner.batch, *weight_source.value.shape))))
        if bias_source is not None:
            terms.append((bias_source, Direct(rows.sum(1))))
        return terms

    saved = [first, second] if weight_source is not None else []
    return call.tap(output, [weight_source, bias_source], saved, build)


def _times_matrix(call: Call, x: Tensor, source: Source) -> Tensor:
    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        return [(source, Outer(owner.rows(saved[0]), owner.rows(grad), source.value.shape[0]))]

    return call.tap(products.linear(x, source.value.t(), None), [source], [x], build)


def _matrix_times(call: Call, source: Source, x: Tensor) -> Tensor:
    """W @ x: the columns of x are the rows of the factors."""

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        columns = _columns(owner, grad), _columns(owner, saved[0])
        return [(source, Outer(columns[0], columns[1], source.value.shape[0]))]

    return call.tap(torch.matmul(source.value, x), [source], [x], build)


def _columns(owner: Owner, values: Tensor) -> Tensor:
    """[..., D, T] -> [B, T', D] where the batch axis is any but D's."""
    split = owner.by_example(values)  # [B, K, ...others]
    feature = split.dim() - (2 if owner.layout.axis != values.dim() - 1 else 1)
    return split.movedim(feature, -1).reshape(owner.batch, -1, values.shape[-2])


RULES: list[tuple[list[Callable[..., object]], Rule]] = [
    ([F.linear], linear),
    ([torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__], matmul),
    ([torch.Tensor.__rmatmul__], reversed_matmul),
    ([torch.addmm, torch.Tensor.addmm], addmm),
    ([F.bilinear, torch.bilinear], bilinear),
]
FASTER: Mapping[Callable[..., object], Callable[..., object]] = {F.linear: products.linear, torch.addmm: _plus_product}
