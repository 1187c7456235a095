"""Adaptive clipping: what an example contributes to gradients and count together, the noise on both, the threshold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, NoFilter, Plan, privatize
from diskdp.errors import FilterError
from diskdp.filters import GainSchedule
from diskdp.quantile import COUNT, QuantileThreshold

N, B = 400, 400


class Linear(nn.Module):
    """Per-example gradients are the inputs, whatever the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[None])[:, 0]


def dot(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0])


def make(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "dataset_size": N,
        "batch_size": B,
        "steps": 60,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "clipping": "adaptive",
    }
    return Plan(**{**fields, **changes})


def trained(
    plan: Plan, norms: Tensor, steps: int, width: int = 4, microbatch_size: int | None = None, **settings: Any
) -> tuple[Any, list[float]]:
    inputs = torch.nn.functional.normalize(torch.randn(N, width, dtype=torch.float64), dim=1) * norms[:, None]
    model = Linear(width)
    settings = {"filter": NoFilter(), "seed": 1, **settings}
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        plan,
        loss_fn=dot,
        microbatch_size=microbatch_size,
        **settings,
    )
    thresholds = []
    for batch in private.loader(TensorDataset(inputs)):
        private.step(batch)
        thresholds.append(private.clipper.max_norm)
        if len(thresholds) == steps:
            break
    return private, thresholds


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("microbatch_size", [None, 130])
def test_the_threshold_finds_the_quantile(target: float, microbatch_size: int | None) -> None:
    torch.manual_seed(0)
    norms = torch.distributions.LogNormal(1.0, 0.5).sample((N,)).double()
    _, thresholds = trained(make(target_quantile=target), norms, 60, microbatch_size=microbatch_size)
    share = float((norms <= sum(thresholds[-20:]) / 20).double().mean())
    assert abs(share - target) < 0.1  # the count's noise is 20 examples of 400


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("count_noise", [2.5, 20.0])
def test_one_example_and_the_plans_noise(sigma: float, count_noise: float) -> None:
    """The longest vector of an example, count included, is S; the noise σS is σ_b examples on the count."""
    threshold = QuantileThreshold(make(noise_multiplier=sigma, quantile_noise=count_noise, max_grad_norm=0.7))
    longest = math.hypot(0.7, threshold.weight / 2)
    assert threshold.sensitivity == pytest.approx(longest, rel=1e-12)
    assert sigma * threshold.sensitivity / threshold.weight == pytest.approx(count_noise, rel=1e-12)
    gradient_noise = sigma * threshold.sensitivity / 0.7
    assert 1 / gradient_noise**2 + 1 / (4 * count_noise**2) == pytest.approx(1 / sigma**2, rel=1e-12)


def test_noise_on_gradients_and_count_is_that_of_the_threshold() -> None:
    """Sums are known (no gradient); chi-square of 60 counts and 60·200 coordinates at 1e-6, two-sided."""
    torch.manual_seed(0)
    plan, width = make(steps=60, quantile_noise=3.0), 200
    model = Linear(width)
    inputs = torch.zeros(N, width, dtype=torch.float64)  # no gradient: all short
    seen: list[dict[str, Tensor]] = []
    private = privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.01), plan, loss_fn=dot, filter=NoFilter(), seed=2
    )
    adapt = private._adapt
    scales: list[tuple[float, float]] = []

    def watched(released: Any) -> None:
        scales.append((private.clipper.max_norm, private._threshold.weight))
        seen.append({name: t.clone() for name, t in released.items()})
        adapt(released)

    private._adapt = watched  # type: ignore[method-assign]
    for batch in private.loader(TensorDataset(inputs)):
        private.step(batch)
    counts = torch.tensor([float(r[COUNT]) * B / w for r, (_, w) in zip(seen, scales)])
    gradients = torch.stack([r["weight"] * B / c for r, (c, _) in zip(seen, scales)])
    wider = 1 / math.sqrt(1 - (1 / 6.0) ** 2)
    for values, std in ((counts - N / 2, 3.0), (gradients.flatten(), wider)):
        ratio = float((values / std).square().sum())
        assert stats.chi2.ppf(5e-7, values.numel()) < ratio < stats.chi2.isf(5e-7, values.numel())
    assert abs(float((gradients[:, 0] * (counts - N / 2)).mean())) < 5 * 3 * wider / math.sqrt(60)


def test_it_costs_no_epsilon_and_survives_resuming(tmp_path: Path) -> None:
    norms = torch.linspace(0.5, 5.0, N, dtype=torch.float64)
    plan = make(steps=12, noise="secure")
    assert plan.epsilon == make(steps=12, clipping="flat").epsilon
    kept = {"seed": None, "ledger_path": tmp_path / "ledger", "key_path": tmp_path / "key", "filter": DiSK()}
    torch.manual_seed(3)
    whole, thresholds = trained(plan, norms, 12, **kept)
    torch.manual_seed(3)
    cut, _ = trained(plan, norms, 5, **kept)
    cut.save(tmp_path / "state")
    torch.manual_seed(3)
    again, later = trained(plan, norms, 0, **kept)
    assert later
    state = cut.state_dict()
    torch.manual_seed(3)
    inputs = torch.nn.functional.normalize(torch.randn(N, 4, dtype=torch.float64), dim=1) * norms[:, None]
    again.load_state_dict(state)
    after = []
    for batch in again.loader(TensorDataset(inputs)):
        again.step(batch)
        after.append(again.clipper.max_norm)
    assert after == thresholds[5:]
    assert torch.equal(again.model.weight, whole.model.weight)
    assert again.steps_charged == 12


def test_what_does_not_go_with_it() -> None:
    norms = torch.ones(N, dtype=torch.float64)
    with pytest.raises(FilterError, match="takes clip='joint'"):
        trained(make(), norms, 1, filter=DiSK(clip="separate"))
    with pytest.raises(FilterError, match="changes with the threshold"):
        trained(make(), norms, 1, filter=DiSK(gain="adaptive"))


def test_a_schedule_counts_on_no_noise() -> None:
    norms = torch.linspace(0.5, 5.0, N, dtype=torch.float64)
    filter = DiSK(gamma=0.5, gain=GainSchedule((1.0, 0.8, 0.6)))
    assert len(trained(make(), norms, 3, filter=filter)[1]) == 3


def test_small_batches_keep_the_noise_on_gradients_near_the_plans() -> None:
    plan = make(batch_size=20, noise_multiplier=5.9)
    assert QuantileThreshold(plan).sensitivity == pytest.approx(1.1, rel=0.01)
    assert Plan.from_json(plan.to_json()) == plan


def test_examples_that_are_not_finite_count_as_long() -> None:
    torch.manual_seed(0)
    norms = torch.full((N,), 0.5, dtype=torch.float64)
    norms[: N // 2] = math.inf
    _, thresholds = trained(make(quantile_noise=1.0, target_quantile=0.5), norms, 1)
    assert abs(math.log(thresholds[0])) < 0.01  # half are short
