"""A five-layer convolutional network for small images. Assumes inputs [B, C, H, W] of at least 8×8."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from diskdp.zoo.shapes import image_shape


class CNN5(nn.Module):
    """Four 3×3 convolutions with group norm and tanh, halving the image between them, then a linear head.

    At 32×32 the convolutions see 32×32, 16×16, 8×8 and 4×4 pixels; the head sees the mean over positions.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int], groups: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (wide_in, wide_out) in enumerate(pairwise([channels, *widths])):
            if i:
                layers.append(nn.AvgPool2d(2))
            layers += [nn.Conv2d(wide_in, wide_out, 3, padding=1), nn.GroupNorm(groups, wide_out), nn.Tanh()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        features_BDHW: Tensor = self.features(x)
        logits_BC: Tensor = self.head(features_BDHW.mean((2, 3)))
        return logits_BC


def cnn5(
    input_shape: Sequence[int], classes: int, *, widths: Sequence[int] = (32, 64, 128, 256), groups: int = 16
) -> CNN5:
    """The 32-64-128-256-classes network.

    >>> import torch
    >>> cnn5((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    channels, _, _ = image_shape("cnn5", input_shape, least=2 ** (len(widths) - 1))
    return CNN5(channels, classes, widths, groups)
