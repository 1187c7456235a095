"""`diskdp bench`: what it writes, and that its clock, its memory tracker and its check of exactness can be trusted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diskdp.bench import CASES, METHODS, Case, CaseSpec, Results, Settings, Unavailable, bench_case, bench_passes
from diskdp.bench.exactness import largest_error, loop
from diskdp.bench.measure import Work, interleaved
from diskdp.bench.memory import peak_bytes
from diskdp.bench.methods import BASELINE, points_at
from diskdp.bench.report import plot_ratios
from diskdp.cli import run
from diskdp.noise import GaussianNoise, Secret
from tests import oracle

QUICK = Settings(seconds=0.05, least_rounds=1)
DISKDP = (BASELINE, "dp-sgd", "disk", "disk-one-point")
MEGABYTE = 1 << 20


def tiny(microbatches: int = 1) -> Case:
    count = 6 * microbatches
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
    return Case(model, (4 * torch.randn(count, 12), torch.randint(3, (count,))), microbatches)


def measured(case: Case, names: tuple[str, ...] = DISKDP) -> Results:
    spec = CaseSpec(lambda: case, "tiny", 1.1, 2.2)
    return bench_case("tiny", spec, {name: METHODS[name] for name in names}, QUICK)


@pytest.mark.parametrize("microbatches", [1, 5])
def test_rows_of_a_tiny_model(microbatches: int) -> None:
    results = measured(tiny(microbatches))
    assert [row.method for row in results.rows] == list(DISKDP)
    assert not results.skipped
    for row in results.rows:
        assert row.ratio > 0
        assert row.cpu_ratio > 0
        assert row.max_relative_error < 1e-5
        assert row.timing == ("whole step" if microbatches == 1 else "first + 3 × middle + last microbatch")
    assert results.rows[0].ratio == results.rows[0].peak_memory_ratio == 1.0
    assert {part.part for part in results.parts} >= {"gradients, one point", "noise", "filter", "optimizer"}


def test_opacus_is_measured_beside() -> None:
    pytest.importorskip("opacus")
    results = measured(tiny(5), (BASELINE, "opacus-hooks", "opacus-ghost"))
    assert [row.method for row in results.rows] == [BASELINE, "opacus-hooks", "opacus-ghost"]
    assert all(row.max_relative_error < 1e-5 for row in results.rows)
    assert not results.parts  # nothing of diskdp was asked for


def test_what_opacus_refuses_is_left_out_with_the_reason() -> None:
    pytest.importorskip("opacus")
    case = tiny()
    normed = replace(case, model=nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3)).eval())
    [skipped] = measured(normed, (BASELINE, "opacus-hooks")).skipped
    assert skipped.method == "opacus-hooks"
    assert "Opacus refuses the model" in skipped.reason


def test_a_wrong_method_is_caught() -> None:
    right = METHODS["dp-sgd"]

    def scaled(case: Case, few: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        return {name: 1.001 * total for name, total in right.sums(case, few).items()}

    methods = {BASELINE: METHODS[BASELINE], "dp-sgd": right, "planted": replace(right, sums=scaled)}
    results = bench_case("tiny", CaseSpec(tiny, "tiny", 1.1, 2.2), methods, QUICK)
    assert [row.method for row in results.rows] == [BASELINE, "dp-sgd"]
    [skipped] = results.skipped
    assert skipped.method == "planted"
    assert "wrong" in skipped.reason


def test_a_model_that_cannot_be_built_is_left_out() -> None:
    def missing() -> Case:
        raise Unavailable("a package is not installed")

    results = bench_case("x", CaseSpec(missing, "x", 1.0, 2.0), {BASELINE: METHODS[BASELINE]}, QUICK)
    assert not results.rows
    assert results.skipped[0].reason == "a package is not installed"


def test_the_loop_is_the_oracle() -> None:
    case = tiny()
    points = points_at(case.model, [(-0.2, 0.0), (1.2, 0.05)])
    found = loop(case, case.examples, points, max_norm=0.5)
    model = case.model.double()
    doubled = tuple(t.double() if t.is_floating_point() else t for t in case.examples)
    doubles = [(a, values and {name: p.double() for name, p in values.items()}) for a, values in points]
    exact = oracle.clipped(oracle.per_example(model, doubled, case.losses, doubles), "flat", 0.5)
    assert oracle.relative_error(found, exact) < 1e-12


def test_largest_error_sees_what_is_missing_or_not_finite() -> None:
    exact = {"a": torch.ones(2).double(), "b": 2 * torch.ones(1).double()}
    assert largest_error(exact, exact) == 0
    assert largest_error({"a": exact["a"]}, exact) == 1
    assert largest_error({**exact, "a": torch.tensor([1.0, torch.nan])}, exact) == float("inf")


def test_peak_of_known_allocations() -> None:
    def prepare() -> Callable[[], object]:
        kept = torch.zeros(MEGABYTE)  # 4 MB

        def step() -> None:
            first = torch.zeros(2 * MEGABYTE)  # 8 MB
            del first
            second, third = torch.zeros(MEGABYTE), torch.zeros(MEGABYTE // 2)  # 6 MB
            del second, third
            kept.add_(1)

        return step

    def keeps_nothing_passing() -> Callable[[], object]:
        torch.zeros(8 * MEGABYTE)  # gone before the step
        return lambda: torch.zeros(MEGABYTE)

    assert peak_bytes(prepare) == 12 * MEGABYTE
    assert peak_bytes(keeps_nothing_passing) == 4 * MEGABYTE


def test_noise_filter_and_lookahead_are_in_the_peak() -> None:
    noise, sums = GaussianNoise(Secret.from_seed(0)), {"w": torch.zeros(MEGABYTE)}
    assert peak_bytes(lambda: lambda: noise.begin(sums, 1.0, 0).result()) == 4 * MEGABYTE
    model = nn.Linear(1024, 1024, bias=False)  # 4 MB; activations of 2 examples are a few kB
    case = Case(model, (torch.randn(2, 1024), torch.randint(10, (2,))))
    results = measured(case, (BASELINE, "dp-sgd", "disk"))
    plain, dp_sgd, disk = (row.peak_bytes / (4 * MEGABYTE) for row in results.rows)
    assert 2 <= plain < 2.1  # weights and gradient
    assert dp_sgd >= 2  # weights and noise
    assert disk >= dp_sgd + 2  # the filter's average and the look-ahead point


def test_a_step_put_together_is_a_whole_step() -> None:
    def slept(count: int) -> Work:
        def run(mark: Callable[[], None]) -> None:
            for number in range(count):
                mark()
                time.sleep(0.004 if number else 0.010)
            time.sleep(0.006)

        return Work(run, count, stands_for=8)

    found = interleaved({"few": slept(3), "whole": slept(8)}, seconds=0.5, least_rounds=3)
    assert found["few"].wall >= 10 + 7 * 4 + 6
    assert found["few"].wall <= 1.15 * found["whole"].wall  # not equal: on a busy machine sleepers wake late
    assert found["few"].cpu < found["few"].wall  # asleep


def test_passes_over_many_numbers() -> None:
    parts = {part.part: part for part in bench_passes(QUICK, size=10_000).parts}
    assert parts["torch.randn"].ratio == 1
    assert parts["noise and filter"].wall_ms >= parts["noise"].wall_ms > 0


def test_command_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["bench", "--quick", "--seconds", "0.2", "--models", "mlp", "--methods", "dp-sgd,disk"]
    assert run([*arguments, "--json", str(numbers), "--plot", str(picture)]) == 0
    document = json.loads(numbers.read_text())
    assert [row["method"] for row in document["rows"]] == [BASELINE, "dp-sgd", "disk"]
    for row in document["rows"]:
        assert row["model"] == "mlp"
        assert row["ratio"] > 0
        assert row["peak_memory_ratio"] >= 1
        assert 0 <= row["max_relative_error"] < 1e-4
    assert document["threads"] == 1
    assert document["versions"]["torch"] == torch.__version__
    assert document["machine"]["processor"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "diskdp DiSK(0.7, 0.5)" in shown
    assert document["command"] in shown


def test_plot_of_nothing_but_the_baseline(tmp_path: Path) -> None:
    plot_ratios(tmp_path / "none.png", Results(), {}, "")
    assert (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models", "mpl"],
        ["--models", ","],
        ["--methods", "dpsgd"],
        ["--threads", "0"],
        ["--seconds", "nan"],
        ["--json", "no/such/folder/x.json"],
        ["--plot", "x.pdf"],
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    written = capsys.readouterr()
    assert written.err.count("\n") == 1
    assert arguments[0] in written.err
    assert not written.out


def test_list_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*CASES, *METHODS, "noise-125m"))
