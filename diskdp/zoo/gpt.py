"""A tiny GPT. Assumes token numbers [B, T] with T up to the declared length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diskdp.errors import ConfigError
from diskdp.zoo.transformer import Block, check_heads


class GPT(nn.Module):
    """Causal pre-norm blocks with learned positions; one embedding serves as input and as output layer."""

    def __init__(
        self,
        length: int,
        vocabulary: int,
        dim: int,
        depth: int,
        heads: int,
        dropout: float,
        layer_scale: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(dim, heads, dropout, causal=True, layer_scale=layer_scale) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(places_T))
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV


def gpt(
    input_shape: Sequence[int],
    classes: int,
    *,
    dim: int = 64,
    depth: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
    layer_scale: float = 0.0,
) -> GPT:
    """A causal language model for inputs of shape (length,); `classes` is the size of the vocabulary.

    >>> model = gpt((16,), 100)
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape, model.head.weight is model.tokens.weight
    (torch.Size([2, 16, 100]), True)
    """
    if len(input_shape) != 1:
        raise ConfigError(f"gpt: needs token sequences [length], the inputs are {list(input_shape)}")
    check_heads("gpt", dim, heads)
    return GPT(input_shape[0], classes, dim, depth, heads, dropout, layer_scale)
