"""Make diskdp/datasets/files/adult.npz from the original text files of the UCI Adult data set.

usage: python tools/pack_adult.py FOLDER     (FOLDER holds adult.data and adult.test; checked by digest)
"""

from __future__ import annotations

import csv
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *(
        "relationship",
        "race",
        "sex",
        "capital-gain",
        "capital-loss",
        "hours-per-week",
        "native-country",
        "income",
    ),
)
NUMERIC = {"age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"}
SPLITS = {  # file, rows, SHA-256
    "train": ("adult.data", 32_561, "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    "test": ("adult.test", 16_281, "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
}
TARGET = Path(__file__).parents[1] / "diskdp" / "datasets" / "files" / "adult.npz"


def rows(path: Path, count: int, digest: str) -> list[list[str]]:
    """All rows of one original file, unaltered but for the full stop that ends a label in adult.test."""
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise SystemExit(f"{path}: not the original file (its SHA-256 differs)")
    records = [record for record in csv.reader(raw.decode("ascii").splitlines()) if len(record) == len(COLUMNS)]
    if len(records) != count:
        raise SystemExit(f"{path}: {len(records)} rows, expected {count}")
    return [[*map(str.strip, record[:-1]), record[-1].strip().removesuffix(".")] for record in records]


def pack(folder: Path) -> dict[str, Any]:
    """Numbers in their smallest type; texts as positions in a sorted table `texts/COLUMN`."""
    tables = {split: rows(folder / name, count, digest) for split, (name, count, digest) in SPLITS.items()}
    arrays: dict[str, Any] = {}
    for i, column in enumerate(COLUMNS):
        cells = {split: [row[i] for row in table] for split, table in tables.items()}
        texts = sorted({text for values in cells.values() for text in values})
        if column not in NUMERIC:
            arrays[f"texts/{column}"] = np.array(texts)
        code = int if column in NUMERIC else {text: n for n, text in enumerate(texts)}.__getitem__
        for split, values in cells.items():
            numbers = np.array([code(value) for value in values])
            arrays[f"{split}/{column}"] = numbers.astype(np.min_scalar_type(numbers.max()))
    return arrays


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    np.savez_compressed(TARGET, **pack(Path(sys.argv[1])))
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
