"""How much noise budgets around a plan's would need, for training of other lengths or with other batches.

Assumes nothing beyond the plan: every value is a calibration like the plan's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from diskdp.errors import PlanError
from diskdp.plan import Plan, steps_in

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class TradeOff:
    """Noise multipliers, [budgets][values]; `None` where a budget cannot be kept, or the plan does not allow it.

    `by` says what `values` are: "steps", or "batch" for batch sizes, with the plan's epochs.
    """

    by: str
    values: tuple[int, ...]
    budgets: tuple[float, ...]
    noise_multipliers: tuple[tuple[float | None, ...], ...]


def trade_off(plan: Plan, by: str = "steps") -> TradeOff:
    """The noise for a quarter to four times the plan's epsilon, and of its steps or batch size.

    >>> plan = Plan(dataset_size=1000, batch_size=100, steps=40, epsilon=2.0, delta=1e-5)
    >>> table = trade_off(plan)
    >>> table.values, table.budgets
    ((10, 20, 40, 80, 160), (0.5, 1.0, 2.0, 4.0, 8.0))
    >>> table.noise_multipliers[2][2] == plan.noise_multiplier
    True
    """
    if by not in ("steps", "batch"):
        raise PlanError(f"a plan is explored by 'steps' or by 'batch', not by {by!r}")
    if not plan.is_private:
        raise PlanError("without privacy there is nothing to explore: give a finite epsilon and some noise")
    size = plan.steps if by == "steps" else plan.batch_size
    limit = math.inf if by == "steps" else min(plan.dataset_size, plan.max_batch_size or plan.dataset_size)
    values = sorted({max(1, round(factor * size)) for factor in _FACTORS if factor * size <= limit})
    budgets = tuple(factor * plan.epsilon for factor in _FACTORS)
    return TradeOff(
        by,
        tuple(values),
        budgets,
        tuple(tuple(_noise(plan, by, value, epsilon) for value in values) for epsilon in budgets),
    )


def _noise(plan: Plan, by: str, value: int, epsilon: float) -> float | None:
    mechanism, steps = plan.mechanism, value
    if by == "batch":
        mechanism = replace(mechanism, batch_size=value)
        steps = steps_in(plan.epochs, mechanism)
    try:
        return mechanism.calibrate(epsilon, steps, plan.delta)
    except PlanError:
        return None
