"""CPU seconds to solve a plan for its noise, epsilon, steps or batch size, over a grid of settings.

python benchmarks/calibration.py --steps 100 10000 100000 --accountants pld rdp

goes through budgets, sampling rates and deltas for Poisson batches, add-remove; with --verify, each noise multiplier is
checked from outside: dp-accounting's own accountant, with its defaults, finds no more than epsilon spent at the sigma
returned, and more at 0.1% less. With --cells, all four solves in every cell of the table, at --steps.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Callable, Iterator

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from diskdp import Plan, accounting
from diskdp.errors import PlanError

BUDGETS = (0.1, 0.3, 1.0, 3.0, 10.0)
SAMPLE_RATES = (0.0005, 0.002, 0.01, 0.05, 0.2, 0.5, 0.9)
DELTAS = (1e-5, 1e-7)
CELLS = tuple(
    itertools.product(
        ("poisson", "truncated-poisson", "fixed-size", "shuffled"), ("add-remove", "zero-out", "replace-one")
    )
)
DATASET_SIZE = 100_000
CELL_BATCHES = (50, 1_000, 20_000)
CELL_BUDGETS = (0.3, 3.0, 10.0)


def library_epsilon(sigma: float, q: float, steps: int, delta: float, accountant: str) -> float:
    spent = PLDAccountant() if accountant == "pld" else RdpAccountant()
    spent.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    return float(spent.get_epsilon(delta))


def timed(work: Callable[[], float]) -> tuple[float, float]:
    start = time.process_time()
    value = work()
    return value, time.process_time() - start


def calibrations(accountant: str, steps: int, verify: bool) -> None:
    seconds, evaluations, wrong = [], [], 0
    for budget, q, delta in itertools.product(BUDGETS, SAMPLE_RATES, DELTAS):
        sigma, spent = timed(lambda: accounting.calibrate(budget, q, steps, delta, accountant))  # noqa: B023
        seconds.append((spent, budget, q, delta))
        epsilon, spent = timed(lambda: library_epsilon(sigma, q, steps, delta, accountant))  # noqa: B023
        evaluations.append(spent)
        if verify:
            wrong += not epsilon <= budget < library_epsilon(0.999 * sigma, q, steps, delta, accountant)
    slowest, *where = max(seconds)
    median = sorted(seconds)[len(seconds) // 2][0]
    print(
        f"{accountant} T={steps}: {len(seconds)} calibrations, median {median:.2f} s, "
        f"slowest {slowest:.2f} s at (epsilon, q, delta) = {tuple(where)}; "
        f"slowest single evaluation by dp-accounting {max(evaluations):.2f} s"
        + (f"; {wrong} answers wrong" if verify else ""),
        flush=True,
    )


def solves(sampling: str, adjacency: str, accountant: str, size: int, steps: int) -> Iterator[tuple[str, float]]:
    """(what was solved for, CPU seconds) over batch sizes and budgets."""
    for batch_size, budget in itertools.product(CELL_BATCHES, CELL_BUDGETS):
        cap = batch_size + int(8 * batch_size**0.5) if sampling == "truncated-poisson" else None
        base = {
            "dataset_size": DATASET_SIZE,
            "delta": 1e-6,
            "sampling": sampling,
            "adjacency": adjacency,
            "accountant": accountant,
            "max_batch_size": cap,
            "examples_per_unit": size,
        }
        given = {"batch_size": batch_size, "steps": steps}
        start = time.process_time()
        sigma = Plan(**base, **given, epsilon=budget).noise_multiplier
        yield "noise", time.process_time() - start
        for name, known in (
            ("epsilon", {**given, "noise_multiplier": sigma * 1.001}),
            ("steps", {"batch_size": batch_size, "epsilon": budget, "noise_multiplier": sigma * 1.001}),
            ("batch", {"steps": steps, "epsilon": budget, "noise_multiplier": sigma * 1.001}),
        ):
            start = time.process_time()
            Plan(**base, **known)
            yield name, time.process_time() - start


def cells(accountant: str, steps: int) -> None:
    for (sampling, adjacency), size in itertools.product(CELLS, (1, 4)):
        slowest: dict[str, float] = {}
        try:
            for name, seconds in solves(sampling, adjacency, accountant, size, steps):
                slowest[name] = max(slowest.get(name, 0.0), seconds)
        except PlanError as error:
            if not slowest:
                continue
            print(f"{sampling}, {adjacency}: stopped at {error}")
        print(
            f"{accountant} T={steps} {sampling}, {adjacency}, {size} a unit: slowest "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in slowest.items()),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000])
    parser.add_argument("--accountants", nargs="+", default=["pld", "rdp"])
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--cells", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("absl").disabled = True  # dp-accounting logs each Renyi order that it drops

    for accountant, steps in itertools.product(arguments.accountants, arguments.steps):
        if arguments.cells:
            cells(accountant, steps)
        else:
            calibrations(accountant, steps, arguments.verify)


if __name__ == "__main__":
    main()
