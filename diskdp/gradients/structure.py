"""Before the first release for every new structure: who owns the rows, is anything missed, do examples mix.

Four measurements on one batch, at randomly perturbed weights (so that zero initialisations hide nothing):

- ownership: two backward passes, one with losses scaled by powers of two, assign rows to examples (`ownership`);
- completeness: Σ v_i g_i from the terms equals plain autograd's gradient of Σ v_i loss_i for random v;
- isolation: replacing some examples leaves the losses and gradients of the others as they were (`isolation`);
- state: what the forward pass writes into parameters and buffers does not depend on the examples (`state`).

They look at structure alone: examples whose numbers are not finite are replaced by others, they do not end a run.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diskdp.errors import DiskDPError, GradientError
from diskdp.gradients import batches
from diskdp.gradients.isolation import (
    DRAWS,
    DRAWS_AGAIN,
    NEGLIGIBLE,
    TOLERANCE,
    Run,
    Watch,
    exchanged,
    grads_kept,
    isolate,
    look_again,
)
from diskdp.gradients.ownership import Layout, Owner, explanations, live_rows, probe_exponents
from diskdp.gradients.planner import choose, squared_norms
from diskdp.gradients.products import kernels_of_torch
from diskdp.gradients.pullback import parameter_terms, source_terms
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.state import Snapshot
from diskdp.gradients.trace import Rules, Trace, Use


@dataclass(frozen=True)
class Settled:
    """The only layout that explains the gradients of one use, and what it was seen to explain."""

    layout: Layout
    use: tuple[str, tuple[str, ...]]  # operation and parameters
    live: Tensor  # which of an example's rows on the layout's axis ever had a gradient
    divisor: int  # greatest common one of the batch sizes at which it was seen

    @property
    def trusted(self) -> bool:
        """Whether it holds at every batch size.

        Where all rows were live, no other layout is possible. Where some were not, one that is not among the
        candidates may have agreed by chance at one size; it does not at two without a common divisor.
        """
        return self.divisor == 1 or bool(self.live.all())


@dataclass
class Structure:
    """What was established about one kind of batch: the layout of every use that only one layout explains.

    Where several layouts explain a gradient (few live examples), where rows have a gradient that had none so far, and
    where rows are picked by the data (`Trace.moves`), ownership is measured again on that batch (`Ownership`).
    """

    settled: dict[int, Settled]  # by use
    watch: Watch
    written: frozenset[str]  # what its forward pass may write in the model

    def settles(self, uses: int) -> bool:
        """Whether the first ``uses`` uses need no measurement, as far as can be said before their gradients."""
        return all(index in self.settled and self.settled[index].trusted for index in range(uses))

    def learn(self, settled: Mapping[int, Settled]) -> None:
        """Add what another batch of the kind has shown. Where it says otherwise, neither is kept."""
        for index, new in settled.items():
            old = self.settled.setdefault(index, new)
            if (old.layout, old.use, old.live.shape) != (new.layout, new.use, new.live.shape):
                del self.settled[index]
            elif old is not new:
                live, divisor = old.live | new.live, math.gcd(old.divisor, new.divisor)
                self.settled[index] = Settled(old.layout, old.use, live, divisor)

    def owner(self, use: Use, grad: Tensor, batch: int) -> Owner | None:
        """Who owns the rows of a gradient at a use; None if that has to be measured."""
        settled = self.settled.get(use.index)
        if settled is None or not settled.trusted or settled.use != (use.operation, use.targets):
            return None
        if settled.layout.copies(grad.shape, batch) != len(settled.live):
            raise GradientError(
                f"{use.describe()}: its shape does not follow the batch as it did when the model was examined, so its "
                "rows cannot be assigned to examples; keep the examples on an axis of their own",
                use.targets,
            )
        owner = Owner(settled.layout, batch)
        if batch > 1 and not settled.live.all() and (live_rows(owner, grad) & ~settled.live).any():
            return None  # another layout may agree on the rows that were seen, and not on these
        return owner


@dataclass(frozen=True)
class Seen:
    """A use whose gradient is known."""

    use: Use
    saved: Sequence[Tensor]
    grad: Tensor


@dataclass(frozen=True)
class Ownership:
    """Owners measured on one batch."""

    owned: list[tuple[Seen, Owner]]
    settled: dict[int, Settled]

    @classmethod
    def measure(cls, trace: Trace, losses_B: Tensor, exponents_B: Tensor) -> Ownership:
        """Two backward passes over one forward pass; the second with loss i scaled by 2^k_i."""
        plain: dict[int, Seen] = {}
        scaled: dict[int, Tensor] = {}

        def record(use: Use, saved: Sequence[Tensor], grad: Tensor) -> None:
            plain[use.index] = Seen(use, saved, grad)

        def record_scaled(use: Use, saved: Sequence[Tensor], grad: Tensor) -> None:
            scaled[use.index] = grad

        batch = len(losses_B)
        first = len(trace.log)
        trace.differentiate(losses_B, torch.ones_like(losses_B), record, keep_graph=True)
        recomputed = len(trace.log) - first  # checkpointed segments run again in each backward pass and count on
        trace.differentiate(losses_B, torch.exp2(exponents_B.double()).to(losses_B), record_scaled)
        owned, settled = [], {}
        for index, seen in plain.items():
            again = scaled[index + recomputed] if index >= first else scaled[index]
            if not seen.grad.any():
                continue
            if batch == 1:
                found = [Layout(0)] if seen.grad.dim() else []
            else:
                found = explanations(seen.grad, again, exponents_B)
            if not found and seen.grad.dtype == torch.float16:
                raise GradientError(
                    f"{seen.use.describe()}: gradients in float16 underflow, so that it cannot be told which example "
                    "they belong to; use bfloat16 or float32",
                    seen.use.targets,
                )
            if not found:
                raise GradientError(
                    f"{seen.use.describe()}: the gradient at its output mixes examples, so no example's contribution "
                    "can be bounded; remove what combines examples after this operation (batch statistics, a loss "
                    "over pairs, a sum over the batch), or keep the examples on one axis",
                    seen.use.targets,
                )
            owner = Owner(found[0], batch)
            owned.append((seen, owner))
            if len(found) == 1 and found[0].copies(seen.grad.shape, batch) is not None:
                what = (seen.use.operation, seen.use.targets)
                settled[index] = Settled(found[0], what, live_rows(owner, seen.grad), batch)
        return cls(owned, settled)


@dataclass(frozen=True)
class Subject:
    """What is examined: a model and its loss at one point, from one random state and one state of the model."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    parameters: Mapping[str, Tensor]
    values: Mapping[str, Tensor]  # in the parameters' place, where given
    random: RandomState
    state: Snapshot | None
    rules: Rules
    uses: tuple[tuple[str, tuple[str, ...]], ...]  # the log of the forward pass that is to be explained

    def here(self) -> dict[str, Tensor]:
        """The weights at the point."""
        return {name: self.values.get(name, p).detach() for name, p in self.parameters.items()}

    @contextlib.contextmanager
    def at(self, values: Mapping[str, Tensor], only: Container[str] | None = None) -> Iterator[Run]:
        """Evaluations at ``values``; afterwards the model is as it was (with ``only``: as far as those names go)."""
        with exchanged(self.parameters, values):
            state = Snapshot(self.model, only, self.state)
            try:
                yield Run(self.model, self.loss_fn, self.parameters, self.random, state, self.rules)
            finally:
                state.restore()


