"""Microbatches that fit: what is measured, what is chosen, and how a step survives memory running out."""

from __future__ import annotations

import functools
import gc
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from diskdp import DiSK, Plan, memory, privatize
from diskdp.backoff import add_all
from diskdp.errors import MemoryLimitError, MemoryWarning, SamplingError
from diskdp.memory import available_memory, largest_fit, out_of_memory, parse_memory, peak_memory
from diskdp.noise import Secret
from diskdp.private import PrivateTraining, StepResult
from diskdp.sampling import LogicalBatch, PoissonSampler, PrivateLoader
from tests import oracle
from tests.models import classify

CPU = torch.device("cpu")
N, STEPS = 60, 6


# --- measuring -------------------------------------------------------------------------------------------


def test_the_peak_is_that_of_what_is_alive() -> None:
    kept: list[Tensor] = [torch.zeros(50_000)]

    def work() -> None:
        kept.clear()  # was there before: giving it back must not hide what is taken
        a = torch.zeros(10_000)
        for _ in range(20):
            b = torch.zeros(30_000)
            del b
        kept.append(torch.cat([a, a]))

    assert peak_memory(work, CPU) == 4 * 40_000  # bytes of a and b
    assert peak_memory(lambda: None, CPU) == 0


def test_the_peak_of_a_backward_pass() -> None:
    """The activations of 20 layers, all alive when the backward pass begins."""
    layers = nn.Sequential(*[nn.Tanh() for _ in range(20)])
    x = torch.randn(5_000, requires_grad=True)
    found = peak_memory(lambda: layers(x).sum().backward(), CPU)
    assert 20 * 20_000 <= found <= 23 * 20_000


