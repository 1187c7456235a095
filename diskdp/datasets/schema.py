"""The declared schema of a table: what is public about its columns, in a TOML file beside the data.

Bounds, categories and classes come from the file's author. Nothing here has access to rows, so nothing can
be learned from them.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from diskdp.errors import DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _require(condition: bool, key: str, problem: str) -> None:
    if not condition:
        raise DataError(f"{key}: {problem}")


def _distinct(values: tuple[str, ...], key: str, least: int) -> None:
    _require(all(isinstance(value, str) for value in values), key, f"must be texts, got {list(values)!r}")
    _require(len(values) >= least, key, f"must list at least {least}, got {len(values)}")
    repeated = [value for value, count in Counter(values).items() if count > 1]
    _require(not repeated, key, f"lists {', '.join(map(repr, repeated))} more than once")


@dataclass(frozen=True)
class Numeric:
    """A numeric column: clipped to its declared bounds, then mapped onto the interval `to`.

    `scale` is "linear" or "log1p" (the map is then linear in log(1+x)); `missing` is the number that a
    missing cell stands for (None: a missing cell is an error).

    >>> Numeric("age", (17, 90)).n_features
    1
    """

    name: str
    bounds: tuple[float, float]
    scale: str = "linear"
    to: tuple[float, float] = (-1.0, 1.0)
    missing: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for key, (low, high) in (("bounds", self.bounds), ("to", self.to)):
            ordered = math.isfinite(low) and math.isfinite(high) and low < high
            _require(
                ordered,
                f"columns.{self.name}.{key}",
                f"must be [low, high] with low < high, got [{low}, {high}]",
            )
        key = f"columns.{self.name}"
        _require(
            self.scale in ("linear", "log1p"),
            f"{key}.scale",
            f'must be "linear" or "log1p", got "{self.scale}"',
        )
        _require(
            self.scale == "linear" or self.bounds[0] >= 0,
            f"{key}.bounds",
            "log1p needs a lower bound of at least 0",
        )
        _require(self.missing is None or math.isfinite(self.missing), f"{key}.missing", "must be a finite number")

    @property
    def n_features(self) -> int:
        """Always one."""
        return 1

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The column's own name."""
        return (self.name,)

    def describe(self) -> str:
        """What becomes of a cell, in words."""
        ends = f"[{self.bounds[0]:g}, {self.bounds[1]:g}]"
        scaled = f"{self.scale} onto [{self.to[0]:g}, {self.to[1]:g}]"
        missing = "" if self.missing is None else f", a missing cell counts as {self.missing:g}"
        return f"numeric, clipped to {ends}, {scaled}{missing}"


@dataclass(frozen=True)
class Categorical:
    """A column of listed categories, one-hot; `other` and `missing` each add one for cells of that kind.

    >>> Categorical("sex", ("Female", "Male"), missing=True).feature_names
    ('sex=Female', 'sex=Male', 'sex=(missing)')
    """

    name: str
    categories: tuple[str, ...]
    other: bool = False
    missing: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        _distinct(self.categories, f"columns.{self.name}.categories", least=1)

    @property
    def n_features(self) -> int:
        """Width of the one-hot block."""
        return len(self.categories) + self.other + self.missing

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for each position of the one-hot block."""
        extra = ("(other)",) * self.other + ("(missing)",) * self.missing
        return tuple(f"{self.name}={category}" for category in self.categories + extra)

    def describe(self) -> str:
        """What becomes of a cell, in words."""
        extra = " + other" * self.other + " + missing" * self.missing
        noun = "category" if len(self.categories) == 1 else "categories"
        return f"{len(self.categories)} {noun}{extra}, one-hot"


@dataclass(frozen=True)
class Ignored:
    """A column that is in the file and is not used."""

    name: str
    source: str = ""


@dataclass(frozen=True)
class Unit:
    """The column that names each record's unit (a person, a device); no feature is made of it."""

    name: str
    source: str = ""


@dataclass(frozen=True)
class Label:
    """The column to predict, and its classes in the order of their numbers."""

    name: str
    classes: tuple[str, ...]
    source: str = ""

    def __post_init__(self) -> None:
        _distinct(self.classes, "label.classes", least=2)


