"""Tables from CSV and Parquet files, through a declared schema, into tensors.

Assumes that the schema is public. A cell that the schema does not provide for is an error that names file,
row and column: finding it is a set-up step of whoever holds the data.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from diskdp.datasets.schema import Categorical, Label, Numeric, Schema, Unit
from diskdp.datasets.split import DataInfo, Split, no_rows
from diskdp.errors import DataError

CHUNK_ROWS = 50_000
"""Rows encoded at a time, so that a long file's text is never in memory at once."""

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Numbers:
    """Cells of a column that was stored as numbers."""

    values: Floats
    missing: npt.NDArray[np.bool_]


Cells: TypeAlias = "Sequence[str | None] | Numbers"
Place: TypeAlias = Callable[[int], str]
"""Says where row i of a chunk is, for error messages."""


def load_table(
    train: str | os.PathLike[str],
    test: str | os.PathLike[str] | None,
    schema: Schema | str | os.PathLike[str],
) -> Split:
    """Read a table (CSV or Parquet) and, where there is one, its test table through one schema.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "people.csv").write_text("age,sex,y\\n17,F,no\\n90,M,yes\\n")
    >>> _ = (folder / "people.toml").write_text('''
    ... label = { column = "y", classes = ["no", "yes"] }
    ... columns.age = { kind = "numeric", bounds = [17, 90] }
    ... columns.sex = { kind = "categorical", categories = ["F", "M"] }
    ... ''')
    >>> split = load_table(folder / "people.csv", None, folder / "people.toml")
    >>> split.train.tensors
    (tensor([[-1.,  1.,  0.],
            [ 1.,  0.,  1.]]), tensor([0, 1]))
    >>> split.info.n_features, split.info.n_classes, len(split.test)
    (3, 2, 0)
    """
    declared = schema if isinstance(schema, Schema) else Schema.load(schema)
    rows, units = _read(train, declared)
    tested = no_rows(rows) if test is None else read_table(test, declared)
    return Split(rows, tested, table_info(declared), None if declared.unit is None else units)


def table_info(schema: Schema) -> DataInfo:
    """The public facts of any table with this schema."""
    return DataInfo(schema.name, (schema.n_features,), schema.label.classes, schema.describe())


def read_table(path: str | os.PathLike[str], schema: Schema) -> TensorDataset:
    """Read one file: features float32 [N, d] and labels int64 [N].

    The file's ending decides: `.csv`, `.tsv`, `.txt` (with a header; each also as `.gz`) or `.parquet`.
    """
    return _read(path, schema)[0]


def _read(path: str | os.PathLike[str], schema: Schema) -> tuple[TensorDataset, tuple[str, ...]]:
    """The examples, and each one's unit where the schema has a column for it."""
    file = Path(path)
    suffixes = [suffix.lower() for suffix in file.suffixes]
    ending = "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    if ending in (".parquet", ".pq"):
        chunks = _parquet_chunks(file, schema)
    elif ending.removesuffix(".gz") in (".csv", ".tsv", ".txt"):
        chunks = _csv_chunks(file, schema)
    else:
        raise DataError(f"{file}: not a known kind of table; use .csv, .tsv, .txt (or these with .gz) or .parquet")
    parts: list[tuple[Tensor, Tensor]] = []
    units: list[str] = []
    for columns, place in chunks:
        parts.append(encode(schema, columns, place))
        if schema.unit is not None:
            units += _units(schema.unit, columns[schema.unit.name], schema.missing, place)
    if not parts:
        raise DataError(f"{file}: the table has no rows")
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])), tuple(units)


def encode(schema: Schema, columns: Mapping[str, Cells], place: Place) -> tuple[Tensor, Tensor]:
    """Turn the cells of some rows into features and labels."""
    labels = _codes(schema.label, columns[schema.label.name], schema.missing, place)
    features = np.zeros((len(labels), schema.n_features), dtype=np.float32)
    at = 0
    for column in schema.columns:
        cells = columns[column.name]
        if isinstance(column, Numeric):
            features[:, at] = _scaled(column, cells, schema.missing, place)
        else:
            features[np.arange(len(labels)), at + _codes(column, cells, schema.missing, place)] = 1.0
        at += column.n_features
    return torch.from_numpy(features), torch.from_numpy(labels)


