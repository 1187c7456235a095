"""Models that use their parameters in every way the engine claims to handle. Each is tiny."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    """A model, a batch of six, a loss function, and on which axis of each tensor the examples lie."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Any, Any], Tensor]
    axes: tuple[int, ...] | None = None
    float32: bool = True
    skip: tuple[str, ...] = field(default=())


B, T, D, V, K = 6, 5, 8, 11, 4


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def next_token(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[0][:, 1:], reduction="none").mean(1)


def square(model: Any, batch: Any) -> Tensor:
    return model(batch[0]).flatten(1).square().mean(1)


def square_second(model: Any, batch: Any) -> Tensor:
    return model(batch[0]).square().mean((0, 2))


def vectors() -> tuple[Tensor, ...]:
    return torch.randn(B, D), torch.randint(0, K, (B,))


def sequences() -> tuple[Tensor, ...]:
    return torch.randn(B, T, D), torch.randint(0, K, (B,))


def time_first() -> tuple[Tensor, ...]:
    return (torch.randn(T, B, D),)


def tokens() -> tuple[Tensor, ...]:
    return torch.randint(0, V, (B, T)), torch.randint(0, K, (B,))


def images(channels: int = 3, *size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(B, channels, *(size or (8, 8))), torch.randint(0, K, (B,)))


class Lambda(nn.Module):
    """A function of its submodules and parameters."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, 2, D // 2)).movedim(2, 0).transpose(-2, -3)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.dropout(self.out(a))
        return x_BTD + self.dropout(self.down(F.gelu(self.up(self.norm2(x_BTD)))))


class ViT(nn.Module):
    def __init__(self, token: str = "expand", dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, D, 4, stride=4)
        self.token, self.position = parameter(1, 1, D), parameter(1, 5, D)
        self.scale = nn.Parameter(torch.full((D,), 0.1))
        self.block, self.norm, self.head = Block(dropout), nn.LayerNorm(D), nn.Linear(D, K)
        self.how = token

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.patch(images_BCHW).flatten(2).transpose(1, 2)
        token = self.token.repeat(len(x), 1, 1) if self.how == "repeat" else self.token.expand(len(x), -1, -1)
        x = torch.cat([token, x], 1) + self.position
        x = x + self.scale * self.block(x)
        return self.head(self.norm(x)[:, 0])


class GPT(nn.Module):
    """Two layers, tied embedding and head, learned positions picked by number."""

    def __init__(self, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(16, D)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class WideResidual(nn.Module):
    """Two pre-activation blocks with group norm and standardised weights used functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1, self.norm2 = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.GroupNorm(4, 16),
        )
        self.conv1 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.conv2, self.skip = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Linear(16, K)

    @staticmethod
    def standardised(weight: Tensor) -> Tensor:
        mean, var = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), keepdim=True)
        return (weight - mean) / torch.sqrt(var + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(self.norm1(x), inplace=True)
        y = F.conv2d(y, self.standardised(self.conv1.weight), None, 2, 1)
        y = self.conv2(F.relu(self.norm2(y)))
        return self.head((self.skip(x) + y).mean((2, 3)))


def cnn5() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 12), (12, 16), (16, 16)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.Tanh(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, K))


def conv(module: nn.Module, features: int = 6) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        copy.deepcopy(module),
        nn.Tanh(),
        nn.Flatten(2),
        Lambda(lambda m, x: m.l(x.mean(2)), l=nn.Linear(features, K)),
    )


class Penalty(Lambda):
    def __init__(self) -> None:
        super().__init__(lambda m, x: m.net(x), net=nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, K)))


def penalised(model: Any, batch: Any) -> Tensor:
    weights = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + 0.1 * weights


class MultiLabelTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D, padding_idx=2)
        self.head = nn.Linear(D, K)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


