"""Every model: shapes, sizes, independence of examples. The registry: refusals. Losses: their formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from diskdp.datasets import adult
from diskdp.errors import ConfigError, DataError
from diskdp.zoo import (
    MODELS,
    accuracy,
    build,
    classification_loss,
    cnn5,
    gpt,
    linear,
    mlp,
    sequence_loss,
    vit,
    wrn,
)
from diskdp.zoo.transformer import Attention

CASES: list[tuple[str, tuple[int, ...], Mapping[str, object]]] = [
    ("linear", (91,), {}),
    ("linear", (3, 32, 32), {}),
    ("mlp", (91,), {"widths": [32, 16], "activation": "relu"}),
    ("mlp", (1, 28, 28), {"widths": [], "dropout": 0}),
    ("cnn5", (1, 28, 28), {}),
    ("cnn5", (3, 32, 32), {"widths": (16, 32), "groups": 4}),
    ("wrn", (3, 32, 32), {"depth": 10, "width": 1}),
    ("wrn", (1, 28, 28), {"depth": 10, "width": 1, "weight_standardization": True}),
    ("vit", (1, 28, 28), {"depth": 2, "dim": 32}),
    ("vit", (3, 32, 32), {"depth": 1, "dim": 32, "heads": 2, "patch": 8, "layer_scale": 0.1}),
    ("gpt", (12,), {}),
    ("gpt", (12,), {"layer_scale": 0.1}),
]
case = pytest.mark.parametrize(("name", "shape", "options"), CASES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs(name: str, shape: tuple[int, ...], count: int) -> Tensor:
    return torch.randint(0, 7, (count, *shape)) if name == "gpt" else torch.randn(count, *shape)


@case
def test_logits_seed_and_gradients(name: str, shape: tuple[int, ...], options: Mapping[str, object]) -> None:
    torch.manual_seed(1)
    model = build(name, shape, 7, options)
    torch.manual_seed(1)
    again = build(name, shape, 7, options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())

    x = inputs(name, shape, 3)
    logits = model(x)
    assert logits.shape == ((3, *shape, 7) if name == "gpt" else (3, 7))
    assert model(x[:0]).shape == (0, *logits.shape[1:])  # a Poisson batch may be empty
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@case
def test_an_example_does_not_depend_on_its_batch(
    name: str, shape: tuple[int, ...], options: Mapping[str, object]
) -> None:
    model = build(name, shape, 7, options).double()
    x = inputs(name, shape, 4)
    x = x if name == "gpt" else x.double()
    together = model(x)
    alone = torch.cat([model(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(together[0], together[1])


def test_sizes() -> None:
    def size(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    assert size(linear((91,), 2)) == 92 * 2
    assert size(mlp((91,), 2, widths=(64, 32))) == 92 * 64 + 65 * 32 + 33 * 2
    convolutions = sum(9 * a * b + 3 * b for a, b in ((3, 32), (32, 64), (64, 128), (128, 256)))
    assert size(cnn5((3, 32, 32), 10)) == convolutions + 257 * 10
    assert size(wrn((3, 32, 32), 10)) == pytest.approx(2.75e6, rel=0.01)  # Zagoruyko and Komodakis: 2.7 M
    assert size(wrn((3, 32, 32), 10, depth=40)) == pytest.approx(8.9e6, rel=0.01)  # as published: 8.9 M
    tied, dim = gpt((16,), 100, dim=32, depth=1), 32
    block = 12 * dim**2 + 13 * dim
    assert size(tied) == 100 * dim + 16 * dim + block + 2 * dim


def test_cnn5_sees_halved_images() -> None:
    model = cnn5((3, 32, 32), 10)
    sizes: list[int] = []
    x = torch.randn(1, 3, 32, 32)
    for layer in model.features:
        x = layer(x)
        if isinstance(layer, nn.Conv2d):
            sizes.append(x.shape[-1])
    assert sizes == [32, 16, 8, 4]


def test_weight_standardization_ignores_shift_and_scale_of_a_weight() -> None:
    x = torch.randn(2, 3, 16, 16, dtype=torch.double)
    for on in (True, False):
        torch.manual_seed(0)
        model = wrn((3, 16, 16), 5, depth=10, width=1, weight_standardization=on).double()
        before = model(x)
        with torch.no_grad():
            weight = model.blocks[1].conv1.weight  # type: ignore[union-attr]
            weight.mul_(10).add_(0.3)  # type: ignore[operator,union-attr]
        assert torch.allclose(before, model(x), rtol=1e-3, atol=1e-3) is on


def test_gpt_is_causal_and_tied() -> None:
    model = gpt((10,), 20).double()
    tokens = torch.randint(0, 20, (2, 10))
    later = tokens.clone()
    later[:, 6:] = (later[:, 6:] + 1) % 20
    before, after = model(tokens), model(later)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6], after[:, 6])
    assert model.head.weight is model.tokens.weight
    assert model(tokens[:, :4]).shape == (2, 4, 20)


def test_attention_by_hand() -> None:
    """One block's attention against softmax(QKᵀ/√d)V written out."""
    attention = vit((1, 8, 8), 2, dim=8, heads=2, depth=1).double().blocks[0].attention
    assert isinstance(attention, nn.Module)
    x = torch.randn(3, 5, 8, dtype=torch.double)
    query, key, value = attention.qkv(x).split(8, dim=-1)  # type: ignore[operator]
    heads = []
    for h in (slice(0, 4), slice(4, 8)):
        scores = query[..., h] @ key[..., h].transpose(1, 2) / math.sqrt(4)
        heads.append(scores.softmax(-1) @ value[..., h])
    expected = attention.out(torch.cat(heads, -1))  # type: ignore[operator]
    torch.testing.assert_close(attention(x), expected)


