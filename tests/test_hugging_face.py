"""Hugging Face models and adapters as they come, in training mode, against a float64 loop with the same masks."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diskdp import DiSK, Plan, clipped_gradient, privatize
from diskdp.errors import GradientError, UnusedParameterWarning
from diskdp.gradients import Engine, engine
from diskdp.gradients.trace import Trace
from tests import oracle

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests import hugging_face as models  # noqa: E402


@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_matches_the_loop(name: str, attention: str) -> None:
    _, batch, loss = models.CASES[name]
    torch.manual_seed(0)
    model = models.made(name, attention)
    for weights in ((1.0, 0.0), (0.6, 0.4)):
        assert max(models.error_of(model, batch(), loss, weights)) < 2e-5
    assert max(models.error_of(model.double(), models.cast(batch(), torch.float64), loss)) < 1e-6


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama", "t5"])
def test_padding_is_no_part_of_an_example(name: str) -> None:
    """In eval mode an example's gradient in a padded batch is the one it has alone, without its padding."""
    _, make_batch, loss = models.CASES[name]
    torch.manual_seed(1)
    model, batch = models.made(name).eval().double(), models.cast(make_batch(), torch.float64)
    grads, norms = clipped_gradient(model, batch, loss, max_norm=1e9)
    total = {n: torch.zeros_like(g) for n, g in grads.items()}
    for i, norm in enumerate(norms):
        alone = {key: value[i : i + 1] for key, value in batch.items()}
        length = int(alone["attention_mask"].sum())
        alone.update({key: alone[key][:, :length] for key in ("input_ids", "attention_mask")})
        own, [own_norm] = clipped_gradient(model, alone, loss, max_norm=1e9)
        assert own_norm == pytest.approx(float(norm), rel=1e-6)
        total = {n: total[n] + own[n] for n in total}
    assert oracle.relative_error(grads, total) < 1e-6


def test_a_loss_may_read_any_form_of_output() -> None:
    torch.manual_seed(2)
    model, batch = models.made("bert", "eager").eval(), models.text()  # which alone has attention weights to give

    def loss(read: Callable[[Any, models.Batch], Tensor]) -> Callable[[Any, models.Batch], Tensor]:
        return lambda m, b: F.cross_entropy(read(m, models.inputs(b)), b["labels"], reduction="none")

    readers = (
        lambda m, b: m(**b).logits,
        lambda m, b: m(**b)["logits"],
        lambda m, b: m(**b, return_dict=False)[0],
        lambda m, b: dict(m(**b, output_hidden_states=True, output_attentions=True))["logits"],
    )
    first, *others = (clipped_gradient(model, batch, loss(read))[0] for read in readers)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def own_loss(model: Any, batch: models.Batch) -> Tensor:
    return model(**models.inputs(batch), labels=batch["labels"]).loss


def batch_tokens(model: Any, batch: models.Batch) -> Tensor:
    """Divided by the tokens of the whole batch, as the models' own losses are."""
    return models.next_token(model, batch) * batch["attention_mask"].sum(1) / batch["attention_mask"].sum()


@pytest.mark.parametrize("lengths", [(7, 3, 5, 2, 6), (7, 7, 7, 7, 7)])
def test_a_mean_over_the_tokens_of_the_batch_is_refused(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(8)
    with pytest.raises(GradientError, match="loss of one example changes"):
        clipped_gradient(models.made("gpt2"), models.text(lengths), batch_tokens)
    with pytest.raises(GradientError, match="one floating-point loss an example"):
        clipped_gradient(models.made("bert"), models.text(), own_loss)


def adapted(name: str, **settings: Any) -> nn.Module:
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, **settings}
    return peft.get_peft_model(models.made(name), peft.LoraConfig(**settings)).train()


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("roberta", {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    "linear-every": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}),
    "embedding": ("bert", {"target_modules": ["word_embeddings", "query"]}),
    "dora": ("roberta", {"target_modules": ["query"], "use_dora": True}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_match_the_loop(name: str) -> None:
    base, settings = ADAPTERS[name]
    _, batch, loss = models.CASES[base]
    torch.manual_seed(3)
    model = adapted(base, **settings)
    models.shake(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in n or "modules_to_save" in n for n in trained)
    for weights in ((1.0, 0.0), (0.6, 0.4)):
        assert max(models.error_of(model, batch(), loss, weights)) < 2e-5
    assert clipped_gradient(model, batch(), loss)[0].keys() == trained


class Sentences(torch.utils.data.Dataset[models.Batch]):
    def __init__(self, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(4, models.V, (count, models.T), generator=generator)
        self.labels = torch.randint(0, models.K, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> models.Batch:
        mask = torch.ones(models.T, dtype=torch.long)
        return {
            "input_ids": self.ids[index],
            "attention_mask": mask,
            "labels": self.labels[index],
            "weight": torch.ones(()),
        }


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, models.Batch], Tensor] = models.classified,
    halfway: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    plan = Plan(dataset_size=40, batch_size=8, steps=3, noise_multiplier=1.0, delta=1e-3)
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    private = privatize(model, optimizer, plan, loss_fn=loss, filter=DiSK(0.7, 0.5))
    for step, batch in enumerate(private.loader(Sentences())):
        if step == 1:
            halfway(model)
        private.step(batch)


LORA = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}


@pytest.mark.parametrize("wrappings", [1, 2])
def test_only_adapters_move(wrappings: int) -> None:
    torch.manual_seed(4)
    model = adapted("roberta", **LORA)
    if wrappings == 2:  # the second set of adapters takes the first one's place
        with pytest.warns(UserWarning, match=r"PEFT for a second time|multiple adapters"):
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, **LORA))
    before = copy.deepcopy(dict(model.named_parameters()))
    train(model)
    moved = {n for n, p in model.named_parameters() if not torch.equal(before[n], p)}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in n or "modules_to_save" in n for n in moved)


