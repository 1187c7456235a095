"""Rules of the user's own: they serve, they are not believed, and they leave nothing behind."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diskdp import clipped_gradient, explain, rules
from diskdp.errors import GradientError
from diskdp.gradients.rules import default_rules
from diskdp.gradients.rules.user import UserRule
from tests import oracle
from tests.models import B, D, K, Lambda, classify, parameter, sequences, square, vectors

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"


class Dense(torch.autograd.Function):
    """x @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T if bias is None else x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.T @ x.flatten(0, -2), rows.sum(0) if ctx.needs_input_grad[2] else None


class Numpy(torch.autograd.Function):
    """x * weight with a backward that leaves torch, and a context that is set up apart."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, torch.from_numpy((grad.numpy() * x.numpy()).sum(tuple(range(x.dim() - 1))))


dense = rules.visible(Dense.apply)
scaled = rules.visible(Numpy.apply)


@rules.visible
def shifted(x: Tensor, weight: Tensor, *, by: float = 1.0) -> Tensor:
    return torch.tanh(x * weight + by)


def dense_rule(use: rules.OperationUse) -> dict[str, Any]:
    rows = use.rows(use.grad)
    given: dict[str, Any] = {"weight": rules.outer(rows, use.rows(use.inputs["x"]))}
    return given if use.inputs["bias"] is None else {**given, "bias": rows.sum(1)}


def scaled_rule(use: rules.OperationUse) -> dict[str, Any]:
    return {"weight": use.sum_to(use.grad * use.inputs["x"], "weight")}


def shifted_rule(use: rules.OperationUse) -> dict[str, Any]:
    x, weight, by = (use.inputs[name] for name in ("x", "weight", "by"))
    inner = use.grad * (1 - torch.tanh(x * weight + by).square())
    return {"weight": use.sum_to(inner * x, "weight")}


def atan2_rule(use: rules.OperationUse) -> dict[str, Any]:
    y, x = use.inputs["input"], use.inputs["other"]
    slopes = {"input": x, "other": -y}
    return {n: use.sum_to(use.grad * slopes[n] / (x.square() + y.square()), n) for n in use.parameters}


@torch.library.custom_op("diskdp_tests::stretched", mutates_args=())
def stretched(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def _stretched_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


stretched.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
    setup_context=_stretched_context,
)
STRETCHED = torch.ops.diskdp_tests.stretched


@contextmanager
def registered(rule: UserRule, *operations: Any, names: tuple[str, ...] = ()) -> Iterator[None]:
    rules.rule(*operations, names=names)(rule)
    try:
        yield
    finally:
        rules.remove(*operations)


def model_of(function: Callable[..., Tensor], **parts: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), Lambda(function, **parts), nn.Tanh(), nn.Linear(D, K)).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], UserRule]] = {
    "function": (
        lambda: model_of(lambda m, x: dense(x, m.w, m.b), w=parameter(D, D), b=parameter(D)),
        (dense,),
        dense_rule,
    ),
    "function without bias": (
        lambda: model_of(lambda m, x: dense(x, m.w, None), w=parameter(D, D)),
        (dense,),
        dense_rule,
    ),
    "a transposed parameter": (
        lambda: model_of(lambda m, x: dense(x, m.w.t(), None), w=parameter(D, D)),
        (dense,),
        dense_rule,
    ),
    "a derived parameter": (
        lambda: model_of(lambda m, x: dense(x, m.w / m.w.norm(), None), w=parameter(D, D)),
        (dense,),
        dense_rule,
    ),
    "used twice": (
        lambda: model_of(lambda m, x: dense(dense(x, m.w, None).tanh(), m.w, None), w=parameter(D, D)),
        (dense,),
        dense_rule,
    ),
    "outside torch": (lambda: model_of(lambda m, x: scaled(x, m.w), w=parameter(D)), (scaled,), scaled_rule),
    "plain": (lambda: model_of(lambda m, x: shifted(x, weight=m.w, by=0.5), w=parameter(D)), (shifted,), shifted_rule),
    "custom operator": (lambda: model_of(lambda m, x: stretched(x, m.w), w=parameter(D)), (STRETCHED,), scaled_rule),
    "custom operator by name": (
        lambda: model_of(lambda m, x: STRETCHED(x, m.w), w=parameter(D)),
        (STRETCHED,),
        scaled_rule,
    ),
    "functions of torch": (
        lambda: model_of(lambda m, x: torch.atan2(x, m.w) + m.v.atan2(x), w=parameter(D), v=parameter(D)),
        (torch.atan2, torch.Tensor.atan2),
        atan2_rule,
    ),
}


@pytest.mark.parametrize("with_rule", [True, False], ids=["rule", "no rule"])
@pytest.mark.parametrize("batch", [vectors, sequences], ids=["vectors", "sequences"])
@pytest.mark.parametrize("name", MODELS)
def test_against_a_loop(name: str, batch: Callable[[], tuple[Tensor, ...]], with_rule: bool) -> None:
    """Two points, with the rule and without one."""
    make, operations, rule = MODELS[name]
    model, (x, _) = make(), batch()
    ahead = {n: (p + 0.1 * torch.randn_like(p)).detach() for n, p in model.named_parameters()}
    points = [(0.4, None), (0.6, ahead)]
    exact = oracle.clipped(oracle.per_example(model, (x.double(),), square, points), "flat", 0.1)
    if with_rule:
        names = ("input", "other") if rule is atan2_rule else ()
        with registered(rule, *operations, names=names):
            found, _ = clipped_gradient(model, (x.double(),), square, points, 0.1)
    else:
        found, _ = clipped_gradient(model, (x.double(),), square, points, 0.1)
    assert oracle.relative_error(found, exact) < 1e-10


def test_factors_are_used_as_factors() -> None:
    model, batch = MODELS["function"][0](), (torch.randn(B, D).double(), torch.zeros(B, dtype=torch.long))
    with registered(dense_rule, dense):
        rows = {row.name: row for row in explain(model, batch, classify)}
    assert (rows["1.w"].rule, rows["1.w"].method) == ("Dense", "gram")
    assert {row.name: row.method for row in explain(model, batch, classify)}["1.w"] == "direct"


WRONG: dict[str, UserRule] = {
    "twice": lambda use: {"weight": rules.outer(2 * use.rows(use.grad), use.rows(use.inputs["x"]))},
    "transposed": lambda use: {"weight": rules.outer(use.rows(use.inputs["x"]), use.rows(use.grad))},
    "one percent off": lambda use: {"weight": rules.outer(1.01 * use.rows(use.grad), use.rows(use.inputs["x"]))},
    "another example's": lambda use: {
        "weight": rules.outer(use.rows(use.grad).roll(1, 0), use.rows(use.inputs["x"]).roll(1, 0))
    },
    "everybody's share": lambda use: {
        "weight": (use.grad.flatten(0, -2).T @ use.inputs["x"].flatten(0, -2) / B).expand(B, D, D)
    },
    "nothing": lambda use: {"weight": torch.zeros(B, D, D)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name: str) -> None:
    """Also one that comes after the structure has been examined with another."""
    model, batch = MODELS["function without bias"][0]().float(), vectors()
    loss = classify
    clipped_gradient(model, batch, loss)
    with registered(WRONG[name], dense), pytest.raises(GradientError, match=r"1\.w: its per-example gradients do not"):
        clipped_gradient(model, batch, loss)
    with registered(dense_rule, dense):
        clipped_gradient(model, batch, loss)
    clipped_gradient(model, batch, loss)


MALFORMED: dict[str, tuple[Any, str]] = {
    "another argument": (lambda use: {"x": use.grad}, "'weight'.*NoneType"),
    "no mapping": (lambda use: use.grad, "must return a mapping.*Tensor"),
    "summed over the batch": (lambda use: {"weight": use.grad.T @ use.inputs["x"]}, r"\[8, 8\].*\[6, 8, 8\]"),
    "factors without rows": (lambda use: {"weight": rules.outer(use.grad, use.inputs["x"])}, r"\[B, T, P\]"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_says_what_is_expected(name: str) -> None:
    rule, message = MALFORMED[name]
    with registered(rule, dense), pytest.raises(GradientError, match=message):
        clipped_gradient(MODELS["function without bias"][0]().float(), vectors(), classify)


def test_what_cannot_be_registered() -> None:
    with pytest.raises(GradientError, match="linear: a rule for it is built in"):
        rules.rule(nn.functional.linear)(dense_rule)
    for unseen in (Dense.apply, lambda x: x, stretched):
        with pytest.raises(GradientError, match=r"torch does not show calls of it.*diskdp\.rules\.visible"):
            rules.rule(unseen)
    with pytest.raises(GradientError, match="names=") as error:
        rules.rule(torch.atan2)
    assert "atan2" in str(error.value)
    with pytest.raises(GradientError, match=r"Dense\.apply"):
        rules.visible(Dense)
    with pytest.raises(GradientError, match="no operation"):
        rules.rule()
    with pytest.raises(GradientError, match="Dense: no rule of yours"):
        rules.remove(dense)
    with (
        registered(dense_rule, dense),
        pytest.raises(GradientError, match="Dense: a rule for it is registered already"),
    ):
        rules.rule(scaled, dense)(scaled_rule)
    assert scaled not in default_rules().rules


def test_registering_from_many_threads() -> None:
    """Of several threads that register one operation one succeeds, and no registration is lost."""
    operations = [rules.visible(lambda x, weight: x * weight) for _ in range(16)]
    refused: list[GradientError] = []

    def work() -> None:
        for operation in operations:
            try:
                rules.rule(operation)(scaled_rule)
            except GradientError as error:
                refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 * len(operations)
    assert all(operation in default_rules().rules for operation in operations)
    rules.remove(*operations)
    assert not any(operation in default_rules().rules for operation in operations)


def test_parameters_that_come_by_another_way_are_refused() -> None:
    """From the surroundings, in a list, or written in place."""
    model = model_of(lambda m, x: rules.visible(lambda y, w: y * w * m.v)(x, m.w), w=parameter(D), v=parameter(D))
    with pytest.raises(GradientError, match=r"1\.v"):
        clipped_gradient(model, (vectors()[0].double(),), square)

    listed = rules.visible(lambda x, weights: x * weights[0] * weights[1])
    model = model_of(lambda m, x: listed(x, [m.w, m.v]), w=parameter(D), v=parameter(D))
    with registered(scaled_rule, listed), pytest.raises(GradientError, match="an argument of its own"):
        clipped_gradient(model, (vectors()[0].double(),), square)


def test_a_copied_model_finds_the_same_rule() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.operation = parameter(D, D), dense

        def forward(self, x: Tensor) -> Tensor:
            return self.operation(x, self.weight, None)

    model = copy.deepcopy(Layer())
    with registered(dense_rule, dense):
        [row] = explain(model, vectors(), square)
    assert (row.rule, row.method) == ("Dense", "gram")


def test_the_page_runs() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    before = default_rules()
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert default_rules().rules == before.rules
