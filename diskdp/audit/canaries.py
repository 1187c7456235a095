"""Thousands of two-world experiments in one training: each canary has coordinates that no other record touches.

Assumes that noise is drawn for each coordinate and membership for each record independently; then the coordinates of
one training are independent draws of what a release tells about one record. Everything goes through the training
under audit (`loader`, `step`); all that is observed are the gradients that its optimizer is handed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp.audit.bounds import Array
from diskdp.clipping import Clipper
from diskdp.errors import AuditError
from diskdp.filters import Filter
from diskdp.filters.states import FollowsWeights, KnowsNoise, VaryingWeights
from diskdp.plan import Plan

TENSORS = ("table.weight", "linear.weight", "bias")
STEADY, FLIPPING, ALTERNATING, ALONE = range(4)  # ALONE + p: in tensor p only
ABSENT, PRESENT, OPPOSITE = range(3)
_MOST_CANARIES = 4096
_LARGEST = 1e6  # the longest gradient, in units of C
_TOUCHING = 1e-5  # points of the course closer than this are one

Progress: TypeAlias = Callable[[int, int], None]  # steps done, of how many


class Training(Protocol):
    """What the audit asks of a private training."""

    def loader(self, dataset: Any) -> Any: ...

    def step(self, batch: Any) -> Any: ...


class Privatize(Protocol):
    """What makes one: `diskdp.privatize`, or a stand-in for it."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        filter: Filter,
        microbatch_size: int | None,
        seed: int | None,
    ) -> Training: ...


@dataclass(frozen=True)
class Draws:
    """Released coordinates of canaries, times B over the unit that a gradient is clipped to.

    ``released``: [canaries, steps, tensors], the filter undone if it is linear. ``world`` and ``kind`` say what each
    canary was. ``crowd``: [trainings, steps], the coordinate that all other records share, and ``crowd_size``.
    """

    released: Array
    world: Array
    kind: Array
    crowd: Array
    crowd_size: int

    def of(self, world: int, kind: int | None = None) -> Array:
        """The draws of one world, and of one kind of canary."""
        return self.released[(self.world == world) & (True if kind is None else self.kind == kind)]


