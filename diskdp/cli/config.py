"""RUN.toml: what a run is, read into frozen values. Every error names file, key and what would be accepted.

Paths in the file are relative to the file. The reference of all keys is `docs/cli.md`.
"""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from diskdp.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Section = TypeVar("Section")


@dataclass(frozen=True)
class DataConfig:
    """Where the examples come from: tables with a declared schema, an image set, the packaged Adult table."""

    kind: Literal["csv", "parquet", "images", "adult"]
    train: Path | None = None
    test: Path | None = None
    schema: Path | None = None
    folder: Path | None = None
    classes: int | None = None
    scaling: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A model of the zoo, or ``module:function`` called with (input_shape, classes, **options)."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    init_seed: int | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """A class of torch.optim, and the course of its learning rate over the plan's steps."""

    name: str
    lr: float
    options: dict[str, object] = field(default_factory=dict)
    schedule: Literal["constant", "cosine", "warmup-cosine"] = "constant"
    warmup: float = 0.05


@dataclass(frozen=True)
class PlanConfig:
    """The plan's settings; ``dataset_size`` is the number of training rows unless it is given.

    Noise is "secure" unless it is given, so that a run can be gone on with bit for bit; "gaussian" under a seed, so
    that microbatches and threads change nothing beyond rounding.
    """

    delta: float
    batch_size: int | None = None
    dataset_size: int | None = None
    epochs: float | None = None
    steps: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    clipping: str = "flat"
    sampling: str = "poisson"
    adjacency: str = "add-remove"
    accountant: str = "pld"
    noise: str | None = None
    unit: str = "example"
    max_batch_size: int | None = None
    examples_per_unit: int = 1
    paper_accounting: bool = False
    target_quantile: float | None = None
    quantile_noise: float | None = None


@dataclass(frozen=True)
class FilterConfig:
    """DiSK, a low-pass filter (first order by ``kappa``, or coefficients ``a``, ``b``), or none."""

    kind: Literal["disk", "lowpass", "none"] = "disk"
    kappa: float | None = None
    gamma: float | None = None
    clip: Literal["joint", "separate"] | None = None
    c: float | None = None
    gain: Literal["constant", "adaptive"] | None = None
    a: list[float] | None = None
    b: list[float] | None = None


@dataclass(frozen=True)
class RunSettings:
    """Where the run is written, and what changes its speed but not its result."""

    out: Path
    microbatch_size: int | Literal["auto"] | None = None
    memory_budget: int | str | None = None
    autotune: bool = False
    num_workers: int = 0
    eval_every: int | None = None
    checkpoint_every: int | None = None
    ledger: Path | None = None
    seed: int | None = None


@dataclass(frozen=True)
class RunConfig:
    """A whole run file."""

    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    plan: PlanConfig
    filter: FilterConfig
    run: RunSettings

    def as_json(self) -> dict[str, Any]:
        """Plain values for `config.json`; paths as text."""
        return {name: _plain(section) for name, section in asdict(self).items()}


_SECTIONS = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "plan": PlanConfig,
    "filter": FilterConfig,
    "run": RunSettings,
}
_ALTERNATIVES = (("epochs", "steps"), ("epsilon", "noise_multiplier"))
"""Of each pair in [plan] one is given: an override by one takes the place of the other."""


