"""What cannot be established is refused, by name, before training; and nothing stays on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diskdp.errors import GradientError
from diskdp.gradients import clipped_gradient, explain
from tests.models import B, D, K, Lambda, T, classify, parameter, square, vectors


class Double(torch.autograd.Function):
    """A custom Function that hides a parameter from torch function modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


def layer(function: Callable[..., Tensor], **parts: Any) -> nn.Module:
    return nn.Sequential(Lambda(function, **parts), nn.Tanh(), nn.Linear(D, K))


def batch_norm_functional(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, m.w, None, training=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, K)),
        "BatchNorm.*GroupNorm",
    ),
    "batch norm without parameters": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False), nn.Linear(D, K)),
        "BatchNorm.*GroupNorm",
    ),
    "functional batch norm": (lambda: layer(batch_norm_functional, w=parameter(D)), "batch_norm.*GroupNorm"),
    "a parameter outside the graph": (
        lambda: layer(lambda m, x: x, unused=nn.Linear(D, D)),
        "unused.weight, 0.unused.bias.*requires_grad_",
    ),
    "a parameter whose use reaches no loss": (
        lambda: layer(lambda m, x: (m.unused(x), x)[1], unused=nn.Linear(D, D)),
        "unused.weight",
    ),
    "a mean over the batch after a layer": (
        lambda: layer(lambda m, x: m.l(x) - m.l(x).mean(0), l=nn.Linear(D, D)),
        "linear.*mixes examples",
    ),
    "a detached mean over the batch": (
        lambda: layer(lambda m, x: m.l(x) - m.l(x).mean(0).detach(), l=nn.Linear(D, D)),
        "loss of one example changes",
    ),
    "a mean over the batch before any layer": (
        lambda: layer(lambda m, x: m.l((x - x.mean(0)) / x.std(0)), l=nn.Linear(D, D)),
        "loss of one example changes",
    ),
    "attention across the batch": (
        lambda: layer(lambda m, x: m.l(x).softmax(0) * x, l=nn.Linear(D, D)),
        "mixes examples",
    ),
    "a custom autograd Function": (
        lambda: layer(lambda m, x: Double.apply(x, m.w), w=parameter(D)),
        "Double",
    ),
    "an embedding that renormalises": (
        lambda: Lambda(lambda m, x: m.e((x[:, :1] > 0).long()).mean(1), e=nn.Embedding(3, K, max_norm=1.0)),
        "max_norm",
    ),
    "gradients scaled by frequency": (
        lambda: Lambda(lambda m, x: m.e((x[:, :1] > 0).long()).mean(1), e=nn.Embedding(3, K, scale_grad_by_freq=True)),
        "scale_grad_by_freq",
    ),
    "several outputs without a rule": (
        lambda: layer(lambda m, x: torch.native_layer_norm(x, (D,), m.w, None, 1e-5)[0], w=parameter(D)),
        "native_layer_norm.*several outputs",
    ),
    "running statistics of the data": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4)),
            nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.Linear(D, K),
        ),
        "track_running_stats",
    ),
    "randomness of its own": (
        lambda: layer(
            lambda m, x: m.l(x) * torch.rand(1, generator=m.g),
            l=nn.Linear(D, D),
            g=torch.Generator().manual_seed(1),
        ),
        "change from one evaluation to the next",
    ),
    "data written into a parameter's copy": (
        lambda: layer(lambda m, x: m.w.expand(len(x), -1).clone().mul_(x), w=parameter(D)),
        "out of place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_and_fix(name: str) -> None:
    make, message = REFUSED[name]
    torch.manual_seed(0)
    model, batch = make(), vectors()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(GradientError, match=f"(?s){message}"):
        clipped_gradient(model, batch, classify)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    explanation = explain(model, batch, classify)
    assert explanation.refused
    assert "refused:" in str(explanation)


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "the mean": (lambda m, b: m(b[0]).mean(), r"shape \(\).*shape \[B\]"),
    "one an output": (lambda m, b: m(b[0]), "one floating-point loss an example"),
    "a number": (lambda m, b: 1.0, "float"),
    "integers": (lambda m, b: m(b[0]).argmax(1), "floating-point"),
    "no gradient": (lambda m, b: m(b[0]).detach().mean(1), "do not depend on any trainable parameter"),
    "sum of the batch for everyone": (lambda m, b: m(b[0]).sum() * torch.ones(B), "mixes examples"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_one_number_an_example(name: str) -> None:
    loss, message = LOSSES[name]
    with pytest.raises(GradientError, match=message):
        clipped_gradient(nn.Linear(D, K), vectors(), loss)


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(GradientError, match="no trainable parameter"):
        clipped_gradient(nn.Linear(D, K).requires_grad_(False), vectors(), classify)


def test_the_batch_axis_is_found_not_assumed() -> None:
    """As many time steps as examples, time first: taking axis 0 would be silently wrong."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(B, B, D).double()
    grads, _ = clipped_gradient(model, (x,), lambda m, b: m(b[0]).square().mean((0, 2)), max_norm=0.05)
    exact, _ = clipped_gradient(model, (x.transpose(0, 1),), square, max_norm=0.05)
    assert all(torch.allclose(grads[name], exact[name]) for name in exact)
    assert x.shape[0] != T


def test_nothing_stays_on_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, K))
    model[0].bias.requires_grad_(False)
    model[1].weight.grad = torch.ones(K, D)
    attributes = {
        name: (set(vars(m)), len(m._forward_hooks), len(m._backward_hooks)) for name, m in model.named_modules()
    }
    parameters = {name: (p.requires_grad, p.grad, p.data_ptr(), set(vars(p))) for name, p in model.named_parameters()}
    clipped_gradient(model, vectors(), classify)
    assert attributes == {
        name: (set(vars(m)), len(m._forward_hooks), len(m._backward_hooks)) for name, m in model.named_modules()
    }
    assert parameters == {n: (p.requires_grad, p.grad, p.data_ptr(), set(vars(p))) for n, p in model.named_parameters()}
    assert all(not p._backward_hooks for p in model.parameters())


def test_parameters_that_the_loss_hardly_feels_are_not_refused() -> None:
    """A gradient that happens to be zero is a gradient; so is one that no data touches."""
    model = nn.Linear(D, K)
    grads, norms = clipped_gradient(model, vectors(), lambda m, b: (m(b[0]) * 0).sum(1))
    assert not norms.any()
    assert all(not g.any() for g in grads.values())
    grads, norms = clipped_gradient(
        model, vectors(), lambda m, b: torch.ones(B) * sum(p.sum() for p in m.parameters()), max_norm=1e9
    )
    assert all(torch.allclose(g, torch.full_like(g, float(B))) for g in grads.values())
    assert torch.allclose(norms, torch.full((B,), (D * K + K) ** 0.5, dtype=norms.dtype))


def test_a_non_finite_example_does_not_reach_others_through_the_fallback() -> None:
    torch.manual_seed(2)
    model = Lambda(lambda m, x: torch.einsum("bi,kij,bj->bk", x, m.w, x.tanh()), w=parameter(K, D, D))
    x = torch.randn(B, D)
    x[1] = float("nan")

    def loss(m: Any, b: Any) -> Tensor:
        return m(b[0]).square().mean(1)

    grads, norms = clipped_gradient(model, (x,), loss)
    rest, rest_norms = clipped_gradient(model, (x[[0, 2, 3, 4, 5]],), loss)
    assert torch.allclose(norms[[0, 2, 3, 4, 5]], rest_norms)
    assert all(torch.allclose(grads[name], rest[name], atol=1e-6) for name in rest)


def test_clipped_gradient_examines_a_model_and_loss_once() -> None:
    calls = 0

    def counted(m: Any, b: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return classify(m, b)

    model = nn.Linear(D, K)
    clipped_gradient(model, vectors(), counted)
    first = calls
    clipped_gradient(model, vectors(), counted)
    assert calls == first + 1


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.Linear(D, K)),
    "attention": lambda: nn.TransformerEncoderLayer(D, 2, 12, dropout=0.1, batch_first=True),
    "fused attention": lambda: Lambda(
        lambda m, x: F.scaled_dot_product_attention(m.l(x), x, x, None, 0.2), l=nn.Linear(D, D)
    ),
    "fused attention by name": lambda: Lambda(
        lambda m, x: F.scaled_dot_product_attention(m.l(x), x, x, dropout_p=0.2), l=nn.Linear(D, D)
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_does_not_hide_a_division_by_the_number_of_examples(name: str) -> None:
    """The masks of another batch size are others, so that examples are left out without any."""
    torch.manual_seed(0)
    model, batch = DROPPING[name](), (torch.randn(B, T, D),)
    clipped_gradient(model, batch, square)
    with pytest.raises(GradientError, match="are left out"):
        clipped_gradient(model, batch, lambda m, b: square(m, b) / len(b[0]))
