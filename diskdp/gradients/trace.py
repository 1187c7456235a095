"""Seeing every use of a parameter at the operation that uses it.

`Trace` is a torch function mode, active while the loss is computed and while it is differentiated. Wherever a
trainable parameter meets data it puts the parameter's value at the wanted point in its place, detached, and taps the
result: in the backward pass the tap learns the gradient at the operation's output, which together with the
operation's input is the per-example gradient (a `Use`). Tensors computed from parameters alone become `Source`s of
their own, with an ordinary autograd graph back to the parameters. Nothing is written on the model.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diskdp.errors import GradientError
from diskdp.gradients import batches
from diskdp.gradients.ownership import Owner
from diskdp.gradients.terms import Direct, Term

Build: TypeAlias = Callable[[Sequence[Tensor], Tensor, Owner], "list[tuple[Source, Term]]"]
"""(saved inputs, gradient at the output, who owns its rows) -> a term for each source used."""


@dataclass(frozen=True, eq=False)
class Source:
    """A parameter, or a tensor computed from parameters alone, at one point."""

    name: str
    value: Tensor  # what operations compute with: detached
    node: Tensor  # the same numbers, with an autograd graph back to the parameters' leaves
    leaves: Mapping[str, Tensor]  # the parameters it was computed from
    base: Source | None = None  # the source of which this is a view ...
    view: str = "other"  # ... of this kind: "same", "transpose", "rows", "broadcast" or "other"

    @property
    def expanded(self) -> bool:
        """Whether it shows each number of its base several times, as a token repeated for every example does."""
        return self.view == "broadcast" and self.base is not None and self.value.numel() > self.base.value.numel()

    @property
    def parameter(self) -> bool:
        return self.base is None and self.leaves.get(self.name) is self.node


@dataclass(frozen=True, eq=False)
class Use:
    """One operation that used parameters, in the order in which operations ran."""

    index: int
    operation: str
    targets: tuple[str, ...]  # names of parameters
    build: Build

    def describe(self) -> str:
        return f"{self.operation} (parameter {', '.join(self.targets)})"


class _Tap(torch.autograd.Function):
    """Identity in place (so that the result is no view); reports the gradient that passes, with the saved inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, trace: Trace, use: Use, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.trace, ctx.use = trace, use
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        if grad is not None:
            # read once: under checkpointing each read may recompute; detached: a view would keep the graph alive
            saved = [t.detach() for t in ctx.saved_tensors]
            with torch._C.DisableTorchFunction(), torch.no_grad():
                ctx.trace.report(ctx.use, saved, grad.detach())
        return (None, grad, None, None, *[None] * len(ctx.needs_input_grad[4:]))


