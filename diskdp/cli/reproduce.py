"""`diskdp reproduce`: figures of the paper that need no data set, with the numbers behind them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from matplotlib.figure import Figure

from diskdp.cli.console import print_table, progress_bars, say, table
from diskdp.errors import ConfigError
from diskdp.experiments import (
    Ablation,
    GainConvergence,
    LinearRegression,
    ablation,
    regression,
    run_ablation,
    run_gain_convergence,
    run_linear_regression,
)
from diskdp.experiments.figures import draw_ablation, draw_gain_convergence, draw_linear_regression
from diskdp.experiments.results import Row, write

Settings: TypeAlias = "LinearRegression | Ablation | GainConvergence"

_SETTINGS: dict[str, Settings] = {
    "kappa-convergence": GainConvergence(),
    "linear-regression": LinearRegression(),
    "ablation": Ablation(),
}
_QUICK: dict[str, Settings] = {
    "kappa-convergence": GainConvergence(),
    "linear-regression": LinearRegression(
        dimension=20, examples=100, steps=50, rates=8, kappas=(0.1, 0.5), tuning_seeds=3, seeds=5
    ),
    "ablation": Ablation(
        dimension=10,
        examples=100,
        batch_size=20,
        steps=30,
        rates=4,
        kappas=(0.3,),
        thresholds=(1.0,),
        tuning_seeds=2,
        seeds=4,
    ),
}


def reproduce(
    experiment: Annotated[str, typer.Argument(help="kappa-convergence, linear-regression or ablation.")],
    out: Annotated[Path, typer.Option(help="The folder to write figure, numbers.csv and settings.json to.")],
    seeds: Annotated[int | None, typer.Option(help="Evaluation seeds, at least 2; tuning has its own.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each run.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A trial in seconds: smaller problems, few seeds.")] = False,
) -> None:
    """Run an experiment of the paper again and draw it; every method at its own best, tuned on seeds of its own.

    Example: diskdp reproduce linear-regression --out figures/linear-regression
    """
    if experiment not in _SETTINGS:
        raise ConfigError(f"{experiment}: must be one of {', '.join(_SETTINGS)}")
    settings = (_QUICK if quick else _SETTINGS)[experiment]
    if steps is not None:
        if steps < 5:
            raise ConfigError(f"--steps {steps}: must be at least 5")
        settings = replace(settings, steps=steps)
    if seeds is not None:
        if isinstance(settings, GainConvergence):
            raise ConfigError(f"--seeds {seeds}: {experiment} has nothing random")
        if seeds < 2:
            raise ConfigError(f"--seeds {seeds}: an interval needs at least 2")
        settings = replace(settings, seeds=seeds)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is not a folder")
    rows, figure = _run(experiment, settings)
    for path in write(out, rows, figure, asdict(settings), shlex.join(["diskdp", *sys.argv[1:]])):
        say(str(path))


def _run(experiment: str, settings: Settings) -> tuple[list[Row], Figure]:
    if isinstance(settings, GainConvergence):
        rows = run_gain_convergence(settings)
        return rows, draw_gain_convergence(rows)
    with progress_bars() as bars:
        if isinstance(settings, LinearRegression):
            task = bars.add_task(experiment, total=regression.work(settings), note="")
            rows = run_linear_regression(settings, lambda: bars.advance(task))
            figure = draw_linear_regression(rows)
        else:
            task = bars.add_task(experiment, total=ablation.work(settings), note="")
            rows = run_ablation(settings, lambda: bars.advance(task))
            figure = draw_ablation(rows)
    _show(rows)
    return rows, figure


def _show(rows: Sequence[Row]) -> None:
    """The table: what was varied, what was chosen, final loss and its ratio to the first method's, 95% intervals."""
    if "method" in rows[0]:
        keys, chosen = ["spectrum", "noise_std", "method"], "filter"
    else:
        keys, chosen = ["clipping", "noise_multiplier", "points", "filter", "clip", "max_grad_norm"], "tuned"
    cells = [
        [
            *(str(row[key]) for key in keys),
            str(row[chosen]),
            f"{row['learning_rate']:.3g}" + ("*" if row["rate_at_edge"] else ""),
            f"{row['loss_mean']:.3g}",
            f"{row['ratio_mean']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
        ]
        for row in rows
    ]
    heads = [*(key.replace("_", " ") for key in keys), "tuned", "rate", "loss", "ratio", "95% interval"]
    print_table(table(heads, cells, numbers=range(len(heads) - 4, len(heads))))
    if any(row["rate_at_edge"] for row in rows):
        say("* at an end of the grid of learning rates")
