"""Nothing of the data may get into parameters and buffers but by the noised step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import DiSK, Plan, clipped_gradient, privatize
from diskdp.errors import GradientError
from diskdp.gradients import engine as engine_module
from diskdp.gradients import isolation
from diskdp.gradients.state import Marks, Snapshot, differing, digest, digests
from tests.models import Lambda, classify

torch.set_num_threads(1)
N = 60


def train(model: nn.Module, steps: int = 4, batch_size: int = 10) -> None:
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(N, 5), torch.randint(0, 3, (N,)))
    plan = Plan(dataset_size=N, batch_size=batch_size, steps=steps, noise_multiplier=1.0, delta=1e-3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = privatize(model, optimizer, plan, loss_fn=classify, filter=DiSK())
    for batch in private.loader(dataset):
        private.step(batch)


class Centre(nn.Module):
    """A frozen parameter follows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.centre = nn.Linear(5, 3), nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.copy_(x[0])
        return self.l(x)


class Codebook(nn.Module):
    """Vector quantisation: the codes are averages of the data, written past autograd's eyes."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.codes = nn.Linear(5, 3), nn.Embedding(4, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes.weight).argmin(1)
        codes = self.codes.weight.data.clone()
        codes[nearest] = 0.5 * codes[nearest] + 0.5 * x.detach()
        self.codes.weight.data = codes
        return self.l(x)


class ActNorm(nn.Module):
    """A trainable bias is set from the first batch, once."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.bias, self.init = nn.Linear(5, 3), nn.Parameter(torch.zeros(5)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.init:
            self.bias.data.copy_(-x.mean(0))
            self.init = True
        return self.l(x + self.bias)


class Empty(nn.Module):
    """A buffer that is filled by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("b", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.b is None:
            self.b = x.mean(0)
        return self.l(x - self.b)


class Added(nn.Module):
    """A buffer that is registered by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "b"):
            self.register_buffer("b", x.mean(0))
        return self.l(x)


class Trainable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        with torch.no_grad():
            self.l.bias.add_(x.mean(0)[:3])
        return y


class Counted(nn.Module):
    """How many examples were drawn is data too."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.l(x)


class InBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("slope", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        if y.requires_grad:
            y.register_hook(self.keep)
        return y

    def keep(self, gradient: Tensor) -> None:
        self.slope.copy_(gradient.mean(0))


@pytest.mark.parametrize("kind", [Centre, Codebook, ActNorm, Empty, Added, Trainable, Counted])
def test_data_written_into_the_model(kind: type[nn.Module]) -> None:
    """Refused before training, and the model is left as it was."""
    torch.manual_seed(0)
    model = kind()
    before = copy.deepcopy(model.state_dict())
    held = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(GradientError, match="un-noised data in the model"):
        train(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert held == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_data_written_into_the_model_by_the_backward_pass() -> None:
    with pytest.raises(GradientError, match=r"slope.*un-noised data in the model"):
        train(InBackward())


def test_data_written_at_another_scale_of_batches() -> None:
    """Past the version counter, at a size that only the batches of training have."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if len(x) > 8:
            m.frozen.data.copy_(x[0])
        return m.l(x)

    for batch_size in (10, 20):
        model = Lambda(forward, l=nn.Linear(5, 3), frozen=nn.Parameter(torch.zeros(5), requires_grad=False))
        with pytest.raises(GradientError, match="frozen is computed from the batch"):
            train(model, batch_size=batch_size)
    assert not model.get_parameter("frozen").any()  # at another power of two the first forward pass is undone


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_part_and_odd_tensors_may_be_there() -> None:
    scripted = torch.jit.script(nn.Linear(5, 6))
    for p in scripted.parameters():
        p.requires_grad = False
    model = Lambda(lambda m, x: m.l(m.s(x)), l=nn.Linear(6, 3), s=scripted)
    model.register_buffer("none", torch.zeros(0, 3))
    model.register_buffer("eighths", torch.ones(3).to(torch.float8_e5m2))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.ones(3))
    train(model)


def test_data_written_by_a_batch_of_one() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if len(x) == 1:
            m.b.copy_(x[0])
        return m.l(x)

    model = Lambda(forward, l=nn.Linear(5, 3))
    model.register_buffer("b", torch.zeros(5))
    with pytest.raises(GradientError, match="b is computed from the batch"):
        train(model)


class Later(nn.Module):
    """Writes from some call on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.l, self.how, self.calls = nn.Linear(5, 3), how, 0
        self.register_buffer("b", torch.zeros(5))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 120:
            if self.how == "buffer":
                self.b = x.detach().mean(0)
            elif self.how == "in place":
                self.b.copy_(x.detach().mean(0))
            elif self.how == "parameter":
                self.frozen.data = x.detach().mean(0)
            elif self.how == "weight":
                with torch.no_grad():
                    self.l.bias.add_(x.mean(0)[:3])
            else:
                self.frozen.data.copy_(x.detach().mean(0))
        return self.l(x)


@pytest.mark.parametrize("how", ["buffer", "in place", "parameter", "weight"])
def test_data_written_later(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "gap", lambda seen: 10**9)  # a look would find it too, and say so otherwise
    model = Later(how)
    with pytest.raises(GradientError, match="un-noised data in the model"):
        train(model, 150)
    assert 120 < model.calls < 130


def test_data_written_later_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.data` leaves the version counter: found by the spot checks, here at every step."""
    monkeypatch.setattr(engine_module, "SPOT_CHECKS", 1)
    monkeypatch.setattr(isolation, "gap", lambda seen: 10**9)
    model = Later("data")
    with pytest.raises(GradientError, match=r"frozen.*un-noised data in the model"):
        train(model, 150)
    assert 120 < model.calls < 130


