"""Privacy faults planted in a training that `privatize` made, for the audits to find.

They reach into the library's internals: if those move, this is the one place to adapt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from torch import Tensor

from diskdp import private as private_module
from diskdp import privatize
from diskdp.clipping import Clipper
from diskdp.private import PrivateTraining


class _Noise:
    """The training's own noise source, with less noise, some tensors left out, or the step's number held."""

    def __init__(self, source: Any, factor: float = 1.0, without: str | None = None, same: bool = False) -> None:
        self._source, self._factor, self._without, self._same = source, factor, without, same

    def add_to(self, sums: Mapping[str, Tensor], std: float, step: int) -> None:
        sums = {name: t for name, t in sums.items() if name != self._without}
        self._source.add_to(sums, std * self._factor, 0 if self._same else step)

    def begin(self, like: Mapping[str, Tensor], std: float, step: int) -> Future[dict[str, Tensor]]:
        begun = self._source.begin(like, std * self._factor, 0 if self._same else step)
        if self._without is not None:
            begun.result()[self._without].zero_()
        return begun


class _Understated(PrivateTraining):
    """Accounts for joint clipping whatever its filter clips."""

    @property
    def sensitivity(self) -> float:
        return self.clipper.sensitivity


class _Shuffled:
    """The parts of a shuffle of all records, anew each epoch."""

    def __init__(self, sampler: Any, batch: int) -> None:
        self._sampler, self._batch = sampler, batch
        self._seed = int(np.random.default_rng().integers(1 << 62))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def indices(self, step: int) -> Any:
        batches = self.dataset_size // self._batch
        order = np.random.default_rng((self._seed, step // batches)).permutation(self.dataset_size)
        part = step % batches
        return np.sort(order[part * self._batch : (part + 1) * self._batch])


def planted(plant: Callable[[PrivateTraining], None]) -> Callable[..., PrivateTraining]:
    """A `privatize` whose trainings have the fault."""

    def faulty(*positional: Any, **named: Any) -> PrivateTraining:
        training = privatize(*positional, **named)
        plant(training)
        return training

    return faulty


def _noise(training: PrivateTraining, **change: Any) -> None:
    training._noise = _Noise(training._noise, **change)  # type: ignore[assignment]


def _separate_as_joint(training: PrivateTraining) -> None:
    training.__class__ = _Understated


def _shuffled(training: PrivateTraining) -> None:
    loaded = training.loader

    def loader(dataset: Any, *positional: Any, **named: Any) -> Any:
        batches = loaded(dataset, *positional, **named)
        batches._sampler = _Shuffled(batches._sampler, training.plan.batch_size)  # type: ignore[assignment]
        return batches

    training.loader = loader  # type: ignore[method-assign]


less_noise = planted(lambda training: _noise(training, factor=0.67))
bare_tensor = planted(lambda training: _noise(training, without="bias"))
same_noise = planted(lambda training: _noise(training, same=True))
separate_as_joint = planted(_separate_as_joint)
shuffled = planted(_shuffled)


class one_microbatch_unclipped:
    """While it is active, every third call that clips a microbatch leaves it as it is."""

    def __enter__(self) -> None:
        self._clip = private_module.clip
        calls = 0

        def clip(engine: Any, microbatch: Any, points: Any, clipper: Clipper, choose: Any) -> Any:
            nonlocal calls
            calls += 1
            used = Clipper(clipper.kind, math.inf) if calls % 3 == 0 else clipper
            return self._clip(engine, microbatch, points, used, choose)

        private_module.clip = clip  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        private_module.clip = self._clip  # type: ignore[attr-defined]
