"""Renyi divergences of one step, where a theorem or a quadrature gives them, and their conversion."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special

from diskdp.accounting.pld import Parts
from diskdp.accounting.releases import Array, FixedSize, Gaussian, Poisson, PoissonReplaced, Release
from diskdp.errors import PlanError

ORDERS = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=np.float64)
_LARGEST_EXACT_ORDER = 256  # beyond, dp-accounting too bounds the terms of Wang et al. by the plain moments
_QUADRATURE_ERROR = 1e-12  # added to log moments that are integrated: their error is below, but may be on either side
_NO_NOISE = 0.02  # sampling hides nothing below this sigma: the unsampled value is the bound, and nearly reached


def divergences(parts: Parts, library: bool = False) -> Array:
    """At `ORDERS`, of all parts together; with `library`, no less than dp-accounting's accountant has for a step."""
    total = np.zeros_like(ORDERS)
    for step, sigma, count in parts:
        values = curve(step, sigma)
        if library and isinstance(step, (Poisson, FixedSize)):
            values = np.maximum(values, _library_curve(step, sigma))
        total += count * values
    return total


def log_delta(values: Array, epsilon: float) -> float:
    """log of the delta at `epsilon` that divergences at `ORDERS` imply."""
    floored = np.maximum(values, 1e-15)  # dp-accounting takes log(1 - exp(-divergence))
    return math.log(max(float(rdp_privacy_accountant.compute_delta(ORDERS, floored, epsilon)[0]), 1e-300))


def epsilon_at(values: Array, delta: float) -> float:
    """The epsilon at `delta` that divergences at `ORDERS` imply."""
    return float(rdp_privacy_accountant.compute_epsilon(ORDERS, values, delta)[0])


@lru_cache(maxsize=64)
def curve(step: Release, sigma: float) -> Array:
    """The divergences of one step at `ORDERS`."""
    return at_orders(step, sigma, ORDERS)


def at_orders(step: Release, sigma: float, orders: Sequence[float] | Array) -> Array:
    """The divergences of one step at `orders` > 1."""
    alphas = np.asarray(orders, dtype=np.float64)
    if not np.all(alphas > 1):
        raise PlanError("Renyi orders must be above 1")
    if isinstance(step, Gaussian):
        return alphas * step.shift**2 / (2 * sigma**2)
    if isinstance(step, Poisson):
        return alphas / (2 * sigma**2) if sigma < _NO_NOISE else _poisson(step.rate, sigma, alphas)
    if isinstance(step, PoissonReplaced):
        return 2 * alphas / sigma**2 if sigma < 2 * _NO_NOISE else _poisson_replaced(step.rate, sigma, alphas)
    if isinstance(step, FixedSize):
        return 2 * alphas / sigma**2 if sigma < 2 * _NO_NOISE else _fixed_size(step.rate, sigma / 2, alphas)
    raise TypeError(f"no Renyi divergences for {step}")


def _poisson(q: float, sigma: float, alphas: Array) -> Array:
    """Mironov, Talwar, Zhang 2019: binomial sums at integer orders, quadrature between them.

    Between integers dp-accounting 0.6 adds up the absolute values of an alternating series, and drops orders where
    that diverges: its values are upper bounds.
    """
    log_moments = np.empty_like(alphas)
    whole = alphas == np.floor(alphas)
    for index in np.flatnonzero(whole):
        order = alphas[index]
        k = np.arange(order + 1)
        log_binomial = -np.log(order + 1) - special.betaln(order - k + 1, k + 1)
        terms = log_binomial + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * sigma**2)
        log_moments[index] = _log_sum_exp(terms)
    if not whole.all():
        z, log_weight = _quadrature(sigma, float(alphas[~whole].max()))
        log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
        log_moments[~whole] = [_log_sum_exp(order * log_ratio + log_weight) for order in alphas[~whole]]
    return np.maximum(log_moments, 0.0) / (alphas - 1)


def _poisson_replaced(q: float, sigma: float, alphas: Array) -> Array:
    """Of the pair on the line; what dominates every hockey-stick divergence dominates these too."""
    z, log_weight = _quadrature(sigma, 2 * float(alphas.max()))
    with_one = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
    with_other = np.logaddexp(math.log1p(-q), math.log(q) - (2 * z + 1) / (2 * sigma**2))
    log_moments = [_log_sum_exp(order * with_one + (1 - order) * with_other + log_weight) for order in alphas]
    return (np.maximum(log_moments, 0.0) + _QUADRATURE_ERROR) / (alphas - 1)


