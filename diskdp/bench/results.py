"""What was measured: rows of numbers, and what they were measured on and with."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

_PACKAGES = ("diskdp", "torch", "numpy", "opacus", "transformers", "peft")


@dataclass(frozen=True)
class Row:
    """One method on one model. Ratios are to the non-private step of the same run; times in milliseconds a step."""

    model: str
    method: str
    title: str
    ratio: float  # of wall times: what a user waits for
    cpu_ratio: float
    peak_memory_ratio: float
    max_relative_error: float
    wall_ms: float
    cpu_ms: float
    spread: float
    repeats: int
    timing: str
    peak_bytes: int
    microbatch_size: int
    microbatches: int
    goal: float | None


@dataclass(frozen=True)
class Part:
    """One part of a private step alone, as a multiple of the non-private step, or of torch.randn for the passes."""

    model: str
    part: str
    ratio: float
    cpu_ratio: float
    wall_ms: float
    cpu_ms: float
    timing: str


@dataclass(frozen=True)
class Skipped:
    """What was not measured, and why."""

    model: str
    method: str
    reason: str


@dataclass
class Results:
    """All that one run found."""

    rows: list[Row] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, other: Results) -> None:
        """Take in what another model's measurement found."""
        self.rows += other.rows
        self.parts += other.parts
        self.skipped += other.skipped


def environment(threads: int) -> dict[str, object]:
    """What the numbers depend on, without names of hosts or paths."""
    return {
        "threads": threads,
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **versions()},
    }


def versions() -> dict[str, str]:
    """Versions of the packages compared, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = torch.__version__ if name == "torch" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name.

    >>> bool(processor())
    True
    """
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, results: Results, command: str, threads: int) -> None:
    """Rows, parts and what was skipped, with versions and machine."""
    document = {"command": command, **environment(threads), **asdict(results)}
    path.write_text(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