@dataclass(frozen=True)
class Schema:
    """All that is public about a table. Features follow the order of `columns`.

    `missing` lists the cell texts that mean "no value"; `origin` is where the schema itself came from.
    Without a `delimiter` a text file's ending decides: a tab for `.tsv`, else a comma.

    >>> columns = Numeric("age", (17, 90)), Categorical("sex", ("F", "M"))
    >>> schema = Schema("toy", columns, Label("y", ("no", "yes")))
    >>> schema.feature_names
    ('age', 'sex=F', 'sex=M')
    >>> print(*schema.describe(), sep="\\n")
    schema toy: 3 features, 2 classes; nothing is learned from rows
    age: numeric, clipped to [17, 90], linear onto [-1, 1] (declared)
    sex: 2 categories, one-hot (declared)
    y: label, classes no, yes (declared)
    """

    name: str
    columns: tuple[Numeric | Categorical, ...]
    label: Label
    ignored: tuple[Ignored, ...] = ()
    missing: tuple[str, ...] = ()
    delimiter: str | None = None
    origin: str = ""
    unit: Unit | None = None

    def __post_init__(self) -> None:
        _require(len(self.columns) > 0, "columns", "at least one numeric or categorical column is needed")
        _distinct(self.declared, "columns", least=1)
        _distinct(self.missing, "missing", least=0)
        usable = self.delimiter is None or (len(self.delimiter) == 1 and self.delimiter not in '"\r\n')
        _require(usable, "delimiter", f"must be one character, got {self.delimiter!r}")
        listed = [(f"columns.{c.name}.categories", c.categories) for c in self.columns if isinstance(c, Categorical)]
        for key, values in [*listed, ("label.classes", self.label.classes)]:
            both = [value for value in values if value in self.missing]
            _require(not both, key, f"{both} also marks a missing cell; keep it in one of the two places")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Schema:
        """Read a schema from a TOML file; the form is in `docs/data.md`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: the schema cannot be read: {error}") from error
        return Schema.parse(text, origin=str(path))

    @staticmethod
    def parse(text: str, origin: str = "schema") -> Schema:
        """Read a schema from TOML text.

        >>> toml = '''
        ... name = "toy"
        ... label = { column = "y", classes = ["no", "yes"] }
        ... [columns.age]
        ... kind = "numeric"
        ... bounds = [17, 90]
        ... '''
        >>> Schema.parse(toml).columns[0].bounds
        (17.0, 90.0)
        """
        try:
            return _schema(tomllib.loads(text), origin)
        except tomllib.TOMLDecodeError as error:
            raise DataError(f"{origin}: not valid TOML: {error}") from error
        except DataError as error:
            raise DataError(f"{origin}: {error}") from None

    @property
    def declared(self) -> tuple[str, ...]:
        """Names of all columns that a file must have, the label's last."""
        return (*(column.name for column in (*self.columns, *self.ignored)), *self.used[len(self.columns) :])

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the columns that are read: features, the unit if there is one, the label."""
        unit = () if self.unit is None else (self.unit.name,)
        return (*(column.name for column in self.columns), *unit, self.label.name)

    @property
    def n_features(self) -> int:
        """Width of an encoded row."""
        return sum(column.n_features for column in self.columns)

    @property
    def n_classes(self) -> int:
        """Declared classes of the label."""
        return len(self.label.classes)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for each number of an encoded row."""
        return tuple(name for column in self.columns for name in column.feature_names)

    def describe(self) -> tuple[str, ...]:
        """What was taken from where, a line for each column."""
        declared = f"declared in {Path(self.origin).name}" if self.origin else "declared"
        size = f"{self.n_features} features, {self.n_classes} classes"
        total = f"schema {self.name}: {size}; nothing is learned from rows"
        uses = [(column.name, column.describe(), column.source) for column in self.columns]
        uses.append((self.label.name, f"label, classes {', '.join(self.label.classes)}", self.label.source))
        if self.unit is not None:
            uses.append((self.unit.name, "names each record's unit, no feature", self.unit.source))
        uses += [(column.name, "not used", column.source) for column in self.ignored]
        return (total, *(f"{name}: {use} ({source or declared})" for name, use, source in uses))


# Reading TOML: every accessor names the key that it could not use.


