"""What `explain` shows: costs on request, and no other difference."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from diskdp import explain
from diskdp.cli import run
from tests.models import CASES, D, classify, vectors


def test_measuring_adds_a_column_and_nothing_else() -> None:
    torch.manual_seed(0)
    case = CASES["gpt-tied"]
    model, batch = case.make(), case.batch()
    state = torch.get_rng_state()
    plain, start = explain(model, batch, case.loss), time.perf_counter()
    measured = explain(model, batch, case.loss, measure=True)
    passed = 1e3 * (time.perf_counter() - start)
    assert torch.equal(torch.get_rng_state(), state)
    assert tuple(replace(row, milliseconds=None) for row in measured) == plain.rows
    assert all(row.milliseconds is None for row in plain)
    times = [row.milliseconds for row in measured]
    assert all(t is not None and t > 0 for t in times)
    assert 0 < sum(t or 0.0 for t in times) < passed
    assert not plain.measured
    assert "ms/batch" not in str(plain)
    assert measured.measured
    head, first, *_ = str(measured).splitlines()
    assert head.endswith("ms/batch")
    assert first.endswith(f"{times[0]:.3f}")


def test_what_is_measured_follows_the_work() -> None:
    """A 1500 × 1500 matrix met by 20 rows an example against one of 8 × 1500: some 190 times the arithmetic."""
    model = nn.Sequential(nn.Linear(8, 1500, bias=False), nn.Tanh(), nn.Linear(1500, 1500, bias=False))
    rows = {
        row.name: row
        for row in explain(model, (torch.randn(16, 20, 8),), lambda m, b: m(b[0]).square().mean((1, 2)), measure=True)
    }
    small, large = rows["0.weight"].milliseconds, rows["2.weight"].milliseconds
    assert small is not None
    assert large is not None
    assert large > 1.5 * small


def test_a_refusal_is_explained_as_before() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 4))
    refused = explain(model, vectors(), classify, measure=True)
    assert refused.refused
    assert not refused.measured
    assert "GroupNorm" in str(refused)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "mlp", "--input-shape", "5", "--classes", "2", "--batch", "4"]
    assert run(command) == 0
    assert "ms/batch" not in capsys.readouterr().out
    assert run([*command, "--measure"]) == 0
    printed = capsys.readouterr().out
    assert "ms/batch" in printed
    assert re.search(r"layers\.0\.weight +\d+×5 +linear +gram +[\d.]+ +\d+\.\d{3}$", printed, re.MULTILINE)