@dataclass(frozen=True)
class Call:
    """An operation about to run on at least one source and at least one tensor of data."""

    trace: Trace
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", str(self.function)).strip("_")

    def bind(self, *names: str, **defaults: Any) -> list[Any]:
        """Arguments by position or name: required ``names`` first, then ``defaults`` in their order."""
        order = (*names, *defaults)
        given = dict(zip(order, self.args))
        given.update(self.kwargs)
        missing = [name for name in names if name not in given]
        if missing or len(self.args) > len(order):
            raise GradientError(f"{self.name}: unexpected call signature; write the call with {order} in this order")
        return [given.get(name, defaults.get(name)) for name in order]

    def source(self, value: Any) -> Source | None:
        return self.trace.sources.get(id(value)) if isinstance(value, Tensor) else None

    def value(self, value: Any) -> Any:
        source = self.source(value)
        return value if source is None else source.value

    def is_data(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.source(value) is None and self.trace.is_data(value)

    @property
    def in_place(self) -> bool:
        """Whether the operation writes into its first argument."""
        name = getattr(self.function, "__name__", "")
        return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS

    def sources(self) -> list[Source]:
        found = (self.trace.sources.get(id(t)) for t in flat_tensors(self.args, self.kwargs))
        return list(dict.fromkeys(s for s in found if s is not None))

    def refuse(self, reason: str) -> GradientError:
        names = list(dict.fromkeys(name for source in self.sources() for name in source.leaves))
        where = f" (parameter {', '.join(names)})" if names else ""
        return GradientError(f"{self.name}{where}: {reason}", names)

    def tap(self, output: Tensor, targets: Sequence[Source | None], saved: Sequence[Tensor], build: Build) -> Tensor:
        """Watch ``output``; ``build`` makes the terms once its gradient is known."""
        if output.is_nested:
            raise self.refuse("a nested tensor has no rows to assign to examples; pass the padded tensor and mask")
        if any(output is t for t in flat_tensors(self.args, self.kwargs)):  # x.to(w) may be x itself
            output = output.clone()
        self.trace.dtypes.add(output.dtype)
        if output._is_view():  # in-place operations on what follows must not reach through a view
            output = torch.ops.aten._unsafe_view.default(output, output.shape)
        names = tuple(dict.fromkeys(name for s in targets if s is not None for name in s.leaves))
        use = self.trace.new_use(self.name, names, build)
        result: Tensor = _Tap.apply(self.trace.anchor, output, self.trace, use, *saved)  # type: ignore[no-untyped-call]
        return result

    def watch(self, source: Source, shape: torch.Size | None = None) -> Tensor:
        """``source`` itself, expanded (without memory) to ``shape`` and tapped: it meets the data there.

        The gradient at the expanded tensor has the data's rows; an example's gradient is the sum of its own.
        """
        shape = source.value.shape if shape is None else shape
        while source.view == "broadcast" and source.base is not None:
            source = source.base
        target = source

        def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
            return [(target, Direct(owner.sum_to(grad, target.value.shape)))]

        return self.tap(target.value.expand(shape), [target], [], build)


Rule: TypeAlias = Callable[[Call], Any]
Sink: TypeAlias = Callable[[Use, Sequence[Tensor], Tensor], None]


@dataclass(frozen=True)
class Rules:
    """What to do at an operation: rules where parameters are used, guards wherever the operation runs.

    ``faster`` are functions to call in place of those that use no trainable parameter, frozen layers above all.
    """

    rules: Mapping[Callable[..., Any], Rule]
    guards: Mapping[Callable[..., Any], Callable[[Call], None]]
    fallback: Rule
    faster: Mapping[Callable[..., Any], Callable[..., Any]]
    edition: int = 0  # another number after each change of the user's rules


class Trace(TorchFunctionMode):
    """One evaluation of a loss at one point: parameters, or ``values`` in their place where given."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        data: Iterable[Tensor],
        rules: Rules,
    ) -> None:
        super().__init__()
        self.rules = rules
        self.path: set[object] = set()  # operations that ran, with the axes that they moved
        self._tests = 0  # how often Python asked whether data is true
        self._picked: set[int] = set()  # lengths of the axes that the data picked from; 0 if it picked any places
        self.dtypes: set[torch.dtype] = set()  # of whatever was computed on the way to the losses
        self.opened: list[Tensor] = []  # tensors made trainable inside the loss: they end with it
        self._sink: Sink | None = None
        self.anchor = torch.zeros((), requires_grad=True)  # makes every tap reachable from the loss
        self.log: list[tuple[str, tuple[str, ...]]] = []  # operation and parameters of each use
        self.sources: dict[int, Source] = {}
        self._alive: list[Tensor] = list(parameters.values())  # ids in `sources` must not be reused
        for name, parameter in parameters.items():
            value = values.get(name, parameter).detach()
            leaf = value.detach().requires_grad_()
            self.sources[id(parameter)] = Source(name, value, leaf, {name: leaf})
        self._data: dict[int, weakref.ref[Tensor]] = {}
        self._lengths: set[int] = set()  # first axes of the batch's tensors
        for tensor in data:
            self._note(tensor)
            self._lengths.update(tensor.shape[:1])

    def new_use(self, operation: str, targets: tuple[str, ...], build: Build) -> Use:
        self.log.append((operation, targets))
        return Use(len(self.log) - 1, operation, targets, build)

    def losses(self, loss_fn: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
        """Evaluate the per-example losses at this point."""
        with torch.enable_grad(), self:
            losses_B = loss_fn(model, batch)
        if isinstance(losses_B, Tensor) and id(losses_B) in self.sources:  # computed from parameters alone
            with torch.enable_grad():
                losses_B = Call(self, torch.Tensor.clone, (losses_B,), {}).watch(self.sources[id(losses_B)])
        return batches.checked_losses(losses_B)

    def report(self, use: Use, saved: Sequence[Tensor], grad: Tensor) -> None:
        """What a tap calls when the gradient has reached it."""
        if self._sink is not None:
            self._sink(use, saved, grad)

    def differentiate(self, losses_B: Tensor, cotangents_B: Tensor, sink: Sink, keep_graph: bool = False) -> None:
        """One backward pass to the taps, Σ_i cotangent_i loss_i; ``sink`` hears of every use."""
        # no `inputs`: reentrant checkpointing refuses them; the taps' anchor is the only leaf there is
        self._sink = sink
        try:
            with self:
                torch.autograd.backward([losses_B], [cotangents_B], retain_graph=keep_graph)
        finally:
            self._sink = None  # it holds what it collected: no cycle through the graph may remain

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched, sources = list(flat_tensors(args, kwargs)), self.sources
        name = getattr(func, "__name__", "")
        self.path.add((name, _axes(args[1:], kwargs)) if name in _MOVING else name)
        if name in _PICKING:
            self._note_picks(name, args, kwargs)
        if not any(id(t) in sources for t in touched):
            if func in self.rules.guards:
                self.rules.guards[func](Call(self, func, args, kwargs))
            if func is torch.Tensor.requires_grad_ or func == _SET_REQUIRES_GRAD:
                self.opened += [t for t in touched if not t.requires_grad]
            if func in BACKWARD:
                if self._sink is None and kwargs.get("create_graph"):
                    raise GradientError(
                        f"{func.__name__} with create_graph=True inside the loss: a second derivative's uses of the "
                        "parameters cannot be seen; remove the gradient penalty"
                    )
                # recomputation in the backward pass must be seen too
                with self:
                    return without_override(func)(*args, **kwargs)
            return self._run_on_data(func, touched, args, kwargs)
        call = Call(self, func, args, kwargs)
        if func in BACKWARD:
            if self._sink is None:
                raise call.refuse("differentiates inside the loss, which cannot be seen; take that gradient outside")
            raise call.refuse(
                "a checkpointed segment returns a tensor computed from parameters alone, whose gradient comes back "
                "summed over the examples; checkpoint with use_reentrant=False"
            )
        if func in self.rules.guards:
            self.rules.guards[func](call)
        if name == "__get__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute not in _DIFFERENTIABLE_ATTRIBUTES:
                return func(*(replaced(args, call.value) if attribute == "data" else args), **kwargs)
        if not torch.is_grad_enabled():  # as autograd would: no gradient through here
            others = [t for t in touched if id(t) not in sources]
            return self._run_on_data(func, others, tuple(replaced(args, call.value)), replaced(kwargs, call.value))
        if func is torch.Tensor.detach:
            return call.value(args[0])
        if func in _SHAPE_OF_DATA and id(args[0]) not in sources:  # data takes a parameter's shape or dtype
            return self._run_on_data(func, touched[:1], tuple(replaced(args, call.value)), replaced(kwargs, call.value))
        if self._is_lookup(func, args, sources):
            return self.rules.rules[func](call)
        if not any(id(t) not in sources and self.is_data(t) for t in touched) or func in _SHAPE_OF_DATA:
            return self._derive(call)
        if func in self.rules.rules:
            return self.rules.rules[func](call)
        if isinstance(func, types.FunctionType):  # a composite written in Python: look inside
            with self:
                return without_override(func)(*args, **kwargs)
        return self.rules.fallback(call)

    def _run_on_data(self, func: Any, touched: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs) if kwargs else self.rules.faster.get(func, func)(*args)
        outputs = [result] if isinstance(result, Tensor) else list(flat_tensors((result,), {}))
        unmarked = []
        for tensor in outputs:
            if tensor.requires_grad:
                self.dtypes.add(tensor.dtype)
            else:
                unmarked.append(tensor)
        if result is None and touched:  # in-place assignment: data may have flowed into its first argument
            unmarked = [touched[0]]
        if unmarked and any(self.is_data(t) for t in touched):
            for tensor in unmarked:
                self._note(tensor)
        return result

    def _is_lookup(self, func: Any, args: tuple[Any, ...], sources: Mapping[int, Source]) -> bool:
        """Constant row numbers, the same for every example, such as token types: looked up like data."""
        if func is not torch.nn.functional.embedding or len(args) < 2 or id(args[0]) in sources:
            return False
        ids = args[0]
        if ids.dim() < 2 or ids.shape[0] < 2 or ids.shape[0] not in self._lengths:
            return False
        return bool((ids[:1] == ids).all())  # else a table of positions that is as long as the batch

    def _derive(self, call: Call) -> Any:
        """Run an operation on parameters and constants alone; what it returns is a source again."""
        args, kwargs, func = call.args, call.kwargs, call.function
        inputs = call.sources()
        if func is torch.Tensor.expand_as:
            func, args = torch.Tensor.expand, (args[0], args[1].shape)

        def node(value: Any) -> Any:
            source = call.source(value)
            return value if source is None else source.node

        # what a checkpointed segment computes from parameters is kept: the pull-back comes after its recomputation
        with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
            result = func(*replaced(args, node), **replaced(kwargs, node))
        outputs = list(flat_tensors((result,), {}))
        if call.in_place and isinstance(args[0], Tensor):
            outputs.append(args[0])  # a constant that parameters were written into
        for output in outputs:
            if output.requires_grad:
                self.dtypes.add(output.dtype)
                self.sources[id(output)] = _derived(call, output, inputs)
                self._alive.append(output)
        return result

    def moves(self, batch: int) -> bool:
        """Whether the data may have picked among examples: who owns which row then differs from batch to batch.

        Examples lie on an axis whose length is a multiple of the batch's. What is picked along an axis of any other
        length (a score by its label, a token by its place) leaves them where they were.
        """
        return batch > 1 and any(length % batch == 0 for length in self._picked)

    def _note_picks(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the lengths of axes of data that are picked from by numbers that are data themselves."""
        target = args[0] if args else kwargs.get("input")
        if not isinstance(target, Tensor):
            return
        data = self.is_data(target) and id(target) not in self.sources
        numbers = [t for t in flat_tensors(args[1:], kwargs) if not t.is_floating_point() and self.is_data(t)]
        axis = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else None)
        if name in _LEAVING:
            self._tests += data
            if data and (name != "__bool__" or self._tests > _FEW_TESTS):
                self._picked.add(0)
        elif name in _UNEVEN:
            if (data or numbers) and (name != "where" or len(args) + len(kwargs) == 1):
                self._picked.add(0)
        elif name in _SORTING:
            if data and target.dim():
                self._picked.add(target.shape[-1 if axis is None or name == "topk" else axis])
                self._picked.update([target.shape[args[2]]] if name == "topk" and len(args) > 2 else [])
        elif name == "embedding":  # numbers look up rows of a table
            table = args[1] if len(args) > 1 else kwargs.get("weight")
            if isinstance(table, Tensor) and self.is_data(table) and id(table) not in self.sources:
                self._picked.add(len(table))
        elif name in _CUTTING:
            sizes = args[1] if len(args) > 1 else None
            if data and isinstance(sizes, (list, tuple)):
                self._picked.add(target.shape[kwargs.get("dim", args[2] if len(args) > 2 else 0)])
        elif name == "__getitem__":  # numbers looked up in a constant table stay in their places, a mask leaves gaps
            self._picked.update(length for length in self._indexed(target, args[1]) if data or length == 0)
        elif name in _WRITING:
            others = args[1:2] if name == "__setitem__" else args[1:]
            if any(not t.is_floating_point() and self.is_data(t) for t in flat_tensors(others, kwargs)):
                self._picked.add(0)
        elif numbers and data:
            self._picked.add(target.shape[axis] if axis is not None and target.dim() else 0)

    def _indexed(self, target: Tensor, index: Any) -> Iterator[int]:
        """Lengths of the axes that ``target[index]`` picks from by data."""
        axis, parts = 0, index if isinstance(index, tuple) else (index,)
        for number, part in enumerate(parts):
            if part is Ellipsis:
                axis = target.dim() - sum(_axes_taken(p) for p in parts[number + 1 :])
                continue
            if isinstance(part, Tensor) and part.dtype in (torch.int32, torch.int64):
                if self.is_data(part) or not _in_order(part, target.shape[axis]):  # Python may have had the order
                    yield target.shape[axis]
            elif isinstance(part, Tensor):
                if self.is_data(part):
                    yield 0
            elif isinstance(part, (list, np.ndarray)):
                yield target.shape[axis]
            axis += _axes_taken(part)

    def is_data(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or id(tensor) in self._data

    def _note(self, tensor: Tensor) -> None:
        key, seen = id(tensor), self._data
        if key not in seen:
            seen[key] = weakref.ref(tensor, lambda _: seen.pop(key, None))


def _identity(saved: Tensor) -> Tensor:
    return saved


def _derived(call: Call, output: Tensor, inputs: list[Source]) -> Source:
    leaves = {name: leaf for source in inputs for name, leaf in source.leaves.items()}
    name = f"{call.name}({', '.join(source.name for source in inputs)})"
    base, view = (inputs[0], _view_kind(call, output, inputs[0])) if len(inputs) == 1 else (None, "other")
    return Source(name, output.detach(), output, leaves, base if view != "other" else None, view)


def _view_kind(call: Call, output: Tensor, base: Source) -> str:
    """How ``output`` shows its base: the same, transposed, some rows, broadcast, or in any other way."""
    value = base.node
    if call.function is torch.Tensor.repeat and _repeats_only_ones(value, output):
        return "broadcast"
    if first_row(value, output) is not None:
        return "rows"
    if output.data_ptr() != value.data_ptr() or output.dtype != value.dtype:
        return "other"
    if output.shape == value.shape and _strides(output) == _strides(value):
        return "same"
    if value.dim() == 2 and output.shape == value.shape[::-1] and output.stride() == value.stride()[::-1]:
        return "transpose"
    if output.dim() >= value.dim() and _expands(value, output):
        return "broadcast"
    return "other"


def _axes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """The whole numbers among the arguments."""
    found: list[object] = []
    for value in (*args, *kwargs.values()):
        found += [value] if isinstance(value, int) else _axes(tuple(value), {}) if type(value) in (list, tuple) else []
    return tuple(found)


def _in_order(numbers: Tensor, length: int) -> bool:
    """Whether constant row numbers are 0, 1, 2 ...: each row stays where it is."""
    flat = numbers.reshape(-1)
    return len(flat) == length and bool(torch.equal(flat, torch.arange(length, device=flat.device, dtype=flat.dtype)))


def _axes_taken(index: Any) -> int:
    """How many axes one part of an index uses up."""
    if index is None or isinstance(index, bool):
        return 0
    return max(1, index.dim()) if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def first_row(value: Tensor, output: Tensor) -> int | None:
    """The row of the matrix ``value`` with which ``output`` begins, if it is a view of some of its rows.

    >>> packed = torch.zeros(6, 4)
    >>> first_row(packed, packed[2:5]), first_row(packed, packed[2:5].clone()), first_row(packed, packed[:, :2])
    (2, None, None)
    """
    if value.dim() != 2 or output.dim() != 2 or output.shape[1] != value.shape[1] or len(output) >= len(value):
        return None
    if output.stride() != value.stride() or output.dtype != value.dtype or value.stride(0) == 0:
        return None
    if output.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return None
    row, rest = divmod(int(output.storage_offset() - value.storage_offset()), value.stride(0))
    return row if rest == 0 and 0 <= row <= len(value) - len(output) else None


def _expands(value: Tensor, output: Tensor) -> bool:
    padded = (1,) * (output.dim() - value.dim()) + tuple(value.shape)
    if any(p not in (1, o) for p, o in zip(padded, output.shape)):
        return False
    return _strides(value.expand(output.shape)) == _strides(output)


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the axes along which there is anything to step over."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def _repeats_only_ones(value: Tensor, output: Tensor) -> bool:
    padded = (1,) * (output.dim() - value.dim()) + tuple(value.shape)
    return all(p in (1, o) for p, o in zip(padded, output.shape))


def flat_tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments of an operation, lists and tuples of them included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from flat_tensors(value, {})


def replaced(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The same structure of arguments with ``change`` applied to every tensor (or other ``kind`` of leaf)."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(replaced(item, change, kind) for item in value)
    if isinstance(value, Mapping):
        return {key: replaced(item, change, kind) for key, item in value.items()}
    return value


@functools.cache
def without_override(func: Callable[..., Any]) -> Callable[..., Any]:
    """The body of one of torch's Python functions without its check for torch function overrides.

    While a mode is active that check hands the call straight back to the mode, so that a composite (attention, say)
    could never be looked into. The copy shares the code and sees the module's names, except for the check.
    """
    if not isinstance(func, types.FunctionType):
        return func

    def never(*_: Any) -> bool:
        return False

    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(checks, never)}
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


BACKWARD = frozenset({torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward})
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_DIFFERENTIABLE_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_READING = frozenset({"__getitem__", "index_select", "gather", "take_along_dim", "embedding"})
_UNEVEN = frozenset(
    {"masked_select", "nonzero", "argwhere", "where", "take", "repeat_interleave", "pack_padded_sequence", "put"}
    | {"put_", "index_reduce", "index_reduce_"}
)
_SORTING = frozenset({"sort", "topk", "msort", "kthvalue"})
_CUTTING = frozenset({"split", "split_with_sizes", "tensor_split"})
# numbers of data that Python may slice, sort and choose by
_LEAVING = frozenset({"tolist", "item", "numpy", "__array__", "__int__", "__index__", "__float__", "__bool__"})
_FEW_TESTS = 4  # answers that choose a path, as masks do, and not an order
_WRITING = frozenset(
    {"__setitem__", "index_put", "index_put_", "index_add", "index_add_", "index_copy", "index_copy_", "scatter"}
    | {"scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_scatter"}
    | {"masked_scatter_"}
)
_PICKING = _READING | _UNEVEN | _SORTING | _CUTTING | _LEAVING | _WRITING
_MOVING = frozenset(
    {"transpose", "transpose_", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "flip", "roll", "rot90"}
)
_IN_PLACE_OPERATORS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
# operations whose second argument lends its shape, dtype or device alone
_SHAPE_OF_DATA = frozenset({torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.type_as, torch.Tensor.to})
