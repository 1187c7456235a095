"""What carries DiSK: a second point or the filter, one joint clip or two, on clipped and noised logistic regression.

Per-example gradients of a linear model are (residual) x feature, so that norms and clipped sums of all seeds and
learning rates come from two matrix products. Poisson batches, public denominator, noise_multiplier times sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from diskdp.clipping import Clipper
from diskdp.experiments.results import Row, interval, ratio_interval
from diskdp.experiments.tuning import GAMMAS, KAPPAS, Tuned, describe, low_pass_filters, tune
from diskdp.filters import DiSK, NoFilter
from diskdp.filters.disk import Filter


@dataclass(frozen=True)
class Ablation:
    """Settings. Features are Gaussian, their i-th column scaled by i^-½; labels follow a logistic model."""

    noise_multipliers: tuple[float, ...] = (0.5, 2.0, 8.0)
    dimension: int = 50
    examples: int = 500
    batch_size: int = 100
    steps: int = 150
    rates: int = 16
    kappas: tuple[float, ...] = KAPPAS
    gammas: tuple[float, ...] = GAMMAS
    clippings: tuple[str, ...] = ("flat", "automatic")
    thresholds: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)  # of flat clipping; automatic clipping only rescales the rate
    tuning_seeds: int = 5
    seeds: int = 24


@dataclass(frozen=True)
class Tables:
    """A data set for each seed: features [R, N, d], labels ±1 [R, N]."""

    features_RND: Tensor
    labels_RN: Tensor

    def losses(self, x_RED: Tensor) -> Tensor:
        """Mean logistic loss over all records, [R, E]."""
        margins_REN = (x_RED @ self.features_RND.mT) * self.labels_RN[:, None]
        return torch.nn.functional.softplus(-margins_REN).mean(-1)

    def slopes(self, x_RED: Tensor) -> Tensor:
        """The factor of each record's feature in its gradient, [R, E, N]."""
        labels_R1N = self.labels_RN[:, None]
        return -labels_R1N * torch.sigmoid(-labels_R1N * (x_RED @ self.features_RND.mT))


@dataclass(frozen=True)
class Cell:
    """One combination; with one point, "joint" and "separate" clip the same vectors."""

    points: Literal["one", "two"]
    filtered: bool
    clip: Literal["joint", "separate"]


CELLS = (
    Cell("one", False, "joint"),
    Cell("one", True, "joint"),
    Cell("two", False, "joint"),
    Cell("two", True, "joint"),
    Cell("two", False, "separate"),
    Cell("two", True, "separate"),
)


def draw_tables(settings: Ablation, count: int, seed: int) -> Tables:
    generator = torch.Generator().manual_seed(seed)
    scale_D = torch.arange(1, settings.dimension + 1, dtype=torch.float32) ** -0.5
    shape = (count, settings.examples, settings.dimension)
    features = torch.randn(shape, generator=generator, dtype=torch.float32) * scale_D
    truth_RD1 = 2 * torch.randn((count, settings.dimension, 1), generator=generator, dtype=torch.float32)
    chance_RN = torch.sigmoid((features @ truth_RD1)[..., 0])
    uniform_RN = torch.rand(chance_RN.shape, generator=generator, dtype=torch.float32)
    return Tables(features, torch.where(uniform_RN < chance_RN, 1.0, -1.0))


def final_losses(
    tables: Tables,
    filter: Filter,
    rates_E: Tensor,
    clipper: Clipper,
    noise_multiplier: float,
    settings: Ablation,
    seed: int,
) -> Tensor:
    """Mean loss over all records at the end, for each seed and rate, [R, E]; the same batches and noise for all."""
    generator = torch.Generator().manual_seed(seed)
    count, examples, dimension = tables.features_RND.shape
    lengths_R1N = tables.features_RND.norm(dim=-1)[:, None]
    here, ahead = filter.coefficients
    separate = filter.clip == "separate"
    sensitivity = clipper.sensitivity * ((abs(here) + abs(ahead)) if separate else 1.0)
    deviation = noise_multiplier * sensitivity / settings.batch_size
    x_RED = torch.zeros((count, len(rates_E), dimension), dtype=torch.float32)
    before_RED = x_RED
    state = filter.start()

    def clipped(slopes_REN: Tensor) -> Tensor:
        return slopes_REN * clipper.factors((slopes_REN.abs() * lengths_R1N)[None])[0]

    for _ in range(settings.steps):
        slopes_REN = tables.slopes(x_RED)
        if filter.lookahead is None:
            weights_REN = clipped(slopes_REN)
        else:
            ahead_REN = tables.slopes(x_RED + filter.lookahead * (x_RED - before_RED))
            if separate:
                weights_REN = here * clipped(slopes_REN) + ahead * clipped(ahead_REN)
            else:
                weights_REN = clipped(here * slopes_REN + ahead * ahead_REN)
        chosen_R1N = torch.rand((count, 1, examples), generator=generator, dtype=torch.float32)
        weights_REN = weights_REN * (chosen_R1N < settings.batch_size / examples)
        noise_R1D = torch.randn((count, 1, dimension), generator=generator, dtype=torch.float32)
        gradient_RED = weights_REN @ tables.features_RND / settings.batch_size + deviation * noise_R1D
        filtered_RED = state.update([gradient_RED])[0]
        before_RED, x_RED = x_RED, x_RED - rates_E[:, None] * filtered_RED
    return tables.losses(x_RED)


