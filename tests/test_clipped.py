"""The engine against a float64 loop over examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diskdp.clipping import Clipper
from diskdp.gradients import RandomState, clipped_gradient
from tests import oracle
from tests.models import CASES, Case

POINTS = {
    "one": (1.0, 0.0),
    "disk": (0.6, 0.4),
    "ahead": (0.0, 1.0),
    "storm": (2.0, -1.0),
    "steep": (-64.0, 65.0),
}


def moved(model: nn.Module, size: float) -> dict[str, Tensor]:
    return {name: (p + size * torch.randn_like(p)).detach() for name, p in model.named_parameters() if p.requires_grad}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict(keep_vars=False).items()}


def without_dropout(model: nn.Module) -> nn.Module:
    """A loop over examples draws other masks, so oracle comparisons run without; masks have a test of their own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def check(case: Case, dtype: torch.dtype, weights: tuple[float, float], clipping: str, step: float = 0.1) -> None:
    torch.manual_seed(1)
    model = without_dropout(case.make().to(dtype))
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.batch())
    points = [(a, v) for a, v in zip(weights, (None, moved(model, step))) if a != 0]
    double = without_dropout(case.make()).double()
    double.load_state_dict(model.state_dict())
    for a, b in zip(double.modules(), model.modules()):
        a.training = b.training
    exact_points = [(a, None if v is None else {n: t.double() for n, t in v.items()}) for a, v in points]
    exact = oracle.per_example(
        double,
        tuple(t.double() if t.is_floating_point() else t for t in batch),
        case.loss,
        exact_points,
        case.axes,
    )
    norms = torch.tensor([oracle.norm(u) for u in exact], dtype=torch.float64)
    max_norm = float(norms.median())  # some are clipped, some are not
    before = snapshot(model)
    grads, found = clipped_gradient(model, batch, case.loss, points, max_norm, clipping)
    tolerance = 1e-6 if dtype == torch.float64 else 2e-5 * max(1.0, abs(weights[1]))
    assert oracle.relative_error(grads, oracle.clipped(exact, clipping, max_norm)) < tolerance
    assert ((found - norms).abs() / norms).max() < tolerance
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", ["one", "disk"])
def test_matches_the_loop_in_float64(name: str, weights: str) -> None:
    check(CASES[name], torch.float64, POINTS[weights], "flat")


@pytest.mark.parametrize("name", CASES)
def test_matches_the_loop_in_float32(name: str) -> None:
    check(CASES[name], torch.float32, POINTS["disk"], "flat")


@pytest.mark.parametrize("name", ["mlp", "cnn5", "wide-residual", "vit", "gpt-tied", "used-twice"])
@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized", "per-layer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weights", ["one", "disk", "ahead", "storm"])
def test_every_clipper(name: str, clipping: str, dtype: torch.dtype, weights: str) -> None:
    check(CASES[name], dtype, POINTS[weights], clipping)


