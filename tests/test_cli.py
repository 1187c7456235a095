"""The command line: what a run writes, what interrupts and resumes it, and how wrong input is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from diskdp import Plan, privatize
from diskdp.cli import run
from diskdp.cli.build import build_model
from diskdp.cli.config import ModelConfig, load_run
from diskdp.cli.folder import RunFolder
from diskdp.datasets import load_table
from diskdp.datasets.split import DataInfo, Split
from diskdp.ledger import Ledger
from diskdp.report.card import card_of
from diskdp.zoo import accuracy, build, classification_loss

ROWS = 80
SCHEMA = """
label = { column = "y", classes = ["no", "yes"] }
columns.age = { kind = "numeric", bounds = [0, 100] }
columns.sex = { kind = "categorical", categories = ["F", "M"] }
"""
RUN = """
[data]
kind = "csv"
train = "train.csv"
test = "test.csv"
schema = "schema.toml"

[model]
name = "linear"
init_seed = 0

[optimizer]
name = "SGD"
lr = 0.5
schedule = "warmup-cosine"

[plan]
batch_size = 20
epochs = 3
noise_multiplier = 1.0
delta = 1e-3
unit = "person"

[filter]
kind = "disk"
kappa = 0.7
gamma = 0.5

[run]
out = "out"
"""
MODELS = """
import signal
import torch
from torch import nn

class Interrupting(nn.Module):
    # Presses Ctrl-C at one of its calls in training.
    calls = 0

    def __init__(self, features, classes, at):
        super().__init__()
        self.head = nn.Linear(features, classes)
        self.at = at

    def forward(self, x):
        if self.training:
            Interrupting.calls += 1
            if Interrupting.calls == self.at:
                signal.raise_signal(signal.SIGINT)
        return self.head(x)

def interrupting(shape, classes, at=10**9):
    Interrupting.calls = 0
    return Interrupting(shape[0], classes, at)

