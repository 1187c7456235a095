"""Hyper-parameter search as a plan of plans: a random number of runs, of which only the best is released.

Papernot and Steinke 2022. Assumes that every run keeps to the same `Plan`, draws its hyper-parameters afresh from a
distribution fixed beforehand, and that nothing of the other runs, their scores included, is ever released.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import optimize

from diskdp.accounting import renyi
from diskdp.accounting.releases import Array
from diskdp.errors import PlanError
from diskdp.plan import Plan

_SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
_SCORES = ("free", "noised")
_POISSON_CHUNK = 500.0  # exp(-mean) must not underflow; larger means are drawn as a sum
_TOLERANCE = 5e-4  # a calibrated sigma is at most this fraction above the smallest one
_LARGEST_FACTOR = 1e4  # and is looked for up to this many times the plan's own


class Uniforms(Protocol):
    """What draws numbers from [0, 1), such as `random.Random`."""

    def random(self) -> float:
        """The next one."""
        ...


@dataclass(frozen=True)
class Search:
    """A search over runs of one plan: how many there are is itself random, and secret.

    `trials` is the expected number of runs. `distribution` is "poisson" (which may give no run at all), or one that
    starts at one run: "geometric", "logarithmic", or "negative-binomial" with `shape` > 0, which has these two at
    shape 1 and towards 0. Poisson costs least for a few trials; the smaller the shape, the less many of them cost,
    and the more their number varies.

    `score` says what ranks the runs. "free": the score is computed from public data, or from what the run would
    release, alone. "noised": it looks at private data, and has Gaussian noise of `score_noise_multiplier` times what
    it can change between neighbouring data sets; that is charged in each run. There is no default: the score of
    held-out private records, as it is, has no place here.

    >>> plan = Plan(dataset_size=60_000, batch_size=600, epochs=10, epsilon=1.0, delta=1e-6, accountant="rdp")
    >>> Search(plan, trials=10, score="free").epsilon > plan.epsilon
    True
    >>> Search(plan, trials=10)
    Traceback (most recent call last):
    diskdp.errors.PlanError: say what ranks the runs: score='free' (public data, or the released output alone) \
or score='noised' with score_noise_multiplier
    """

    plan: Plan
    trials: float
    distribution: str = "poisson"
    shape: float | None = None
    score: str | None = None
    score_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        if self.distribution not in (*_SHAPES, "negative-binomial"):
            raise PlanError(
                f"distribution={self.distribution!r} is unknown; choose one of: {', '.join(_SHAPES)}, negative-binomial"
            )
        if self.distribution == "negative-binomial":
            if self.shape is None or not 0 < self.shape < math.inf:
                raise PlanError(f"distribution='negative-binomial' needs a finite shape above 0, got {self.shape}")
        elif self.shape is not None:
            raise PlanError(f"shape={self.shape} has no meaning for distribution={self.distribution!r}; leave it out")
        if not 1 <= self.trials < math.inf:
            raise PlanError(f"trials, the expected number of runs, must be finite and 1 or more, got {self.trials}")
        if self.score is None:
            raise PlanError(
                "say what ranks the runs: score='free' (public data, or the released output alone) "
                "or score='noised' with score_noise_multiplier"
            )
        if self.score not in _SCORES:
            raise PlanError(f"score={self.score!r} is unknown; choose one of: {', '.join(_SCORES)}")
        if self.score == "free" and self.score_noise_multiplier is not None:
            raise PlanError("score_noise_multiplier has no meaning for score='free'; leave it out, or use 'noised'")
        if self.score == "noised" and not 0 < (self.score_noise_multiplier or 0.0) < math.inf:
            raise PlanError(
                f"score='noised' needs a positive score_noise_multiplier, got {self.score_noise_multiplier}"
            )
        if not self.plan.is_guarantee:
            raise PlanError(
                "a search over runs without a guarantee has none: plan with noise, without paper_accounting"
            )
        _ = replace(self.plan.mechanism, accountant="rdp")  # refused where there are no Renyi divergences

    @classmethod
    def calibrate(
        cls,
        plan: Plan,
        epsilon: float,
        *,
        trials: float,
        distribution: str = "poisson",
        shape: float | None = None,
        score: str | None = None,
        score_noise_multiplier: float | None = None,
    ) -> Search:
        """A search by the plan, with the noise with which the *whole* search stays within `epsilon` at its delta.

        >>> plan = Plan(dataset_size=60_000, batch_size=600, epochs=10, noise_multiplier=1.0, delta=1e-6)
        >>> search = Search.calibrate(plan, 2.0, trials=10, score="free")
        >>> 1.99 < search.epsilon <= 2.0
        True
        """

        def at(noise_multiplier: float) -> Search:
            return cls(_with_noise(plan, noise_multiplier), trials, distribution, shape, score, score_noise_multiplier)

        if not 0 < epsilon < math.inf:
            raise PlanError(f"epsilon must be positive and finite, got {epsilon}")
        cls(plan, trials, distribution, shape, score, score_noise_multiplier)
        low = high = plan.noise_multiplier
        while at(high).epsilon > epsilon:
            low, high = high, high * 2
            if high > _LARGEST_FACTOR * plan.noise_multiplier:
                raise PlanError(
                    f"no noise keeps this search within epsilon={epsilon:g}: its number of trials alone, or the "
                    "score, costs more; raise epsilon or score_noise_multiplier, or lower trials"
                )
        while low == high or at(low).epsilon <= epsilon:
            low, high = low / 2, low
        while high > low * (1 + _TOLERANCE):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if at(middle).epsilon > epsilon else (low, middle)
        return at(high)

    @property
    def epsilon(self) -> float:
        """What the whole search spends at the plan's delta, once its best run is released."""
        return renyi.epsilon_at(self.divergences, self.plan.delta)

    @property
    def divergences(self) -> Array:
        """Renyi divergences of the search, at `renyi.ORDERS` (Papernot and Steinke 2022, Theorems 2 and 6)."""
        mechanism = replace(self.plan.mechanism, accountant="rdp")
        run = renyi.divergences(mechanism.parts(self.plan.noise_multiplier, {1: self.plan.steps}))
        if self.score_noise_multiplier is not None:
            run = run + renyi.ORDERS / (2 * self.score_noise_multiplier**2)
        chosen = run + math.log(self.trials) / (renyi.ORDERS - 1)
        if self.distribution == "poisson":
            gaps = np.log1p(1 / (renyi.ORDERS - 1))
            floored = np.maximum(run, 1e-15)  # dp-accounting takes log(1 - exp(-divergence))
            deltas = [rdp_privacy_accountant.compute_delta(renyi.ORDERS, floored, gap)[0] for gap in gaps]
            return np.asarray(chosen + self.trials * np.array(deltas))
        others = (1 - 1 / renyi.ORDERS) * run - math.log(self._gamma()) / renyi.ORDERS
        chosen = chosen + (1 + self._shape()) * others.min()
        # Divergences grow with the order, so the smallest of all higher ones bounds each.
        return np.asarray(np.minimum.accumulate(chosen[::-1])[::-1])

    def draw_trials(self, uniforms: Uniforms | None = None) -> int:
        """A number of runs, from the operating system's randomness unless another source is given, for tests.

        Draw once, before the first run, keep the number secret, and do exactly that many; of none, release nothing.

        >>> plan = Plan(dataset_size=1000, batch_size=10, steps=50, noise_multiplier=1.0, delta=1e-4)
        >>> Search(plan, trials=8, distribution="geometric", score="free").draw_trials() >= 1
        True
        """
        source = secrets.SystemRandom() if uniforms is None else uniforms
        if self.distribution == "poisson":
            chunks = math.ceil(self.trials / _POISSON_CHUNK)
            mean = self.trials / chunks
            return sum(_invert(source.random(), 0, math.exp(-mean), _poisson_ratio(mean)) for _ in range(chunks))
        gamma, shape = self._gamma(), self._shape()
        if gamma == 1:
            return 1
        if shape == 0:
            first = (1 - gamma) / -math.log(gamma)
        else:
            first = (1 - gamma) * shape / math.expm1(-shape * math.log(gamma))
        return _invert(source.random(), 1, first, _negative_binomial_ratio(gamma, shape))

    def _shape(self) -> float:
        return self.shape if self.shape is not None else _SHAPES[self.distribution]

    def _gamma(self) -> float:
        return _gamma_of(self.trials, self._shape())


