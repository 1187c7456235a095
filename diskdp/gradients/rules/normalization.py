"""Scale and shift after a normalization; normalizations that look at other examples are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.ownership import Owner
from diskdp.gradients.rules.fallback import per_example_vjp
from diskdp.gradients.terms import Direct, Term
from diskdp.gradients.trace import Call, Rule, Source


def layer_norm(call: Call) -> Tensor:
    x, shape, weight, bias, eps = call.bind("input", "normalized_shape", weight=None, bias=None, eps=1e-5)
    return _affine(call, x, weight, bias, lambda x, w, b: F.layer_norm(x, shape, w, b, eps), channels=False)


def rms_norm(call: Call) -> Tensor:
    x, shape, weight, eps = call.bind("input", "normalized_shape", weight=None, eps=None)
    return _affine(call, x, weight, None, lambda x, w, _: F.rms_norm(x, shape, w, eps), channels=False)


def group_norm(call: Call) -> Tensor:
    x, groups, weight, bias, eps = call.bind("input", "num_groups", weight=None, bias=None, eps=1e-5)
    return _affine(call, x, weight, bias, lambda x, w, b: F.group_norm(x, groups, w, b, eps), channels=True)


def instance_norm(call: Call) -> Tensor:
    x, mean, var, weight, bias, own, momentum, eps = call.bind(
        "input",
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    )
    if own and mean is not None:
        raise call.refuse("running statistics would store un-noised data in the model; set track_running_stats=False")
    return _affine(
        call,
        x,
        weight,
        bias,
        lambda x, w, b: F.instance_norm(x, mean, var, w, b, own, momentum, eps),
        channels=True,
    )


def batch_norm(call: Call) -> Tensor:
    """With fixed statistics an affine map of each example; in training mode its guard has refused it."""
    x, mean, var, weight, bias, _, _, eps = call.bind(
        "input", "running_mean", "running_var", weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    )
    return _affine(
        call,
        x,
        weight,
        bias,
        lambda x, w, b: F.batch_norm(x, mean, var, w, b, False, 0.0, eps),
        channels=True,
    )


def prelu(call: Call) -> Tensor:
    """max(x, 0) + w min(x, 0), w one number or one a channel."""
    x, weight = call.bind("input", "weight")
    source = call.source(weight)
    if source is None:
        return per_example_vjp(call)

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        products = grad * saved[0].clamp(max=0)
        return [(source, _summed(owner, products, source, channels=source.value.numel() > 1))]

    return call.tap(F.prelu(x, source.value), [source], [x], build)


def refuse_batch_norm(call: Call) -> None:
    """Batch statistics make every example's gradient depend on the others."""
    training = call.args[5] if len(call.args) > 5 else call.kwargs.get("training", False)
    if training:
        raise call.refuse(
            "batch statistics mix the examples of a batch; replace BatchNorm by GroupNorm, or call .eval() on it"
        )


def _affine(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    channels: bool,
) -> Tensor:
    if call.source(x) is not None or call.is_data(weight) or call.is_data(bias):
        return per_example_vjp(call)
    weight_source, bias_source = call.source(weight), call.source(bias)

    def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
        terms: list[tuple[Source, Term]] = []
        if weight_source is not None:
            products = grad * normalize(saved[0], None, None)
            terms.append((weight_source, _summed(owner, products, weight_source, channels)))
        if bias_source is not None:
            terms.append((bias_source, _summed(owner, grad, bias_source, channels)))
        return terms

    saved = [x] if weight_source is not None else []
    output = normalize(x, call.value(weight), call.value(bias))
    return call.tap(output, [weight_source, bias_source], saved, build)


def _summed(owner: Owner, products: Tensor, source: Source, channels: bool) -> Direct:
    """Per-example sums over all axes but the parameter's: the last ones, or axis 1 for ``channels``."""
    shape = source.value.shape
    if channels:
        shape = torch.Size([*shape, *[1] * (products.dim() - 2)])
    return Direct(owner.sum_to(products, shape).reshape(owner.batch, *source.value.shape))


GUARDS: Mapping[Callable[..., object], Callable[[Call], None]] = {
    F.batch_norm: refuse_batch_norm,
    torch.batch_norm: refuse_batch_norm,
}
RULES: list[tuple[list[Callable[..., object]], Rule]] = [
    ([F.layer_norm, torch.layer_norm], layer_norm),
    ([F.rms_norm, torch.rms_norm], rms_norm),
    ([F.group_norm, torch.group_norm], group_norm),
    ([F.instance_norm], instance_norm),
    ([F.batch_norm], batch_norm),
    ([F.prelu, torch.prelu], prelu),
]