def normalized(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

def wide(shape, classes):
    return nn.Linear(shape[0], classes + 1)

def failing(shape, classes):
    return nn.Linear(shape[0] + 1, classes)
"""


def _write_table(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ages = generator.integers(0, 101, ROWS)
    lines = [f"{age},{'FM'[i % 2]},{'yes' if age > 50 else 'no'}" for i, age in enumerate(ages)]
    path.write_text("\n".join(["age,sex,y", *lines]) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    _write_table(tmp_path / "train.csv", 0)
    _write_table(tmp_path / "test.csv", 1)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "cli_test_models.py").write_text(MODELS)
    path, modules = list(sys.path), set(sys.modules)
    torch.set_num_threads(1)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "cli_test_models":
            del sys.modules[name]


def train(folder: Path, *flags: str) -> int:
    return run(["train", str(folder / "run.toml"), *flags])


def edit(folder: Path, old: str, new: str, file: str = "run.toml") -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


def card(folder: Path, out: str = "out") -> dict[str, object]:
    return dict(json.loads((folder / out / "release" / "card.json").read_text()))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("diskdp: error: ")
    return line


# A run


def test_run_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    out = folder / "out"
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == {
        "README.md",
        "release/card.json",
        "release/card.md",
        "release/weights.safetensors",
        "private/config.json",
        "private/metrics.jsonl",
        "private/checkpoint.safetensors",
        "private/checkpoint.previous.safetensors",
        "private/ledger.jsonl",
        "private/.ledger.jsonl.lock",
        "private/key",
    }
    assert (out / "private/key").stat().st_mode & 0o777 == 0o600
    assert (out / "private").stat().st_mode & 0o777 == 0o700
    # What was taken from where.
    assert "age: numeric, clipped to [0, 100], linear onto [-1, 1] (declared in schema.toml)" in printed.out
    assert f"N = {ROWS}: the number of training rows" in printed.out

    plan = Plan(
        dataset_size=ROWS, batch_size=20, epochs=3, noise_multiplier=1.0, delta=1e-3, unit="person", noise="secure"
    )
    facts = card(folder)
    assert facts["private"] is True
    assert facts["epsilon"] == pytest.approx(plan.epsilon_after(12), rel=1e-6)
    assert (facts["steps_charged"], facts["steps_planned"], facts["unit"]) == (12, 12, "person")
    assert len((out / "private" / "ledger.jsonl").read_text().splitlines()) == 12

    notice, *lines = [json.loads(line) for line in (out / "private" / "metrics.jsonl").read_text().splitlines()]
    assert "not covered by the guarantee" in notice["notice"]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(12))
    assert steps[0]["lr"] == 0.5
    assert steps[-1]["lr"] < 0.02

    split = load_table(folder / "train.csv", folder / "test.csv", folder / "schema.toml")
    model = build("linear", split.info.input_shape, 2)
    model.load_state_dict(load_file(out / "release" / "weights.safetensors"))
    scores = [line["test_accuracy"] for line in lines if "test_accuracy" in line]
    assert len(scores) == 3
    assert scores[-1] == accuracy(model, split.test)

    config = json.loads((out / "private" / "config.json").read_text())
    assert config["plan"] == json.loads(plan.to_json())
    assert config["data"]["train"] == str((folder / "train.csv").resolve())
    assert config["filter"]["kappa"] == 0.7


def test_released_half_has_nothing_measured_without_noise(folder: Path) -> None:
    assert train(folder) == 0
    text = (folder / "out/release/card.json").read_text() + (folder / "out/release/card.md").read_text()
    measured = [
        str(value)
        for line in (folder / "out/private/metrics.jsonl").read_text().splitlines()
        for key, value in json.loads(line).items()
        if key in ("loss", "median_norm", "clipped_fraction", "test_accuracy")
    ]
    telling = [value for value in measured if len(value) > 10]  # shorter ones, such as 0.5, may stand there by chance
    assert len(telling) >= 20  # of the loss and the median norm of 12 steps
    assert not [value for value in telling if value in text]


def test_flags_override_the_file(folder: Path) -> None:
    flags = ["--epsilon", "3", "--steps", "5", "--lr", "0.25", "--filter", "lowpass", "--kappa", "0.4"]
    other = folder / "elsewhere" / "deep"
    assert train(folder, *flags, "--out", str(other), "--set", "optimizer.options.momentum=0.5") == 0
    config = json.loads((other / "private" / "config.json").read_text())
    assert config["plan"]["epsilon"] == 3
    assert config["plan"]["steps"] == 5
    assert config["plan"]["noise_multiplier"] != 1.0
    assert config["optimizer"]["lr"] == 0.25
    assert config["optimizer"]["options"] == {"momentum": 0.5}
    assert config["filter"] | {} == {
        "kind": "lowpass", "kappa": 0.4, "gamma": None, "clip": None, "c": None, "gain": None, "a": None, "b": None
    }  # fmt: skip
    assert json.loads((other / "release" / "card.json").read_text())["filter"] == "LowPass(kappa=0.4)"


def test_microbatches_change_nothing(folder: Path) -> None:
    assert train(folder, "--seed", "1") == 0
    assert train(folder, "--seed", "1", "--microbatch-size", "3", "--out", str(folder / "small")) == 0
    whole, small = (load_file(folder / out / "release" / "weights.safetensors") for out in ("out", "small"))
    for name in whole:
        torch.testing.assert_close(whole[name], small[name], rtol=1e-5, atol=1e-6)


def test_parquet_and_images(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow.csv").read_csv(folder / "train.csv")
    parquet.write_table(table, folder / "train.parquet")
    edit(folder, 'kind = "csv"\ntrain = "train.csv"\ntest = "test.csv"', 'kind = "parquet"\ntrain = "train.parquet"')
    assert train(folder) == 0
    assert "test_accuracy" not in (folder / "out/private/metrics.jsonl").read_text()

    generator = np.random.default_rng(0)
    images = {"x": generator.integers(0, 256, (40, 8, 8, 3), np.uint8), "y": generator.integers(0, 3, 40)}
    np.savez(folder / "set.npz", images=images["x"], labels=images["y"])
    (folder / "run.toml").write_text(
        RUN.replace(
            RUN[RUN.index("[data]") : RUN.index("[model]")],
            '[data]\nkind = "images"\nfolder = "set.npz"\nclasses = 3\n\n',
        )
    )
    assert train(folder, "--out", str(folder / "images")) == 0
    assert any("labels: 3 classes (declared)" in line for line in card(folder, "images")["public"])  # type: ignore[attr-defined]


def test_idx_images(folder: Path) -> None:
    generator = np.random.default_rng(0)
    (folder / "idx").mkdir()
    for which, count in (("train", 60), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 6, 6), np.uint8)
        head = bytes((0, 0, 8, 3)) + np.array(images.shape, ">u4").tobytes()
        (folder / "idx" / f"{which}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = generator.integers(0, 10, count).astype(np.uint8)
        head = bytes((0, 0, 8, 1)) + np.array(labels.shape, ">u4").tobytes()
        (folder / "idx" / f"{which}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    data = RUN[RUN.index("[data]") : RUN.index("[model]")]
    (folder / "run.toml").write_text(RUN.replace(data, '[data]\nkind = "images"\nfolder = "idx"\n\n'))
    assert train(folder) == 0
    assert card(folder)["dataset_size"] == 60


# What is not private says so


def test_a_seed_is_not_private(folder: Path) -> None:
    assert train(folder, "--seed", "3") == 0
    facts = card(folder)
    assert facts["private"] is False
    assert any("seed" in warning for warning in facts["warnings"])  # type: ignore[attr-defined]
    assert "NOT private" in (folder / "out/release/card.md").read_text()


def test_infinite_epsilon_is_allowed_and_loud(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--epsilon", "inf") == 0
    printed = capsys.readouterr()
    assert "diskdp: warning: nothing is private" in printed.err
    assert "nothing is private" in printed.out
    assert card(folder)["private"] is False
    assert card(folder)["epsilon"] == "inf"


def test_weak_delta_warns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--delta", "0.1") == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("diskdp: warning: delta=0.1 is not below 1/dataset_size")


def test_separate_clipping_is_on_the_card(folder: Path) -> None:
    assert train(folder, "--set", "filter.clip=separate") == 0
    facts = card(folder)
    c = 0.3 / (0.7 * 0.5)
    assert facts["filter_factor"] == pytest.approx(abs(c) + abs(1 - c))
    assert facts["sensitivity"] == facts["filter_factor"]


# Wrong input: one line, exit code 2, nothing written

BAD_FLAGS = [
    (["--epsilon", "0"], "epsilon must be positive"),
    (["--epsilon", "-1"], "epsilon must be positive"),
    (["--epsilon", "nan"], "epsilon must be a number"),
    (["--delta", "0"], "delta must be strictly between 0 and 1"),
    (["--delta", "1"], "delta must be strictly between 0 and 1"),
    (["--batch-size", "81"], "batch_size=81 is larger than dataset_size=80"),
    (["--kappa", "0"], r"kappa=0.0 must lie in \(0, 1\]"),
    (["--kappa", "1.01"], r"kappa=1.01 must lie in \(0, 1\]"),
    (["--gamma", "0"], "gamma=0.0 must be finite and not 0"),
    (["--epsilon", "1", "--noise-multiplier", "1"], "exactly one of epsilon and noise_multiplier"),
    (["--epochs", "1", "--steps", "1"], "exactly one of epochs and steps"),
    (["--max-grad-norm", "0"], "max_grad_norm must be positive"),
    (["--microbatch-size", "0"], "microbatch_size=0"),
    (["--set", "plan.dataset_size=81"], "N = 81 records but this data set has 80"),
    (["--set", "plan.sampling=fixed-size"], "sampling='fixed-size' has no guarantee under adjacency='add-remove'"),
    (["--set", "plan.sampling=balls-in-bins"], "sampling='balls-in-bins' is not built"),
    (["--set", "plan.epsilom=1"], r"\[plan\] epsilom: unknown key; did you mean 'epsilon'"),
    (["--set", "plans.epsilon=1"], "--set plans.epsilon.*did you mean 'plan'"),
    (["--set", "plan.batch_size=many"], r"\[plan\] batch_size: must be a whole number, got 'many'"),
    (["--set", "run.eval_every=0"], r"\[run\] eval_every"),
    (["--set", "optimizer.name=SDG"], "torch.optim has no 'SDG'; did you mean 'SGD'"),
    (["--set", "optimizer.options.momentun=0.9"], "momentun.*did you mean 'momentum'"),
    (["--set", "optimizer.options.momentum=-1"], "SGD cannot be made"),
    (["--set", "optimizer.name=LBFGS"], "LBFGS would evaluate the loss several times a step"),
    (["--lr", "-1"], r"\[optimizer\] lr"),
    (["--set", "model.name=liner"], "model 'liner' is unknown"),
    (["--set", "model.options.depth=3"], "unknown option 'depth'"),
    (["--set", "model.name=no_such_module:make"], "cannot import no_such_module"),
    (["--set", "model.name=cli_test_models:normalized"], "BatchNorm in training mode"),
    (["--set", "model.name=cli_test_models:wide"], r"must return logits \[4, 2\] here, and returns \[4, 3\]"),
    (["--set", "model.name=cli_test_models:failing"], r"fails on inputs of shape \[3\]"),
    (["--set", "filter.c=inf"], "c=inf"),
    (["--filter", "none", "--kappa", "0.5"], r"\[filter\] kappa: has no meaning for kind \"none\""),
    (["--filter", "kalman"], r"\[filter\] kind: must be one of disk, lowpass, none"),
    (["--set", "data.train=nowhere.csv"], "nowhere.csv: no such file"),
    (["--set", "data.folder=x"], r"\[data\] folder: has no meaning for kind \"csv\""),
    (["--nonsense"], "No such option"),
    (["--epochs", "three"], "--epochs"),
    (["--resume"], "no run to resume"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_bad_flags(folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(folder)
    assert train(folder, *flags) == 2
    assert re.search(message, one_error(capsys))
    assert snapshot(folder).keys() - before.keys() <= {str(p) for p in folder.rglob("__pycache__/*")}, (
        "a refused run must leave nothing behind"
    )
    assert not (folder / "out").exists()


BAD_FILES = [
    ("run.toml", "[plan]", "[plan", r"run.toml: not valid TOML: .*line"),
    ("run.toml", "[optimizer]", "[optimiser]", r"\[optimiser\]: unknown key; did you mean 'optimizer'"),
    ("run.toml", 'kind = "csv"', "", r"\[data\] kind: is missing"),
    ("run.toml", "noise_multiplier = 1.0", "", "exactly one of epsilon and noise_multiplier"),
    ("run.toml", "noise_multiplier = 1.0", "noise_multiplier = 1.0\nepsilon = 1", "exactly one of epsilon"),
    ("run.toml", 'lr = 0.5', 'lr = "fast"', r"\[optimizer\] lr: must be a number, got 'fast'"),
    ("run.toml", 'lr = 0.5', "lr = true", r"\[optimizer\] lr: must be a number, got True"),
    ("run.toml", 'schema = "schema.toml"', "", r"\[data\] schema: is missing"),
    ("run.toml", '"schema.toml"', '"gone.toml"', "gone.toml: the schema cannot be read"),
    ("train.csv", "age,sex,y", "age,gender,y", "train.csv: missing column 'sex'"),
    ("train.csv", "age,sex,y\n", "age,sex,y\nold,F,no\n", r"train.csv, row 1 \(line 2\), column 'age': 'old' is not a"),
    ("train.csv", "age,sex,y\n", "age,sex,y\n10,X,no\n", r"row 1 \(line 2\), column 'sex': unknown category 'X'"),
    ("test.csv", "age,sex,y\n", "age,sex,y\n10,F,maybe\n", r"test.csv, row 1 \(line 2\), column 'y': 'maybe'"),
    ("schema.toml", "numeric", "number", r"schema.toml: columns.age.kind"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "message"), BAD_FILES)
def test_bad_files(
    folder: Path, file: str, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, old, new, file)
    assert train(folder) == 2
    assert re.search(message, one_error(capsys))
    assert not (folder / "out").exists()


def test_missing_and_binary_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(folder / "none.toml")]) == 2
    assert "none.toml: the run file cannot be read" in one_error(capsys)
    (folder / "run.toml").write_bytes(b"\xff\xfe\x00")
    assert train(folder) == 2
    assert "not a text in UTF-8" in one_error(capsys)


def test_existing_folder_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    before = snapshot(folder / "out")
    capsys.readouterr()
    assert train(folder) == 2
    assert "exists already" in one_error(capsys)
    assert snapshot(folder / "out") == before
    (folder / "file").write_text("mine")
    assert train(folder, "--out", str(folder / "file")) == 2
    assert (folder / "file").read_text() == "mine"


def test_unwritable_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("mine")
    assert train(folder, "--out", str(folder / "file" / "below")) == 2
    assert "file" in one_error(capsys)


# Interrupting and resuming


def test_interrupt_then_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, 'name = "linear"', 'name = "cli_test_models:interrupting"\noptions = { at = 45 }')
    assert train(folder) == 130
    assert "--resume goes on with it" in capsys.readouterr().err
    ledger = folder / "out/private/ledger.jsonl"
    done = len(ledger.read_text().splitlines())
    assert 0 < done < 12
    assert not (folder / "out/release").exists()
    model = (folder / "cli_test_models.py").read_text()
    (folder / "cli_test_models.py").write_text(model.replace("calls == self.at", "calls == -1"))
    del sys.modules["cli_test_models"]
    assert train(folder, "--resume") == 0
    assert f"going on after step {done} of 12" in capsys.readouterr().out
    assert len(ledger.read_text().splitlines()) == 12
    assert card(folder)["steps_charged"] == 12


def test_resumed_run_equals_an_uninterrupted_one(folder: Path) -> None:
    """With a seed; momentum, schedule, filter and look-ahead all have to come back."""
    edit(folder, "lr = 0.5", "lr = 0.5\noptions = { momentum = 0.9 }")
    edit(folder, 'name = "linear"', 'name = "cli_test_models:interrupting"\noptions = { at = 45 }')
    assert train(folder, "--seed", "5") == 130
    model = (folder / "cli_test_models.py").read_text()
    (folder / "cli_test_models.py").write_text(model.replace("calls == self.at", "calls == -1"))
    del sys.modules["cli_test_models"]
    assert train(folder, "--seed", "5", "--resume") == 0
    assert train(folder, "--seed", "5", "--out", str(folder / "whole")) == 0
    resumed, whole = (load_file(folder / out / "release/weights.safetensors") for out in ("out", "whole"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_lost_steps_stay_charged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps after the last checkpoint are repeated at a cost of their own, and the plan is never passed."""
    edit(folder, 'name = "linear"', 'name = "cli_test_models:interrupting"\noptions = { at = 45 }')
    assert train(folder, "--out", str(folder / "early")) == 130
    private = folder / "early" / "private"
    done = len((private / "ledger.jsonl").read_text().splitlines())
    fingerprint = json.loads((private / "ledger.jsonl").read_text().splitlines()[0])["run"]
    Ledger(private / "ledger.jsonl", fingerprint).at_least(done + 2)  # of samples that nobody knows
    model = (folder / "cli_test_models.py").read_text()
    (folder / "cli_test_models.py").write_text(model.replace("calls == self.at", "calls == -1"))
    del sys.modules["cli_test_models"]
    capsys.readouterr()
    assert train(folder, "--out", str(folder / "early"), "--resume") == 0
    assert "the budget is used up at step 10 of 12" in capsys.readouterr().err
    facts = card(folder, "early")
    assert done < 10
    assert facts["steps_charged"] == 12
    assert facts["epsilon"] <= facts["epsilon_planned"] * (1 + 1e-9)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--noise-multiplier", "2"], "another plan .*noise_multiplier: then 1.0, now 2.0"),
        (["--kappa", "0.5"], "another filter .*kappa: then 0.7, now 0.5"),
        (["--lr", "1"], "another optimizer"),
        (["--seed", "1", "--set", "plan.noise=secure"], "another seed"),
    ],
)
def test_resume_with_another_configuration(
    folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder) == 0
    before = snapshot(folder / "out")
    capsys.readouterr()
    assert train(folder, "--resume", *flags) == 2
    assert re.search(message, one_error(capsys))
    assert snapshot(folder / "out") == before


