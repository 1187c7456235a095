"""`diskdp plan`: how much noise a budget needs, and what has been spent after each epoch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from diskdp.cli.console import print_table, say, table
from diskdp.errors import ConfigError
from diskdp.plan import Plan, epsilon_by_epoch
from diskdp.report.plots import plot_epsilon, plot_trade_off
from diskdp.tradeoff import trade_off


def plan(
    dataset_size: Annotated[int, typer.Option(help="N, the number of records; taken as public.")],
    delta: Annotated[float, typer.Option(help="δ, the part of the budget that should stay below 1/N.")],
    batch_size: Annotated[
        int | None, typer.Option(help="B, the batch size (expected, if Poisson); without it, the largest that fits.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; or give --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps; without these and --epochs, the most that fit.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε to keep to; or give --noise-multiplier, or both.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ: the noise's deviation over S.")] = None,
    accountant: Annotated[str, typer.Option(help="pld (tight) or rdp.")] = "pld",
    sampling: Annotated[
        str, typer.Option(help="How batches are drawn: poisson, truncated-poisson, fixed-size, shuffled.")
    ] = "poisson",
    adjacency: Annotated[
        str, typer.Option(help="What neighbouring data sets are: add-remove, zero-out, replace-one.")
    ] = "add-remove",
    max_batch_size: Annotated[int | None, typer.Option(help="The cap of truncated-poisson batches.")] = None,
    examples_per_unit: Annotated[int, typer.Option(help="Records that one unit contributes, at most.")] = 1,
    paper_accounting: Annotated[
        bool, typer.Option("--paper-accounting", help="Fixed-size batches as if Poisson: not a guarantee.")
    ] = False,
    explore: Annotated[
        str | None, typer.Option(help="Show σ for a grid of ε by steps or by batch, around the plan.")
    ] = None,
    rows: Annotated[int, typer.Option(help="At most this many rows in the table.")] = 30,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ε against epochs (or what --explore shows) to this PNG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the noise that a budget needs, or the budget that a noise spends, epoch by epoch.

    With both, the most steps or the largest batch that fits is found.

    Example: diskdp plan --dataset-size 60000 --batch-size 2000 --epochs 20 --epsilon 3 --delta 1e-5
    """
    if explore not in (None, "steps", "batch"):
        raise ConfigError(f"--explore {explore}: must be steps or batch")
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
        max_batch_size=max_batch_size,
        examples_per_unit=examples_per_unit,
        paper_accounting=paper_accounting,
    )
    if explore is not None and not resolved.is_private:
        raise ConfigError(f"--explore {explore}: there is nothing to explore, epsilon is infinite")
    explored = None if explore is None else trade_off(resolved, explore)
    if plot is not None:
        if not resolved.is_private:
            raise ConfigError(f"--plot {plot}: there is nothing to draw, epsilon is infinite")
        if explored is None:
            plot_epsilon(plot, resolved)
        else:
            plot_trade_off(plot, resolved, explored)
    spent = epsilon_by_epoch(resolved, max_rows=rows)
    if as_json:
        answer: dict[str, object] = {
            "plan": json.loads(resolved.to_json()),
            "noise_multiplier": resolved.noise_multiplier,
            "sample_rate": resolved.sample_rate,
            "steps": resolved.steps,
            "steps_per_epoch": resolved.steps_per_epoch,
            "guarantee": resolved.is_guarantee,
            "spent": [{"epochs": row.epochs, "steps": row.steps, "epsilon": _finite(row.epsilon)} for row in spent],
        }
        if explored is not None:
            answer["explored"] = asdict(explored)
        print(json.dumps(answer, indent=2, allow_nan=False))
        return
    say(f"noise multiplier σ   {resolved.noise_multiplier:.6g}")
    say(f"steps T              {resolved.steps}")
    say(f"batch size B         {resolved.batch_size}")
    say(f"sample rate q        {resolved.sample_rate:.6g} ({resolved.sampling})")
    say(f"ε at δ = {resolved.delta:<10.4g}  {_shown(resolved.epsilon)} ({resolved.adjacency}, {accountant})")
    if resolved.paper_accounting:
        say("NOT A GUARANTEE: batches of a fixed size, accounted as if they were Poisson ones")
    cells = [[f"{row.epochs:g}", str(row.steps), _shown(row.epsilon)] for row in spent]
    print_table(table(["epoch", "steps", "ε spent"], cells, numbers=(0, 1, 2)))
    if explored is not None:
        across = "steps" if explored.by == "steps" else f"batch size, {resolved.epochs:g} epochs"
        say(f"σ for other ε (down) and {across} (across)")
        grid = [
            [f"{budget:.4g}", *("none" if sigma is None else f"{sigma:.4g}" for sigma in row)]
            for budget, row in zip(explored.budgets, explored.noise_multipliers)
        ]
        heads = ["ε", *(str(value) for value in explored.values)]
        print_table(table(heads, grid, numbers=tuple(range(len(heads)))))


def _shown(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:.4f}"


def _finite(epsilon: float) -> float | str:
    return "inf" if math.isinf(epsilon) else epsilon
