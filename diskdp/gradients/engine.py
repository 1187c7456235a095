"""Per-example gradients of a loss at one or several points, as terms.

Assumes a loss function that returns one number an example. Each point costs one forward and one backward pass to the
outputs of the operations that use parameters. Every new structure is examined before anything is returned for it.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diskdp.errors import GradientError, UnusedParameterWarning
from diskdp.gradients import batches
from diskdp.gradients.buffers import HeldBuffers
from diskdp.gradients.compiled import uncompiled
from diskdp.gradients.isolation import Watch, written_message
from diskdp.gradients.ownership import Owner, probe_exponents
from diskdp.gradients.pullback import Key, parameter_terms, source_terms
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.rules import default_rules
from diskdp.gradients.settings import settings
from diskdp.gradients.state import Marks, Snapshot, differing, digests
from diskdp.gradients.structure import Ownership, Structure, Subject, examine, isolate_again, refuse_modules
from diskdp.gradients.terms import Direct, Outer, Term, combine, pairable
from diskdp.gradients.trace import Rules, Source, Trace, Use

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Point: TypeAlias = "tuple[float, Mapping[str, Tensor] | None]"

_FEW_TERMS = 4  # of one parameter: more are joined, which copies their rows


SPOT_CHECKS = 16  # one call in so many, at random, compares every bit of the model before and after
# A structure whose like was examined on a whole batch, at other lengths, is examined on so few examples.
_FEW = (4, 5, 7)
# A parameter that no microbatch has used for so long is moved by noise alone, most likely by mistake.
IDLE_CALLS = 100
MAX_STRUCTURES = 1024  # remembered: about 30 kB each for a small transformer


@dataclass(frozen=True)
class Gradients:
    """Per-example gradients of Σ_k a_k loss at point k: for each trainable parameter the terms that sum to them."""

    terms: dict[str, list[Term]]
    zeros: Mapping[str, Tensor]  # what a parameter without terms contributes; no memory
    losses_B: Tensor  # at the first point
    operations: Mapping[str, str]  # the operations that used each parameter, for display


@dataclass(frozen=True)
class _AtPoint:
    terms: dict[str, dict[Key, Term]]
    losses_B: Tensor
    operations: Mapping[str, str]
    written: frozenset[str] = frozenset()  # what its forward pass may write in the model


@dataclass
class Examined:
    """What is known about one model under one loss function."""

    structures: dict[object, Structure] = field(default_factory=dict)
    kinds: set[object] = field(default_factory=set)  # of batches whose first forward pass was seen to write nothing
    families: set[object] = field(default_factory=set)  # examined structures, lengths left open
    watches: dict[object, Watch] = field(default_factory=dict)  # by everything but the shapes of the batch

    @property
    def written(self) -> frozenset[str]:
        return frozenset(name for structure in self.structures.values() for name in structure.written)


@dataclass(frozen=True)
class _Place:
    """One point, and what is the same at all points of a call."""

    parameters: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    settings: object
    random: RandomState
    rules: Rules


class Engine:
    """Per-example gradients of one model under one loss function; remembers which structures it has examined."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, examined: Examined | None = None) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self._examined = Examined() if examined is None else examined
        self._accepted: set[object] = set()  # settings of the modules that were not refused
        self._idle: dict[str, int] = {}  # for how many calls in a row a parameter has not been used
        self._used: set[str] = set()  # parameters that some examined structure uses
        self.examinations = 0  # of new structures, and of known ones again: each takes time and memory once

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by name, a tied one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()  # only the losses are differentiated
    def gradients(self, batch: Any, points: Sequence[Point]) -> Gradients:
        """Terms of the combined per-example gradients; coefficients may be any numbers."""
        parameters = self.parameters()
        if not parameters:
            raise GradientError("the model has no trainable parameter; set requires_grad_(True) on what should train")
        if not points:
            raise GradientError("no point was given: at least one coefficient must differ from 0")
        for _, values in points:
            _check_values(values or {}, parameters)
        now = settings(self.model)
        if now not in self._accepted:
            refuse_modules(self.model)
            self._accepted.add(now)
        random, buffers, rules = RandomState.capture(), HeldBuffers.of(self.model), default_rules()
        others = [values or {} for _, values in points]
        spot = secrets.randbelow(SPOT_CHECKS) == 0
        before = digests(self.model, others) if spot else {}
        found = []
        with uncompiled():
            for number, (_, values) in enumerate(points):
                if number > 0:
                    random.restore()
                try:
                    found.append(self._at(batch, _Place(parameters, values or {}, now, random, rules)))
                finally:
                    buffers.restore()
        if spot:
            changed = differing(before, digests(self.model, others))
            self._refuse_writes({name for name, _ in changed}.difference(*(point.written for point in found)))
        terms = _combined([point.terms for point in found], [a for a, _ in points], list(parameters))
        self._notice_idle(terms)
        zeros = {
            name: p.new_zeros((), dtype=torch.promote_types(p.dtype, torch.float32)).expand(p.shape)
            for name, p in parameters.items()
        }
        return Gradients(terms, zeros, found[0].losses_B, found[0].operations)

    def _at(self, batch: Any, place: _Place, measure: bool = False, isolated: bool = False) -> _AtPoint:
        """One point. ``measure``: owners of rows are measured on this very batch; ``isolated``: it was looked at."""
        kind = (place.settings, tuple(place.parameters), batches.kind(batch))
        known = kind in self._examined.kinds
        only = self._examined.written if known else None
        state = Snapshot(self.model, only) if only or not known else None
        marks = Marks.take(self.model, place.values)
        try:
            point = self._established(batch, place, kind, state, marks, measure, isolated)
            if point is not None:
                self._refuse_writes(marks.changed(self.model) - point.written)
        except BaseException:
            if state is not None:
                state.restore()
            raise
        if point is None:  # something was learned: now with that
            self.examinations += 1
            if known:  # else everything is put back
                self._refuse_writes(marks.changed(self.model) - self._examined.written)
            if state is not None:
                state.restore()
                del state  # a copy of the model
            place.random.restore()
            return self._at(batch, place, measure, isolated=True)
        return point

    def _established(
        self,
        batch: Any,
        place: _Place,
        kind: object,
        state: Snapshot | None,
        marks: Marks,
        measure: bool,
        isolated: bool,
    ) -> _AtPoint | None:
        """One forward and backward pass; None, and nothing else, if that batch had to be examined first."""
        parameters, structures = place.parameters, self._examined.structures
        data = list(batches.tensors(batch))
        if any(t.is_nested for t in data):
            raise GradientError(
                "the batch holds a nested tensor, whose rows have no example axis; pad it and pass a mask"
            )
        trace = Trace(parameters, place.values, data, place.rules)
        versions = [t._version for t in data]
        losses_B = trace.losses(self.loss_fn, self.model, batch)
        if versions != [t._version for t in data]:
            raise GradientError("the forward pass writes into its batch; let it work on a copy (x = x.clone())")
        batch_size = len(losses_B)
        log, operations = tuple(trace.log), frozenset(trace.path)
        path = (log, operations, tuple(parameters), place.settings, place.rules.edition)
        key = (batches.signature(batch, batch_size), *path)
        first = kind not in self._examined.kinds
        if batch_size == 0 or (key not in structures and not bool(torch.isfinite(losses_B).any())):
            if state is not None:  # nobody contributes, and nothing can be learned from it
                state.restore()
            undone = frozenset(marks.changed(self.model)) if first else self._examined.written
            return _AtPoint({}, losses_B.detach(), {}, undone)
        written: set[str] = set()  # by this forward pass alone; after the backward pass the marks are looked at again
        if first and state is not None:
            written = set(state.changed())
        elif key not in structures:
            written = marks.changed(self.model)
        rules = place.rules
        subject = Subject(self.model, self.loss_fn, parameters, place.values, place.random, state, rules, log)
        if key not in structures:
            examples, family = batch, (batch_size == 1, batches.family(batch), *path)
            finite_B = torch.isfinite(losses_B)
            del trace, losses_B
            if state is not None:
                state.restore()
            if family in self._examined.families:
                examples = self._few(batch, finite_B, place, log, operations)
                if state is not None:
                    state.restore()
            place.random.restore()
            whole = examples is batch
            found = examine(subject, examples, self._used, self._examined.watches.get(path), whole)
            if not whole:  # nor may the others notice each other
                isolate_again(subject, batch, found, finite_B, thorough=False)
                found.watch.add(batch_size)
            self._refuse_writes(written - found.written)
            while len(structures) >= MAX_STRUCTURES:
                del structures[next(iter(structures))]
            structures[key] = found
            self._examined.families.add(family)
            self._examined.watches[path] = found.watch
            self._examined.kinds.add(kind)
            self._used.update(name for _, targets in subject.uses for name in targets)
            return None
        structure = structures[key]
        if not isolated and batch_size > 1:
            thorough = not structure.watch.covers(batch_size) or not written <= structure.written
            due, finite_B = structure.watch.is_due(), torch.isfinite(losses_B)
            if (due or thorough) and bool(finite_B.any()):
                del trace, losses_B
                if state is not None:
                    state.restore()
                isolate_again(subject, batch, structure, finite_B, thorough)
                self._refuse_writes(written - structure.written)
                self._examined.kinds.add(kind)
                return None
        self._refuse_writes(written - structure.written)
        self._examined.kinds.add(kind)
        return self._differentiated(batch, place, state, structure, trace, losses_B, measure)

    def _differentiated(
        self,
        batch: Any,
        place: _Place,
        state: Snapshot | None,
        structure: Structure,
        trace: Trace,
        losses_B: Tensor,
        measure: bool,
    ) -> _AtPoint:
        """The backward pass: every use's terms, with owners that are known or measured."""
        batch_size = len(losses_B)
        collected: list[tuple[Key, Source, Term]] = []
        operations: dict[str, set[str]] = {}

        def take(use: Use, saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> None:
            collected.extend(source_terms(use, saved, grad, owner))
            for name in use.targets:
                operations.setdefault(name, set()).add(use.operation)

        moving = trace.moves(batch_size)
        if measure or moving or not structure.settles(len(trace.log)):
            exponents_B = probe_exponents(batch_size, torch.Generator().manual_seed(secrets.randbits(63)))
            ownership = Ownership.measure(trace, losses_B, exponents_B)
            for seen, owner in ownership.owned:
                settled = None if moving else structure.owner(seen.use, seen.grad, batch_size)
                take(seen.use, seen.saved, seen.grad, settled or owner)
            if not moving:
                structure.learn(ownership.settled)
        else:
            unsettled = []

            def sink(use: Use, saved: Sequence[Tensor], grad: Tensor) -> None:
                owner = structure.owner(use, grad, batch_size)
                if owner is not None:
                    take(use, saved, grad, owner)
                elif grad.any():  # in a segment that checkpointing computes again
                    unsettled.append(use)

            trace.differentiate(losses_B, torch.ones_like(losses_B), sink)
            if unsettled:
                if state is not None:
                    state.restore()
                place.random.restore()
                return self._at(batch, place, measure=True, isolated=True)
        shown = {name: "+".join(sorted(names)) for name, names in operations.items()}
        return _AtPoint(parameter_terms(collected), losses_B.detach(), shown, structure.written)

    def _refuse_writes(self, names: set[str]) -> None:
        """What was written and was not established to be the same whatever the examples are."""
        if names:
            raise GradientError(written_message(sorted(names), self.model), sorted(names))

    def _notice_idle(self, terms: Mapping[str, Sequence[Term]]) -> None:
        if not any(terms.values()):  # an empty batch
            return
        self._idle = {name: 0 if own else self._idle.get(name, 0) + 1 for name, own in terms.items()}
        idle = [name for name, calls in self._idle.items() if calls == IDLE_CALLS]
        if idle:
            warnings.warn(
                f"{', '.join(idle[:4])}: not used by any of the last {IDLE_CALLS} microbatches, so noise alone moves "
                "it; freeze it with requires_grad_(False), or undo what took it out of the forward pass (merged or "
                "disabled adapters?)",
                UnusedParameterWarning,
                stacklevel=2,
            )

    def _few(
        self, batch: Any, finite_B: Tensor, place: _Place, log: tuple[object, ...], operations: frozenset[object]
    ) -> Any:
        """A few of the batch's examples if they take the same path, which costs less to examine; else all of them."""
        batch_size, finite = len(finite_B), finite_B.nonzero().flatten()
        for count in _FEW:
            if count >= batch_size or count > len(finite):
                break
            few = batches.select_examples(batch, batch_size, finite[:count])
            if batches.signature(few, count) != batches.signature(batch, batch_size):
                continue  # some other axis has this length
            place.random.restore()
            trace = Trace(place.parameters, place.values, batches.tensors(few), place.rules)
            try:
                same = len(trace.losses(self.loss_fn, self.model, few)) == count
                same = same and tuple(trace.log) == log and trace.path == operations
            except (GradientError, RuntimeError, IndexError, ValueError, TypeError):
                break  # something of the batch's length that is not an example axis
            if same:
                return few
            break
        return batch


def _check_values(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Names and shapes of a point's values must be those of trainable parameters."""
    for name, value in values.items():
        if name not in parameters:
            raise GradientError(
                f"points: {name!r} is no trainable parameter of the model; the names are those of "
                f"model.named_parameters(), for example {next(iter(parameters))!r}"
            )
        if value.shape != parameters[name].shape:
            raise GradientError(
                f"points: {name} has shape {tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}"
            )


def _combined(
    points: Sequence[dict[str, dict[Key, Term]]], coefficients: Sequence[float], names: Sequence[str]
) -> dict[str, list[Term]]:
    """The terms of each parameter, uses paired between the points.

    Takes the terms out of ``points``: a factor that has been combined leaves its memory to the next.
    """
    result: dict[str, list[Term]] = {}
    for name in names:
        uses = [point.pop(name, {}) for point in points]
        terms: list[Term] = []
        for key in dict.fromkeys(key for point in uses for key in point):
            seen = [(point.pop(key), a) for point, a in zip(uses, coefficients) if key in point]
            together = [term for term, _ in seen]
            if len(seen) == len(points) and pairable(together):
                terms += combine(together, coefficients)
            else:  # another path was taken at some point: nothing to pair with
                for term, a in seen:
                    terms += combine([term], [a])
            del seen, together
        result[name] = _with_joined_rows(_with_one_direct(terms))
    return result


def _with_one_direct(terms: list[Term]) -> list[Term]:
    direct = [t.grads for t in terms if isinstance(t, Direct)]
    if len(direct) < 2:
        return terms
    total = direct[0].clone()
    for grads in direct[1:]:
        total += grads
    return [Direct(total), *(t for t in terms if not isinstance(t, Direct))]


def _with_joined_rows(terms: list[Term]) -> list[Term]:
    """One term of all rows, where a layer ran at every time step: a norm takes its terms in pairs."""
    groups: dict[float, list[Outer]] = {}
    for term in terms:
        if isinstance(term, Outer) and not term.one_hot:
            groups.setdefault(term.scale, []).append(term)
    joined: list[Term] = []
    for scale, group in groups.items():
        if len(group) > _FEW_TERMS:
            left, right = torch.cat([t.left for t in group], 1), torch.cat([t.right for t in group], 1)
            joined.append(Outer(left, right, group[0].rows, scale))
    done = {term.scale for term in joined if isinstance(term, Outer)}
    return joined + [t for t in terms if not isinstance(t, Outer) or t.one_hot or t.scale not in done]
