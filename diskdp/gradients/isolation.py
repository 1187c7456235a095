"""Whether the examples of a batch are worked on apart, and whether the forward pass leaves un-noised data in the model.

Measured on the model as it is, by plain autograd: replacing some examples by others leaves the losses and the
gradients of the rest, and whatever the forward pass writes into the model, as they were. So does leaving them out.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diskdp.errors import GradientError
from diskdp.gradients import batches
from diskdp.gradients.buffers import held_names
from diskdp.gradients.randomness import RandomState, WithoutDropout
from diskdp.gradients.state import Digest, Snapshot
from diskdp.gradients.trace import Rules, Trace
from diskdp.memory import out_of_memory

# Relative error of a sum over the batch that is taken for rounding; a missing use of relative size e passes with
# probability about 0.8 tolerance / e. Over the test models correct terms differed from autograd by at most 1.3e-7 of
# the whole gradient in float32, 3e-16 in float64 (6,220 comparisons each), so false alarms are far off.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Where examples are replaced, nothing that the others' gradients are summed from changes: over the test models all of
# 1,632 comparisons were equal to the last bit. What is allowed is for kernels that sum in an order of their own.
REPLACED = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
# Where they are left out, kernels may sum differently and a ReLU may fall to the other side of its edge: at most 2.3e-5
# in float32 and 3e-15 in float64, of 492 comparisons each; 4.4e-6 over WRN-16-4 and a ReLU transformer of 6 x 256. A
# batch's length, which this is to find, changes a gradient on its own scale.
LEFT_OUT = {torch.float64: 1e-7, torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 1e-1}
# A parameter whose gradient is smaller than this part of the whole is compared on that scale: a bias that a
# normalisation cancels has a gradient of rounding errors.
NEGLIGIBLE = 0.03

DRAWS, DRAWS_AGAIN = 8, 2  # random states under which a model that draws randomness is looked at, first and later
_OFTEN, _SELDOM, _EARLY = 128, 400, 1000  # batches from one look to the next on average, early and later


@dataclass
class Watch:
    """Which batch sizes examples were seen to be apart at, and when to look again.

    One for all structures that differ in shapes alone, such as the lengths of texts.
    """

    precision: torch.dtype
    sizes: set[int] = field(default_factory=set)
    _seen: int = 0
    _next: int = field(default_factory=lambda: gap(0))

    def covers(self, batch: int) -> bool:
        """Sizes looked at, and from half the smallest to twice the largest once there are two."""
        if batch < 2 or batch in self.sizes:
            return True
        return len(self.sizes) > 1 and min(self.sizes) <= 2 * batch and batch <= 2 * max(self.sizes)

    def add(self, batch: int) -> None:
        """Remember a size; one example has no others to mix with."""
        if batch > 1:
            self.sizes.add(batch)

    def is_due(self) -> bool:
        """Count a batch; whether it is one to look at again."""
        self._seen += 1
        if self._seen < self._next:
            return False
        self._next = self._seen + gap(self._seen)
        return True


def gap(seen: int) -> int:
    """Batches until the next look: random, from the operating system, so that no generator of a run is touched."""
    mean = _OFTEN if seen < _EARLY else _SELDOM
    return mean // 2 + secrets.randbelow(mean + 1)


@dataclass(frozen=True)
class Outcome:
    """What one plain evaluation came to."""

    losses_B: Tensor
    grads: Mapping[str, Tensor]  # of Σ v_i loss_i; parameters that the losses depend on
    written: Mapping[str, Digest]  # what it left in the model
    draws: bool  # whether it drew randomness


class _AsTraced(TorchFunctionMode):
    """Changes nothing, but modules that ask whether a mode is active then take the path that they take when traced.

    A frozen encoder in eval mode would else run in a fused kernel, which gives other numbers at padded positions.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Run:
    """The model at some weights, every time from the same random state and the same contents."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    parameters: Mapping[str, Tensor]
    random: RandomState
    state: Snapshot
    rules: Rules

    def reset(self) -> None:
        self.random.restore()
        self.state.restore()

    def plain(self, batch: Any) -> Tensor:
        """The losses as the model computes them on its own, without any tracing."""
        self.reset()
        return self._again(batch)

    def _again(self, batch: Any) -> Tensor:
        with torch.enable_grad(), _AsTraced():
            return batches.checked_losses(self.loss_fn(self.model, batch))

    def refuse_counted(self, batch: Any) -> None:
        """What one pass leaves in the model, a second one must not change: their number depends on the batch."""
        self.plain(batch)
        once = self.state.changed()
        if not once:
            return
        self.random.restore()
        self._again(batch)
        twice, held = self.state.changed(), held_names(self.model)
        names = [name for name in {**once, **twice} if once.get(name, "") != twice.get(name, "") and name not in held]
        if names:
            raise GradientError(
                f"{', '.join(names[:4])}: each forward pass writes it anew, and how many passes there are depends on "
                "the batch, so there would be un-noised data in the model. For running statistics set "
                "track_running_stats=False; for spectral_norm use torch.nn.utils.parametrizations; else write it "
                "between steps, from the weights alone",
                names,
            )

    def outcome(self, batch: Any, weights_B: Tensor) -> Outcome:
        """Losses, plain autograd's gradients of their weighted sum, and what was written."""
        losses_B = self.plain(batch)
        draws = self.random.moved()
        for p in self.parameters.values():
            p.grad = None
        if len(losses_B) == len(weights_B):
            with torch.enable_grad():  # reentrant checkpointing refuses autograd.grad
                (losses_B * weights_B.to(losses_B)).sum().backward()
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for p in self.parameters.values():
            p.grad = None
        dense = {name: g.to_dense() if g.is_sparse else g for name, g in grads.items()}
        return Outcome(losses_B.detach(), dense, self.state.changed(), draws)

    def traced(self, batch: Any) -> tuple[Trace, Tensor]:
        """The losses, and the trace that saw them computed."""
        self.reset()
        trace = Trace(self.parameters, {}, batches.tensors(batch), self.rules)
        return trace, trace.losses(self.loss_fn, self.model, batch)


