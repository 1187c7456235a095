"""One step of each mechanism as its worst case on the line: the pairs of distributions that dominate it.

Assumes noise of standard deviation sigma times what one record can contribute. `docs/accounting.md` has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]

_KEPT = -float(special.ndtri(0.5 * math.exp(-50)))  # deviations of the noise on the grid: dp-accounting's default
_NEGLIGIBLE = 1e-20  # binomial chances below this are counted as infinite loss
_NEWTON_STEPS = 3  # from a table that is right to 1e-4 of its range; each step doubles the digits


class Curve(NamedTuple):
    """The largest P(event) - exp(epsilon) Q(event) for every epsilon, and where the loss log(P/Q) lies."""

    lowest: float
    highest: float
    divergence: Callable[[Array], Array]


@dataclass(frozen=True)
class Gaussian:
    """Every record in every batch: N(shift, sigma^2) against N(0, sigma^2)."""

    shift: float

    @property
    def chance(self) -> float:
        return 1.0

    def curves(self, sigma: float) -> tuple[Curve, ...]:
        return _poisson_curves(sigma / self.shift, 1.0)[:1]

    def log_second_moment(self, sigma: float) -> float:
        return (self.shift / sigma) ** 2

    def mean_loss(self, sigma: float) -> float:
        return (self.shift / sigma) ** 2 / 2


@dataclass(frozen=True)
class Poisson:
    """A record joins with probability `rate`, or is absent: (1-q) N(0) + q N(1) against N(0)."""

    rate: float

    @property
    def chance(self) -> float:
        return self.rate

    def curves(self, sigma: float) -> tuple[Curve, ...]:
        return _poisson_curves(sigma, self.rate)

    def log_second_moment(self, sigma: float) -> float:
        return _log_mixed_moment(self.rate, 1 / sigma**2)

    def mean_loss(self, sigma: float) -> float:
        return self.rate / (2 * sigma**2)


@dataclass(frozen=True)
class PoissonReplaced:
    """A record joins with probability `rate`, as itself or as another: (1-q) N(0) + q N(1) against N(-1)."""

    rate: float

    @property
    def chance(self) -> float:
        return self.rate

    def curves(self, sigma: float) -> tuple[Curve, ...]:
        return (_replaced_curve(self.rate, sigma, _KEPT),)

    def log_second_moment(self, sigma: float) -> float:
        # Against (1-q) N(0) + q N(-1), whose density is at least (1-q) N(0); or as if never sampled.
        q = self.rate
        return min(4 / sigma**2, math.log1p(2 * q**2 / (1 - q) * _expm1(1 / sigma**2)))

    def mean_loss(self, sigma: float) -> float:
        return 2 * self.rate / sigma**2


@dataclass(frozen=True)
class FixedSize:
    """Exactly B of N records, one replaced: (1-q) N(0) + q N(2) against N(0) at epsilon >= 0, reflected below.

    Zhu, Dong and Wang 2022: the record's place goes to another one with probability 1 - q, at most 2 away.
    """

    rate: float

    @property
    def chance(self) -> float:
        return self.rate

    def curves(self, sigma: float) -> tuple[Curve, ...]:
        remove = _poisson_curves(sigma / 2, self.rate)[0]
        return (_reflected(remove.highest, remove.divergence),)

    def log_second_moment(self, sigma: float) -> float:
        return _log_mixed_moment(self.rate, 4 / sigma**2)

    def mean_loss(self, sigma: float) -> float:
        return 2 * self.rate / sigma**2


@dataclass(frozen=True)
class Truncated:
    """Poisson batches of which only `cap` records are kept, chosen uniformly (Ganesh 2025).

    `others` is how many further records there may be; the worst of these counts. With few others sampled the step
    is a Poisson one; with `cap` or more, the record takes another's place. The second case is bounded as
    dp-accounting bounds it, by replaced records of contribution two.
    """

    rate: float
    cap: int
    others: tuple[int, ...]
    replaced: bool

    @property
    def chance(self) -> float:
        return self.rate

    def full_batch(self, others: int) -> tuple[float, float]:
        """The chance that the others alone fill the batch, and of the record's being in it then."""
        full = float(stats.binom.sf(self.cap - 1, others, self.rate))
        if full == 0:
            return 0.0, self.rate
        inside = float(stats.binom.sf(self.cap, others + 1, self.rate)) * self.cap / (others + 1)
        return full, min(inside / full, self.rate)

    def curves(self, sigma: float) -> tuple[Curve, ...]:
        usual = self._usual.curves(sigma)
        worst: tuple[Curve, ...] = ()
        for others in self.others:
            full, inside = self.full_batch(others)
            if full == 0:
                mixed = usual
            else:
                # A rare case needs less far a look for as little to be lost.
                kept = max(1.0, -float(special.ndtri(min(0.5, 0.5 * math.exp(-50) / full))))
                crowded = _replaced_curve(inside, sigma / 2, kept)
                mixed = tuple(_blended(full, crowded, curve) for curve in usual)
            worst = tuple(map(_larger, worst, mixed)) if worst else mixed
        return worst

    @property
    def _usual(self) -> Poisson | PoissonReplaced:
        return PoissonReplaced(self.rate) if self.replaced else Poisson(self.rate)

    def log_second_moment(self, sigma: float) -> float:
        full, inside = self.full_batch(max(self.others))
        usual = self._usual.log_second_moment(sigma)
        if full == 0:
            return usual
        crowded = PoissonReplaced(inside).log_second_moment(sigma / 2)
        return float(np.logaddexp(math.log1p(-full) + usual if full < 1 else -math.inf, math.log(full) + crowded))

    def mean_loss(self, sigma: float) -> float:
        full, inside = self.full_batch(max(self.others))
        return self._usual.mean_loss(sigma) + full * PoissonReplaced(inside).mean_loss(sigma / 2)


