"""Hugging Face models from configs of test size, random weights; import only where transformers is installed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from diskdp.gradients import RandomState, clipped_gradient
from tests import oracle

Batch = dict[str, Tensor]
B, T, T_OUT, V, K = 5, 7, 4, 23, 3
TEXT = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
ENCODER = {
    **TEXT,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


def padded(lengths: list[int], longest: int) -> Tensor:
    return (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()


def text(lengths: tuple[int, ...] = (7, 3, 5, 2, 6), longest: int = T) -> Batch:
    """Padded sequences, a class and a loss weight for each."""
    count = len(lengths)
    return {
        "input_ids": torch.randint(4, V, (count, longest)),
        "attention_mask": padded(list(lengths), longest),
        "labels": torch.randint(0, K, (count,)),
        "weight": torch.rand(count) + 0.5,
    }


def pairs(longest: int = T_OUT) -> Batch:
    """Sequences to be turned into others."""
    return {
        **text(),
        "decoder_input_ids": torch.randint(2, V, (B, longest)),
        "decoder_attention_mask": padded([longest, 2, 3, 1, longest], longest),
        "targets": torch.randint(2, V, (B, longest)),
    }


def images() -> Batch:
    return {
        "pixel_values": torch.randn(B, 3, 8, 8),
        "labels": torch.randint(0, K, (B,)),
        "weight": torch.rand(B) + 0.5,
    }


def inputs(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key not in ("labels", "weight", "targets")}


def classified(model: Any, batch: Batch) -> Tensor:
    """One weighted cross-entropy an example."""
    return F.cross_entropy(model(**inputs(batch)).logits, batch["labels"], reduction="none") * batch["weight"]


def _token_mean(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    losses_BT = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return (losses_BT * mask).sum(1) / mask.sum(1)


def next_token(model: Any, batch: Batch) -> Tensor:
    """The weighted mean over an example's own tokens."""
    logits = model(**inputs(batch)).logits[:, :-1]
    return _token_mean(logits, batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]) * batch["weight"]


def translated(model: Any, batch: Batch) -> Tensor:
    logits = model(**inputs(batch)).logits
    return _token_mean(logits, batch["targets"], batch["decoder_attention_mask"]) * batch["weight"]


def bert(attention: str) -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**ENCODER, num_labels=K, attn_implementation=attention))


def roberta(attention: str) -> nn.Module:
    config = hf.RobertaConfig(**ENCODER, num_labels=K, type_vocab_size=1, attn_implementation=attention)
    return hf.RobertaForSequenceClassification(config)


def distilbert(attention: str) -> nn.Module:
    config = hf.DistilBertConfig(
        **TEXT,
        dim=16,
        n_layers=2,
        n_heads=4,
        hidden_dim=24,
        max_position_embeddings=32,
        num_labels=K,
        attn_implementation=attention,
    )
    return hf.DistilBertForSequenceClassification(config)


def vit(attention: str) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=K,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation=attention,
    )
    return hf.ViTForImageClassification(config)


def gpt2(attention: str) -> nn.Module:
    config = hf.GPT2Config(**TEXT, n_positions=32, n_embd=16, n_layer=2, n_head=4, attn_implementation=attention)
    return hf.GPT2LMHeadModel(config)


def gpt2_classifier(attention: str) -> nn.Module:
    config = hf.GPT2Config(
        **TEXT, n_positions=32, n_embd=16, n_layer=1, n_head=4, num_labels=K, attn_implementation=attention
    )
    return hf.GPT2ForSequenceClassification(config)


def llama(tied: bool) -> Callable[[str], nn.Module]:
    return lambda attention: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **ENCODER,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            attention_dropout=0.1,
            attn_implementation=attention,
        )
    )


def t5(tied: bool) -> Callable[[str], nn.Module]:
    return lambda attention: hf.T5ForConditionalGeneration(
        hf.T5Config(
            **TEXT,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            tie_word_embeddings=tied,
            feed_forward_proj="relu" if tied else "gated-gelu",
            attn_implementation=attention,
        )
    )


Case = tuple[Callable[[str], nn.Module], Callable[[], Batch], Callable[[Any, Batch], Tensor]]
CASES: dict[str, Case] = {
    "bert": (bert, text, classified),
    "roberta": (roberta, text, classified),
    "distilbert": (distilbert, text, classified),
    "vit": (vit, images, classified),
    "gpt2": (gpt2, text, next_token),
    "gpt2-classifier": (gpt2_classifier, text, classified),
    "llama": (llama(False), text, next_token),
    "llama-tied": (llama(True), text, next_token),
    "t5": (t5(True), pairs, translated),
    "t5-as-long-as-the-batch": (t5(True), lambda: pairs(B), translated),
    "t5-untied": (t5(False), pairs, translated),
}


def made(name: str, attention: str = "sdpa") -> nn.Module:
    """In training mode, away from its initial weights, so that no gradient is zero by initialisation."""
    model = CASES[name][0](attention).train()
    shake(model)
    return model


@torch.no_grad()
def shake(model: nn.Module) -> None:
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p)


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def error_of(
    model: nn.Module,
    batch: Batch,
    loss_fn: Callable[[Any, Batch], Tensor],
    weights: tuple[float, float] = (0.6, 0.4),
    reference: Callable[[Any, Batch], Tensor] | None = None,
) -> tuple[float, float]:
    """Relative errors of the clipped sum and of the worst norm, against the loop in float64 with the same masks."""
    moved = {n: (p + 0.05 * torch.randn_like(p)).detach() for n, p in model.named_parameters() if p.requires_grad}
    points = [(a, v) for a, v in zip(weights, (None, moved)) if a != 0]
    double = copy.deepcopy(model).double()
    exact_points = [(a, None if v is None else cast(v, torch.float64)) for a, v in points]
    state = RandomState.capture()
    doubled = cast(batch, torch.float64)
    exact = oracle.per_example_in_batch(double, doubled, reference or loss_fn, exact_points, state)
    norms = torch.tensor([oracle.norm(u) for u in exact], dtype=torch.float64)
    max_norm = float(norms.median())
    state.restore()
    grads, found = clipped_gradient(model, batch, loss_fn, points, max_norm)
    error = oracle.relative_error(grads, oracle.clipped(exact, "flat", max_norm))
    return error, float(((found - norms).abs() / norms).max())
