"""The transformer block that `vit` and `gpt` share. Assumes sequences [B, T, D], batch first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diskdp.errors import ConfigError


class Attention(nn.Module):
    """Multi-head self-attention, causal or not."""

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BHTK = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        out_BTD: Tensor = self.out(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream, scaled by a learned vector if asked for.

    `layer_scale` is the start value of that vector (Touvron et al. 2021); 0 leaves it out.
    """

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool, layer_scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout, causal)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)
        self.scale1 = nn.Parameter(torch.full((dim,), layer_scale)) if layer_scale else None
        self.scale2 = nn.Parameter(torch.full((dim,), layer_scale)) if layer_scale else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        attended: Tensor = self.dropout(self.attention(self.norm1(x_BTD)))
        x_BTD = x_BTD + (attended if self.scale1 is None else self.scale1 * attended)
        fed: Tensor = self.dropout(self.feed_forward(self.norm2(x_BTD)))
        return x_BTD + (fed if self.scale2 is None else self.scale2 * fed)


def check_heads(model: str, dim: int, heads: int) -> None:
    """Refuse a width that the heads cannot share evenly.

    >>> check_heads("vit", 64, 4)
    """
    if dim % heads:
        raise ConfigError(f"{model}: dim {dim} is not a multiple of heads {heads}")
