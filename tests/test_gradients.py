"""The engine's parts: ownership, methods of the planner, pairing of points, memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diskdp import clipped_gradient, explain
from diskdp.clipping import Clipper
from diskdp.errors import GradientError
from diskdp.gradients import Engine, batches, clip, engine, planner
from diskdp.gradients.ownership import Layout, Owner, candidates, explanations, probe_exponents
from diskdp.gradients.terms import Conv, ConvShape, Direct, Outer, Term, combine
from tests import oracle
from tests.models import CASES, classify


@given(
    batch=st.integers(2, 9),
    outside=st.integers(1, 3),
    inside=st.integers(1, 3),
    others=st.lists(st.integers(1, 9), max_size=2),
    axis=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=150, deadline=None)
def test_ownership_is_found_from_values(
    batch: int, outside: int, inside: int, others: list[int], axis: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    axis, size = min(axis, len(others)), outside * batch * inside
    shape = [*others[:axis], size, *others[axis:]]
    values = torch.rand(shape, generator=generator) + 0.1
    owners = torch.arange(batch).repeat_interleave(inside).repeat(outside)
    exponents = probe_exponents(batch, generator)
    along = [-1 if i == axis else 1 for i in range(len(shape))]
    scaled = values * (2.0 ** exponents[owners]).view(along)
    layout, *_ = explanations(values, scaled, exponents)
    found = Owner(layout, batch).by_example(owners.view(along).expand(shape))
    assert torch.equal(found.flatten(1), torch.arange(batch)[:, None].expand(batch, values.numel() // batch))
    assert torch.equal(Owner(layout, batch).examples(values), owners if layout.axis == axis else torch.arange(batch))


def test_mixed_rows_have_no_owner() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = probe_exponents(4, generator)
    parts = torch.rand(4, 6, 3, generator=generator)  # every row is a sum over four examples
    scaled = (parts * (2.0**exponents).view(4, 1, 1)).sum(0)
    assert explanations(parts.sum(0), scaled, exponents) == []
    assert next(candidates(torch.Size([4, 8]), 4)) == Layout(0)


def outer(batch: int, length: int, rows: int, width: int) -> Outer:
    return Outer(torch.randn(batch, length, rows).double(), torch.randn(batch, length, width).double(), rows)


def row_numbers(batch: int, length: int, rows: int, width: int) -> Outer:
    return Outer(torch.randint(0, rows, (batch, length)), torch.randn(batch, length, width).double(), rows)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_methods_for_matrices_agree(batch: int, parts: list[tuple[int, bool]], rows: int, width: int) -> None:
    terms: list[Term] = [
        replace((row_numbers if hot else outer)(batch, length, rows, width), scale=1 - 2 * torch.rand(()).item())
        for length, hot in parts
    ]
    exact = torch.stack([t.per_example() for t in terms]).sum(0)
    for method in planner.methods(terms):
        norms = planner.squared_norms(terms, method)
        assert torch.allclose(norms.squares_B, exact.square().sum((1, 2)))
        weights = torch.rand(batch).double()
        total = planner.weighted_sum([norms.gradients] if norms.gradients else terms, weights)
        assert torch.allclose(total, (exact * weights[:, None, None]).sum(0))


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=3
    ),
    st.integers(1, 2),
    st.integers(1, 2),
)
@settings(max_examples=100, deadline=None)
def test_methods_for_convolutions_agree(
    batch: int, groups: int, filters: int, axes: list[tuple[int, int, int, int]], copies: int, count: int
) -> None:
    kernel, stride, padding, dilation = (tuple(a[i] for a in axes) for i in range(4))
    images = batch * copies
    weight = nn.Parameter(torch.zeros(filters * groups, 2, *kernel).double())
    terms: list[Term] = []
    exact = torch.zeros(batch, *weight.shape).double()
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[len(axes) - 1]
    for _ in range(count):
        x = torch.randn(images, 2 * groups, *[7] * len(axes)).double()
        output = convolve(x, weight, None, stride, padding, dilation, groups)
        r = torch.randn_like(output)
        shape, scale = ConvShape(kernel, stride, padding, dilation, groups), torch.rand(()).item() - 0.5
        terms.append(Conv(x, r.detach(), batch, shape, scale))
        for i in range(batch):
            own = slice(i * copies, (i + 1) * copies)
            exact[i] += scale * torch.autograd.grad((output[own] * r[own]).sum(), weight, retain_graph=True)[0]
    for method in planner.methods(terms):
        norms = planner.squared_norms(terms, method)
        assert torch.allclose(norms.squares_B, exact.flatten(1).square().sum(1))
        weights = torch.rand(batch).double()
        total = planner.weighted_sum([norms.gradients] if norms.gradients else terms, weights)
        assert torch.allclose(total, torch.einsum("b,b...->...", weights, exact))


def test_chunks_give_the_same_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = Conv(torch.randn(7, 2, 5).double(), torch.randn(7, 3, 5).double(), 7, ConvShape((3,), (1,), (1,), (1,), 1))
    for terms in ([outer(7, 3, 4, 5)], [outer(7, 30, 4, 5)], [conv, replace(conv, scale=-0.5)]):
        whole = [planner.squared_norms(terms, m) for m in planner.methods(terms)]
        with monkeypatch.context() as patched:
            patched.setattr(planner, "MAX_ELEMENTS", 30)
            for method, norms in zip(planner.methods(terms), whole):
                chunked = planner.squared_norms(terms, method)
                assert torch.allclose(chunked.squares_B, norms.squares_B)
                assert (chunked.gradients is None) == (norms.gradients is None) == (not method.keeps)


@pytest.mark.parametrize("coefficients", [(0.3, 0.7), (-64.0, 65.0), (0.5, 0.2, 0.3)])
def test_combined_terms_are_the_weighted_sum(coefficients: tuple[float, ...]) -> None:
    for kind in (outer, row_numbers):
        terms: list[Term] = [kind(3, 2, 4, 5) for _ in coefficients]
        exact = sum(a * t.per_example() for a, t in zip(coefficients, terms))
        found = sum(t.per_example() for t in combine(terms, coefficients))
        assert isinstance(exact, Tensor)
        assert isinstance(found, Tensor)
        assert torch.allclose(found, exact)
    direct: list[Term] = [Direct(torch.randn(3, 4).double()) for _ in coefficients]
    [only] = combine(direct, coefficients)
    assert torch.allclose(only.per_example(), sum(a * t.per_example() for a, t in zip(coefficients, direct)))  # type: ignore[arg-type]


def test_a_path_that_differs_between_the_points() -> None:
    """Stochastic depth driven by the weights themselves: uses cannot be paired, the sum is still exact."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(1.0).double())
            self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) if self.gate > 0 else self.a(self.a(x))
            return self.b(x) * self.gate

    torch.manual_seed(0)
    model = Gate()
    ahead = {n: (p - 2.0 if n == "gate" else p * 1.1).detach() for n, p in model.named_parameters()}
    batch = (torch.randn(6, 4).double(), torch.randint(0, 3, (6,)))
    points = [(0.25, None), (0.75, ahead)]
    exact = oracle.clipped(oracle.per_example(model, batch, classify, points), "flat", 0.3)
    grads, _ = clipped_gradient(model, batch, classify, points, 0.3)
    assert oracle.relative_error(grads, exact) < 1e-10


