"""Models and functions under ``torch.compile``: run as they were written while gradients are taken.

A compiled graph is one opaque operation, in which no use of a parameter could be seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Whatever was compiled runs uncompiled inside; outside it stays compiled.

    >>> with uncompiled():
    ...     torch.tanh(torch.zeros(1))
    tensor([0.])
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it would take seconds
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield
