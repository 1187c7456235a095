"""LSTM, GRU and plain recurrent layers and cells against float64 per-example gradients of plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from diskdp import clipped_gradient, explain
from diskdp.errors import GradientError
from diskdp.gradients import Engine
from tests import oracle
from tests.models import B, D, K, Lambda, T, V, classify, next_token, parameter, sequences, square, tokens

KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}


class Recurrent(nn.Module):
    """A recurrent layer whose outputs, last states and first states all matter."""

    def __init__(self, kind: str, first: str, features: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.layer = KINDS[kind](features, hidden, **options)
        self.first, self.kind = first, kind
        count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        widths = [self.layer.proj_size or hidden] + [hidden] * (kind == "lstm")
        self.states = nn.ParameterList([parameter(count, 1, w) for w in widths] if first == "trainable" else [])
        self.from_data = nn.ModuleList([nn.Linear(features, count * w) for w in widths] if first == "data" else [])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, features]"""
        states = [s.expand(-1, len(x), -1) for s in self.states]
        for linear in self.from_data:
            states.append(linear(x[:, 0]).unflatten(1, (-1, linear.out_features // self.count)).transpose(0, 1))
        given = None if not states else tuple(states) if self.kind == "lstm" else states[0]
        output, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1), given)
        output = output if self.layer.batch_first else output.transpose(0, 1)
        lasts = [t.transpose(0, 1).flatten(1).square() for t in (last if self.kind == "lstm" else (last,))]
        return torch.cat([output.flatten(1), *lasts], 1)

    @property
    def count(self) -> int:
        return self.layer.num_layers * (2 if self.layer.bidirectional else 1)


def moved(model: nn.Module, size: float = 0.1) -> dict[str, Tensor]:
    return {name: (p + size * torch.randn_like(p)).detach() for name, p in model.named_parameters() if p.requires_grad}


def error(model: nn.Module, batch: Any, loss: Any = square, weights: tuple[float, float] = (0.6, 0.4)) -> float:
    """Relative error of the clipped sum at two points; some examples are clipped, some are not."""
    points = [(weights[0], None), (weights[1], moved(model))]
    exact = oracle.per_example_same_masks(model, batch, loss, points)
    lengths = torch.tensor([oracle.norm(u) for u in exact], dtype=torch.float64)
    max_norm = max(float(lengths.median()), 1e-6)  # dead units may leave nothing to clip
    found, norms = clipped_gradient(model, batch, loss, points, max_norm)
    assert torch.allclose(norms, lengths, rtol=1e-9)
    return oracle.relative_error(found, oracle.clipped(exact, "flat", max_norm))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    first=st.sampled_from(["absent", "data", "trainable"]),
    batch=st.integers(1, 4),
    length=st.integers(1, 5),
    features=st.integers(1, 4),
    hidden=st.integers(2, 4),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    projected=st.booleans(),
    dropout=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_every_shape_matches_autograd(
    kind: str,
    first: str,
    batch: int,
    length: int,
    features: int,
    hidden: int,
    projected: bool,
    seed: int,
    **options: Any,
) -> None:
    torch.manual_seed(seed)
    if options["layers"] == 1:
        options["dropout"] = 0.0
    options["num_layers"] = options.pop("layers")
    if projected and kind == "lstm":
        options["proj_size"] = hidden - 1
    model = Recurrent(kind, first, features, hidden, **options).double()
    assert error(model, (torch.randn(batch, length, features).double(),)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [(0.6, 0.4), (-64.0, 65.0)])
def test_float32_matches_the_loop_in_float64(kind: str, weights: tuple[float, float]) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, "trainable", D, 6, num_layers=2, bidirectional=True)
    double = Recurrent(kind, "trainable", D, 6, num_layers=2, bidirectional=True).double()
    double.load_state_dict(model.state_dict())
    batch, ahead = sequences()[:1], moved(model, 0.05)
    points = [(weights[0], None), (weights[1], ahead)]
    exact_points = [(weights[0], None), (weights[1], {name: t.double() for name, t in ahead.items()})]
    exact = oracle.per_example(double, (batch[0].double(),), square, exact_points)
    max_norm = float(torch.tensor([oracle.norm(u) for u in exact]).median())
    found, _ = clipped_gradient(model, batch, square, points, max_norm)
    assert oracle.relative_error(found, oracle.clipped(exact, "flat", max_norm)) < 2e-5 * max(1.0, abs(weights[1]))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda d, h: nn.RNNCell(d, h, False, "relu")])
def test_cells_in_a_loop_over_time(cell: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    torch.manual_seed(1)
    model = Lambda(forward, cell=cell(D, 6), head=nn.Linear(6, K)).double()
    x, y = sequences()
    assert error(model, (x.double(), y), classify) < 1e-9


def encoder_decoder(m: Any, x: Tensor) -> Tensor:
    """The states of one layer start another, which runs twice and starts from learned inputs."""
    _, states = m.encoder(x)
    output, states = m.decoder(m.start.expand(len(x), 2, -1), states)
    output, _ = m.decoder(output, states)
    return output.mul_(2.0)  # in place: what the layer has saved must not change


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_from_another_layer(kind: Any) -> None:
    torch.manual_seed(2)
    parts = {"encoder": kind(D, 6, batch_first=True), "decoder": kind(6, 6, batch_first=True)}
    model = Lambda(encoder_decoder, **parts, start=parameter(1, 1, 6)).double()
    assert error(model, (sequences()[0].double(),)) < 1e-9


@pytest.mark.parametrize("only", ["b_ih", "b_hh"])
def test_cells_with_one_bias(only: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.gru_cell(x, x[:, :4].tanh(), m.a, m.b, **{only: m.bias})

    torch.manual_seed(13)
    model = Lambda(forward, a=parameter(12, D), b=parameter(12, 4), bias=parameter(12)).double()
    assert error(model, (torch.randn(B, D).double(),)) < 1e-9


def tied_layers() -> nn.LSTM:
    layer = nn.LSTM(D, D, num_layers=2, batch_first=True)
    layer.weight_ih_l1, layer.weight_hh_l1 = layer.weight_ih_l0, layer.weight_hh_l0
    return layer


IN_USE: dict[str, Any] = {
    "weight norm": lambda: Lambda(
        lambda m, x: m.r(x)[0], r=parametrizations.weight_norm(nn.LSTM(D, 6, batch_first=True), "weight_hh_l0")
    ),
    "spectral norm": lambda: Lambda(
        lambda m, x: m.r(x)[0], r=parametrizations.spectral_norm(nn.GRU(D, 6, batch_first=True), "weight_hh_l0")
    ),
    "tied layers": lambda: Lambda(lambda m, x: m.r(x)[0], r=tied_layers()),
    "repeated first state": lambda: Lambda(
        lambda m, x: m.r(x, m.h.repeat(1, len(x), 1))[0], r=nn.GRU(D, 6, batch_first=True), h=parameter(1, 1, 6)
    ),
    "contiguous first state": lambda: Lambda(
        lambda m, x: m.r(x, m.h.expand(1, len(x), 6).contiguous())[0],
        r=nn.GRU(D, 6, batch_first=True),
        h=parameter(1, 1, 6),
    ),
}


@pytest.mark.parametrize("name", IN_USE)
def test_parametrised_and_tied(name: str) -> None:
    torch.manual_seed(11)
    assert error(IN_USE[name]().double(), (sequences()[0].double(),)) < 1e-9


def test_a_language_model_with_a_tied_head_and_dropout() -> None:
    torch.manual_seed(12)
    layer = nn.LSTM(D, D, 2, batch_first=True, dropout=0.3)
    model = Lambda(lambda m, i: m.h(m.r(m.e(i))[0]), e=nn.Embedding(V, D), r=layer, h=nn.Linear(D, V)).double()
    model.h.weight = model.e.weight
    assert error(model, tokens(), next_token) < 1e-9


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_checkpointing_runs_it_again(kind: Any, reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: m.layer(y)[0], m.stem(x), use_reentrant=reentrant)

    torch.manual_seed(3)
    layer = kind(6, 4, num_layers=2, dropout=0.3, batch_first=True)
    model = Lambda(forward, stem=nn.Linear(D, 6), layer=layer).double()
    batch = (sequences()[0].double(),)
    points = [(0.6, None), (0.4, moved(model))]
    plain = Lambda(lambda m, x: m.layer(m.stem(x))[0], stem=model.stem, layer=layer)
    exact = oracle.per_example_same_masks(plain, batch, square, points)
    found, _ = clipped_gradient(model, batch, square, points, max_norm=0.01)
    assert oracle.relative_error(found, oracle.clipped(exact, "flat", 0.01)) < 1e-9


def test_several_sequences_of_each_example() -> None:
    """Sentences of a document: the batch axis holds three rows an example."""
    torch.manual_seed(4)
    model = Lambda(
        lambda m, x: m.layer(x.flatten(0, 1))[1][0][0].unflatten(0, (-1, 3)), layer=nn.LSTM(D, 4, batch_first=True)
    ).double()
    assert error(model, (torch.randn(B, 3, T, D).double(),)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts(kind: str) -> None:
    torch.manual_seed(5)
    model = Recurrent(kind, "absent", D, 4, num_layers=2).double()
    for name in ("weight_ih_l0", "bias_hh_l0", "weight_hh_l1", "bias_ih_l1"):
        getattr(model.layer, name).requires_grad_(False)
    assert error(model, (sequences()[0].double(),)) < 1e-9
    for p in model.layer.parameters():
        p.requires_grad_(False)
    model.layer.weight_hh_l1.requires_grad_(True)
    assert error(model, (sequences()[0].double(),)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_one_term_a_matrix_however_long_the_sequence(kind: str) -> None:
    torch.manual_seed(6)
    model = Recurrent(kind, "absent", D, 4)
    for length in (3, 20):
        gradients = Engine(model, square).gradients((torch.randn(B, length, D),), [(1.0, None)])
        assert {name: len(terms) for name, terms in gradients.terms.items()} == dict.fromkeys(gradients.terms, 1)
    rows = explain(model, (torch.randn(B, 3, D),), square)
    names = {"tanh": "rnn_tanh", "relu": "rnn_relu"}
    assert {row.rule for row in rows} == {names.get(kind, kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_that_is_not_finite_contributes_nothing(kind: str) -> None:
    torch.manual_seed(7)
    model, x = Recurrent(kind, "trainable", D, 4), sequences()[0]
    x[2, 1, 0] = float("nan")
    found, norms = clipped_gradient(model, (x,), square, max_norm=0.1)
    rest, _ = clipped_gradient(model, (x[[0, 1, 3, 4, 5]],), square, max_norm=0.1)
    assert torch.isfinite(norms).tolist() == [i != 2 for i in range(B)]
    assert all(torch.allclose(found[name], rest[name], atol=1e-6) for name in rest)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_autocast(kind: str) -> None:
    torch.manual_seed(8)
    model, batch = Recurrent(kind, "trainable", D, 6), sequences()[:1]

    def mixed(m: Any, b: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(m, b).float()

    found, _ = clipped_gradient(model, batch, mixed, max_norm=1e9)
    exact, _ = clipped_gradient(model, batch, square, max_norm=1e9)
    assert 1e-5 < oracle.relative_error(found, exact) < 0.05  # bfloat16 was used, and no more than that went wrong
    assert all(g.dtype == torch.float32 for g in found.values())


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_packed_sequences_are_refused_with_the_fix(kind: str) -> None:
    model = Lambda(lambda m, x, n: m.layer(pack_padded_sequence(x, n, True, False))[1], layer=KINDS[kind](D, 4))

    def loss(m: Any, b: Any) -> Tensor:
        last = m(b[0], b[1].cpu())
        return (last[0] if isinstance(last, tuple) else last)[-1].square().mean(1)

    with pytest.raises(GradientError, match=r"layer\.weight_ih_l0.*PackedSequence.*pass the padded sequence and mask"):
        clipped_gradient(model, (torch.randn(B, T, D), torch.tensor([3, 5, 1, 2, 4, 5])), loss)


def test_the_fix_for_packed_sequences() -> None:
    """The last state of each length, picked from the padded sequence's outputs."""

    def loss(m: Any, b: Any) -> Tensor:
        output, _ = m.layer(b[0])
        last = output[torch.arange(len(output)), b[1] - 1]
        return F.cross_entropy(m.head(last), b[2], reduction="none")

    torch.manual_seed(9)
    layer = nn.GRU(D, 6, num_layers=2, batch_first=True)
    model = Lambda(lambda m, x: x, layer=layer, head=nn.Linear(6, K)).double()
    x, y = sequences()
    lengths = torch.tensor([3, 5, 1, 2, 4, 5])
    assert error(model, (x.double(), lengths, y), loss) < 1e-9
    packed = pack_padded_sequence(x.double(), lengths, True, False)
    exact = F.cross_entropy(model.head(layer(packed)[1][-1]), y, reduction="none")
    assert torch.allclose(exact, loss(model, (x.double(), lengths, y)))


def test_weights_from_data_are_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        weight = m.make(x[:, 0]).mean(0).view(4, D)
        return torch.rnn_tanh_cell(x[:, 1], x.new_zeros(len(x), 4), weight, m.hidden)

    model = Lambda(forward, make=nn.Linear(D, 4 * D), hidden=parameter(4, 4))
    with pytest.raises(GradientError, match="weights are computed from data"):
        clipped_gradient(model, (sequences()[0],), square)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_taken_for_one_sequence_is_refused(kind: str) -> None:
    """A matrix is an unbatched sequence to these layers: every example would start from the one before."""
    model = nn.Sequential(nn.Linear(D, D), Lambda(lambda m, x: m.layer(x)[0], layer=KINDS[kind](D, K)))
    torch.manual_seed(10)
    with pytest.raises(GradientError, match=r"mixes examples|loss of one example changes"):
        clipped_gradient(model, (torch.randn(B, D), torch.randint(0, K, (B,))), classify)
