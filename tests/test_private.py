"""The step against the recursion of the method, its noise against σS/B, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from diskdp import DiSK, LowPass, NoFilter, Plan, privatize
from diskdp.clipping import Clipper
from diskdp.errors import BudgetExhausted, CheckpointError, GradientError, NotPrivateWarning, SamplingError
from diskdp.filters import Filter
from diskdp.private import PrivateTraining
from tests import oracle
from tests.models import classify

N, STEPS = 60, 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, 5).double(), torch.randint(0, 3, (N,)))


def make_plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "dataset_size": N,
        "batch_size": 12,
        "steps": STEPS,
        "noise_multiplier": 0.0,
        "delta": 1e-5,
        "max_grad_norm": 0.4,
        "clipping": "flat",
    }
    fields.update(changes)
    if fields["noise_multiplier"] == 0:
        with pytest.warns(NotPrivateWarning):
            return Plan(**fields)
    return Plan(**fields)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}


def warmup_cosine(step: int) -> float:
    return (step + 1) / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * (step - 4) / (STEPS - 4)))


def members(private: PrivateTraining, data: TensorDataset) -> list[tuple[Tensor, ...]]:
    """The batches of a seeded run, from a second loader."""
    return [tuple(next(iter(b.microbatches()))) if b.size else () for b in private.loader(data)]


def reference(
    filter: DiSK | None,
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    batches: list[tuple[Tensor, ...]],
    plan: Plan,
) -> dict[str, Tensor]:
    """The recursion as it is written down: a loop over examples, explicit d and g̃."""
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    scheduler = LambdaLR(optimizer, warmup_cosine)
    parameters = dict(model.named_parameters())
    d = {name: torch.zeros_like(p) for name, p in parameters.items()}
    average: dict[str, Tensor] | None = None
    kappa = 1.0 if filter is None else filter.kappa
    gamma = None if filter is None else filter.gamma
    c = 0.0 if gamma is None else (1 - kappa) / (kappa * gamma)
    for batch in batches:
        x = {name: p.detach().clone() for name, p in parameters.items()}
        ahead = {name: x[name] + (gamma or 0) * d[name] for name in x}
        points = [(1 - c, x), (c, ahead)]
        total = {name: torch.zeros_like(p) for name, p in x.items()}
        if batch and filter is not None and filter.clip == "separate":
            for weight, at in points:
                sums = oracle.clipped(
                    oracle.per_example(model, batch, classify, [(1.0, at)]), plan.clipping, plan.max_grad_norm
                )
                for name in total:
                    total[name] += weight * sums[name]
        elif batch:
            total = oracle.clipped(
                oracle.per_example(model, batch, classify, points), plan.clipping, plan.max_grad_norm
            )
        g = {name: t / plan.batch_size for name, t in total.items()}
        average = g if average is None else {n: (1 - kappa) * average[n] + kappa * g[n] for n in g}
        for name, p in parameters.items():
            p.grad = average[name].clone()
        optimizer.step()
        scheduler.step()
        d = {name: p.detach() - x[name] for name, p in parameters.items()}
    return {name: p.detach() for name, p in parameters.items()}


FILTERS: dict[str, DiSK] = {
    "disk": DiSK(kappa=0.7, gamma=0.5),
    "separate": DiSK(kappa=0.7, gamma=0.5, clip="separate"),
    "storm": DiSK(kappa=0.3, gamma=-1.0),
    "ahead": DiSK(kappa=0.5, gamma=1.0),
    "low-pass": DiSK(kappa=0.4, gamma=None),
}


def run(
    filter: Filter,
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    plan: Plan,
    microbatch_size: int | None = None,
) -> dict[str, Tensor]:
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    scheduler = LambdaLR(optimizer, warmup_cosine)
    private = privatize(
        model, optimizer, plan, loss_fn=classify, filter=filter, seed=3, microbatch_size=microbatch_size
    )
    for batch in private.loader(make_data()):
        private.step(batch)
        scheduler.step()
    assert private.steps_done == plan.steps
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("filter", FILTERS)
def test_follows_the_recursion(optimizer: str, filter: str) -> None:
    plan = make_plan()
    model = make_model()
    private = privatize(model, OPTIMIZERS["sgd"](model.parameters()), plan, loss_fn=classify, seed=3)
    exact = reference(FILTERS[filter], OPTIMIZERS[optimizer], members(private, make_data()), plan)
    found = run(FILTERS[filter], OPTIMIZERS[optimizer], plan)
    assert oracle.relative_error(found, exact) < 1e-6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_kappa_one_is_the_base_optimizer_bit_for_bit(optimizer: str) -> None:
    plan = make_plan(noise_multiplier=1.0)
    plain = run(NoFilter(), OPTIMIZERS[optimizer], plan)
    disk = run(DiSK(kappa=1.0, gamma=0.5), OPTIMIZERS[optimizer], plan)
    assert all(torch.equal(plain[name], disk[name]) for name in plain)


def test_low_pass_is_disk_without_a_second_point() -> None:
    plan = make_plan(noise_multiplier=1.0)
    disk = run(DiSK(kappa=0.4, gamma=None), OPTIMIZERS["sgd"], plan)
    low_pass = run(LowPass(kappa=0.4), OPTIMIZERS["sgd"], plan)
    assert all(torch.equal(disk[name], low_pass[name]) for name in disk)


def test_gamma_minus_one_is_storm() -> None:
    """m_t = ∇f(x_t; ξ_t) + (1-a)(m_{t-1} - ∇f(x_{t-1}; ξ_t)), full precision, no clipping."""
    plan, kappa, rate = make_plan(max_grad_norm=math.inf), 0.3, 0.4
    model = make_model()
    probe = privatize(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, loss_fn=classify, seed=3)
    batches = members(probe, make_data())
    model, optimizer = make_model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    private = privatize(model, optimizer, plan, loss_fn=classify, filter=DiSK(kappa=kappa, gamma=-1.0), seed=3)
    for batch in private.loader(make_data()):
        private.step(batch)

    storm = make_model()
    parameters = list(storm.parameters())

    def gradient(at: list[Tensor], batch: tuple[Tensor, ...]) -> list[Tensor]:
        for p, value in zip(parameters, at):
            p.data = value.clone()
        return list(torch.autograd.grad(classify(storm, batch).sum() / plan.batch_size, parameters))

    x = [p.detach().clone() for p in parameters]
    m = gradient(x, batches[0])
    before, x = x, [a - rate * b for a, b in zip(x, m)]
    for batch in batches[1:]:
        now, past = gradient(x, batch), gradient(before, batch)
        m = [g + (1 - kappa) * (old - p) for g, old, p in zip(now, m, past)]
        before, x = x, [a - rate * b for a, b in zip(x, m)]
    found = {str(i): p.detach() for i, p in enumerate(model.parameters())}
    assert oracle.relative_error(found, {str(i): p for i, p in enumerate(x)}) < 1e-10


@pytest.mark.parametrize(("gamma", "calls"), [(1.0, 1), (0.5, 2), (None, 1)])
def test_how_often_the_model_is_called(gamma: float | None, calls: int) -> None:
    model, count = make_model(), 0
    plan = make_plan(batch_size=N)

    def counted(model: Any, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        return classify(model, batch)

    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        loss_fn=counted,
        filter=DiSK(kappa=0.5, gamma=gamma),
    )
    for batch in private.loader(make_data()):
        before = count
        private.step(batch)
        assert count - before == (1 if batch.step == 0 else calls)


class Flat(nn.Module):
    """Many parameters whose loss does not depend on them: the released gradient is noise alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.layer = nn.Linear(2, size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * 0).sum(1) + (x[:, :1] * 0 * self.weight).sum(1)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized", "per-layer"])
