"""The two-world audit: what single and consecutive steps release about one record, against the plan's claim.

Assumes independent draws (`canaries`); findings that assume more say so. No finding looks at anything but what the
optimizer is handed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from diskdp.audit.bounds import Array, Event, quietest, scale_below, telling_events
from diskdp.audit.canaries import (
    ABSENT,
    ALONE,
    ALTERNATING,
    FLIPPING,
    OPPOSITE,
    PRESENT,
    STEADY,
    TENSORS,
    Draws,
    Privatize,
    Progress,
    draw,
)
from diskdp.audit.claims import Claim, fixed_size_epsilon
from diskdp.audit.results import Finding, Scenario, StepAudit
from diskdp.errors import AuditError
from diskdp.filters import DiSK, Filter, NoFilter
from diskdp.plan import Plan
from diskdp.private import privatize as diskdp_privatize

_KINDS = {STEADY: "steady", FLIPPING: "flipping", ALTERNATING: "alternating"}
_LEAST_OF_A_KIND = 60  # canaries in each world, below which a kind is not tested by itself
_LONG = 4  # steps; beyond, statistics are over all steps and not of each

_PLAIN, _NORMAL = "nothing", "normal noise"
_POISSON = "normal noise, Poisson sampling"
_FAMILY = "for epsilon at this delta, a plan with less noise"


@dataclass(frozen=True)
class _Configuration:
    name: str
    plan: Plan
    filter: Filter
    steps: int
    microbatch_size: int | None


def audit_step(
    plan: Plan | None = None,
    *,
    filter: Filter | None = None,
    steps: int | None = None,
    draws: int = 4096,
    confidence: float = 0.999,
    privatize: Privatize = diskdp_privatize,
    microbatch_size: int | Literal["both"] | None = "both",
    seed: int | None = None,
    progress: Progress = lambda done, of: None,
) -> StepAudit:
    """Audit what steps of ``privatize`` release, by ``draws`` draws of each of two worlds.

    Without a ``plan``, a battery of six configurations: whole batches and microbatches, full and Poisson batches, each
    kind of noise, look-ahead with joint and with separate clipping, an epoch of 100 steps. With one, its first
    ``steps`` (by default at most 3 of full batches, at most 100 of others) with ``filter`` (by default none), in whole
    batches and in three microbatches unless ``microbatch_size`` says which. ``draws`` are at least so many: trainings
    come whole. ``seed`` makes it repeatable, the training's noise included.

    The audit passes if no lower bound exceeds the claim. An honest library passes with probability ``confidence``.

    >>> plan = Plan(dataset_size=500, batch_size=500, steps=2, noise_multiplier=2.0, delta=1e-5)
    >>> audit = audit_step(plan, draws=500, microbatch_size=None, seed=0)
    >>> audit.passed, round(audit.epsilon_claimed, 2), 1 < audit.epsilon_lower < audit.epsilon_claimed
    (True, 2.94, True)
    """
    started = time.perf_counter()
    if not 0.5 <= confidence < 1:
        raise AuditError(f"confidence={confidence} must lie in [0.5, 1), for instance 0.999")
    if draws < 200:
        raise AuditError(f"draws={draws}: with fewer than 200 of each world nothing could be found")
    if plan is None:
        if steps is not None:
            raise AuditError("steps: give a plan, of whose first steps they are the number")
        configurations = _battery(filter, microbatch_size)
    else:
        configurations = _of_plan(plan, filter or NoFilter(), steps, microbatch_size)
    error = (1 - confidence) / len(configurations)
    total = len(configurations)
    generator = np.random.default_rng(seed)
    scenarios = []
    for number, configuration in enumerate(configurations):
        began = time.perf_counter()
        released = draw(
            configuration.plan,
            configuration.filter,
            configuration.steps,
            draws,
            configuration.microbatch_size,
            privatize,
            generator,
            None if seed is None else seed + 1000 * number,
            lambda done, of, number=number: progress(number * 100 + 100 * done // of, total * 100),  # type: ignore[misc]
        )
        scenarios.append(_examined(configuration, released, error, began))
    worst = max(scenarios, key=lambda s: (not s.passed, s.epsilon_lower / s.epsilon_claimed))
    return StepAudit(
        epsilon_lower=worst.epsilon_lower,
        epsilon_claimed=worst.epsilon_claimed,
        delta=worst.delta,
        confidence=confidence,
        passed=all(scenario.passed for scenario in scenarios),
        scenarios=tuple(scenarios),
        seconds=time.perf_counter() - started,
    )


def _several(plan: Plan) -> int:
    """A size that makes three microbatches of the expected batch, four of most larger ones."""
    return max(1, math.ceil(plan.batch_size / 3))


def _battery(filter: Filter | None, microbatch_size: int | Literal["both"] | None) -> list[_Configuration]:
    """One configuration for each way in which the library handles a step."""
    # thresholds other than 1: noise that forgot one of them would otherwise look right
    full = Plan(dataset_size=4096, batch_size=4096, steps=3, noise_multiplier=1.0, delta=1e-5, max_grad_norm=2.5)
    sampled = Plan(
        dataset_size=8192,
        batch_size=4096,
        steps=2,
        noise_multiplier=1.0,
        delta=1e-5,
        clipping="automatic",
        max_grad_norm=0.4,
        noise="secure",
    )
    grid = Plan(
        dataset_size=600,
        batch_size=600,
        steps=2,
        noise_multiplier=1.0,
        delta=1e-5,
        max_grad_norm=1.3,
        noise="discrete",
    )
    epoch = Plan(dataset_size=8200, batch_size=82, steps=100, noise_multiplier=0.8, delta=1e-5, max_grad_norm=3.0)

    def made(name: str, plan: Plan, own: Filter, whole: bool) -> _Configuration:
        size = (None if whole else _several(plan)) if microbatch_size == "both" else microbatch_size
        return _Configuration(name, plan, own, plan.steps, size)

    plain = filter or NoFilter()
    chosen = [
        made("full batches, whole", full, plain, True),
        made("sampled, microbatches", sampled, plain, False),
        made("an epoch of 100 steps", epoch, plain, False),
        made("on a grid, microbatches", grid, plain, False),
    ]
    if filter is None:
        chosen += [
            made("look-ahead, c = 5, joint", full, DiSK(kappa=0.5, gamma=0.2), False),
            made("look-ahead, c = 5, separate", full, DiSK(kappa=0.5, gamma=0.2, clip="separate"), True),
        ]
    else:
        chosen.append(made("full batches, microbatches", full, filter, False))
    return chosen


def _of_plan(
    plan: Plan, filter: Filter, steps: int | None, microbatch_size: int | Literal["both"] | None
) -> list[_Configuration]:
    if not plan.is_private:
        raise AuditError("this plan claims nothing (no noise, or an infinite epsilon): there is nothing to audit")
    most = min(plan.steps, 3 if plan.sample_rate == 1 else 100)
    steps = most if steps is None else steps
    if not 1 <= steps <= plan.steps:
        raise AuditError(f"steps={steps}: the plan has {plan.steps}, so audit 1 to {plan.steps} of them")
    if plan.dataset_size < 8:
        raise AuditError(f"the plan is for {plan.dataset_size} records; an audit needs at least 8")
    sizes = {"whole batches": None, "microbatches": _several(plan)}
    if microbatch_size != "both":
        sizes = {"whole batches" if microbatch_size is None else "microbatches": microbatch_size}
    elif plan.batch_size < 3:
        del sizes["microbatches"]
    return [_Configuration(name, plan, filter, steps, size) for name, size in sizes.items()]


@dataclass(frozen=True)
class _Feature:
    """A number for each draw, of the records of one kind; what it can be compared with, and over how many steps."""

    name: str
    without: Array
    with_record: Array
    steps: int


def _examined(configuration: _Configuration, draws: Draws, error: float, began: float) -> Scenario:
    """All statistics of one configuration; false alarms of all together have probability at most ``error``."""
    plan, steps, claim = configuration.plan, configuration.steps, Claim(configuration.plan)
    features = _features(configuration, draws)
    share = error / 2 / max(1, len(features))  # half for events, half for what assumes more
    told = [(feature, telling_events(feature.without, feature.with_record, share)) for feature in features]
    fits = _noise_fits(configuration, claim, draws, features, error / 4)
    if plan.sampling == "poisson" and draws.crowd_size:
        fits += _sampling_fits(configuration, claim, draws, error / 4)
    shown = any(finding.broken for finding in fits)
    findings = [_of_events(configuration, claim, feature, events, not shown) for feature, events in told] + fits
    claimed = claim.epsilon(steps)
    lower = max(finding.epsilon_lower for finding in findings)
    if any(finding.broken for finding in findings):
        # an event may contradict the curve δ(ε) elsewhere than at the plan's δ: then this is as near as it gets
        lower = max(lower, math.nextafter(claimed, math.inf))
    tradeoff = [
        (event.unlikely, 1 - event.likely, float(event.reversed))
        for feature, events in told
        if feature.steps == steps
        for event in events
    ]
    return Scenario(
        name=configuration.name,
        plan=plan.to_json(),
        filter=repr(configuration.filter),
        steps=steps,
        microbatch_size=configuration.microbatch_size,
        draws=int(min(np.count_nonzero(draws.world == w) for w in (ABSENT, PRESENT))),
        epsilon_lower=lower,
        epsilon_claimed=claimed,
        delta=plan.delta,
        findings=tuple(findings),
        tradeoff=tuple(tradeoff),
        seconds=time.perf_counter() - began,
    )


# ---- Numbers that tell the worlds apart


def _features(configuration: _Configuration, draws: Draws) -> list[_Feature]:
    plan, steps = configuration.plan, configuration.steps
    other = OPPOSITE if plan.adjacency == "replace-one" else ABSENT
    last = steps - 1
    features: list[_Feature] = []

    def add(name: str, kind: int, covered: int, number: _Number) -> None:
        worlds = draws.of(other, kind if other == OPPOSITE else None), draws.of(PRESENT, kind)
        if min(len(world) for world in worlds) >= _LEAST_OF_A_KIND:
            features.append(_Feature(name, number(worlds[0]), number(worlds[1]), covered))

    for step in sorted({0, last}):
        add(f"steady canary, step {step + 1}", STEADY, 1, _Combination.of_step(steps, step))
    if steps > 1:
        add("steady canary, sum of the steps", STEADY, steps, _Combination.of_sum(steps))
        add("alternating canary, difference of two steps", ALTERNATING, 2, _Combination.of_difference(steps))
        add("flipping canary, last step", FLIPPING, 1, _Combination.of_step(steps, last))
    for p, tensor in enumerate(TENSORS):
        add(f"canary in {tensor} alone, last step", ALONE + p, 1, _Combination.of_tensor(steps, last, p))
    if plan.sample_rate < 1:
        ratio = _LikelihoodRatio(plan.sample_rate, plan.noise_multiplier)
        add("steady canary, likelihood ratio of the steps", STEADY, steps, ratio)
        if steps > 1:
            add("steady canary, largest of the steps", STEADY, steps, _Largest())
    if steps <= _LONG:
        for kind in (STEADY, ALTERNATING, FLIPPING):
            train = draws.of(other, kind if other == OPPOSITE else None)[::3], draws.of(PRESENT, kind)[::3]
            if min(len(world) for world in train) >= _LEAST_OF_A_KIND / 3:
                name = f"{_KINDS[kind]} canary, learned combination"
                add(name, kind, steps, _Combination.learned(*train))
    return features


class _Number:
    """A number from each draw, [draws, steps, tensors] -> [draws]."""

    def __call__(self, released: Array) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class _Combination(_Number):
    """A weighted sum over steps and tensors, of norm 1."""

    weights: Array

    def __call__(self, released: Array) -> Array:
        return np.einsum("dtp,tp->d", released, self.weights / np.linalg.norm(self.weights))

    @classmethod
    def of_step(cls, steps: int, step: int) -> _Combination:
        weights = np.zeros((steps, len(TENSORS)))
        weights[step] = 1.0
        return cls(weights)

    @classmethod
    def of_tensor(cls, steps: int, step: int, tensor: int) -> _Combination:
        weights = np.zeros((steps, len(TENSORS)))
        weights[step, tensor] = 1.0
        return cls(weights)

    @classmethod
    def of_sum(cls, steps: int) -> _Combination:
        return cls(np.ones((steps, len(TENSORS))))

    @classmethod
    def of_difference(cls, steps: int) -> _Combination:
        """Of the last two steps."""
        weights = np.zeros((steps, len(TENSORS)))
        weights[-1], weights[-2] = 1.0, -1.0
        return cls(weights)

    @classmethod
    def learned(cls, without: Array, with_record: Array) -> _Combination:
        """Fisher's discriminant: the best combination if the noise is normal, whatever its covariance."""
        shape = without.shape[1:]
        without, with_record = without.reshape(len(without), -1), with_record.reshape(len(with_record), -1)
        covariance = np.cov(without, rowvar=False)
        covariance += 1e-9 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        covariance += 1e-12 * np.eye(len(covariance))
        weights = np.linalg.solve(covariance, np.median(with_record, axis=0) - np.median(without, axis=0))
        return cls(weights.reshape(shape) / np.abs(weights).max() if np.any(weights) else np.ones(shape))


