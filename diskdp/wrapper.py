"""DiSK around an optimizer whose gradients are privatised elsewhere: the interface of the paper's listing.

The closure is called at x_t and at the look-ahead point and must leave *privatised* gradients in ``p.grad`` each time.
Both calls see the same sample, so a step releases two noised sums of one batch: account for it as one event with noise
multiplier σ/√2, σ being that of each call. `privatize` clips once and needs no such correction; prefer it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diskdp.errors import CheckpointError, FilterError
from diskdp.filters import DiSK, due_coefficients


class FilteredOptimizer(Optimizer):
    """A base optimizer that steps along filtered gradients; made by `wrap_optimizer`."""

    def __init__(self, base: Optimizer, filter: DiSK) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups  # shared, so that learning-rate schedules reach the base
        self.state = base.state
        self.base = base
        self.filter = filter
        self._filter_state = filter.start()
        self._lookahead: list[Tensor] | None = None
        self._ready = False

    def prestep(self, closure: Callable[[], Any]) -> Any:
        """Call ``closure`` at the filter's points, leave the weighted gradient in ``p.grad``, return the loss at x_t.

        The random state is *not* rewound between the calls: a closure that draws its noise from a global generator
        would add the same noise at both points, and their difference would be released without any.
        """
        parameters = self._parameters()
        here, ahead = due_coefficients(self.filter, self._filter_state)
        if self._lookahead is None or ahead == 0:
            loss = self._evaluate(closure, parameters)
        elif here == 0:
            loss = self._evaluate_at(closure, parameters, self._lookahead)
        else:
            self._evaluate_at(closure, parameters, self._lookahead)
            at_lookahead = [_gradient(p) for p in parameters]
            loss = self._evaluate(closure, parameters)
            for p, gradient in zip(parameters, at_lookahead):
                p.grad = _gradient(p).mul_(here).add_(gradient, alpha=ahead)
        self._ready = True
        return loss

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Filter the gradients of the last `prestep` and let the base optimizer step along them."""
        if not self._ready:
            raise FilterError("step() needs the gradients of prestep(closure): call prestep once before every step")
        self._ready = False
        parameters = self._parameters()
        filtered = self._filter_state.update([_gradient(p) for p in parameters])
        weights = [p.detach() for p in parameters]
        gamma = self.filter.lookahead
        if gamma is not None:
            self._lookahead = [w.clone() for w in weights]
        for p, gradient in zip(parameters, filtered):
            p.grad = gradient.clone()
        self.base.step()
        if gamma is not None and self._lookahead is not None:
            torch._foreach_lerp_(self._lookahead, weights, 1 + gamma)

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, the filter's and the look-ahead point."""
        return {
            "base": self.base.state_dict(),
            "filter": self._filter_state.state_dict(),
            "lookahead": None if self._lookahead is None else [y.clone() for y in self._lookahead],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not {"base", "filter", "lookahead"} <= state_dict.keys():
            raise CheckpointError("not the state of a wrapped optimizer: keys base, filter and lookahead are needed")
        self.base.load_state_dict(state_dict["base"])
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self._filter_state = self.filter.start()
        self._filter_state.load_state_dict(state_dict["filter"])
        lookahead = state_dict["lookahead"]
        self._lookahead = None if lookahead is None else [y.clone() for y in lookahead]
        self._ready = False

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _evaluate(self, closure: Callable[[], Any], parameters: list[Tensor]) -> Any:
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            return closure()

    def _evaluate_at(self, closure: Callable[[], Any], parameters: list[Tensor], values: list[Tensor]) -> Any:
        """Exchange tensors, never add and subtract: the weights come back bit for bit."""
        held = [p.data for p in parameters]
        try:
            for p, value in zip(parameters, values):
                p.data = value
            return self._evaluate(closure, parameters)
        finally:
            for p, value in zip(parameters, held):
                p.data = value


def wrap_optimizer(base: Optimizer, kappa: float = 0.7, gamma: float | None = 0.5) -> FilteredOptimizer:
    """The paper's two lines: ``loss = optimizer.prestep(closure); optimizer.step()``.

    >>> weight = torch.nn.Parameter(torch.tensor([4.0]))
    >>> optimizer = wrap_optimizer(torch.optim.SGD([weight], lr=0.25), kappa=0.7, gamma=0.5)
    >>> def closure():
    ...     weight.grad = 2 * weight.detach()  # a privatised gradient of weight²
    ...     return weight.item() ** 2
    >>> for _ in range(2):
    ...     loss = optimizer.prestep(closure); optimizer.step()
    >>> loss, round(weight.item(), 3)
    (4.0, 1.0)
    """
    return FilteredOptimizer(base, DiSK(kappa=kappa, gamma=gamma))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
