"""The privacy plan: everything that decides the guarantee, checked and resolved once, then frozen.

Assumes that the dataset's size is public. Speed settings have no place here: they change nothing spent.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from diskdp import accounting
from diskdp.accounting import Mechanism
from diskdp.accounting.solve import Parts, largest
from diskdp.errors import NotPrivateWarning, PlanError, TruncationWarning, WeakDeltaWarning

_FORMAT = "diskdp-plan/2"
# Machines round differently: two ways of computing the same epsilon differed by up to 3e-7 of it.
_EPSILON_TOLERANCE = 1e-5
_MOST_STEPS = 10**7  # where a search for the number of steps ends
_ROOMY = 6  # standard deviations of the batch size that a cap should leave


@dataclass(frozen=True, init=False)
class Plan:
    """A privacy budget and the training that it pays for.

    Of noise (`epsilon` or `noise_multiplier`), length (`epochs` or `steps`) and `batch_size`, all are numbers
    afterwards, and one may be left open. Give exactly one of `epsilon` and `noise_multiplier`, and the other is
    found: from epsilon the smallest sufficient noise multiplier, from the noise multiplier what the run will spend.
    Give both, and leave out epochs and steps for the most steps that fit, or `batch_size` for the largest that does.

    `sampling` says what a batch is; sums are always divided by `batch_size`, however many came.
    - `"poisson"`: every example joins independently with probability batch_size / dataset_size, so that batch_size
      is the expected size; equal to dataset_size, every batch is the whole dataset.
    - `"truncated-poisson"`: the same, but of more than `max_batch_size` a random subset of that size is kept.
    - `"fixed-size"`: exactly batch_size examples, drawn without replacement for each batch.
    - `"shuffled"`: each epoch a fresh permutation, cut into batches; no amplification is claimed.

    `adjacency` says what neighbours are: `"add-remove"` one example, `"zero-out"` (an example that contributes
    nothing in the other's place) or `"replace-one"`; an example is `examples_per_unit` of them if a unit, such as a
    person, may contribute several. `noise_multiplier` is the standard deviation of the noise over what one example
    can contribute, always. `docs/accounting.md` has the table of what goes together.

    `noise_multiplier=0` or `epsilon=math.inf` turns privacy off, with a warning; only without noise may
    `max_grad_norm` be `math.inf`, which turns clipping off. With `clipping="adaptive"` it is where the threshold
    begins, which then follows the `target_quantile` of the norms, by a count with noise of `quantile_noise` examples in
    the same release: at no further cost in epsilon, and with a little more noise on the gradients for it.

    `paper_accounting=True` accounts batches of a fixed size
    as if they were Poisson ones, as papers do: no guarantee, and called none everywhere.

    >>> plan = Plan(dataset_size=60_000, batch_size=2_000, epochs=20, epsilon=3.0, delta=1e-5)
    >>> plan.steps, round(plan.noise_multiplier, 3)
    (600, 1.382)
    >>> plan.epsilon_after(300) < plan.epsilon_after(600) <= plan.epsilon
    True
    >>> Plan(dataset_size=60_000, batch_size=2_000, epsilon=3.0, noise_multiplier=1.5, delta=1e-5).steps
    757
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
    max_batch_size: int | None
    examples_per_unit: int
    paper_accounting: bool
    target_quantile: float | None
    quantile_noise: float | None

    def __init__(
        self,
        *,
        dataset_size: int,
        batch_size: int | None = None,
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
        max_batch_size: int | None = None,
        examples_per_unit: int = 1,
        paper_accounting: bool = False,
        target_quantile: float | None = None,
        quantile_noise: float | None = None,
    ) -> None:
        accounting.require_built(
            clipping=clipping, sampling=sampling, adjacency=adjacency, accountant=accountant, noise=noise
        )
        dataset_size = _count("dataset_size", dataset_size)
        delta = _number("delta", delta)
        if not 0 < delta < 1:
            raise PlanError(f"delta must be strictly between 0 and 1, got {delta}; use less than 1/dataset_size")
        if not isinstance(unit, str) or not unit.strip():
            raise PlanError("unit is empty; name what one record is, for instance 'example' or 'patient'")
        if not isinstance(paper_accounting, bool):
            raise PlanError(f"paper_accounting must be True or False, got {paper_accounting!r}")
        if epochs is not None:
            epochs = _number("epochs", epochs)
            if not 0 < epochs < math.inf:
                raise PlanError(f"epochs must be positive and finite, got {epochs}")
        if steps is not None:
            steps = _count("steps", steps)
        if epsilon is not None:
            epsilon = _number("epsilon", epsilon)
            if not epsilon > 0:
                raise PlanError(f"epsilon must be positive, got {epsilon}; math.inf turns privacy off")
        if noise_multiplier is not None:
            noise_multiplier = _number("noise_multiplier", noise_multiplier)
            if not 0 <= noise_multiplier < math.inf:
                raise PlanError(
                    f"noise_multiplier must be finite and not negative, got {noise_multiplier}; 0 turns privacy off"
                )
        if batch_size is not None:
            batch_size = _count("batch_size", batch_size)
        _require_solvable(batch_size, epochs, steps, epsilon, noise_multiplier)

        def mechanism(batch_size: int) -> Mechanism:
            return Mechanism(
                sampling=sampling,
                adjacency=adjacency,
                dataset_size=dataset_size,
                batch_size=batch_size,
                max_batch_size=None if max_batch_size is None else _count("max_batch_size", max_batch_size),
                examples_per_unit=_count("examples_per_unit", examples_per_unit),
                accountant=accountant,
                paper_accounting=paper_accounting,
            )

        if batch_size is None:
            assert epsilon is not None
            assert noise_multiplier is not None
            batch_size = _largest_batch(
                mechanism, dataset_size, max_batch_size, epochs, steps, epsilon, noise_multiplier, delta
            )
        chosen = mechanism(batch_size)
        if epochs is not None:
            steps = steps_in(epochs, chosen)
        elif steps is None:
            assert epsilon is not None
            assert noise_multiplier is not None
            steps = _most_steps(chosen, noise_multiplier, epsilon, delta)
        if epochs is None:
            epochs = _epochs_of(steps, chosen)
        if noise_multiplier is None:
            assert epsilon is not None
            noise_multiplier = chosen.calibrate(epsilon, steps, delta)
        elif epsilon is None:
            epsilon = chosen.epsilon(noise_multiplier, steps, delta)
        assert epsilon is not None

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
            "max_batch_size": chosen.max_batch_size,
            "examples_per_unit": chosen.examples_per_unit,
            "paper_accounting": paper_accounting,
            **_quantile(clipping, noise, noise_multiplier, batch_size, target_quantile, quantile_noise),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

        if not self.is_private:
            warnings.warn(
                f"nothing is private under this plan: noise_multiplier={noise_multiplier:g}, epsilon={epsilon:g}",
                NotPrivateWarning,
                stacklevel=2,
            )
        elif paper_accounting:
            warnings.warn(
                "paper_accounting=True: batches of a fixed size are accounted as Poisson ones, so epsilon="
                f"{epsilon:g} is not a guarantee; leave it out and use adjacency='replace-one' for one",
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
        if (cap := self.max_batch_size) is not None and cap < dataset_size:
            roomy = math.ceil(batch_size + _ROOMY * math.sqrt(batch_size * (1 - self.sample_rate)))
            if cap < roomy:
                warnings.warn(
                    f"max_batch_size={cap} is within {_ROOMY} standard deviations of the expected batch size "
                    f"{batch_size}: truncation then costs privacy; raise it to {min(roomy, dataset_size)} or lower "
                    "batch_size",
                    TruncationWarning,
                    stacklevel=2,
                )

    @property
    def sample_rate(self) -> float:
        """The probability that an example joins a batch, or the share of them in one: batch_size / dataset_size."""
        return self.batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches that cover the data once: ceil(dataset_size / batch_size)."""
        return self.mechanism.steps_per_epoch

    @property
    def mechanism(self) -> Mechanism:
        """What decides the accounting, but for noise and length."""
        return Mechanism(
            sampling=self.sampling,
            adjacency=self.adjacency,
            dataset_size=self.dataset_size,
            batch_size=self.batch_size,
            max_batch_size=self.max_batch_size,
            examples_per_unit=self.examples_per_unit,
            accountant=self.accountant,
            paper_accounting=self.paper_accounting,
        )

    @property
    def is_private(self) -> bool:
        """Whether there is noise and a finite epsilon."""
        return self.noise_multiplier > 0 and math.isfinite(self.epsilon)

    @property
    def is_guarantee(self) -> bool:
        """Whether epsilon bounds what the plan's batches spend: not without noise, nor with `paper_accounting`."""
        return self.is_private and not self.paper_accounting

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's JSON, by which checkpoints and batches know their plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def epsilon_after(self, steps: int) -> float:
        """The epsilon spent at the plan's delta by the first `steps` steps.

        >>> Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-3).epsilon_after(0)
        0.0
        """
        return self.mechanism.epsilon(self.noise_multiplier, _natural("steps", steps), self.delta)

    def delta_after(self, steps: int, epsilon: float) -> float:
        """The delta spent at another epsilon by the first `steps` steps.

        >>> plan = Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-3)
        >>> plan.delta_after(5, plan.epsilon) <= 1.0001e-3 < plan.delta_after(5, plan.epsilon / 2)
        True
        """
        return self.mechanism.delta(self.noise_multiplier, _natural("steps", steps), _number("epsilon", epsilon))

    def epsilon_of(self, releases: Mapping[int, int]) -> float:
        """The epsilon spent at the plan's delta when `releases[r]` samples were each released r times.

        That is, with independent noise on the same sample, as when a step is repeated whose sum came out different.

        >>> plan = Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-3)
        >>> plan.epsilon_of({1: 5}) == plan.epsilon_after(5) < plan.epsilon_of({1: 4, 2: 1})
        True
        """
        counts = {
            _count("releases of a sample", times): _natural("samples", count) for times, count in releases.items()
        }
        return self.mechanism.epsilon_of(self.noise_multiplier, counts, self.delta)

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
        diskdp.errors.PlanError: this plan is of format 'diskdp-plan/9'; this version reads 'diskdp-plan/2'
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
        _count("batch_size", values["batch_size"])  # what is missing is not solved for: a plan on disk is complete
        _count("steps", values["steps"])
        _number("noise_multiplier", values["noise_multiplier"])
        epochs = _number("epochs", values.pop("epochs"))
        epsilon = _number("epsilon", values.pop("epsilon"))
        plan = cls(**values)
        if not 0 < epochs < math.inf or steps_in(epochs, plan.mechanism) != plan.steps:
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
    ends = [(float(epoch), steps_in(epoch, plan.mechanism)) for epoch in range(stride, whole, stride)]
    ends = [(epoch, steps) for epoch, steps in ends if steps < plan.steps]
    return [EpochSpend(epoch, steps, plan.epsilon_after(steps)) for epoch, steps in [*ends, (plan.epochs, plan.steps)]]


def _require_solvable(
    batch_size: int | None,
    epochs: float | None,
    steps: int | None,
    epsilon: float | None,
    noise_multiplier: float | None,
) -> None:
    """Exactly one of noise, length and batch size is open, and nothing is said twice."""
    open_length = epochs is None and steps is None
    if epochs is not None and steps is not None:
        raise PlanError(f"give exactly one of epochs and steps, got epochs={epochs} and steps={steps}")
    if epsilon is None and noise_multiplier is None:
        raise PlanError("give exactly one of epsilon and noise_multiplier; got neither")
    if epsilon is None or noise_multiplier is None:
        if open_length:
            raise PlanError(
                "give exactly one of epochs and steps; both may be left out only if epsilon and noise_multiplier "
                "are both given, for the most steps that fit"
            )
        if batch_size is None:
            raise PlanError(
                "give batch_size; it may be left out only if epsilon and noise_multiplier are both given, "
                "for the largest batch that fits"
            )
    elif open_length and batch_size is None:
        raise PlanError("epsilon and noise_multiplier do not fix both length and batch_size; give one of the two")
    elif not open_length and batch_size is not None:
        raise PlanError(
            "give exactly one of epsilon and noise_multiplier, or leave out batch_size, or epochs and steps: "
            f"with all given, nothing is left to solve for (epsilon={epsilon:g}, noise_multiplier="
            f"{noise_multiplier:g})"
        )
    elif noise_multiplier == 0 or math.isinf(epsilon):
        raise PlanError(
            "without privacy nothing limits the steps or the batch; give epochs or steps, and batch_size, "
            f"got epsilon={epsilon:g} and noise_multiplier={noise_multiplier:g}"
        )


def _most_steps(mechanism: Mechanism, noise_multiplier: float, epsilon: float, delta: float) -> int:
    steps = mechanism.largest_steps(noise_multiplier, epsilon, delta, _MOST_STEPS)
    if steps is None:
        raise PlanError(
            f"not even one step with noise_multiplier={noise_multiplier:g} stays within epsilon={epsilon:g} at "
            f"delta={delta:g}; raise either, or lower batch_size"
        )
    if steps == _MOST_STEPS:
        raise PlanError(
            f"more than {_MOST_STEPS:,} steps with noise_multiplier={noise_multiplier:g} stay within "
            f"epsilon={epsilon:g}; give epochs or steps, and leave out one of the two"
        )
    return steps


def _largest_batch(
    mechanism: Callable[[int], Mechanism],
    dataset_size: int,
    max_batch_size: int | None,
    epochs: float | None,
    steps: int | None,
    epsilon: float,
    noise_multiplier: float,
    delta: float,
) -> int:
    """At fixed epochs a larger batch may mean a step less: first the number of steps is settled, then the batch."""

    def length(chosen: Mechanism) -> int:
        return steps_in(epochs, chosen) if epochs is not None else steps or 0

    def parts(batch_size: int) -> Parts:
        chosen = mechanism(batch_size)
        return chosen.parts(noise_multiplier, {1: length(chosen)})

    def smallest_alike(batch_size: int) -> int:
        """The smallest batch with as many steps."""
        if epochs is None:
            return batch_size
        goal, low = length(mechanism(batch_size)), 1
        while low < batch_size:
            middle = (low + batch_size) // 2
            low, batch_size = (low, middle) if length(mechanism(middle)) <= goal else (middle + 1, batch_size)
        return low

    accountant = mechanism(1).accountant
    limit = dataset_size if max_batch_size is None else min(dataset_size, max_batch_size)
    batch_size = largest(lambda size: parts(smallest_alike(size)), 1, limit, epsilon, delta, accountant)
    if batch_size is not None and (first := smallest_alike(batch_size)) < batch_size:
        batch_size = largest(parts, first, batch_size, epsilon, delta, accountant)
    if batch_size is None:
        raise PlanError(
            f"not even batch_size=1 with noise_multiplier={noise_multiplier:g} stays within epsilon={epsilon:g} at "
            f"delta={delta:g}; raise either, or take fewer steps"
        )
    return batch_size


def steps_in(epochs: float, mechanism: Mechanism) -> int:
    """The steps that cover `epochs`: rounded up, unless whole but for rounding (1.1 * 1000 / 100 is 11)."""
    if mechanism.sampling == "shuffled":
        exact = epochs * mechanism.steps_per_epoch
    else:
        exact = epochs * mechanism.dataset_size / mechanism.batch_size
    nearest = round(exact)
    return max(1, nearest if abs(exact - nearest) <= 1e-9 * nearest else math.ceil(exact))


def _epochs_of(steps: int, mechanism: Mechanism) -> float:
    if mechanism.sampling == "shuffled":
        return steps / mechanism.steps_per_epoch
    return steps * mechanism.batch_size / mechanism.dataset_size


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise PlanError(f"{name} must be a whole number, got {value!r}")
    if value <= 0:
        raise PlanError(f"{name} must be positive, got {value}")
    return int(value)


def _natural(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise PlanError(f"{name} must be a whole number, zero or more, got {value!r}")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise PlanError(f"{name} must be a number, got {value!r}")
    return float(value)


def _quantile(
    clipping: str, noise: str, sigma: float, batch_size: int, target: float | None, count_noise: float | None
) -> dict[str, float | None]:
    """What adaptive clipping aims at, and the noise on its count, in examples: B/20 unless given, or 1.2 σ if more.

    At 1.2 σ the noise on the gradients is 10% larger than σ.
    """
    if clipping != "adaptive":
        if target is not None or count_noise is not None:
            raise PlanError(
                f"target_quantile and quantile_noise have no meaning for clipping={clipping!r}; leave them out, or use "
                "clipping='adaptive'"
            )
        return {"target_quantile": None, "quantile_noise": None}
    if noise == "discrete":
        raise PlanError("clipping='adaptive' has no grid that holds for every threshold; use noise='secure'")
    target = 0.5 if target is None else _number("target_quantile", target)
    if not 0 < target < 1:
        raise PlanError(f"target_quantile={target} must be strictly between 0 and 1; 0.5 is the median of the norms")
    count_noise = max(batch_size / 20, 1.2 * sigma) if count_noise is None else _number("quantile_noise", count_noise)
    if not sigma / 2 < count_noise < math.inf:
        raise PlanError(
            f"quantile_noise={count_noise:g} must be finite and more than half of the noise multiplier "
            f"({sigma / 2:g}): the count would cost more than the plan pays for; raise it, or leave it out"
        )
    return {"target_quantile": target, "quantile_noise": count_noise}


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