@dataclass(frozen=True)
class _LikelihoodRatio(_Number):
    """The best statistic for Poisson sampling: Σ_t log(1 - q + q exp((2 x_t - 1) / 2σ²)), of sums over tensors."""

    sample_rate: float
    noise_multiplier: float

    def __call__(self, released: Array) -> Array:
        x_DT = released.sum(2) / math.sqrt(released.shape[2])
        ratio = np.clip((2 * x_DT - 1) / (2 * self.noise_multiplier**2), -700, 700)
        return np.log1p(self.sample_rate * np.expm1(ratio)).sum(1)


class _Largest(_Number):
    def __call__(self, released: Array) -> Array:
        return released.sum(2).max(1) / math.sqrt(released.shape[2])


# ---- Findings


def _of_events(
    configuration: _Configuration, claim: Claim, feature: _Feature, events: Sequence[Event], transfer: bool
) -> Finding:
    """The strongest of a feature's events, or the one that contradicts the claimed curve most.

    ``transfer``: take a contradiction to the plan's δ, along the curves of plans with less noise. That takes a while,
    and is not needed where another finding says how much noise there is.
    """
    delta = configuration.plan.delta
    best = max(events, key=lambda event: event.epsilon(delta))
    detail, multiplier, lower = str(best), None, best.epsilon(delta)
    where = {event: at for event in events if (at := claim.broken_by(event, feature.steps)) is not None}
    if where:
        worst = max(where, key=lambda event: event.divergence(where[event]) - claim.delta(feature.steps, where[event]))
        at = where[worst]
        detail = (
            f"{worst}; so delta at epsilon {at:g} is at least {worst.divergence(at):.3g}, claimed is "
            f"{claim.delta(feature.steps, at):.3g}"
        )
        if transfer:
            multiplier = claim.noise_of(worst, at, feature.steps)
            lower = max(lower, claim.epsilon(feature.steps, multiplier))
    return Finding(
        scenario=configuration.name,
        statistic=feature.name,
        assumes=_PLAIN if multiplier is None else _FAMILY,
        draws=min(len(feature.without), len(feature.with_record)),
        steps=feature.steps,
        epsilon_lower=lower,
        epsilon_claimed=claim.epsilon(feature.steps),
        noise_multiplier=multiplier,
        broken=bool(where),
        detail=detail,
    )


