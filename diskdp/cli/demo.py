"""`diskdp demo`: DP-SGD, a low-pass filter and DiSK at one privacy budget, on the packaged Adult table."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import TaskID
from torch.utils.data import TensorDataset

from diskdp.cli.console import complain, print_table, progress_bars, say, table
from diskdp.datasets import Split, adult
from diskdp.errors import ConfigError
from diskdp.filters import DiSK, Filter, LowPass, NoFilter
from diskdp.plan import Plan
from diskdp.private import privatize
from diskdp.report.card import PrivacyCard, card_of
from diskdp.report.plots import Curves, plot_accuracy
from diskdp.zoo import accuracy, build, classification_loss

EPSILON = 1.0
BATCH_SIZE = 1000
EPOCHS = 20
WIDTHS = (128,)
EVALUATIONS = 40
"""Points of each curve."""


@dataclass(frozen=True)
class Method:
    """A filter with its learning rate; plain SGD, constant rate."""

    name: str
    filter: Filter
    lr: float


# The best of tools/tune_demo.py for each method: accuracy on 5,000 held-out *training* rows at the demo's noise, batch
# size and steps, over 3 seeds: .8424 ± .0005, .8428 ± .0009, .8432 ± .0011. DP-SGD was tried at 4 settings (learning
# rates .5 to 4), low-pass at 12, DiSK at 16; the rate 2 was best for all.
METHODS = (
    Method("DP-SGD", NoFilter(), 2.0),
    Method("low-pass", LowPass(kappa=0.5), 2.0),
    Method("DiSK", DiSK(kappa=0.3, gamma=2.3), 2.0),
)


@dataclass(frozen=True)
class Run:
    """One training: accuracy on held-out rows along the way, and what it cost."""

    steps: tuple[int, ...]
    accuracies: tuple[float, ...]
    seconds: float
    card: PrivacyCard


def demo_plan(dataset_size: int, epochs: float = EPOCHS) -> Plan:
    """ε = 1 at δ = N^-1.1, Poisson sampling, automatic clipping.

    >>> demo_plan(32_561, epochs=1).steps
    33
    """
    return Plan(
        dataset_size=dataset_size,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        epsilon=EPSILON,
        delta=dataset_size**-1.1,
        clipping="automatic",
        unit="person",
    )


def train(
    method: Method,
    plan: Plan,
    split: Split,
    held_out: TensorDataset,
    init_seed: int,
    noise_seed: int | None,
    on_step: Callable[[int, float], None],
) -> Run:
    """Train the demo's model once; ``on_step(step, latest accuracy)`` follows. Evaluations are not timed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        model = build("mlp", split.info.input_shape, split.info.n_classes, {"widths": WIDTHS})
    optimizer = torch.optim.SGD(model.parameters(), lr=method.lr)
    private = privatize(model, optimizer, plan, loss_fn=classification_loss, filter=method.filter, seed=noise_seed)
    steps, accuracies, evaluating = [0], [accuracy(model, held_out)], 0.0
    start = time.perf_counter()
    for batch in private.loader(split.train):
        private.step(batch)
        done = private.steps_done
        if done * EVALUATIONS // plan.steps > (done - 1) * EVALUATIONS // plan.steps:
            before = time.perf_counter()
            steps.append(done)
            accuracies.append(accuracy(model, held_out))
            evaluating += time.perf_counter() - before
        on_step(done, accuracies[-1])
    seconds = time.perf_counter() - start - evaluating
    return Run(tuple(steps), tuple(accuracies), seconds, card_of(private, split.info.provenance))


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plot, the numbers and the privacy cards.")] = Path(
        "demo-run"
    ),
    seeds: Annotated[int, typer.Option(help="Trainings of each method, each from other initial weights.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Two epochs only: a look, not a comparison.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Reproducible sampling and noise, for tests: the runs are then NOT private."),
    ] = None,
) -> None:
    """Train DP-SGD, a low-pass filter and DiSK at (ε = 1, δ = N^-1.1) on census data: a table, a plot.

    The UCI Adult table is part of the package; nothing is downloaded. Files of an earlier demo are replaced.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    split = adult()
    plan = demo_plan(len(split.train), epochs=2 if quick else EPOCHS)
    say(
        f"UCI Adult: N = {plan.dataset_size:,} training rows, {len(split.test):,} test rows; "
        f"MLP with {WIDTHS[0]} hidden units"
    )
    say(
        f"each run: ε = {EPSILON:g}, δ = {plan.delta:.3g}, B = {plan.batch_size:,}, {plan.steps} steps, "
        f"σ = {plan.noise_multiplier:.4g}, C = {plan.max_grad_norm:g}"
    )
    runs: dict[str, list[Run]] = {method.name: [] for method in METHODS}
    with progress_bars() as bars, _one_thread():
        tasks = {
            method.name: bars.add_task(f"{method.name:<8}", total=seeds * plan.steps, note="") for method in METHODS
        }
        for repeat in range(seeds):  # methods take turns, so that a busy machine slows all of them alike
            for number, method in enumerate(METHODS):
                noise_seed = None if seed is None else seed + repeat * len(METHODS) + number

                def follow(done: int, score: float, task: TaskID = tasks[method.name], repeat: int = repeat) -> None:
                    bars.update(task, completed=repeat * plan.steps + done, note=f"test accuracy {score:.3f}")

                runs[method.name].append(train(method, plan, split, split.test, repeat, noise_seed, follow))
    _report(runs, plan, out)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On matrices of this size a second thread gains little, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(runs: dict[str, list[Run]], plan: Plan, out: Path) -> None:
    seeds = len(next(iter(runs.values())))
    rows, numbers = [], {}
    for method in METHODS:
        own = runs[method.name]
        last = [run.accuracies[-1] for run in own]
        mean, spread = statistics.mean(last), statistics.stdev(last) if seeds > 1 else math.nan
        seconds = statistics.mean(run.seconds for run in own)
        epsilon = max(run.card.epsilon for run in own)
        shown = f"{mean:.2%}" + (f" ± {spread:.2%}" if seeds > 1 else "")
        rows.append([method.name, f"{method.lr:g}", shown, f"{epsilon:.4f}", f"{seconds:.1f}"])
        numbers[method.name] = {
            "filter": repr(method.filter),
            "lr": method.lr,
            "steps": own[0].steps,
            "test_accuracy": [run.accuracies for run in own],
            "epsilon": epsilon,
            "seconds": [round(run.seconds, 2) for run in own],
        }
        (out / f"card-{method.name.lower()}.md").write_text(own[0].card.to_markdown(), encoding="utf-8")
    print_table(
        table(
            ["method", "learning rate", "test accuracy", "ε spent", "seconds a run"],
            rows,
            numbers=(1, 2, 3, 4),
        )
    )
    say(
        f"± is the standard deviation over {seeds} runs."
        if seeds > 1
        else "One run a method says nothing of its spread."
    )
    for method in METHODS[:0:-1]:
        if seeds > 1:
            say(_verdict(method.name, runs[method.name], METHODS[0].name, runs[METHODS[0].name]))
    say("Not accounted: rates and filter constants were chosen on training rows, by tools/tune_demo.py.")
    total = len(METHODS) * seeds
    say(f"Each run spends its own budget: publishing all {total} would spend up to {total} times ε.")
    if any(run.card.warnings for own in runs.values() for run in own):
        complain("warning", "a seed was given: these runs are not private")
    subtitle = (
        f"ε = {EPSILON:g}, δ = {plan.delta:.2g}, N = {plan.dataset_size:,}, B = {plan.batch_size:,}; "
        f"mean of {seeds} runs, band: ± one standard deviation"
    )
    curves = [Curves(name, own[0].steps, tuple(run.accuracies for run in own)) for name, own in runs.items()]
    start = 0.76  # the majority class of the test rows alone gives .764
    plot_accuracy(out / "accuracy.png", curves, "Private training on the Adult census table", subtitle, start)
    (out / "results.json").write_text(
        json.dumps({"plan": json.loads(plan.to_json()), "methods": numbers}, indent=2) + "\n",
        encoding="utf-8",
    )
    say(f"plot: {out / 'accuracy.png'}   numbers: {out / 'results.json'}   privacy cards: {out / 'card-*.md'}")


def _verdict(name: str, own: Sequence[Run], base_name: str, base: Sequence[Run]) -> str:
    """The difference with its standard error, and whether it is more than twice that."""
    differences = [a.accuracies[-1] - b.accuracies[-1] for a, b in zip(own, base)]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    if abs(mean) <= 2 * error:
        judged = "no difference that these runs could tell from chance"
    else:
        judged = f"{'better' if mean > 0 else 'worse'} by more than two standard errors"
    return f"{name} - {base_name}: {100 * mean:+.2f} ± {100 * error:.2f} points (standard error): {judged}."
