"""Choose the demo's learning rates and filter constants, for each method by itself, on training rows alone.

    python tools/tune_demo.py      # the table behind METHODS in diskdp/cli/demo.py; 7 minutes on one core

5,000 of the 32,561 training rows are held out by a fixed shuffle; σ, batch size and steps are the demo's.
The score is the accuracy on the held-out rows, averaged over the last quarter of the steps and over seeds: the
last point alone is too noisy to choose by. Filters get more settings than DP-SGD because they have more to set.
Test rows are never looked at.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Iterator

import torch
from torch.utils.data import TensorDataset

from diskdp import DiSK, LowPass, NoFilter, Plan
from diskdp.cli.demo import Method, demo_plan, train
from diskdp.datasets import Split, adult

HELD_OUT = 5_000
LEARNING_RATES = (0.5, 1.0, 2.0, 4.0)


def candidates() -> Iterator[Method]:
    for lr in LEARNING_RATES:
        yield Method("DP-SGD", NoFilter(), lr)
    for kappa, lr in itertools.product((0.3, 0.5, 0.7), LEARNING_RATES):
        yield Method(f"low-pass κ={kappa}", LowPass(kappa=kappa), lr)
    for (kappa, gamma), lr in itertools.product(((0.7, 0.5), (0.5, 0.5), (0.5, 1.0), (0.3, 2.3)), LEARNING_RATES):
        yield Method(f"DiSK κ={kappa} γ={gamma}", DiSK(kappa=kappa, gamma=gamma), lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    full = adult()
    order = torch.randperm(len(full.train), generator=torch.Generator().manual_seed(0))
    inputs, labels = full.train.tensors
    held_out = TensorDataset(inputs[order[:HELD_OUT]], labels[order[:HELD_OUT]])
    rest = TensorDataset(inputs[order[HELD_OUT:]], labels[order[HELD_OUT:]])
    demo = demo_plan(len(full.train))
    plan = Plan(
        dataset_size=len(rest),
        batch_size=demo.batch_size,
        steps=demo.steps,
        noise_multiplier=demo.noise_multiplier,
        delta=demo.delta,
        clipping=demo.clipping,
    )
    print(f"{demo.steps} steps, σ {demo.noise_multiplier:.3f}, {arguments.seeds} seeds; accuracy late, at the end")
    for method in candidates():
        runs = [
            train(method, plan, Split(rest, held_out, full.info), held_out, seed, 1000 + seed, lambda *_: None)
            for seed in range(arguments.seeds)
        ]
        late = [statistics.mean(run.accuracies[-10:]) for run in runs]
        last = [run.accuracies[-1] for run in runs]
        spread = statistics.stdev(late) if len(late) > 1 else 0.0
        print(
            f"{method.name:20} lr {method.lr:<6} {statistics.mean(late):.4f} ± {spread:.4f}"
            f"  {statistics.mean(last):.4f}  {statistics.mean(run.seconds for run in runs):.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
