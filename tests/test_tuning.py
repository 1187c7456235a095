"""Choices by timing: the same sums, each kind of terms timed once, a bad estimate overruled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from diskdp import Plan, privatize
from diskdp.clipping import Clipper
from diskdp.gradients import Engine, clip, planner, tuning
from diskdp.gradients.planner import Method
from diskdp.gradients.terms import Outer
from diskdp.gradients.tuning import Tuner
from tests import oracle
from tests.models import CASES, classify


@pytest.mark.parametrize("name", ["cnn5", "vit", "gpt-tied"])
def test_same_gradients_as_by_estimate(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model, batch, tuner = case.make(), case.batch(), Tuner()
    engine, clipper = Engine(model, case.loss), Clipper("flat", 0.1)
    estimated = clip(engine, batch, [(1.0, None)], clipper).summed()
    timed = clip(engine, batch, [(1.0, None)], clipper, tuner.choose).summed()
    assert tuner.choices
    assert oracle.relative_error(timed, estimated) < 1e-5


def test_each_kind_of_terms_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    original = tuning.milliseconds

    def watched(terms: list[Outer], method: Method, repeats: int) -> float:
        timed.append(method.name)
        return original(terms, method, repeats)

    monkeypatch.setattr(tuning, "milliseconds", watched)
    tuner = Tuner()
    for batch, width in ((8, 6), (9, 6), (15, 6), (16, 6), (8, 7)):  # up to twice the examples count as the same
        tuner.choose([Outer(torch.randn(batch, 5, 4), torch.randn(batch, 5, width), 4)])
    assert timed == ["gram", "per-example"] * 3


def test_a_wrong_estimate_is_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a 1000 × 1000 matrix: Gram matrices are ten times the faster, whatever the estimate says."""
    terms = [Outer(torch.randn(64, 2, 1000), torch.randn(64, 2, 1000), 1000)]
    honest = planner.methods(terms)
    swapped = [Method(m.name, 1.0 if m.name == "per-example" else 2.0, m.memory, m.keeps) for m in honest]
    monkeypatch.setattr(planner, "methods", lambda _: swapped)
    monkeypatch.setattr(tuning, "methods", lambda _: swapped)
    assert planner.choose(terms).name == "per-example"
    assert Tuner().choose(terms).name == "gram"


def test_what_is_hopeless_is_not_tried() -> None:
    conv = nn.Conv2d(3, 8, 3)
    engine, tuner = Engine(conv, lambda m, x: m(x).square().mean((1, 2, 3))), Tuner()
    found = clip(engine, torch.randn(2, 3, 40, 40), [(1.0, None)], Clipper("flat", 1.0), tuner.choose)
    assert "pixel-gram" not in tuner.choices.values()  # 1,444 positions: half a million multiplications too many
    assert set(found.summed()) == {"weight", "bias"}


def test_a_training_that_tunes_itself_takes_the_same_steps() -> None:
    weights = []
    for autotune in (False, True):
        torch.manual_seed(0)
        model = CASES["cnn5"].make()
        plan = Plan(dataset_size=24, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(model, optimizer, plan, loss_fn=classify, autotune=autotune, seed=3)
        images, labels = CASES["cnn5"].batch()
        data = TensorDataset(images.repeat(24, 1, 1, 1)[:24], labels.repeat(24)[:24])
        for batch in private.loader(data):
            private.step(batch)
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert oracle.relative_error(weights[0], weights[1]) < 1e-5