def examine(
    subject: Subject, batch: Any, known: Container[str] = (), watch: Watch | None = None, whole: bool = True
) -> Structure:
    """Establish the structure of one kind of batch near a point, or say what is wrong with it.

    Weights whose perturbation takes another path through the model than ``subject.uses``, or leaves the finite
    numbers, are examined where they are. Parameters in ``known`` have been used by other batches and may be unused
    here; ``watch`` is that of a structure that differs in shapes alone; ``whole`` says that these are all examples of a
    batch. Leaves parameters and gradients as they were; the caller restores the rest.
    """
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    with grads_kept(subject.parameters), kernels_of_torch():
        values, finite = _vantage(subject, batch, generator)
        with subject.at(values) as run:
            batch = _replaced_where(~finite, batch)
            probe = _probe(run, batch, generator)
            if bool(probe.bad_B.any()):  # finite losses, but gradients that are not
                batch = _replaced_where(probe.bad_B, batch)
                probe = _probe(run, batch, generator)
            _compare(run, batch, probe, known)
            size = len(probe.losses_B)
            draws = DRAWS if watch is None else DRAWS_AGAIN
            run.refuse_counted(batch)
            written = isolate(run, batch, size, probe.precision, generator, draws)
            settled = dict(probe.settled)
            structure = Structure(settled, watch or Watch(probe.precision), written)
            if not all(found.trusted for found in settled.values()):
                structure.learn(_settled_with_one_less(run, batch, probe, generator))
    if whole:
        structure.watch.add(size)
    return structure


