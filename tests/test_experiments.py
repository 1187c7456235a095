"""The experiments against slow loops and exact moments, and what `diskdp reproduce` writes."""

from __future__ import annotations

import csv
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diskdp import DiSK, LowPass, NoFilter
from diskdp.cli import run
from diskdp.clipping import Clipper
from diskdp.experiments import ablation, gain, regression
from diskdp.experiments.results import interval, ratio_interval
from diskdp.experiments.tuning import tune
from diskdp.filters.disk import Filter

SMALL = regression.LinearRegression(dimension=6, examples=30, steps=20)
FILTERS: list[Filter] = [NoFilter(), LowPass(kappa=0.3), DiSK(kappa=0.3, gamma=0.5), DiSK(kappa=0.05, gamma=-1.0)]


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
@pytest.mark.parametrize("falling", [False, True])
def test_regression_against_a_loop_over_seeds(filter: Filter, falling: bool) -> None:
    """Each seed and rate by itself, the recursion written out, both gradients taken."""
    problems = regression.draw_problems(SMALL, "power", 3, seed=1)
    rates = torch.tensor([0.1, 1.2], dtype=torch.float64)
    found = regression.final_losses(problems, filter, rates, 0.2, SMALL.steps, 9, falling)
    generator = torch.Generator().manual_seed(9)
    noise = [torch.randn((3, 1, 6), generator=generator, dtype=torch.float64) for _ in range(SMALL.steps)]
    kappa = 1.0 if isinstance(filter, NoFilter) else filter.kappa
    here, ahead = filter.coefficients
    for seed in range(3):
        hessian = problems.hessians_RDD[seed]
        for i, rate in enumerate(rates):
            x = before = problems.starts_RD[seed]
            average = None
            for t in range(SMALL.steps):
                gradient = here * hessian @ x + 0.2 * noise[t][seed, 0]
                if filter.lookahead is not None:
                    gradient = gradient + ahead * hessian @ (x + filter.lookahead * (x - before))
                average = gradient if average is None else (1 - kappa) * average + kappa * gradient
                before, x = x, x - rate * (1 - t / SMALL.steps if falling else 1) * average
            assert float(0.5 * x @ hessian @ x) == pytest.approx(float(found[seed, i]), rel=1e-9)


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
def test_regression_agrees_with_exact_moments(filter: Filter) -> None:
    """4,000 seeds, 5.5 standard errors: false alarm 4e-8 each."""
    problems = regression.draw_problems(SMALL, "white", 1, seed=2)
    many = regression.Problems(problems.hessians_RDD.expand(4000, -1, -1), problems.starts_RD.expand(4000, -1))
    rate = torch.tensor([0.5], dtype=torch.float64)
    losses = regression.final_losses(many, filter, rate, 0.3, SMALL.steps, 3, falling=True)[:, 0]
    assert isinstance(filter, NoFilter | LowPass | DiSK)
    exact = regression.expected_loss(problems, filter, 0.5, 0.3, SMALL.steps, falling=True)
    assert abs(float(losses.mean()) - exact) < 5.5 * float(losses.std()) / math.sqrt(4000)