@pytest.mark.parametrize("name", ["mlp", "cnn5", "wide-residual", "vit", "gpt-tied", "used-twice"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("step", [0.1, 1e-3])
def test_nearly_cancelling_points(name: str, dtype: torch.dtype, step: float) -> None:
    """κ = .03, γ = .5: coefficients -64 and 65."""
    check(CASES[name], dtype, POINTS["steep"], "flat", step)


@pytest.mark.parametrize("name", ["mlp", "cnn5", "vit", "gpt-tied"])
@pytest.mark.parametrize("weights", ["one", "disk", "steep"])
@pytest.mark.parametrize("clipping", ["flat", "automatic", "normalized", "per-layer"])
def test_no_example_contributes_more_than_the_sensitivity(name: str, weights: str, clipping: str) -> None:
    """The sum over one example, as summed in float32, is no longer than S: the slack covers rounding."""
    case = CASES[name]
    torch.manual_seed(2)
    model = without_dropout(case.make())
    points = [(a, v) for a, v in zip(POINTS[weights], (None, moved(model, 0.05))) if a != 0]
    batch = case.batch()
    clipper = Clipper(clipping, 0.5)
    for i in range(len(batch[0])):
        grads, _ = clipped_gradient(model, oracle.example(batch, i), case.loss, points, 0.5, clipping)
        assert oracle.norm(grads) <= clipper.sensitivity
        assert not any(g.requires_grad for g in grads.values())
        if clipping in ("flat", "normalized"):
            assert oracle.norm(grads) > 0.99 * clipper.sensitivity  # every example here is longer than C


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25, 0.0])
@pytest.mark.parametrize("name", ["mlp", "cnn5", "gpt-like"])
@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_one_bad_example_leaves_the_rest_intact(value: float, name: str, clipping: str) -> None:
    torch.manual_seed(3)
    if name == "gpt-like":
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Flatten())
        inputs, loss = torch.randn(6, 5, 8), lambda m, b: m(b[0]).square().mean(1)
    else:
        model, (inputs, _), loss = (
            CASES[name].make(),
            CASES[name].batch(),
            lambda m, b: m(b[0]).square().mean(1),
        )
    weights = torch.ones(6)
    weights[2] = value

    def weighted(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return loss(model, batch) * batch[1]

    grads, norms = clipped_gradient(model, (inputs, weights), weighted, max_norm=0.3, clipping=clipping)
    others = [0, 1, 3, 4, 5]
    rest, rest_norms = clipped_gradient(
        model, (inputs[others], weights[others]), weighted, max_norm=0.3, clipping=clipping
    )
    assert torch.allclose(norms[others], rest_norms, rtol=1e-5)
    difference = {name: grads[name].double() - rest[name].double() for name in grads}
    if value == 1e25:  # huge, but a gradient like any other: it is clipped to C
        assert norms[2] > 1e20
        assert oracle.norm(difference) == pytest.approx(0.3, rel=1e-3)
    else:
        assert oracle.norm(difference) < 1e-5


def test_both_points_see_the_same_dropout_masks() -> None:
    """With equal points the combination is the one-point gradient, whatever c is, only if the masks agree."""
    case = CASES["gpt-untied-dropout"]
    torch.manual_seed(4)
    model, batch = case.make().double(), case.batch()
    here = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = RandomState.capture()
    one, norms = clipped_gradient(model, batch, case.loss, [(1.0, None)])
    after_one = torch.rand(4)
    state.restore()
    two, norms_two = clipped_gradient(model, batch, case.loss, [(-4.0, None), (5.0, here)])
    after_two = torch.rand(4)
    assert oracle.relative_error(two, one) < 1e-10
    assert torch.allclose(norms, norms_two)
    assert torch.equal(after_one, after_two)  # the stream goes on as after one forward pass
    state.restore()
    exact = torch.autograd.grad(case.loss(model, batch).sum(), list(model.parameters()))
    state.restore()
    unclipped, _ = clipped_gradient(model, batch, case.loss, max_norm=1e9)
    assert oracle.relative_error(unclipped, dict(zip(dict(model.named_parameters()), exact))) < 1e-10


def test_an_example_of_its_own_batch() -> None:
    case = CASES["vit"]
    torch.manual_seed(5)
    model, batch = case.make().double(), tuple(t[:1] for t in case.batch())
    batch = (batch[0].double(), batch[1])
    exact = oracle.per_example(model, batch, case.loss)
    grads, norms = clipped_gradient(model, batch, case.loss, max_norm=1e9)
    assert oracle.relative_error(grads, exact[0]) < 1e-10
    assert norms.shape == (1,)


def test_bfloat16_parameters_are_summed_in_float32() -> None:
    case = CASES["mlp"]
    torch.manual_seed(6)
    model = case.make().bfloat16()
    batch = (case.batch()[0].bfloat16(), case.batch()[1])
    grads, _ = clipped_gradient(model, batch, case.loss)
    assert all(g.dtype == torch.float32 for g in grads.values())
    double = case.make().double()
    double.load_state_dict(model.state_dict())
    exact = oracle.per_example(double, (batch[0].double(), batch[1]), case.loss)
    assert oracle.relative_error(grads, oracle.clipped(exact, "flat", 1.0)) < 0.03


def test_autocast() -> None:
    case = CASES["gpt-tied"]
    torch.manual_seed(7)
    model, batch = case.make(), case.batch()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return case.loss(model, batch).float()

    grads, _ = clipped_gradient(model, batch, loss)
    exact = oracle.per_example(model, batch, case.loss)
    assert oracle.relative_error(grads, oracle.clipped(exact, "flat", 1.0)) < 0.03