def isolate_again(subject: Subject, batch: Any, structure: Structure, finite_B: Tensor, thorough: bool) -> None:
    """Whether examples are still apart; if ``thorough``, what is written is established for that size as well.

    What it picks comes from the operating system: a run's own randomness does not decide when it is looked at.
    """
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    size, watch = len(finite_B), structure.watch
    batch = _replaced_where(~finite_B, batch)
    with grads_kept(subject.parameters), kernels_of_torch():
        if not thorough:
            with subject.at(subject.here(), structure.written) as run:
                look_again(run, batch, size, watch.precision, generator)
            return
        values, _ = _vantage(subject, batch, generator)
        with subject.at(values) as run:
            probe = _probe(run, batch, generator)
            batch = _replaced_where(probe.bad_B, batch)
            structure.written |= isolate(run, batch, size, watch.precision, generator, DRAWS_AGAIN)
    watch.add(size)


def _vantage(subject: Subject, batch: Any, generator: torch.Generator) -> tuple[Mapping[str, Tensor], Tensor]:
    """Weights near the point, or at it if they would not do; which of the examples have a finite loss at it."""
    here = subject.here()
    with subject.at(here, here) as run:
        losses_B = run.plain(batch)
        finite = torch.isfinite(losses_B.detach())
    near = {name: _perturbed(value, generator) for name, value in here.items()}
    with subject.at(near, near) as run:
        trace, losses_B = run.traced(batch)
        fits = tuple(trace.log) == subject.uses and bool(torch.isfinite(losses_B.detach())[finite].all())
    return (near if fits else here), finite


