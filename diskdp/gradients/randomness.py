"""The global random state that a model may draw from, so that every point sees the same dropout masks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """A snapshot of torch's, numpy's and Python's global generators.

    >>> before = RandomState.capture()
    >>> first = torch.rand(3)
    >>> before.restore()
    >>> bool((torch.rand(3) == first).all())
    True
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())  # noqa: NPY002

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)
