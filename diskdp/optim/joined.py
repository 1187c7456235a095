"""Several optimizers for the parts of one model, as the one optimizer that `privatize` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from diskdp.errors import CheckpointError, OptimizerError
from diskdp.filters import Filter
from diskdp.plan import Plan
from diskdp.preflight import check_knowledge


class Joined(Optimizer):
    """Steps each of its optimizers in turn: Muon for the matrices and AdamW for the rest, say.

    Schedulers made for it reach all groups. No parameter may be in two of them.

    >>> model = torch.nn.Linear(2, 3)
    >>> both = Joined(torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.01))
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.01]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise OptimizerError("Joined takes at least one optimizer")
        held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            raise OptimizerError("a parameter is in two of the joined optimizers and would be moved twice: split them")
        self.optimizers = optimizers
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """The very groups of the parts, so that a schedule reaches them."""
        self.param_groups = [group for o in self.optimizers for group in o.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "param_groups") and len(self.param_groups) >= sum(
            len(o.param_groups) for o in self.optimizers
        ):
            raise OptimizerError("add the group to one of the joined optimizers, and join them then")
        super().add_param_group(param_group)

    def check_fits(self, plan: Plan, filter: Filter) -> None:
        """Raise OptimizerError unless what its parts know of the noise is what this plan and filter make of it."""
        for optimizer in self.optimizers:
            check_knowledge(optimizer, plan, filter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Each optimizer's state, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict.get("optimizers")
        if not isinstance(states, list) or len(states) != len(self.optimizers):
            raise CheckpointError(f"not the state of {len(self.optimizers)} joined optimizers; join the ones it is of")
        for optimizer, state in zip(self.optimizers, states):
            optimizer.load_state_dict(state)
        self._share_groups()
