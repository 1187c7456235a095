"""The models that are measured, each with its logical batch. Random weights, random data, no dropout.

Assumes nothing but torch; the Hugging Face shapes need `transformers`, the LoRA case `peft`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diskdp.errors import DiskDPError
from diskdp.zoo.cnn5 import cnn5
from diskdp.zoo.mlp import mlp
from diskdp.zoo.wrn import wrn

Batch = tuple[Tensor, ...]  # the model's inputs, then the targets

_LOGICAL = 16  # microbatches in a logical batch of the large models
_TOKENS = 128
_LORA_TARGETS = ["query", "value"]


class Unavailable(DiskDPError):
    """A case or a method that cannot be measured here, with the reason; the others go on."""


def label_loss(logits_BC: Tensor, targets_B: Tensor) -> Tensor:
    """Cross entropy of each example, [B]."""
    return F.cross_entropy(logits_BC, targets_B, reduction="none")


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy of each sequence, [B]: the mean over its positions."""
    return F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none").mean(1)


@dataclass(frozen=True)
class Case:
    """A model and one logical batch, of ``microbatches`` equal parts; ``model(*inputs)`` returns logits."""

    model: nn.Module
    examples: Batch
    microbatches: int = 1
    checked_examples: int = 4  # whose clipped sum is compared with a loop in float64
    loss: Callable[[Tensor, Tensor], Tensor] = label_loss  # logits, targets -> [B]

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss an example: the loss function that diskdp is given."""
        *inputs, targets = batch
        return self.loss(model(*inputs), targets)

    @property
    def microbatch_size(self) -> int:
        return len(self.examples[-1]) // self.microbatches

    def microbatch(self, number: int) -> Batch:
        """One of the logical batch's microbatches, as views."""
        size = self.microbatch_size
        return tuple(t[number * size : (number + 1) * size] for t in self.examples)


@dataclass(frozen=True)
class CaseSpec:
    """How a case is made, and what is aimed at: ratios to a non-private step."""

    build: Callable[[], Case]
    title: str
    goal_one_point: float
    goal_two_points: float
    large: bool = False  # measured over a logical batch of several microbatches


class Block(nn.Module):
    """Pre-norm attention and feed-forward, of modules that every library compared here knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed_BTD = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(mixed_BTD)
        fed_BTD: Tensor = self.down(F.gelu(self.up(self.norm2(x_BTD))))
        return x_BTD + fed_BTD


class Encoder(nn.Module):
    """An embedding of the input, learned positions, blocks, and a classifier of the mean over positions."""

    def __init__(self, embed: nn.Module, length: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed, self.positions = embed, nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x_BTD: Tensor = self.embed(x)
        places_BT = torch.arange(x_BTD.shape[1]).repeat(len(x_BTD), 1)  # Opacus wants a row an example
        x_BTD = self.blocks(x_BTD + self.positions(places_BT))
        logits_BC: Tensor = self.head(self.norm(x_BTD).mean(1))
        return logits_BC


class Patches(nn.Module):
    """Square patches of an image, embedded: [B, C, H, W] to [B, T, D]."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        embedded_BDHW: Tensor = self.convolution(x)
        return embedded_BDHW.flatten(2).transpose(1, 2)


class Logits(nn.Module):
    """A Hugging Face model whose inputs are given by position and that returns logits alone."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**dict(zip(self.inputs, inputs))).logits
        return logits


def _mlp() -> Case:
    examples = torch.randn(128, 784), torch.randint(10, (128,))
    return Case(mlp((784,), 10, widths=(1000, 1000), activation="relu"), examples)


def _cnn5() -> Case:
    return Case(cnn5((3, 32, 32), 10), (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))))


def _wrn() -> Case:
    return Case(wrn((3, 32, 32), 10), (torch.randn(32, 3, 32, 32), torch.randint(10, (32,))))


def _transformer() -> Case:
    model = Encoder(nn.Embedding(1000, 256), length=64, width=256, depth=6, heads=8, classes=10)
    return Case(model, (torch.randint(1000, (32, 64)), torch.randint(10, (32,))))


def _vit() -> Case:
    model = Encoder(Patches(3, 16, 384), length=16, width=384, depth=12, heads=6, classes=1000)
    count = 8 * _LOGICAL
    return Case(model, (torch.randn(count, 3, 64, 64), torch.randint(1000, (count,))), _LOGICAL)


def _roberta_model() -> Any:
    transformers = optional_module("transformers")
    config = transformers.RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.RobertaForSequenceClassification(config).train()


def _roberta_case(model: nn.Module) -> Case:
    count = 4 * _LOGICAL
    tokens = torch.randint(3, 50265, (count, _TOKENS))
    positions = torch.arange(2, 2 + _TOKENS).repeat(count, 1)  # given, with the types, as Opacus needs them an example
    examples = tokens, positions, torch.zeros_like(tokens), torch.randint(2, (count,))
    wrapped = Logits(model, ("input_ids", "position_ids", "token_type_ids"))
    return Case(wrapped, examples, _LOGICAL, checked_examples=2)


def _roberta() -> Case:
    return _roberta_case(_roberta_model())


def _lora() -> Case:
    peft = optional_module("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, lora_dropout=0.0, target_modules=_LORA_TARGETS)
    model = peft.get_peft_model(_roberta_model(), config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # starts at 0, which would leave lora_A without gradients
            nn.init.normal_(parameter, std=0.02)
    return _roberta_case(model)


def _gpt2() -> Case:
    transformers = optional_module("transformers")
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    count = 4 * _LOGICAL
    tokens = torch.randint(config.vocab_size, (count, _TOKENS + 1))
    positions = torch.arange(_TOKENS).repeat(count, 1)
    examples = tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()
    wrapped = Logits(model, ("input_ids", "position_ids"))
    return Case(wrapped, examples, _LOGICAL, checked_examples=2, loss=next_token_loss)


CASES: Mapping[str, CaseSpec] = MappingProxyType(
    {
        "mlp": CaseSpec(_mlp, "MLP 784-1000-1000-10, batch 128", 1.10, 2.15),
        "cnn5": CaseSpec(_cnn5, "CNN5 32-64-128-256 on 32×32, batch 64", 1.30, 2.5),
        "wrn-16-4": CaseSpec(_wrn, "WRN-16-4, group norm, on 32×32, batch 32", 1.35, 2.6),
        "transformer": CaseSpec(_transformer, "transformer 6×256, 64 tokens, batch 32", 1.12, 2.25),
        "vit-s16": CaseSpec(_vit, "ViT-S/16 at 64×64, 16 microbatches of 8", 1.2, 2.35, large=True),
        "roberta-base": CaseSpec(
            _roberta, "RoBERTa-base shape, 128 tokens, 16 microbatches of 4", 1.2, 2.35, large=True
        ),
        "gpt2-small": CaseSpec(_gpt2, "GPT-2-small shape, 128 tokens, 16 microbatches of 4", 1.2, 2.35, large=True),
        "roberta-lora": CaseSpec(
            _lora, "LoRA r=16 on RoBERTa-base, 128 tokens, 16 microbatches of 4", 1.1, 2.2, large=True
        ),
    }
)


def optional_module(name: str) -> Any:
    """A package that diskdp does without, or the reason why a case or method is left out."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} is not installed ({error}); pip install 'diskdp[bench]'") from error
