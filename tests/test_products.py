"""The kernels behind norms and sums: as exact as float32 allows, whatever torch is told to do faster."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diskdp import clipped_gradient
from diskdp.clipping import Clipper
from diskdp.gradients import Engine, clip, clipped, engine, products
from diskdp.gradients.clipped import relative_slack
from diskdp.gradients.structure import Structure, examine
from tests import oracle


@pytest.mark.parametrize("numbers", [1, 1000, 5000, 1_000_003])
def test_squares_of_long_vectors_are_not_low(numbers: int) -> None:
    """One running sum in float32 is low by 2e-5 at a million numbers; the slack of the clip factor is a tenth of it."""
    torch.manual_seed(0)
    values = torch.randn(3, numbers)
    exact = values.double().square().sum(1)
    assert torch.allclose(products.squares(values), exact, rtol=4e-7)
    assert torch.allclose(products.dots(values, values.clone()).double(), exact, rtol=4e-7)


def test_no_example_contributes_more_through_a_large_materialised_gradient() -> None:
    """Gradients of a wide layer over a long sequence are made, a million numbers an example."""
    torch.manual_seed(0)
    model, max_norm = nn.Linear(1000, 1000, bias=False), 1.0
    x = torch.randn(1, 2500, 1000)
    grads, norms = clipped_gradient(model, x, lambda m, x: m(x).square().mean((1, 2)) * 100, max_norm=max_norm)
    released = torch.linalg.vector_norm(grads["weight"].double()).item()
    slack = relative_slack(torch.float32, [(1.0, None)])
    assert norms.item() > max_norm
    assert max_norm * (1 - 3 * slack) < released <= max_norm


@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 70), st.integers(1, 600), st.booleans())
@settings(max_examples=60, deadline=None)
def test_products_by_either_kernel(batch: int, first: int, second: int, width: int, onto: bool) -> None:
    """Small products go to torch.mm, large ones to oneDNN: neither may differ from float64 by more than rounding."""
    torch.manual_seed(width)
    a, b = torch.randn(batch, first, width), torch.randn(batch, second, width)
    tolerance = 1e-6 * math.sqrt(width)
    exact = torch.bmm(a.double(), b.double().transpose(1, 2))
    assert torch.allclose(products.gram_products([(a, b)]).double(), exact, atol=10 * tolerance, rtol=1e-5)
    squared = products.gram_products([(a, b), (a, b)]).double()
    assert torch.allclose(squared, exact.square(), atol=100 * tolerance * math.sqrt(width), rtol=1e-5)
    total = torch.randn(batch, first, second)
    expected = total.double() - 0.5 * exact
    products.add_products(a, b, -0.5, total)
    assert torch.allclose(total.double(), expected, atol=10 * tolerance, rtol=1e-5)
    left, right = a[0].t(), b[0].t()  # [width, first], [width, second]
    start = torch.randn(first, second) if onto else None
    expected = left.double().t() @ right.double() + (0 if start is None else start.double())
    found = products.sum_of_outers(left, right, start)
    assert found.is_contiguous()
    assert start is None or found is start
    assert torch.allclose(found.double(), expected, atol=10 * tolerance, rtol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(3000, 40), (40, 3000), (6000, 800)])
def test_large_sums_of_outers(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    left, right, start = torch.randn(50, rows), torch.randn(50, columns), torch.randn(rows, columns)
    exact = left.double().t() @ right.double()
    for total in (None, start.clone()):
        found = products.sum_of_outers(left, right, total).double()
        assert torch.allclose(found, exact if total is None else exact + start.double(), atol=1e-4)


def test_a_machine_without_onednn_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 60, 300), torch.randn(2, 60, 300)
    with_it = products.sum_of_outers(left[0], right[0]), products.gram_products([(left, right)] * 4)
    monkeypatch.setattr(products, "_has_onednn", lambda: False)
    without = products.sum_of_outers(left[0], right[0]), products.gram_products([(left, right)] * 4)
    for a, b in zip(with_it, without):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_reduced_precision_never_reaches_norms_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may be told to multiply float32 matrices in bfloat16: fine for the model, not for what bounds it."""
    seen: list[str] = []

    def watch(name: str) -> None:
        original = getattr(clipped, name)

        def watched(*arguments: object) -> object:
            seen.append(torch.get_float32_matmul_precision())
            return original(*arguments)

        monkeypatch.setattr(clipped, name, watched)

    watch("squared_norms")
    watch("weighted_sum")
    model = nn.Linear(4, 3)
    torch.set_float32_matmul_precision("medium")
    try:
        engine = Engine(model, lambda m, x: m(x).square().sum(1))
        clip(engine, torch.randn(5, 4), [(1.0, None)], Clipper("flat", 1.0)).summed()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(seen) == 4
    assert set(seen) == {"highest"}


