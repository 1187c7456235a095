"""The privacy card and the plots."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from diskdp import DiSK, Plan, PrivateTraining, privatize
from diskdp.report.card import card_of
from diskdp.report.plots import Curves, plot_accuracy, plot_epsilon

DATA = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100))


def training(plan: Plan, filter: DiSK | None = None, seed: int | None = None) -> PrivateTraining:
    model = torch.nn.Linear(3, 1)
    return privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        loss_fn=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
        filter=filter or DiSK(),
        seed=seed,
    )


def plan(**changes: object) -> Plan:
    settings = {"dataset_size": 100, "batch_size": 10, "steps": 4, "noise_multiplier": 2.0, "delta": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Plan(**{**settings, **changes})  # type: ignore[arg-type]


def test_card_follows_the_training() -> None:
    private = training(plan(unit="patient", clipping="normalized", max_grad_norm=0.5))
    for done, batch in enumerate(private.loader(DATA)):
        card = card_of(private)
        assert card.steps_charged == done
        assert card.epsilon == private.plan.epsilon_after(done)
        private.step(batch)
    card = card_of(private, ["the moon is round"])
    assert card.private
    assert card.warnings == ()
    assert (card.steps_charged, card.steps_planned) == (4, 4)
    assert card.epsilon == card.epsilon_planned == private.epsilon > 0
    assert (card.dataset_size, card.batch_size, card.sample_rate) == (100, 10, 0.1)
    assert (card.sensitivity, card.filter_factor) == (1.0, 1.0)  # normalised clipping: S = 1, whatever C is
    assert "patient" in card.adjacency
    assert "patient" in card.sampling
    assert card.public[-1] == "the moon is round"
    assert any("hyper-parameter search" in line for line in card.not_accounted)
    assert any("local diagnostics" in line for line in card.not_accounted)
    assert "secret of the operating system" in card.noise_source


def test_card_as_json_and_markdown() -> None:
    private = training(plan())
    card = card_of(private)
    values = json.loads(card.to_json())
    assert values.pop("format") == "diskdp-card/1"
    assert set(values) == set(vars(card))
    page = card.to_markdown()
    for text in (
        "(0, 0.001)-differential privacy",
        "one example",
        "add-remove",
        "Poisson",
        "| N, data set size | 100 |",
        "| B, expected batch size | 10 |",
        "| σ, noise multiplier | 2 |",
        "| C, clipping norm | 1 |",
        "0 charged, 4 planned",
        "dp-accounting",
        "DiSK(kappa=0.7",
        "hyper-parameter search",
        f"torch {torch.__version__}",
    ):
        assert text in page
    assert "Warning" not in page


@pytest.mark.parametrize(
    ("changes", "seed", "reason"),
    [
        ({}, 3, "a seed was given"),
        ({"noise_multiplier": 0.0}, None, "epsilon is infinite"),
        ({"noise_multiplier": 0.0, "max_grad_norm": float("inf")}, None, "epsilon is infinite"),
        ({"noise_multiplier": None, "epsilon": float("inf")}, None, "epsilon is infinite"),
    ],
)
def test_card_of_what_is_not_private(changes: dict[str, object], seed: int | None, reason: str) -> None:
    private = training(plan(**changes), seed=seed)
    private.step(next(iter(private.loader(DATA))))
    card = card_of(private)
    assert not card.private
    [warning] = card.warnings
    assert warning.startswith("NOT PRIVATE")
    assert reason in warning
    page = card.to_markdown()
    assert "differential privacy**" not in page
    assert "This run is NOT private" in page
    assert reason in page
    values = json.loads(card.to_json(), parse_constant=pytest.fail)
    assert (values["epsilon"] == "inf") == (seed is None)


def test_card_of_paper_accounting_is_no_guarantee() -> None:
    card = card_of(training(plan(sampling="fixed-size", paper_accounting=True)))
    assert not card.private
    assert card.paper_accounting
    assert card.warnings[0].startswith("NOT A GUARANTEE")
    page = card.to_markdown()
    assert "**NOT A GUARANTEE.**" in page
    assert "differential privacy**" not in page
    assert json.loads(card.to_json())["private"] is False


def test_card_names_unit_sampling_and_adjacency() -> None:
    card = card_of(training(plan(examples_per_unit=3, unit="patient", adjacency="zero-out")))
    page = card.to_markdown()
    assert "one patient, with at most 3 records" in page
    assert "each record joins each batch independently" in page
    assert "replaced by one that contributes nothing" in page
    truncated = plan(sampling="truncated-poisson", max_batch_size=60, adjacency="replace-one")
    page = card_of(training(truncated)).to_markdown()
    assert "of more than 60 a uniformly random subset" in page
    assert "replaced by another" in page


def test_card_warns_of_a_weak_delta() -> None:
    card = card_of(training(plan(delta=0.05)))
    assert card.private
    assert any("1/N" in warning for warning in card.warnings)


def test_card_states_separate_clipping() -> None:
    card = card_of(training(plan(max_grad_norm=2.0), DiSK(kappa=0.5, gamma=0.5, clip="separate")))  # c = 2
    assert (card.filter_factor, card.sensitivity) == (3.0, 6.0)


def _colours(path: Path) -> set[tuple[int, int, int]]:
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    return {tuple(int(v) for v in pixel) for pixel in np.unique(pixels.reshape(-1, 3), axis=0)}  # type: ignore[misc]


def test_plots_show_each_curve(tmp_path: Path) -> None:
    steps = (0, 10, 20)
    curves = [Curves(f"method {i}", steps, ((0.1, 0.5 + i / 10, 0.8), (0.2, 0.6, 0.82))) for i in range(3)]
    plot_accuracy(tmp_path / "accuracy.png", curves, "title", "subtitle")
    colours = _colours(tmp_path / "accuracy.png")
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= colours
    plot_accuracy(tmp_path / "one.png", curves[:1], "title", "subtitle", from_accuracy=0.4)
    assert (213, 94, 0) not in _colours(tmp_path / "one.png")
    plot_epsilon(tmp_path / "epsilon.png", plan())
    assert (0, 114, 178) in _colours(tmp_path / "epsilon.png")
