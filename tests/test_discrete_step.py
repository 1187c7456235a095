"""Steps whose sums and noise are whole numbers: what is released lies on the grid, and is noised as planned."""

from __future__ import annotations

import itertools
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, LowPass, NoFilter, Plan, privatize
from diskdp.clipping import Clipper
from diskdp.errors import LowPrecisionWarning, NoiseError, SamplingError
from diskdp.gradients import Engine, clip_in_float64
from tests.oracle import clipped, per_example

N, B = 60, 20


class Recording(torch.optim.SGD):
    """Keeps the gradients that it is given, and leaves the weights alone unless told otherwise."""

    def __init__(self, parameters: Any, lr: float = 0.0) -> None:
        super().__init__(parameters, lr=lr)
        self.seen: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def classify(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(N, 6, generator=generator, dtype=dtype)
    return TensorDataset(5 * inputs, torch.randint(0, 4, (N,), generator=generator))


def released(dtype: torch.dtype = torch.float64, lr: float = 0.0, steps: int = 4, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 4)).to(dtype)
    plan = Plan(
        dataset_size=N,
        batch_size=settings.pop("batch_size", B),
        steps=steps,
        noise_multiplier=settings.pop("noise_multiplier", 1.5),
        delta=1e-3,
        noise="discrete",
    )
    optimizer = Recording(model.parameters(), lr=lr)
    settings = {"filter": NoFilter(), "seed": 5, **settings}
    private = privatize(model, optimizer, plan, loss_fn=classify, **settings)
    for batch in private.loader(data(dtype)):
        private.step(batch)
    return private, optimizer.seen


@pytest.mark.parametrize("microbatch_size", [None, 7])
def test_what_is_released_lies_on_the_grid(microbatch_size: int | None) -> None:
    private, seen = released(microbatch_size=microbatch_size)
    spacing = Fraction(private._grid.spacing)
    for gradients in seen:
        for value in torch.cat([g.flatten() for g in gradients]).tolist():
            whole = Fraction(value) * B / spacing  # the mean is off by its division's rounding alone
            assert abs(whole - round(whole)) <= abs(whole) * Fraction(1, 2**52)


@pytest.mark.parametrize("clip", ["joint", "separate"])
@pytest.mark.parametrize("microbatch_size", [None, 7])
def test_noise_is_at_least_sigma_s_over_b(clip: Any, microbatch_size: int | None) -> None:
    """Of empty batches' coordinates: a two-sided chi-square test of the variance at 1e-7."""
    filter = DiSK(0.6, 0.7, clip=clip)
    torch.manual_seed(0)
    private, seen = released(filter=filter, steps=40, microbatch_size=microbatch_size)
    step = [g for gradients in _unfiltered(seen, 0.6) for g in gradients]
    values = torch.cat([g.flatten() for g in step])
    differences = torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in _unfiltered(seen, 0.6)])
    std = private.plan.noise_multiplier * private.sensitivity / B
    assert private._grid.std >= private.plan.noise_multiplier * private.sensitivity
    assert private._grid.std <= 1.01 * private.plan.noise_multiplier * private.sensitivity
    # weights stand still, so sums of half of all records differ little beside the noise of 554 coordinates
    noise = differences - differences.mean(0)
    count = noise.numel() - noise.shape[1]
    assert values.isfinite().all()
    assert stats.chi2.ppf(1e-7, count) < float(noise.square().sum()) / std**2  # never too little
    assert float(noise.square().sum()) / std**2 < 1.2 * stats.chi2.isf(1e-7, count)  # sampling adds to it


def _unfiltered(seen: list[list[Tensor]], kappa: float) -> list[list[Tensor]]:
    """g_t of g̃_t = (1-κ) g̃_{t-1} + κ g_t."""
    found = [seen[0]]
    for before, now in itertools.pairwise(seen):
        found.append([(b - (1 - kappa) * a) / kappa for a, b in zip(before, now)])
    return found


def test_the_sum_is_that_of_the_clipped_gradients() -> None:
    """Full batches and hardly any noise: the mean of the clipped gradients of a loop over examples."""
    private, seen = released(batch_size=N, steps=1, noise_multiplier=1e-6, microbatch_size=7)
    gradients = per_example(private.model, list(data(torch.float64).tensors), classify)
    expected = clipped(gradients, "flat", 1.0)
    for found, total in zip(seen[0], expected.values()):
        torch.testing.assert_close(found, total / N, rtol=0, atol=1e-6 / N * 8)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized", "per-layer"])
def test_no_example_is_longer_than_s_in_real_numbers(clipping: str) -> None:
    """‖w u‖² in rational arithmetic, of float64 factors as they are summed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    batch = [t[:8] for t in data(torch.float32).tensors]
    clipper = Clipper(clipping, 0.3)
    parts = clip_in_float64(Engine(model, classify), batch, [(1.0, None)], clipper)
    squares = [Fraction(0)] * 8
    for name, [made] in parts._terms.items():
        for example, gradient in enumerate(made.grads.reshape(8, -1)):
            weight = Fraction(float(parts._factors[name][example]))
            squares[example] += sum((weight * Fraction(float(x))) ** 2 for x in gradient)
    bound = Fraction(clipper.sensitivity) ** 2
    assert max(squares) <= bound
    assert max(squares) > bound * Fraction(99, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_and_filters(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowPrecisionWarning)
        private, seen = released(dtype, lr=0.1, filter=LowPass(kappa=0.5), steps=3)
    assert private.steps_done == 3
    assert all(g.isfinite().all() for gradients in seen for g in gradients)


def test_the_grid_holds_for_the_microbatches_it_was_made_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    plan = Plan(dataset_size=N, batch_size=30, steps=4, noise_multiplier=1.5, delta=1e-3, noise="discrete")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, plan, loss_fn=classify, filter=NoFilter(), microbatch_size=4, seed=1)
    for changed in (40, 1):
        private.microbatch_size = changed
        with pytest.raises(SamplingError, match="microbatch_size was changed"):
            private.step(next(iter(private.loader(data(torch.float32)))))
    assert private.steps_charged == 0


def test_what_has_no_grid() -> None:
    with pytest.raises(NoiseError, match="needs a number for microbatch_size"):
        released(microbatch_size="auto")
    with pytest.raises(NoiseError, match="no noise to be discrete"):
        released(noise_multiplier=0.0)
