"""What a run spends and how much noise a budget needs: plain numbers in, plain numbers out.

Thin over dp-accounting. Assumes Gaussian noise with a standard deviation of `noise_multiplier` sensitivities,
Poisson sampling and add-remove neighbours; anything else is refused by name, never approximated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray
from scipy import optimize, special

from diskdp.errors import PlanError

Array = NDArray[np.float64]

# Setting -> (what has been built, what is known by name but has not).
_CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "clipping": (("flat", "automatic", "normalized", "per-layer"), ("adaptive",)),
    "sampling": (("poisson",), ("truncated-poisson", "fixed-size")),
    "adjacency": (("add-remove",), ("replace-one", "zero-out")),
    "accountant": (("pld", "rdp"), ("prv", "gdp")),
    "noise": (("gaussian",), ("secure", "discrete", "correlated")),
}

_GRID = 1e-4  # losses are multiples of this: the default of dp_accounting.pld.PLDAccountant
_MAX_GRID_POINTS = 2**22  # what would need more gets a coarser grid, which can only raise the answer
_COARSEST_GRID = 0.1  # what would need a coarser one than this counts as infinite
_TAIL = 1e-15  # the mass that dp-accounting moves from the tails of a composed loss to infinity
_ROUNDING = 1e-16  # error of delta for each step composed by Fourier transforms: measured at half of this

_SIGMA_TOLERANCE = 5e-4  # a calibrated sigma is at most this fraction above the smallest one
_DELTA_MARGIN = 1e-4  # and aims this fraction below delta, since other machines round differently
_STEERING_POINTS = 2**14  # the search is steered on a grid this coarse; the last word is that of _GRID
_MAX_EXACT_EVALUATIONS = 30


def require_built(*, clipping: str, sampling: str, adjacency: str, accountant: str, noise: str) -> None:
    """Raise `PlanError` unless the accounting of this combination has been built.

    >>> require_built(clipping="flat", sampling="fixed-size", adjacency="add-remove", accountant="pld",
    ...               noise="gaussian")
    Traceback (most recent call last):
    diskdp.errors.PlanError: sampling='fixed-size' is not built yet; choose one of: poisson
    """
    chosen = {
        "clipping": clipping,
        "sampling": sampling,
        "adjacency": adjacency,
        "accountant": accountant,
        "noise": noise,
    }
    for setting, value in chosen.items():
        built, planned = _CHOICES[setting]
        if value not in built:
            problem = "is not built yet" if value in planned else "is unknown"
            raise PlanError(f"{setting}={value!r} {problem}; choose one of: {', '.join(built)}")


def epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld") -> float:
    """The epsilon spent at `delta` by `steps` releases, each of a Poisson sample of rate `sample_rate`.

    >>> round(epsilon(0.7, 0.01, 120, 1e-5), 6)
    2.461238
    >>> round(epsilon(0.7, 1.0, 2, 1e-5), 6)  # the full batch: exact
    10.122495
    """
    _check(noise_multiplier, sample_rate, steps, delta, accountant)
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    return _epsilon(float(noise_multiplier), float(sample_rate), int(steps), float(delta), accountant)


def delta(noise_multiplier: float, sample_rate: float, steps: int, epsilon: float, accountant: str = "pld") -> float:
    """The delta spent at `epsilon`: the inverse of `epsilon`.

    >>> round(delta(3**0.5, 1.0, 3, 1.0), 6)
    0.126937
    """
    _check(noise_multiplier, sample_rate, steps, 0.5, accountant)
    if not epsilon >= 0:
        raise PlanError(f"epsilon must be zero or more, got {epsilon}")
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return 1.0
    return math.exp(_log_delta(noise_multiplier, sample_rate, steps, epsilon, accountant))


@lru_cache(maxsize=256)
def calibrate(epsilon: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld") -> float:
    """The smallest noise multiplier (to 0.1%) whose `steps` releases spend at most `epsilon` at `delta`.

    Never less than enough by dp-accounting's own accountant of that name. An infinite epsilon gives 0.

    >>> sigma = calibrate(2.0, 0.01, 1000, 1e-5)
    >>> 1.998 < epsilon(sigma, 0.01, 1000, 1e-5) <= 2.0
    True
    """
    if not epsilon > 0:
        raise PlanError(f"epsilon must be positive, got {epsilon}")
    _check(1.0, sample_rate, steps, delta, accountant)
    if steps == 0 or math.isinf(epsilon):
        return 0.0
    if sample_rate < 1 and delta >= -math.expm1(steps * math.log1p(-sample_rate)):
        raise PlanError(
            f"delta={delta:g} is no less than a record's chance of ever being sampled: batches in the clear, "
            "without noise, would satisfy it; choose a smaller delta"
        )
    margin = max(_DELTA_MARGIN, 3 * _ROUNDING * steps / delta) if accountant == "pld" else _DELTA_MARGIN
    log_delta = math.log(delta) + math.log1p(-margin)
    mu = _gaussian_mu(epsilon, log_delta)
    if sample_rate == 1 and accountant == "pld":
        return math.sqrt(steps) / mu
    # The central limit (Bu et al. 2020): q sqrt(T (exp(1/sigma^2) - 1)) = mu; slightly too little noise.
    start = 1 / math.sqrt(math.log1p((mu / sample_rate) ** 2 / steps))

    goal = _deviate(log_delta)

    def exact(sigma: float) -> float:
        if accountant == "rdp":
            return goal - _deviate(_library_rdp_log_delta(sigma, sample_rate, steps, epsilon))
        return goal - _deviate(_log_delta(sigma, sample_rate, steps, epsilon, accountant))

    grid = _loss_range(start, sample_rate) / _STEERING_POINTS

    @cache
    def rough(sigma: float) -> float:
        return goal - _deviate(_log_delta(sigma, sample_rate, steps, epsilon, accountant, grid))

    return _smallest_noise(exact, rough, start)


def rdp(noise_multiplier: float, sample_rate: float, orders: Sequence[float] | Array) -> Array:
    """Renyi divergences of one step, at `orders` > 1 (Mironov, Talwar, Zhang 2019).

    Binomial sums at integer orders, quadrature between them. There dp-accounting 0.6 adds up the absolute
    values of an alternating series, and drops orders where that diverges: its values are upper bounds.

    >>> [float(f"{x:.6g}") for x in 50 * rdp(2.5, 0.01, [1.5, 5, 100])]
    [0.000650071, 0.00218076, 167.416]
    """
    sigma, q, alphas = noise_multiplier, sample_rate, np.asarray(orders, dtype=np.float64)
    if not np.all(alphas > 1):
        raise PlanError("Renyi orders must be above 1")
    # Without noise to speak of, sampling hides nothing: the unsampled value is the bound, and nearly reached.
    if q == 1 or sigma < 0.02:
        return alphas / (2 * sigma**2)
    log_moments = np.empty_like(alphas)
    whole = alphas == np.floor(alphas)
    for index in np.flatnonzero(whole):
        order = alphas[index]
        k = np.arange(order + 1)
        log_binomial = -np.log(order + 1) - special.betaln(order - k + 1, k + 1)
        terms = log_binomial + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * sigma**2)
        log_moments[index] = _log_sum_exp(terms)
    if not whole.all():
        # E over z ~ N(0, sigma^2) of (1 - q + q exp((2z - 1) / (2 sigma^2)))^order, by the trapezoidal rule:
        # its error is exp(-2 pi w / step), where the integrand's nearest singularity is w = pi sigma^2 away.
        step = min(sigma, sigma**2) / 10
        z = np.arange(-14 * sigma, alphas[~whole].max() + 14 * sigma, step)
        log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
        log_weight = -(z**2) / (2 * sigma**2) + math.log(step / (sigma * math.sqrt(2 * math.pi)))
        log_moments[~whole] = [_log_sum_exp(order * log_ratio + log_weight) for order in alphas[~whole]]
    return np.maximum(log_moments, 0.0) / (alphas - 1)


def _check(noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str) -> None:
    if not 0 <= noise_multiplier < math.inf:
        raise PlanError(f"noise_multiplier must be a finite number, zero or more, got {noise_multiplier}")
    if not 0 < sample_rate <= 1:
        raise PlanError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if steps < 0 or steps != int(steps):
        raise PlanError(f"steps must be a whole number, zero or more, got {steps}")
    if not 0 < delta < 1:
        raise PlanError(f"delta must be strictly between 0 and 1, got {delta}")
    require_built(clipping="flat", sampling="poisson", adjacency="add-remove", accountant=accountant, noise="gaussian")
    resolved = max(1000 * _TAIL, 100 * _ROUNDING * steps)
    if accountant == "pld" and sample_rate < 1 and delta < resolved:
        raise PlanError(
            f"delta={delta:g} is below what the PLD accountant resolves over {steps} steps ({resolved:g}); "
            "use accountant='rdp' or a larger delta"
        )


@lru_cache(maxsize=1024)
def _epsilon(sigma: float, q: float, steps: int, delta: float, accountant: str) -> float:
    if accountant == "rdp":
        orders, divergences = _rdp_curve(sigma, q)
        return float(rdp_privacy_accountant.compute_epsilon(orders, steps * divergences, delta)[0])
    if q == 1:
        return _gaussian_epsilon(math.sqrt(steps) / sigma, delta)
    losses = _composed(sigma, q, steps)
    return math.inf if losses is None else float(losses.get_epsilon_for_delta(delta))


def _log_delta(sigma: float, q: float, steps: int, epsilon: float, accountant: str, grid: float = _GRID) -> float:
    if accountant == "rdp":
        orders, divergences = _rdp_curve(sigma, q)
        return _log(rdp_privacy_accountant.compute_delta(orders, _floored(steps * divergences), epsilon)[0])
    if q == 1:
        return _gaussian_log_delta(math.sqrt(steps) / sigma, epsilon)
    losses = _composed(sigma, q, steps, grid)
    return 0.0 if losses is None else _log(losses.get_delta_for_epsilon(epsilon))


# ---- Privacy loss distributions


def _composed(sigma: float, q: float, steps: int, grid: float = _GRID) -> Any | None:
    """The loss distribution of `steps` steps, as PLDAccountant has it; None if it is beyond measure."""
    # Two Chernoff bounds of the composed loss, from log E exp(loss) and (by convexity) E loss of one step;
    # 35 is log(1 / _TAIL).
    width = _loss_range(sigma, q)
    exponent = 1 / sigma**2
    order_one = math.log1p(q**2 * math.expm1(exponent)) if exponent < 700 else exponent
    support = 2 * min(steps * order_one + 35, steps * q * exponent + 35 * width) + 5 * width
    needed = support / _MAX_GRID_POINTS
    if needed > _COARSEST_GRID:
        return None
    return _one_step(sigma, q, max(grid, _GRID, needed)).self_compose(steps)


@lru_cache(maxsize=2)
def _one_step(sigma: float, q: float, grid: float) -> Any:
    """The loss distribution of one step, put on `grid` by connecting the dots (Doroshenko et al. 2022).

    Value for value what dp-accounting builds; it visits the grid point by point, which was most of its time.
    """
    directions = privacy_loss_mechanism.AdjacencyType
    masses = []
    for direction in (directions.REMOVE, directions.ADD):
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=direction)
        bounds = loss.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
        divergences = _hockey_stick(np.arange(low, high + 1) * grid, sigma, q, direction is directions.REMOVE)
        mass = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, low, high, divergences)
        masses.append(mass.to_dense_pmf())
    return privacy_loss_distribution.PrivacyLossDistribution(*masses)


def _hockey_stick(epsilons: Array, sigma: float, q: float, remove: bool) -> Array:
    """The largest P(event) - exp(epsilon) Q(event), for every epsilon.

    To remove a record, P is (1-q) N(0, sigma^2) + q N(1, sigma^2) and Q is N(0, sigma^2); to add, swapped.
    """
    signed = epsilons if remove else -epsilons
    divergences = np.where(remove, -np.expm1(np.minimum(epsilons, 0.0)), 0.0)
    inside = signed > math.log1p(-q)  # elsewhere one of the two exceeds the other on the whole line
    signed, at = signed[inside], epsilons[inside]
    log_excess = signed + np.log(-np.expm1(math.log1p(-q) - signed))  # log(exp(signed) - (1 - q))
    cut = sigma**2 * (log_excess - math.log(q)) + 0.5  # where log(P/Q) is exactly epsilon
    if remove:
        divergences[inside] = q * special.ndtr((1 - cut) / sigma) - np.exp(log_excess + special.log_ndtr(-cut / sigma))
    else:
        divergences[inside] = np.exp(at + log_excess + special.log_ndtr(cut / sigma)) - q * np.exp(at) * special.ndtr(
            (cut - 1) / sigma
        )
    return np.clip(divergences, 0.0, 1.0)


def _loss_range(sigma: float, q: float) -> float:
    """Roughly the width of the privacy loss of one step, out to the 14 standard deviations that are kept."""
    largest = 14 / sigma + 1 / (2 * sigma**2)
    return float(np.logaddexp(math.log1p(-q), math.log(q) + largest) - math.log1p(-q)) if q < 1 else largest


# ---- Renyi divergences


@lru_cache(maxsize=64)
def _rdp_curve(sigma: float, q: float) -> tuple[Array, Array]:
    orders = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=np.float64)
    return orders, rdp(sigma, q, orders)


def _library_rdp_log_delta(sigma: float, q: float, steps: int, epsilon: float) -> float:
    """By dp-accounting's own RDP accountant, whose fractional orders are upper bounds of `rdp`."""
    accountant = dp_accounting.rdp.RdpAccountant()
    with _absl_silenced():  # it logs every order that it drops
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    spent = rdp_privacy_accountant.compute_delta(accountant.orders, _floored(accountant.rdp), epsilon)
    return _log(spent[0])


