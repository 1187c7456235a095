"""Layers of torch.nn with a rule of their own, attention in all its forms, parametrisations, containers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import TensorDataset

from diskdp import DiSK, Plan, clipped_gradient, explain, privatize
from diskdp.errors import GradientError
from tests.models import B, D, K, Lambda, T, V, classify, conv, images, parameter, sequences, square, tokens, vectors
from tests.test_recurrent import error


def doubled(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def methods(model: nn.Module, batch: Any, loss: Any) -> dict[str, tuple[str, str]]:
    return {row.name: (row.rule, row.method) for row in explain(model, batch, loss)}


# transposed convolutions, bilinear layers, embedding bags


@given(
    axes=st.lists(
        st.tuples(*(st.integers(a, b) for a, b in ((1, 3), (1, 3), (1, 3), (0, 2), (0, 2), (1, 2)))),
        min_size=1,
        max_size=3,
    ),
    groups=st.integers(1, 2),
    widths=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bias=st.booleans(),
    frames=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_transposed_convolutions(
    axes: list[tuple[int, ...]], groups: int, widths: tuple[int, int], bias: bool, frames: int
) -> None:
    size, kernel, stride, padding, added, dilation = (tuple(a[i] for a in axes) for i in range(6))
    assume(all(a < max(s, d) for a, s, d in zip(added, stride, dilation)))
    outputs = [
        (n - 1) * s - 2 * p + d * (k - 1) + a + 1
        for n, k, s, p, a, d in zip(size, kernel, stride, padding, added, dilation)
    ]
    assume(all(n > 0 for n in outputs))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(axes) - 1]
    inputs, filters = (groups * w for w in widths)
    torch.manual_seed(0)
    model = Lambda(
        lambda m, x: (m.c(m.stem * x.flatten(0, 1)) + m.stem).tanh().unflatten(0, (-1, frames)),
        stem=parameter(1),
        c=kind(inputs, filters, kernel, stride, padding, added, groups, bias, dilation),
    ).double()
    assert error(model, (torch.randn(3, frames, inputs, *size).double(),)) < 1e-9


def test_transposed_convolutions_are_planned_like_convolutions() -> None:
    model, batch = conv(nn.ConvTranspose2d(4, 6, 3, stride=2))(), images(4, 5, 5)()
    assert methods(model, batch, classify)["0.weight"][0] == "conv_transpose2d"
    assert methods(model, batch, classify)["0.weight"][1] in ("grouped", "patches", "pixel-gram")


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    between=st.lists(st.integers(1, 3), max_size=2),
    bias=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_bilinear(sizes: tuple[int, int, int], between: list[int], bias: bool) -> None:
    first, second, outputs = sizes
    torch.manual_seed(1)
    model = Lambda(
        lambda m, x: m.b(m.stem(x[..., :first].contiguous()), x[..., first:]).tanh(),
        stem=nn.Linear(first, first),
        b=nn.Bilinear(first, second, outputs, bias),
    ).double()
    assert error(model, (torch.randn(4, *between, first + second).double(),)) < 1e-9


class Bags(nn.Module):
    """Bags as rows, or one after the other with offsets made from lengths; weights of items from data or parameters."""

    def __init__(self, mode: str, form: str, weights: str, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(V, D, mode=mode, **options)
        self.form = form
        self.weigh = nn.Embedding(V, 1) if weights == "data" else None
        self.weights = parameter(T) if weights == "parameter" else None
        self.head = nn.Linear(D, K)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        weights = None
        if self.weigh is not None:
            weights = self.weigh(ids).squeeze(2).sigmoid()
        if self.weights is not None:
            weights = self.weights.expand(len(ids), -1)
        if self.form == "rows":
            return self.head(self.table(ids, per_sample_weights=weights).tanh())
        kept = torch.arange(T) < lengths.unsqueeze(1)
        ends = lengths.cumsum(0)
        offsets = ends - lengths
        if self.form == "last offset":
            offsets = torch.cat([offsets, ends[-1:]])
        weights = None if weights is None else weights[kept]
        return self.head(self.table(ids[kept], offsets, weights).tanh())


def bag_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["rows", "offsets", "last offset"])
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding_bags(mode: str, form: str, padding: int | None) -> None:
    for weights in ("none", "data", "parameter") if mode == "sum" else ("none",):
        if form != "rows" and weights == "parameter":
            continue  # a parameter picked by a mask from the data is the fallback's matter
        torch.manual_seed(2)
        last = form == "last offset"
        model = Bags(mode, form, weights, padding_idx=padding, include_last_offset=last).double()
        ids, y = tokens()
        ids[1], ids[2, :3] = 2, V - 1  # a bag of nothing but padding, and repeated items
        lengths = torch.tensor([5, 3, 4, 0, 1, 2])
        assert error(model, (ids, lengths, y), bag_loss) < 1e-9
        assert methods(model, (ids, lengths, y), bag_loss)["table.weight"] == ("embedding_bag", "rows")


def test_embedding_bag_with_a_frozen_table() -> None:
    torch.manual_seed(3)
    model = Bags("sum", "rows", "parameter").double()
    model.table.weight.requires_grad_(False)
    ids, y = tokens()
    assert error(model, (ids, torch.full((B,), T), y), bag_loss) < 1e-9


def test_several_bags_of_each_example() -> None:
    torch.manual_seed(4)
    model = Lambda(
        lambda m, i: m.h(m.e(i.flatten(0, 1)).unflatten(0, (-1, 2)).tanh().mean(1)),
        e=nn.EmbeddingBag(V, D, mode="max"),
        h=nn.Linear(D, K),
    ).double()
    batch = (torch.randint(0, V, (B, 2, T)), torch.randint(0, K, (B,)))
    assert error(model, batch, classify) < 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True, "mode": "sum"}, "scale_grad_by_freq")],
)
def test_embedding_bags_that_look_at_the_batch_are_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(V, D, **options), nn.Linear(D, K))
    with pytest.raises(GradientError, match=f"embedding_bag.*0.weight.*{message}"):
        clipped_gradient(model, tokens(), classify)


def test_offsets_in_the_batch_are_refused() -> None:
    """Where a bag ends is then another example's number, and examples cannot be told apart."""
    model = Lambda(lambda m, i, o: m.h(m.e(i, o)), e=nn.EmbeddingBag(V, D), h=nn.Linear(D, K))
    batch = (torch.randint(0, V, (17,)), torch.tensor([0, 3, 5, 9, 10, 14]), torch.randint(0, K, (B,)))
    for seed in range(4):  # offsets out of order fail in torch, others change the bags
        torch.manual_seed(seed)
        with pytest.raises(GradientError, match=r"forward pass fails|loss of one example changes"):
            clipped_gradient(model, batch, bag_loss)


