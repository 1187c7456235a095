"""`diskdp ledger`: what runs on one data set have spent together, and accounts that bound it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from diskdp.accounting import composed_epsilon
from diskdp.cli.console import print_table, say, table
from diskdp.cli.folder import RunFolder
from diskdp.errors import ConfigError
from diskdp.ledger import Account, open_account, read_account, samples
from diskdp.plan import Plan


@dataclass(frozen=True)
class _Run:
    place: str
    plan: Plan
    releases: Mapping[int, int]

    @property
    def samples(self) -> Mapping[int, int]:
        return samples(self.plan, self.releases)

    @property
    def epsilon(self) -> float:
        return self.plan.epsilon_of(self.samples)


def ledger(
    places: Annotated[list[Path], typer.Argument(metavar="PLACE...", help="Folders of runs, or ledgers of accounts.")],
    new: Annotated[bool, typer.Option("--new", help="Begin an account at PLACE, of --epsilon and --delta.")] = False,
    epsilon: Annotated[float | None, typer.Option(help="With --new: what all runs may spend together.")] = None,
    delta: Annotated[float | None, typer.Option(help="At which δ; without it the largest of the runs'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what runs on the same data have spent together, or begin an account that they may not pass.

    Example: diskdp ledger --new data.jsonl --epsilon 8 --delta 1e-5, then [run] ledger = "data.jsonl" in each run file,
    and diskdp ledger data.jsonl.
    """
    if new:
        _begin(places, epsilon, delta)
        return
    if epsilon is not None:
        raise ConfigError("--epsilon: is for --new; what was spent is found here")
    found = [_read(place) for place in places]
    runs = [run for _, own in found for run in own]
    if not runs:
        raise ConfigError(f"{places[0]}: nothing has been spent yet")
    accounts = [account for account, _ in found if account is not None]
    if delta is None:
        delta = max([account.delta for account in accounts] or [run.plan.delta for run in runs])
    together = composed_epsilon([(r.plan.mechanism, r.plan.noise_multiplier, r.samples) for r in runs], delta)
    if as_json:
        answer = {
            "runs": [{"place": r.place, "releases": _total(r), "epsilon": _finite(r.epsilon)} for r in runs],
            "delta": delta,
            "epsilon": _finite(together),
            "accounts": [{"epsilon": account.epsilon, "delta": account.delta} for account in accounts],
        }
        print(json.dumps(answer, indent=2, allow_nan=False))
        return
    rows = [
        [r.place, str(_total(r)), f"{r.plan.noise_multiplier:.4g}", f"{r.plan.sample_rate:.4g}", _shown(r.epsilon)]
        for r in runs
    ]
    print_table(table(["run", "releases", "σ", "q", "ε at its δ"], rows, numbers=(1, 2, 3, 4)))
    say(f"together: ε = {_shown(together)} at δ = {delta:g}")
    for account in accounts:
        say(f"the account: ε = {account.epsilon:g} at δ = {account.delta:g}")


def _begin(places: list[Path], epsilon: float | None, delta: float | None) -> None:
    if len(places) != 1:
        raise ConfigError("--new: begins one account; give one PLACE")
    if epsilon is None or delta is None:
        raise ConfigError("--new: needs --epsilon and --delta, what all runs may spend together")
    open_account(places[0], Account(epsilon, delta))
    say(f'{places[0]}: begun; put ledger = "{places[0]}" under [run] in each run file')


def _read(place: Path) -> tuple[Account | None, list[_Run]]:
    """An account and its runs; of a run folder, the run."""
    folder = RunFolder(place)
    if not place.is_dir():
        account, runs = read_account(place)
        if account is None:
            raise ConfigError(f"{place}: the ledger of a single run; name the run's folder, which has its plan")
        return account, [_Run(f"{place.name} #{n}", Plan.from_json(text), own) for n, (text, own) in enumerate(runs, 1)]
    if not folder.config.is_file():
        raise ConfigError(f"{place}: no run's folder (there is no {folder.config.relative_to(place)})")
    config = folder.read_config()
    if config["run"].get("ledger"):
        raise ConfigError(f"{place}: the run is in an account; name that ledger ({config['run']['ledger']})")
    runs = read_account(folder.ledger)[1] if folder.ledger.exists() else []
    plan = Plan.from_json(json.dumps(config["plan"]))
    return None, [_Run(str(place), plan, own) for _, own in runs]


def _total(run: _Run) -> int:
    return sum(times * count for times, count in run.samples.items())


def _shown(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:.4f}"


def _finite(epsilon: float) -> float | str:
    return "inf" if math.isinf(epsilon) else epsilon