@pytest.mark.parametrize("c", [0.3, 2.4, -1.4, 2.6, 65.0])
def test_points_mixed_either_way_are_exact(c: float) -> None:
    """Up to Σ|a_k| = 4 each point keeps its factors, beyond it differences are taken: the same norms, float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (3, 8, 8)), nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(2), nn.Linear(36, 7))
    batch = torch.randn(5, 192)
    ahead = {name: p.detach() + 1e-3 * torch.randn_like(p) for name, p in model.named_parameters()}
    points = [(1 - c, None), (c, ahead)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        return model(x).square().sum((1, 2))

    gradients, norms = clipped_gradient(model, batch, loss, points, max_norm=0.5)
    double = model.double()
    exact = oracle.per_example(
        double, (batch.double(),), loss, [(1 - c, None), (c, {n: v.double() for n, v in ahead.items()})]
    )
    assert torch.allclose(norms.double(), torch.tensor([oracle.norm(u) for u in exact]).double(), rtol=3e-6)
    assert oracle.relative_error(gradients, oracle.clipped(exact, "flat", 0.5)) < 2e-5 * max(1, abs(c))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("spelling", ["linear", "keywords", "addmm", "matmul"])
def test_linear_layers_by_either_kernel(spelling: str, frozen: bool) -> None:
    """Layers large enough for oneDNN: losses, gradients of the layer and of what lies before it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"before": nn.Linear(5, 300), "layer": nn.Linear(300, 400)})
    model["layer"].requires_grad_(not frozen)
    batch = torch.randn(16, 5)

    def loss(model: nn.ModuleDict, x: Tensor) -> Tensor:
        x = x[0] if isinstance(x, tuple | list) else x
        h, layer = model["before"](x).tanh(), model["layer"]
        if spelling == "linear":
            y = layer(h)
        elif spelling == "keywords":
            y = nn.functional.linear(input=h, weight=layer.weight, bias=layer.bias)
        elif spelling == "addmm":
            y = torch.addmm(layer.bias, h, layer.weight.t())
        else:
            y = h @ layer.weight.t() + layer.bias
        return y.sin().sum(1)

    gradients, norms = clipped_gradient(model, batch, loss, max_norm=5.0)
    exact = oracle.per_example(model.double(), (batch.double(),), loss)
    assert torch.allclose(norms.double(), torch.tensor([oracle.norm(u) for u in exact]).double(), rtol=3e-6)
    assert oracle.relative_error(gradients, oracle.clipped(exact, "flat", 5.0)) < 2e-5


def test_layers_keep_torchs_kernels_where_reduced_precision_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("oneDNN was called")

    monkeypatch.setattr(products, "_times_transposed", refuse)
    x, weight = torch.randn(100, 300), torch.randn(400, 300)
    torch.set_float32_matmul_precision("medium")
    try:
        products.linear(x, weight)
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    assert products.linear(x.double(), weight.double()).dtype == torch.float64
    products.linear(x, weight.requires_grad_())


def test_examination_rounds_as_the_model_does_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel flips a ReLU here and there: 1 of 180 examinations of an MLP failed by one flipped unit."""
    examined: list[bool] = []

    def refuse(*_: object) -> Tensor:
        raise AssertionError("oneDNN was called")

    def watched(*arguments: Any) -> Structure:
        with monkeypatch.context() as patched:
            patched.setattr(products, "_times_transposed", refuse)
            examined.append(True)
            return examine(*arguments)

    monkeypatch.setattr(engine, "examine", watched)
    model = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    Engine(model, lambda m, x: m(x).square().sum(1)).gradients(torch.randn(16, 784), [(1.0, None)])
    assert examined == [True]


BIASES: dict[str, Any] = {
    "expanded": lambda p: torch.randn(1).expand(p),
    "a column": lambda p: torch.randn(p, 2)[:, 0],
    "every second": lambda p: torch.randn(2 * p)[::2],
    "of one number": lambda p: torch.randn(1),
    "without an axis": lambda p: torch.randn(()),
    "a row": lambda p: torch.randn(1, p),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_onednn_would_misread(name: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(64, 128), torch.randn(256, 128), BIASES[name](256)
    assert torch.allclose(products.linear(x, weight, bias), x @ weight.t() + bias, atol=1e-4)


class Doubled(Tensor):
    """A weight that stands for twice its numbers, as quantised ones stand for others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


def test_weights_of_other_kinds_compute_as_they_do() -> None:
    x, weight = torch.randn(64, 128), torch.randn(256, 128)
    doubled = weight.clone().as_subclass(Doubled)
    assert torch.allclose(products.linear(x, doubled).as_subclass(Tensor), 2 * x @ weight.t(), atol=1e-4)
    sparse = weight.to_sparse_csr()
    assert torch.allclose(products.linear(x, sparse), x @ weight.t(), atol=1e-4)
    vectorised = torch.func.vmap(lambda row: products.linear(row, weight))(x.view(2, 32, 128))
    assert torch.allclose(vectorised.flatten(0, 1), x @ weight.t(), atol=1e-4)
