"""One model measured: exactness first, then memory, then time. A method that is fast and wrong is no method."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diskdp.bench.cases import Case, CaseSpec, Unavailable
from diskdp.bench.exactness import TOLERANCE, largest_error, loop
from diskdp.bench.measure import LEAST_MICROBATCHES, Mark, Timing, Work, interleaved, marked
from diskdp.bench.memory import peak_bytes
from diskdp.bench.methods import BASELINE, Method, Training, failure, points_at
from diskdp.bench.parts import PASSES_SIZE, parts_of, passes
from diskdp.bench.results import Part, Results, Row, Skipped

PASSES = "noise-125m"
Progress = Callable[[str, float], None]  # what is being done, and how much of the model's work is


@dataclass(frozen=True)
class Settings:
    """How long and how to measure. ``whole``: time all microbatches of a logical batch instead of three of them."""

    threads: int = 1
    seconds: float = 40.0
    least_rounds: int = 3
    whole: bool = False


def bench_case(
    name: str,
    spec: CaseSpec,
    methods: Mapping[str, Method],
    settings: Settings,
    progress: Progress = lambda doing, done: None,
) -> Results:
    """Measure the methods on one model; the non-private step is always measured with them.

    Weights and data come from a fixed seed. Wrong sums are reported as a reason for leaving a method out.
    """
    if BASELINE not in methods:
        raise ValueError(f"the methods must include {BASELINE!r}, to which the ratios are")
    results = Results()
    with _surroundings(settings.threads):
        progress("building", 0.0)
        try:
            case = spec.build()
        except Unavailable as reason:
            results.skipped += [Skipped(name, method, str(reason)) for method in methods]
            return results
        errors: dict[str, float] = {}
        peaks: dict[str, int] = {}
        running: dict[str, Training] = {}
        for method, error in _errors(case, methods, lambda doing: progress(doing, 0.0)):
            if isinstance(error, str):
                results.skipped.append(Skipped(name, method, error))
            else:
                errors[method] = error
        for method in errors:
            progress(f"memory of {method}", 0.0)
            try:
                running[method], peaks[method] = _started(case, methods[method])
            except Exception as error:
                if method == BASELINE:
                    raise
                results.skipped.append(Skipped(name, method, failure(error)))
        parts = parts_of(case) if {"dp-sgd", "disk"} & running.keys() else {}
        works = {method: _timed(case, training, settings) for method, training in running.items()}
        timings = interleaved({**works, **parts}, settings.seconds, settings.least_rounds, partial(progress, "timing"))
        base = timings[BASELINE]
        for method in works:
            results.rows.append(_row(name, spec, case, method, methods[method], timings[method], base, errors, peaks))
        results.parts += _part_rows(name, {part: timings[part] for part in parts}, base)
    return results


def bench_passes(settings: Settings, progress: Progress = lambda doing, done: None, size: int = PASSES_SIZE) -> Results:
    """Noise and filter on ``size`` numbers, as many as RoBERTa-base has, as multiples of torch.randn of that size."""
    with _surroundings(settings.threads):
        progress("building", 0.0)
        timings = interleaved(passes(size), settings.seconds, settings.least_rounds, partial(progress, "timing"))
    return Results(parts=_part_rows(PASSES, timings, timings["torch.randn"]))


@contextmanager
def _surroundings(threads: int) -> Iterator[None]:
    """Threads and random state of this measurement alone; others' advice is not the reader's concern."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="opacus|transformers|peft")
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(before)
        gc.collect()


def _errors(
    case: Case, methods: Mapping[str, Method], progress: Callable[[str], None]
) -> Iterator[tuple[str, float | str]]:
    """Each method's largest error, or why it is left out."""
    few = tuple(t[: case.checked_examples] for t in case.examples)
    references: dict[object, dict[str, Tensor]] = {}
    for name, method in methods.items():
        progress(f"checking {name}")
        key = (method.points, method.max_norm)
        if key not in references:
            references[key] = loop(case, few, points_at(case.model, method.points), method.max_norm)
        try:
            error = largest_error(method.sums(case, few), references[key])
        except Exception as reason:
            if name == BASELINE:
                raise
            yield name, failure(reason)
            continue
        if error > TOLERANCE:
            yield name, f"its sums are wrong: {error:.1e} of the largest entry away from a loop in float64"
        else:
            yield name, error


def _started(case: Case, method: Method) -> tuple[Training, int]:
    """A training, and the peak of a step that it took. More than three microbatches would not change the peak."""
    made: list[Training] = []

    def prepare() -> Callable[[], object]:
        training = method.start(case)
        made.append(training)
        for _ in range(2):  # so that the state of optimizer and filter exists and both points differ
            _step(case, training, 1, lambda: None)
        return lambda: _step(case, training, min(case.microbatches, LEAST_MICROBATCHES), lambda: None)

    peak = peak_bytes(prepare)
    return made[0], peak


def _step(case: Case, training: Training, microbatches: int, mark: Mark) -> None:
    batches = [case.microbatch(i) for i in range(microbatches)]
    training.step([case.microbatch_size] * microbatches, marked(batches, mark))


def _timed(case: Case, training: Training, settings: Settings) -> Work:
    count = case.microbatches if settings.whole else min(case.microbatches, LEAST_MICROBATCHES)
    return Work(lambda mark: _step(case, training, count, mark), count, case.microbatches)


def _row(
    name: str,
    spec: CaseSpec,
    case: Case,
    key: str,
    method: Method,
    timing: Timing,
    base: Timing,
    errors: Mapping[str, float],
    peaks: Mapping[str, int],
) -> Row:
    return Row(
        model=name,
        method=key,
        title=method.title,
        ratio=timing.wall / base.wall,
        cpu_ratio=timing.cpu / base.cpu,
        peak_memory_ratio=peaks[key] / peaks[BASELINE],
        max_relative_error=errors[key],
        wall_ms=timing.wall,
        cpu_ms=timing.cpu,
        spread=timing.spread,
        repeats=timing.repeats,
        timing=timing.way,
        peak_bytes=peaks[key],
        microbatch_size=case.microbatch_size,
        microbatches=case.microbatches,
        goal={"dp-sgd": spec.goal_one_point, "disk": spec.goal_two_points}.get(key),
    )


def _part_rows(name: str, timings: Mapping[str, Timing], base: Timing) -> list[Part]:
    return [Part(name, part, t.wall / base.wall, t.cpu / base.cpu, t.wall, t.cpu, t.way) for part, t in timings.items()]
