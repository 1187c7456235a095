"""The tables of docs/correlated.md: python -m diskdp.noise.correlated STEPS EPOCHS [EPSILON]."""

from __future__ import annotations

import sys

from diskdp import accounting
from diskdp.noise.correlated import (
    BLT,
    Banded,
    Participation,
    Tree,
    Workload,
    autocovariance,
    best_gain,
    cyclic_poisson,
    errors,
    fit_banded,
    fit_blt,
    sensitivity,
)

DELTA, BATCH = 1e-5, 100


def main(steps: int, epochs: int, epsilon: float) -> None:
    """Errors of prefix sums for records that take part once an epoch, and at one ε, sampling included where it counts.

    For each: the error at noise multiplier 1 (largest, root mean square); the root mean square error at ε when every
    record takes part once an epoch; the same with cyclic Poisson sampling at the same batch size; and with the latter
    (where there is none, the former) σ what the best exponential average leaves of a gradient that drifts with variance
    1/100, S and B being 1.
    """
    workload = Workload(steps)
    apart = steps // epochs
    who = Participation(steps, times=epochs, separation=apart)
    strategies: dict[str, Banded | BLT | Tree] = {"independent": Banded((1.0,))}
    strategies["tree"] = Tree(steps, reduced=False)
    strategies["tree, reduced"] = Tree(steps)
    strategies["tree, reduced, one an epoch"] = Tree(apart)
    for bands in (4, 16, 64):
        if bands <= apart:
            strategies[f"square root, {bands} bands"] = Banded.square_root(bands)
            strategies[f"fitted, {bands} bands"] = fit_banded(bands, workload)
    strategies["square root, all bands"] = Banded.square_root(steps)
    for buffers in (1, 2, 4):
        strategies[f"BLT, {buffers} buffers"] = fit_blt(buffers, workload, who)
    print(f"{steps} steps, {epochs} participations at least {apart} apart, epsilon={epsilon:g}, delta={DELTA:g}\n")
    print("| strategy | largest | RMS | RMS at ε, in turn | RMS at ε, sampled | filtered, q = .01 |")
    print("|---|---|---|---|---|---|")
    in_turn = accounting.calibrate(epsilon, 1.0, 1, DELTA)
    for name, strategy in strategies.items():
        found = errors(strategy, workload, who)
        std, sampled = in_turn * sensitivity(strategy, who), ""
        if isinstance(strategy, Banded) and strategy.bands <= apart:
            event = cyclic_poisson(strategy, steps, BATCH, BATCH * apart)
            sigma = accounting.calibrate(epsilon, event.rate, event.steps, DELTA)
            std = sigma * event.sensitivity
            sampled = f"{sigma * errors(strategy, workload, Participation(steps)).root_mean_square:.1f}"
        left = best_gain(std**2 * autocovariance(strategy, 1024), process_var=0.01).error
        print(
            f"| {name} | {found.largest:.2f} | {found.root_mean_square:.2f} | {in_turn * found.root_mean_square:.1f} | "
            f"{sampled} | {left:.3f} |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 2.0)