def test_resume_from_a_damaged_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    checkpoint = folder / "out/private/checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-40])
    capsys.readouterr()
    assert train(folder, "--resume") == 2
    assert "checkpoint.safetensors" in one_error(capsys)


# plan, explain, demo


SMALL = ["--dataset-size", "100", "--batch-size", "10", "--epochs", "1", "--delta", "1e-3"]


def test_plan_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ["plan", "--dataset-size", "60000", "--batch-size", "2000", "--epochs", "3", "--epsilon", "3"]
    assert run([*setting, "--delta", "1e-5"]) == 0
    table = capsys.readouterr().out
    plan = Plan(dataset_size=60_000, batch_size=2000, epochs=3, epsilon=3.0, delta=1e-5)
    assert f"{plan.noise_multiplier:.6g}" in table
    rows = [line.split() for line in table.splitlines() if re.match(r" +\d", line)]
    assert [row[:2] for row in rows] == [["1", "30"], ["2", "60"], ["3", "90"]]
    assert [float(row[2]) for row in rows] == [pytest.approx(plan.epsilon_after(t), abs=6e-5) for t in (30, 60, 90)]
    assert run([*setting, "--delta", "1e-5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert Plan.from_json(json.dumps(answer["plan"])) == plan
    assert [row["steps"] for row in answer["spent"]] == [30, 60, 90]


def test_plan_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "epsilon.png"
    assert run(["plan", *SMALL, "--noise-multiplier", "2", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert run(["plan", *SMALL, "--noise-multiplier", "2", "--plot", str(tmp_path / "no" / "e.png")]) == 2
    assert "no/e.png" in one_error(capsys)
    assert run(["plan", *SMALL, "--noise-multiplier", "0", "--plot", str(file)]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_plan_finds_steps_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ["plan", "--dataset-size", "10000", "--delta", "1e-5", "--epsilon", "2", "--noise-multiplier", "2"]
    assert run([*setting, "--batch-size", "100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    plan = Plan(dataset_size=10_000, batch_size=100, epsilon=2.0, noise_multiplier=2.0, delta=1e-5)
    assert (answer["steps"], answer["steps_per_epoch"], answer["guarantee"]) == (plan.steps, 100, True)
    assert Plan.from_json(json.dumps(answer["plan"])) == plan
    assert run([*setting, "--steps", "100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["batch_size"] > 100
    assert answer["spent"][-1]["epsilon"] == pytest.approx(2.0, rel=0.01)


def test_plan_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ["plan", *SMALL, "--noise-multiplier", "3"]
    for options in (
        ["--sampling", "fixed-size", "--adjacency", "replace-one"],
        ["--sampling", "shuffled", "--adjacency", "zero-out", "--examples-per-unit", "2"],
        ["--sampling", "truncated-poisson", "--max-batch-size", "60"],
    ):
        assert run([*setting, *options]) == 0, options
        assert options[1] in capsys.readouterr().out
    assert run([*setting, "--sampling", "fixed-size", "--paper-accounting"]) == 0
    shown = capsys.readouterr()
    assert "NOT A GUARANTEE" in shown.out
    assert "not a guarantee" in shown.err


@pytest.mark.parametrize("by", ["steps", "batch"])
def test_plan_explored(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "explored.png"
    setting = ["plan", *SMALL, "--epsilon", "4", "--explore", by]
    assert run([*setting, "--plot", str(file)]) == 0
    table = capsys.readouterr().out
    assert run([*setting, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    explored = answer["explored"]
    assert explored["by"] == by
    middle = explored["values"].index(answer["steps"] if by == "steps" else answer["plan"]["batch_size"])
    assert explored["noise_multipliers"][2][middle] == answer["noise_multiplier"]
    for row in explored["noise_multipliers"]:
        assert row == sorted(row)
        assert all(f"{sigma:.4g}" in table for sigma in row)
    pixels = (matplotlib.image.imread(file)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    assert {(0, 114, 178), (86, 180, 233)} <= {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}


def test_plan_without_privacy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SMALL, "--noise-multiplier", "0", "--explore", "steps"]) == 2
    assert "nothing to explore, epsilon is infinite" in capsys.readouterr().err
    setting = ["plan", "--dataset-size", "100", "--batch-size", "10", "--steps", "3", "--delta", "1e-3"]
    assert run([*setting, "--epsilon", "inf", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["spent"][-1]["epsilon"] == "inf"
    assert printed.err.startswith("diskdp: warning: nothing is private")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--dataset-size", "10"], "Missing option"),
        (["plan", "--dataset-size", "ten"], "--dataset-size"),
        (["plan", *SMALL], "exactly one of epsilon"),
        (["plan", *SMALL, "--epsilon", "1", "--noise-multiplier", "1"], "nothing is left to solve for"),
        (["plan", *SMALL, "--epsilon", "1", "--explore", "delta"], "--explore delta: must be steps or batch"),
        (["plan", *SMALL, "--epsilon", "1", "--max-batch-size", "9"], "max_batch_size=9 has no meaning"),
        (["explain", "cnn5"], "give --input-shape"),
        (["explain", "cnn5", "--input-shape", "3,x", "--classes", "2"], "--input-shape '3,x'"),
        (["explain", "cnn5", "--input-shape", "3", "--classes", "2"], "cnn5: needs images"),
        (["explain", "mlp", "--input-shape", "3", "--classes", "2", "--option", "depth=2"], "unknown option 'depth'"),
        (["explain", "mlp", "--input-shape", "3", "--classes", "2", "--option", "depth"], "must read key=value"),
        (["demo", "--seeds", "0"], "--seeds 0"),
        (["nonsense"], "No such command"),
    ],
)  # fmt: skip
def test_bad_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert message in one_error(capsys)


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--option", "widths=[7]", "--option", "activation=relu"]
    assert run(["explain", "mlp", "--input-shape", "5", "--classes", "2", *options]) == 0
    table = capsys.readouterr().out
    assert re.search(r"layers\.0\.weight +7×5 +linear +gram", table)
    assert run(["explain", "gpt", "--input-shape", "6", "--classes", "11"]) == 0
    assert re.search(r"tokens\.weight +11×64 +embedding\+linear", capsys.readouterr().out)
    assert run(["explain", str(folder / "run.toml")]) == 0
    assert re.search(r"head\.weight +2×3 +linear", capsys.readouterr().out)
    monkeypatch.chdir(folder)
    assert run(["explain", "cli_test_models:normalized", "--input-shape", "5", "--classes", "2"]) == 2
    printed = capsys.readouterr()
    assert re.search(r"1\.weight +4 +refused", printed.out)
    assert printed.err.count("\n") == 1
    assert "replace it by GroupNorm" in printed.err


def test_quick_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert run(["demo", "--quick", "--seeds", "2", "--seed", "0", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "these runs are not private" in printed.err
    for method in ("DP-SGD", "low-pass", "DiSK"):
        [row] = [line for line in printed.out.splitlines() if line.split()[:1] == [method] and "%" in line]
        assert re.search(r"\d\d\.\d\d% ± \d\.\d\d% +\d\.\d{4}", row)
    assert "Not accounted" in printed.out
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert all(len(method["test_accuracy"]) == 2 for method in results["methods"].values())
    assert all(method["epsilon"] <= 1 for method in results["methods"].values())
    assert "NOT private" in (out / "card-disk.md").read_text()
    assert not (out / "card-disk.md").read_text().startswith("{")


# From outside


def outside(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "diskdp", *arguments], capture_output=True, text=True, timeout=120)


def test_process(folder: Path) -> None:
    done = outside("train", str(folder / "run.toml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    again = outside("train", str(folder / "run.toml"))
    assert again.returncode == 2
    assert again.stdout == ""
    assert again.stderr.count("\n") == 1
    assert again.stderr.startswith("diskdp: error: ")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    for command in ([], ["plan"], ["train"], ["explain"], ["demo"]):
        assert run([*command, "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--epsilon", "--resume", "--input-shape", "--seeds", "RUN.toml"):
        assert word in text


def test_every_key_of_the_reference_is_read(folder: Path) -> None:
    """docs/cli.md shows a complete run file; it must be one."""
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    [example] = re.findall(r"```toml run\.toml\n(.*?)```", page, re.DOTALL)
    (folder / "run.toml").write_text(example)
    config = load_run(folder / "run.toml", {})
    assert config.run.out == (folder / "runs/first").resolve()
    for section in ("data", "model", "optimizer", "plan", "filter", "run"):
        for key in vars(getattr(config, section)):
            assert f"`{key}`" in page, f"docs/cli.md does not explain [{section}] {key}"


ACTNORM = """
import torch

class ActNorm(torch.nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.layer = torch.nn.Linear(features, classes)
        self.bias = torch.nn.Parameter(torch.zeros(features))
        self.ready = False
        self._register_state_dict_hook(lambda module, state, *_: state.update(seen=torch.ones(1)))

    def forward(self, x):
        if not self.ready:
            self.bias.data.copy_(1 - x.mean(0))
            self.ready = True
        return self.layer(x + self.bias)

def make(shape, classes):
    return ActNorm(shape[0], classes)
"""


def test_a_model_is_tried_on_made_up_data_and_only_weights_are_released(tmp_path: Path) -> None:
    """What a model keeps of the first rows it sees, or adds to its state, is not noised."""
    (tmp_path / "actnorm_of_test.py").write_text(ACTNORM)
    rows = TensorDataset(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    split = Split(rows, rows, DataInfo("made up", (4,), ("a", "b", "c"), ()))
    model = build_model(ModelConfig("actnorm_of_test:make"), split, tmp_path)
    assert torch.equal(model.get_parameter("bias"), torch.ones(4))
    assert "seen" in model.state_dict()
    plan = Plan(dataset_size=6, batch_size=2, steps=2, noise_multiplier=2.0, delta=1e-2)
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classification_loss)
    folder = RunFolder(tmp_path)
    folder.publish(model, card_of(private))
    assert load_file(folder.weights).keys() == {"bias", "layer.weight", "layer.bias"}


# Killed, copied, accounted together


def killed_after(folder: Path, steps: int, *flags: str) -> None:
    """`diskdp train` in a process of its own, killed when its ledger has so many steps."""
    command = [sys.executable, "-m", "diskdp", "train", str(folder / "run.toml"), *flags]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ledger = folder / "out/private/ledger.jsonl"
    end = time.monotonic() + 120
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.001)
    process.kill()
    process.communicate()


def test_a_killed_run_goes_on_as_if_nothing_had_been(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kills between checkpoints; the key of the killed run makes an undisturbed one to compare with."""
    edit(folder, "epochs = 3", "steps = 300")
    edit(folder, "lr = 0.5", "lr = 0.5\noptions = { momentum = 0.9 }")
    every = ("--set", "run.checkpoint_every=7", "--set", "run.eval_every=100")
    killed_after(folder, 20, *every)
    killed_after(folder, 90, *every, "--resume")
    assert train(folder, *every, "--resume") == 0
    assert card(folder)["steps_charged"] == 300
    assert (folder / "out/private/ledger.jsonl").read_bytes().count(b"\n") == 300

    whole = folder / "whole"
    (whole / "private").mkdir(parents=True)
    shutil.copy2(folder / "out/private/key", whole / "private/key")
    assert train(folder, *every, "--out", str(whole), "--resume") == 0  # a run that was cut off before its first step
    found, expected = (load_file(out / "release/weights.safetensors") for out in (folder / "out", whole))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_copy_goes_on_with_a_key_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, 'name = "linear"', 'name = "cli_test_models:interrupting"\noptions = { at = 45 }')
    assert train(folder) == 130
    model = (folder / "cli_test_models.py").read_text()
    (folder / "cli_test_models.py").write_text(model.replace("calls == self.at", "calls == -1"))
    del sys.modules["cli_test_models"]
    assert run(["copy", str(folder / "out"), str(folder / "twin")]) == 0
    assert not (folder / "twin/private/key").exists()
    assert run(["copy", str(folder / "out"), str(folder / "twin")]) == 2
    assert "exists already" in capsys.readouterr().err
    for out in ("out", "twin"):
        assert train(folder, "--out", str(folder / out), "--resume") == 0
        assert card(folder, out)["steps_charged"] == 12
    keys = {(folder / out / "private/key").read_text() for out in ("out", "twin")}
    assert len(keys) == 2
    one, other = (load_file(folder / out / "release/weights.safetensors") for out in ("out", "twin"))
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert run(["copy", str(folder / "nothing"), str(folder / "new")]) == 2
    assert not (folder / "new").exists()


def test_a_damaged_checkpoint_says_what_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, 'name = "linear"', 'name = "cli_test_models:interrupting"\noptions = { at = 45 }')
    assert train(folder) == 130
    model = (folder / "cli_test_models.py").read_text()
    (folder / "cli_test_models.py").write_text(model.replace("calls == self.at", "calls == -1"))
    del sys.modules["cli_test_models"]
    private = folder / "out/private"
    whole = (private / "checkpoint.safetensors").read_bytes()
    (private / "checkpoint.safetensors").write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    assert train(folder, "--resume") == 2
    assert re.search("not a whole checkpoint.*checkpoint.previous.safetensors beside it is whole", one_error(capsys))
    shutil.copyfile(private / "checkpoint.previous.safetensors", private / "checkpoint.safetensors")
    assert train(folder, "--resume") == 0
    assert card(folder)["steps_charged"] == 12  # the steps in between came out the same
    (private / "checkpoint.safetensors").unlink()
    assert train(folder, "--resume") == 2
    assert "is missing, but the ledger has steps" in one_error(capsys)


def test_runs_of_one_account(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account = folder / "data.jsonl"
    assert train(folder, "--set", f"run.ledger={account}") == 2
    assert "begin one with diskdp ledger --new" in one_error(capsys)
    assert run(["ledger", "--new", str(account), "--epsilon", "6.5", "--delta", "1e-3"]) == 0
    for out in ("one", "two"):
        assert train(folder, "--set", f"run.ledger={account}", "--out", str(folder / out)) == 0
    capsys.readouterr()
    assert train(folder, "--set", f"run.ledger={account}", "--out", str(folder / "three")) == 2
    assert "no room for this plan beside the 2 runs" in one_error(capsys)
    assert not (folder / "three").exists()
    assert run(["ledger", str(account), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = Plan(dataset_size=ROWS, batch_size=20, steps=24, noise_multiplier=1.0, delta=1e-3)
    assert found["epsilon"] == pytest.approx(plan.epsilon, rel=1e-6)
    assert [entry["releases"] for entry in found["runs"]] == [12, 12]
    assert found["epsilon"] < 6.5 < sum(entry["epsilon"] for entry in found["runs"])

    assert train(folder) == 0  # a run with a ledger of its own, counted in by its folder
    capsys.readouterr()
    assert run(["ledger", str(account), str(folder / "out"), "--json"]) == 0
    more = Plan(dataset_size=ROWS, batch_size=20, steps=36, noise_multiplier=1.0, delta=1e-3)
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(more.epsilon, rel=1e-6)
    assert run(["ledger", str(folder / "out")]) == 0
    assert "together: ε =" in capsys.readouterr().out
    for wrong in (folder / "out/private/ledger.jsonl", folder / "none", folder, folder / "one"):
        assert run(["ledger", str(wrong)]) == 2


def test_a_copy_of_shuffled_epochs_counts_both_orders(folder: Path) -> None:
    """Copied in the middle of an epoch: under its own key each record may come once more in it."""
    edit(folder, 'name = "linear"', 'name = "cli_test_models:interrupting"\noptions = { at = 45 }')
    edit(folder, 'unit = "person"', 'unit = "person"\nsampling = "shuffled"\nadjacency = "zero-out"')
    assert train(folder) == 130
    done = (folder / "out/private/ledger.jsonl").read_bytes().count(b"\n")
    assert done % 4
    model = (folder / "cli_test_models.py").read_text()
    (folder / "cli_test_models.py").write_text(model.replace("calls == self.at", "calls == -1"))
    del sys.modules["cli_test_models"]
    assert run(["copy", str(folder / "out"), str(folder / "twin")]) == 0
    for out, epochs in (("out", 3), ("twin", 3)):
        assert train(folder, "--out", str(folder / out), "--resume") == 0
        plan = Plan(dataset_size=80, batch_size=80, steps=epochs, noise_multiplier=1.0, delta=1e-3)
        assert card(folder, out)["epsilon"] == pytest.approx(plan.epsilon, rel=1e-6)
    assert card(folder, "twin")["steps_charged"] < 12 == card(folder)["steps_charged"]  # it ended an epoch early


def test_a_run_of_an_account_that_lost_its_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would draw the same batches under its old key, and its releases of them would count as independent ones."""
    account = folder / "data.jsonl"
    assert run(["ledger", "--new", str(account), "--epsilon", "9", "--delta", "1e-3"]) == 0
    assert train(folder, "--set", f"run.ledger={account}") == 0
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (folder / "out/private" / name).unlink()
    before = account.read_bytes()
    capsys.readouterr()
    assert train(folder, "--set", f"run.ledger={account}", "--resume") == 2
    assert "had the same key" in one_error(capsys)
    assert account.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"plan": 3, "run": {}}', '{"plan": {}'])
def test_a_damaged_configuration(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    (folder / "out/private/config.json").write_text(text)
    capsys.readouterr()
    for command in (["ledger", str(folder / "out")], ["copy", str(folder / "out"), str(folder / "new")]):
        assert run(command) == 2
        assert "config.json: damaged" in one_error(capsys)
    assert train(folder, "--resume") == 2
    assert "config.json: damaged" in one_error(capsys)
    assert not (folder / "new").exists()


def test_an_empty_folder_is_as_good_as_none(folder: Path) -> None:
    (folder / "out").mkdir()
    assert train(folder) == 0


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_units_of_several_rows(ending: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column names each row's person: a plan for one row each is refused, one for two is checked, and says so."""
    schema = (folder / "schema.toml").read_text()
    (folder / "schema.toml").write_text(schema + 'columns.who = { kind = "unit" }\n')
    for name in ("train", "test"):
        header, *rows = (folder / f"{name}.csv").read_text().splitlines()
        lines = [f"{header},who", *(f"{row},p{number // 2}" for number, row in enumerate(rows))]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        if ending == "parquet":
            table = pytest.importorskip("pyarrow.csv").read_csv(folder / f"{name}.csv")
            pytest.importorskip("pyarrow.parquet").write_table(table, folder / f"{name}.parquet")
    if ending == "parquet":
        edit(
            folder, 'kind = "csv"\ntrain = "train.csv"\ntest = "test.csv"', 'kind = "parquet"\ntrain = "train.parquet"'
        )
    assert train(folder) == 2
    assert "examples_per_unit" in one_error(capsys)
    assert not (folder / "out").exists()
    assert train(folder, "--set", "plan.examples_per_unit=2") == 0
    assert any("checked against the units" in line for line in card(folder)["public"])  # type: ignore[union-attr]
    assert "who: names each record's unit, no feature" in capsys.readouterr().out
    if ending == "csv":
        text = (folder / "train.csv").read_text()
        (folder / "train.csv").write_text(text.replace(",p3\n", ",\n", 1))
        assert train(folder, "--out", str(folder / "second")) == 2
        assert re.search("row 7 .*the unit is missing", one_error(capsys))