def isolate(
    run: Run, batch: Any, batch_size: int, precision: torch.dtype, generator: torch.Generator, draws: int
) -> frozenset[str]:
    """Examples do not mix, and what is written does not depend on them; the names of what is written.

    A model that draws randomness is looked at under several random states: mixing that happens with probability p
    passes with probability (1-p)^draws.
    """
    if batch_size < 2:
        return _alone(run, batch, generator)
    order = torch.randperm(batch_size, generator=generator)
    halves = order[: batch_size // 2], order[batch_size // 2 :]
    written: set[str] = set()
    draw = False
    for kept, changed in (halves, halves[::-1]):
        weights_B = _weights(batch_size, kept, generator)
        others = [_each_by_another(kept, changed), *(_all_by_one(kept, changed, generator) for _ in range(2))]
        before = _replaced(run, batch, weights_B, kept, changed, others, precision)
        written.update(before.written)
        draw = draw or before.draws
        _left_out(run, batch, weights_B, kept, precision)
    for _ in range(draws - 1 if draw else 0):
        seed = int(torch.randint(2**62, (), generator=generator))
        drawn = replace(run, random=RandomState.seeded(seed))
        written.update(look_again(drawn, batch, batch_size, precision, generator))
    return frozenset(written)


def look_again(
    run: Run, batch: Any, batch_size: int, precision: torch.dtype, generator: torch.Generator
) -> frozenset[str]:
    """The same in short: one half replaced, under one random state. Two evaluations."""
    order = torch.randperm(batch_size, generator=generator)
    kept, changed = order[: batch_size // 2], order[batch_size // 2 :]
    weights_B = _weights(batch_size, kept, generator)
    one = bool(torch.rand((), generator=generator) < 0.5)
    by = _all_by_one(kept, changed, generator) if one else _each_by_another(kept, changed)
    return frozenset(_replaced(run, batch, weights_B, kept, changed, [by], precision).written)


def _replaced(
    run: Run,
    batch: Any,
    weights_B: Tensor,
    kept: Tensor,
    changed: Tensor,
    others: Sequence[Tensor],
    precision: torch.dtype,
) -> Outcome:
    """Replace ``changed`` by each of the ``others``. Nobody else may notice, and the model may keep nothing of it."""
    batch_size = len(weights_B)
    before = run.outcome(batch, weights_B)
    if len(before.losses_B) != batch_size:
        raise _unsteady()
    for by in others:
        _unnoticed(run, batch, before, weights_B, kept, changed, by, precision)
    return before


def _unnoticed(
    run: Run,
    batch: Any,
    before: Outcome,
    weights_B: Tensor,
    kept: Tensor,
    changed: Tensor,
    by: Tensor,
    precision: torch.dtype,
) -> None:
    """Raise GradientError if ``kept`` notice that ``by`` stand in the places of ``changed``."""
    batch_size = len(weights_B)
    own = kept.to(before.losses_B.device)
    complaint = ""
    for axis in (0, 1):  # tensors whose first two axes both have the batch's length leave a doubt
        other, count = batches.replace_examples(batch, batch_size, changed, by, axis)
        if count == 0:
            raise GradientError(
                "no part of the batch could be told apart by example, so it cannot be checked that examples do not "
                "mix; let the batch be tensors, or mappings, sequences or objects of tensors"
            )
        try:
            after = run.outcome(other, weights_B)
        except (RuntimeError, IndexError, ValueError) as error:
            if out_of_memory(error):
                raise
            if axis == 0:
                continue
            raise GradientError(
                f"the forward pass fails when examples of the batch are replaced by others of it ({error}), so it "
                "cannot be checked that examples do not mix; let every row of the batch's tensors belong to one "
                "example (no offsets into others, no order of lengths)"
            ) from error
        if len(after.losses_B) != batch_size:
            raise _unsteady()
        refuse_written(before.written, after.written, run.model)
        if not _same(before.losses_B[own], after.losses_B[own], 1e-5, before.losses_B):
            complaint = "loss"
        elif not agree(before.grads, after.grads, REPLACED[precision]):
            complaint = "gradient"
        else:
            return
    raise _mixing(complaint, "are replaced")


def _each_by_another(kept: Tensor, changed: Tensor) -> Tensor:
    return kept[torch.arange(len(changed)) % len(kept)]


def _all_by_one(kept: Tensor, changed: Tensor, generator: torch.Generator) -> Tensor:
    """A sum over the batch, of whole numbers for instance, that two halves happen to share tells them apart here."""
    one = torch.randint(len(kept), (1,), generator=generator)
    return kept[one].expand(len(changed))


def _left_out(run: Run, batch: Any, weights_B: Tensor, kept: Tensor, precision: torch.dtype) -> None:
    """Leave out all but ``kept``, which may not notice either; without dropout, whose masks would be others."""
    with WithoutDropout():
        before = run.outcome(batch, weights_B)
        if before.draws:
            return  # other randomness, which cannot be stilled
        try:
            alone = run.outcome(batches.select_examples(batch, len(weights_B), kept), weights_B[kept])
        except GradientError:
            raise
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if out_of_memory(error):
                raise
            return  # something of the batch's length that is not an example axis: this probe says nothing
    if len(alone.losses_B) != len(kept):
        return
    refuse_written(before.written, alone.written, run.model)
    tolerance = max(1e-2, TOLERANCE[precision])
    if not _same(before.losses_B[kept.to(before.losses_B.device)], alone.losses_B, tolerance, before.losses_B):
        raise _mixing("loss", "are left out")
    if not agree(before.grads, alone.grads, LEFT_OUT[precision]):
        raise _mixing("gradient", "are left out")


def _alone(run: Run, batch: Any, generator: torch.Generator) -> frozenset[str]:
    """One example has no others to mix with; whether what is written depends on it is seen on made-up data."""
    written = run.outcome(batch, torch.zeros(1)).written
    if written:
        try:
            after = run.outcome(batches.scrambled(batch, generator), torch.zeros(1)).written
        except (RuntimeError, IndexError, ValueError, TypeError):
            after = {}
        refuse_written(written, after, run.model)
    return frozenset(written)


def _weights(batch_size: int, kept: Tensor, generator: torch.Generator) -> Tensor:
    """Random for those who are kept, 0 for the others."""
    weights_B = torch.zeros(batch_size, dtype=torch.float64)
    weights_B[kept] = torch.randn(len(kept), generator=generator, dtype=torch.float64)
    return weights_B


def agree(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float) -> bool:
    """Whether two gradients are the same up to rounding, each parameter on its scale."""
    return disagreement(a, b) <= tolerance


def disagreement(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest error of a parameter, relative to its gradient or a small part of the whole.

    What is not finite says nothing: it is not counted.
    """
    unequal = [name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name])]
    if not unequal:  # as it mostly is: what was replaced has weight 0
        return 0.0
    sizes = {name: g.double().norm().item() for name, g in a.items()}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    worst = 0.0
    for name in unequal:
        mine, other = (g[name].double() if name in g else torch.zeros(()) for g in (a, b))
        error = (mine - other.to(mine.device)).norm().item()
        if 0 < error < float("inf"):
            worst = max(worst, error / max(sizes.get(name, 0.0), NEGLIGIBLE * whole, 1e-300))
    return worst


def refuse_written(before: Mapping[str, Digest], after: Mapping[str, Digest], model: nn.Module) -> None:
    """What the model keeps of a forward pass must be the same for other data."""
    names = [name for name in {**before, **after} if before.get(name, "") != after.get(name, "")]
    if names:
        raise GradientError(written_message(names, model), names)


def written_message(names: list[str], model: nn.Module) -> str:
    kind = "buffer" if names[0] in dict(model.named_buffers(remove_duplicate=False)) else "parameter"
    rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"{kind} {names[0]}{rest} is computed from the batch, or written at a time that could not be examined: there "
        "may be un-noised data in the model. Set track_running_stats=False, put that module in eval mode, initialise "
        "it on public or made-up data before, or keep what is computed out of the model; do not release these weights"
    )


def _same(a: Tensor, b: Tensor, tolerance: float, scale: Tensor) -> bool:
    """Equal up to rounding, on the scale of all losses."""
    size = float(scale.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * 0.1 * size, equal_nan=True)


def _mixing(what: str, how: str) -> GradientError:
    return GradientError(
        f"the {what} of one example changes when other examples of the batch {how}, so one example's data reaches "
        "another's gradient; remove what looks across the batch (batch statistics, contrastive terms, normalisation "
        "of the inputs over the batch, division by the batch's length, hooks that do so to gradients)"
    )


def _unsteady() -> GradientError:
    return GradientError(
        "the number of losses changes from one evaluation to the next with the same random state; loss_fn must return "
        "one loss an example, of the batch that it is given"
    )


@contextlib.contextmanager
def exchanged(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """The parameters hold ``values``' tensors inside, and the very tensors they held before afterwards."""
    held = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = values[name]
        yield
    finally:
        for name, p in parameters.items():
            p.data = held[name]


@contextlib.contextmanager
def grads_kept(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters without gradients inside, and with the gradients they had before afterwards."""
    held = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        yield
    finally:
        for name, p in parameters.items():
            p.grad = held[name]