def _keys(table: Mapping[str, object], key: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    for name in table:
        place = f"{key}.{name}" if key else name
        _require(name in allowed, place, f"unknown key; known here: {', '.join(allowed)}")


def _table(value: object, key: str) -> Mapping[str, object]:
    _require(
        isinstance(value, dict),
        key,
        "must be a TOML table and is " + ("missing" if value is None else repr(value)),
    )
    return cast("Mapping[str, object]", value)


def _text(value: object, key: str) -> str:
    _require(isinstance(value, str), key, f"must be a text, got {value!r}" if value is not None else "is missing")
    return cast(str, value)


def _flag(value: object, key: str) -> bool:
    _require(isinstance(value, bool), key, f"must be true or false, got {value!r}")
    return cast(bool, value)


def _number(value: object, key: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(is_number, key, f"must be a number, got {value!r}")
    return float(cast(float, value))


def _pair(value: object, key: str) -> tuple[float, float]:
    _require(isinstance(value, list) and len(value) == 2, key, f"must be [low, high], got {value!r}")
    low, high = cast("list[object]", value)
    return _number(low, key), _number(high, key)


def _texts(value: object, key: str) -> tuple[str, ...]:
    """A list of texts; whole numbers are taken as their text, since cells are compared as text."""
    _require(
        isinstance(value, list),
        key,
        f"must be a list of texts, got {value!r}" if value is not None else "is missing",
    )
    items = cast("list[object]", value)
    usable = all(isinstance(item, (str, int)) and not isinstance(item, bool) for item in items)
    _require(usable, key, f"must be a list of texts or whole numbers, got {value!r}")
    return tuple(str(item) for item in items)


def _column(name: str, value: object) -> Numeric | Categorical | Ignored | Unit:
    key = f"columns.{name}"
    table = _table(value, key)
    kind = _text(table.get("kind"), f"{key}.kind")
    source = _text(table.get("source", ""), f"{key}.source")
    if kind == "numeric":
        _keys(table, key, ("kind", "bounds", "scale", "to", "missing", "source"))
        return Numeric(
            name,
            bounds=_pair(table.get("bounds"), f"{key}.bounds"),
            scale=_text(table.get("scale", "linear"), f"{key}.scale"),
            to=_pair(table.get("to", [-1, 1]), f"{key}.to"),
            missing=_number(table["missing"], f"{key}.missing") if "missing" in table else None,
            source=source,
        )
    if kind == "categorical":
        _keys(table, key, ("kind", "categories", "other", "missing", "source"))
        return Categorical(
            name,
            categories=_texts(table.get("categories"), f"{key}.categories"),
            other=_flag(table.get("other", False), f"{key}.other"),
            missing=_flag(table.get("missing", False), f"{key}.missing"),
            source=source,
        )
    known = 'must be "numeric", "categorical", "unit" or "ignored"'
    _require(kind in ("unit", "ignored"), f"{key}.kind", f'{known}, got "{kind}"')
    _keys(table, key, ("kind", "source"))
    return Unit(name, source) if kind == "unit" else Ignored(name, source)


def _schema(document: Mapping[str, object], origin: str) -> Schema:
    _keys(document, "", ("name", "missing", "delimiter", "label", "columns"))
    columns = [_column(name, value) for name, value in _table(document.get("columns"), "columns").items()]
    units = [column for column in columns if isinstance(column, Unit)]
    _require(len(units) <= 1, "columns", f'only one may be of kind "unit", and {len(units)} are')
    label = _table(document.get("label"), "label")
    _keys(label, "label", ("column", "classes", "source"))
    return Schema(
        name=_text(document.get("name", Path(origin).stem), "name"),
        columns=tuple(column for column in columns if isinstance(column, Numeric | Categorical)),
        label=Label(
            _text(label.get("column"), "label.column"),
            _texts(label.get("classes"), "label.classes"),
            _text(label.get("source", ""), "label.source"),
        ),
        ignored=tuple(column for column in columns if isinstance(column, Ignored)),
        missing=_texts(document.get("missing", []), "missing"),
        delimiter=_text(document["delimiter"], "delimiter") if "delimiter" in document else None,
        origin=origin,
        unit=units[0] if units else None,
    )
