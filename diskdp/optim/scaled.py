"""Scale, then privatise: gradients are divided by their usual size before they are clipped and noised.

The model is reparametrised, θ = D φ with a public diagonal D, and φ is what trains: its per-example gradients are
D ∇_θ, so that clipping and noise, which know nothing of this, act on scaled gradients with the sensitivity that the
plan states. D is computed from what earlier steps released, so every step is an ordinary step of the plan,
chosen by earlier outputs. Assumes `NoFilter`: a filter would average gradients of different φ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from diskdp.errors import OptimizerError
from diskdp.filters import Filter, NoFilter
from diskdp.plan import Plan


class Scale(nn.Module):
    """The weight as a public diagonal times what trains; the diagonal is a buffer, kept in checkpoints."""

    scale: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones_like(like))

    def forward(self, inner: Tensor) -> Tensor:
        return inner * self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.scale


def scale_parameters(model: nn.Module) -> None:
    """Make every trainable parameter θ of ``model`` the product D φ, with D = 1 at first, of which φ trains.

    To be called before the optimizer is made. `unscale_parameters` undoes it.

    >>> model = nn.Linear(2, 1)
    >>> scale_parameters(model)
    >>> sorted(name for name, _ in model.named_parameters())
    ['parametrizations.bias.original', 'parametrizations.weight.original']
    """
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    targets = []
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise OptimizerError(f"{path or 'the model'}: parametrised already; scale the weights of a plain model")
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            where = f"{path}.{name}" if path else name
            if isinstance(module, nn.RNNBase):
                raise OptimizerError(
                    f"{where}: recurrent layers keep their weights in a list of their own, out of reach"
                )
            if uses[id(parameter)] > 1:
                raise OptimizerError(f"{where}: shared by two modules, which would be scaled apart; untie it")
            targets.append((module, name))
    for module, name in targets:
        parametrize.register_parametrization(module, name, Scale(getattr(module, name).detach()))


def unscale_parameters(model: nn.Module) -> None:
    """Put the weights themselves in the place of the products, for use or export.

    >>> model = nn.Linear(2, 1)
    >>> scale_parameters(model); unscale_parameters(model)
    >>> sorted(name for name, _ in model.named_parameters())
    ['bias', 'weight']
    """
    for module, name, _, _ in list(_scaled(model)):
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)


class ScaleThenPrivatise(Optimizer):
    """Adam on the weights θ of a model whose gradients were scaled before clipping (Ganesh et al., 2507.01129).

    ``model`` has been through `scale_parameters`; ``p.grad`` is the noised mean of clipped gradients of φ = θ / D. Then

        g = p.grad / D                        the gradient of θ; noise of standard deviation σS/(B D) is in it
        m, v, θ ← Adam's step along g         m̂, v̂ bias-corrected, θ ← θ - lr m̂ / (√v̂ + eps), decoupled weight decay
        D ∝ 1 / (√v̂ + damping · √mean(v̂))     with Σ D² the number of coordinates, so that C keeps its unit
        φ = θ / D

    ``damping`` bounds the ratio of scales by 1 + max √v̂ / (damping √mean v̂). Since v̂ holds the noise that D gave each
    coordinate, nothing else holds back a scale that drifts: do not make it small.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> scale_parameters(model)
    >>> optimizer = ScaleThenPrivatise(model, lr=0.1, damping=0.1)
    >>> before = model.weight.detach().clone()
    >>> model.parametrizations.weight.original.grad = torch.tensor([[10.0, 0.1]])
    >>> optimizer.step()
    >>> [round(moved, 4) for moved in (before - model.weight)[0].tolist()]
    [0.1, 0.1]
    >>> [round(scale, 3) for scale in model.parametrizations.weight[0].scale[0].tolist()]
    [0.106, 1.41]
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        damping: float = 0.1,
    ) -> None:
        self._scales = {original: scale for _, _, original, scale in _scaled(model)}
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable or any(p not in self._scales for p in trainable):
            raise OptimizerError("the model's weights are not scaled: call scale_parameters(model) first")
        if not (0 < damping < math.inf and 0 <= betas[0] < 1 and 0 <= betas[1] < 1 and eps > 0 and lr >= 0):
            raise OptimizerError(
                f"lr={lr}, betas={betas}, eps={eps}, damping={damping}: betas must lie in [0, 1), eps and damping be "
                "positive, lr not negative"
            )
        super().__init__(trainable, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.damping = damping

    def check_fits(self, plan: Plan, filter: Filter) -> None:
        """Raise OptimizerError if the gradients are filtered: a filter adds up gradients of different φ."""
        if filter != NoFilter():
            raise OptimizerError(f"{filter!r} would average gradients with different scales; use filter=NoFilter()")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step along ``p.grad``, and new scales for the next."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sizes: dict[Tensor, Tensor] = {}  # √v̂
        for group in self.param_groups:
            for inner in group["params"]:
                if inner.grad is not None:
                    sizes[inner] = self._move(group, inner)
        if sizes:
            self._rescale(sizes)
        return loss

    def _move(self, group: dict[str, Any], inner: Tensor) -> Tensor:
        """Adam's step on θ = D φ, with φ changed accordingly; √v̂."""
        assert inner.grad is not None
        scale, state, (beta1, beta2), lr = self._scales[inner], self.state[inner], group["betas"], float(group["lr"])
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(inner), exp_avg_sq=torch.zeros_like(inner))
        state["step"] += 1
        gradient = inner.grad / scale
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_()
        update = state["exp_avg"] / (1 - beta1 ** state["step"]) / (size + group["eps"])
        inner.mul_(1 - lr * group["weight_decay"]).sub_(lr * update / scale)
        return size

    def _rescale(self, sizes: dict[Tensor, Tensor]) -> None:
        coordinates = sum(size.numel() for size in sizes.values())
        usual = math.sqrt(sum(size.double().square().sum().item() for size in sizes.values()) / coordinates)
        if usual == 0:
            return  # nothing has been released but zeros
        scales = {inner: 1 / (size + self.damping * usual) for inner, size in sizes.items()}
        total = sum(scale.double().square().sum().item() for scale in scales.values())
        for inner, scale in scales.items():
            scale.mul_(math.sqrt(coordinates / total))
            old = self._scales[inner]
            inner.mul_(old / scale)
            old.copy_(scale)


def _scaled(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, Tensor]]:
    """Module, name, φ and D of every scaled parameter."""
    for module in model.modules():
        if not parametrize.is_parametrized(module) or not isinstance(module.parametrizations, nn.ModuleDict):
            continue
        for name, held in module.parametrizations.items():
            if isinstance(held, parametrize.ParametrizationList) and isinstance(held[0], Scale):
                assert isinstance(held.original, Tensor)
                yield module, name, held.original, held[0].scale
