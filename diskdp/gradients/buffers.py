"""Buffers that a forward pass writes: a batch decides how many passes there are, so none may leave a trace.

Only parametrizations (spectral normalisation's power iteration) may write theirs, as they see nothing but parameters.
Every pass starts from the same numbers, and a training step moves them on once, whatever its batch was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class HeldBuffers:
    """Copies of the buffers that parametrizations in training mode may write."""

    copies: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, model: nn.Module) -> HeldBuffers:
        return cls(tuple((b, b.clone()) for _, _, held in _parametrized(model) for b in held.buffers()))

    def restore(self) -> None:
        for buffer, copy in self.copies:
            buffer.copy_(copy)


@torch.no_grad()
def advance_buffers(model: nn.Module) -> None:
    """Once a step: parametrizations compute their tensors from the weights as they are now, and keep what they keep.

    >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    >>> before = layer.parametrizations.weight[0]._u.clone()
    >>> _ = nn.init.normal_(layer.parametrizations.weight.original)  # as a step of an optimizer would
    >>> advance_buffers(layer)
    >>> bool((layer.parametrizations.weight[0]._u != before).any())
    True
    """
    for module, name, _ in _parametrized(model):
        getattr(module, name)


def held_names(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that parametrizations in training mode may write."""
    held = {id(b) for _, _, parts in _parametrized(model) for b in parts.buffers()}
    return frozenset(name for name, b in model.named_buffers(remove_duplicate=False) if id(b) in held)


def _parametrized(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Module, tensor's name and parametrizations of every parametrized tensor in training mode."""
    for module in model.modules():
        if parametrize.is_parametrized(module) and isinstance(module.parametrizations, nn.ModuleDict):
            for name, held in module.parametrizations.items():
                if any(part.training for part in held.modules()) and next(held.buffers(), None) is not None:
                    yield module, name, held
