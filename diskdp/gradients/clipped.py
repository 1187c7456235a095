"""Clipping: per-example gradients in, Σ_i clip(u_i) and the norms ‖u_i‖ out. Un-noised, for the step alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diskdp.clipping import Clipper
from diskdp.gradients.engine import Engine, Examined, Gradients, LossFunction, Point
from diskdp.gradients.planner import Method, Norms, squared_norms, weighted_sum
from diskdp.gradients.planner import choose as cheapest
from diskdp.gradients.products import full_precision
from diskdp.gradients.terms import Direct, Term

Choice: TypeAlias = "Callable[[Sequence[Term]], Method]"
"""How norms are taken: by estimated cost (`planner.choose`) or by timing (`Tuner.choose`)."""

# The factor is taken for a norm this much larger than computed, in units of rounding error and of Σ|a_k|, so that what
# is actually summed is no longer than C. Without it the largest excess seen was 1.1 such units.
SLACK_UNITS = 16.0
# Where rows nearly cancel, rounding is on the scale of the rows and not of their sum: the square is then taken again in
# float64, and the factor allows for the rounding of the sum, in units of √(Σ_t |l_t|²|r_t|²).
CANCELLED = 1 / 16
SCATTER_UNITS = 4.0


class Clipped:
    """The clipped gradients of some examples, summed on demand, and what the data holder may look at."""

    def __init__(
        self,
        terms: dict[str, list[Term]],
        factors: Mapping[str, Tensor],
        zeros: Mapping[str, Tensor],
        norms_B: Tensor,
        clipped_B: Tensor,
        losses_B: Tensor,
    ) -> None:
        self._terms, self._factors, self._zeros = terms, factors, zeros
        self.norms_B = norms_B  # of u_i over all parameters, before clipping
        self.clipped_B = clipped_B  # whether clipping shortened u_i
        self.losses_B = losses_B

    @torch.no_grad()
    def summed(self, onto: Mapping[str, Tensor] | None = None, weight: float = 1.0) -> dict[str, Tensor]:
        """weight · Σ_i clip(u_i) for every parameter, in float32 or better, added to ``onto`` in its memory if given.

        To be called once: the terms are taken out as they are summed, so that their memory is free for what follows.
        """
        sums = {}
        with full_precision():
            for name, factors_B in self._factors.items():
                total = None if onto is None else onto[name]
                terms = self._terms.pop(name)
                if terms:
                    dtype = self._zeros[name].dtype  # a model may compute in another one than its parameter's
                    sums[name] = weighted_sum(terms, factors_B * weight, total).to(dtype)
                else:
                    sums[name] = self._zeros[name].clone() if total is None else total
        return sums


def relative_slack(dtype: torch.dtype, points: Sequence[Point]) -> float:
    """How much shorter than C clipping aims, to cover rounding: ‖clip(u)‖ ≤ C holds in what is summed.

    >>> relative_slack(torch.float64, [(1.0, None)]) < 1e-14
    True
    """
    return SLACK_UNITS * torch.finfo(dtype).eps * max(1.0, sum(abs(a) for a, _ in points))


@torch.no_grad()
def clip(engine: Engine, batch: Any, points: Sequence[Point], clipper: Clipper, choose: Choice = cheapest) -> Clipped:
    """One pass a point, norms and factors; what is left to do is one weighted product a term."""
    points = [(a, values) for a, values in points if a != 0]
    gradients = engine.gradients(batch, points)
    with full_precision():
        return _clip(gradients, clipper, points, choose)


@torch.no_grad()
def clip_in_float64(engine: Engine, batch: Any, points: Sequence[Point], clipper: Clipper) -> Clipped:
    """As `clip`, from every example's gradient made in float64: slower, in more memory, with a bound for its rounding.

    What the passes gave for an example is one float64 vector u_i, whose computed square is off by at most d + 1 units
    of rounding error, relatively (d products added up in any order; Higham 2002, §3.1). The factor w allows for that,
    so ‖w u_i‖ ≤ S holds in real numbers, and a sum over examples adds up one product w u_i an example and coordinate.
    """
    points = [(a, values) for a, values in points if a != 0]
    gradients = engine.gradients(batch, points)
    terms: dict[str, list[Term]] = {name: _made(own) for name, own in gradients.terms.items()}
    zeros = {name: zero.double() for name, zero in gradients.zeros.items()}
    size = sum(zero.numel() for zero in zeros.values())
    with full_precision():
        exact = replace(gradients, terms=terms, zeros=zeros)
        return _clip(exact, clipper, points, cheapest, size * torch.finfo(torch.float64).eps)


def _made(terms: Sequence[Term]) -> list[Term]:
    """The sum of terms, made for every example in float64."""
    if not terms:
        return []
    first = terms[0]
    made = torch.zeros(first.batch, *first.gradient_shape, dtype=torch.float64, device=first.device)
    for term in terms:
        term.double().add_per_example(made)
    return [Direct(made)]


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
    clipped = clip(_engine_for(model, loss_fn), batch, points, Clipper(clipping, max_norm))
    return clipped.summed(), clipped.norms_B


_Examined: TypeAlias = "weakref.WeakKeyDictionary[LossFunction, Examined]"
_EXAMINED: weakref.WeakKeyDictionary[nn.Module, _Examined] = weakref.WeakKeyDictionary()


def _engine_for(model: nn.Module, loss_fn: LossFunction) -> Engine:
    """An engine that knows what was examined before for this model and this very loss function."""
    try:
        by_loss = _EXAMINED.setdefault(model, weakref.WeakKeyDictionary())
        return Engine(model, loss_fn, by_loss.setdefault(loss_fn, Examined()))
    except TypeError:  # a callable that cannot be remembered
        return Engine(model, loss_fn)


def _clip(
    gradients: Gradients, clipper: Clipper, points: Sequence[Point], choose: Choice, further_slack: float = 0.0
) -> Clipped:
    terms = gradients.terms
    groups = clipper.groups(list(terms))
    norms = {}
    for name, own in terms.items():
        if own:
            norms[name] = squared_norms(own, choose(own))
            if (gradients_made := norms[name].gradients) is not None:
                terms[name] = [gradients_made]
    finite_B = torch.isfinite(gradients.losses_B)
    squares_GB, scatter_GB = _by_group(norms, groups, finite_B)
    # cancelled or overflowed in float32: the products of these examples are taken again in float64
    again_B = ~torch.isfinite(squares_GB).all(0) | (squares_GB < scatter_GB * CANCELLED).any(0)
    if bool(again_B.any()):
        index = again_B.nonzero().flatten()
        again = {name: [t.take(index).double() for t in terms[name]] for name in norms}
        exact = {name: squared_norms(ts, cheapest(ts)) for name, ts in again.items()}
        squares_GB[:, again_B], _ = _by_group(exact, groups, finite_B[index])
    bad_B = ~(torch.isfinite(squares_GB).all(0) & finite_B)
    if bool(bad_B.any()):
        for own_terms in terms.values():
            own_terms[:] = [t.without(bad_B) for t in own_terms]
    norms_GB = squares_GB.clamp_(min=0).sqrt()
    dtype = _coarsest(norms)
    error_GB = SCATTER_UNITS * torch.finfo(dtype).eps * scatter_GB.clamp(min=0).sqrt().nan_to_num(0.0, 0.0, 0.0)
    safe_GB = norms_GB * (1 + relative_slack(dtype, points) + further_slack) + error_GB
    factors_GB = clipper.factors(safe_GB).masked_fill(bad_B, 0)
    factors = {name: factors_B for group, factors_B in zip(groups, factors_GB) for name in group}
    shortened_B = clipper.shortens(norms_GB) | bad_B  # what is not finite is left out
    return Clipped(terms, factors, gradients.zeros, squares_GB.sum(0).sqrt(), shortened_B, gradients.losses_B)


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
    dtypes = [n.precision for n in norms.values()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
