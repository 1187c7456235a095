"""The clipped sum: per-example gradients in, Σ_i clip(u_i) and the norms ‖u_i‖ out. Un-noised, for the step alone."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diskdp.clipping import Clipper
from diskdp.gradients.engine import Engine, Gradients, LossFunction, Point
from diskdp.gradients.planner import choose, squared_norms, weighted_sum
from diskdp.gradients.structure import Structure
from diskdp.gradients.terms import Term

# The factor is taken for a norm this much larger than computed, in units of rounding error and of Σ|a_k|, so that what
# is actually summed is no longer than C. Without it the largest excess seen was 1.1 such units.
SLACK_UNITS = 16.0


@dataclass(frozen=True)
class ClippedSum:
    """Σ_i clip(u_i) for every parameter, in float32 or better, and what the data holder may look at."""

    sums: dict[str, Tensor]
    norms_B: Tensor  # of u_i over all parameters, before clipping
    clipped_B: Tensor  # whether clipping shortened u_i
    losses_B: Tensor


def relative_slack(dtype: torch.dtype, points: Sequence[Point]) -> float:
    """How much shorter than C clipping aims, to cover rounding: ‖clip(u)‖ ≤ C holds in what is summed.

    >>> relative_slack(torch.float64, [(1.0, None)]) < 1e-14
    True
    """
    return SLACK_UNITS * torch.finfo(dtype).eps * max(1.0, sum(abs(a) for a, _ in points))


@torch.no_grad()
def clipped_sum(engine: Engine, batch: Any, points: Sequence[Point], clipper: Clipper) -> ClippedSum:
    """One pass a point, norms, factors, and one weighted product a term."""
    points = [(a, values) for a, values in points if a != 0]
    return _clip(engine.gradients(batch, points), clipper, points)


def clipped_gradient(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    points: Sequence[Point] = ((1.0, None),),
    max_norm: float = 1.0,
    clipping: str = "flat",
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i clip(u_i) with u_i = Σ_k a_k ∇loss_i at point k, and the norms ‖u_i‖ before clipping, shape [B].

    ``points`` are pairs of a coefficient and None (the model as it is) or {name: tensor} (parameters to use in place
    of the model's). The sums are un-noised: adding noise and dividing by the public batch size is the caller's part.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
    >>> grads, norms = clipped_gradient(model, x, lambda model, x: model(x).squeeze(1))
    >>> norms.tolist(), grads["weight"]
    ([5.0, 0.5], tensor([[0.6000, 1.3000]]))
    """
    result = clipped_sum(_engine_for(model, loss_fn), batch, points, Clipper(clipping, max_norm))
    return result.sums, result.norms_B


_Examined: TypeAlias = "weakref.WeakKeyDictionary[LossFunction, dict[object, Structure]]"
_EXAMINED: weakref.WeakKeyDictionary[nn.Module, _Examined] = weakref.WeakKeyDictionary()


def _engine_for(model: nn.Module, loss_fn: LossFunction) -> Engine:
    """An engine that knows what was examined before for this model and this very loss function."""
    by_loss = _EXAMINED.setdefault(model, weakref.WeakKeyDictionary())
    return Engine(model, loss_fn, by_loss.setdefault(loss_fn, {}))


def _clip(gradients: Gradients, clipper: Clipper, points: Sequence[Point]) -> ClippedSum:
    names = list(gradients.terms)
    groups = clipper.groups(names)
    plans = {name: choose(terms) for name, terms in gradients.terms.items() if terms}
    squares: dict[str, Tensor] = {}
    kept: dict[str, Tensor | None] = {}
    for name, method in plans.items():
        squares[name], kept[name] = squared_norms(gradients.terms[name], method)
    nothing = gradients.losses_B.new_zeros(len(gradients.losses_B))
    squares_GB = torch.stack(
        [torch.stack([squares.get(name, nothing).double() for name in group]).sum(0) for group in groups]
    ).clamp_(min=0)
    terms: Mapping[str, list[Term]] = gradients.terms
    bad_B = ~torch.isfinite(squares_GB).all(0)
    if bool(bad_B.any()):
        squares_GB[:, bad_B] = _again_in_double(terms, groups, bad_B)
        bad_B = ~(torch.isfinite(squares_GB).all(0) & torch.isfinite(gradients.losses_B))
        terms = {name: [t.without(bad_B) for t in own] for name, own in terms.items()}
        kept = dict.fromkeys(kept)
    norms_GB = squares_GB.sqrt()
    slack = 1 + relative_slack(_coarsest(squares), points)
    factors_GB = clipper.factors(norms_GB * slack).masked_fill(bad_B, 0)
    sums = {}
    for group, factors_B in zip(groups, factors_GB):
        for name in group:
            own = terms[name]
            sums[name] = weighted_sum(own, factors_B, kept[name]) if own else gradients.zeros[name].clone()
    return ClippedSum(sums, squares_GB.sum(0).sqrt(), clipper.shortens(norms_GB), gradients.losses_B)


def _coarsest(squares: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype with the largest rounding error among those in which norms were taken."""
    dtypes = [t.dtype for t in squares.values()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _again_in_double(terms: Mapping[str, list[Term]], groups: list[list[str]], bad_B: Tensor) -> Tensor:
    """Squared norms of the given examples in float64: a finite but huge gradient overflows when squared in float32."""
    index = bad_B.nonzero().flatten()
    rows = []
    for group in groups:
        total = torch.zeros(len(index), dtype=torch.float64, device=bad_B.device)
        for name in group:
            if own := [t.take(index).double() for t in terms[name]]:
                total += squared_norms(own, choose(own))[0]
        rows.append(total)
    return torch.stack(rows)
