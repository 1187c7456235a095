"""`diskdp plan`: how much noise a budget needs, and what has been spent after each epoch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from diskdp.cli.console import print_table, say, table
from diskdp.errors import ConfigError
from diskdp.plan import Plan, epsilon_by_epoch
from diskdp.report.plots import plot_epsilon


def plan(
    dataset_size: Annotated[int, typer.Option(help="N, the number of records; taken as public.")],
    batch_size: Annotated[int, typer.Option(help="B, the expected batch size; each record joins with q = B/N.")],
    delta: Annotated[float, typer.Option(help="δ, the part of the budget that should stay below 1/N.")],
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; or give --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps; or give --epochs.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε to keep to; or give --noise-multiplier.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ to evaluate; or give --epsilon.")] = None,
    accountant: Annotated[str, typer.Option(help="pld (tight) or rdp.")] = "pld",
    sampling: Annotated[str, typer.Option(help="How batches are drawn: poisson.")] = "poisson",
    adjacency: Annotated[str, typer.Option(help="What neighbouring data sets are: add-remove.")] = "add-remove",
    rows: Annotated[int, typer.Option(help="At most this many rows in the table.")] = 30,
    plot: Annotated[Path | None, typer.Option(help="Draw ε against epochs to this PNG, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the noise that a budget needs, or the budget that a noise spends, epoch by epoch.

    Example: diskdp plan --dataset-size 60000 --batch-size 2000 --epochs 20 --epsilon 3 --delta 1e-5
    """
    if rows < 1:
        raise ConfigError(f"--rows {rows}: must be at least 1")
    resolved = Plan(
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
        sampling=sampling,
        adjacency=adjacency,
    )
    if plot is not None:
        if not resolved.is_private:
            raise ConfigError(f"--plot {plot}: there is nothing to draw, epsilon is infinite")
        plot_epsilon(plot, resolved)
    spent = epsilon_by_epoch(resolved, max_rows=rows)
    if as_json:
        answer = {
            "plan": json.loads(resolved.to_json()),
            "noise_multiplier": resolved.noise_multiplier,
            "sample_rate": resolved.sample_rate,
            "steps": resolved.steps,
            "spent": [{"epochs": row.epochs, "steps": row.steps, "epsilon": _finite(row.epsilon)} for row in spent],
        }
        print(json.dumps(answer, indent=2, allow_nan=False))
        return
    say(f"noise multiplier σ   {resolved.noise_multiplier:.6g}")
    say(f"steps T              {resolved.steps}")
    say(f"sample rate q        {resolved.sample_rate:.6g} ({resolved.sampling})")
    say(f"ε at δ = {resolved.delta:<10.4g}  {_shown(resolved.epsilon)} ({resolved.adjacency}, {accountant})")
    cells = [[f"{row.epochs:g}", str(row.steps), _shown(row.epsilon)] for row in spent]
    print_table(table(["epoch", "steps", "ε spent"], cells, numbers=(0, 1, 2)))


def _shown(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:.4f}"


def _finite(epsilon: float) -> float | str:
    return "inf" if math.isinf(epsilon) else epsilon