def test_vit_answers_from_the_class_token() -> None:
    """Without blocks nothing reaches the token from the image; with one block it does."""
    images = torch.randn(2, 1, 8, 8)
    without = vit((1, 8, 8), 3, depth=0)(images)
    assert torch.equal(without[0], without[1])
    mixed = vit((1, 8, 8), 3, depth=1)(images)
    assert not torch.allclose(mixed[0], mixed[1])


@pytest.mark.parametrize(("name", "shape"), [("mlp", (20,)), ("vit", (1, 8, 8)), ("gpt", (8,))])
def test_dropout_acts_in_training_only(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, {"dropout": 0.5})
    x = inputs(name, shape, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_dropout_acts_inside_attention() -> None:
    attention = Attention(8, 2, dropout=0.5, causal=False)
    x = torch.randn(1, 6, 8)
    assert not torch.equal(attention(x), attention(x))


@pytest.mark.parametrize(
    ("name", "shape", "options", "says"),
    [
        ("cnn6", (1, 28, 28), {}, "known: linear, mlp, cnn5, wrn, vit, gpt"),
        ("mlp", (9,), {"width": 3}, "unknown option 'width'; known: widths, activation, dropout"),
        ("linear", (9,), {"bias": True}, "unknown option 'bias'; known: none"),
        ("mlp", (9,), {"widths": 3}, "option widths must be a list of whole numbers, got 3"),
        ("mlp", (9,), {"widths": [3, True]}, "option widths must be a list of whole numbers"),
        ("mlp", (9,), {"dropout": "high"}, "option dropout must be float, got 'high'"),
        ("mlp", (9,), {"activation": "sine"}, "unknown activation 'sine'; known: tanh, relu, gelu"),
        ("mlp", (9,), {"dropout": 2.0}, "cannot be built with these options (ValueError: dropout"),
        ("wrn", (3, 32, 32), {"depth": 16.0}, "option depth must be int, got 16.0"),
        ("wrn", (3, 32, 32), {"depth": 15}, "depth must be 10, 16, 22"),
        (
            "wrn",
            (3, 32, 32),
            {"weight_standardization": 1},
            "option weight_standardization must be bool, got 1",
        ),
        ("cnn5", (91,), {}, "cnn5: needs images [channels, height, width], the inputs are [91]"),
        ("cnn5", (1, 7, 28), {}, "at least 8×8, the inputs are 7×28"),
        ("cnn5", (1, 28, 28), {"groups": 7}, "cannot be built with these options (ValueError: num_channels"),
        ("vit", (1, 28, 28), {"patch": 5}, "patch 5 does not divide the image, 28×28"),
        ("vit", (1, 28, 28), {"heads": 5}, "dim 64 is not a multiple of heads 5"),
        ("gpt", (1, 28, 28), {}, "gpt: needs token sequences [length]"),
        ("nomodule_here:make", (9,), {}, "cannot import nomodule_here (ModuleNotFoundError"),
        ("math:nothing", (9,), {}, "module math has no function nothing"),
        ("math:pi", (9,), {}, "module math has no function pi"),
        (":make", (9,), {}, 'must read "module:function"'),
        ("math:", (9,), {}, 'must read "module:function"'),
    ],
)
def test_build_refuses_with_the_reason(
    name: str, shape: tuple[int, ...], options: Mapping[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, shape, 10, options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_build_from_a_module_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo_user_models.py").write_text(
        "from torch import nn\n"
        "def make(input_shape, classes, width=3):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], width), nn.Linear(width, classes))\n"
        "def wrong(input_shape, classes):\n"
        "    return 5\n"
        "def alone():\n"
        "    return nn.Linear(1, 1)\n"
        "def broken(input_shape, classes):\n"
        "    return 1 / 0\n"
    )
    (tmp_path / "zoo_user_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = build("zoo_user_models:make", (4,), 2, {"width": 6})
    assert model(torch.zeros(1, 4)).shape == (1, 2)
    assert isinstance(model, nn.Sequential)
    assert model[0].out_features == 6
    for name, says in {
        "zoo_user_models:wrong": "returned int; it must return a torch.nn.Module",
        "zoo_user_models:alone": "must be callable as (input_shape, classes)",
        "zoo_user_models:broken": "ZeroDivisionError",
        "zoo_user_broken:make": "No module named 'not_installed_anywhere'",
    }.items():
        with pytest.raises(ConfigError) as caught:
            build(name, (4,), 2)
        assert says in str(caught.value)
    with pytest.raises(ConfigError, match="unknown option 'depth'; known: width"):
        build("zoo_user_models:make", (4,), 2, {"depth": 6})


def test_registry_names_are_the_public_constructors() -> None:
    assert {"linear": linear, "mlp": mlp, "cnn5": cnn5, "wrn": wrn, "vit": vit, "gpt": gpt} == MODELS


def test_losses_against_their_formulas() -> None:
    logits = torch.randn(3, 5, 4, dtype=torch.double)
    targets = torch.randint(0, 4, (3, 5))
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(classification_loss(nn.Identity(), (logits[:, 0], targets[:, 0])), expected[:, 0])
    torch.testing.assert_close(sequence_loss(nn.Identity(), (logits, targets)), expected.mean(1))


class Rows(Dataset[tuple[Tensor, ...]]):
    """A map-style data set that cannot be sliced."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


@pytest.mark.parametrize("kind", [TensorDataset, Rows])
def test_accuracy_counts_and_leaves_the_model_as_it_was(kind: type[TensorDataset] | type[Rows]) -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(2, 2), nn.Dropout(0.5))
    model.train()
    model[2].eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
        model[1].bias.zero_()
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(50, 1)
    y = torch.tensor([0, 1]).repeat(50)
    y[:13] = 1 - y[:13]
    assert accuracy(model, kind(x, y), batch_size=7) == 0.87
    assert [module.training for module in model.modules()] == [True, True, True, False]
    with pytest.raises(DataError, match="no rows"):
        accuracy(model, kind(x[:0], y[:0]))


@pytest.mark.parametrize(("name", "least"), [("linear", 0.845), ("mlp", 0.845)])
def test_adult_can_be_learned_without_privacy(name: str, least: float) -> None:
    """The encoding carries what is known of the table: about 85% (always answering "<=50K" gives 76.4%)."""
    split = adult()
    model = build(name, split.info.input_shape, split.info.n_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = split.train.tensors
    for _ in range(2):
        for rows in torch.randperm(len(x)).split(256):
            optimizer.zero_grad()
            classification_loss(model, (x[rows], y[rows])).mean().backward()
            optimizer.step()
    assert accuracy(model, split.test) > least
