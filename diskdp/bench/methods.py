"""A training step of each method on a ready batch: forward, backward, clipping, noise, filter and optimizer.

Plain SGD throughout. Each method also tells the sum that it adds noise to, so that it can be checked.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diskdp.bench.cases import Batch, Case, Unavailable, optional_module
from diskdp.clipping import Clipper
from diskdp.errors import DiskDPError
from diskdp.filters import DiSK, Filter, NoFilter
from diskdp.gradients import Engine, Point, clip
from diskdp.plan import Plan
from diskdp.private import privatize
from diskdp.sampling import LogicalBatch

MAX_NORM = 1.0
NOISE_MULTIPLIER = 1.0
RATE = 1e-3
TWO_POINTS = DiSK(kappa=0.7, gamma=0.5)
ONE_POINT = DiSK(kappa=0.7, gamma=0.3 / 0.7)  # γ = (1-κ)/κ: c = 1, the look-ahead point alone

_STEPS = 1_000_000  # more than any run takes
_AWAY = 0.001  # of the look-ahead point whose sums are checked


class Training(Protocol):
    """A model and an optimizer that take steps."""

    def step(self, sizes: Sequence[int], microbatches: Iterator[Batch]) -> object:
        """One step over microbatches of these sizes, each taken when the one before is done with."""


@dataclass(frozen=True)
class Method:
    """How to start a training, and the sum over a few examples that the method would add noise to.

    ``points`` are the coefficients of the points that it evaluates, and how far their weights are from the model's.
    """

    title: str
    start: Callable[[Case], Training]
    sums: Callable[[Case, Batch], Mapping[str, Tensor]]
    points: tuple[tuple[float, float], ...] = ((1.0, 0.0),)
    max_norm: float = MAX_NORM


class NonPrivate:
    """Ordinary training: gradients of the mean loss, accumulated over microbatches."""

    def __init__(self, case: Case, compiled: bool = False) -> None:
        self._case, self._model = case, copy.deepcopy(case.model)
        self._optimizer = torch.optim.SGD(_trainable(self._model), lr=RATE)
        if compiled:
            self._model.compile()

    def step(self, sizes: Sequence[int], microbatches: Iterator[Batch]) -> None:
        self._optimizer.zero_grad()
        for _, batch in zip(sizes, microbatches):
            (self._case.losses(self._model, batch).mean() / len(sizes)).backward()
        self._optimizer.step()


class DiskDP:
    """`private.step` on batches of the training's own loader, the examples of which lie ready."""

    def __init__(self, case: Case, filter: Filter) -> None:
        model, size = copy.deepcopy(case.model), len(case.examples[-1])
        plan = Plan(
            dataset_size=size,
            batch_size=size,
            steps=_STEPS,
            noise_multiplier=NOISE_MULTIPLIER,
            delta=1e-5,
            max_grad_norm=MAX_NORM,
        )
        optimizer = torch.optim.SGD(_trainable(model), lr=RATE)
        micro = case.microbatch_size if case.microbatches > 1 else None
        self._private = privatize(model, optimizer, plan, loss_fn=case.losses, filter=filter, microbatch_size=micro)
        self._loader = self._private.loader(TensorDataset(*case.examples))

    def step(self, sizes: Sequence[int], microbatches: Iterator[Batch]) -> None:
        private, loader = self._private, self._loader
        ready = LogicalBatch(private.steps_done, sizes, loader.plan_token, loader.loader_id, microbatches)
        private.step(ready)


