"""What is asked of model, optimizer and what a step is given and leaves, so that a guarantee is not lost in silence.

Looks at structure, at public settings and at what was released; at no example's numbers.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diskdp.errors import (
    CheckpointError,
    FilterError,
    GradientError,
    LowPrecisionWarning,
    NoiseError,
    NonFiniteError,
    StuckWeightsWarning,
)
from diskdp.filters import AdaptiveGain, DiSK, Filter
from diskdp.filters.states import KnowsNoise
from diskdp.noise import KEYED_BY_SUM
from diskdp.plan import Plan


class Still:
    """Whether the optimizer moves the weights that the model uses: looked at until each was seen to move."""

    _STEPS = 3  # with a learning rate; the first of a warm-up may be too small to show in float32

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = list(parameters)
        self._waiting = dict(parameters)
        self._before: dict[str, Tensor] = {}
        self._steps = 0

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        rates = {id(p): float(group.get("lr", 1.0)) for group in optimizer.param_groups for p in group["params"]}
        self._before = {n: _first(p).clone() for n, p in self._waiting.items() if rates.get(id(p), 1.0) > 0}

    def after(self) -> None:
        if not self._before:
            return
        for name, before in self._before.items():
            if not torch.equal(_first(self._waiting[name]), before):
                del self._waiting[name]
        self._steps += 1
        if self._steps < self._STEPS:
            return
        stuck, self._waiting = list(self._waiting), {}
        message = (
            f"{', '.join(stuck[:4])}: not moved by {self._STEPS} steps of the optimizer: its learning rate is too "
            "small for the precision of the weights, or it moves other tensors than the model's; make the optimizer "
            "after the model's last change"
        )
        if stuck and len(stuck) == len(self._names):
            raise GradientError(message)
        if stuck:
            warnings.warn(message, StuckWeightsWarning, stacklevel=5)


def _first(parameter: Tensor) -> Tensor:
    """A few elements, by which a change shows."""
    return parameter.detach().reshape(-1)[:64]


def some_of(parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([_first(p).double() for p in parameters.values()])


def forms(parameters: Mapping[str, Tensor]) -> list[tuple[torch.dtype, torch.device]]:
    return [(p.dtype, p.device) for p in parameters.values()]


def warn_of_low_precision(parameters: Mapping[str, Tensor]) -> None:
    """An update of less than half a unit in the last place leaves a weight where it is."""
    low = [name for name, p in parameters.items() if p.dtype in (torch.bfloat16, torch.float16)]
    if low:
        warnings.warn(
            f"{', '.join(low[:4])}: trained in {parameters[low[0]].dtype}, where updates below about "
            f"{torch.finfo(parameters[low[0]].dtype).eps / 2:.1g} of a weight are lost, so training may stand still; "
            "keep what trains in float32 and compute under torch.autocast (what is frozen may stay as it is)",
            LowPrecisionWarning,
            stacklevel=4,
        )


def check_key(key_path: Path | None, ledger_path: Path | None, plan: Plan) -> None:
    if key_path is None:
        return
    if plan.noise not in KEYED_BY_SUM:
        raise NoiseError(
            f"key_path: noise={plan.noise!r} does not depend on the sum, so a step that is run again with a kept key "
            f"could release two sums under the same noise; use noise={' or '.join(map(repr, KEYED_BY_SUM))}"
        )
    if ledger_path is None:
        raise NoiseError(
            "key_path: a kept key draws the same samples again, which only a ledger can tell; add ledger_path"
        )


def check_scheduler(scheduler: LRScheduler | None, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise GradientError(
            "ReduceLROnPlateau decides by a loss that carries no noise, so the weights would depend on it outside the "
            "guarantee; use a schedule of the step alone"
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise GradientError("the scheduler was made for another optimizer; make it from the one that privatize() gets")


def check_finite(released: Mapping[str, Tensor]) -> None:
    """Stop on the noised result alone: the decision costs no privacy, and the weights are as they were."""
    if math.isfinite(sum(t.sum().item() for t in released.values())):  # a pass as fast as memory; infinities stay
        return
    names = [name for name, t in released.items() if not bool(t.isfinite().all())]
    if names:
        raise NonFiniteError(
            f"{', '.join(names[:4])}: the noised gradient is not finite, so no weight was moved (the step is charged); "
            "lower the learning rate, or max_grad_norm if it is near the largest float"
        )


def check_losses(losses_B: Tensor, examples: int) -> None:
    """A mean over the batch, or several views of one example, would put one clip where another is accounted for."""
    if len(losses_B) != examples:
        raise GradientError(
            f"loss_fn returned {len(losses_B)} losses for {examples} examples; it must return one an example, whatever "
            "collation did: not averaged over the batch, and averaged over the views of an example if there are several"
        )


def check_same_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The saved weights' names and shapes are the model's: found before anything is changed."""
    own = model.state_dict()
    wrong = [name for name in (*own, *state) if name not in own or name not in state]
    wrong += [name for name in own if name in state and own[name].shape != state[name].shape]
    if wrong:
        raise CheckpointError(
            f"the checkpoint belongs to another model: {', '.join(list(dict.fromkeys(wrong))[:4])} differ in name or "
            "shape; resume with the model it was made with"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """The optimizer must move the model's trainable parameters, all of them and no others."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise GradientError(
            "SparseAdam takes sparse gradients, and noise leaves none; use Adam, or AdamW (noise reaches every row)"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    own = {id(p): name for name, p in parameters.items()}
    missing = [name for key, name in own.items() if key not in held]
    if missing:
        raise GradientError(
            f"{', '.join(missing[:4])}: trainable but not in the optimizer; make the optimizer after the model's last "
            "change (a device move, an adapter), or freeze with requires_grad_(False)"
        )
    if held - own.keys():
        raise GradientError(
            f"the optimizer holds {len(held - own.keys())} trainable tensors that are not the model's parameters; make "
            "it from model.parameters(), after the model's last change"
        )


@runtime_checkable
class KnowsPlan(Protocol):
    """An optimizer that was told of the noise or of the filter, and can say whether it was told right."""

    def check_fits(self, plan: Plan, filter: Filter) -> None: ...


def check_knowledge(optimizer: torch.optim.Optimizer, plan: Plan, filter: Filter) -> None:
    """An optimizer that counts on some noise must get the noise of this plan, through this filter."""
    if isinstance(optimizer, KnowsPlan):
        optimizer.check_fits(plan, filter)


def check_clipping(plan: Plan, filter: Filter) -> None:
    """Adaptive clipping knows one threshold for one vector an example, and noise that changes with it."""
    if plan.clipping != "adaptive":
        return
    if filter.clip == "separate":
        raise FilterError("clipping='adaptive' takes clip='joint': its count is of one vector an example")
    gain = filter.gain if isinstance(filter, DiSK) else None
    if isinstance(gain, AdaptiveGain):
        counts_on_noise = gain.noise_var is None
    else:
        counts_on_noise = gain == "adaptive" or (gain is None and isinstance(filter.start(), KnowsNoise))
    if counts_on_noise:
        raise FilterError(
            f"{filter!r} counts on noise that stays as it is, and with clipping='adaptive' it changes with the "
            "threshold; use a filter with a constant gain, or another clipping"
        )


def check_evaluations(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer insists on a closure. One that calls it again would need noise for each evaluation."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return False
    group = optimizer.param_groups[0]
    if group.get("max_iter", 1) != 1 or group.get("line_search_fn") is not None:
        raise GradientError(
            f"{type(optimizer).__name__} would evaluate the loss several times a step, each at a privacy cost of its "
            "own; use max_iter=1 and line_search_fn=None"
        )
    return True
