"""Linear regression with noisy full gradients: noisy GD, a low pass, DiSK and Kalman gains against the noise level.

Every seed is a problem of its own (features, target, start, noise). The filters are the library's: one running state
serves all seeds and learning rates at once, since a filter acts on each coordinate by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from diskdp.experiments.results import Row, interval, ratio_interval
from diskdp.experiments.tuning import (
    KAPPAS,
    describe,
    kalman_gain_filters,
    low_pass_filters,
    tune,
    two_point_filters,
)
from diskdp.filters import DiSK, LowPass, NoFilter, due_coefficients
from diskdp.filters.disk import Filter
from diskdp.theory import moments


@dataclass(frozen=True)
class LinearRegression:
    """Settings. ``spectra``: "white" features, or "power" ones whose i-th column is scaled by i^-½."""

    noise_stds: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    spectra: tuple[str, ...] = ("white", "power")
    dimension: int = 100
    examples: int = 1000
    steps: int = 200
    rates: int = 24
    kappas: tuple[float, ...] = (0.01, *KAPPAS)
    gammas: tuple[float, ...] = (-1.0, 0.5)  # no influence here, the gradient being linear: kept to show it
    tuning_seeds: int = 10
    seeds: int = 40


@dataclass(frozen=True)
class Problems:
    """½(x-x*)ᵀH(x-x*) for each seed, with H scaled to largest eigenvalue 1: [R, d, d], starts at [R, d]."""

    hessians_RDD: Tensor
    starts_RD: Tensor

    def losses(self, x_RED: Tensor) -> Tensor:
        """F(x) - F*, [R, E]."""
        return 0.5 * (x_RED * (x_RED @ self.hessians_RDD)).sum(-1)


METHODS: tuple[tuple[str, str, bool], ...] = (
    ("noisy GD", "none", False),
    ("low pass", "low pass", False),
    ("DiSK", "two points", False),
    ("DiSK, Kalman gain", "kalman gain", False),
    ("noisy GD, falling rate", "none", True),
    ("DiSK, falling rate", "two points", True),
)


def draw_problems(settings: LinearRegression, spectrum: str, count: int, seed: int) -> Problems:
    """``count`` problems; x* is the origin, so a start is x_0 - x*."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, settings.examples, settings.dimension)
    features = torch.randn(shape, generator=generator, dtype=torch.float64)
    if spectrum == "power":
        features *= torch.arange(1, settings.dimension + 1, dtype=torch.float64) ** -0.5
    hessians = features.mT @ features / settings.examples
    hessians /= torch.linalg.eigvalsh(hessians)[:, -1, None, None]
    starts = torch.randn((count, settings.dimension), generator=generator, dtype=torch.float64)
    return Problems(hessians, starts)


def final_losses(
    problems: Problems, filter: Filter, rates_E: Tensor, noise_std: float, steps: int, seed: int, falling: bool
) -> Tensor:
    """F(x_T) - F* for each seed and rate, [R, E]; the same noise for all rates. ``falling``: linearly to 0."""
    generator = torch.Generator().manual_seed(seed)
    count, dimension = problems.starts_RD.shape
    x_RED = problems.starts_RD[:, None].expand(-1, len(rates_E), -1).clone()
    before_RED = x_RED
    state = filter.start()
    for t in range(steps):
        here, ahead = due_coefficients(filter, state)
        point_RED = x_RED
        if filter.lookahead is not None:
            # the gradient is linear: the weighted gradients are the gradient at the weighted points
            point_RED = here * x_RED + ahead * (x_RED + filter.lookahead * (x_RED - before_RED))
        noise_R1D = torch.randn((count, 1, dimension), generator=generator, dtype=torch.float64)
        gradient_RED = point_RED @ problems.hessians_RDD + noise_std * noise_R1D
        filtered_RED = state.update([gradient_RED])[0]
        rate_E1 = rates_E[:, None] * ((1 - t / steps) if falling else 1.0)
        before_RED, x_RED = x_RED, x_RED - rate_E1 * filtered_RED
    return problems.losses(x_RED)


