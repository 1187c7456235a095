"""The paper's listing, with gradients privatised elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from diskdp import wrap_optimizer
from diskdp.errors import CheckpointError, FilterError
from tests import oracle


class Problem:
    """A quadratic with a closure that counts its calls and where they were made."""

    def __init__(self, noise: float = 0.0) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4).double())
        self.matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])).double()
        self.noise = noise
        self.points: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def closure(self) -> Tensor:
        self.points.append(self.weight.detach().clone())
        loss = 0.5 * self.weight @ self.matrix @ self.weight
        loss.backward()
        assert self.weight.grad is not None
        self.weight.grad += self.noise * torch.randn(4).double()
        self.gradients.append(self.weight.grad.clone())
        return loss.detach()


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, -1.0), (0.5, 1.0), (0.4, None), (1.0, 0.5)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_follows_the_recursion(kappa: float, gamma: float | None, optimizer: str) -> None:
    def base(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2) if optimizer == "sgd" else torch.optim.Adam(parameters, lr=0.05)

    problem = Problem()
    wrapped = wrap_optimizer(base([problem.weight]), kappa=kappa, gamma=gamma)
    scheduler = LambdaLR(wrapped, lambda step: 1 / (1 + step))
    exact = nn.Parameter(Problem().weight.detach().clone())
    plain = base([exact])
    plain_scheduler = LambdaLR(plain, lambda step: 1 / (1 + step))
    c = 0.0 if gamma is None else (1 - kappa) / (kappa * gamma)
    d, average = torch.zeros(4).double(), None
    for _ in range(15):
        wrapped.prestep(problem.closure)
        wrapped.step()
        scheduler.step()
        x = exact.detach().clone()
        u = (1 - c) * problem.matrix @ x + c * problem.matrix @ (x + (gamma or 0.0) * d)
        average = u if average is None else (1 - kappa) * average + kappa * u
        exact.grad = average.clone()
        plain.step()
        plain_scheduler.step()
        d = exact.detach() - x
    assert oracle.relative_error({"w": problem.weight.detach()}, {"w": exact.detach()}) < 1e-12
    calls = 1 if gamma is None or kappa == 1 or abs(c - 1) < 1e-12 else 2
    assert len(problem.points) == 1 + 14 * calls


def test_the_two_points_get_independent_noise() -> None:
    """Rewinding the random state between them would release their difference without noise."""
    problem = Problem(noise=1.0)
    optimizer = wrap_optimizer(torch.optim.SGD([problem.weight], lr=0.1))
    for _ in range(2):
        optimizer.prestep(problem.closure)
        optimizer.step()
    noise = [g - problem.matrix @ x for g, x in zip(problem.gradients, problem.points)]
    assert len(noise) == 3
    assert (noise[1] - noise[2]).abs().min() > 1e-6


def test_weights_are_restored_bit_for_bit() -> None:
    problem = Problem()
    optimizer = wrap_optimizer(torch.optim.SGD([problem.weight], lr=0.3))
    for _ in range(3):
        optimizer.prestep(problem.closure)
        before = problem.weight.detach().clone()
        assert torch.equal(before, problem.points[-1])
        optimizer.step()


def test_state_goes_on() -> None:
    runs = []
    for interrupted in (False, True):
        problem = Problem()
        optimizer = wrap_optimizer(torch.optim.SGD([problem.weight], lr=0.1, momentum=0.9))
        for step in range(8):
            if interrupted and step == 4:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = wrap_optimizer(torch.optim.SGD([problem.weight], lr=0.7, momentum=0.9))
                optimizer.load_state_dict(state)
            optimizer.prestep(problem.closure)
            optimizer.step()
        runs.append(problem.weight.detach())
    assert torch.equal(*runs)


def test_steps_need_fresh_gradients() -> None:
    problem = Problem()
    optimizer = wrap_optimizer(torch.optim.SGD([problem.weight], lr=0.1))
    with pytest.raises(FilterError, match="prestep"):
        optimizer.step()
    optimizer.prestep(problem.closure)
    optimizer.step()
    with pytest.raises(FilterError, match="prestep"):
        optimizer.step()
    with pytest.raises(CheckpointError, match="base, filter and lookahead"):
        optimizer.load_state_dict({"state": {}})