def test_data_written_once_while_the_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "gap", lambda seen: 1)
    for call in range(100, 106):  # a look has three forward passes, the step itself one more

        def forward(m: Any, x: Tensor, call: int = call) -> Tensor:
            m.calls += 1
            if m.calls == call:
                m.b.copy_(x[0])
            return m.l(x)

        model = Lambda(forward, l=nn.Linear(5, 3))
        model.calls = 0
        model.register_buffer("b", torch.zeros(5))
        batch = torch.randn(8, 5), torch.randint(0, 3, (8,))
        with pytest.raises(GradientError, match="un-noised data in the model"):
            [clipped_gradient(model, batch, classify) for _ in range(50)]


def test_spot_checks_come_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = Later("data"), 0

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return digests(*args)

    monkeypatch.setattr(engine_module, "digests", counting)
    monkeypatch.setattr(model, "calls", -(10**6))
    train(model, 300)
    assert counted % 2 == 0
    assert 2 * 4 <= counted <= 2 * 45  # 19 expected


class Lazy(nn.Module):
    """A constant that is made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(5.0).cos()
        return self.l(x * self.table)


def test_what_does_not_depend_on_the_data_may_be_written() -> None:
    torch.manual_seed(0)
    model = Lazy()
    train(model, 3)
    assert torch.equal(model.table, torch.arange(5.0).cos())
    spectral = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))
    before = spectral[0].parametrizations.weight[0]._u.clone()
    train(spectral, 3)
    assert not torch.equal(before, spectral[0].parametrizations.weight[0]._u)


class Teacher(nn.Module):
    """An average of the weights that moves with every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.teacher = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.l.parameters()):
                mine.lerp_(other, 0.1)
        return self.l(x) + self.teacher(x)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x)


@pytest.mark.parametrize("kind", [Teacher, Calls])
def test_how_many_passes_there_were_is_data(kind: type[nn.Module]) -> None:
    """A batch decides how many microbatches it has, and an empty one has none."""
    with pytest.raises(GradientError, match="each forward pass writes it anew"):
        train(kind())


class Clamped(nn.Module):
    """Weights that are held in a range where they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.l.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.l.bias.clamp_(-0.1, 0.1)
        return self.l(x)


def test_weights_may_be_held_in_a_range() -> None:
    torch.manual_seed(0)
    train(Clamped(), 20)


def test_batches_that_teach_nothing_are_no_writes() -> None:
    """All losses not finite, or no example: whatever was written is undone, and nobody is blamed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))
    bad, good = torch.full((6, 5), float("nan")), torch.randn(6, 5)
    labels = torch.zeros(6, dtype=torch.long)
    before = copy.deepcopy(model.state_dict())
    for x in (bad, bad[:0]):
        clipped_gradient(model, (x, labels[: len(x)]), classify)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    clipped_gradient(model, (good, labels), classify)
    for x in (bad, bad[:0], torch.cat([bad, bad])):
        clipped_gradient(model, (x, labels.repeat(2)[: len(x)]), classify)


def test_an_extra_state_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 1}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(GradientError, match="get_extra_state"):
        train(nn.Sequential(nn.Linear(5, 4), Extra(4, 3)))


def test_a_lazy_module_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(GradientError, match=r"0\.weight: has no shape yet.*made-up data"):
        train(model)
    with pytest.raises(GradientError, match=r"0\.weight: has no shape yet"):
        clipped_gradient(model, (torch.randn(4, 5), torch.zeros(4, dtype=torch.long)), classify)


@pytest.mark.parametrize("size", [3, 5000, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.cfloat])
def test_digests_see_every_bit(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (size, 2)).to(dtype)
    same = digest(tensor)
    assert digest(tensor.clone()) == same
    assert digest(tensor.t().contiguous().t()) == same
    assert digest(torch.cat([tensor[:1], tensor])[1:]) == same
    assert digest(tensor.view(2, size)) != same
    for row in (0, size // 2, size - 1):
        changed = tensor.clone()
        changed[row, 1] = ~changed[row, 1] if dtype == torch.bool else changed[row, 1] + 1
        assert digest(changed) != same


def test_digests_see_rows_change_places() -> None:
    codes = torch.randn(300, 128)
    assert digest(codes) != digest(codes.flip(0))


def test_marks_and_digests_name_what_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    marks, before = Marks.take(model, {}), digests(model, [])
    assert not marks.changed(model)
    model[1].running_mean.add_(1)
    model[0].weight.data = torch.ones(2, 3)
    assert marks.changed(model) == {"1.running_mean", "0.weight"}
    model[0].bias.data.add_(1)
    assert marks.changed(model) == {"1.running_mean", "0.weight"}
    changed = differing(before, digests(model, []))
    assert changed == {("1.running_mean", 0), ("0.weight", 0), ("0.bias", 0)}
    marks = Marks.take(model, {})
    model[1].running_var = None
    assert marks.changed(model)


def test_a_snapshot_puts_everything_back() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before, tensors = copy.deepcopy(model.state_dict()), [*model.parameters(), *model.buffers()]
    snapshot = Snapshot(model)
    assert not snapshot.changed()
    model[0].weight.data = torch.ones(7)
    model[0].bias.data.add_(1)
    model[1].running_mean = torch.ones(2)
    model[1].num_batches_tracked += 1
    model[1].running_var = None
    model[1].register_buffer("new", torch.ones(1))
    assert snapshot.changed().keys() == {
        *("0.weight", "0.bias", "1.running_mean", "1.num_batches_tracked", "1.running_var", "1.new")
    }
    snapshot.restore()
    assert not snapshot.changed()
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()]))
