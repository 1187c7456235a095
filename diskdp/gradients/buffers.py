"""Buffers that a forward pass writes: a batch decides how many passes there are, so none may leave a trace.

Only parametrizations (spectral normalisation's power iteration) may write theirs, as they see nothing but parameters.
Every pass starts from the same numbers, and a training step moves them on once, whatever its batch was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from diskdp.errors import GradientError


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


def refuse_written(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuse buffers that hold other numbers after a forward pass, parametrizations' aside."""
    allowed = {id(b) for _, _, held in _parametrized(model) for b in held.buffers()}
    for name, buffer in model.named_buffers():
        same = name in before and torch.equal(buffer.nan_to_num(), before[name].nan_to_num())
        if not same and id(buffer) not in allowed:
            raise GradientError(
                f"buffer {name} is written by the forward pass, and how many passes there are depends on the batch: it "
                "would store un-noised data in the model. For running statistics set track_running_stats=False; for "
                "spectral_norm use torch.nn.utils.parametrizations; else write it between steps, from the weights alone"
            )


def _parametrized(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Module, tensor's name and parametrizations of every parametrized tensor in training mode."""
    for module in model.modules():
        if parametrize.is_parametrized(module) and isinstance(module.parametrizations, nn.ModuleDict):
            for name, held in module.parametrizations.items():
                if any(part.training for part in held.modules()) and next(held.buffers(), None) is not None:
                    yield module, name, held
