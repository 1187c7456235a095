"""Slow and obvious: per-example gradients by a loop over examples, float64, plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diskdp.gradients import RandomState


def example(batch: Any, index: int, axes: Sequence[int] | None = None) -> Any:
    """The batch of one example; ``axes`` says on which axis of each tensor the examples lie (default 0)."""
    axes = axes or [0] * len(batch)
    return tuple(t.narrow(axis, index, 1) for t, axis in zip(batch, axes))


def per_example(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    points: Sequence[tuple[float, Mapping[str, Tensor] | None]] = ((1.0, None),),
    axes: Sequence[int] | None = None,
) -> list[dict[str, Tensor]]:
    """u_i = Σ_k a_k ∇loss_i(point k), one dictionary an example."""
    count = batch[0].shape[(axes or [0])[0]]
    return _gradients(model, [example(batch, i, axes) for i in range(count)], loss_fn, points)


def _gradients(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    points: Sequence[tuple[float, Mapping[str, Tensor] | None]],
) -> list[dict[str, Tensor]]:
    """Σ_k a_k ∇ Σ loss(point k) for each of the batches."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = {name: p.data for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    result = []
    for batch in batches:
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        for coefficient, values in points:
            for name, p in parameters.items():
                p.data = held[name] if values is None else values[name]
            loss_fn(model, batch).sum().backward()
            for name, p in parameters.items():
                if p.grad is not None:
                    total[name] += coefficient * p.grad.double()
                p.grad = None
        result.append(total)
    for name, p in parameters.items():
        p.data = held[name]
    return result


def norm(gradient: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.detach().double().square().sum()) for g in gradient.values()))


def clipped(gradients: Sequence[Mapping[str, Tensor]], clipping: str, max_norm: float) -> dict[str, Tensor]:
    """Σ_i clip(u_i), from the definitions."""
    total = {name: torch.zeros_like(g) for name, g in gradients[0].items()}
    for gradient in gradients:
        if clipping == "per-layer":
            layers: dict[str, dict[str, Tensor]] = {}
            for name, g in gradient.items():
                layers.setdefault(name.rpartition(".")[0], {})[name] = g
            threshold = max_norm / math.sqrt(len(layers))
            factors = {n: min(1.0, threshold / max(norm(own), 1e-300)) for own in layers.values() for n in own}
        else:
            length = norm(gradient)
            factor = {
                "flat": min(1.0, max_norm / max(length, 1e-300)),
                "automatic": max_norm / (length + 0.01),
                "normalized": min(1 / max_norm, 1 / max(length, 1e-300)),
            }[clipping]
            factors = dict.fromkeys(gradient, factor)
        for name, g in gradient.items():
            total[name] += factors[name] * g
    return total


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Error of the whole gradient, relative to its length."""
    difference = {name: found[name].double() - exact[name] if name in found else exact[name] for name in exact}
    return norm(difference) / max(norm(exact), 1e-300)


def same_masks(loss_fn: Callable[[Any, Any], Tensor], state: RandomState) -> Callable[[Any, Any], Tensor]:
    """A loss function that rewinds the random state first."""

    def rewound(model: Any, batch: Any) -> Tensor:
        state.restore()
        return loss_fn(model, batch)

    return rewound


def per_example_same_masks(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    points: Sequence[tuple[float, Mapping[str, Tensor] | None]] = ((1.0, None),),
) -> list[dict[str, Tensor]]:
    """As `per_example`, but each loss is one of the whole batch's, from one random state and the same buffers.

    For models with dropout or power iterations, which a loop over batches of one would draw and move on differently.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = {name: p.data for name, p in parameters.items()}
    buffers = [(b, b.clone()) for b in model.buffers()]
    state = RandomState.capture()
    result: list[dict[str, Tensor]] = []
    for coefficient, values in points:
        for name, p in parameters.items():
            p.data = held[name] if values is None else values[name]
        state.restore()
        losses = loss_fn(model, batch)
        result = result or [
            {name: torch.zeros_like(p, dtype=torch.float64) for name, p in held.items()} for _ in losses
        ]
        for loss, total in zip(losses, result):
            grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
            for name, grad in zip(parameters, grads):
                if grad is not None:
                    total[name] += coefficient * (grad.to_dense() if grad.is_sparse else grad).double()
        for buffer, copy in buffers:
            buffer.data.copy_(copy)
    for name, p in parameters.items():
        p.data = held[name]
    state.restore()
    return result


def per_example_in_batch(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    points: Sequence[tuple[float, Mapping[str, Tensor] | None]],
    state: RandomState,
) -> list[dict[str, Tensor]]:
    """As `per_example`, each loss taken from the whole batch: every evaluation then draws the same dropout masks."""

    def one(index: int) -> Callable[[Any, Any], Tensor]:
        return lambda model, batch: same_masks(loss_fn, state)(model, batch)[index : index + 1]

    count = len(same_masks(loss_fn, state)(model, batch))
    result = []
    for i in range(count):
        [gradient] = _gradients(model, [batch], one(i), points)
        result.append(gradient)
    return result
