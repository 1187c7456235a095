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
from diskdp.gradients.planner import Norms, choose, squared_norms, weighted_sum
from diskdp.gradients.structure import Structure
from diskdp.gradients.terms import Direct

# The factor is taken for a norm this much larger than computed, in units of rounding error and of Σ|a_k|, so that what
# is actually summed is no longer than C. Without it the largest excess seen was 1.1 such units.
SLACK_UNITS = 16.0
# Where rows nearly cancel, rounding is on the scale of the rows and not of their sum: the square is then taken again in
# float64, and the factor allows for the rounding of the sum, in units of √(Σ_t |l_t|²|r_t|²).
CANCELLED = 1 / 16
SCATTER_UNITS = 4.0


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
    try:
        by_loss = _EXAMINED.setdefault(model, weakref.WeakKeyDictionary())
        return Engine(model, loss_fn, by_loss.setdefault(loss_fn, {}))
    except TypeError:  # a callable that cannot be remembered
        return Engine(model, loss_fn)


def _clip(gradients: Gradients, clipper: Clipper, points: Sequence[Point]) -> ClippedSum:
    """Takes the terms out of ``gradients`` as they are summed, so that their memory is free for what follows."""
    terms = gradients.terms
    groups = clipper.groups(list(terms))
    norms = {name: squared_norms(own, choose(own)) for name, own in terms.items() if own}
    kept = {name: own.kept for name, own in norms.items()}
    finite_B = torch.isfinite(gradients.losses_B)
    squares_GB, scatter_GB = _by_group(norms, groups, finite_B)
    # cancelled or overflowed in float32: the products of these examples are taken again in float64
    again_B = ~torch.isfinite(squares_GB).all(0) | (squares_GB < scatter_GB * CANCELLED).any(0)
    if bool(again_B.any()):
        index = again_B.nonzero().flatten()
        own = {name: [t.take(index).double() for t in terms[name]] for name in norms}
        exact = {name: squared_norms(ts, choose(ts)) for name, ts in own.items()}
        squares_GB[:, again_B], _ = _by_group(exact, groups, finite_B[index])
    bad_B = ~(torch.isfinite(squares_GB).all(0) & finite_B)
    if bool(bad_B.any()):
        for own_terms in terms.values():
            own_terms[:] = [t.without(bad_B) for t in own_terms]
        kept = {name: None if own is None else Direct(own).without(bad_B).grads for name, own in kept.items()}
    norms_GB = squares_GB.clamp_(min=0).sqrt()
    dtype = _coarsest(norms)
    error_GB = SCATTER_UNITS * torch.finfo(dtype).eps * scatter_GB.clamp(min=0).sqrt().nan_to_num(0.0, 0.0, 0.0)
    safe_GB = norms_GB * (1 + relative_slack(dtype, points)) + error_GB
    factors_GB = clipper.factors(safe_GB).masked_fill(bad_B, 0)
    sums = {}
    for group, factors_B in zip(groups, factors_GB):
        for name in group:
            own_terms = terms.pop(name)
            sums[name] = (
                weighted_sum(own_terms, factors_B, kept.pop(name)) if own_terms else gradients.zeros[name].clone()
            )
    return ClippedSum(sums, squares_GB.sum(0).sqrt(), clipper.shortens(norms_GB), gradients.losses_B)


def _by_group(norms: Mapping[str, Norms], groups: list[list[str]], like_B: Tensor) -> tuple[Tensor, Tensor]:
    """Squares and scatters of the groups, [G, B] in float64."""
    nothing = like_B.new_zeros(len(like_B), dtype=torch.float64)
    squares, scatter = [], []
    for group in groups:
        own = [norms[name] for name in group if name in norms]
        squares.append(torch.stack([n.squares_B for n in own]).double().sum(0) if own else nothing)
        scatter.append(torch.stack([n.scatter_B for n in own]).double().sum(0) if own else nothing)
    return torch.stack(squares), torch.stack(scatter)


def _coarsest(norms: Mapping[str, Norms]) -> torch.dtype:
    """The dtype with the largest rounding error among those in which norms were taken."""
    dtypes = [n.squares_B.dtype for n in norms.values()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
