"""Time of a whole training step over that of a non-private step: diskdp beside Opacus, on three models.

python benchmarks/step_time.py --threads 1 --models mlp cnn5 transformer --seconds 40 --json step_time.json

A step starts with a batch that lies ready and ends with the weights moved: per-example clipping, noise, filter and
optimizer are in it, loading is not. Methods take turns in one process, the minimum of all repeats counts, in CPU time
and in wall time. Before anything is timed, clipped sums are compared: a method that is fast and wrong is no method.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

import opacus
import torch
from opacus import PrivacyEngine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from diskdp import DiSK, NoFilter, Plan, privatize
from diskdp.clipping import Clipper
from diskdp.filters import Filter
from diskdp.gradients import Engine, Point, clip
from diskdp.noise import GaussianNoise, Secret
from diskdp.sampling import LogicalBatch
from diskdp.zoo.cnn5 import cnn5
from diskdp.zoo.losses import classification_loss
from diskdp.zoo.mlp import mlp

MAX_NORM = 1.0
NOISE_MULTIPLIER = 1.0
RATE = 1e-3
DISK = DiSK(kappa=0.7, gamma=0.5)
TOLERANCE = 1e-4  # of a clipped sum in float32, relative to its largest entry
WARM_UP, TURN = 2, 0.1  # steps, and the seconds that a method has before it is the next one's turn

Batch = tuple[Tensor, Tensor]
Step = Callable[[], object]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, of modules that every library compared here knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed_BTD = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(mixed_BTD)
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, and a classifier of the mean over positions."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, ids_BT: Tensor) -> Tensor:
        places_BT = torch.arange(ids_BT.shape[1]).repeat(len(ids_BT), 1)  # Opacus wants them in memory
        x_BTD = self.blocks(self.tokens(ids_BT) + self.positions(places_BT))
        return self.head(self.norm(x_BTD).mean(1))


@dataclass(frozen=True)
class Case:
    """A model and the batch that it is trained on."""

    title: str
    model: nn.Module
    batch: Batch


def mlp_case() -> Case:
    model = mlp((784,), 10, widths=(1000, 1000), activation="relu")
    return Case("MLP 784-1000-1000-10, batch 128", model, (torch.randn(128, 784), torch.randint(10, (128,))))


def cnn5_case() -> Case:
    batch = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Case("CNN5 32-64-128-256, 32×32, batch 64", cnn5((3, 32, 32), 10), batch)


def transformer_case() -> Case:
    model = Transformer(vocabulary=1000, length=64, width=256, depth=6, heads=8, classes=10)
    return Case(
        "transformer 6×256, 64 tokens, batch 32", model, (torch.randint(1000, (32, 64)), torch.randint(10, (32,)))
    )


CASES: Mapping[str, Callable[[], Case]] = {"mlp": mlp_case, "cnn5": cnn5_case, "transformer": transformer_case}


def non_private(case: Case) -> Step:
    model, (x, y) = copy.deepcopy(case.model), case.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def diskdp_step(case: Case, filter: Filter) -> Step:
    """`private.step` on the loader's batches, the examples of which lie ready."""
    model, size = copy.deepcopy(case.model), len(case.batch[1])
    plan = Plan(
        dataset_size=size,
        batch_size=size,
        steps=10_000,
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-5,
        max_grad_norm=MAX_NORM,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    private = privatize(model, optimizer, plan, loss_fn=classification_loss, filter=filter)
    loader = private.loader(TensorDataset(*case.batch))

    def step() -> None:
        ready = iter([list(case.batch)])
        private.step(LogicalBatch(private.steps_done, [size], loader.plan_token, loader.loader_id, ready))

    return step


class OpacusTraining:
    """DP-SGD as Opacus' PrivacyEngine sets it up, ``mode`` "hooks" or "ghost"."""

    def __init__(self, case: Case, mode: str) -> None:
        x, y = case.batch
        model = copy.deepcopy(case.model)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(y)),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=MAX_NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        self.mode, self.batch = mode, case.batch
        self.model, self.optimizer = made[0], made[1]
        self.criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def _backward(self) -> None:
        x, y = self.batch
        self.optimizer.zero_grad(set_to_none=True)
        self.criterion(self.model(x), y).backward()

    def step(self) -> None:
        self._backward()
        self.optimizer.step()

    def clipped(self) -> dict[str, Tensor]:
        """The clipped sum, before noise."""
        self._backward()
        if self.mode == "ghost":
            self.optimizer.accumulate()
        else:
            self.optimizer.clip_and_accumulate()
        named = self.model.named_parameters()
        sums = {name.removeprefix("_module."): p.summed_grad.clone() for name, p in named}
        self.optimizer.zero_grad(set_to_none=True)
        return sums


def points_of(model: nn.Module, filter: Filter) -> list[Point]:
    """The filter's points, the look-ahead at weights a little away."""
    here, ahead = filter.coefficients
    if ahead == 0:
        return [(1.0, None)]
    return [(here, None), (ahead, {name: p.detach() + 0.002 for name, p in model.named_parameters()})]


def diskdp_parts(case: Case, filter: Filter) -> dict[str, Step]:
    """What `private.step` consists of, each part alone."""
    model = copy.deepcopy(case.model)
    engine, clipper, points = Engine(model, classification_loss), Clipper("flat", MAX_NORM), points_of(model, filter)
    noise, state = GaussianNoise(Secret.from_os()), filter.start()
    sums = clip(engine, case.batch, points, clipper).summed()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    parts: dict[str, Step] = {
        "gradients": lambda: clip(engine, case.batch, points, clipper).summed(),
        "noise": lambda: noise.add(sums, NOISE_MULTIPLIER * clipper.sensitivity, 0),
        "optimizer": optimizer.step,
    }
    if filter.lookahead is not None:
        state.update(list(sums.values()))
        parts["filter"] = lambda: state.update(list(sums.values()))
    return parts