@pytest.mark.parametrize(("gamma", "clip"), [(0.5, "joint"), (0.2, "separate"), (-1.0, "separate"), (-1.0, "joint")])
@pytest.mark.parametrize("microbatch_size", [None, 7])
def test_noise_is_sigma_s_over_b(clipping: str, gamma: float, clip: Any, microbatch_size: int | None) -> None:
    """χ² test of the weights after steps of SGD, κ = .5; false alarms 1e-7 a case."""
    sigma, max_norm, size, c = 1.7, 0.25, 40_000, 0.5 / (0.5 * gamma)
    plan = make_plan(noise_multiplier=sigma, max_grad_norm=max_norm, clipping=clipping, steps=1)
    model = Flat(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = privatize(
        model,
        optimizer,
        plan,
        loss_fn=lambda m, b: m(b[0]),
        filter=DiSK(kappa=0.5, gamma=gamma, clip=clip),
        microbatch_size=microbatch_size,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in private.loader(TensorDataset(torch.randn(N, 2))):
        private.step(batch)
    noise = torch.cat([(before[n] - p.detach()).flatten() for n, p in model.named_parameters()]).double()
    expected = 1.0 if clipping == "normalized" else max_norm
    if clip == "separate":
        expected *= abs(c) + abs(1 - c)
    assert private.sensitivity == pytest.approx(expected)
    statistic = float(noise.square().sum() / (sigma * expected / plan.batch_size) ** 2)
    tail = stats.chi2(noise.numel())
    assert 1e-7 / 2 < tail.cdf(statistic) < 1 - 1e-7 / 2


def test_microbatches_change_nothing() -> None:
    """5,000 examples 64 at a time: the same gradient as at once."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(5000, 5).double(), torch.randint(0, 3, (5000,)))
    released = []
    for size in (None, 64):
        model = make_model()
        plan = make_plan(dataset_size=5000, batch_size=5000, steps=2)
        private = privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            plan,
            loss_fn=classify,
            microbatch_size=size,
            seed=0,
        )
        for batch in private.loader(data):
            private.step(batch)
        released.append({name: p.detach() for name, p in model.named_parameters()})
    assert oracle.relative_error(released[1], released[0]) < 1e-6


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    plan = make_plan(dataset_size=10_000, batch_size=1, steps=12, noise_multiplier=1.0)
    model = make_model()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(10_000, 5).double(), torch.randint(0, 3, (10_000,)))
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    empty = 0
    for batch in private.loader(data):
        before = [p.detach().clone() for p in model.parameters()]
        result = private.step(batch)
        empty += result.batch_size == 0
        assert math.isnan(result.loss) == (result.batch_size == 0)
        assert all(not torch.equal(a, p) for a, p in zip(before, model.parameters()))
    assert private.epsilon == plan.epsilon_after(12)
    assert empty >= 1  # P(none of 12 empty) = (1 - 1/e)^12 = .4%


def test_bfloat16_weights_get_float32_noise() -> None:
    plan = make_plan(noise_multiplier=1.0)
    model = make_model().bfloat16()
    data = TensorDataset(make_data().tensors[0].bfloat16(), make_data().tensors[1])
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    for batch in private.loader(data):
        private.step(batch)
    state = private.state_dict()
    assert all(g.dtype == torch.float32 for g in state["filter_state"]["filtered"])
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("through_file", [False, True])
@pytest.mark.parametrize("filter", [DiSK(0.7, 0.5), LowPass(a=[1, -0.5, 0.1], b=[0.4, 0.2]), NoFilter()], ids=repr)
def test_a_seeded_run_goes_on_bit_for_bit(through_file: bool, filter: Filter, tmp_path: Path) -> None:
    plan, data = make_plan(noise_multiplier=1.0), make_data()
    whole = run(filter, OPTIMIZERS["adamw"], plan)

    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler = LambdaLR(optimizer, warmup_cosine)
    private = privatize(model, optimizer, plan, loss_fn=classify, filter=filter, seed=3)
    for batch in private.loader(data):
        private.step(batch)
        scheduler.step()
        if private.steps_done == 9:
            break
    state = copy.deepcopy(private.state_dict())
    private.save(tmp_path / "state")

    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if through_file:
        private = privatize.resume(tmp_path / "state", model, optimizer, plan, loss_fn=classify, filter=filter, seed=3)
    else:
        private = privatize(model, optimizer, plan, loss_fn=classify, filter=filter, seed=3)
        private.load_state_dict(state)
    scheduler = LambdaLR(optimizer, warmup_cosine, last_epoch=8)
    assert private.epsilon == plan.epsilon_after(9)
    for batch in private.loader(data):
        private.step(batch)
        scheduler.step()
    assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())


def test_resuming_without_a_seed_never_repeats_noise_and_charges_repeated_steps() -> None:
    plan, data = make_plan(noise_multiplier=1.0), make_data()
    model = make_model()
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    start = private.state_dict()
    released = []
    for _ in range(2):
        private.load_state_dict(start)
        for batch in private.loader(data):
            private.step(batch)
            break
        released.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
    assert (released[0] - released[1]).abs().min() > 0
    assert private.epsilon == plan.epsilon_after(2)


def test_the_budget_is_a_hard_stop(tmp_path: Path) -> None:
    plan, data = make_plan(noise_multiplier=1.0, steps=3), make_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, plan, loss_fn=classify, ledger_path=tmp_path / "ledger.jsonl")
    start = private.state_dict()
    for batch in private.loader(data):
        private.step(batch)
    private.load_state_dict(start)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BudgetExhausted, match="all 3 steps"):
        private.step(next(iter(private.loader(data))))
    again = privatize(model, optimizer, plan, loss_fn=classify, ledger_path=tmp_path / "ledger.jsonl")
    with pytest.raises(BudgetExhausted):
        again.step(next(iter(again.loader(data))))
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters()))


def test_batches_from_elsewhere_are_refused() -> None:
    plan, data = make_plan(noise_multiplier=1.0), make_data()
    model = make_model()
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    with pytest.raises(SamplingError, match=r"list.*private\.loader"):
        private.step([data.tensors[0][:12], data.tensors[1][:12]])  # type: ignore[arg-type]
    other = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    with pytest.raises(SamplingError, match="does not come from this training's"):
        private.step(next(iter(other.loader(data))))
    loader = iter(private.loader(data))
    first = next(loader)
    private.step(first)
    with pytest.raises(SamplingError, match="batch of step 0, but step 1"):
        private.step(first)
    with pytest.raises(SamplingError, match="60 records but this data set has 59"):
        private.loader(TensorDataset(data.tensors[0][1:], data.tensors[1][1:]))


def test_set_up_faults_come_before_training() -> None:
    plan, data = make_plan(noise_multiplier=1.0), make_data()
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    with pytest.raises(GradientError, match="module 1: BatchNorm"):
        privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    model = make_model()
    with pytest.raises(GradientError, match=r"2\.weight, 2\.bias: trainable but not in the optimizer"):
        privatize(model, torch.optim.SGD(model[0].parameters(), lr=0.1), plan, loss_fn=classify)
    with pytest.raises(GradientError, match="not the model's parameters"):
        privatize(
            model,
            torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1),
            plan,
            loss_fn=classify,
        )
    with pytest.raises(GradientError, match="max_iter=1"):
        privatize(model, torch.optim.LBFGS(model.parameters()), plan, loss_fn=classify)
    private = privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=lambda m, b: classify(m, b).mean()
    )
    with pytest.raises(GradientError, match="shape"):
        private.loader(data)


def test_lbfgs_with_one_evaluation() -> None:
    plan, model = make_plan(steps=4), make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    private = privatize(model, optimizer, plan, loss_fn=classify)
    before = [p.detach().clone() for p in model.parameters()]
    for batch in private.loader(make_data()):
        private.step(batch)
    assert all(not torch.equal(a, p) for a, p in zip(before, model.parameters()))


def test_checkpoints_of_another_plan_or_filter_are_refused(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, make_plan(noise_multiplier=1.0), loss_fn=classify)
    private.save(tmp_path / "state")
    other = privatize(model, optimizer, make_plan(noise_multiplier=1.1), loss_fn=classify)
    with pytest.raises(CheckpointError, match="another plan"):
        other.load_state_dict(private.state_dict())
    with pytest.raises(CheckpointError, match="another filter"):
        privatize.resume(tmp_path / "state", model, optimizer, loss_fn=classify, filter=NoFilter())
    with pytest.raises(CheckpointError, match="another plan"):
        privatize.resume(tmp_path / "state", model, optimizer, other.plan, loss_fn=classify)


def test_diagnostics() -> None:
    plan, model = make_plan(batch_size=N), make_model()
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)
    data = make_data()
    expected = oracle.per_example(make_model(), tuple(data.tensors), classify)
    norms = torch.tensor([oracle.norm(u) for u in expected])
    result = private.step(next(iter(private.loader(data))))
    assert result.clipped_fraction == pytest.approx((norms > 0.4).float().mean().item())
    assert result.median_norm == pytest.approx(norms.median().item(), rel=1e-5)
    assert result.loss == pytest.approx(classify(make_model(), tuple(data.tensors)).mean().item())
    assert Clipper("flat", 0.4).sensitivity == private.sensitivity
