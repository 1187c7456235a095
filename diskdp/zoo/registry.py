"""Models by name: those of the zoo, or any `module:function`. Assumes that code the user names is trusted."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

from torch import nn

from diskdp.errors import ConfigError, DiskDPError
from diskdp.zoo.cnn5 import cnn5
from diskdp.zoo.gpt import gpt
from diskdp.zoo.linear import linear
from diskdp.zoo.mlp import mlp
from diskdp.zoo.vit import vit
from diskdp.zoo.wrn import wrn

MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"linear": linear, "mlp": mlp, "cnn5": cnn5, "wrn": wrn, "vit": vit, "gpt": gpt}
)
"""The zoo: constructors of (input_shape, classes) and keyword options."""


def build(
    name: str, input_shape: Sequence[int], classes: int, options: Mapping[str, object] | None = None
) -> nn.Module:
    """Build a model by its name in `MODELS`, or by "module:function", called with (input_shape, classes).

    Options are checked against the constructor's signature before it is called. Initial weights come from
    torch's global generator, so `torch.manual_seed` fixes them.

    >>> build("mlp", (91,), 2, {"widths": [16]}).layers[0]
    Linear(in_features=91, out_features=16, bias=True)
    """
    constructor = _constructor(name)
    settings = dict(options or {})
    _check_options(name, constructor, settings)
    try:
        model = constructor(tuple(input_shape), classes, **settings)
    except DiskDPError:
        raise
    except Exception as error:  # an option's value that torch refuses, or a fault in the user's function
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r}: cannot be built with these options ({problem})") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r}: returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _constructor(name: str) -> Callable[..., nn.Module]:
    if ":" not in name:
        if name not in MODELS:
            known = ", ".join(MODELS)
            raise ConfigError(f'model {name!r} is unknown; known: {known}, or give "module:function"')
        return MODELS[name]
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f'model {name!r}: must read "module:function", such as "mypackage.models:make"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises on import
        problem = f"cannot import {module_name} ({type(error).__name__}: {error})"
        raise ConfigError(f"model {name!r}: {problem}; is its folder on the Python path?") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"model {name!r}: module {module_name} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def _check_options(name: str, constructor: Callable[..., nn.Module], options: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(constructor)
        signature.bind((), 0)
    except (TypeError, ValueError) as error:
        needs = "must be callable as (input_shape, classes), with defaults for the rest"
        raise ConfigError(f"model {name!r}: {needs} ({error})") from error
    parameters = signature.parameters.values()
    known = [p.name for p in list(parameters)[2:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    hints = get_type_hints(constructor) if name in MODELS else {}
    for option, value in options.items():
        if option not in known:
            listed = ", ".join(known) if known else "none"
            raise ConfigError(f"model {name!r}: unknown option {option!r}; known: {listed}")
        if option in hints and not _fits(value, hints[option]):
            wanted = "a list of whole numbers" if hints[option] == Sequence[int] else hints[option].__name__
            raise ConfigError(f"model {name!r}: option {option} must be {wanted}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    """Whether an option from a run file has the type that the constructor declares."""
    if hint == Sequence[int]:
        return isinstance(value, (list, tuple)) and all(_fits(item, int) for item in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