def draw(
    plan: Plan,
    filter: Filter,
    steps: int,
    draws: int,
    microbatch_size: int | None,
    privatize: Privatize,
    generator: np.random.Generator,
    seed: int | None,
    progress: Progress,
) -> Draws:
    """Train until each world of ``plan.adjacency`` has ``draws`` canaries, anew for every few thousand of them."""
    records = plan.dataset_size
    subsampled = plan.sample_rate < 1
    canaries = min(records // 2 if subsampled and records > 3 else records, _MOST_CANARIES)
    trainings = math.ceil(2 * draws / canaries)
    parts = []
    for number in range(trainings):
        world, kind = _roles(canaries, plan.adjacency == "replace-one", filter, steps, generator)
        dataset, undo = _dataset(plan, filter, world, kind, subsampled, generator), _unfiltering(filter, steps)
        model = _Coordinates(canaries + 1)
        course = _Course(model)
        private = privatize(
            model,
            course,
            plan,
            loss_fn=_Loss(_points(filter)[0]),
            filter=filter,
            microbatch_size=microbatch_size,
            seed=None if seed is None else seed + number,
        )
        for step, batch in enumerate(private.loader(dataset)):
            private.step(batch)
            progress(number * steps + step + 1, trainings * steps)
            if step + 1 == steps:
                break
        if plan.clipping == "adaptive":
            raise AuditError("clipping='adaptive' releases a count too, which is not audited; audit with 'flat'")
        unit = Clipper(plan.clipping, plan.max_grad_norm).sensitivity
        released_STK = np.stack(course.seen) * (plan.batch_size / unit)
        released_KST = np.einsum("st,tpk->ksp", undo, released_STK)
        parts.append((released_KST[:canaries], world, kind, released_KST[canaries]))
    return Draws(
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
        np.stack([part[3].sum(1) / math.sqrt(len(TENSORS)) for part in parts]),
        records - canaries if subsampled else 0,
    )


class _Coordinates(nn.Module):
    """Three kinds of parameter with one number for each canary, read by an embedding, a product and a pick."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.side = math.isqrt(canaries - 1) + 1
        # without drawing initial values: the caller's random state is none of the audit's business
        self.table = nn.utils.skip_init(nn.Embedding, canaries, 1)
        self.linear = nn.utils.skip_init(nn.Linear, self.side, self.side, bias=False)
        self.bias = nn.Parameter(torch.empty(canaries))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, canary_B: Tensor) -> Tensor:
        """The canary's number in each tensor, [B, 3]."""
        row_B = canary_B.div(self.side, rounding_mode="floor")
        one_hot_BS = F.one_hot(canary_B % self.side, self.side).to(self.linear.weight.dtype)
        product_B1 = self.linear(one_hot_BS).gather(1, row_B.unsqueeze(1))
        return torch.cat([self.table(canary_B), product_B1, F.embedding(canary_B, self.bias.unsqueeze(1))], 1)


class _Course(torch.optim.Optimizer):
    """Keeps the gradients it is handed, and moves all weights between 0 and 1 whatever they are."""

    def __init__(self, model: _Coordinates) -> None:
        super().__init__(model.parameters(), {})
        self._order = [model.table.weight, model.linear.weight, model.bias]
        self._canaries = len(model.bias)
        self.seen: list[Array] = []  # [tensors, canaries] a step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._order]
        self.seen.append(np.stack([g.reshape(-1)[: self._canaries].double().numpy() for g in gradients]))
        for parameter in self._order:
            parameter.fill_(float(len(self.seen) % 2))


class _Loss:
    """For each record a piecewise linear function of its coordinates, whose slopes say what its gradient is where."""

    def __init__(self, points: list[float]) -> None:
        self._kinks = torch.tensor([(a + b) / 2 for a, b in pairwise(points)])

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        canary_B, direction_BT, slopes_BK = batch
        weights_BT = model(canary_B)
        beyond_BTK = torch.relu(weights_BT.unsqueeze(2) - self._kinks)
        turns_BK = slopes_BK[:, 1:] - slopes_BK[:, :-1]
        values_BT = slopes_BK[:, :1] * weights_BT + (beyond_BTK * turns_BK.unsqueeze(1)).sum(2)
        return (direction_BT * values_BT).sum(1)


def _points(filter: Filter) -> tuple[list[float], Array]:
    """Where gradients are taken on the course 0, 1, 0, 1, ...; and the slopes there, for each kind of canary."""
    gamma = filter.lookahead
    signs: dict[float, tuple[int, int, int]] = {0.0: (1, 1, 1), 1.0: (1, 1, -1)}  # steady, flipping, alternating
    if gamma is not None:
        for ahead, parity in ((-gamma, 1), (1 + gamma, -1)):
            if all(abs(ahead - point) > _TOUCHING for point in signs):
                signs[ahead] = (1, -1, parity)
    points = sorted(signs)
    return points, np.array([signs[point] for point in points], np.float32).T


def _roles(
    canaries: int, replaced: bool, filter: Filter, steps: int, generator: np.random.Generator
) -> tuple[Array, Array]:
    """World and kind of each canary, at random."""
    worlds = (ABSENT, PRESENT, OPPOSITE) if replaced else (ABSENT, PRESENT)
    kinds = [STEADY, STEADY, *(ALONE + p for p in range(len(TENSORS)))]
    if filter.lookahead is not None and steps > 1:
        kinds += [FLIPPING, FLIPPING]
    if steps > 1:
        kinds += [ALTERNATING, ALTERNATING]
    world = np.resize(np.array(worlds), canaries)
    kind = np.resize(np.array(kinds), -(-canaries // len(worlds))).repeat(len(worlds))[:canaries]
    order = generator.permutation(canaries)
    return world[order], kind[order]


def _dataset(
    plan: Plan, filter: Filter, world: Array, kind: Array, crowd: bool, generator: np.random.Generator
) -> TensorDataset:
    """The canaries among records that share one more coordinate, or contribute nothing to it; in random order."""
    canaries, records = len(world), plan.dataset_size
    slopes_by_kind = _points(filter)[1]
    direction = np.zeros((records, len(TENSORS)), np.float32)
    together = np.full(len(TENSORS), 1 / math.sqrt(len(TENSORS)))
    for kind_of in np.unique(kind):
        chosen = np.flatnonzero(kind == kind_of)
        # gradients of all lengths; where both points nearly cancel, long enough to be clipped even so
        least = 1.05 if kind_of == STEADY or kind_of >= ALONE else 100.0
        lengths = least * (_LARGEST / least) ** generator.random(len(chosen))
        towards = np.eye(len(TENSORS))[kind_of - ALONE] if kind_of >= ALONE else together
        sign = np.select([world[chosen] == PRESENT, world[chosen] == OPPOSITE], [1.0, -1.0], 0.0)
        direction[chosen] = plan.max_grad_norm * (sign * lengths)[:, None] * towards
    direction[canaries:] = plan.max_grad_norm * 1000.0 * together * crowd
    slopes = slopes_by_kind[np.where(kind >= ALONE, STEADY, kind)]
    slopes = np.concatenate([slopes, np.ones((records - canaries, slopes.shape[1]), np.float32)])
    owner = np.minimum(np.arange(records), canaries)
    order = generator.permutation(records)
    return TensorDataset(*(torch.from_numpy(array[order]) for array in (owner, direction, slopes)))


def _unfiltering(filter: Filter, steps: int) -> Array:
    """The matrix that takes filtered gradients back to those before the filter; the identity if there is none.

    A function of released values alone, so that it costs no privacy.
    """
    state, impulses = filter.start(), torch.eye(steps, dtype=torch.float64)
    if isinstance(state, FollowsWeights | KnowsNoise | VaryingWeights):
        raise AuditError(
            f"filter={filter!r}: what it does to a gradient changes with what was released, so its outputs cannot be "
            "taken back to the gradients before it; audit the plan with a filter of the same points and clip, such as "
            f"DiSK(clip={filter.clip!r})"
        )
    response = torch.stack([state.update([impulses[t].clone()])[0].clone() for t in range(steps)]).numpy()
    state = filter.start()
    trial = torch.randn(steps, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    filtered = torch.stack([state.update([trial[t].clone()])[0].clone() for t in range(steps)]).numpy()
    triangular = np.abs(np.triu(response, 1)).max() == 0 and np.abs(np.diag(response)).min() > 1e-3
    if not triangular or np.abs(response @ trial.numpy() - filtered).max() > 1e-9 * (1 + np.abs(filtered).max()):
        return np.eye(steps)
    return np.linalg.inv(response)
