"""What a private step consists of, each part alone: gradients, noise, filter, optimizer.

The noise of a step is drawn beside its gradients, so on a machine with a core to spare the parts' wall times add up to
more than the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from diskdp.bench.cases import Case
from diskdp.bench.measure import Work
from diskdp.bench.methods import MAX_NORM, METHODS, NOISE_MULTIPLIER, RATE, TWO_POINTS, points_at
from diskdp.clipping import Clipper
from diskdp.filters import Filter
from diskdp.gradients import Engine, clip
from diskdp.noise import GaussianNoise, Secret

PASSES_SIZE = 125_000_000  # about as many parameters as RoBERTa-base has


def parts_of(case: Case) -> dict[str, Work]:
    """Works by part; each has run once."""
    model, clipper = copy.deepcopy(case.model), Clipper("flat", MAX_NORM)
    engine, batch = Engine(model, case.losses), case.microbatch(0)

    def clipped(method: str) -> Work:
        points = points_at(model, METHODS[method].points)
        return _work(lambda: clip(engine, batch, points, clipper).summed(), case.microbatches)

    sums = clip(engine, batch, [(1.0, None)], clipper).summed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(sums[name])
    return {
        "gradients, one point": clipped("dp-sgd"),
        "gradients, two points": clipped("disk"),
        **passes_of(sums, TWO_POINTS),
        "optimizer": _work(optimizer.step),
    }


def passes_of(sums: dict[str, Tensor], filter: Filter) -> dict[str, Work]:
    """The noise of sums of these shapes, and the filter's pass over them."""
    noise, state = GaussianNoise(Secret.from_os()), filter.start()
    gradients = list(sums.values())
    state.update(gradients)
    return {
        "noise": _work(lambda: noise.begin(sums, NOISE_MULTIPLIER * MAX_NORM, 0).result()),
        "filter": _work(lambda: state.update(gradients)),
    }


def passes(size: int) -> dict[str, Work]:
    """The noise and the filter's pass on one tensor of ``size`` numbers, and torch's own normals as the measure."""
    sums = {"weights": torch.zeros(size)}
    works = passes_of(sums, TWO_POINTS)
    noise, filter = works["noise"].run, works["filter"].run

    def both() -> None:
        noise(lambda: None)
        filter(lambda: None)

    return {"torch.randn": _work(lambda: torch.randn(size)), **works, "noise and filter": _work(both)}


def _work(run: Callable[[], object], stands_for: int = 1) -> Work:
    run()
    return Work(lambda mark: run(), stands_for=stands_for)
