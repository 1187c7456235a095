"""The privacy plan: everything that decides the guarantee, checked and resolved once, then frozen.

Assumes that the dataset's size is public. Speed settings have no place here: they change nothing spent.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from diskdp import accounting
from diskdp.errors import NotPrivateWarning, PlanError, WeakDeltaWarning

_FORMAT = "diskdp-plan/1"
# Machines round differently: two ways of computing the same epsilon differed by up to 3e-7 of it.
_EPSILON_TOLERANCE = 1e-5


@dataclass(frozen=True, init=False)
class Plan:
    """A privacy budget and the training that it pays for.

    Give exactly one of `epsilon` and `noise_multiplier`, and exactly one of `epochs` and `steps`; afterwards
    all four are numbers. From epsilon the smallest sufficient noise multiplier is found; if the noise
    multiplier is given instead, `plan.epsilon` is what the run will spend.

    `batch_size` is the *expected* batch size: every example joins each batch independently, with probability
    batch_size / dataset_size, and sums are divided by batch_size, however many came. With batch_size equal to
    dataset_size every batch is the whole dataset. `noise_multiplier` is the standard deviation of the noise
    over what one record can contribute.

    `noise_multiplier=0` or `epsilon=math.inf` turns privacy off, with a warning; only without noise may
    `max_grad_norm` be `math.inf`, which turns clipping off.

    >>> plan = Plan(dataset_size=60_000, batch_size=2_000, epochs=20, epsilon=3.0, delta=1e-5)
    >>> plan.steps, round(plan.noise_multiplier, 3)
    (600, 1.382)
    >>> plan.epsilon_after(300) < plan.epsilon_after(600) <= plan.epsilon
    True
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    dataset_size: int
    batch_size: int
    epochs: float
    steps: int
    epsilon: float
    noise_multiplier: float
    delta: float
    max_grad_norm: float
    clipping: str
    sampling: str
    adjacency: str
    accountant: str
    noise: str
    unit: str

    def __init__(
        self,
        *,
        dataset_size: int,
        batch_size: int,
        delta: float,
        epochs: float | None = None,
        steps: int | None = None,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 1.0,
        clipping: str = "flat",
        sampling: str = "poisson",
        adjacency: str = "add-remove",
        accountant: str = "pld",
        noise: str = "gaussian",
        unit: str = "example",
    ) -> None:
        accounting.require_built(
            clipping=clipping, sampling=sampling, adjacency=adjacency, accountant=accountant, noise=noise
        )
        dataset_size = _count("dataset_size", dataset_size)
        batch_size = _count("batch_size", batch_size)
        if batch_size > dataset_size:
            raise PlanError(f"batch_size={batch_size} is larger than dataset_size={dataset_size}; lower it")
        delta = _number("delta", delta)
        if not 0 < delta < 1:
            raise PlanError(f"delta must be strictly between 0 and 1, got {delta}; use less than 1/dataset_size")
        if not isinstance(unit, str) or not unit.strip():
            raise PlanError("unit is empty; name what one record is, for instance 'example' or 'patient'")

        if epochs is not None and steps is None:
            epochs = _number("epochs", epochs)
            if not 0 < epochs < math.inf:
                raise PlanError(f"epochs must be positive and finite, got {epochs}")
            steps = _steps_in(epochs, dataset_size, batch_size)
        elif steps is not None and epochs is None:
            steps = _count("steps", steps)
            epochs = steps * batch_size / dataset_size
        else:
            raise PlanError(f"give exactly one of epochs and steps, got epochs={epochs} and steps={steps}")

        sample_rate = batch_size / dataset_size
        if epsilon is not None and noise_multiplier is None:
            epsilon = _number("epsilon", epsilon)
            if not epsilon > 0:
                raise PlanError(f"epsilon must be positive, got {epsilon}; math.inf turns privacy off")
            noise_multiplier = accounting.calibrate(epsilon, sample_rate, steps, delta, accountant)
        elif noise_multiplier is not None and epsilon is None:
            noise_multiplier = _number("noise_multiplier", noise_multiplier)
            if not 0 <= noise_multiplier < math.inf:
                raise PlanError(
                    f"noise_multiplier must be finite and not negative, got {noise_multiplier}; 0 turns privacy off"
                )
            epsilon = accounting.epsilon(noise_multiplier, sample_rate, steps, delta, accountant)
        else:
            raise PlanError(
                "give exactly one of epsilon and noise_multiplier, "
                f"got epsilon={epsilon} and noise_multiplier={noise_multiplier}"
            )

        resolved: dict[str, Any] = {
            "dataset_size": dataset_size,
            "batch_size": batch_size,
            "epochs": epochs,
            "steps": steps,
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "delta": delta,
            "max_grad_norm": _checked_norm(max_grad_norm, clipping, noise_multiplier),
            "clipping": clipping,
            "sampling": sampling,
            "adjacency": adjacency,
            "accountant": accountant,
            "noise": noise,
            "unit": unit,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

        if not self.is_private:
            warnings.warn(
                f"nothing is private under this plan: noise_multiplier={noise_multiplier:g}, epsilon={epsilon:g}",
                NotPrivateWarning,
                stacklevel=2,
            )
        elif delta >= 1 / dataset_size:
            warnings.warn(
                f"delta={delta:g} is not below 1/dataset_size={1 / dataset_size:g}: "
                "publishing one record in full would satisfy it; choose a smaller delta",
                WeakDeltaWarning,
                stacklevel=2,
            )

    @property
    def sample_rate(self) -> float:
        """The probability that an example joins a batch: batch_size / dataset_size."""
        return self.batch_size / self.dataset_size

    @property
    def is_private(self) -> bool:
        """Whether the plan promises anything at all."""
        return self.noise_multiplier > 0 and math.isfinite(self.epsilon)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's JSON, by which checkpoints and batches know their plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def epsilon_after(self, steps: int) -> float:
        """The epsilon spent at the plan's delta by the first `steps` steps.

        >>> Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-3).epsilon_after(0)
        0.0
        """
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0:
            raise PlanError(f"steps must be a whole number, zero or more, got {steps!r}")
        return accounting.epsilon(self.noise_multiplier, self.sample_rate, int(steps), self.delta, self.accountant)

    def to_json(self) -> str:
        """The plan as one line of JSON; `from_json` gives an equal plan back, bit for bit."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if value == math.inf:
                values[name] = "inf"  # JSON has no infinity
        return json.dumps({"format": _FORMAT, **values}, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, after checking that its noise is still enough for its epsilon.

        >>> Plan.from_json('{"format": "diskdp-plan/9"}')
        Traceback (most recent call last):
        diskdp.errors.PlanError: this plan is of format 'diskdp-plan/9'; this version reads 'diskdp-plan/1'
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise PlanError(f"this is not a plan: {error}") from None
        if not isinstance(values, dict):
            raise PlanError("this is not a plan: a JSON object was expected")
        if (found := values.pop("format", None)) != _FORMAT:
            raise PlanError(f"this plan is of format {found!r}; this version reads {_FORMAT!r}")
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names.symmetric_difference(values)):
            raise PlanError(f"this plan has missing or unknown entries: {', '.join(wrong)}")
        values = {name: math.inf if value == "inf" else value for name, value in values.items()}
        epochs = _number("epochs", values.pop("epochs"))
        epsilon = _number("epsilon", values.pop("epsilon"))
        plan = cls(**values)
        if not 0 < epochs < math.inf or _steps_in(epochs, plan.dataset_size, plan.batch_size) != plan.steps:
            raise PlanError(f"this plan is inconsistent: {epochs:g} epochs are not {plan.steps} steps")
        if not plan.epsilon <= epsilon * (1 + _EPSILON_TOLERANCE):
            raise PlanError(
                f"this plan is inconsistent: it claims epsilon={epsilon:g} but noise_multiplier="
                f"{plan.noise_multiplier:g} spends {plan.epsilon:g}"
            )
        object.__setattr__(plan, "epochs", epochs)
        object.__setattr__(plan, "epsilon", epsilon)
        return plan


@dataclass(frozen=True)
class EpochSpend:
    """What has been spent once `steps` steps, `epochs` passes over the data, are done."""

    epochs: float
    steps: int
    epsilon: float


def epsilon_by_epoch(plan: Plan, max_rows: int = 50) -> list[EpochSpend]:
    """What is spent after each epoch, or every few if they exceed `max_rows`; the last row is the end.

    >>> plan = Plan(dataset_size=1000, batch_size=50, epochs=2.5, noise_multiplier=2.0, delta=1e-4)
    >>> [(row.epochs, row.steps, round(row.epsilon, 2)) for row in epsilon_by_epoch(plan)]
    [(1.0, 20, 0.4), (2.0, 40, 0.56), (2.5, 50, 0.63)]
    """
    whole = math.ceil(plan.epochs)
    stride = math.ceil(whole / max_rows)
    ends = [
        (float(epoch), _steps_in(epoch, plan.dataset_size, plan.batch_size)) for epoch in range(stride, whole, stride)
    ]
    ends = [(epoch, steps) for epoch, steps in ends if steps < plan.steps]
    return [EpochSpend(epoch, steps, plan.epsilon_after(steps)) for epoch, steps in [*ends, (plan.epochs, plan.steps)]]


def _steps_in(epochs: float, dataset_size: int, batch_size: int) -> int:
    """The steps that cover `epochs`: rounded up, unless whole but for rounding (1.1 * 1000 / 100 is 11)."""
    exact = epochs * dataset_size / batch_size
    nearest = round(exact)
    return max(1, nearest if abs(exact - nearest) <= 1e-9 * nearest else math.ceil(exact))


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise PlanError(f"{name} must be a whole number, got {value!r}")
    if value <= 0:
        raise PlanError(f"{name} must be positive, got {value}")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise PlanError(f"{name} must be a number, got {value!r}")
    return float(value)


def _checked_norm(value: Any, clipping: str, noise_multiplier: float) -> float:
    norm = _number("max_grad_norm", value)
    if not norm > 0:
        raise PlanError(f"max_grad_norm must be positive, got {norm}")
    if math.isinf(norm) and (noise_multiplier > 0 or clipping not in ("flat", "per-layer")):
        raise PlanError(
            "max_grad_norm=inf (no clipping) needs noise_multiplier=0 and clipping='flat' or 'per-layer'; "
            f"got noise_multiplier={noise_multiplier:g} and clipping={clipping!r}"
        )
    return norm