class Opacus:
    """DP-SGD as Opacus' PrivacyEngine sets it up, ``mode`` "hooks" or "ghost", over virtual steps."""

    def __init__(self, case: Case, mode: str) -> None:
        opacus = optional_module("opacus")
        self._case, self._mode = case, mode
        model, criterion = copy.deepcopy(case.model), _Criterion(case)
        try:
            made = opacus.PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(_trainable(model), lr=RATE),
                criterion=criterion,
                data_loader=DataLoader(TensorDataset(*case.examples), batch_size=len(case.examples[-1])),
                noise_multiplier=NOISE_MULTIPLIER,
                max_grad_norm=MAX_NORM,
                poisson_sampling=False,
                grad_sample_mode=mode,
            )
        except Exception as error:  # Opacus refuses a model in many ways
            raise Unavailable(f"Opacus refuses the model: {_first_line(error)}") from error
        self._model, self._optimizer = made[0], made[1]
        self._criterion = made[2] if mode == "ghost" else criterion

    def step(self, sizes: Sequence[int], microbatches: Iterator[Batch]) -> None:
        last = len(sizes) - 1
        for number, (_, batch) in enumerate(zip(sizes, microbatches)):
            self._optimizer.signal_skip_step(do_skip=number != last)
            self._backward(batch)
            self._optimizer.step()

    def clipped(self, batch: Batch) -> dict[str, Tensor]:
        """The clipped sum, before noise."""
        self._backward(batch)
        if self._mode == "ghost":
            self._optimizer.accumulate()
        else:
            self._optimizer.clip_and_accumulate()
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        return {name.removeprefix("_module."): p.summed_grad.clone() for name, p in named}

    def _backward(self, batch: Batch) -> None:
        *inputs, targets = batch
        self._optimizer.zero_grad(set_to_none=True)
        self._criterion(self._model(*inputs), targets).backward()


class _Criterion(nn.Module):
    """The case's loss in the form that Opacus asks for: with an attribute ``reduction`` that it may switch."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._loss, self.reduction = case.loss, "mean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses_B = self._loss(logits, targets)
        return losses_B if self.reduction == "none" else losses_B.mean()


def points_at(model: nn.Module, points: Sequence[tuple[float, float]]) -> list[Point]:
    """Coefficients, and the weights of each point: the model's own, or those moved by normals of that deviation.

    The same normals at every call. (One constant for all weights would add up over a layer's inputs: WRN's gradients
    are then ill-conditioned in float32 by plain autograd, too.)
    """
    normals = torch.Generator().manual_seed(0)
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    moved = [
        {name: p + away * torch.randn(p.shape, generator=normals) for name, p in trainable.items()} if away else None
        for _, away in points
    ]
    return [(a, values) for (a, _), values in zip(points, moved)]


def _points_of(filter: Filter) -> tuple[tuple[float, float], ...]:
    here, ahead = filter.coefficients
    return tuple((a, away) for a, away in ((here, 0.0), (ahead, _AWAY)) if a != 0)


def _diskdp_sums(filter: Filter, case: Case, few: Batch) -> Mapping[str, Tensor]:
    points = points_at(case.model, _points_of(filter))
    return clip(Engine(case.model, case.losses), few, points, Clipper("flat", MAX_NORM)).summed()


def _opacus_sums(mode: str, case: Case, few: Batch) -> Mapping[str, Tensor]:
    training = Opacus(case, mode)
    try:
        return training.clipped(few)
    except Exception as error:
        raise Unavailable(f"Opacus fails on the model: {_first_line(error)}") from error


def _plain_sums(case: Case, few: Batch) -> Mapping[str, Tensor]:
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(case.losses(case.model, few).sum(), list(named.values()))
    return dict(zip(named, gradients))


def _diskdp(title: str, filter: Filter) -> Method:
    return Method(title, partial(DiskDP, filter=filter), partial(_diskdp_sums, filter), _points_of(filter))


def _opacus(title: str, mode: str) -> Method:
    return Method(title, partial(Opacus, mode=mode), partial(_opacus_sums, mode))


BASELINE = "non-private"
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        BASELINE: Method("non-private", NonPrivate, _plain_sums, max_norm=math.inf),
        "dp-sgd": _diskdp("diskdp DP-SGD", NoFilter()),
        "disk": _diskdp("diskdp DiSK(0.7, 0.5)", TWO_POINTS),
        "disk-one-point": _diskdp("diskdp DiSK(0.7, 3/7), one evaluation", ONE_POINT),
        "opacus-ghost": _opacus("Opacus DP-SGD, ghost", "ghost"),
        "opacus-hooks": _opacus("Opacus DP-SGD, hooks", "hooks"),
        "compiled": Method(
            "non-private, torch.compile", partial(NonPrivate, compiled=True), _plain_sums, max_norm=math.inf
        ),
    }
)
DEFAULT_METHODS = tuple(name for name in METHODS if name != "compiled")


def failure(error: Exception) -> str:
    """Why a method was left out, in one line."""
    return str(error) if isinstance(error, DiskDPError) else _first_line(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _trainable(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]