def check(case: Case) -> dict[str, float]:
    """Largest error of each clipped sum, relative to the largest entry of its reference.

    One point: the whole batch against Opacus. Two points: a few examples against a loop over them in float64.
    """
    engine, clipper = Engine(case.model, classification_loss), Clipper("flat", MAX_NORM)
    mine = clip(engine, case.batch, [(1.0, None)], clipper).summed()
    errors = {mode: _error(mine, OpacusTraining(case, mode).clipped()) for mode in ("hooks", "ghost")}
    few = (case.batch[0][:4], case.batch[1][:4])
    points = points_of(case.model, DISK)
    errors["loop, two points"] = _error(clip(engine, few, points, clipper).summed(), _loop(case.model, few, points))
    for name, error in errors.items():
        if not error <= TOLERANCE:
            sys.exit(f"{case.title}: clipped sums differ by {error:.1e} ({name}); nothing is timed")
    return errors


def _error(mine: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    largest = max(float(r.abs().max()) for r in reference.values())
    return max(float((mine[name].double() - r.double()).abs().max()) for name, r in reference.items()) / largest


def _loop(model: nn.Module, batch: Batch, points: list[Point]) -> dict[str, Tensor]:
    model = copy.deepcopy(model).double()
    own = {name: p.detach() for name, p in model.named_parameters()}
    sums = {name: torch.zeros_like(p) for name, p in own.items()}
    for x, y in zip(*batch):
        x = x.double() if x.is_floating_point() else x
        total = {name: torch.zeros_like(p) for name, p in own.items()}
        for a, values in points:
            at = {name: p.double().requires_grad_() for name, p in (values or own).items()}
            loss = F.cross_entropy(torch.func.functional_call(model, at, x[None]), y[None])
            for name, gradient in zip(at, torch.autograd.grad(loss, list(at.values()))):
                total[name] += a * gradient
        norm = torch.stack([g.norm() for g in total.values()]).norm()
        for name, gradient in total.items():
            sums[name] += gradient * min(1.0, MAX_NORM / float(norm))
    return sums


@dataclass(frozen=True)
class Timing:
    """Milliseconds; ``spread`` is the median over the minimum of CPU time: 1 on an idle machine."""

    cpu: float
    wall: float
    spread: float
    repeats: int


def measure(steps: Mapping[str, Step], seconds: float) -> dict[str, Timing]:
    """Methods in turn, for a moment each, until the time is over; at least three rounds."""
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for name, step in steps.items():
            turn_ends = time.perf_counter() + TURN
            while (wall_start := time.perf_counter()) < turn_ends:
                cpu_start = time.process_time()
                step()
                cpu[name].append(1000 * (time.process_time() - cpu_start))
                wall[name].append(1000 * (time.perf_counter() - wall_start))
    return {
        name: Timing(min(cpu[name]), min(wall[name]), median(cpu[name]) / min(cpu[name]), len(cpu[name]))
        for name in steps
    }


def benchmark(case: Case, seconds: float) -> dict[str, Timing]:
    steps: dict[str, Step] = {
        "non-private": non_private(case),
        "diskdp DP-SGD": diskdp_step(case, NoFilter()),
        "diskdp DiSK": diskdp_step(case, DISK),
        "Opacus ghost": OpacusTraining(case, "ghost").step,
        "Opacus hooks": OpacusTraining(case, "hooks").step,
    }
    for title, filter in (("DP-SGD", NoFilter()), ("DiSK", DISK)):
        for part, step in diskdp_parts(case, filter).items():
            if part in ("gradients", "filter") or title == "DP-SGD":
                steps[f"{part} ({title})" if part == "gradients" else part] = step
    return measure(steps, seconds)


def show(console: Console, case: Case, timings: Mapping[str, Timing], errors: Mapping[str, float]) -> None:
    base = timings["non-private"]
    table = Table(title=case.title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in ("CPU ms", "CPU ratio", "wall ms", "wall ratio", "spread", "repeats"):
        table.add_column(heading, justify="right")
    for name, t in timings.items():
        if name.startswith("gradients"):
            table.add_section() if name == "gradients (DP-SGD)" else None
        table.add_row(
            name,
            f"{t.cpu:.2f}",
            f"{t.cpu / base.cpu:.2f}",
            f"{t.wall:.2f}",
            f"{t.wall / base.wall:.2f}",
            f"{t.spread:.2f}",
            str(t.repeats),
        )
    console.print(table)
    console.print("clipped sums agree: " + ", ".join(f"{name} {error:.0e}" for name, error in errors.items()) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40, help="time for each model")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(arguments.threads)
    console = Console(width=None if sys.stdout.isatty() else 100)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "opacus": opacus.__version__}
    console.print(f"{arguments.threads} thread(s), " + ", ".join(f"{k} {v}" for k, v in versions.items()) + "\n")
    found = {}
    for name in arguments.models:
        torch.manual_seed(0)
        case = CASES[name]()
        errors = check(case)
        timings = benchmark(case, arguments.seconds)
        show(console, case, timings, errors)
        found[name] = {
            "title": case.title,
            "errors": errors,
            "timings": {method: asdict(timing) for method, timing in timings.items()},
        }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"threads": arguments.threads, "versions": versions, "models": found}, file, indent=2)


if __name__ == "__main__":
    main()
