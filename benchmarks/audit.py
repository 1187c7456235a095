"""What the audits find and what that costs: planted faults, repetitions of each, and false alarms without any.

python benchmarks/audit.py power --repetitions 20
python benchmarks/audit.py alarms --repetitions 300
python benchmarks/audit.py one-run --repetitions 20
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' faults

from diskdp import DiSK, Plan, privatize
from diskdp.audit import audit_run, audit_step
from diskdp.audit.claims import Claim
from tests import faults

DELTA = 1e-5


def plan(batch_size: int = 4096, steps: int = 2, sigma: float = 1.0, records: int = 4096) -> Plan:
    return Plan(dataset_size=records, batch_size=batch_size, steps=steps, noise_multiplier=sigma, delta=DELTA)


def unclipped(**settings: Any) -> Any:
    with faults.one_microbatch_unclipped():
        return audit_step(**settings)


def planted(make: Any) -> Callable[..., Any]:
    return lambda **settings: audit_step(privatize=make, **settings)


SEPARATE = DiSK(kappa=0.5, gamma=0.2, clip="separate")
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "noise x 0.67": (planted(faults.less_noise), {"plan": plan()}),
    "noise x 0.67, q = 1/4": (planted(faults.less_noise), {"plan": plan(1024)}),
    "noise x 0.9": (planted(faults.planted(lambda t: faults._noise(t, factor=0.9))), {"plan": plan()}),
    "noise x 0.95": (planted(faults.planted(lambda t: faults._noise(t, factor=0.95))), {"plan": plan()}),
    "separate as joint, c = 5": (planted(faults.separate_as_joint), {"plan": plan(), "filter": SEPARATE}),
    "one microbatch unclipped": (unclipped, {"plan": plan(), "microbatch_size": 1400}),
    "tensor without noise": (planted(faults.bare_tensor), {"plan": plan()}),
    "same noise in each step": (planted(faults.same_noise), {"plan": plan()}),
    "shuffled as Poisson, 100 steps": (planted(faults.shuffled), {"plan": plan(82, 100, 0.8, 8200)}),
}


def power(repetitions: int, draws: int) -> None:
    for name, (audit, settings) in CASES.items():
        found, seconds, lower, claimed = Counter[str](), [], [], 0.0
        for _ in range(repetitions):
            began = time.process_time()
            result = audit(draws=draws, **{"microbatch_size": None, **settings})
            seconds.append(time.process_time() - began)
            lower.append(result.epsilon_lower)
            claimed = result.epsilon_claimed
            found.update({"any": 1} if not result.passed else {})
            found.update({finding.statistic for finding in result.broken})
        print(
            f"{name}: found {found['any']}/{repetitions}, median {np.median(seconds):.2f} s (CPU), "
            f"epsilon {np.median(lower):.2f} (claimed {claimed:.2f})"
        )
        for statistic, times in found.most_common():
            if statistic != "any":
                print(f"    {statistic}: {times}/{repetitions}")


def alarms(repetitions: int) -> None:
    honest = {
        "full batch": (plan(records=800, batch_size=800), None),
        "q = 1/8, look-ahead": (plan(records=800, batch_size=100, steps=4), DiSK()),
    }
    for name, (audited, filter) in honest.items():
        for confidence in (0.999, 0.9, 0.5):
            failed = sum(
                not audit_step(audited, filter=filter, draws=400, confidence=confidence, microbatch_size=None).passed
                for _ in range(repetitions)
            )
            print(f"{name}, confidence {confidence}: {failed} of {repetitions} honest audits failed")


def one_run(repetitions: int) -> None:
    audited = Plan(dataset_size=6000, batch_size=1500, steps=20, epsilon=4.4, delta=DELTA)
    epoch = Plan(dataset_size=6000, batch_size=60, steps=100, noise_multiplier=0.8, delta=DELTA)
    makes: dict[str, tuple[Any, Plan, dict[str, Any]]] = {
        "honest": (privatize, audited, {}),
        "noise x 0.67": (faults.less_noise, audited, {}),
        "noise x 0.1": (faults.planted(lambda t: faults._noise(t, factor=0.1)), audited, {}),
        "separate as joint, c = 5": (faults.separate_as_joint, audited, {"filter": SEPARATE}),
        "same noise in each step": (faults.same_noise, audited, {}),
        "shuffled as Poisson, 100 steps": (faults.shuffled, epoch, {}),
        "other tensors without noise": (
            faults.planted(lambda t: faults._noise(t, without="network.0.weight")),
            audited,
            {},
        ),
    }
    for kind, view in (("gradient", "white-box"), ("gradient", "final-model"), ("input", "white-box")):
        for name, (make, used, settings) in makes.items():
            results = [
                audit_run(used, kind=kind, view=view, privatize=make, **settings)  # type: ignore[arg-type]
                for _ in range(repetitions)
            ]
            print(
                f"{kind}, {view}, {name}: median epsilon {np.median([r.epsilon_lower for r in results]):.2f}, claimed "
                f"{Claim(used).epsilon(used.steps):.2f}, found {sum(not r.passed for r in results)}/{repetitions}, "
                f"{np.median([r.seconds for r in results]):.2f} s"
            )
    with faults.one_microbatch_unclipped():
        results = [audit_run(audited, microbatch_size=600) for _ in range(repetitions)]
    print(
        f"gradient, white-box, one microbatch unclipped: median {np.median([r.epsilon_lower for r in results]):.2f}, "
        f"found {sum(not r.passed for r in results)}/{repetitions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["power", "alarms", "one-run"])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--draws", type=int, default=4096)
    arguments = parser.parse_args()
    if arguments.what == "power":
        power(arguments.repetitions, arguments.draws)
    elif arguments.what == "alarms":
        alarms(arguments.repetitions)
    else:
        one_run(arguments.repetitions)


if __name__ == "__main__":
    main()