def test_budgets_in_words() -> None:
    assert [parse_memory(text) for text in ("2 kib", "3MB", " 1.5 GiB ", "7", "8b")] == [
        2048,
        3_000_000,
        3 * 2**29,
        7,
        8,
    ]
    for wrong in ("", "many", "-1 GB", "4 GiBs", "i", 0, -5, True, "0 GB"):
        with pytest.raises(MemoryLimitError, match=r"memory_budget.*4 GiB"):
            parse_memory(wrong)


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**55)
    assert out_of_memory(error.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(MemoryLimitError("x"))


def test_there_is_memory() -> None:
    assert 2**20 < available_memory(CPU) < 2**60


@pytest.mark.parametrize(
    ("limit", "used", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_s_limit(limit: str, used: str, cache: str, tmp_path: Path) -> None:
    assert memory._of_container(tmp_path) is None
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / used).write_text("700\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 5\n{cache} 150\n")
    (tmp_path / limit).write_text("1000\n")
    assert memory._of_container(tmp_path) == 450
    (tmp_path / limit).write_text("max\n")
    assert memory._of_container(tmp_path) is None


@given(
    base=st.floats(0, 1e6),
    slope=st.floats(0.1, 1e4),
    bend=st.floats(0.5, 3.0),
    jump=st.floats(1.0, 1.5),
    at=st.integers(1, 3000),
    budget=st.floats(1, 1e7),
    most=st.integers(1, 5000),
    raises=st.integers(1, 10_000),
)
@settings(max_examples=300, deadline=None)
def test_the_largest_that_fits_is_found(
    base: float, slope: float, bend: float, jump: float, at: int, budget: float, most: int, raises: int
) -> None:
    """Over growing costs that are no lines: curves, jumps, and sizes at which memory runs out."""
    measured: dict[int, int | None] = {}

    def peak_of(size: int) -> int | None:
        assert size not in measured
        peak = int((base + slope * size**bend) * (jump if size >= at else 1.0))
        measured[size] = peak if size < raises else None
        return measured[size]

    fit = largest_fit(peak_of, int(budget), most)
    fitting = [size for size, peak in measured.items() if peak is not None and peak <= int(budget)]
    assert len(measured) <= 20
    if fit is None:
        assert not fitting
        return
    assert fit.size == max(fitting) <= most
    assert fit.peak == measured[fit.size]
    too_large = [size for size in measured if size not in fitting]
    if too_large:
        assert min(too_large) - fit.size <= max(1, 0.05 * fit.size)
    elif fit.size < most:  # by the line through the largest two nothing larger fits
        assert fit.predicted(fit.size + 1) > int(budget) * (1 - 1e-9)


# --- loading parts again ---------------------------------------------------------------------------------


class Numbers(Dataset[tuple[int, float]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, index / 2


def number_loader(**options: Any) -> PrivateLoader:
    sampler = PoissonSampler(100, 0.3, Secret.from_seed(5))
    return PrivateLoader(Numbers(100), sampler, plan_token="", first_step=0, last_step=8, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_members_are_those_of_the_batch(workers: int) -> None:
    loader = number_loader(microbatch_size=7, num_workers=workers)
    before: LogicalBatch | None = None
    state = torch.get_rng_state()
    for step, batch in enumerate(loader):
        if workers:
            state = torch.get_rng_state()  # starting workers draws their seed
        expected = PoissonSampler(100, 0.3, Secret.from_seed(5)).indices(step).tolist()
        assert batch.members(2, 9)[0].tolist() == expected[2:9]
        assert [int(i) for ids, _ in batch.microbatches() for i in ids] == expected
        assert batch.members(0, batch.size)[1].tolist() == [i / 2 for i in expected]
        for start, stop in ((0, batch.size + 1), (3, 3), (-1, 2)):
            with pytest.raises(SamplingError, match="cannot be loaded"):
                batch.members(start, stop)
        if before is not None:
            with pytest.raises(SamplingError, match="current batch"):
                before.members(0, 1)
        before = batch
        if workers == 0 and step:
            assert torch.equal(torch.get_rng_state(), state)
        state = torch.get_rng_state()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_size_may_change_on_the_way_and_the_members_do_not(workers: int) -> None:
    loader = number_loader(microbatch_size=20, num_workers=workers)
    largest = []
    for step, batch in enumerate(loader):
        ids = [int(i) for part, _ in batch.microbatches() for i in part]
        assert ids == PoissonSampler(100, 0.3, Secret.from_seed(5)).indices(step).tolist()
        largest.append(max(batch.sizes))
        loader.microbatch_size = 4
    assert largest[0] == 20
    assert largest[-1] == 4


class Collected:
    """Adds up the members themselves; runs out of memory as told, before or after it has begun to add."""

    def __init__(self, fails: Callable[[list[int]], str]) -> None:
        self.fails = fails
        self.intact = True
        self.members: list[int] = []
        self.most = 0

    def add(self, microbatch: Any, examples: int) -> None:
        ids = [int(i) for i in microbatch[0]]
        assert len(ids) == examples
        when = self.fails(ids)
        if when == "before":
            raise torch.OutOfMemoryError
        self.intact = False
        self.members += ids[: examples // 2]
        if when == "between":
            raise MemoryError
        self.members += ids[examples // 2 :]
        self.most = max(self.most, examples)
        self.intact = True

    def clear(self) -> None:
        self.members = []
        self.most = 0
        self.intact = True


@given(seed=st.integers(0, 10**6), size=st.integers(1, 40), limits=st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=60, deadline=None)
def test_every_member_is_added_once_whatever_fails(seed: int, size: int, limits: tuple[int, int]) -> None:
    sampler = PoissonSampler(100, 0.3, Secret.from_seed(seed))
    loader = PrivateLoader(Numbers(100), sampler, plan_token="", first_step=0, last_step=1, microbatch_size=size)
    before, between = limits

    def fails(ids: list[int]) -> str:
        return "before" if len(ids) > before else "between" if len(ids) > between and max(ids) > 40 else ""

    sums = Collected(fails)
    gc.freeze()  # or each collection after a failure would look at all that the test session holds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryWarning)
        most = add_all(next(iter(loader)), sums, size, CPU)
    gc.unfreeze()
    assert sums.members == sampler.indices(0).tolist()
    assert sums.most <= most <= size


# --- the step --------------------------------------------------------------------------------------------


class Hungry(nn.Module):
    """Takes more memory than there is, in the way it was made with, for more than ``limit`` examples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.how = how
        self.limit, self.calls, self.failures = N, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layers(x)
        if len(x) > self.limit:
            if self.how == "backward":
                y.register_hook(self.run_out)
            elif self.how != "second point" or self.calls % 2 == 0:
                self.run_out(y)
        return y

    def run_out(self, y: Tensor) -> None:
        self.failures += 1
        if self.how == "python":
            raise MemoryError
        if self.how == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        torch.empty(2**55)  # torch's own allocator refuses


def hungry(how: str, filter: DiSK, ledger: Path | None = None) -> tuple[Hungry, PrivateTraining]:
    model = Hungry(how)
    plan = Plan(dataset_size=N, batch_size=20, steps=STEPS, noise_multiplier=1.0, delta=1e-5, max_grad_norm=0.4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, privatize(
        model,
        optimizer,
        plan,
        loss_fn=classify,
        filter=filter,
        microbatch_size="auto",
        memory_budget="1 GB",
        seed=3,
        ledger_path=ledger,
    )


def make_data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, 5).double(), torch.randint(0, 3, (N,)))


@functools.cache
def undisturbed(filter: DiSK) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Figures and weights of the training with memory enough."""
    model, private = hungry("torch", filter)
    results = [private.step(batch) for batch in private.loader(make_data())]
    assert private.microbatch_size is not None
    assert private.microbatch_size >= 30
    return results, {name: p.detach() for name, p in model.named_parameters()}


class Untensored(Dataset[Any]):
    """The same examples by way of a data loader."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


JOINT, SEPARATE = DiSK(0.7, 0.5), DiSK(0.7, 0.5, clip="separate")


@pytest.mark.parametrize("workers", [None, 2], ids=["tensors", "workers"])
@pytest.mark.parametrize(
    ("how", "filter"),
    [("torch", JOINT), ("python", JOINT), ("cuda", JOINT), ("backward", SEPARATE), ("second point", SEPARATE)],
    ids=lambda value: value if isinstance(value, str) else value.clip,
)
def test_a_step_survives_running_out_of_memory(how: str, filter: DiSK, workers: int | None, tmp_path: Path) -> None:
    """From step 2 on there is memory for 4 examples: the same weights and figures, one ledger entry a step."""
    data = make_data() if workers is None else Untensored(make_data())
    expected, weights = undisturbed(filter)
    model, private = hungry(how, filter, tmp_path / "ledger.jsonl")
    results, sizes = [], []

    def train() -> None:
        for batch in private.loader(data, num_workers=workers or 0):
            if private.steps_done == 2:
                model.limit, model.calls = 4, 0
            results.append(private.step(batch))
            sizes.append(max(batch.sizes))

    with pytest.warns(MemoryWarning, match="step 2: memory ran out with .* The result is the same"):
        train()
    assert 2 <= model.failures <= 5
    assert private.microbatch_size <= 4
    assert sizes[0] > 4
    assert sizes[-1] <= 4 or workers  # what workers had begun to load came in the old size
    assert oracle.relative_error(dict(model.named_parameters()), weights) < 1e-12
    for one, other in zip(results, expected, strict=True):
        assert (one.step, one.batch_size) == (other.step, other.batch_size)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.median_norm == pytest.approx(other.median_norm, rel=1e-9)
        assert one.clipped_fraction == other.clipped_fraction
    entries = [json.loads(line)["step"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert entries == list(range(STEPS))
    assert private.steps_charged == STEPS


@pytest.mark.filterwarnings("ignore::diskdp.errors.MemoryWarning")
def test_one_example_that_does_not_fit_loses_nothing(tmp_path: Path) -> None:
    model, private = hungry("torch", JOINT, tmp_path / "ledger.jsonl")
    for batch in private.loader(make_data()):
        if private.steps_done == 2:
            model.limit = 0
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            with pytest.raises(MemoryLimitError, match=r"step 2: .*single example.*Nothing was charged.*new private\."):
                private.step(batch)
            break
        private.step(batch)
    assert (private.steps_done, private.steps_charged) == (2, 2)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with pytest.raises(SamplingError, match="used already"):
        private.step(batch)
    model.limit = N
    for batch in private.loader(make_data()):
        private.step(batch)
    assert (private.steps_done, private.steps_charged) == (STEPS, STEPS)
    assert oracle.relative_error(dict(model.named_parameters()), undisturbed(JOINT)[1]) < 1e-12


@pytest.mark.parametrize(("limit", "size"), [(1, 1), (3, 3), (5, 5)])
def test_running_out_before_training_begins(limit: int, size: int) -> None:
    """The examination and the measurements go on with fewer examples, too; with one there is nothing to halve."""
    model, private = hungry("torch", JOINT)
    model.limit = limit
    for batch in private.loader(make_data()):
        private.step(batch)
    assert private.microbatch_size == size
    assert oracle.relative_error(dict(model.named_parameters()), undisturbed(JOINT)[1]) < 1e-12
    model.limit = 0
    with pytest.raises(MemoryLimitError, match="single example"):
        private.loader(make_data())


def test_other_errors_are_not_taken_for_memory() -> None:
    model, private = hungry("torch", JOINT)
    batch = next(iter(private.loader(make_data())))
    model.layers[0].weight.data = model.layers[0].weight.data[:, :4]
    with pytest.raises(RuntimeError, match="shape"):
        private.step(batch)
    assert private.steps_charged == 0


# --- the budget ------------------------------------------------------------------------------------------


def image_training(**options: Any) -> PrivateTraining:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(384, 4))
    plan = Plan(dataset_size=96, batch_size=96, steps=4, noise_multiplier=1.0, delta=1e-3)
    return privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify, **options)


def images() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(96, 3, 12, 12), torch.randint(0, 4, (96,)))


def step_peak(private: PrivateTraining) -> int:
    """The most that a step of the plan holds, states that it leaves behind (made by the first) not counted."""
    batches = iter(private.loader(images()))
    private.step(next(batches))
    return peak_memory(lambda: private.step(next(batches)), CPU)


@pytest.mark.parametrize("filter", [JOINT, SEPARATE, DiSK(0.7, gamma=None)], ids=["joint", "separate", "one point"])
@pytest.mark.parametrize("budget", ["400 kB", "1 MiB", 1_700_000])
def test_the_budget_is_kept_and_used(filter: DiSK, budget: int | str) -> None:
    """Steps with the size that was chosen stay within the budget; with 15% more (and 2) they pass it."""
    private = image_training(filter=filter, microbatch_size="auto", memory_budget=budget)
    allowed = parse_memory(budget)
    peak, size = step_peak(private), private.microbatch_size
    assert size is not None
    assert private.memory_fit is not None
    assert private.memory_fit.size == size < 96
    assert private.memory_fit.peak <= allowed
    assert peak <= allowed
    assert step_peak(image_training(filter=filter, microbatch_size=math.ceil(1.15 * size) + 2)) > allowed


def test_whole_batches_if_they_fit_and_nothing_is_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    private = image_training(microbatch_size="auto")
    data = images()
    assert private.microbatch_size is None
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in private.model.parameters()]
    private.loader(data)
    assert private.microbatch_size == 96
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(weights, private.model.parameters()))
    assert all(p.grad is None for p in private.model.parameters())
    assert private.steps_charged == 0
    assert capfd.readouterr() == ("", "")  # the profiler, too, keeps quiet


def test_what_cannot_be_a_budget() -> None:
    private = image_training(microbatch_size="auto", memory_budget="20 kB")
    with pytest.raises(MemoryLimitError, match=r"one example alone takes more than the memory budget of 19\.5 KiB"):
        private.loader(images())
    with pytest.raises(MemoryLimitError, match=r'without microbatch_size="auto"'):
        image_training(microbatch_size=4, memory_budget="1 GB")
    for wrong in (0, -3, "all", 2.5):
        with pytest.raises(SamplingError, match=r'microbatch_size=.*"auto"'):
            image_training(microbatch_size=wrong)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(MemoryLimitError, match="while a profiler runs"),
    ):
        image_training(microbatch_size="auto").loader(images())


def test_the_ledger_of_a_run_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diskdp.cli import run

    text = """
[data]
kind = "adult"
[model]
name = "linear"
[optimizer]
name = "SGD"
lr = 0.5
[plan]
batch_size = 400
steps = 3
noise_multiplier = 1.0
delta = 1e-5
[run]
out = "out"
microbatch_size = "auto"
"""
    (tmp_path / "run.toml").write_text(text)
    assert run(["train", str(tmp_path / "run.toml"), "--memory-budget", "300 KiB"]) == 0
    printed = capsys.readouterr()
    assert "microbatches of " in printed.out
    assert printed.err == ""
    config = json.loads((tmp_path / "out/private/config.json").read_text())
    assert (config["run"]["microbatch_size"], config["run"]["memory_budget"]) == ("auto", "300 KiB")
    other = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "other")]
    for flags, message in (
        (["--microbatch-size", "most"], "[run] microbatch_size: must be a whole number or 'auto', got 'most'"),
        (["--microbatch-size", "0"], "microbatch_size=0 must be at least 1"),
        (["--memory-budget", "plenty"], "memory_budget='plenty': must be bytes"),
        (["--memory-budget", "1 KiB"], "one example alone takes more than the memory budget of 1 KiB"),
        (["--microbatch-size", "8", "--memory-budget", "1 GB"], 'no meaning without microbatch_size="auto"'),
    ):
        assert run([*other, *flags]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