def candidates(cell: Cell, settings: Ablation) -> Sequence[Filter]:
    """The filters of a cell; without the average, two points keep DiSK's weight c and κ = 1."""
    if cell.points == "one":
        return low_pass_filters(settings.kappas) if cell.filtered else [NoFilter()]
    filters: list[Filter] = []
    for kappa in settings.kappas:
        for gamma in settings.gammas:
            c = (1 - kappa) / (kappa * gamma)
            full = DiSK(kappa=kappa, gamma=gamma, clip=cell.clip)
            filters.append(full if cell.filtered else DiSK(kappa=1.0, gamma=gamma, clip=cell.clip, c=c))
    return filters


def clippers(clipping: str, settings: Ablation) -> list[Clipper]:
    """The thresholds among which a cell is tuned."""
    return [Clipper(clipping, threshold) for threshold in (settings.thresholds if clipping == "flat" else (1.0,))]


def work(settings: Ablation) -> int:
    """How often `run_ablation` calls ``advance``."""
    clips = sum(len(clippers(clipping, settings)) for clipping in settings.clippings)
    return sum(len(candidates(cell, settings)) for cell in CELLS) * clips * len(settings.noise_multipliers)


def run_ablation(settings: Ablation, advance: Callable[[], None] = lambda: None) -> list[Row]:
    """Tune each cell at each noise multiplier on its own seeds, then run it on others; a row a cell and level."""
    tuning = draw_tables(settings, settings.tuning_seeds, seed=5000)
    evaluation = draw_tables(settings, settings.seeds, seed=6000)
    rows: list[Row] = []
    for clipping in settings.clippings:
        for level in range(len(settings.noise_multipliers)):
            rows += _level(settings, clipping, level, tuning, evaluation, advance)
    return rows


def _level(
    settings: Ablation, clipping: str, level: int, tuning: Tables, evaluation: Tables, advance: Callable[[], None]
) -> list[Row]:
    rows: list[Row] = []
    noise_multiplier = settings.noise_multipliers[level]
    rates_E = torch.logspace(-2.0, math.log10(60.0), settings.rates, dtype=torch.float32)
    reference: Tensor | None = None
    for cell in CELLS:
        found: list[tuple[Clipper, Tuned]] = []
        for clipper in clippers(clipping, settings):

            def losses(filter: Filter, rates: Tensor, clipper: Clipper = clipper) -> Tensor:
                return final_losses(tuning, filter, rates, clipper, noise_multiplier, settings, 7000 + level)

            found.append((clipper, tune(losses, candidates(cell, settings), rates_E, advance)))
        clipper, best = min(found, key=lambda pair: pair[1].loss)
        rate_1 = torch.tensor([best.learning_rate], dtype=torch.float32)
        found_R = final_losses(evaluation, best.filter, rate_1, clipper, noise_multiplier, settings, 8000 + level)[:, 0]
        reference = found_R if reference is None else reference
        rows.append(
            {
                "clipping": clipping,
                "noise_multiplier": noise_multiplier,
                "points": cell.points,
                "filter": "average" if cell.filtered else "none",
                "clip": cell.clip if cell.points == "two" else "either",
                "max_grad_norm": clipper.max_norm,
                "learning_rate": best.learning_rate,
                "tuned": describe(best.filter),
                "rate_at_edge": int(best.at_edge),
                "seeds": settings.seeds,
                **{f"loss_{name}": value for name, value in asdict(interval(found_R)).items()},
                **{f"ratio_{name}": value for name, value in asdict(ratio_interval(found_R, reference)).items()},
            }
        )
    return rows
