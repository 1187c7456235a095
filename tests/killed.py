"""Trains in children that are killed at random instants and resumed, and says what came of it.

Run by tests/test_resume.py in a process of its own: `python -m tests.killed FOLDER KILLS SEED [KIND]`. Forked children
spare the imports, so that a hundred kills take seconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from diskdp import DiSK, Plan, PrivateTraining, privatize
from diskdp.ledger import Ledger

STEPS = 30
RECORDS = 50
PLAN = {"dataset_size": RECORDS, "batch_size": 12, "steps": STEPS, "noise_multiplier": 1.0, "delta": 1e-3}
KINDS = {
    "secure": {"noise": "secure"},
    "discrete": {"noise": "discrete"},
    "adaptive": {"noise": "secure", "clipping": "adaptive"},
    "shuffled": {"noise": "secure", "sampling": "shuffled", "adjacency": "zero-out"},
}
kind = "secure"


def plan() -> Plan:
    return Plan(**PLAN, **KINDS[kind])  # type: ignore[arg-type]


class Augmented(Dataset):
    """Records that are shaken at random each time they are loaded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(RECORDS, 6, generator=generator)
        self.labels = torch.randint(0, 3, (RECORDS,), generator=generator)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(6), self.labels[index]


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def training(folder: Path) -> PrivateTraining:
    """Whatever a run needs to go on: momentum, schedule, filter, look-ahead, dropout, augmentation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    settings = {
        "loss_fn": loss_fn,
        "filter": DiSK(0.7, 0.5),
        "scheduler": scheduler,
        "ledger_path": folder / "ledger.jsonl",
        "key_path": folder / "key",
    }
    if (folder / "checkpoint").exists():
        return privatize.resume(folder / "checkpoint", model, optimizer, plan(), **settings)
    return privatize(model, optimizer, plan(), **settings)


def train(folder: Path, seen: int | None = None, checkpoint_every: int = 4) -> None:
    """To the end, from the last checkpoint; writes to ``seen`` which steps' results could be seen."""
    torch.set_num_threads(1)
    private = training(folder)
    for batch in private.loader(Augmented()):
        result = private.step(batch)
        if seen is not None:
            os.write(seen, bytes([result.step]))
        if private.steps_done % checkpoint_every == 0:
            private.save(folder / "checkpoint")
    torch.save(private.model.state_dict(), folder / "weights.partial")
    os.replace(folder / "weights.partial", folder / "weights")


def killed_once(folder: Path, after: float) -> tuple[bool, int, set[int]]:
    """Whether a child was killed (rather than done before), its exit status, and the steps that it showed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            train(folder, send)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(send)
    end = time.monotonic() + after
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.0005)
    killed = found[0] == 0
    if killed:
        os.kill(child, signal.SIGKILL)
        found = os.waitpid(child, 0)
    with os.fdopen(receive, "rb") as pipe:
        shown = set(pipe.read())
    return killed, found[1], shown


def _fresh(folder: Path, whole: Path) -> Path:
    """A folder with the key, and so the randomness, of the undisturbed run."""
    folder.mkdir()
    shutil.copyfile(whole / "key", folder / "key")
    os.chmod(folder / "key", 0o600)
    return folder


def main(folder: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    whole = folder / "whole"
    whole.mkdir()
    train(whole)  # here, so that children find accounting and kernels warm
    start = time.monotonic()
    killed_once(_fresh(folder / "timed", whole), 60.0)
    duration = time.monotonic() - start
    expected = torch.load(whole / "weights", weights_only=True)
    done, run, faults, places = 0, 0, [], set()
    while done < kills:
        run += 1
        cut = _fresh(folder / f"run{run}", whole)
        shown: set[int] = set()
        while not (cut / "weights").exists():
            killed, status, seen = killed_once(cut, draw.uniform(0.02, 1.0) * duration)
            shown |= seen
            done += killed
            places.add(len(shown))
            if not killed and status:
                faults.append(f"run {run}: did not go on (status {status})")
                break
            spent = Ledger(cut / "ledger.jsonl", plan().fingerprint).spent
            if spent < len(shown):
                faults.append(f"run {run}: {len(shown)} results were seen and {spent} charged")
        else:
            weights = torch.load(cut / "weights", weights_only=True)
            if not all(torch.equal(weights[name], expected[name]) for name in expected):
                faults.append(f"run {run}: other weights than those of the undisturbed run")
            if spent != STEPS:
                faults.append(f"run {run}: {spent} charged for {STEPS} steps")
    print(json.dumps({"kills": done, "runs": run, "faults": faults, "places": sorted(places)}))


if __name__ == "__main__":
    kind = sys.argv[4] if len(sys.argv) > 4 else kind
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