def _noise_fits(
    configuration: _Configuration, claim: Claim, draws: Draws, features: Sequence[_Feature], error: float
) -> list[Finding]:
    """How much noise there is, from canaries that contribute nothing, and how far the others are moved.

    Bounds the noise multiplier from above: deviation of the noise over what a record contributes, which is never
    taken for less than the unit that gradients are clipped to.
    """
    plan, steps, sigma = configuration.plan, configuration.steps, configuration.plan.noise_multiplier
    null = draws.of(ABSENT)
    tensors = null.shape[2]
    per_layer = plan.clipping == "per-layer"
    groups: dict[str, tuple[list[str], list[Array]]] = {
        "noise, all": (["all"], [null]),
        "noise, quietest tensor": (list(TENSORS), [null[:, :, p] for p in range(tensors)]),
        "noise, quietest step": ([f"step {t + 1}" for t in range(steps)], [null[:, t] for t in range(steps)]),
        "noise, difference of tensors": (
            [f"{TENSORS[p]} - {TENSORS[r]}" for p in range(tensors) for r in range(p)],
            [(null[:, :, p] - null[:, :, r]) / math.sqrt(2) for p in range(tensors) for r in range(p)],
        ),
        "noise, sum of tensors": (["sum"], [null.sum(2) / math.sqrt(tensors)]),
    }
    if steps > 1:
        groups["noise, difference of steps"] = (
            [f"steps {t + 1} and {t + 2}" for t in range(steps - 1)],
            [(null[:, t + 1] - null[:, t]) / math.sqrt(2) for t in range(steps - 1)],
        )
        groups["noise, sum of steps"] = (["sum"], [null.sum(1) / math.sqrt(steps)])
    shifts = _shifts(configuration, draws)
    share = error / (len(groups) + len(shifts) + 2)  # two more: all noise together, learned combinations
    pooled = scale_below(float(np.mean(null**2)), null.size, share)

    reached = 1.0
    findings = []
    for name, values, covered in shifts:
        # membership: at most this often, but for a third of the share; the noise of the mean: another third
        most = 1.0
        if plan.sample_rate < 1:
            most = float(stats.binom.ppf(1 - share / 3, values.size, plan.sample_rate)) / values.size
        doubt = float(stats.norm.ppf(1 - share / 6)) * pooled / math.sqrt(values.size)
        contribution = max(0.0, abs(float(values.mean())) - doubt) / most
        reached = max(reached, contribution)
        multiplier = pooled / contribution if contribution > 0 else math.inf
        findings.append(
            _of_fit(
                configuration,
                claim,
                name,
                _NORMAL if plan.sample_rate == 1 else _POISSON,
                multiplier,
                values.size,
                covered,
                f"a record moves the sum by at least {contribution:.4g} of C, with noise of at most {pooled:.4g}",
            )
        )
    for name, (labels, members) in groups.items():
        which, bound = quietest([float(np.mean(m**2)) for m in members], [m.size for m in members], share)
        multiplier = bound / reached
        if per_layer and name == "noise, quietest tensor":
            # a record can put only its share of C there: 1/m^2 is the mean of 1/σ^2 over tensors, the others as claimed
            others = (tensors - 1) / sigma**2
            multiplier = math.sqrt(tensors / (others + 1 / max(multiplier, 1e-9) ** 2))
        findings.append(
            _of_fit(
                configuration,
                claim,
                name,
                _NORMAL,
                multiplier,
                members[which].size,
                1 if "steps" not in name else min(steps, 2),
                f"{labels[which]}: at most {bound:.4g} of C, where a record contributes {reached:.4g}",
            )
        )
    if plan.sample_rate == 1:
        learned = [f for f in features if f.name.endswith("learned combination")]
        for feature in learned:
            findings.append(_learned_fit(configuration, claim, feature, share / max(1, len(learned))))
    return findings