def expected_loss(
    problems: Problems, filter: DiSK | LowPass | NoFilter, rate: float, noise_std: float, steps: int, falling: bool
) -> float:
    """The mean over the problems of E[F(x_T) - F*], exact, by the linear recursion in each eigendirection."""
    values_RD, vectors_RDD = torch.linalg.eigh(problems.hessians_RDD)
    starts_RD = (vectors_RDD.mT @ problems.starts_RD[..., None])[..., 0]
    schedule = rate * (1 - np.arange(steps) / steps) if falling else np.full(steps, rate)
    run = moments(values_RD.flatten().numpy(), starts_RD.flatten().numpy(), filter, schedule.tolist(), noise_std, steps)
    return float(run.loss(values_RD.flatten().numpy())[-1]) / len(values_RD)


def candidates(kind: str, settings: LinearRegression) -> Sequence[Filter]:
    """The filters among which a method is tuned."""
    if kind == "none":
        return [NoFilter()]
    if kind == "low pass":
        return low_pass_filters(settings.kappas)
    if kind == "kalman gain":
        return kalman_gain_filters(settings.kappas, settings.gammas)
    return two_point_filters(settings.kappas, settings.gammas)


def work(settings: LinearRegression) -> int:
    """How often `run_linear_regression` calls ``advance``."""
    cells = sum(len(candidates(kind, settings)) for _, kind, _ in METHODS)
    return cells * len(settings.noise_stds) * len(settings.spectra)


def run_linear_regression(settings: LinearRegression, advance: Callable[[], None] = lambda: None) -> list[Row]:
    """Tune each method at each noise level on its own seeds, then run it on others; a row a method and level."""
    rows: list[Row] = []
    for number, spectrum in enumerate(settings.spectra):
        tuning = draw_problems(settings, spectrum, settings.tuning_seeds, seed=1000 + number)
        evaluation = draw_problems(settings, spectrum, settings.seeds, seed=2000 + number)
        for level in range(len(settings.noise_stds)):
            rows += _level(settings, spectrum, level, tuning, evaluation, advance)
    return rows


def _level(
    settings: LinearRegression,
    spectrum: str,
    level: int,
    tuning: Problems,
    evaluation: Problems,
    advance: Callable[[], None],
) -> list[Row]:
    rows: list[Row] = []
    noise_std, steps = settings.noise_stds[level], settings.steps
    rates_E = torch.logspace(-3, math.log10(1.95), settings.rates, dtype=torch.float64)
    reference: Tensor | None = None
    for label, kind, falling in METHODS:

        def losses(filter: Filter, rates: Tensor, falling: bool = falling) -> Tensor:
            return final_losses(tuning, filter, rates, noise_std, steps, 3000 + level, falling)

        best = tune(losses, candidates(kind, settings), rates_E, advance)
        rate_1 = torch.tensor([best.learning_rate], dtype=torch.float64)
        found_R = final_losses(evaluation, best.filter, rate_1, noise_std, steps, 4000 + level, falling)[:, 0]
        reference = found_R if reference is None else reference
        assert isinstance(best.filter, DiSK | LowPass | NoFilter)
        constant = not isinstance(best.filter, DiSK) or best.filter.gain == "constant"
        exact: float | str = ""  # where gains change there is no exact expectation here
        if constant:
            exact = expected_loss(evaluation, best.filter, best.learning_rate, noise_std, steps, falling)
        rows.append(
            {
                "spectrum": spectrum,
                "noise_std": noise_std,
                "method": label,
                "learning_rate": best.learning_rate,
                "filter": describe(best.filter),
                "rate_at_edge": int(best.at_edge),
                "seeds": settings.seeds,
                **{f"loss_{name}": value for name, value in asdict(interval(found_R)).items()},
                "loss_expected": exact,
                **{f"ratio_{name}": value for name, value in asdict(ratio_interval(found_R, reference)).items()},
            }
        )
    return rows
