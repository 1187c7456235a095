"""A multilayer perceptron. Assumes inputs of one fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from diskdp.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


class MLP(nn.Module):
    """Linear layers with an activation, and dropout if asked for, between them."""

    def __init__(
        self, input_shape: Sequence[int], classes: int, widths: Sequence[int], activation: str, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        sizes = [prod(input_shape), *widths]
        for wide_in, wide_out in pairwise(sizes):
            layers += [nn.Linear(wide_in, wide_out), ACTIVATIONS[activation]()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        logits_BC: Tensor = self.layers(x.flatten(1))
        return logits_BC


def mlp(
    input_shape: Sequence[int],
    classes: int,
    *,
    widths: Sequence[int] = (128,),
    activation: str = "tanh",
    dropout: float = 0.0,
) -> MLP:
    """A multilayer perceptron; tanh bounds activations, which suits clipping (Papernot et al. 2021).

    >>> [tuple(p.shape) for p in mlp((4,), 2, widths=(8,)).parameters()]
    [(8, 4), (8,), (2, 8), (2,)]
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"mlp: unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return MLP(input_shape, classes, widths, activation, dropout)