def _shifts(configuration: _Configuration, draws: Draws) -> list[tuple[str, Array, int]]:
    """Values whose mean is what a record contributes (at most), from canaries that are present."""
    steps = configuration.steps
    found: list[tuple[str, Array, int]] = []
    for kind, label in _KINDS.items():
        present = draws.of(PRESENT, kind)
        if len(present) < _LEAST_OF_A_KIND:
            continue
        x_DT = present.sum(2) / math.sqrt(present.shape[2])
        if steps <= _LONG:
            found += [(f"contribution, {label} canary, step {t + 1}", x_DT[:, t], 1) for t in range(steps)]
        elif kind == ALTERNATING:
            found.append((f"contribution, {label} canary, even steps", x_DT[:, 2::2], 1))
            found.append((f"contribution, {label} canary, odd steps", x_DT[:, 1::2], 1))
        else:
            found.append((f"contribution, {label} canary, all steps", x_DT[:, 1:], 1))
    if configuration.plan.clipping != "per-layer":
        for p, tensor in enumerate(TENSORS):
            present = draws.of(PRESENT, ALONE + p)
            if len(present) >= _LEAST_OF_A_KIND:
                found.append((f"contribution, canary in {tensor} alone", present[:, :, p], 1))
    return found


def _learned_fit(configuration: _Configuration, claim: Claim, feature: _Feature, error: float) -> Finding:
    """How far apart two normal worlds lie along a direction that was learned on other draws."""
    chosen = [np.arange(len(world)) % 3 != 0 for world in (feature.without, feature.with_record)]
    without, with_record = feature.without[chosen[0]], feature.with_record[chosen[1]]
    centred = without - without.mean()
    deviation = math.sqrt(float(centred @ centred) / float(stats.chi2.ppf(error / 2, len(without) - 1)))
    doubt = float(stats.norm.ppf(1 - error / 2)) * deviation * math.sqrt(1 / len(without) + 1 / len(with_record))
    distance = float(with_record.mean() - without.mean()) - doubt
    if configuration.plan.adjacency == "replace-one":
        distance /= 2
    multiplier = math.inf
    if distance > 0:
        multiplier = math.sqrt(feature.steps) * max(deviation, 1e-9) / distance
    return _of_fit(
        configuration,
        claim,
        f"distance, {feature.name}",
        _NORMAL,
        multiplier,
        min(len(without), len(with_record)),
        feature.steps,
        f"{distance / max(deviation, 1e-9):.4g} deviations apart, at least",
    )


