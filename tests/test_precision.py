"""Autocast, and parameters in few bits: factors may be coarse, sums and noise are float32 or better."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diskdp import NoFilter, Plan, clipped_gradient, privatize
from diskdp.errors import GradientError, LowPrecisionWarning, NotPrivateWarning
from diskdp.gradients import Engine, RandomState
from tests import oracle
from tests.models import CASES, D, K, classify


def test_the_tolerance_follows_what_was_computed_on_the_way() -> None:
    """A float64 model with a float32 section agrees with autograd to float32 only: no false alarm."""

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        x = model[1](model[0](batch[0]).float().softmax(-1).double())
        return x.square().mean(1)

    for seed in range(40):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).double()
        clipped_gradient(model, (torch.randn(32, 64).double(),), loss)


def test_a_private_step_in_bfloat16_sums_in_float32() -> None:
    class Recorded(torch.optim.SGD):
        seen: dict[int, Tensor]

        def step(self, closure: Any = None) -> Any:
            self.seen = {id(p): p.grad.clone() for group in self.param_groups for p in group["params"]}
            return super().step(closure)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 10), nn.Tanh(), nn.Linear(10, K)).bfloat16()
    data = torch.utils.data.TensorDataset(torch.randn(64, D).bfloat16(), torch.randint(0, K, (64,)))
    expected, _ = clipped_gradient(model, data[:], classify)
    with pytest.warns(NotPrivateWarning):
        plan = Plan(dataset_size=64, batch_size=64, steps=1, noise_multiplier=0.0, delta=1e-3)
    optimizer = Recorded(model.parameters(), lr=0.1)
    with pytest.warns(LowPrecisionWarning, match=r"0.weight.*bfloat16, where updates below about 0.004"):
        private = privatize(model, optimizer, plan, loss_fn=classify, filter=NoFilter(), microbatch_size=16)
    for batch in private.loader(data):
        private.step(batch)
    named = dict(model.named_parameters())
    for name, total in expected.items():
        assert total.dtype == torch.float32
        found = optimizer.seen[id(named[name])].float() * 64
        assert torch.allclose(found, total, rtol=2**-8, atol=1e-5)  # rounded once, at the end


def test_full_precision_is_not_warned_of() -> None:
    model = nn.Linear(D, K)
    plan = Plan(dataset_size=64, batch_size=8, steps=1, noise_multiplier=1.0, delta=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LowPrecisionWarning)
        privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify)


def test_float16_that_underflows_is_refused_as_such() -> None:
    torch.manual_seed(0)
    case = CASES["gpt-tied"]
    with pytest.raises(GradientError, match=r"float16 underflow.*bfloat16"):
        clipped_gradient(case.make().half(), case.batch(), lambda m, b: case.loss(m, b) * 1e-5)


hugging_face = ["bert", "roberta", "distilbert", "vit", "gpt2", "llama", "llama-tied", "t5"]


@pytest.mark.parametrize("name", hugging_face)
@pytest.mark.parametrize("how", ["autocast", "parameters"])
def test_bfloat16_agrees_with_the_loop_in_bfloat16(name: str, how: str) -> None:
    """As close to each example's own backward pass in bfloat16 as that rounds; far closer than bfloat16 to float32."""
    pytest.importorskip("transformers")
    from tests import hugging_face as models

    _, make_batch, loss = models.CASES[name]
    torch.manual_seed(1)
    model, batch = models.made(name), make_batch()
    if how == "parameters":
        model, batch = model.bfloat16(), models.cast(batch, torch.bfloat16)

    def coarse(m: Any, b: models.Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return loss(m, b).float()

    state = RandomState.capture()
    exact = oracle.per_example_in_batch(model, batch, coarse, [(1.0, None)], state)
    max_norm = sorted(oracle.norm(u) for u in exact)[2]
    state.restore()
    grads, norms = clipped_gradient(model, batch, coarse, max_norm=max_norm)
    assert oracle.relative_error(grads, oracle.clipped(exact, "flat", max_norm)) < 0.006
    assert all(g.dtype == torch.float32 for g in grads.values())
    assert norms.dtype in (torch.float32, torch.float64)


def test_adapters_in_float32_on_a_frozen_base_in_bfloat16() -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from tests import hugging_face as models

    torch.manual_seed(2)
    base = models.made("llama").bfloat16()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    models.shake(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert next(p for name, p in model.named_parameters() if re.search("embed", name)).dtype == torch.bfloat16
    batch = models.text()
    grads, _ = clipped_gradient(model, batch, models.next_token, max_norm=0.5)
    double = copy.deepcopy(model).double()
    exact = oracle.per_example_in_batch(double, batch, models.next_token, [(1.0, None)], RandomState.capture())
    assert oracle.relative_error(grads, oracle.clipped(exact, "flat", 0.5)) < 0.05


def test_no_false_alarm_in_few_bits() -> None:
    """One structure in each of twenty models; a longer sweep (11 models × 25 seeds, each dtype) had none either."""
    pytest.importorskip("transformers")
    from tests import hugging_face as models

    for seed in range(5):
        for name in ("bert", "gpt2", "llama-tied", "t5"):
            torch.manual_seed(seed)
            _, batch, loss = models.CASES[name]
            Engine(models.made(name).bfloat16(), loss).gradients(models.cast(batch(), torch.bfloat16), [(1.0, None)])
