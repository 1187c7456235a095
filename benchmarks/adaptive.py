"""Gains that estimate kappa in a private training, with clipping and sampling: the demo's model, data and budget.

    python benchmarks/adaptive.py      # three minutes on one core

Accuracy on 5,000 held-out *training* rows of Adult, averaged over the last quarter of the steps, at the learning rate
that tools/tune_demo.py found best for every method; 3 seeds. Test rows are never looked at.
"""

from __future__ import annotations

import math
import statistics
import warnings

import torch
from torch.utils.data import TensorDataset

from diskdp import DiSK, LowPass, NoFilter, Plan
from diskdp.cli.demo import Method, demo_plan, train
from diskdp.datasets import Split, adult
from diskdp.filters import AdaptiveGain, Filter

HELD_OUT, SEEDS, RATE = 5_000, 3, 2.0

FILTERS: dict[str, Filter] = {
    "none": NoFilter(),
    "low-pass κ=.5, tuned": LowPass(kappa=0.5),
    "DiSK κ=.3 γ=2.3, tuned": DiSK(kappa=0.3, gamma=2.3),
    "adaptive, one point": DiSK(gamma=None, gain="adaptive"),
    "adaptive, γ=.5": DiSK(gamma=0.5, gain="adaptive"),
    "adaptive, γ=2.3": DiSK(gamma=2.3, gain="adaptive"),
    "adaptive, γ=5": DiSK(gamma=5.0, gain="adaptive"),
    "adaptive, γ=.5, any c": DiSK(gamma=0.5, gain=AdaptiveGain(largest_weight=math.inf)),
    "adaptive, γ=-1, any c": DiSK(gamma=-1.0, gain=AdaptiveGain(largest_weight=math.inf)),
}


def main() -> None:
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
    split = Split(rest, held_out, full.info)
    for name, filter in FILTERS.items():
        runs = [
            train(Method(name, filter, RATE), plan, split, held_out, seed, 2000 + seed, lambda *_: None)
            for seed in range(SEEDS)
        ]
        late = [statistics.mean(run.accuracies[-10:]) for run in runs]
        print(f"{name:24} {statistics.mean(late):.4f} ± {statistics.stdev(late):.4f}", flush=True)


if __name__ == "__main__":
    main()
