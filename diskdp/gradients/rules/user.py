"""Rules of the user's own: for operations that torch dispatches, and for functions that are made visible to the trace.

What a rule says is not believed: the examination of every structure compares it with autograd (`structure`), and a
change of the table makes all structures new.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions, handle_torch_function, has_torch_function

from diskdp.errors import GradientError
from diskdp.gradients.ownership import Owner
from diskdp.gradients.rules.registry import library_rules
from diskdp.gradients.terms import Direct, Outer, Term
from diskdp.gradients.trace import Call, Rule, Rules, Source, flat_tensors, replaced

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Visible(Generic[Parameters, Result]):
    """A function whose calls the engine sees as one operation. Made by `visible`."""

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        owner = getattr(function, "__self__", None)
        if inspect.isclass(owner):  # MyFunction.apply is known as MyFunction
            self.__name__, self.__qualname__ = owner.__name__, owner.__qualname__

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        tensors = tuple(flat_tensors(args, kwargs))
        if has_torch_function(tensors):
            return handle_torch_function(self, tensors, *args, **kwargs)
        return self.function(*args, **kwargs)

    def __copy__(self) -> Visible[Parameters, Result]:
        return self  # as functions do: a copied module's calls find the same rule

    def __deepcopy__(self, memo: object) -> Visible[Parameters, Result]:
        return self


def visible(function: Callable[Parameters, Result]) -> Visible[Parameters, Result]:
    """Let the engine see calls of ``function`` as one operation: an autograd Function's ``apply``, or a plain function.

    To be called in its place. All tensors it works with must be arguments, and it returns one tensor. Its per-example
    gradients come from its `rule`; without one it is differentiated once an example, by its own backward.

    >>> @visible
    ... def scaled(x, weight):
    ...     return x * weight
    >>> scaled(torch.ones(2), torch.tensor(3.0))
    tensor([3., 3.])
    """
    if isinstance(function, Visible):
        return function
    if not callable(function) or inspect.isclass(function):
        what = function.__name__ if inspect.isclass(function) else repr(function)
        raise GradientError(f"visible({what}): give a function, or the apply of an autograd Function: {what}.apply")
    return Visible(function)


@dataclass(frozen=True)
class OperationUse:
    """What a rule has to go by: an operation's inputs, and the gradient of the summed losses at its output.

    Which rows of ``grad`` belong to which example has been measured. The methods bring tensors that are laid out like
    it into the order of examples.
    """

    grad: Tensor
    inputs: Mapping[str, Any]  # every argument by name; parameters at the point of this evaluation
    parameters: tuple[str, ...]  # the arguments that are parameters, or were computed from parameters alone
    _owner: Owner

    def by_example(self, values: Tensor) -> Tensor:
        """[B, K, ...]: each example's K rows (1, as a rule) of ``values``, other axes in their order."""
        return self._owner.by_example(values)

    def rows(self, values: Tensor) -> Tensor:
        """[B, T, D]: all axes of ``values`` but the last become rows of their example."""
        return self._owner.rows(values)

    def sum_to(self, values: Tensor, name: str) -> Tensor:
        """[B, *shape]: each example's elements of ``values`` summed to the shape of the argument ``name``.

        That shape must broadcast to the shape of ``values``, as a bias does to what it is added to.
        """
        return self._owner.sum_to(values, self.inputs[name].shape)


UserRule: TypeAlias = Callable[[OperationUse], "Mapping[str, Tensor | Outer]"]
Operation: TypeAlias = Callable[..., Any]


