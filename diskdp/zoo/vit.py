"""A small vision transformer (Dosovitskiy et al. 2021). Assumes inputs [B, C, H, W] of one fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diskdp.errors import ConfigError
from diskdp.zoo.shapes import image_shape
from diskdp.zoo.transformer import Block, check_heads


class ViT(nn.Module):
    """Linear patch embedding, class token, learned positions, pre-norm blocks; logits from the token."""

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        patch: int,
        dim: int,
        depth: int,
        heads: int,
        dropout: float,
        layer_scale: float,
    ) -> None:
        super().__init__()
        channels, height, width = image
        patches = (height // patch) * (width // patch)
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, patches + 1, dim), std=0.02))
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(dim, heads, dropout, causal=False, layer_scale=layer_scale) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches_BTK = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        token = self.class_token.expand(len(x), -1, -1)
        x_BTD = torch.cat([token, self.embed(patches_BTK)], dim=1) + self.positions
        x_BTD = self.norm(self.blocks(self.dropout(x_BTD)))
        logits_BC: Tensor = self.head(x_BTD[:, 0])
        return logits_BC


def vit(
    input_shape: Sequence[int],
    classes: int,
    *,
    patch: int = 4,
    dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    layer_scale: float = 0.0,
) -> ViT:
    """A vision transformer; `layer_scale` is the start value of the learned scales, 0 for none.

    >>> vit((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    image = image_shape("vit", input_shape)
    check_heads("vit", dim, heads)
    if image[1] % patch or image[2] % patch:
        raise ConfigError(f"vit: patch {patch} does not divide the image, {image[1]}×{image[2]}")
    return ViT(image, classes, patch, dim, depth, heads, dropout, layer_scale)