def _floored(divergences: Array) -> Array:
    return np.maximum(divergences, 1e-15)  # dp-accounting takes log(1 - exp(-divergence))


@contextmanager
def _absl_silenced() -> Iterator[None]:
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# ---- The Gaussian mechanism, exactly (Balle and Wang 2018, Theorem 8)


def _gaussian_log_delta(mu: float, epsilon: float) -> float:
    upper = special.log_ndtr(mu / 2 - epsilon / mu)
    lower = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(upper + np.log(-np.expm1(min(lower - upper, -1e-300))))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    goal = math.log(delta)
    if _gaussian_log_delta(mu, 0.0) <= goal:
        return 0.0
    largest = mu**2 / 2 + mu * math.sqrt(-2 * goal)  # the tail bound of the loss, N(mu^2/2, mu^2)
    return float(optimize.brentq(lambda e: _gaussian_log_delta(mu, e) - goal, 0.0, largest, xtol=1e-14, rtol=1e-14))


def _gaussian_mu(epsilon: float, log_delta: float) -> float:
    """The largest 1 / noise multiplier of one Gaussian release within (epsilon, exp(log_delta))."""

    def excess(log_mu: float) -> float:
        return max(_gaussian_log_delta(math.exp(log_mu), epsilon), -700.0) - log_delta

    return math.exp(optimize.brentq(excess, -60.0, 60.0, xtol=1e-12))