def outer(left_BTP: Tensor, right_BTD: Tensor) -> Outer:
    """Σ_t left_t ⊗ right_t for each example: the gradient of a [P, D] matrix, as factors that are never multiplied out.

    >>> outer(torch.ones(4, 3, 2), torch.ones(4, 3, 5)).per_example().shape
    torch.Size([4, 2, 5])
    """
    if left_BTP.dim() != 3 or right_BTD.dim() != 3 or left_BTP.shape[:2] != right_BTD.shape[:2]:
        raise GradientError(
            f"outer: factors of shapes {list(left_BTP.shape)} and {list(right_BTD.shape)}; they must be [B, T, P] and "
            "[B, T, D], rows by example (`use.rows(...)`)"
        )
    return Outer(left_BTP, right_BTD, left_BTP.shape[2])


@dataclass(frozen=True)
class _Table:
    rules: Mapping[Operation, Rule]
    edition: int  # never comes again, so that nothing examined under other rules is taken for examined


_table = _Table({}, 0)  # replaced as a whole: whoever reads it sees all of a change or nothing
_changing = threading.Lock()


def rule(*operations: Operation, names: Sequence[str] = ()) -> Callable[[UserRule], UserRule]:
    """Register the decorated function as the rule of one or several operations, for the whole process.

    An operation is what `visible` returned, a function of torch, or a custom operator (``torch.ops.space.name``).
    The rule gets an `OperationUse` and returns, for each argument that was a parameter, the per-example gradients:
    a tensor [B, *shape], or `outer` factors. ``names`` are those of the arguments, for functions of torch that do not
    tell them. `remove` takes a rule back.

    >>> @visible
    ... def scaled(x, weight):
    ...     return x * weight
    >>> @rule(scaled)
    ... def scaled_rule(use):
    ...     return {"weight": use.sum_to(use.grad * use.inputs["x"], "weight")}
    >>> remove(scaled)
    """
    if not operations:
        raise GradientError("rule() names no operation: @rule(operation)")
    spread = list(_spread(operations))
    _refuse_taken(spread)
    binders = {operation: _binder(operation, names) for operation in spread}

    def register(user: UserRule) -> UserRule:
        global _table
        with _changing:
            _refuse_taken(spread)
            added = {operation: _as_rule(user, binders[operation]) for operation in spread}
            _table = _Table({**_table.rules, **added}, _table.edition + 1)
        return user

    return register


def remove(*operations: Operation) -> None:
    """Take back the rules of operations."""
    global _table
    spread = list(_spread(operations))
    with _changing:
        missing = [_name(operation) for operation in spread if operation not in _table.rules]
        if missing:
            raise GradientError(f"{', '.join(missing)}: no rule of yours is registered for it")
        kept = {operation: rule for operation, rule in _table.rules.items() if operation not in spread}
        _table = _Table(kept, _table.edition + 1)


def default_rules() -> Rules:
    """The library's rules and the user's."""
    library, table = library_rules(), _table
    return replace(library, rules={**library.rules, **table.rules}, edition=table.edition)


def _spread(operations: Iterable[Operation]) -> Iterable[Operation]:
    """The operations as the trace will see them; refuses what it would never see."""
    for operation in operations:
        if isinstance(operation, OpOverloadPacket):
            yield from (operation, *(getattr(operation, name) for name in operation.overloads()))
        elif isinstance(operation, (Visible, OpOverload)) or operation in _overridable():
            yield operation
        else:
            raise GradientError(
                f"{_name(operation)}: torch does not show calls of it, so a rule for it would never be asked; make it "
                "visible, use that in the model and give the rule for it: f = diskdp.rules.visible(f) (of an autograd "
                "Function its apply; custom operators are torch.ops.space.name)"
            )


def _refuse_taken(operations: Iterable[Operation]) -> None:
    for operation in operations:
        if operation in _table.rules:
            raise GradientError(f"{_name(operation)}: a rule for it is registered already; remove() that one first")
        if operation in library_rules().rules:
            raise GradientError(f"{_name(operation)}: a rule for it is built in")


@functools.cache
def _overridable() -> frozenset[Operation]:
    return frozenset(function for functions in get_overridable_functions().values() for function in functions)


def _name(operation: Operation) -> str:
    return getattr(operation, "__name__", repr(operation))


