"""`diskdp train RUN.toml`: one private run, into one folder."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID
from torch import nn
from torch.utils.data import TensorDataset

from diskdp.cli.build import build_filter, build_model, build_optimizer, build_plan, learning_rate, load_data
from diskdp.cli.config import RunConfig, load_run, parse_settings
from diskdp.cli.console import complain, print_table, progress_bars, say, table
from diskdp.cli.folder import RunFolder
from diskdp.errors import BudgetExhausted, CheckpointError, ConfigError
from diskdp.filters import Filter
from diskdp.ledger import read_account
from diskdp.memory import shown_memory
from diskdp.noise import KEYED_BY_SUM
from diskdp.plan import Plan
from diskdp.private import PrivateTraining, privatize
from diskdp.report.card import card_of
from diskdp.sampling import PrivateLoader
from diskdp.zoo import accuracy, classification_loss


def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="What to train; docs/cli.md lists all keys.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; must not exist.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget ε; the noise is computed from it.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise σ instead of a budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Budget δ; less than 1/N.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size B.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping norm C.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    filter: Annotated[str | None, typer.Option(help="disk, lowpass or none; drops the file's [filter].")] = None,
    kappa: Annotated[float | None, typer.Option(help="The filter's κ, in (0, 1].")] = None,
    gamma: Annotated[float | None, typer.Option(help="DiSK's look-ahead γ, not 0.")] = None,
    microbatch_size: Annotated[
        str | None, typer.Option(metavar="INTEGER|auto", help="Examples worked on at once (memory only).")
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help='For --microbatch-size auto, such as "4 GiB"; else a part of what is free.')
    ] = None,
    autotune: Annotated[
        bool | None, typer.Option("--autotune/--no-autotune", help="Time the methods for each layer's norms once.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Reproducible sampling and noise, for tests: the run is then NOT private."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other key of the file; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
) -> None:
    """Train a model privately, as RUN.toml says; flags take the place of the file's values.

    Writes one folder: release/ has weights and privacy card; private/ has configuration, metrics, checkpoints,
    ledger and key. A run that was cut off, by Ctrl-C or by anything else, goes on with --resume.
    """
    flags: dict[str, object | None] = {
        "run.out": None if out is None else str(out.resolve()),
        "plan.epsilon": epsilon,
        "plan.noise_multiplier": noise_multiplier,
        "plan.delta": delta,
        "plan.epochs": epochs,
        "plan.steps": steps,
        "plan.batch_size": batch_size,
        "plan.max_grad_norm": max_grad_norm,
        "optimizer.lr": lr,
        "filter.kappa": kappa,
        "filter.gamma": gamma,
        "run.microbatch_size": _number_or_text(microbatch_size),
        "run.memory_budget": _number_or_text(memory_budget),
        "run.autotune": autotune,
        "run.seed": seed,
    }
    overrides = {key: value for key, value in flags.items() if value is not None}
    if filter is not None:
        overrides = {"filter": {"kind": filter}, **overrides}
    execute(load_run(run, {**overrides, **parse_settings(set_ or [], "--set")}), run.parent, resume)


@dataclass(frozen=True)
class _Course:
    """What the loop needs beside the training itself."""

    config: RunConfig
    folder: RunFolder
    test: TensorDataset
    eval_every: int
    checkpoint_every: int


def execute(config: RunConfig, code_folder: Path, resume: bool) -> None:
    """Check everything, then make the folder, then train; nothing is written if the input is wrong."""
    folder = RunFolder(config.run.out)
    if not resume:
        folder.refuse_existing()
    for name in ("eval_every", "checkpoint_every"):
        value = getattr(config.run, name)
        if value is not None and value < 1:
            raise ConfigError(f"[run] {name}: must be at least 1 step, got {value}")
    _check_account(config.run.ledger)
    filter = build_filter(config.filter)
    split = load_data(config.data)
    plan = build_plan(config.plan, len(split.train), config.run.seed is not None)
    model = build_model(config.model, split, code_folder)
    optimizer = build_optimizer(config.optimizer, model)
    resolved = config.as_json()
    resolved["plan"] = _resolved(plan)
    begun = resume and folder.begun(resolved)
    if resume and not begun:
        folder.fill(resolved)
    elif not resume:
        folder.create(resolved)
    try:
        private = _training(config, folder, begun, model, optimizer, plan, filter)
        loader = private.loader(split.train, num_workers=config.run.num_workers, units=split.units)
    except BaseException:
        if not resume:
            folder.discard()
        raise
    if private.memory_fit is not None:
        fit = private.memory_fit
        say(f"microbatches of {fit.size}: {shown_memory(fit.peak)} measured, {shown_memory(fit.slope)} an example")
    public = (*split.info.provenance, _about_size(config, plan))
    say("taken as public, and from where:")
    for line in public:
        say(f"  {line}")
    if begun:
        folder.append({"event": "resumed", "step": private.steps_done})
        say(f"going on after step {private.steps_done} of {plan.steps}")
    else:
        private.save(folder.checkpoint)
    epoch = max(1, round(1 / plan.sample_rate))
    course = _Course(config, folder, split.test, config.run.eval_every or epoch, config.run.checkpoint_every or epoch)
    seconds = _train(private, loader, course)
    folder.publish(model, card_of(private, split.info.provenance))
    _summarise(private, course, seconds)


def _check_account(path: Path | None) -> None:
    if path is not None and (not path.is_file() or read_account(path)[0] is None):
        raise ConfigError(f"[run] ledger: {path} is no account of several runs; begin one with diskdp ledger --new")


def _training(
    config: RunConfig,
    folder: RunFolder,
    begun: bool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    filter: Filter,
) -> PrivateTraining:
    """The training, from its checkpoint if it has begun."""
    start = partial(privatize.resume, folder.checkpoint) if begun else privatize
    try:
        return start(
            model,
            optimizer,
            plan,
            loss_fn=classification_loss,
            filter=filter,
            microbatch_size=config.run.microbatch_size,
            memory_budget=config.run.memory_budget,
            autotune=config.run.autotune,
            seed=config.run.seed,
            ledger_path=config.run.ledger or folder.ledger,
            key_path=folder.key if plan.noise in KEYED_BY_SUM and config.run.seed is None else None,
        )
    except CheckpointError as error:
        raise folder.damaged(error) from error


def _train(private: PrivateTraining, loader: PrivateLoader, course: _Course) -> float:
    """All remaining steps; Ctrl-C ends them after the current one, with a checkpoint."""
    plan, start = private.plan, time.perf_counter()
    with progress_bars() as bars, _interrupts() as interrupted:
        bar = bars.add_task("training", total=plan.steps, completed=private.steps_done, note="")
        try:
            for batch in loader:
                rate = learning_rate(course.config.optimizer, private.steps_done, plan.steps)
                for group in private.optimizer.param_groups:
                    group["lr"] = rate
                result = private.step(batch)
                passed = round(time.perf_counter() - start, 3)
                course.folder.append({**asdict(result), "lr": rate, "seconds": passed})
                _after_step(private, course, bars, bar)
                if interrupted():
                    break
        except BudgetExhausted:  # steps of the past were drawn anew, or other runs of the account have spent
            complain(
                "warning",
                f"the budget is used up at step {private.steps_done} of {plan.steps}: {private.steps_charged} steps "
                "were charged, those that were run again and came out otherwise included, and other runs of an account",
            )
    private.save(course.folder.checkpoint)
    if interrupted() and private.steps_done < plan.steps:
        complain("stopped", f"after step {private.steps_done} of {plan.steps}; --resume goes on with it")
        raise KeyboardInterrupt
    return time.perf_counter() - start


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once lets the step finish, twice ends at once."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _after_step(private: PrivateTraining, course: _Course, bars: Progress, bar: TaskID) -> None:
    done, last = private.steps_done, private.steps_done == private.plan.steps
    if (done % course.eval_every == 0 or last) and len(course.test):
        score = accuracy(private.model, course.test)
        epsilon = private.epsilon
        course.folder.append({"step": done - 1, "test_accuracy": score, "epsilon": epsilon})
        bars.update(bar, note=f"test accuracy {score:.4f}, ε {epsilon:.3g}")
    if done % course.checkpoint_every == 0:
        private.save(course.folder.checkpoint)
    bars.update(bar, completed=done)


def _summarise(private: PrivateTraining, course: _Course, seconds: float) -> None:
    plan = private.plan
    if not all(bool(p.isfinite().all()) for p in private.model.parameters()):
        complain("warning", "the weights are no longer finite: lower the learning rate")
    score = f"{accuracy(private.model, course.test):.4f}" if len(course.test) else "no test rows"
    kept = (
        "nothing is private" if not plan.is_private else "NOT PRIVATE: a seed was given" if private.reproducible else ""
    )
    print_table(
        table(
            ["filter", "steps", "σ", "ε spent", "δ", "test accuracy", "seconds"],
            [
                [
                    repr(private.filter),
                    f"{private.steps_done} of {plan.steps}",
                    f"{plan.noise_multiplier:.4g}",
                    "∞" if math.isinf(private.epsilon) else f"{private.epsilon:.4g}",
                    f"{plan.delta:.3g}",
                    score,
                    f"{seconds:.1f}",
                ]
            ],
            numbers=range(1, 7),
        )
    )
    if kept:
        say(f"  {kept}")
    if len(course.test):
        say("the score says something about the test rows, which the guarantee does not cover")
    say(f"for release: {course.folder.release} (weights, privacy card)")
    say(f"not for release: {course.folder.private} (configuration, metrics, checkpoints, ledger, key)")


def _number_or_text(value: str | None) -> int | str | None:
    """A flag that takes a whole number or a word."""
    return int(value) if value is not None and value.strip().lstrip("+-").isdecimal() else value


def _resolved(plan: Plan) -> Mapping[str, Any]:
    return dict(json.loads(plan.to_json()))


def _about_size(config: RunConfig, plan: Plan) -> str:
    source = "declared in [plan]" if config.plan.dataset_size else "the number of training rows"
    return f"N = {plan.dataset_size}: {source}; fixes the sample rate q = {plan.sample_rate:.6g}"