# ---- Search


def _smallest_noise(exact: Callable[[float], float], rough: Callable[[float], float], start: float) -> float:
    """Smallest sigma, within tolerance, with exact(sigma) <= 0: the secant method from the root of `rough`.

    Both fall as sigma grows, nearly along a line; `rough` is cheap and gives the first slope.
    """
    sigma = _root(rough, start) * (1 + _SIGMA_TOLERANCE / 2)
    slope = (rough(1.01 * sigma) - rough(sigma)) / (0.01 * sigma)
    value = exact(sigma)
    low, high = 0.0, math.inf
    for _ in range(_MAX_EXACT_EVALUATIONS):
        low, high = (sigma, high) if value > 0 else (low, sigma)
        if high <= low * (1 + _SIGMA_TOLERANCE):
            return high
        proposal = math.nan
        if slope < 0:
            drop = -slope * sigma * _SIGMA_TOLERANCE
            if -drop <= value <= 0:
                return sigma
            proposal = sigma - (value + drop / 2) / slope
        if not max(low, sigma / 2) < proposal < min(high, 2 * sigma):  # far off, or flat
            proposal = 2 * low if math.isinf(high) else math.sqrt(max(low, high / 4) * high)
        previous, value = value, exact(proposal)
        slope = (value - previous) / (proposal - sigma)
        sigma = proposal
    raise PlanError(
        "this accountant finds no noise multiplier for this epsilon and delta; "
        "use another accountant or a larger epsilon"
    )


def _root(falling: Callable[[float], float], start: float) -> float:
    """Where `falling` crosses zero, roughly; at most a factor of two below `start` or eight above it."""
    low = high = start
    factor = 1.05
    while falling(high) > 0 and high < 8 * start:
        low, high, factor = high, high * factor, factor * 1.5
    while falling(low) <= 0 and low > start / 2:
        low, high = low / 1.1, low
    if falling(low) <= 0 or falling(high) > 0:
        return math.sqrt(low * high)
    return float(optimize.brentq(falling, low, high, xtol=1e-4 * low, rtol=1e-4))


def _deviate(log_delta: float) -> float:
    """The Gaussian deviate that goes with a tail of mass delta: nearly a straight line in sigma."""
    return math.sqrt(-2 * min(log_delta, 0.0))


def _log(x: float) -> float:
    return math.log(max(float(x), 1e-300))


def _log_sum_exp(terms: Array) -> float:
    largest = terms.max()
    return float(largest + np.log(np.exp(terms - largest).sum()))