Binder: TypeAlias = "Callable[[Call], dict[str, Any]]"


def _binder(operation: Operation, names: Sequence[str]) -> Binder:
    """How the arguments of a call get their names."""
    if isinstance(operation, (OpOverload, OpOverloadPacket)) and not names:
        one = operation if isinstance(operation, OpOverload) else getattr(operation, operation.overloads()[0])
        names = [argument.name for argument in one._schema.arguments]
    if names:
        return lambda call: {**dict(zip(names, call.args)), **call.kwargs}
    try:
        signature = _signature(operation.function if isinstance(operation, Visible) else operation)
    except (TypeError, ValueError):
        raise GradientError(
            f"{_name(operation)} does not tell the names of its arguments; give them: "
            'rule(operation, names=("input", "weight"))'
        ) from None

    def bind(call: Call) -> dict[str, Any]:
        bound = signature.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    return bind


def _signature(function: Operation) -> inspect.Signature:
    """The arguments of a call; an autograd Function's are those of its forward, without the context."""
    owner = getattr(function, "__self__", None)
    if not (inspect.isclass(owner) and issubclass(owner, torch.autograd.Function)):
        return inspect.signature(function)
    signature = inspect.signature(owner.forward)
    if owner.setup_context is not torch.autograd.Function.setup_context:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass(frozen=True)
class _Saved:
    """Where a saved tensor stood among the arguments."""

    number: int


def _as_rule(user: UserRule, bind: Binder) -> Rule:
    def apply(call: Call) -> Any:
        if call.in_place:
            raise call.refuse("is named as if it worked in place (name_), which a rule cannot serve; rename it")
        arguments = bind(call)
        sources = {name: source for name, value in arguments.items() if (source := call.source(value)) is not None}
        if len({id(source) for source in sources.values()}) < len(call.sources()):
            raise call.refuse("a rule speaks of arguments by name, so each parameter must be an argument of its own")
        tensors = [t for t in dict.fromkeys(flat_tensors(call.args, call.kwargs)) if call.source(t) is None]
        numbers = {id(t): _Saved(i) for i, t in enumerate(tensors)}
        places = replaced(arguments, lambda t: call.source(t) or numbers[id(t)])
        output = call.function(*replaced(call.args, call.value), **replaced(call.kwargs, call.value))
        if not isinstance(output, Tensor):
            raise call.refuse("returns several tensors, and a rule can serve one; return them one by one, or joined")

        def build(saved: Sequence[Tensor], grad: Tensor, owner: Owner) -> list[tuple[Source, Term]]:
            inputs = replaced(places, lambda at: saved[at.number], _Saved)
            inputs = replaced(inputs, lambda source: _promoted(source.value, grad.dtype), Source)
            given = user(OperationUse(grad, inputs, tuple(sources), owner))
            return [(source, _checked(call, given, name, source, owner.batch)) for name, source in sources.items()]

        own = output if output.grad_fn is None else output.clone()  # the operation may have saved its output
        return call.tap(own, list(sources.values()), tensors, build)

    return apply


def _promoted(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _checked(call: Call, given: object, name: str, source: Source, batch: int) -> Term:
    """What a rule gave for one argument, as a term."""
    found = given.get(name) if isinstance(given, Mapping) else None
    if isinstance(found, Outer):
        shape = (found.batch, *found.gradient_shape)
    elif isinstance(found, Tensor):
        shape = tuple(found.shape)
    else:
        raise call.refuse(
            f"its rule must return a mapping with a tensor or outer(...) for the argument {name!r}, which is a "
            f"parameter here, and gave {type(found if isinstance(given, Mapping) else given).__name__}"
        )
    expected = (batch, *source.value.shape)
    if shape != expected:
        raise call.refuse(
            f"its rule gave per-example gradients of shape {list(shape)} for the argument {name!r}; they must be "
            f"{list(expected)}, examples first"
        )
    return found if isinstance(found, Outer) else Direct(found)
