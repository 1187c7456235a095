"""Optimizers along filtered noised gradients on the Adult table at one ε, each with settings of its own.

python benchmarks/optimizers.py --seeds 6

Learning rate and clipping norm are chosen for each by the mean cross entropy on a fifth of the training rows, of runs
on the other four fifths with seeds of their own: a walk on a grid of factors 10^(1/4) and 10^(1/2), to the first point
none of whose neighbours is better. Then all training rows are trained on, with other seeds, and the test rows are
looked at once. Choosing itself is not paid for in ε: this compares optimizers, it is not how to release one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, NoFilter, Plan, privatize
from diskdp.datasets import adult
from diskdp.filters import Filter
from diskdp.optim import Joined, NoiseAwareAdam, ScaleThenPrivatise, noise_std, scale_parameters
from diskdp.zoo.losses import classification_loss
from diskdp.zoo.mlp import mlp

Make = Callable[[nn.Module, Plan, Filter, float], torch.optim.Optimizer]
TUNING_SEEDS = (1000, 1001)
START_NORM = 10.0  # where walks from 1 went


def noise_aware(floor: float) -> Make:
    def make(model: nn.Module, plan: Plan, filter: Filter, lr: float) -> torch.optim.Optimizer:
        return NoiseAwareAdam(
            model.parameters(), lr=lr, weight_decay=0.01, noise_std=noise_std(plan, filter), filter=filter, floor=floor
        )

    return make


def muon(model: nn.Module, plan: Plan, filter: Filter, lr: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return Joined(
        torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr),
    )


def scaled(model: nn.Module, plan: Plan, filter: Filter, lr: float) -> torch.optim.Optimizer:
    scale_parameters(model)
    return ScaleThenPrivatise(model, lr=lr, weight_decay=0.01)


OPTIMIZERS: dict[str, tuple[Make, float]] = {  # and the middle of the grid
    "SGD": (lambda model, plan, filter, lr: torch.optim.SGD(model.parameters(), lr=lr), 1.0),
    "Adam": (lambda model, plan, filter, lr: torch.optim.Adam(model.parameters(), lr=lr), 1e-2),
    "AdamW": (lambda model, plan, filter, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01), 1e-2),
    "NoiseAwareAdam, floor 1": (noise_aware(1.0), 1e-2),
    "NoiseAwareAdam, floor 0.1": (noise_aware(0.1), 3e-3),
    "NoiseAwareAdam, floor 0.01": (noise_aware(0.01), 1e-3),
    "Muon and AdamW": (muon, 1e-2),
    "ScaleThenPrivatise": (scaled, 1e-2),
}
FILTERS: dict[str, Filter] = {"none": NoFilter(), "DiSK(0.7, 0.5)": DiSK(0.7, 0.5), "DiSK(0.3, 0.5)": DiSK(0.3, 0.5)}


def run(
    make: Make,
    filter: Filter,
    lr: float,
    seed: int,
    train: TensorDataset,
    test: TensorDataset,
    plan: Plan,
) -> tuple[float, float]:
    """Accuracy in % and mean cross entropy on the rows of ``test``."""
    torch.manual_seed(seed)
    model = mlp(tuple(train.tensors[0].shape[1:]), 2, widths=(32,))
    optimizer = make(model, plan, filter, lr)
    private = privatize(model, optimizer, plan, loss_fn=classification_loss, filter=filter, seed=seed)
    for batch in private.loader(train):
        private.step(batch)
    with torch.no_grad():
        logits_BC, labels_B = model(test.tensors[0]).double(), test.tensors[1]
    return (
        100 * (logits_BC.argmax(1) == labels_B).double().mean().item(),
        nn.functional.cross_entropy(logits_BC, labels_B).item(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="of the final runs")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--filters", nargs="+", choices=list(FILTERS), default=list(FILTERS))
    parser.add_argument("--norm", type=float, help="clipping norm of all, instead of one chosen for each")
    parser.add_argument("--only", help="optimizers whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    split = adult()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(split.train)))
    kept, held = order[len(order) // 5 :], order[: len(order) // 5]
    inputs, labels = split.train.tensors
    fit, validation = TensorDataset(inputs[kept], labels[kept]), TensorDataset(inputs[held], labels[held])

    def planned(data: TensorDataset, max_norm: float, noise_multiplier: float | None = None) -> Plan:
        return Plan(
            dataset_size=len(data),
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
            epsilon=None if noise_multiplier else arguments.epsilon,
            noise_multiplier=noise_multiplier,
            delta=1e-5,
            max_grad_norm=max_norm,
        )

    tuning_noise, noise = (planned(data, 1.0).noise_multiplier for data in (fit, split.train))
    plan = planned(split.train, 1.0)
    table = Table("optimizer", "filter", "lr", "C", "test accuracy", "test loss", "CPU minutes")
    for name, (make, middle) in OPTIMIZERS.items():
        if arguments.only and arguments.only not in name:
            continue
        for filter_name in arguments.filters:
            filter = FILTERS[filter_name]
            if make is scaled and filter != NoFilter():
                continue
            start = time.process_time()
            found: dict[tuple[int, int], float] = {}

            def settings(at: tuple[int, int], middle: float = middle) -> tuple[float, float]:
                return middle * 10 ** (at[0] / 4), (arguments.norm or START_NORM) * 10 ** (at[1] / 2)

            waiting = [(-2, 0), (0, 0), (2, 0)]
            while waiting:
                for at in waiting:
                    lr, norm = settings(at)
                    tuning_plan = planned(fit, norm, tuning_noise)
                    runs = [run(make, filter, lr, s, fit, validation, tuning_plan) for s in TUNING_SEEDS]
                    found[at] = float(np.mean([loss for _, loss in runs]))
                i, j = best = min(found, key=lambda at: found[at])
                around = [(i - 1, j), (i + 1, j)] + ([] if arguments.norm else [(i, j - 1), (i, j + 1)])
                waiting = [at for at in around if at not in found]
            lr, norm = settings(best)
            own_plan = planned(split.train, norm, noise)
            tests = [run(make, filter, lr, s, split.train, split.test, own_plan) for s in range(arguments.seeds)]
            means, errors = np.mean(tests, 0), np.std(tests, 0, ddof=1) / math.sqrt(len(tests))
            table.add_row(
                name,
                filter_name,
                f"{lr:.2g}",
                f"{norm:.2g}",
                f"{means[0]:.2f} ± {errors[0]:.2f}",
                f"{means[1]:.4f} ± {errors[1]:.4f}",
                f"{(time.process_time() - start) / 60:.1f}",
            )
            print(name, filter_name, f"{lr:.2g} {norm:.2g} {found[best]:.4f}, {len(found)} tried", *means, flush=True)
    console = Console(width=120)
    console.print(
        f"epsilon={plan.epsilon:g}, noise_multiplier={plan.noise_multiplier:.3f}, {plan.steps} steps of "
        f"{plan.batch_size} in {plan.dataset_size} rows; accuracy in %, mean ± standard error "
        f"of {arguments.seeds} seeds"
    )
    console.print(table)


if __name__ == "__main__":
    main()