def _units(unit: Unit, cells: Cells, markers: Sequence[str], place: Place) -> list[str]:
    assert not isinstance(cells, Numbers)
    for row, cell in enumerate(cells):
        if cell is None or not cell or cell in markers:
            _refuse(place, row, unit.name, "the unit is missing, so nobody could say how many records it has")
    return [str(cell) for cell in cells]


def _refuse(place: Place, row: int, column: str, problem: str) -> NoReturn:
    raise DataError(f"{place(row)}, column {column!r}: {problem}")


def _scaled(column: Numeric, cells: Cells, markers: Sequence[str], place: Place) -> Floats:
    numbers = cells if isinstance(cells, Numbers) else _parsed(column, cells, markers, place)
    values = numbers.values
    unusable = ~np.isfinite(values) & ~numbers.missing
    if unusable.any():
        row = int(unusable.argmax())
        _refuse(place, row, column.name, f"{values[row]} is not a finite number; mark it as missing or correct it")
    if numbers.missing.any():
        if column.missing is None:
            problem = f"the cell is missing; declare columns.{column.name}.missing = a number, or drop the row"
            _refuse(place, int(numbers.missing.argmax()), column.name, problem)
        values = np.where(numbers.missing, column.missing, values)
    low, high = column.bounds
    values = np.clip(values, low, high)
    if column.scale == "log1p":
        values, low, high = np.log1p(values), np.log1p(low), np.log1p(high)
    start, end = column.to
    return np.asarray(start + (values - low) * ((end - start) / (high - low)))


def _parsed(column: Numeric, cells: Sequence[str | None], markers: Sequence[str], place: Place) -> Numbers:
    absent = {None, *markers}
    missing = np.fromiter((cell in absent for cell in cells), dtype=np.bool_, count=len(cells))
    try:
        values = [0.0 if cell is None or cell in absent else float(cell) for cell in cells]
    except ValueError:
        row = next(i for i, cell in enumerate(cells) if cell not in absent and not _is_number(cell))
        _refuse(place, row, column.name, f"{cells[row]!r} is not a number")
    return Numbers(np.asarray(values, dtype=np.float64), missing)


def _is_number(cell: str | None) -> bool:
    try:
        float(cell or "")
    except ValueError:
        return False
    return True


def _codes(column: Categorical | Label, cells: Cells, markers: Sequence[str], place: Place) -> npt.NDArray[np.int64]:
    """The position of each cell among the declared values; one that has none is refused."""
    if isinstance(cells, Numbers):
        raise TypeError(f"column {column.name!r} must be given as text")
    values = column.classes if isinstance(column, Label) else column.categories
    other = len(values) if isinstance(column, Categorical) and column.other else -1
    missing = column.n_features - 1 if isinstance(column, Categorical) and column.missing else -2
    positions: dict[str | None, int] = {value: i for i, value in enumerate(values)}
    positions |= dict.fromkeys((None, *markers), missing)
    codes = np.fromiter((positions.get(cell, other) for cell in cells), dtype=np.int64, count=len(cells))
    if codes.size and codes.min() < 0:
        row = int((codes < 0).argmax())
        _refuse(place, row, column.name, _why_not(column, cells[row], absent=codes[row] == -2))
    return codes


def _why_not(column: Categorical | Label, cell: str | None, absent: bool) -> str:
    if isinstance(column, Label):
        known = ", ".join(column.classes[:10]) + (", ..." if len(column.classes) > 10 else "")
        return "the label is missing" if absent else f"{cell!r} is not a declared class ({known})"
    if absent:
        return f"the cell is missing; declare columns.{column.name}.missing = true to make it a category"
    return f"unknown category {cell!r}; declare it, or columns.{column.name}.other = true"


