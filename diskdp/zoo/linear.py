"""A linear model. Assumes inputs of one fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn


class Linear(nn.Module):
    """Logits are an affine function of the flattened input; with cross entropy, logistic regression."""

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(prod(input_shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        logits_BC: Tensor = self.head(x.flatten(1))
        return logits_BC


def linear(input_shape: Sequence[int], classes: int) -> Linear:
    """A linear model.

    >>> sum(p.numel() for p in linear((91,), 2).parameters())
    184
    """
    return Linear(input_shape, classes)