def test_gamma_does_not_matter_on_a_linear_gradient() -> None:
    problems = regression.draw_problems(SMALL, "white", 2, seed=4)
    rate = torch.tensor([0.7], dtype=torch.float64)
    losses = [
        regression.final_losses(problems, DiSK(kappa=0.2, gamma=gamma), rate, 0.1, 20, 5, falling=False)
        for gamma in (-1.0, -0.3, 0.5, 4.0)
    ]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "filter",
    [
        NoFilter(),
        LowPass(kappa=0.4),
        DiSK(kappa=0.3, gamma=0.5),
        DiSK(kappa=0.3, gamma=-1.0, clip="separate"),
        DiSK(kappa=1.0, gamma=0.5, c=0.8),
    ],
    ids=repr,
)
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_ablation_against_per_example_gradients(filter: Filter, clipping: str) -> None:
    """Gradients of each example by autograd in float64, clipped one by one; noise times the sensitivity as derived."""
    settings = ablation.Ablation(dimension=4, examples=12, batch_size=5, steps=4)
    tables = ablation.draw_tables(settings, 2, seed=1)
    clipper = Clipper(clipping, 0.3)
    rates = torch.tensor([0.5, 3.0])
    found = ablation.final_losses(tables, filter, rates, clipper, 2.0, settings, 7)
    generator = torch.Generator().manual_seed(7)
    draws = [
        (torch.rand((2, 1, 12), generator=generator), torch.randn((2, 1, 4), generator=generator)) for _ in range(4)
    ]
    here, ahead = filter.coefficients
    kappa = 1.0 if isinstance(filter, NoFilter) else filter.kappa
    weight = abs(here) + abs(ahead) if filter.clip == "separate" else 1.0

    def clip(vector: torch.Tensor) -> torch.Tensor:
        norm = float(vector.norm())
        return vector * (0.3 / (norm + 0.01) if clipping == "automatic" else min(1.0, 0.3 / norm))

    for seed in range(2):
        features, labels = tables.features_RND[seed].double(), tables.labels_RN[seed].double()

        def gradient(x: torch.Tensor, i: int, features=features, labels=labels) -> torch.Tensor:
            leaf = x.clone().requires_grad_()
            loss = torch.nn.functional.softplus(-labels[i] * (features[i] @ leaf))
            return torch.autograd.grad(loss, leaf)[0]

        for e, rate in enumerate(rates.double()):
            x = before = torch.zeros(4, dtype=torch.float64)
            average = None
            for chosen, noise in draws:
                total = torch.zeros(4, dtype=torch.float64)
                for i in range(12):
                    if not chosen[seed, 0, i] < 5 / 12:
                        continue
                    first = gradient(x, i)
                    second = first if filter.lookahead is None else gradient(x + filter.lookahead * (x - before), i)
                    if filter.clip == "separate":
                        total += here * clip(first) + ahead * clip(second)
                    else:
                        total += clip(here * first + ahead * second)
                noised = (total + 2.0 * 0.3 * weight * noise[seed, 0].double()) / 5
                average = noised if average is None else (1 - kappa) * average + kappa * noised
                before, x = x, x - rate * average
            loss = torch.nn.functional.softplus(-labels * (features @ x)).mean()
            assert float(loss) == pytest.approx(float(found[seed, e]), rel=2e-5)


def test_cells_differ_in_what_they_say() -> None:
    settings = ablation.Ablation(kappas=(0.3,), gammas=(0.5,))
    full, bare = (ablation.candidates(ablation.Cell("two", on, "joint"), settings)[0] for on in (True, False))
    assert full.coefficients == bare.coefficients
    assert isinstance(full, DiSK)
    assert isinstance(bare, DiSK)
    assert (full.kappa, bare.kappa) == (0.3, 1.0)
    assert [f.clip for f in ablation.candidates(ablation.Cell("two", True, "separate"), settings)] == ["separate"]


def test_tuning_takes_the_best_and_skips_what_diverged() -> None:
    def losses(filter: Filter, rates: torch.Tensor) -> torch.Tensor:
        kappa = filter.coefficients[1] if isinstance(filter, DiSK) else 0.5
        table = torch.stack([(rates - 1).abs() + kappa, (rates - 1).abs() + kappa])
        table[0, -1] = torch.nan
        return table

    best = tune(losses, [NoFilter(), DiSK(kappa=0.9, gamma=1.0)], torch.tensor([0.5, 1.0, 0.99]))
    assert best.filter == DiSK(kappa=0.9, gamma=1.0)
    assert (best.learning_rate, best.at_edge) == (1.0, False)
    assert tune(losses, [NoFilter()], torch.tensor([1.0, 0.5, 0.4])).at_edge


