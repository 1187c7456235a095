"""Activations computed again in the backward pass: the same gradients, or a refusal that says what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from diskdp.errors import GradientError
from diskdp.gradients import clipped_gradient
from tests import oracle


class Checkpointed(nn.Module):
    """A segment whose weight is computed from parameters inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.body = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.stem(x_BTD), use_reentrant=self.reentrant))


def square(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean((1, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_weights_computed_inside_a_segment(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed(reentrant).double(), (torch.randn(5, 3, 4).double(),)
    ahead = {name: (p + 0.1 * torch.randn_like(p)).detach() for name, p in model.named_parameters()}
    points = [(0.6, None), (0.4, ahead)]
    exact = oracle.clipped(oracle.per_example(model, batch, square, points), "flat", 0.1)
    grads, _ = clipped_gradient(model, batch, square, points, 0.1)
    assert oracle.relative_error(grads, exact) < 1e-10


def test_a_segment_that_returns_a_weight() -> None:
    """With reentrant checkpointing its gradient comes back summed over the examples; without, it need not."""

    def loss(reentrant: bool) -> Any:
        def segment(model: Any, x_BD: Tensor) -> tuple[Tensor, Tensor]:
            return model[0](x_BD), model[0].bias.exp()

        def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
            y_BD, scale_D = checkpoint(segment, model, batch[0].requires_grad_(), use_reentrant=reentrant)
            return (y_BD.tanh() * scale_D).square().mean(1)

        return losses

    torch.manual_seed(1)
    model, batch = nn.Sequential(nn.Linear(4, 3)).double(), (torch.randn(5, 4).double(),)
    exact = oracle.clipped(oracle.per_example(model, batch, loss(False)), "flat", 0.1)
    grads, _ = clipped_gradient(model, batch, loss(False), max_norm=0.1)
    assert oracle.relative_error(grads, exact) < 1e-10
    with pytest.raises(GradientError, match="use_reentrant=False"):
        clipped_gradient(model, batch, loss(True), max_norm=0.1)


def test_a_gradient_inside_the_loss_is_refused() -> None:
    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        losses_B = model(batch[0]).square().mean(1)
        [penalty] = torch.autograd.grad(losses_B.sum(), model.weight, retain_graph=True)
        return losses_B * penalty.square().sum()

    with pytest.raises(GradientError, match="differentiates inside the loss"):
        clipped_gradient(nn.Linear(4, 3), (torch.randn(5, 4),), loss)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama", "t5"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_as_hugging_face_switches_it_on(name: str, reentrant: bool) -> None:
    pytest.importorskip("transformers")
    from tests import hugging_face as models

    _, batch, loss = models.CASES[name]
    torch.manual_seed(2)
    model = models.made(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if name == "t5" and reentrant:  # its segments hand the position bias on
        with pytest.raises(GradientError, match=r"relative_attention_bias.*use_reentrant=False"):
            clipped_gradient(model, batch(), loss)
    else:
        assert max(models.error_of(model, batch(), loss)) < 2e-5


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_on_a_frozen_base(reentrant: bool) -> None:
    """Segments of frozen layers need an input with a gradient: a tensor made trainable inside the loss."""
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from tests import hugging_face as models

    torch.manual_seed(3)
    model = models.made("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    models.shake(model)
    assert max(models.error_of(model, models.text(), models.next_token)) < 2e-5


def test_a_trainable_tensor_from_outside_stays_refused() -> None:
    outside = torch.ones(3)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return (model(batch[0]) * outside.requires_grad_()).square().mean(1)

    with pytest.raises(GradientError, match="a trainable tensor of shape"):
        clipped_gradient(nn.Linear(4, 3), (torch.randn(5, 4),), loss)
