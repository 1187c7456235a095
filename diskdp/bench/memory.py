"""Peak bytes of torch's CPU memory during a step.

Exact and repeatable, from the allocator's own events, which reach torch's profiler one by one. Whatever was allocated
since the training was set up counts: parameters, gradients, optimizer and filter state, noise, activations.
What other libraries allocate for themselves (scratch space of MKL and oneDNN, keystream buffers) does not.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from itertools import accumulate

from torch.autograd.profiler import profile, record_function

_MARK = "diskdp.bench: the step"


def peak_bytes(prepare: Callable[[], Callable[[], object]]) -> int:
    """Set up what ``prepare`` sets up, run what it returns, and say how much was alive at most while that ran.

    >>> import torch
    >>> def prepare():
    ...     kept, passing = torch.zeros(1000), torch.zeros(5000)
    ...     return lambda: kept.clone()  # 4000 bytes kept, and 4000 more while it runs
    >>> peak_bytes(prepare)
    8000
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce itself on stderr
    gc.collect()  # what is freed later, but was allocated before, is nobody's
    with profile(use_kineto=True, profile_memory=True) as profiler:
        step = prepare()
        gc.collect()
        with record_function(_MARK):
            step()
        del step
    events = profiler.kineto_results.events()
    mark = next(event for event in events if event.name() == _MARK)
    begins, ends = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    before = sum(change for when, _, change in changes if when < begins)
    within = accumulate((change for when, _, change in changes if begins <= when <= ends), initial=before)
    return max(within)
