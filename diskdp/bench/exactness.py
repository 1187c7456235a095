"""Whether a method's sums are right: against a loop over examples in float64, plain autograd, nothing shared."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diskdp.bench.cases import Batch, Case
from diskdp.gradients import Point

TOLERANCE = 1e-4  # of a sum in float32, relative to its largest entry: a method beyond it is not timed


def loop(case: Case, few: Batch, points: Sequence[Point], max_norm: float) -> dict[str, Tensor]:
    """Σ_i u_i min(1, max_norm / ‖u_i‖), u_i = Σ_k a_k ∇loss_i at point k."""
    model = copy.deepcopy(case.model).double()
    own = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in own.items()}
    for i in range(len(few[-1])):
        one = tuple(t[i : i + 1].double() if t.is_floating_point() else t[i : i + 1] for t in few)
        total = {name: torch.zeros_like(p) for name, p in own.items()}
        for a, values in points:
            at = {name: p.double().requires_grad_() for name, p in (values or own).items()}
            losses = case.losses(_At(model, at), one)
            gradients = torch.autograd.grad(losses.sum(), list(at.values()))
            for name, gradient in zip(at, gradients):
                total[name].add_(gradient, alpha=a)
        norm = math.sqrt(sum(float(g.square().sum()) for g in total.values()))
        for name, gradient in total.items():
            sums[name].add_(gradient, alpha=min(1.0, max_norm / max(norm, 1e-300)))
    return sums


class _At(torch.nn.Module):
    """The model with other weights."""

    def __init__(self, model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._model, self._weights = [model], weights  # in a list: not a submodule

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self._model[0], self._weights, inputs)
        return found


def largest_error(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest error of an entry, relative to the largest entry of the reference.

    >>> largest_error({"w": torch.tensor([2.0, 4.1])}, {"w": torch.tensor([2.0, 4.0]).double()})
    0.025
    """
    scale = max(float(r.abs().max()) for r in reference.values())
    errors = [_difference(found.get(name), r) for name, r in reference.items()]
    return float(f"{max(errors) / scale:.3g}") if all(map(math.isfinite, errors)) and scale > 0 else math.inf


def _difference(found: Tensor | None, reference: Tensor) -> float:
    return float((reference if found is None else found.double() - reference).abs().max())
