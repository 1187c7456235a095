"""What every loader of this room returns. Assumes that N, the input's shape and the classes are public."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class DataInfo:
    """The public facts of a data set.

    `provenance` says, a line each, what was taken from where: bounds, categories, classes, scaling constants.

    >>> info = DataInfo("digits", (1, 28, 28), ("0", "1"), ())
    >>> info.n_features, info.n_classes
    (784, 2)
    """

    name: str
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    provenance: tuple[str, ...]

    @property
    def n_features(self) -> int:
        """Numbers in one input."""
        return prod(self.input_shape)

    @property
    def n_classes(self) -> int:
        """Declared classes."""
        return len(self.classes)


@dataclass(frozen=True)
class Split:
    """Training and test examples of one data set; each item is (input float32, label int64).

    Where there are no test files, `test` has no rows. `units` names the unit of each training record, if the schema
    has a column for it.
    """

    train: TensorDataset
    test: TensorDataset
    info: DataInfo
    units: tuple[str, ...] | None = None


def no_rows(like: TensorDataset) -> TensorDataset:
    """An empty data set shaped like `like`.

    >>> import torch
    >>> no_rows(TensorDataset(torch.ones(3, 2), torch.zeros(3))).tensors[0].shape
    torch.Size([0, 2])
    """
    tensors: tuple[Tensor, ...] = like.tensors
    return TensorDataset(*(tensor[:0].clone() for tensor in tensors))