def test_nothing_outlives_the_call() -> None:
    """No cycle through the graph: activations are freed at once, without the garbage collector."""
    seen: list[weakref.ref[Tensor]] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(weakref.ref(x))
            return x

    model = nn.Sequential(nn.Linear(8, 16), Watch(), nn.Tanh(), Watch(), nn.Linear(16, 4))
    batch = (torch.randn(6, 8), torch.randint(0, 4, (6,)))
    engine = Engine(model, classify)
    gc.collect()
    gc.disable()
    try:
        clip(engine, batch, [(1.0, None)], Clipper("flat", 1.0)).summed()
        assert seen
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


def test_the_structure_is_examined_once_for_all_batch_sizes() -> None:
    """That examples are apart is seen at a second size too, and for those up to twice as large."""
    calls = 0

    def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return classify(model, batch)

    engine = Engine(CASES["cnn5"].make(), counted)
    for size in (5, 7, 12):
        before = calls
        engine.gradients((torch.randn(size, 3, 16, 16), torch.randint(0, 4, (size,))), [(1.0, None)])
        assert (calls - before == 1) == (size == 12)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_STRUCTURES", 3)
    found = Engine(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), lambda m, b: m(b[0]).square().mean((1, 2)))
    for length in range(2, 9):
        found.gradients((torch.randn(9, length, 4),), [(1.0, None)])
    assert len(found._examined.structures) == 3


