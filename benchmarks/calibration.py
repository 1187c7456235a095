"""CPU seconds to calibrate the noise of a plan, over a grid of budgets, beside one evaluation by dp-accounting itself.

python benchmarks/calibration.py --steps 100 10000 --accountants pld rdp

With --verify, every answer is checked from outside: dp-accounting's own accountant, with its defaults, finds no more
than epsilon spent at the sigma returned, and more at 0.1% less.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from diskdp import accounting

BUDGETS = (0.1, 0.3, 1.0, 3.0, 10.0)
SAMPLE_RATES = (0.0005, 0.002, 0.01, 0.05, 0.2, 0.5, 0.9)
DELTAS = (1e-5, 1e-7)


def library_epsilon(sigma: float, q: float, steps: int, delta: float, accountant: str) -> float:
    spent = PLDAccountant() if accountant == "pld" else RdpAccountant()
    spent.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    return float(spent.get_epsilon(delta))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000])
    parser.add_argument("--accountants", nargs="+", default=["pld", "rdp"])
    parser.add_argument("--verify", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("absl").disabled = True  # dp-accounting logs each Renyi order that it drops

    for accountant, steps in itertools.product(arguments.accountants, arguments.steps):
        seconds, evaluations, wrong = [], [], 0
        for budget, q, delta in itertools.product(BUDGETS, SAMPLE_RATES, DELTAS):
            start = time.process_time()
            sigma = accounting.calibrate(budget, q, steps, delta, accountant)
            seconds.append((time.process_time() - start, budget, q, delta))
            start = time.process_time()
            spent = library_epsilon(sigma, q, steps, delta, accountant)
            evaluations.append(time.process_time() - start)
            if arguments.verify:
                wrong += not spent <= budget < library_epsilon(0.999 * sigma, q, steps, delta, accountant)
        slowest, *where = max(seconds)
        median = sorted(seconds)[len(seconds) // 2][0]
        print(
            f"{accountant} T={steps}: {len(seconds)} calibrations, median {median:.2f} s, "
            f"slowest {slowest:.2f} s at (epsilon, q, delta) = {tuple(where)}; "
            f"slowest single evaluation by dp-accounting {max(evaluations):.2f} s"
            + (f"; {wrong} answers wrong" if arguments.verify else "")
        )


if __name__ == "__main__":
    main()
