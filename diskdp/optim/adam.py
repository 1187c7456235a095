"""Adam whose second moment leaves out the privacy noise that is known to be in it.

Assumes that ``p.grad`` is a filtered privatised gradient, as `privatize` leaves it, with noise of a known variance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diskdp.errors import OptimizerError
from diskdp.filters import Filter, NoFilter
from diskdp.optim.variance import WHITE, NoiseVariance, noise_std
from diskdp.plan import Plan

_SAME = 1e-9  # relative: one formula computed twice


class NoiseAwareAdam(Optimizer):
    """Adam or AdamW along filtered noised gradients g̃_t, t = 1, 2, ..., coordinate by coordinate:

        m_t = β₁ m_{t-1} + (1-β₁) g̃_t                     v_t = β₂ v_{t-1} + (1-β₂) g̃_t²
        n_t = β₂ n_{t-1} + (1-β₂) s² ν_{t-1}               ν: `NoiseVariance` of the filter, s: noise_std
        m̂, v̂, n̂ = m_t / (1-β₁^t), v_t / (1-β₂^t), n_t / (1-β₂^t)
        x ← x - lr m̂ / (√max(v̂ - n̂, floor · n̂) + eps)

    n̂ weighs the noise's variance of each past step exactly as v̂ weighs that step's square, so E[v̂ - n̂] is the second
    moment of the filtered gradients without noise, as far as they and the noise in them are uncorrelated
    (`docs/optimizers.md` says how far). ``floor``, in (0, 1], is a share of the noise itself: no coordinate is taken to
    have less, so no step is longer than √(1 + 1/floor) times that of Adam on the same gradients. Without noise this is
    torch's Adam.

    ``weight_decay`` is AdamW's (x ← x - lr weight_decay x) or, with ``decoupled=False``, added to the gradient.
    ``noise_std`` is `diskdp.optim.noise_std(plan, filter)`, and ``filter`` the one that `privatize` gets. For noise
    that is correlated between steps give its ``autocovariance`` in units of noise_std², or, for any linear filter,
    ``variances``: ν of each step. All of it is computed from outputs and public settings: it costs no privacy.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = NoiseAwareAdam([weight], lr=0.1, noise_std=3.0, floor=0.04, eps=0.0)
    >>> weight.grad = torch.tensor([5.0, 0.6])
    >>> optimizer.step()
    >>> weight.tolist()  # 5/√(25 - 9) and .6/√(.04 · 9), each times lr
    [0.875, 0.8999999761581421]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        noise_std: float,
        filter: Filter = NoFilter(),  # noqa: B008  (a frozen value)
        autocovariance: Sequence[float] = WHITE,
        variances: Sequence[float] | None = None,
        floor: float = 0.1,
        decoupled: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "noise_std": noise_std,
            "floor": floor,
            "decoupled": decoupled,
        }
        self.filter = filter
        self._given = None if variances is None else _checked_variances(variances)
        self._variance = None if variances is not None else NoiseVariance(filter, autocovariance)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def check_fits(self, plan: Plan, filter: Filter) -> None:
        """Raise OptimizerError unless the noise subtracted is that of this plan under this filter.

        >>> plan = Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-5)
        >>> NoiseAwareAdam([torch.nn.Parameter(torch.ones(1))], noise_std=0.1).check_fits(plan, NoFilter())
        Traceback (most recent call last):
        diskdp.errors.OptimizerError: noise_std=0.1, but the plan adds 0.2: use diskdp.optim.noise_std(plan, filter)
        """
        expected = noise_std(plan, filter)
        for group in self.param_groups:
            if not math.isclose(group["noise_std"], expected, rel_tol=_SAME):
                raise OptimizerError(
                    f"noise_std={group['noise_std']:g}, but the plan adds {expected:g}: use "
                    "diskdp.optim.noise_std(plan, filter)"
                )
        if self._given is None and self.filter != filter:
            raise OptimizerError(
                f"the optimizer subtracts the noise that {self.filter!r} lets through, but the gradients are filtered "
                f"by {filter!r}: give both the same filter"
            )
        if self._given is not None and len(self._given) < plan.steps:
            raise OptimizerError(f"variances has {len(self._given)} steps, the plan {plan.steps}: give one a step")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step along ``p.grad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: defaultdict[tuple[int, float], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, noise=0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                alike[state["step"], state["noise"]].append(parameter)
            for (step, noise), parameters in alike.items():
                self._move(group, step, noise, parameters)
        return loss

    def _move(self, group: dict[str, Any], step: int, noise: float, parameters: list[Tensor]) -> None:
        """Parameters that have all had ``step`` steps; ``noise`` is n_t before this one."""
        lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
        noise = beta2 * noise + (1 - beta2) * group["noise_std"] ** 2 * self._variance_at(step)
        step += 1
        states = [self.state[p] for p in parameters]
        for state in states:
            state["step"], state["noise"] = step, noise
        gradients = [p.grad for p in parameters if p.grad is not None]
        if decay and group["decoupled"]:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        known = noise / (1 - beta2**step)
        lengths = torch._foreach_div(squares, 1 - beta2**step)
        torch._foreach_sub_(lengths, known)
        torch._foreach_clamp_min_(lengths, group["floor"] * known)
        torch._foreach_sqrt_(lengths)
        torch._foreach_add_(lengths, group["eps"])
        torch._foreach_addcdiv_(parameters, averages, lengths, -lr / (1 - beta1**step))

    def _variance_at(self, step: int) -> float:
        if self._variance is not None:
            return self._variance(step)
        assert self._given is not None
        if step >= len(self._given):
            raise OptimizerError(f"variances has {len(self._given)} steps, and this is step {step}: give one a step")
        return self._given[step]


def _check_group(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    checks = {
        "lr": 0 <= float(group["lr"]) < math.inf,
        "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
        "eps": 0 <= group["eps"] < math.inf,
        "weight_decay": 0 <= group["weight_decay"] < math.inf,
        "noise_std": 0 <= group["noise_std"] < math.inf,
        "floor": 0 < group["floor"] <= 1,
    }
    for name, fine in checks.items():
        if not fine:
            bounds = {"betas": "lie in [0, 1)", "floor": "lie in (0, 1], a share of the noise"}
            raise OptimizerError(f"{name}={group[name]} must {bounds.get(name, 'be finite and not negative')}")
    if group["eps"] == 0 and group["noise_std"] == 0:
        raise OptimizerError("eps=0 and noise_std=0: nothing would bound the steps; give one of the two")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise OptimizerError(
                f"a parameter of {parameter.dtype}: what is left of v_t after the noise is taken off is lost in it; "
                "keep what trains in float32 and compute under torch.autocast"
            )


def _checked_variances(variances: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(v) for v in variances)
    if not values or not all(0 <= v < math.inf for v in values):
        raise OptimizerError("variances must be finite, not negative, one a step, in units of noise_std²")
    return values