def _quadrature(sigma: float, furthest: float) -> tuple[Array, Array]:
    """Places and log weights of E over z ~ N(0, sigma^2) by the trapezoidal rule, tilted to at most `furthest`.

    Its error is exp(-2 pi w / step), where the integrands' nearest singularity is w = pi sigma^2 away.
    """
    step = min(sigma, sigma**2) / 10
    z = np.arange(-14 * sigma, furthest + 14 * sigma, step)
    return z, -(z**2) / (2 * sigma**2) + math.log(step / (sigma * math.sqrt(2 * math.pi)))


def _fixed_size(q: float, sigma: float, alphas: Array) -> Array:
    """Wang, Balle, Kasiviswanathan 2019, Theorem 27, for noise of sigma *sensitivities*; between integers Corollary 10.

    The theorem needs E (ratio - 1)^k at even k. dp-accounting 0.6 has them as k-th differences, of which at large
    sigma and k rounding alone is left; here they are integrated.
    """
    whole = np.unique(np.concatenate([np.floor(alphas), np.ceil(alphas)]))
    largest = int(min(whole.max(), _LARGEST_EXACT_ORDER))
    central = _even_central_moments(sigma, largest + largest % 2)
    log_a = {1.0: 0.0}
    for order in whole[whole > 1]:
        i = np.arange(2, order + 1)
        log_binomial = -np.log(order + 1) - special.betaln(order - i + 1, i + 1)
        terms = math.log(2) + i * (i - 1) / (2 * sigma**2)
        if order <= _LARGEST_EXACT_ORDER:
            lower, upper = central[i.astype(int) // 2], central[(i.astype(int) + 1) // 2]
            terms[1:] = np.minimum(terms[1:], math.log(4) + (lower[1:] + upper[1:]) / 2)
        terms[0] = min(terms[0], math.log(4) + 1 / sigma**2 + math.log(-math.expm1(-1 / sigma**2)))
        log_a[float(order)] = float(np.logaddexp(0.0, _log_sum_exp(terms + i * math.log(q) + log_binomial)))
    low, high = np.floor(alphas), np.ceil(alphas)
    part = alphas - low
    return np.array([((1 - t) * log_a[lo] + t * log_a[hi]) / (a - 1) for a, t, lo, hi in zip(alphas, part, low, high)])


def _even_central_moments(sigma: float, largest: int) -> Array:
    """log E (N(1)/N(0) - 1)^k at k = 0, 2, ..., largest, by the trapezoidal rule: the integrands are positive."""
    even = np.arange(0, largest + 1, 2)
    step = sigma / 20  # sums of Gaussians of that width: the error is exp(-2 pi^2 20^2) of their weights, 2^k at most
    z = np.arange(-14 * sigma, largest + 14 * sigma, step)
    log_weight = -(z**2) / (2 * sigma**2) + math.log(step / (sigma * math.sqrt(2 * math.pi)))
    exponent = (2 * z - 1) / (2 * sigma**2)
    with np.errstate(divide="ignore"):
        log_apart = np.maximum(exponent, 0.0) + np.log(-np.expm1(-np.abs(exponent)))
    return np.array([_log_sum_exp(k * np.maximum(log_apart, -700.0) + log_weight) for k in even]) + (_QUADRATURE_ERROR)


@lru_cache(maxsize=16)
def _library_curve(step: Poisson | FixedSize, sigma: float) -> Array:
    """By dp-accounting's own accountant: upper bounds at fractional orders, rounding errors at high ones."""
    if isinstance(step, Poisson):
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp_accounting.PoissonSampledDpEvent(step.rate, dp_accounting.GaussianDpEvent(sigma))
    else:  # only the share of the data counts, and the sensitivity, which is 2 here, is not doubled for us
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(1, step.rate, dp_accounting.GaussianDpEvent(sigma / 2))
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    with _absl_silenced():  # it logs every order that it drops
        accountant.compose(event)
    return np.asarray(accountant.rdp)


@contextmanager
def _absl_silenced() -> Iterator[None]:
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _log_sum_exp(terms: Array) -> float:
    largest = terms.max()
    return float(largest + np.log(np.exp(terms - largest).sum()))