def _sampling_fits(configuration: _Configuration, claim: Claim, draws: Draws, error: float) -> list[Finding]:
    """Whether batches are as large on average, and vary as much, as Poisson sampling has it.

    Seen in the coordinate that all records but the canaries share: the number of them in the batch, with noise.
    """
    plan, rate, size = configuration.plan, configuration.plan.sample_rate, draws.crowd_size
    noise = plan.noise_multiplier * _claimed_sensitivity(configuration.filter)
    crowd = draws.crowd.reshape(-1)
    count, findings = len(crowd), list[Finding]()
    variance = size * rate * (1 - rate) + noise**2

    most = float(stats.norm.ppf(1 - error / 2)) * math.sqrt(variance / count)
    at_least = (float(crowd.mean()) - most) / size
    too_often = at_least > rate * (1 + 1e-6)
    findings.append(
        Finding(
            scenario=configuration.name,
            statistic="sampling, how often",
            assumes=_POISSON,
            draws=count,
            steps=configuration.steps,
            epsilon_lower=max(0.0, claim.epsilon_at_rate(configuration.steps, at_least)) if too_often else 0.0,
            epsilon_claimed=claim.epsilon(configuration.steps),
            noise_multiplier=None,
            broken=too_often,
            detail=f"records join a batch with probability {at_least:.4g} at least, claimed is {rate:.4g}",
        )
    )
    ratio = float(np.var(crowd, ddof=1)) / variance if count > 1 else 1.0
    testable = size * rate * (1 - rate) >= 9 and count >= 10
    # the spread of a sample variance grows with the kurtosis, which a binomial count has a little of
    kurtosis = max(0.0, (1 - 6 * rate * (1 - rate)) * size * rate * (1 - rate) / variance**2)
    freedom = (count - 1) / (1 + kurtosis / 2)
    chance = float(stats.chi2.cdf(ratio * freedom, freedom)) if testable else 1.0
    too_steady = chance < error / 2
    epsilon = 0.0
    if too_steady:
        epsilon = fixed_size_epsilon(plan.noise_multiplier, rate, configuration.steps, plan.delta)
    findings.append(
        Finding(
            scenario=configuration.name,
            statistic="sampling, batch sizes",
            assumes="batches of one size if not Poisson",
            draws=count,
            steps=configuration.steps,
            epsilon_lower=epsilon,
            epsilon_claimed=claim.epsilon(configuration.steps),
            noise_multiplier=plan.noise_multiplier * (1 - 1e-9) if too_steady else None,
            broken=too_steady,
            detail=f"batch sizes vary {ratio:.3g} times as much as Poisson sampling's (chance {chance:.2g})"
            if testable
            else "batches too small or too few to tell",
        )
    )
    return findings


def _claimed_sensitivity(filter: Filter) -> float:
    return sum(abs(a) for a in filter.coefficients) if filter.clip == "separate" else 1.0


def _of_fit(
    configuration: _Configuration,
    claim: Claim,
    name: str,
    assumes: str,
    multiplier: float,
    draws: int,
    steps: int,
    detail: str,
) -> Finding:
    usable = 0 <= multiplier < math.inf
    broken = usable and multiplier < configuration.plan.noise_multiplier
    return Finding(
        scenario=configuration.name,
        statistic=name,
        assumes=assumes,
        draws=draws,
        steps=configuration.steps,
        epsilon_lower=claim.epsilon(configuration.steps, multiplier) if usable else 0.0,
        epsilon_claimed=claim.epsilon(configuration.steps),
        noise_multiplier=multiplier if usable else None,
        broken=broken,
        detail=detail,
    )
