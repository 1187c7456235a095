"""Under torch.compile: the gradients of the model as written, without a compilation; and it stays compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diskdp import DiSK, Plan, clipped_gradient, privatize
from diskdp.errors import NotPrivateWarning

BACKENDS = ["eager", "aot_eager", "inductor"]
Loss = Callable[[Any, tuple[Tensor, Tensor]], Tensor]


class Scaled(nn.Module):
    """Calls a function that may be compiled on a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(6)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def scale(x: Tensor, weight: Tensor) -> Tensor:
    return x.tanh() * weight


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Scaled(scale), nn.Linear(6, 3))


def whole(model: nn.Module, backend: Any) -> tuple[Any, Loss]:
    return torch.compile(model, backend=backend), classify


def part(model: Any, backend: Any) -> tuple[Any, Loss]:
    model[0] = torch.compile(model[0], backend=backend)
    return model, classify


def in_place(model: Any, backend: Any) -> tuple[Any, Loss]:
    model.compile(backend=backend)
    return model, classify


def function(model: Any, backend: Any) -> tuple[Any, Loss]:
    model[1].function = torch.compile(scale, backend=backend)
    return model, classify


def loss(model: Any, backend: Any) -> tuple[Any, Loss]:
    return model, torch.compile(classify, backend=backend)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrap", [whole, part, in_place, function, loss])
def test_the_gradients_are_those_of_the_model_as_written(
    wrap: Callable[[Any, Any], tuple[Any, Loss]], backend: str
) -> None:
    expected, norms = clipped_gradient(made(), batch(), classify, max_norm=0.1)
    model, loss_fn = wrap(made(), backend)
    found, found_norms = clipped_gradient(model, batch(), loss_fn, max_norm=0.1)
    assert torch.equal(found_norms, norms)
    assert {name.replace("_orig_mod.", "") for name in found} == set(expected)
    assert all(torch.equal(g, expected[name.replace("_orig_mod.", "")]) for name, g in found.items())


@pytest.mark.parametrize("wrap", [whole, loss])
def test_what_was_compiled_before_is_not_used_and_stays(wrap: Callable[[Any, Any], tuple[Any, Loss]]) -> None:
    torch._dynamo.reset()
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return graph.forward

    model, loss_fn = wrap(made(), backend)
    loss_fn(model, batch()).sum().backward()
    assert compilations == 1
    model.zero_grad(set_to_none=True)
    expected, _ = clipped_gradient(made(), batch(), classify)
    found, _ = clipped_gradient(model, batch(), loss_fn)
    assert all(torch.equal(g, expected[name.replace("_orig_mod.", "")]) for name, g in found.items())
    loss_fn(model, batch())
    assert compilations == 1


def test_a_compiled_model_trains_like_the_model_as_written() -> None:
    """Without noise, whose keys are the parameters' names: a compiled model has other names."""
    with pytest.warns(NotPrivateWarning):
        plan = Plan(dataset_size=20, batch_size=5, steps=3, noise_multiplier=0.0, delta=1e-3)
    weights = []
    for compiled in (False, True):
        model: Any = torch.compile(made(), backend="aot_eager") if compiled else made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(model, optimizer, plan, loss_fn=classify, filter=DiSK(0.7, 0.5), seed=3)
        torch.manual_seed(4)
        data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
        for logical in private.loader(data):
            private.step(logical)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    before = torch.cat([p.detach().flatten() for p in made().parameters()])
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], before)
