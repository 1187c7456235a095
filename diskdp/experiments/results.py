"""What an experiment leaves behind: numbers.csv, settings.json, and one figure as PNG and SVG.

Assumes rows that are flat dictionaries with the same keys.
"""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import matplotlib
import numpy as np
import scipy
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

Row: TypeAlias = "dict[str, str | int | float]"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with a two-sided 95% interval of Student's t."""

    mean: float
    low: float
    high: float


def interval(values: Tensor) -> Interval:
    """The mean of one number a seed, and its interval.

    >>> interval(torch.tensor([1.0, 2.0, 3.0]))
    Interval(mean=2.0, low=-0.48..., high=4.48...)
    """
    sample = values.double()
    mean = float(sample.mean())
    if len(sample) < 2 or not math.isfinite(mean):
        return Interval(mean, mean, mean)
    half = float(stats.t.ppf(0.975, len(sample) - 1)) * float(sample.std()) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(values: Tensor, reference: Tensor) -> Interval:
    """mean(values)/mean(reference) over paired seeds, with a 95% interval by the delta method (Fieller's, linearised).

    >>> ratio_interval(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    Interval(mean=0.5, low=0.5, high=0.5)
    """
    a, b = values.double(), reference.double()
    ratio = float(a.mean() / b.mean())
    if len(a) < 2 or not math.isfinite(ratio):
        return Interval(ratio, ratio, ratio)
    residual = (a - ratio * b) / b.mean()
    half = float(stats.t.ppf(0.975, len(a) - 1)) * float(residual.std()) / math.sqrt(len(a))
    return Interval(ratio, ratio - half, ratio + half)


def write(
    folder: Path, rows: Sequence[Row], figure: Figure, settings: Mapping[str, object], command: str
) -> tuple[Path, ...]:
    """Write figure.png, figure.svg, numbers.csv and settings.json; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name for name in ("figure.png", "figure.svg", "numbers.csv", "settings.json"))
    figure.savefig(paths[0], dpi=160)
    figure.savefig(paths[1])
    with paths[2].open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "matplotlib": matplotlib.__version__,
    }
    record = {"command": command, "settings": dict(settings), "versions": versions}
    paths[3].write_text(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return paths