@dataclass(frozen=True)
class Group:
    """A unit of `size` records, each in the batch by itself: a Binomial(size, rate) number of them, or none."""

    rate: float
    size: int

    @property
    def chance(self) -> float:
        return -math.expm1(self.size * math.log1p(-self.rate))

    def _counts(self) -> tuple[Array, Array, float]:
        """Counts of records, their chances, and the chance of any other count."""
        chances = stats.binom.pmf(np.arange(self.size + 1), self.size, self.rate)
        kept = np.flatnonzero(chances > _NEGLIGIBLE)
        rest = float(stats.binom.cdf(kept[0] - 1, self.size, self.rate))
        return kept.astype(np.float64), chances[kept], rest + float(stats.binom.sf(kept[-1], self.size, self.rate))

    def curves(self, sigma: float) -> tuple[Curve, ...]:
        counts, chances, rest = self._counts()

        def loss(x: Array) -> Array:
            total = np.full_like(x, -math.inf)
            for count, chance in zip(counts, chances):
                total = np.logaddexp(total, math.log(chance) + count * (2 * x - count) / (2 * sigma**2))
            return total

        lowest, highest = loss(np.array([-_KEPT * sigma, _KEPT * sigma + counts[-1]]))
        table_x = np.linspace(-_KEPT * sigma - 4 * sigma, _KEPT * sigma + counts[-1] + 4 * sigma, 2**13)
        table_loss = loss(table_x)

        def place(epsilons: Array) -> Array:
            x = np.interp(epsilons, table_loss, table_x)
            for _ in range(_NEWTON_STEPS):
                value, slope = np.full_like(x, -math.inf), np.zeros_like(x)
                for count, chance in zip(counts, chances):
                    term = math.log(chance) + count * (2 * x - count) / (2 * sigma**2)
                    larger = np.maximum(value, term)
                    before, now = np.exp(value - larger), np.exp(term - larger)
                    slope = (slope * before + count / sigma**2 * now) / (before + now)
                    value = larger + np.log(before + now)
                with np.errstate(divide="ignore", invalid="ignore"):
                    x = np.where(slope > 0, x - (value - epsilons) / slope, x)
                x = np.clip(x, table_x[0], table_x[-1])
            return x

        # At the cut both sums have positive terms alone: nothing cancels.
        def remove(epsilons: Array) -> Array:
            x, total = place(epsilons), np.full_like(epsilons, rest)
            for count, chance in zip(counts[counts > 0], chances[counts > 0]):
                tilted = count * (2 * x - count) / (2 * sigma**2) + special.log_ndtr(-x / sigma)
                total += chance * (special.ndtr((count - x) / sigma) - np.exp(np.minimum(tilted, 0.0)))
            return np.clip(np.maximum(total, -np.expm1(epsilons)), 0.0, 1.0)

        def add(epsilons: Array) -> Array:
            x, total = place(-epsilons), np.zeros_like(epsilons)
            for count, chance in zip(counts[counts > 0], chances[counts > 0]):
                tilted = count * (2 * x - count) / (2 * sigma**2) + special.log_ndtr(x / sigma)
                total += chance * (np.exp(epsilons + tilted) - np.exp(epsilons + special.log_ndtr((x - count) / sigma)))
            return np.clip(np.maximum(total, -np.expm1(epsilons)), 0.0, 1.0)

        return (Curve(float(lowest), float(highest), remove), Curve(-float(highest), -float(lowest), add))

    def log_second_moment(self, sigma: float) -> float:
        counts, chances, _ = self._counts()
        logs = np.log(chances)
        terms = logs[:, None] + logs[None, :] + counts[:, None] * counts[None, :] / sigma**2
        return float(special.logsumexp(terms))

    def mean_loss(self, sigma: float) -> float:
        counts, chances, _ = self._counts()
        return float(chances @ counts**2) / (2 * sigma**2)


Release = Gaussian | Poisson | PoissonReplaced | FixedSize | Truncated | Group
"""One step. `curves` has the record against its absence (or replacement) and the other way round, or one curve for
both; `chance` bounds how likely a step is to touch the record at all, `log_second_moment` is log E exp(loss), nearly,
and `mean_loss` bounds E loss."""