@lru_cache(maxsize=64)
def _gamma_of(trials: float, shape: float) -> float:
    """The stopping probability that gives the expected number of trials."""
    if trials == 1:
        return 1.0
    if shape == 1:
        return 1 / trials

    def excess(log_gamma: float) -> float:
        return math.log(_mean(math.exp(log_gamma), shape) / trials)

    return math.exp(optimize.brentq(excess, -math.log(trials) * 4 - 20, -1e-12, xtol=1e-13))


def _mean(gamma: float, shape: float) -> float:
    """Of the negative binomial distribution truncated to one and more; logarithmic at shape 0."""
    log_gamma = math.log(gamma)
    if shape == 0:
        return (1 / gamma - 1) / -log_gamma
    return shape * (1 / gamma - 1) / -math.expm1(shape * log_gamma)


class _Ratio(Protocol):
    def __call__(self, count: int) -> float: ...


def _poisson_ratio(mean: float) -> _Ratio:
    return lambda count: mean / (count + 1)


def _negative_binomial_ratio(gamma: float, shape: float) -> _Ratio:
    return lambda count: (1 - gamma) * (count + shape) / (count + 1)


def _invert(uniform: float, count: int, chance: float, ratio: _Ratio) -> int:
    """The smallest count whose distribution function passes `uniform`; `ratio` leads from a chance to the next."""
    passed = chance
    while passed <= uniform and chance > 1e-300:
        chance *= ratio(count)
        count += 1
        passed += chance
    return count


def _with_noise(plan: Plan, noise_multiplier: float) -> Plan:
    return Plan(
        dataset_size=plan.dataset_size,
        batch_size=plan.batch_size,
        steps=plan.steps,
        noise_multiplier=noise_multiplier,
        delta=plan.delta,
        max_grad_norm=plan.max_grad_norm,
        clipping=plan.clipping,
        sampling=plan.sampling,
        adjacency=plan.adjacency,
        accountant=plan.accountant,
        noise=plan.noise,
        unit=plan.unit,
        max_batch_size=plan.max_batch_size,
        examples_per_unit=plan.examples_per_unit,
        paper_accounting=plan.paper_accounting,
        target_quantile=plan.target_quantile,
        quantile_noise=None if plan.quantile_noise is None else max(plan.quantile_noise, 1.2 * noise_multiplier),
    )