def _check_header(path: Path, names: Sequence[str], schema: Schema) -> None:
    declared = schema.declared
    missing = [name for name in declared if name not in names]
    repeated = [name for name in declared if list(names).count(name) > 1]
    extra = [name for name in names if name not in declared]
    if missing:
        raise DataError(f"{path}: missing column {_listed(missing)}; the file has {_listed(names)}")
    if repeated:
        raise DataError(f"{path}: column {_listed(repeated)} appears more than once")
    if extra:
        raise DataError(f'{path}: column {_listed(extra)} is not in the schema; declare it, if only kind = "ignored"')


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _csv_chunks(path: Path, schema: Schema) -> Iterator[tuple[Mapping[str, Cells], Place]]:
    try:
        open_text = gzip.open if path.suffix.lower() == ".gz" else open
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as stream:
            tabs = ".tsv" in (suffix.lower() for suffix in path.suffixes)
            delimiter = schema.delimiter or ("\t" if tabs else ",")
            yield from _csv_rows(path, csv.reader(stream, delimiter=delimiter, strict=True), schema)
    except UnicodeDecodeError as error:
        with open_text(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            where = _first_undecoded(csv.reader(stream, delimiter=delimiter))
        raise DataError(f"{path}, {where}: is not UTF-8 text; save the table as UTF-8") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path}: the table cannot be read: {error}") from error


def _first_undecoded(reader: Any) -> str:
    """Where the first cell is with a byte that stands for itself, since it is no UTF-8."""
    names: list[str] = []
    count = 0
    with contextlib.suppress(csv.Error):
        for row in reader:
            for i, cell in enumerate(row):
                if any("\udc80" <= character <= "\udcff" for character in cell):
                    column = f"column {names[i].strip()!r}" if i < len(names) else f"field {i + 1}"
                    return f"row {count} (line {reader.line_num}), {column}" if names else f"the header, {column}"
            names = names or row
            count += bool(row)
    return "some row"


def _csv_rows(path: Path, reader: Any, schema: Schema) -> Iterator[tuple[Mapping[str, Cells], Place]]:
    names = [name.strip() for name in next(reader, [])]
    if not names:
        raise DataError(f"{path}: the first line is empty; it must be the header")
    _check_header(path, names, schema)
    used = {name: names.index(name) for name in schema.used}
    rows: list[list[str]] = []
    lines: list[int] = []
    done = 0

    def chunk() -> tuple[Mapping[str, Cells], Place]:
        first, at = done, tuple(lines)
        cells = {name: [row[i].strip() for row in rows] for name, i in used.items()}
        return cells, lambda i: f"{path}, row {first + i + 1} (line {at[i]})"

    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            where = f"{path}, row {done + len(rows) + 1} (line {reader.line_num})"
            raise DataError(f"{where}: {len(row)} fields where the header has {len(names)}")
        rows.append(row)
        lines.append(reader.line_num)
        if len(rows) == CHUNK_ROWS:
            yield chunk()
            done += len(rows)
            rows, lines = [], []
    if rows:
        yield chunk()


def _parquet_chunks(path: Path, schema: Schema) -> Iterator[tuple[Mapping[str, Cells], Place]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        message = f"{path}: reading Parquet needs pyarrow; install it with: pip install 'diskdp[parquet]'"
        raise DataError(message) from None
    numeric = {column.name for column in schema.columns if isinstance(column, Numeric)}
    used = list(schema.used)

    def cells(name: str, array: Any) -> Cells:
        kind, types = array.type, arrow.types
        if name in numeric and (types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)):
            values = array.cast(arrow.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
            return Numbers(values, array.is_null().to_numpy(zero_copy_only=False))
        return [None if value is None else str(value).strip() for value in array.to_pylist()]

    def place_from(first: int) -> Place:
        return lambda i: f"{path}, row {first + i + 1}"

    done = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_header(path, file.schema_arrow.names, schema)
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=used):
                if batch.num_rows:
                    yield {name: cells(name, batch.column(name)) for name in used}, place_from(done)
                done += batch.num_rows
    except (OSError, UnicodeDecodeError, arrow.ArrowException) as error:
        raise DataError(f"{path}: the table cannot be read: {error}") from error
