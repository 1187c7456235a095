"""From per-example norms to clip factors; each clipper states what one example can contribute.

Norms are those of the combined vector u_i (one or several points), so that clipping happens once and jointly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diskdp.errors import PlanError

CLIPPINGS = ("flat", "automatic", "normalized", "per-layer")
STABILITY = 0.01  # of automatic clipping: Bu et al. 2023, AUTO-S


@dataclass(frozen=True)
class Clipper:
    """One way to bound ‖clip(u)‖; ``kind`` is one of `CLIPPINGS`, ``max_norm`` is C.

    >>> Clipper("automatic", 2.0).factors(torch.tensor([[0.99, 3.99]]))
    tensor([[2.0000, 0.5000]])
    """

    kind: str
    max_norm: float

    def __post_init__(self) -> None:
        if self.kind not in CLIPPINGS:
            raise PlanError(f"clipping={self.kind!r} is not built; choose one of {', '.join(CLIPPINGS)}")
        if not self.max_norm > 0:
            raise PlanError(f"max_grad_norm={self.max_norm} must be positive")

    @property
    def sensitivity(self) -> float:
        """S: the largest norm of one example's clipped gradient, all groups together.

        Per-layer clipping gives each of L layers the threshold C_l = C/√L, so that √ΣC_l² = C.
        """
        return 1.0 if self.kind == "normalized" else self.max_norm

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Parameters that are clipped together: all of them, or those of one module.

        >>> Clipper("per-layer", 1.0).groups(["0.weight", "0.bias", "1.weight"])
        [['0.weight', '0.bias'], ['1.weight']]
        """
        if self.kind != "per-layer":
            return [list(names)]
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return list(layers.values())

    def shortens(self, norms_GB: Tensor) -> Tensor:
        """Which examples are longer than their threshold in some group, [B]."""
        return (norms_GB > self._threshold(norms_GB)).any(0)

    def _threshold(self, norms_GB: Tensor) -> float:
        return self.max_norm / math.sqrt(len(norms_GB)) if self.kind == "per-layer" else self.max_norm

    def factors(self, norms_GB: Tensor) -> Tensor:
        """Factor of each example in each group, from the norms of the groups."""
        if math.isinf(self.max_norm):
            return torch.ones_like(norms_GB)
        if self.kind == "automatic":
            return self.max_norm / (norms_GB + STABILITY)
        if self.kind == "normalized":
            return torch.clamp(1 / norms_GB, max=1 / self.max_norm)
        return torch.clamp(self._threshold(norms_GB) / norms_GB, max=1.0)
