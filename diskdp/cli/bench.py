"""`diskdp bench`: what a private step costs here, beside a non-private one and beside Opacus."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from diskdp.bench import CASES, METHODS, Method, Results, Settings, bench_case, bench_passes
from diskdp.bench.methods import BASELINE, DEFAULT_METHODS
from diskdp.bench.report import methods_table, parts_table, plot_ratios, summary_table, timing_notes
from diskdp.bench.results import processor, versions, write_json
from diskdp.bench.run import PASSES
from diskdp.cli.config import nearest
from diskdp.cli.console import print_table, progress_bars, say, table
from diskdp.errors import ConfigError

_TITLES = {**{name: spec.title for name, spec in CASES.items()}, PASSES: "noise and filter, 125 million numbers"}
_QUICK_MODELS = tuple(name for name, spec in CASES.items() if not spec.large)
_QUICK_SECONDS = 2.0


def bench(
    models: Annotated[str | None, typer.Option(metavar="A,B", help="Models, with commas; all unless given.")] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Methods, with commas.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each model; large ones take what three rounds need.")] = 40.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers there, too.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ratios to this PNG, too.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Time all 16 microbatches of the large models.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small models unless named, a moment each: a trial.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List models and methods, measure nothing.")] = False,
) -> None:
    """Measure a training step of each method, relative to the non-private step of the same run.

    Time, peak memory and exactness: `private.step` on a ready batch, with noise, filter and optimizer.
    """
    if show:
        _list()
        return
    chosen = _chosen("--models", models, [*CASES, PASSES], _QUICK_MODELS if quick else (*CASES, PASSES))
    compared = _chosen("--methods", methods, list(METHODS), DEFAULT_METHODS)
    compared = [BASELINE, *(name for name in compared if name != BASELINE)]
    if threads < 1:
        raise ConfigError(f"--threads {threads}: must be at least 1")
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"--seconds {seconds}: must be positive")
    for option, path in (("--json", json), ("--plot", plot)):
        _check_writable(option, path)
    settings = Settings(
        threads=threads,
        seconds=min(seconds, _QUICK_SECONDS) if quick else seconds,
        least_rounds=1 if quick else 3,
        whole=whole,
    )
    command = _command(chosen if models else None, compared if methods else None, settings, quick)
    heading = f"{processor()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
    say(f"{command}\n{heading}; " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    results = _measured(chosen, {name: METHODS[name] for name in compared}, settings)
    if len({row.model for row in results.rows}) > 1:
        print_table(_table(*summary_table(results, _TITLES)))
    if json is not None:
        write_json(json, results, command, threads)
    if plot is not None:
        plot_ratios(plot, results, _TITLES, f"{heading}, torch {torch.__version__}")


def _measured(models: Sequence[str], compared: Mapping[str, Method], settings: Settings) -> Results:
    results = Results()
    with progress_bars() as bars:
        whole = bars.add_task("bench", total=len(models), note="")
        for number, name in enumerate(models):

            def progress(doing: str, done: float, number: int = number, name: str = name) -> None:
                bars.update(whole, description=name, completed=number + done, note=doing)

            if name == PASSES:
                found = bench_passes(settings, progress)
            else:
                found = bench_case(name, CASES[name], compared, settings, progress)
            results.add(found)
            bars.update(whole, completed=number + 1, note="")
            _show(name, found)
    return results


def _show(name: str, found: Results) -> None:
    say(f"\n{_TITLES[name]}")
    if found.rows:
        print_table(_table(*methods_table(found.rows, found.skipped)))
        say(f"  {timing_notes(found.rows)}")
    if found.parts:
        print_table(_table(*parts_table(found.parts, "torch.randn" if name == PASSES else "non-private step")))
    for item in found.skipped:
        say(f"  left out: {item.method}, {item.reason}")
    sys.stdout.flush()


def _list() -> None:
    rows = [
        [name, spec.title, f"{spec.goal_one_point:.2f}", f"{spec.goal_two_points:.2f}"] for name, spec in CASES.items()
    ]
    print_table(table(["model", "", "goal, DP-SGD", "goal, DiSK"], [*rows, [PASSES, _TITLES[PASSES], "", ""]], (2, 3)))
    print_table(table(["method", ""], [[name, method.title] for name, method in METHODS.items()]))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return table(headers, rows, numbers=range(1, len(headers)))


def _chosen(option: str, given: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    if given is None:
        return list(default)
    names = [name for name in given.replace(",", " ").split() if name]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name}: unknown{nearest(name, known)}; diskdp bench --list shows all")
    if not names:
        raise ConfigError(f"{option} {given!r}: names none; diskdp bench --list shows all")
    return list(dict.fromkeys(names))


def _check_writable(option: str, path: Path | None) -> None:
    """Found out before minutes of measuring, not after."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{option} {path}: cannot be written, it is a folder or its folder does not exist")
    if option == "--plot" and path is not None and path.suffix.lower() != ".png":
        raise ConfigError(f"{option} {path}: must end in .png")


def _command(models: Sequence[str] | None, methods: Sequence[str] | None, settings: Settings, quick: bool) -> str:
    """The command line that repeats the measurement."""
    words = ["diskdp bench"]
    words += [f"--models {','.join(models)}"] if models else []
    words += [f"--methods {','.join(methods)}"] if methods else []
    words += [f"--threads {settings.threads}", f"--seconds {settings.seconds:g}"]
    words += ["--whole"] if settings.whole else []
    words += ["--quick"] if quick else []
    return " ".join(words)
