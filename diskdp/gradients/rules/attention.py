"""Attention in one kernel: learned queries, keys, values and biases of the scores are watched with a batch axis.

Not left to the fallback, which would run the kernel again and draw other dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.trace import Call, Rule


def attention(call: Call) -> Tensor:
    """softmax(q kᵀ + mask) v over the last two axes; the others broadcast."""
    query, key, value, mask, dropout, causal, scale, grouped = call.bind(
        "query", "key", "value", attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    )
    inputs = (query, key, value)
    own = 3 if grouped else 2  # last axes that are each tensor's own: the heads too, where keys serve groups of queries
    leading = torch.broadcast_shapes(*(t.shape[:-own] for t in inputs))

    def watched(tensor: Tensor) -> Tensor:
        source = call.source(tensor)
        return tensor if source is None else call.watch(source, torch.Size([*leading, *tensor.shape[-own:]]))

    query, key, value = (watched(t) for t in inputs)
    source = call.source(mask)
    if source is not None:
        scores = torch.Size([*query.shape[:-1], mask.shape[-1]])
        mask = call.watch(source, torch.broadcast_shapes(scores, mask.shape))
    result: Tensor = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return result


RULES: list[tuple[list[Callable[..., object]], Rule]] = [([F.scaled_dot_product_attention], attention)]