def checkpointed(reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return Lambda(
            lambda m, x: m.head(checkpoint(m.body, m.stem(x), use_reentrant=reentrant).mean(1)),
            stem=nn.Linear(D, D),
            body=Block(0.2),
            head=nn.Linear(D, K),
        )

    return make


def lora() -> nn.Module:
    frozen = nn.Linear(D, D)
    frozen.requires_grad_(False)
    return Lambda(
        lambda m, x: m.head(m.frozen(x) + 2.0 * m.b(m.a(x))),
        frozen=frozen,
        a=nn.Linear(D, 2, bias=False),
        b=zeroed(nn.Linear(2, D, bias=False)),
        head=nn.Linear(D, K),
    )


def zeroed(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


def twice() -> nn.Module:
    return Lambda(
        lambda m, x: m.head(torch.tanh(m.layer(torch.tanh(m.layer(x))))),
        layer=nn.Linear(D, D),
        head=nn.Linear(D, K),
    )


def encoder_layer(batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(D, 2, 12, dropout=0.1, batch_first=batch_first)


def pixels(function: Callable[..., Tensor], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Lambda(function, **{name: part() for name, part in parts.items()})


CASES: dict[str, Case] = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(D, 10), nn.ReLU(inplace=True), nn.Linear(10, K)), vectors, classify),
    "cnn5": Case(cnn5, images(3, 16, 16), classify),
    "wide-residual": Case(WideResidual, images(), classify),
    "vit": Case(ViT, images(), classify),
    "vit-repeat-token-dropout": Case(lambda: ViT("repeat", 0.3), images(), classify),
    "gpt-tied": Case(GPT, tokens, next_token),
    "gpt-untied-dropout": Case(lambda: GPT(False, 0.2), tokens, next_token),
    "used-twice": Case(twice, vectors, classify),
    "used-twice-sequence": Case(
        twice, sequences, lambda m, b: F.cross_entropy(m(b[0]).mean(1), b[1], reduction="none")
    ),
    "penalty": Case(Penalty, vectors, penalised),
    "lora": Case(lora, vectors, classify),
    "padding-idx": Case(MultiLabelTable, tokens, classify),
    "checkpoint": Case(checkpointed(False), sequences, classify),
    "checkpoint-reentrant": Case(checkpointed(True), sequences, classify),
    "encoder-layer": Case(encoder_layer(True), sequences, square),
    "encoder-layer-second": Case(encoder_layer(False), time_first, square_second, axes=(1,)),
    "attention-cross": Case(
        pixels(
            lambda m, x: m.a(m.q(x), x, x.tanh())[0],
            a=lambda: nn.MultiheadAttention(D, 2, batch_first=True),
            q=lambda: nn.Linear(D, D),
        ),
        sequences,
        square,
    ),
    "conv1d": Case(conv(nn.Conv1d(3, 6, 3, stride=2, padding=2, dilation=2)), images(3, 13), classify),
    "conv2d-stride-dilation-groups": Case(
        conv(nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=2)),
        images(4, 9, 10),
        classify,
    ),
    "conv2d-same": Case(conv(nn.Conv2d(3, 6, (4, 3), padding="same")), images(), classify),
    "conv2d-valid": Case(conv(nn.Conv2d(3, 6, 3, padding="valid", bias=False)), images(), classify),
    "conv2d-circular": Case(conv(nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular")), images(), classify),
    "conv2d-reflect": Case(conv(nn.Conv2d(3, 6, 3, padding=2, padding_mode="reflect")), images(), classify),
    "conv2d-depthwise": Case(conv(nn.Conv2d(6, 6, 3, padding=1, groups=6)), images(6), classify),
    "conv3d": Case(conv(nn.Conv3d(2, 6, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1))), images(2, 4, 5, 4), classify),
    "conv2d-frames": Case(
        pixels(
            lambda m, x: m.l(m.c(x.flatten(0, 1)).tanh().mean((2, 3)).unflatten(0, (len(x), -1)).mean(1)),
            c=lambda: nn.Conv2d(2, 6, 3),
            l=lambda: nn.Linear(6, K),
        ),
        images(3, 2, 6, 6),
        classify,
    ),
    "instance-norm": Case(
        conv(nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True))), images(), classify
    ),
    "rms-norm": Case(
        pixels(lambda m, x: m.l(m.n(x)), n=lambda: nn.RMSNorm(D), l=lambda: nn.Linear(D, K)),
        vectors,
        classify,
    ),
    "rms-norm-by-hand": Case(
        pixels(
            lambda m, x: m.l(m.w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))),
            w=lambda: parameter(D),
            l=lambda: nn.Linear(D, K),
        ),
        sequences,
        lambda m, b: F.cross_entropy(m(b[0]).sum(1), b[1], reduction="none"),
    ),
    "batch-norm-eval": Case(conv(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6).eval())), images(), classify),
    "prelu": Case(conv(nn.Sequential(nn.Conv2d(3, 6, 3), nn.PReLU(6))), images(), classify),
    "functional-transpose": Case(
        pixels(lambda m, x: torch.tanh(x @ m.w.t() + m.b), w=lambda: parameter(K, D), b=lambda: parameter(K)),
        vectors,
        classify,
    ),
    "matrix-on-the-left": Case(
        pixels(lambda m, x: (m.w @ x.transpose(1, 2)).mean(2), w=lambda: parameter(K, D)), sequences, classify
    ),
    "columns-are-examples": Case(pixels(lambda m, x: (m.w @ x.t()).t(), w=lambda: parameter(K, D)), vectors, classify),
    "addmm": Case(
        pixels(
            lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0),
            w=lambda: parameter(D, K),
            b=lambda: parameter(K),
        ),
        vectors,
        classify,
    ),
    "einsum": Case(
        pixels(lambda m, x: torch.einsum("btd,kd->bk", x, m.w), w=lambda: parameter(K, D)),
        sequences,
        classify,
    ),
    "in-place": Case(
        pixels(
            lambda m, x: m.l2(m.l1(x).mul_(2.0).add_(m.b).sigmoid_()),
            l1=lambda: nn.Linear(D, 6),
            b=lambda: parameter(6),
            l2=lambda: nn.Linear(6, K),
        ),
        vectors,
        classify,
    ),
    "weight-norm": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(D, 6)), nn.Tanh(), nn.Linear(6, K)),
        vectors,
        classify,
    ),
    "sliced-positions": Case(
        pixels(
            lambda m, x: m.l((x + m.p[:, : x.shape[1]]).tanh().mean(1)),
            p=lambda: parameter(1, 9, D),
            l=lambda: nn.Linear(D, K),
        ),
        sequences,
        classify,
    ),
    "indexed-table": Case(pixels(lambda m, i: m.t[i].tanh().mean(1), t=lambda: parameter(V, K)), tokens, classify),
    "learned-queries": Case(
        pixels(
            lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), -1, -1), x, x).mean(1) @ m.w,
            q=lambda: parameter(3, D),
            w=lambda: parameter(D, K),
        ),
        sequences,
        classify,
    ),
    "bilinear": Case(pixels(lambda m, x: m.l(x, x.tanh()), l=lambda: nn.Bilinear(D, D, K)), vectors, classify),
    "transposed-convolution": Case(conv(nn.ConvTranspose2d(3, 6, 3, stride=2)), images(3, 4, 4), classify),
    "temperature": Case(
        pixels(lambda m, x: m.l(x) / m.t.exp(), l=lambda: nn.Linear(D, K), t=lambda: parameter()),
        vectors,
        classify,
    ),
    "masked-weight": Case(
        pixels(lambda m, x: F.linear(x, m.w * torch.ones(K, D).tril()), w=lambda: parameter(K, D)),
        vectors,
        classify,
    ),
    "frozen-half": Case(
        lambda: nn.Sequential(nn.Linear(D, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, K)),
        vectors,
        classify,
    ),
    "where": Case(
        pixels(lambda m, x: m.l(torch.where(x > 0, x, m.w)), l=lambda: nn.Linear(D, K), w=lambda: parameter(D)),
        vectors,
        classify,
    ),
}
