"""Methods chosen by timing, where the model of cost is not to be relied on.

Assumes that terms of equal shapes cost the same. Choices by timing may differ from run to run, and with them the last
places of sums.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from diskdp.gradients.planner import Method, methods, squared_norms, weighted_sum
from diskdp.gradients.products import full_precision
from diskdp.gradients.terms import Conv, Outer, Term

_HOPELESS = 20.0  # a method that is estimated to cost so many times the cheapest is not tried
_REPEATS = 3


class Tuner:
    """Chooses among methods by timing them once for each kind of terms.

    >>> tuner = Tuner()
    >>> terms = [Outer(torch.zeros(2, 5, 4), torch.zeros(2, 5, 3), 4)]
    >>> tuner.choose(terms).name in ("gram", "per-example"), len(tuner.choices)
    (True, 1)
    """

    def __init__(self) -> None:
        self.choices: dict[object, str] = {}  # by kind of terms: the name of the method

    def choose(self, terms: Sequence[Term]) -> Method:
        candidates = methods(terms)
        cheapest = min(method.cost for method in candidates)
        candidates = [method for method in candidates if method.cost <= _HOPELESS * cheapest]
        if len(candidates) == 1:
            return candidates[0]
        key = _kind(terms)
        if key not in self.choices:
            self.choices[key] = min(candidates, key=lambda method: milliseconds(terms, method, _REPEATS)).name
        known = [method for method in candidates if method.name == self.choices[key]]
        return known[0] if known else min(candidates, key=lambda method: method.cost)


@torch.no_grad()
def milliseconds(terms: Sequence[Term], method: Method, repeats: int) -> float:
    """Wall time of norms and weighted sum by a method, the least of some repeats after a first one."""
    weights_B = torch.ones(terms[0].batch, dtype=torch.float64, device=terms[0].device)
    times = []
    with full_precision():
        for _ in range(1 + repeats):
            _wait_for(weights_B)
            start = time.perf_counter()
            norms = squared_norms(terms, method)
            weighted_sum(terms if norms.gradients is None else [norms.gradients], weights_B)
            _wait_for(weights_B)
            times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def _kind(terms: Sequence[Term]) -> object:
    """Shapes of an example, and the batch's size to a factor of two."""
    shapes: list[object] = [terms[0].batch.bit_length(), terms[0].dtype, terms[0].device.type]
    for term in terms:
        if isinstance(term, Outer):
            shapes.append((tuple(term.left.shape[1:]), tuple(term.right.shape[1:])))
        elif isinstance(term, Conv):
            shapes.append((term.images, tuple(term.input.shape[1:]), tuple(term.output.shape[1:]), term.shape))
        else:
            shapes.append(term.gradient_shape)
    return tuple(shapes)


def _wait_for(tensor: torch.Tensor) -> None:
    """Until the work that was sent to an accelerator is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