def optimizer_before_adapters() -> None:
    model = models.made("roberta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(peft.get_peft_model(model, peft.LoraConfig(**LORA)), optimizer)


def moved_after_optimizer() -> None:
    """As a move to another kind of device does: every parameter is a new one, and the optimizer has the old."""
    model = models.made("roberta")
    optimizer = torch.optim.AdamW(model.parameters())
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    train(model, optimizer)


def second_adapter_left_trainable() -> None:
    model = adapted("roberta", **LORA)
    model.add_adapter("other", peft.LoraConfig(**LORA))
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or ".other." in name)
    train(model)


def merged() -> None:
    model = adapted("roberta", **LORA)
    model.merge_adapter()
    train(model)


def disabled() -> None:
    def loss(model: Any, batch: models.Batch) -> Tensor:
        with model.disable_adapter():
            return models.classified(model, batch)

    train(adapted("roberta", target_modules=["query"]), loss=loss)


def adapters_where_nothing_passes() -> None:
    model = adapted("bert", target_modules=["pooler.dense"])
    train(model, loss=lambda m, b: m.base_model.model.bert(b["input_ids"]).last_hidden_state.square().mean((1, 2)))


def the_loss_calls_another_model() -> None:
    other = models.made("roberta")
    train(models.made("roberta"), loss=lambda model, batch: models.classified(other, batch))


FAILURES: dict[str, tuple[Callable[[], None], str]] = {
    "optimizer before adapters": (optimizer_before_adapters, r"lora_A.*not in the optimizer; make the optimizer after"),
    "moved after the optimizer": (moved_after_optimizer, r"not in the optimizer; make the optimizer after"),
    "a second adapter left trainable": (second_adapter_left_trainable, r"other.*trainable, but the loss does not"),
    "merged adapters": (merged, r"lora_A.*trainable, but the loss does not depend"),
    "disabled adapters": (disabled, r"do not depend on any trainable parameter"),
    "adapters where nothing passes": (adapters_where_nothing_passes, r"do not depend on any trainable parameter"),
    "another model in the loss": (the_loss_calls_another_model, r"a trainable tensor of shape"),
    "adapters added halfway": (
        lambda: train(
            models.made("roberta"), halfway=lambda model: peft.get_peft_model(model, peft.LoraConfig(**LORA))
        ),
        r"not those that privatize\(\) was given",
    ),
    "cast halfway": (
        lambda: train(models.made("roberta"), halfway=lambda model: model.double()),
        r"cast or moved after privatize",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_would_not_train_is_refused(name: str) -> None:
    run, message = FAILURES[name]
    torch.manual_seed(5)
    with pytest.raises(GradientError, match=f"(?s){message}"):
        run()


def test_adapters_merged_halfway_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "IDLE_CALLS", 2)
    torch.manual_seed(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusedParameterWarning)
        train(adapted("roberta", **LORA))
    assert not [w for w in caught if issubclass(w.category, UnusedParameterWarning)]
    with pytest.warns(UnusedParameterWarning, match=r"lora_A.*noise alone moves it"):
        train(adapted("roberta", **LORA), halfway=lambda model: model.merge_adapter())


def test_lengths_that_change_from_batch_to_batch() -> None:
    """Each new length is examined on a few examples; any length may coincide with the number of examples."""
    torch.manual_seed(6)
    model = models.made("gpt2").double()
    examples = 0

    def loss(m: Any, batch: models.Batch) -> Tensor:
        nonlocal examples
        examples += len(batch["weight"])
        return models.next_token(m, batch)

    found = Engine(model, loss)
    costs = {}
    for count, longest in ((12, 7), (12, 9), (12, 12), (12, 7), (9, 9), (10, 10), (9, 9), (11, 5), (6, 4)):
        batch = models.cast(models.text(tuple(range(2, 2 + count)), longest), torch.float64)
        batch["attention_mask"] = models.padded([min(longest, 2 + i) for i in range(count)], longest)
        examples = 0
        gradients = found.gradients(batch, [(1.0, None)])
        costs.setdefault((count, longest), examples / count)
        assert all(len(term.per_example()) == count for terms in gradients.terms.values() for term in terms)
    assert costs[12, 9] < 0.6 * costs[12, 7]
    assert costs[12, 7] < 40  # evaluations of the loss, most of them under other random states


@pytest.mark.parametrize("name", models.CASES)
def test_one_backward_pass_a_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ownership is known from the examination, the row of the last token that a classifier picks included."""
    _, batch, loss = models.CASES[name]
    torch.manual_seed(7)
    found, data = Engine(models.made(name), loss), batch()
    found.gradients(data, [(1.0, None)])
    passes: list[str] = []
    differentiate = Trace.differentiate

    def counted(trace: Trace, *arguments: Any, **options: Any) -> None:
        passes.append(name)
        differentiate(trace, *arguments, **options)

    monkeypatch.setattr(Trace, "differentiate", counted)
    found.gradients(data, [(1.0, None)])
    assert len(passes) == 1


def test_the_example_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "models.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), names)
    assert 2.9 < float(capsys.readouterr().out.removeprefix("ε spent: ")) <= 3.0
    state = names["private"].optimizer.state
    assert {id(p) for p in state} == {id(p) for p in names["model"].parameters() if p.requires_grad}
    assert len(state) < len(list(names["model"].parameters())) / 2
