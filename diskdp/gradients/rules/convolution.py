"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.rules.fallback import per_example_vjp
from diskdp.gradients.terms import Conv, ConvShape, Direct, Term
from diskdp.gradients.trace import Call, Rule, Source


def convolution(call: Call) -> Tensor:
    """conv(x, W) + b; padding modes other than zeros have already padded x."""
    x, weight, bias, stride, padding, dilation, groups = call.bind(
        "input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    weight_source, bias_source = call.source(weight), call.source(bias)
    space = weight.dim() - 2
    if call.source(x) is not None or call.is_data(weight) or call.is_data(bias):
        return per_example_vjp(call)
    if x.dim() != weight.dim():
        raise call.refuse("the input has no batch axis; give the convolution a batch")
    kernel = tuple(weight.shape[2:])
    stride, dilation = _per_axis(stride, space), _per_axis(dilation, space)
    x, padding = _numeric_padding(x, padding, kernel, dilation)
    shape = ConvShape(kernel, stride, padding, dilation, groups)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    output = convolve(x, call.value(weight), call.value(bias), stride, padding, dilation, groups)

    def term(images: Tensor, grad: Tensor, batch: int) -> Conv:
        return Conv(images, grad, batch, shape)

    return _tapped(call, output, x, weight_source, bias_source, term)


def transposed_convolution(call: Call) -> Tensor:
    """conv_transpose(x, W) + b: the weight gradient of a convolution from the output's positions to the input's.

    In it the output gradient takes the place of the input, and the input that of the output gradient.
    """
    x, weight, bias, stride, padding, output_padding, groups, dilation = call.bind(
        "input", "weight", bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    )
    weight_source, bias_source = call.source(weight), call.source(bias)
    space = weight.dim() - 2
    if call.source(x) is not None or call.is_data(weight) or call.is_data(bias):
        return per_example_vjp(call)
    if x.dim() != weight.dim():
        raise call.refuse("the input has no batch axis; give the convolution a batch")
    stride, padding, dilation, added = (_per_axis(v, space) for v in (stride, padding, dilation, output_padding))
    if any(a >= s for a, s in zip(added, stride)):  # the convolution back would have positions that x has not
        return per_example_vjp(call)
    shape = ConvShape(tuple(weight.shape[2:]), stride, padding, dilation, groups)
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[space - 1]
    output = convolve(x, call.value(weight), call.value(bias), stride, padding, added, groups, dilation)

    def term(images: Tensor, grad: Tensor, batch: int) -> Conv:
        return Conv(grad, images, batch, shape)

    return _tapped(call, output, x, weight_source, bias_source, term)


def _tapped(
    call: Call,
    output: Tensor,
    x: Tensor,
    weight_source: Source | None,
    bias_source: Source | None,
    term: Callable[[Tensor, Tensor, int], Conv],
) -> Tensor:
    """The output, watched; ``term`` makes the weight's term of images, output gradient and number of examples."""

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        if owner.layout.axis != 0:
            raise call.refuse("the examples are not on the convolution's batch axis, so its positions mix them")
        terms: list[tuple[Source, Term]] = []
        grad = owner.by_example(grad).flatten(0, 1)
        if weight_source is not None:
            images = owner.by_example(saved[0]).flatten(0, 1)
            terms.append((weight_source, term(images, grad, owner.batch)))
        if bias_source is not None:
            terms.append((bias_source, Direct(grad.unflatten(0, (owner.batch, -1)).flatten(3).sum((1, 3)))))
        return terms

    return call.tap(output, [weight_source, bias_source], [x] if weight_source is not None else [], build)


def _per_axis(value: int | Sequence[int], space: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * space if len(values) == 1 else values


def _numeric_padding(
    x: Tensor, padding: int | str | Sequence[int], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Padding as numbers; an uneven "same" padding is applied to the input itself."""
    if not isinstance(padding, str):
        return x, _per_axis(padding, len(kernel))
    if padding == "valid":
        return x, (0,) * len(kernel)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
    if all(total % 2 == 0 for total in totals):
        return x, tuple(total // 2 for total in totals)
    return F.pad(x, [p for total in reversed(totals) for p in (total // 2, total - total // 2)]), (0,) * len(kernel)


RULES: list[tuple[list[Callable[..., object]], Rule]] = [
    ([F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d], convolution),
    (
        [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d],
        transposed_convolution,
    ),
]
