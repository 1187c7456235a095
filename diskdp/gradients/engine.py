"""Per-example gradients of a loss at one or several points, as terms.

Assumes a loss function that returns one number an example. Each point costs one forward and one backward pass to the
outputs of the operations that use parameters. Every new structure is examined before anything is returned for it.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diskdp.errors import GradientError, UnusedParameterWarning
from diskdp.gradients import batches
from diskdp.gradients.buffers import HeldBuffers
from diskdp.gradients.compiled import uncompiled
from diskdp.gradients.ownership import Owner, probe_exponents
from diskdp.gradients.pullback import Key, parameter_terms, source_terms
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.rules import default_rules
from diskdp.gradients.structure import Ownership, Structure, examine, refuse_modules
from diskdp.gradients.terms import Direct, Outer, Term, combine, pairable
from diskdp.gradients.trace import Rules, Source, Trace, Use

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Point: TypeAlias = "tuple[float, Mapping[str, Tensor] | None]"

_FEW_TERMS = 4  # of one parameter: more are joined, which copies their rows


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


@dataclass(frozen=True)
class _Start:
    """What every forward pass starts from, whichever point or microbatch it serves."""

    random: RandomState
    buffers: HeldBuffers

    def restore(self) -> None:
        self.random.restore()
        self.buffers.restore()


class Engine:
    """Per-example gradients of one model under one loss function; remembers which structures it has examined."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, examined: dict[object, Structure] | None = None
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self._examined = {} if examined is None else examined
        self._accepted: set[object] = set()  # settings of the modules that were not refused
        self._families: set[object] = set()  # examined structures, lengths left open
        self._idle: dict[str, int] = {}  # for how many calls in a row a parameter has not been used
        self._used: set[str] = set()  # parameters that some examined structure uses

    @property
    def structures(self) -> int:
        """How many structures have been examined so far."""
        return len(self._examined)

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
        settings = _settings(self.model)
        if settings not in self._accepted:
            refuse_modules(self.model)
            self._accepted.add(settings)
        start = _Start(RandomState.capture(), HeldBuffers.of(self.model))
        found = []
        with uncompiled():
            for number, (_, values) in enumerate(points):
                if number > 0:
                    start.random.restore()
                try:
                    found.append(self._at(batch, parameters, values or {}, settings, start))
                finally:
                    start.buffers.restore()
        terms = _combined([point.terms for point in found], [a for a, _ in points], list(parameters))
        self._notice_idle(terms)
        zeros = {
            name: p.new_zeros((), dtype=torch.promote_types(p.dtype, torch.float32)).expand(p.shape)
            for name, p in parameters.items()
        }
        return Gradients(terms, zeros, found[0].losses_B, found[0].operations)

    def _at(
        self,
        batch: Any,
        parameters: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        settings: object,
        start: _Start,
        measure: bool = False,
    ) -> _AtPoint:
        """One point. With ``measure`` the owners of rows are measured on this very batch."""
        data = list(batches.tensors(batch))
        if any(t.is_nested for t in data):
            raise GradientError(
                "the batch holds a nested tensor, whose rows have no example axis; pad it and pass a mask"
            )
        rules = default_rules()
        trace = Trace(parameters, values, data, rules)
        versions = [t._version for t in data]
        losses_B = trace.losses(self.loss_fn, self.model, batch)
        if versions != [t._version for t in data]:
            raise GradientError("the forward pass writes into its batch; let it work on a copy (x = x.clone())")
        batch_size = len(losses_B)
        if batch_size == 0:
            return _AtPoint({}, losses_B.detach(), {})
        log = tuple(trace.log)
        key = (batches.signature(batch, batch_size), log, tuple(parameters), settings, rules.edition)
        if key not in self._examined:
            if not bool(torch.isfinite(losses_B).any()):
                return _AtPoint({}, losses_B.detach(), {})  # nobody contributes, and nothing can be learned from it
            family = (batch_size == 1, batches.kind(batch), *key[1:])
            examples = batch
            if family in self._families:
                start.buffers.restore()
                examples = self._few(batch, losses_B.detach(), parameters, values, start.random, rules, log)
            start.restore()
            found = examine(
                self.model, self.loss_fn, examples, parameters, values, start.random, rules, log, self._used
            )
            while len(self._examined) >= MAX_STRUCTURES:
                del self._examined[next(iter(self._examined))]
            self._examined[key] = found
            self._families.add(family)
            self._used.update(name for _, targets in log for name in targets)
            start.restore()
            return self._at(batch, parameters, values, settings, start)
        structure = self._examined[key]
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
                start.restore()
                return self._at(batch, parameters, values, settings, start, measure=True)
        shown = {name: "+".join(sorted(names)) for name, names in operations.items()}
        return _AtPoint(parameter_terms(collected), losses_B.detach(), shown)

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
        self,
        batch: Any,
        losses_B: Tensor,
        parameters: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        random: RandomState,
        rules: Rules,
        log: tuple[object, ...],
    ) -> Any:
        """A few of the batch's examples if they take the same path, which costs less to examine; else all of them."""
        batch_size = len(losses_B)
        finite = torch.isfinite(losses_B).nonzero().flatten()
        for count in _FEW:
            if count >= batch_size or count > len(finite):
                break
            few = batches.select_examples(batch, batch_size, finite[:count])
            if batches.signature(few, count) != batches.signature(batch, batch_size):
                continue  # some other axis has this length
            random.restore()
            trace = Trace(parameters, values, batches.tensors(few), rules)
            try:
                same = len(trace.losses(self.loss_fn, self.model, few)) == count and tuple(trace.log) == log
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


def _settings(model: nn.Module) -> tuple[tuple[bool | str, ...], ...]:
    """Flags and names that modules keep, training flags among them: they may change what the forward pass does.

    Numbers are left out: a module may count its calls.
    """
    return tuple(
        tuple(value for value in vars(module).values() if type(value) in (bool, str)) for module in model.modules()
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