def test_intervals_cover() -> None:
    """95% intervals of a mean and of a ratio, 2,000 trials each: .025 off is 5.1 deviations, a false alarm of 3e-7."""
    draw = np.random.default_rng(0)
    hits = [0, 0]
    for _ in range(2000):
        common = draw.normal(size=30)
        a, b = 2 + common + 0.3 * draw.normal(size=30), 4 + common
        mean, ratio = interval(torch.from_numpy(a)), ratio_interval(torch.from_numpy(a), torch.from_numpy(b))
        hits[0] += mean.low <= 2 <= mean.high
        hits[1] += ratio.low <= 0.5 <= ratio.high
    assert all(0.925 < hit / 2000 < 0.975 for hit in hits)


def test_gain_convergence_ends_at_the_limit() -> None:
    rows = gain.run_gain_convergence(gain.GainConvergence(steps=200))
    for row in rows[199::200]:
        assert row["gain"] == pytest.approx(row["gain_limit"], abs=1e-12)


@pytest.mark.parametrize("experiment", ["kappa-convergence", "linear-regression", "ablation"])
def test_reproduce_writes_figure_numbers_and_settings(
    experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "folder"
    assert run(["reproduce", experiment, "--out", str(out), "--quick"]) == 0
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(out / "figure.svg").getroot().tag.endswith("svg")
    rows = list(csv.DictReader((out / "numbers.csv").open(encoding="utf-8")))
    record = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    assert {"command", "settings", "versions"} <= set(record)
    assert str(out / "numbers.csv") in capsys.readouterr().out
    if experiment == "linear-regression":
        assert len(rows) == 6 * len(record["settings"]["noise_stds"]) * 2
        assert {row["method"] for row in rows} >= {"noisy GD", "low pass", "DiSK"}
        first = next(row for row in rows if row["method"] == "noisy GD")
        assert float(first["ratio_mean"]) == 1
    elif experiment == "ablation":
        assert len(rows) == 6 * len(record["settings"]["noise_multipliers"]) * 2
    else:
        assert len(rows) == 3 * record["settings"]["steps"]


def test_the_same_command_gives_the_same_numbers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(["reproduce", "ablation", "--out", str(tmp_path / name), "--quick", "--seeds", "3"]) == 0
    assert (tmp_path / "a" / "numbers.csv").read_bytes() == (tmp_path / "b" / "numbers.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "must be one of"),
        (["ablation", "--seeds", "1"], "at least 2"),
        (["linear-regression", "--steps", "2"], "at least 5"),
        (["kappa-convergence", "--seeds", "5"], "nothing random"),
    ],
)
def test_reproduce_refuses(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_spectrum_predicts_the_gain() -> None:
    """docs/theory.md: DiSK gains where noise sits in directions with ηλ ≳ κ, that is with white features, and little
    where most directions are flat; a low pass gains less than DiSK. Exact expectations, every method at its best."""
    settings = replace(SMALL, dimension=40, examples=400, steps=100)
    rates = np.logspace(-2, math.log10(1.95), 12)

    def best(problems: regression.Problems, filters: list[Filter], noise: float) -> float:
        found = []
        for filter in filters:
            assert isinstance(filter, NoFilter | LowPass | DiSK)
            found += [regression.expected_loss(problems, filter, rate, noise, 100, falling=False) for rate in rates]
        return min(found)

    gains = {}
    for spectrum in ("white", "power"):
        problems = regression.draw_problems(settings, spectrum, 1, seed=1)
        plain = best(problems, [NoFilter()], 0.1)
        low = best(problems, [LowPass(kappa=k) for k in (0.1, 0.3)], 0.1) / plain
        disk = best(problems, [DiSK(kappa=k, gamma=0.5) for k in (0.05, 0.15, 0.5)], 0.1) / plain
        assert disk < low
        gains[spectrum] = disk
    assert gains["white"] < 0.7 < 0.8 < gains["power"]