def test_another_length_is_examined_on_a_few_examples() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        sizes.append(len(batch[0]))
        return model(batch[0]).square().mean((1, 2))

    found = Engine(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), loss)
    for length, few in ((7, set()), (9, {4}), (4, {5}), (5, {4}), (2, {4})):  # 4 of length 4 could be either axis
        sizes.clear()
        found.gradients((torch.randn(30, length, 6),), [(1.0, None)])
        halves = {size // 2 for size in few or {30}} | {size - size // 2 for size in few or {30}}
        assert set(sizes) == {30} | few | halves
        assert sizes.count(30) == (4 if few else sizes.count(30))  # with a look at all of them


def test_a_few_examples_that_take_another_path_are_not_enough() -> None:
    """A path that only this length and this many examples take is examined as it is."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        losses_B = model(batch[0]).square().mean((1, 2))
        if batch[0].shape[1] == 5 and len(batch[0]) > 6:
            losses_B = losses_B - model(batch[0]).detach().mean()
        return losses_B

    found = Engine(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), loss)
    found.gradients((torch.randn(9, 4, 4),), [(1.0, None)])
    with pytest.raises(GradientError, match="loss of one example changes"):
        found.gradients((torch.randn(9, 5, 4),), [(1.0, None)])


def test_lengths_that_coincide_with_the_batch() -> None:
    """Rows flattened to [B·T]: how many an example has is not known from a batch in which B and T were the same."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()

    def loss(m: nn.Module, b: tuple[Tensor, ...]) -> Tensor:
        return m(b[0].flatten(0, 1)).unflatten(0, b[0].shape[:2]).square().mean((1, 2))

    found = Engine(model, loss)
    for size in (5, 6, 5, 7):
        batch = (torch.randn(size, size, 4).double(),)
        [exact] = [oracle.per_example(model, batch, loss)]
        grads = clip(found, batch, [(1.0, None)], Clipper("flat", 1e9)).summed()
        assert oracle.relative_error(grads, oracle.clipped(exact, "flat", 1e9)) < 1e-10


def test_a_table_of_positions_as_long_as_the_batch() -> None:
    """Row numbers [T, T] that belong to no example, where T is the number of examples."""
    model = nn.Module()
    model.table, model.out = nn.Embedding(9, 1).double(), nn.Linear(4, 4).double()

    def loss(m: Any, b: tuple[Tensor, ...]) -> Tensor:
        position = torch.arange(b[0].shape[1])
        bias_TT = m.table(position[:, None] - position + 4).squeeze(-1)
        return (torch.softmax(b[0] @ b[0].transpose(1, 2) + bias_TT, -1) @ m.out(b[0])).square().mean((1, 2))

    for count in (4, 5, 6):
        batch = (torch.randn(count, 5, 4).double(),)
        exact = oracle.clipped(oracle.per_example(model, batch, loss), "flat", 0.1)
        grads, _ = clipped_gradient(model, batch, loss, max_norm=0.1)
        assert oracle.relative_error(grads, exact) < 1e-10


def test_explain_says_rule_method_and_cost() -> None:
    torch.manual_seed(0)
    rows = {
        row.name: row for row in explain(CASES["gpt-tied"].make(), CASES["gpt-tied"].batch(), CASES["gpt-tied"].loss)
    }
    assert rows["tokens.weight"].rule == "embedding+linear"
    assert rows["tokens.weight"].method == "gram"
    assert rows["positions.weight"].method != "gram"
    assert all(row.refused is None and row.cost > 0 for row in rows.values())


def test_batches_of_any_container() -> None:
    class Encoding(dict[str, Tensor]):
        pass

    batch = Encoding(x=torch.arange(4), y=torch.arange(4).view(4, 1))
    swapped, count = batches.replace_examples(batch, 4, torch.tensor([0]), torch.tensor([3]), 0)
    assert count == 2
    assert isinstance(swapped, Encoding)
    assert swapped["x"].tolist() == [3, 1, 2, 3]
    assert len(list(batches.tensors({"a": [torch.ones(1), None], "b": "text"}))) == 1