def load_run(path: Path, overrides: Mapping[str, object]) -> RunConfig:
    """Read a run file; ``overrides`` maps ``section.key`` to values that take the place of the file's.

    Paths among the overrides are relative to the current folder.
    """
    document = _read(path)
    here = path.parent
    try:
        _check_keys(document, "", _SECTIONS)
        tables = {name: dict(_table(document.get(name, {}), name)) for name in _SECTIONS}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for key, value in overrides.items():
        _override(tables, key, value)
    _drop_alternatives(tables["plan"], overrides)
    try:
        return RunConfig(
            data=_section(DataConfig, tables["data"], "data", here),
            model=_section(ModelConfig, tables["model"], "model", here),
            optimizer=_section(OptimizerConfig, tables["optimizer"], "optimizer", here),
            plan=_section(PlanConfig, tables["plan"], "plan", here),
            filter=_section(FilterConfig, tables["filter"], "filter", here),
            run=_section(RunSettings, tables["run"], "run", here),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_settings(settings: Sequence[str], what: str) -> dict[str, object]:
    """``key=value`` texts, each value read as TOML, or as a text where it is none.

    >>> parse_settings(["widths=[256, 256]", "activation=relu"], "--option")
    {'widths': [256, 256], 'activation': 'relu'}
    """
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{what} {setting!r}: must read key=value")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text
    return values


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at what was meant.

    >>> nearest("epsilom", ["epsilon", "delta"])
    "; did you mean 'epsilon'?"
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: the run file cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _override(tables: dict[str, dict[str, object]], key: str, value: object) -> None:
    """Put a value at ``section.key`` or deeper (``optimizer.options.momentum``), or a table in a section's place."""
    section, *inner = key.split(".")
    if section in tables and not inner and isinstance(value, dict):
        tables[section] = dict(value)
        return
    if section not in tables or not inner:
        raise ConfigError(f"--set {key}: must read section.key=value{nearest(section, list(tables))}")
    table = tables[section]
    for part in inner[:-1]:
        child = table.get(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {part} is no table")
        table[part] = table = dict(child)
    table[inner[-1]] = value


def _drop_alternatives(plan: dict[str, object], overrides: Mapping[str, object]) -> None:
    for pair in _ALTERNATIVES:
        given = [name for name in pair if f"plan.{name}" in overrides]
        if len(given) == 1:
            plan.pop(pair[1 - pair.index(given[0])], None)


def _check_keys(table: Mapping[str, object], place: str, known: Mapping[str, object]) -> None:
    for key in table:
        if key not in known:
            what = f"[{place}] {key}" if place else f"[{key}]"
            raise ConfigError(f"{what}: unknown key{nearest(key, list(known))}")


def _table(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"[{place}]: must be a table, got {value!r}")
    return value


def _section(kind: type[Section], table: Mapping[str, object], place: str, base: Path) -> Section:
    """The table as a dataclass: its fields are the known keys, their types what is accepted."""
    hints = get_type_hints(kind)
    _check_keys(table, place, hints)
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        if entry.name in table:
            values[entry.name] = _value(table[entry.name], hints[entry.name], f"[{place}] {entry.name}", base)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"[{place}] {entry.name}: is missing")
    return kind(**values)


def _value(value: object, hint: Any, place: str, base: Path) -> Any:
    """``value`` as the type that a field declares."""
    if get_origin(hint) in (Union, types.UnionType):
        hints = [inner for inner in get_args(hint) if inner is not type(None)]
        if len(hints) > 1:
            return _one_of(value, hints, place, base)
        [hint] = hints
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{place}: must be {_accepted(hint)}, got {value!r}")
        return value
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{place}: must be a list of numbers, got {value!r}")
        return [_value(item, get_args(hint)[0], place, base) for item in value]
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{place}: must be a table, got {value!r}")
        return value
    if hint is Path and isinstance(value, (str, Path)) and str(value):
        return (base / value).resolve()
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is not Path and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{place}: must be {_accepted(hint)}, got {value!r}")


def _one_of(value: object, hints: Sequence[Any], place: str, base: Path) -> Any:
    """``value`` as the first of several types that takes it."""
    for hint in hints:
        try:
            return _value(value, hint, place, base)
        except ConfigError:
            continue
    raise ConfigError(f"{place}: must be {' or '.join(_accepted(hint) for hint in hints)}, got {value!r}")


def _accepted(hint: Any) -> str:
    """What a value must be, in words."""
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
    names = {
        str: "a text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        Path: "a path (a text, not empty)",
    }
    return names[hint]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    return str(value)