# parameters in every place


class Nested(nn.Module):
    """Lists, dictionaries, shared modules, a tied weight, a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([parameter(D) for _ in range(2)])
        self.tables = nn.ParameterDict({"in": parameter(D, D), "out": parameter(D, D)})
        shared = nn.Sequential(nn.Linear(D, D), nn.PReLU(D))
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": shared, "b": nn.PReLU()}), nn.ModuleDict({"a": shared})])
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = shared[0].weight
        self.sets = [nn.Identity()]  # a plain list is no registration, and holds nothing to train

    def forward(self, x: Tensor) -> Tensor:
        for scale, block in zip(self.scales, self.blocks):
            x = block["a"](x * scale) + x @ self.tables["in"]
            if "b" in block:
                x = block["b"](x)
        return self.head(x) @ self.tables["out"].t() + self.tables["in"][0]


def test_nested_shared_and_tied() -> None:
    torch.manual_seed(5)
    assert error(Nested().double(), doubled(vectors())[:1]) < 1e-9


class Standardised(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        axes = tuple(range(1, weight.dim()))
        return (weight - weight.mean(axes, keepdim=True)) / (weight.std(axes, keepdim=True) + 1e-5)


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, Standardised()(self.weight), self.bias)


def with_parametrization(module: nn.Module, part: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", part)
    return module


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(3, 6, 3)),
    "weight norm of columns": lambda: parametrizations.weight_norm(nn.Conv2d(3, 6, 3), dim=1),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Conv2d(3, 6, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Conv2d(3, 6, 3)),
    "orthogonal by cayley": lambda: parametrizations.orthogonal(nn.Conv2d(3, 6, 3), orthogonal_map="cayley"),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 6, 3), n_power_iterations=2),
    "standardised weights": lambda: StandardisedConv(3, 6, 3),
    "standardisation as parametrization": lambda: with_parametrization(nn.Conv2d(3, 6, 3), Standardised()),
    "two parametrizations": lambda: with_parametrization(
        parametrizations.spectral_norm(nn.Conv2d(3, 6, 3)), Standardised()
    ),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parametrizations(name: str, training: bool) -> None:
    torch.manual_seed(6)
    head = [nn.Tanh(), nn.Flatten(), nn.LazyLinear(K)]
    model = nn.Sequential(PARAMETRIZED[name](), *head).double().train(training)
    model(images()()[0].double())  # gives the head its shape
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(2):  # the second time nothing is examined
        assert error(model, doubled(images()()), classify) < 1e-9
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_power_iterations_do_not_depend_on_the_batch() -> None:
    """Microbatches and an empty batch leave the same buffers behind, and a step moves them on."""

    def run(microbatch_size: int | None) -> tuple[dict[str, Tensor], list[Tensor]]:
        torch.manual_seed(7)
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, 6)), nn.Tanh(), nn.Linear(6, K)).double()
        data = TensorDataset(torch.randn(20, D).double(), torch.randint(0, K, (20,)))
        plan = Plan(dataset_size=20, batch_size=1, steps=6, noise_multiplier=1.0, delta=1e-2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(
            model, optimizer, plan, loss_fn=classify, filter=DiSK(kappa=0.6), microbatch_size=microbatch_size, seed=1
        )
        seen = [model[0].parametrizations.weight[0]._u.clone()]
        for batch in private.loader(data):
            private.step(batch)
            seen.append(model[0].parametrizations.weight[0]._u.clone())
        return {name: t.clone() for name, t in model.state_dict().items()}, seen

    whole, steps = run(None)
    split, _ = run(1)
    assert all(torch.allclose(whole[name], split[name], rtol=1e-9) for name in whole)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(steps))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_buffers_written_in_the_forward_pass_are_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    old = nn.utils.spectral_norm(nn.Linear(D, D))
    for module, name in ((Counter(), "calls"), (old, "weight_u")):
        model = nn.Sequential(module, nn.Linear(D, K))
        with pytest.raises(GradientError, match=rf"0\.{name}.*each forward pass writes it anew.*parametrizations"):
            clipped_gradient(model, vectors(), classify)


# attention


def masks(x: Tensor) -> dict[str, Any]:
    """Causal, and keys beyond a length that depends on the example."""
    length = x.shape[1]
    padded = torch.arange(length) >= 2 + (x[:, 0, :1] > 0).long()
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).triu(1), "key_padding_mask": padded}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True, "bias": False}, {"dropout": 0.4}],
    ids=str,
)
def test_multihead_attention(options: dict[str, Any], batch_first: bool, need_weights: bool, training: bool) -> None:
    torch.manual_seed(8)
    attention = nn.MultiheadAttention(D, 2, batch_first=batch_first, **options).train(training)

    def turned(x: Tensor) -> Tensor:
        return x if batch_first else x.transpose(0, 1)

    def attend(m: Any, kind: str, x: Tensor, **given: Any) -> Tensor:
        y = x.tanh()
        key, value = (
            (y[..., :3], y[..., 3:]) if "kdim" in options else {"self": (x, x), "cross": (y, x), "kv": (y, y)}[kind]
        )
        output, weights = m.a(turned(x), turned(key), turned(value), need_weights=need_weights, **given)
        assert (weights is None) == (not need_weights)
        return turned(output) if weights is None else torch.cat([turned(output), weights], 2)

    for kind, masked in (("self", False), ("self", True), ("cross", True), ("kv", False)):
        model = Lambda(lambda m, x: attend(m, kind, x, **(masks(x) if masked else {})), a=attention).double()  # noqa: B023
        model.train(training)
        assert error(model, doubled(sequences())[:1]) < 1e-9


def test_packed_projections_keep_their_factors() -> None:
    """Rows of the packed matrix are used apart: no per-example gradient of it is made for a long input."""
    torch.manual_seed(9)
    model = Lambda(lambda m, x: m.a(x, x.tanh(), x.sin())[0], a=nn.MultiheadAttention(64, 2, batch_first=True))
    rows = methods(model, (torch.randn(4, 3, 64),), square)
    assert rows["a.in_proj_weight"] == ("linear", "gram")


def encoder(layers: int = 2, **options: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 12, batch_first=True, **options), layers)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{"dropout": 0.3}, {"norm_first": True, "activation": "gelu"}, {"bias": False}], ids=str
)
def test_transformer_layers(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(10)
    layer = nn.TransformerDecoderLayer(D, 2, 12, batch_first=True, **options)

    def padding(x: Tensor) -> Tensor:
        return masks(x)["key_padding_mask"]

    models = [
        nn.TransformerEncoderLayer(D, 2, 12, batch_first=True, **options),
        Lambda(lambda m, x: m.e(x, src_key_padding_mask=padding(x))[:, :1], e=encoder(**options)),
        Lambda(
            lambda m, x: m.d(x, m.e(x), tgt_mask=masks(x)["attn_mask"], tgt_is_causal=True),
            d=nn.TransformerDecoder(layer, 2),
            e=encoder(1, **options),
        ),
    ]
    for model in models:
        assert error(model.double().train(training), doubled(sequences())[:1]) < 1e-9


@pytest.mark.parametrize("frozen", ["all", "norms only"])
def test_frozen_encoders_take_no_fast_path_that_hides_parameters(frozen: str) -> None:
    """In eval mode torch runs a layer without gradients in one kernel, and nests padded inputs."""
    torch.manual_seed(11)
    model = Lambda(
        lambda m, x: m.h(m.e(x, src_key_padding_mask=masks(x)["key_padding_mask"])[:, m.kept].sum(1)),
        e=encoder(),
        h=nn.Linear(D, K),
        kept=slice(0, 2),
    ).double()
    model.e.eval()
    for name, p in model.e.named_parameters():
        p.requires_grad_(frozen != "all" and "norm" not in name)
    assert error(model, doubled(sequences()), classify) < 1e-9
    model.kept = slice(None)  # padded positions too: the fused kernel would leave zeros there
    grads, _ = clipped_gradient(model, doubled(sequences()), classify)
    assert all(g.any() for g in grads.values())


@pytest.mark.parametrize("inside", [True, False])
def test_nested_tensors_are_refused(inside: bool) -> None:
    def nested(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor(list(x), layout=torch.jagged)

    model = Lambda(lambda m, x: m.l(nested(x) if inside else x), l=nn.Linear(D, K))

    def loss(m: Any, b: Any) -> Tensor:
        return torch.stack([t.square().mean() for t in m(b[0]).unbind()])

    x = sequences()[0]
    with pytest.raises(GradientError, match=r"nested tensor.*pa[ds]"):
        clipped_gradient(model, (x if inside else nested(x),), loss)


@pytest.mark.parametrize("grouped", [False, True])
def test_scaled_dot_product_attention_around_parameters(grouped: bool) -> None:
    """Learned keys and values that every example shares, a learned bias of the scores, grouped heads."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q = m.q(x).unflatten(2, (4, 2)).transpose(1, 2)
        k, v = (torch.cat([p.expand(len(x), -1, -1, -1), n], 2) for p, n in ((m.k, q[:, ::2]), (m.v, q[:, 1::2].sin())))
        if not grouped:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, m.bias, dropout_p=0.3, enable_gqa=grouped)

    torch.manual_seed(12)
    model = Lambda(
        forward, q=nn.Linear(D, 8), k=parameter(1, 2, 3, 2), v=parameter(1, 2, 3, 2), bias=parameter(4, T, T + 3)
    ).double()
    assert error(model, doubled(sequences())[:1]) < 1e-9
