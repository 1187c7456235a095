"""Wide residual networks with group norm, as used for private training (De et al. 2022, arXiv 2204.13650).

Assumes inputs [B, C, H, W]. Pre-activation blocks; no statistic is shared between examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from diskdp.errors import ConfigError
from diskdp.zoo.shapes import image_shape


def standardized(weight: Tensor, eps: float = 1e-4) -> Tensor:
    """Weight standardization (Qiao et al. 2019): zero mean and variance 1/fan-in for each output channel.

    >>> import torch
    >>> weight = standardized(torch.arange(54.0).view(2, 3, 3, 3))
    >>> torch.allclose(27 * weight.var((1, 2, 3), correction=0), torch.ones(2))
    True
    """
    variance, mean = weight.var((1, 2, 3), correction=0, keepdim=True), weight.mean((1, 2, 3), keepdim=True)
    fan_in = weight[0].numel()
    return (weight - mean) * (variance * fan_in + eps).rsqrt()


class Conv(nn.Conv2d):
    """A convolution whose weight may be standardized on the way in."""

    def __init__(self, wide_in: int, wide_out: int, size: int, stride: int, standardize: bool) -> None:
        super().__init__(wide_in, wide_out, size, stride=stride, padding=size // 2, bias=False)
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        self.standardize = standardize

    def forward(self, x: Tensor) -> Tensor:
        weight = standardized(self.weight) if self.standardize else self.weight
        return F.conv2d(x, weight, None, self.stride, self.padding)


class Block(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))); a 1×1 convolution leads past where sizes differ."""

    def __init__(self, wide_in: int, wide_out: int, stride: int, groups: int, standardize: bool) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, wide_in)
        self.conv1 = Conv(wide_in, wide_out, 3, stride, standardize)
        self.norm2 = nn.GroupNorm(groups, wide_out)
        self.conv2 = Conv(wide_out, wide_out, 3, 1, standardize)
        same = wide_in == wide_out and stride == 1
        self.shortcut = None if same else Conv(wide_in, wide_out, 1, stride, standardize)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        past: Tensor = x if self.shortcut is None else self.shortcut(active)
        change: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return past + change


class WRN(nn.Module):
    """WRN-depth-width: three stages of (depth - 4) / 6 blocks, with 16, 32 and 64 times width channels."""

    def __init__(self, channels: int, classes: int, depth: int, width: int, groups: int, standardize: bool) -> None:
        super().__init__()
        wide = 16
        self.stem = Conv(channels, wide, 3, 1, standardize)
        blocks: list[nn.Module] = []
        for stage in range(3):
            for i in range((depth - 4) // 6):
                stride = 2 if stage and not i else 1
                blocks.append(Block(wide, 16 * width * 2**stage, stride, groups, standardize))
                wide = 16 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(groups, wide)
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        features_BDHW = F.relu(self.norm(self.blocks(self.stem(x))))
        logits_BC: Tensor = self.head(features_BDHW.mean((2, 3)))
        return logits_BC


def wrn(
    input_shape: Sequence[int],
    classes: int,
    *,
    depth: int = 16,
    width: int = 4,
    groups: int = 16,
    weight_standardization: bool = False,
) -> WRN:
    """A wide residual network; WRN-16-4 unless asked otherwise.

    >>> sum(p.numel() for p in wrn((3, 32, 32), 10).parameters())
    2748890
    """
    if depth < 10 or (depth - 4) % 6:
        raise ConfigError(f"wrn: depth must be 10, 16, 22, ... (6n + 4), got {depth}")
    channels, _, _ = image_shape("wrn", input_shape, least=4)
    return WRN(channels, classes, depth, width, groups, weight_standardization)
