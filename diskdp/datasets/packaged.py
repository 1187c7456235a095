"""The data set inside the package: the UCI Adult census table, read through its declared schema.

Assumes nothing but the package's own files (`files/README.md`: origin, licence, how they were made).
"""

from __future__ import annotations

from importlib import resources

import numpy as np
from torch.utils.data import TensorDataset

from diskdp.datasets.schema import Schema
from diskdp.datasets.split import Split
from diskdp.datasets.tables import Cells, Numbers, encode, table_info


def adult_schema() -> Schema:
    """What is declared about the Adult table.

    >>> adult_schema().n_features
    91
    """
    text = resources.files("diskdp.datasets").joinpath("files/adult.toml").read_text(encoding="utf-8")
    return Schema.parse(text, origin="adult.toml")


def adult() -> Split:
    """UCI Adult: does a person of the 1994 census earn more than $50,000 a year?

    The original 32,561 training and 16,281 test rows; an unknown value ("?") is a category of its own.

    >>> split = adult()
    >>> len(split.train), len(split.test), split.info.n_features, split.info.classes
    (32561, 16281, 91, ('<=50K', '>50K'))
    """
    schema = adult_schema()
    with (
        resources.files("diskdp.datasets").joinpath("files/adult.npz").open("rb") as stream,
        np.load(stream, allow_pickle=False) as arrays,
    ):

        def rows(split: str) -> TensorDataset:
            columns: dict[str, Cells] = {}
            for name in (*(column.name for column in schema.columns), schema.label.name):
                stored = arrays[f"{split}/{name}"]
                if f"texts/{name}" in arrays:
                    columns[name] = arrays[f"texts/{name}"][stored].tolist()
                else:
                    columns[name] = Numbers(stored.astype(np.float64), np.zeros(stored.shape, dtype=np.bool_))
            return TensorDataset(*encode(schema, columns, lambda i: f"adult.npz, {split} row {i + 1}"))

        return Split(rows("train"), rows("test"), table_info(schema))
