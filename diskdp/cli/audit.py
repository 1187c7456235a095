"""`diskdp audit`: does what the library releases keep what its plans promise?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diskdp.audit import RunAudit, StepAudit, audit_run, audit_step
from diskdp.audit.plot import plot_tradeoff
from diskdp.cli.console import print_table, progress_bars, say, table
from diskdp.errors import ConfigError
from diskdp.filters import DiSK, Filter, LowPass, NoFilter
from diskdp.plan import Plan

_METHODS = ("two-world", "one-run", "all")
_FILTERS = ("none", "disk", "disk-separate", "lowpass")


def audit(
    method: Annotated[str, typer.Option(help="two-world (sharp), one-run (a whole training, weak), or all.")] = (
        "two-world"
    ),
    draws: Annotated[int, typer.Option(help="Draws of each world in each scenario.")] = 4096,
    confidence: Annotated[float, typer.Option(help="Of the two-world verdict; one-run bounds hold at 0.95.")] = 0.999,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ: audit one plan instead of the battery.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε of that plan, instead of σ.")] = None,
    dataset_size: Annotated[int, typer.Option(help="N of that plan.")] = 8192,
    batch_size: Annotated[int | None, typer.Option(help="B of that plan; N unless given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of that plan.")] = 2,
    delta: Annotated[float, typer.Option(help="δ of that plan.")] = 1e-5,
    clipping: Annotated[str, typer.Option(help="Clipping of that plan.")] = "flat",
    sampling: Annotated[str, typer.Option(help="Sampling of that plan.")] = "poisson",
    adjacency: Annotated[str, typer.Option(help="Adjacency of that plan.")] = "add-remove",
    accountant: Annotated[str, typer.Option(help="Accountant of that plan.")] = "pld",
    noise: Annotated[str, typer.Option(help="Noise of that plan.")] = "gaussian",
    filter: Annotated[str | None, typer.Option(help="none, disk, disk-separate (clipping) or lowpass.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all findings as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the trade-off curves.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeatable, noise included.")] = None,
    everything: Annotated[bool, typer.Option("--all-findings", help="Show every statistic.")] = False,
) -> int:
    """Audit the library: bounds from below on what steps and runs spend, beside what their plans claim.

    Example: diskdp audit --method all --json audit.json
    Exit code 1 if a bound exceeds its claim: what is released is not as private as it says.
    """
    if method not in _METHODS:
        raise ConfigError(f"--method {method}: choose one of {', '.join(_METHODS)}")
    if filter is not None and filter not in _FILTERS:
        raise ConfigError(f"--filter {filter}: choose one of {', '.join(_FILTERS)}")
    if method == "one-run" and plot is not None:
        raise ConfigError(f"--plot {plot}: only a two-world audit has a curve to draw")
    for path in (as_json, plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    plan = None
    if noise_multiplier is not None or epsilon is not None:
        plan = Plan(
            dataset_size=dataset_size,
            batch_size=batch_size or dataset_size,
            steps=steps,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            delta=delta,
            clipping=clipping,
            sampling=sampling,
            adjacency=adjacency,
            accountant=accountant,
            noise=noise,
        )
    chosen = None if filter is None else _filter(filter)
    audits: list[StepAudit | RunAudit] = []
    with progress_bars() as bars:
        if method != "one-run":
            task = bars.add_task("two worlds", total=None, note="")
            audits.append(
                audit_step(
                    plan,
                    filter=chosen,
                    draws=draws,
                    confidence=confidence,
                    seed=seed,
                    progress=lambda done, of: bars.update(task, completed=done, total=of),
                )
            )
        if method != "two-world":
            run_task = bars.add_task("one run", total=None, note="")
            audits += _one_run(plan, chosen, seed, lambda done, of: bars.update(run_task, completed=done, total=of))
    for made in audits:
        _show(made, everything)
    if as_json is not None:
        as_json.write_text(json.dumps(_report(audits), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        plot_tradeoff(plot, next(made for made in audits if isinstance(made, StepAudit)))
    passed = all(made.passed for made in audits)
    say("passed: no bound exceeds its claim" if passed else "FAILED: less private than claimed")
    return 0 if passed else 1


def _one_run(plan: Plan | None, filter: Filter | None, seed: int | None, progress: Any) -> list[RunAudit]:
    size = 2000 if plan is None else max(100, plan.dataset_size // 3)
    return [
        audit_run(plan, kind=kind, view=view, canaries=size, filter=filter, seed=seed, progress=progress)
        for kind in ("gradient", "input")
        for view in ("white-box", "final-model")
    ]


def _filter(name: str) -> Filter:
    if name == "lowpass":
        return LowPass(kappa=0.7)
    return NoFilter() if name == "none" else DiSK(clip="separate" if name == "disk-separate" else "joint")


def _show(made: StepAudit | RunAudit, everything: bool) -> None:
    if isinstance(made, RunAudit):
        say(
            f"one run, {made.kind} canaries, {made.view}: ε ≥ {made.epsilon_lower:.3g}, claimed "
            f"{made.epsilon_claimed:.3g} ({made.correct} of {made.guesses} guesses right, {made.canaries} canaries)"
        )
        return
    rows = []
    for scenario in made.scenarios:
        if everything:
            shown = scenario.findings
        else:
            shown = tuple(sorted(scenario.findings, key=lambda f: (not f.broken, -f.epsilon_lower / f.epsilon_claimed)))
            shown = shown[:3]
        for finding in shown:
            rows.append(
                [
                    scenario.name,
                    finding.statistic,
                    finding.assumes,
                    f"{finding.epsilon_lower:.3f}",
                    f"{finding.epsilon_claimed:.3f}",
                    "BROKEN" if finding.broken else "kept",
                ]
            )
    print_table(table(["scenario", "statistic", "assumes", "ε at least", "claimed", "claim"], rows, numbers=(3, 4)))
    draws = min(scenario.draws for scenario in made.scenarios)
    say(
        f"two worlds: {len(made.findings)} statistics, {draws} draws a world, {made.seconds:.1f} s, false alarms of "
        f"all together at most {1 - made.confidence:.2g}"
    )


def _report(audits: list[StepAudit | RunAudit]) -> dict[str, Any]:
    """The verdict of all at the top, in the terms of the worst; each in full below."""
    worst = max(audits, key=lambda made: (not made.passed, made.epsilon_lower / made.epsilon_claimed))
    return {
        "epsilon_lower": worst.epsilon_lower,
        "epsilon_claimed": worst.epsilon_claimed,
        "delta": worst.delta,
        "confidence": worst.confidence,
        "passed": all(made.passed for made in audits),
        "audits": [made.to_dict() for made in audits],
    }