def refuse_modules(model: nn.Module) -> None:
    """Refuse, before any data is seen, what is known to mix examples or to keep data where it is released."""
    for name, p in model.named_parameters():
        if p.is_complex() and p.requires_grad:
            raise GradientError(f"{name}: complex parameters cannot be trained; keep real and imaginary parts", [name])
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise GradientError(
                f"{name}: has no shape yet (a lazy module); call the model once on made-up data of the right shape "
                "before the optimizer is made",
                [name],
            )
    for name, module in model.named_modules():
        if getattr(module.get_extra_state, "__func__", None) is not nn.Module.get_extra_state:
            raise GradientError(
                f"module {name or type(module).__name__}: has an extra state of its own (get_extra_state), which would "
                "be saved with the weights whatever is in it; keep what should be saved in buffers"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise GradientError(
                f"module {name or type(module).__name__}: BatchNorm in training mode mixes the examples of a batch; "
                "replace it by GroupNorm, or call .eval() on it",
                [f"{name}.{p}" if name else p for p, _ in module.named_parameters()],
            )


@dataclass(frozen=True)
class _Probe:
    settled: Mapping[int, Settled]
    log: Sequence[object]  # the operations that used parameters
    bad_B: Tensor  # whose gradient is not finite
    losses_B: Tensor
    weights_B: Tensor
    sums: Mapping[str, Tensor]  # Σ v_i g_i from the terms
    precision: torch.dtype


def _compare(run: Run, batch: Any, probe: _Probe, known: Container[str]) -> None:
    """The terms' weighted sums against plain autograd."""
    outcome = run.outcome(batch, probe.weights_B)
    exact, tolerance = outcome.grads, TOLERANCE[probe.precision]
    if not torch.allclose(outcome.losses_B, probe.losses_B, rtol=10 * tolerance, atol=tolerance):
        raise GradientError(
            "the losses change from one evaluation to the next with the same random state, so the two points of "
            "DiSK could not share dropout masks; draw randomness from torch's, numpy's or Python's global generator"
        )
    unused = [name for name in run.parameters if name not in exact and name not in known]
    if unused:
        raise GradientError(
            f"{_listed(unused)}: trainable, but the loss does not depend on it; use it in the forward pass or "
            "freeze it with requires_grad_(False)",
            unused,
        )
    whole = torch.stack([g.double().norm() for g in exact.values()]).norm().item()
    for name, gradient in exact.items():
        mine = probe.sums.get(name)
        error = (gradient.double() - (0 if mine is None else mine.double())).norm().item()
        if not error <= tolerance * max(gradient.double().norm().item(), NEGLIGIBLE * whole):
            raise GradientError(
                f"{name}: its per-example gradients do not add up to autograd's gradient (relative error "
                f"{error / max(gradient.double().norm().item(), 1e-300):.1e}), so some use of it was not seen, "
                "or a rule of yours is wrong. Write that use with ordinary torch operations, or correct the rule",
                [name],
            )


def _probe(run: Run, batch: Any, generator: torch.Generator) -> _Probe:
    """Owners measured on one traced forward pass, and the terms' weighted sums."""
    trace, losses_B = run.traced(batch)
    uses = tuple(trace.log)
    _refuse_hidden(losses_B, run.parameters)
    _refuse_strangers(losses_B, [trace.anchor, *trace.opened, *batches.tensors(batch)], run.parameters)
    batch_size = len(losses_B)
    exponents_B = probe_exponents(batch_size, generator)
    ownership = Ownership.measure(trace, losses_B, exponents_B)
    weights_B = torch.randn(batch_size, generator=generator, dtype=torch.float64)
    collected = []
    for seen, owner in ownership.owned:
        collected += source_terms(seen.use, seen.saved, seen.grad, owner)
    dtypes = {losses_B.dtype, *trace.dtypes, *(seen.grad.dtype for seen, _ in ownership.owned)}
    precision = max(dtypes & TOLERANCE.keys(), key=lambda dtype: TOLERANCE[dtype])
    sums, bad_B = {}, torch.zeros(batch_size, dtype=torch.bool, device=losses_B.device)
    for name, terms in parameter_terms(collected).items():
        own = list(terms.values())
        bad_B |= ~torch.isfinite(squared_norms(own, choose(own)).squares_B).to(bad_B.device)
        weights = weights_B.to(losses_B.device)
        sums[name] = torch.stack([term.weighted_sum(weights) for term in own]).sum(0)
    return _Probe(ownership.settled, uses, bad_B, losses_B.detach(), weights_B, sums, precision)


def _settled_with_one_less(run: Run, batch: Any, probe: _Probe, generator: torch.Generator) -> Mapping[int, Settled]:
    """Ownership at a size that shares no divisor with the batch's; nothing if one example cannot be left out."""
    fewer = len(probe.losses_B) - 1
    try:
        trace, losses_B = run.traced(batches.select_examples(batch, fewer + 1, torch.arange(fewer)))
        if fewer < 2 or len(losses_B) != fewer or tuple(trace.log) != probe.log:
            return {}
        return Ownership.measure(trace, losses_B, probe_exponents(fewer, generator)).settled
    except (DiskDPError, RuntimeError, IndexError, ValueError, TypeError):
        return {}


def _replaced_where(bad_B: Tensor, batch: Any) -> Any:
    """The batch with the given examples replaced by others; as it is if there are no others."""
    if not bool(bad_B.any()) or bool(bad_B.all()):
        return batch
    bad, good = bad_B.nonzero().flatten(), (~bad_B).nonzero().flatten()
    return batches.replace_examples(batch, len(bad_B), bad, good[torch.arange(len(bad)) % len(good)], 0)[0]


def _perturbed(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """The parameter plus noise of 5% of its size, and at least .02."""
    scale = max(0.02, 0.05 * float(parameter.detach().double().square().mean().sqrt().nan_to_num(0.0)))
    noise = torch.randn(parameter.shape, generator=generator) * scale
    return parameter.detach() + noise.to(parameter)


def _refuse_hidden(losses_B: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """An autograd Function written in Python that takes a parameter hides that use from the trace."""
    names = {id(p): name for name, p in parameters.items()}
    for node in _graph(losses_B):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            taken = [names.get(id(getattr(parent, "variable", None))) for parent, _ in node.next_functions]
            hidden = [name for name in taken if name is not None]
            if hidden:
                raise GradientError(
                    f"{_listed(hidden)}: used by the custom autograd Function "
                    f"{type(node).__name__.removesuffix('Backward')}, which hides that use. Call it by way of "
                    "diskdp.rules.visible, or write it with ordinary torch operations",
                    hidden,
                )


def _refuse_strangers(losses_B: Tensor, allowed: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Trainable tensors other than the model's would receive gradients that are neither clipped nor noised."""
    known, names = {id(t) for t in allowed}, {id(p): name for name, p in parameters.items()}
    for node in _graph(losses_B):
        variable = getattr(node, "variable", None)
        if variable is None or id(variable) in known:
            continue
        if id(variable) in names:
            name = names[id(variable)]
            raise GradientError(
                f"{name}: used in a way that is not seen (by scripted code, or from outside a function's arguments). "
                "Write it with ordinary torch operations, and hand it to them as an argument",
                [name],
            )
        raise GradientError(
            f"the loss depends on a trainable tensor of shape {tuple(variable.shape)} by a way that is not seen; "
            "make it a parameter of the model that is used by ordinary torch operations, or detach it"
        )


def _graph(losses_B: Tensor) -> Iterator[Any]:
    """All nodes of the losses' autograd graph."""
    stack, seen = [losses_B.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [parent for parent, _ in node.next_functions]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