def _poisson_curves(sigma: float, q: float) -> tuple[Curve, ...]:
    at_least = math.log1p(-q) if q < 1 else -math.inf

    def loss(x: float) -> float:
        return float(np.logaddexp(at_least, math.log(q) + (2 * x - 1) / (2 * sigma**2)))

    lowest, highest = loss(-_KEPT * sigma), loss(_KEPT * sigma + 1)
    return (
        Curve(lowest, highest, lambda epsilons: poisson_divergence(epsilons, sigma, q, remove=True)),
        Curve(-highest, -lowest, lambda epsilons: poisson_divergence(epsilons, sigma, q, remove=False)),
    )


def _replaced_curve(q: float, sigma: float, kept: float) -> Curve:
    """`kept` deviations of the noise are looked at; what lies beyond counts as lost."""
    x = kept * sigma + 1
    up, down = (math.log(q) + (2 * side * x - 1) / (2 * sigma**2) for side in (1, -1))
    highest = float(np.logaddexp(math.log1p(-q), up) - np.logaddexp(math.log1p(-q), down))

    def divergence(epsilons: Array) -> Array:
        # Where log(P/Q) is epsilon: x = sigma^2 (epsilon/2 + asinh(sinh(epsilon/2) (1-q)/q exp(1/(2 sigma^2)))).
        log_slope = math.log1p(-q) - math.log(q) + 1 / (2 * sigma**2)
        with np.errstate(divide="ignore"):
            log_less_one = epsilons + np.log(-np.expm1(-epsilons))  # log(exp(epsilon) - 1)
        x = sigma**2 * (epsilons / 2 + _asinh_exp(log_slope + log_less_one - epsilons / 2 - math.log(2)))
        apart = math.log1p(-q) + log_less_one + special.log_ndtr(-x / sigma)
        swapped = math.log(q) + epsilons + special.log_ndtr((-1 - x) / sigma)
        return np.clip(q * special.ndtr((1 - x) / sigma) - np.exp(apart) - np.exp(swapped), 0.0, 1.0)

    return _reflected(highest, divergence)


def poisson_divergence(epsilons: Array, sigma: float, q: float, *, remove: bool) -> Array:
    """The largest P(event) - exp(epsilon) Q(event), for every epsilon.

    To remove a record, P is (1-q) N(0, sigma^2) + q N(1, sigma^2) and Q is N(0, sigma^2); to add, swapped.
    """
    signed = epsilons if remove else -epsilons
    divergences = np.where(remove, -np.expm1(np.minimum(epsilons, 0.0)), 0.0)
    at_least = math.log1p(-q) if q < 1 else -math.inf
    inside = signed > at_least  # elsewhere one of the two exceeds the other on the whole line
    signed, at = signed[inside], epsilons[inside]
    log_excess = signed + np.log(-np.expm1(at_least - signed))  # log(exp(signed) - (1 - q))
    cut = sigma**2 * (log_excess - math.log(q)) + 0.5  # where log(P/Q) is exactly epsilon
    if remove:
        divergences[inside] = q * special.ndtr((1 - cut) / sigma) - np.exp(log_excess + special.log_ndtr(-cut / sigma))
    else:
        divergences[inside] = np.exp(at + log_excess + special.log_ndtr(cut / sigma)) - q * np.exp(at) * special.ndtr(
            (cut - 1) / sigma
        )
    return np.clip(divergences, 0.0, 1.0)


def _reflected(highest: float, divergence: Callable[[Array], Array]) -> Curve:
    """The curve that is `divergence` at epsilon >= 0 and serves both orders of the neighbours.

    H_a(P, Q) = 1 - a + a H_{1/a}(Q, P), and the swapped pair is bounded by the same curve.
    """

    def both(epsilons: Array) -> Array:
        values = divergence(np.abs(epsilons))
        below = np.minimum(epsilons, 0.0)
        return np.clip(-np.expm1(below) + np.exp(below) * values, 0.0, 1.0)

    return Curve(-highest, highest, both)


def _blended(weight: float, first: Curve, second: Curve) -> Curve:
    """Which of two cases holds is random, and assumed to be known: their curves are averaged."""
    return Curve(
        min(first.lowest, second.lowest),
        max(first.highest, second.highest),
        lambda epsilons: weight * first.divergence(epsilons) + (1 - weight) * second.divergence(epsilons),
    )


def _larger(first: Curve, second: Curve) -> Curve:
    return Curve(
        min(first.lowest, second.lowest),
        max(first.highest, second.highest),
        lambda epsilons: np.maximum(first.divergence(epsilons), second.divergence(epsilons)),
    )


def _asinh_exp(logs: Array) -> Array:
    """asinh(exp(logs)), without overflow."""
    return np.where(logs > 20, logs + math.log(2), np.arcsinh(np.exp(np.minimum(logs, 20.0))))


def _log_mixed_moment(rate: float, exponent: float) -> float:
    """log E of the squared ratio of (1-q) N(0) + q N(s) to N(0), where exponent = (s / sigma)^2."""
    return math.log1p(rate**2 * math.expm1(exponent)) if exponent < 700 else exponent


def _expm1(x: float) -> float:
    return math.expm1(min(x, 700.0))
