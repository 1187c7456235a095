"""Tables and images against hand-computed values; each guard has a damaged input that trips it."""

from __future__ import annotations

import csv
import doctest
import gzip
import math
import re
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from diskdp.datasets import Categorical, Label, Numeric, Scaling, Schema, adult, load_images, load_table
from diskdp.datasets.packaged import adult_schema
from diskdp.datasets.split import Split
from diskdp.errors import DataError

TOML = """
name = "people"
missing = ["?", ""]
[label]
column = "y"
classes = ["no", "yes"]
[columns.age]
kind = "numeric"
bounds = [20, 60]
[columns.gain]
kind = "numeric"
bounds = [0, 1000]
scale = "log1p"
to = [0, 1]
missing = 0
source = "the form allows up to 1000"
[columns.city]
kind = "categorical"
categories = ["Oslo", "Rome"]
other = true
missing = true
[columns.code]
kind = "categorical"
categories = [1, 2]
[columns.id]
kind = "ignored"
"""
HEADER = "id,age,gain,city,code,y\n"


@pytest.fixture
def schema() -> Schema:
    return Schema.parse(TOML, origin="people.toml")


def features(split: Split) -> list[list[float]]:
    rows: list[list[float]] = split.train.tensors[0].tolist()
    return rows


def write(folder: Path, text: str, name: str = "people.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# The packaged table


@pytest.fixture(scope="module")
def census() -> Split:
    return adult()


def test_adult_is_the_whole_published_table(census: Split) -> None:
    assert (len(census.train), len(census.test)) == (32_561, 16_281)
    # Class counts as published with the data: 24.08% of the training rows earn more than 50K.
    assert torch.bincount(census.train.tensors[1]).tolist() == [24_720, 7_841]
    assert torch.bincount(census.test.tensors[1]).tolist() == [12_435, 3_846]
    with np.load(str(resources.files("diskdp.datasets") / "files/adult.npz"), allow_pickle=False) as arrays:
        columns = [name.removeprefix("train/") for name in arrays if name.startswith("train/")]
        assert len(columns) == 15
        # Sums of fnlwgt over the original text files; they pin a column that the schema does not use.
        assert int(arrays["train/fnlwgt"].sum(dtype=np.int64)) == 6_179_373_392
        assert int(arrays["test/fnlwgt"].sum(dtype=np.int64)) == 3_084_202_270


def test_adult_first_row_by_hand(census: Split) -> None:
    """39, State-gov, -, -, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, US."""
    row = dict(zip(adult_schema().feature_names, census.train.tensors[0][0].tolist(), strict=True))
    on = {name for name, value in row.items() if "=" in name and value}
    assert on == {
        "workclass=State-gov",
        "marital-status=Never-married",
        "occupation=Adm-clerical",
        "relationship=Not-in-family",
        "race=White",
        "sex=Male",
        "native-country=United-States",
    }
    expected = {
        "age": 2 * (39 - 17) / 73 - 1,
        "education-num": 2 * 12 / 15 - 1,
        "capital-gain": math.log1p(2174) / math.log1p(99999),
        "capital-loss": 0.0,
        "hours-per-week": 2 * 39 / 98 - 1,
    }
    assert {name: value for name, value in row.items() if "=" not in name} == pytest.approx(expected, abs=1e-6)


def test_adult_encoding_is_complete_and_bounded(census: Split) -> None:
    schema = adult_schema()
    for rows in (census.train, census.test):
        x = rows.tensors[0]
        assert x.abs().max() <= 1 + 1e-6
        at = 0
        for column in schema.columns:
            if isinstance(column, Categorical):
                assert torch.equal(x[:, at : at + column.n_features].sum(1), torch.ones(len(x)))
            at += column.n_features
        assert at == x.shape[1] == census.info.n_features


def test_adult_ships_small_with_its_licence_and_loads_fast() -> None:
    files = resources.files("diskdp.datasets") / "files"
    assert sum(len(file.read_bytes()) for file in files.iterdir()) <= 1_000_000
    text = (files / "README.md").read_text(encoding="utf-8")
    assert all(part in text for part in ("CC BY 4.0", "Becker", "Kohavi", "10.24432/C5XW20"))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        adult()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5


def test_adult_says_what_came_from_where(census: Split) -> None:
    text = "\n".join(census.info.provenance)
    for column in adult_schema().declared:
        assert f"{column}: " in text
    assert "adult.names" in text
    assert "nothing is learned from rows" in text


# Schemas


def test_schema_reads_every_key(schema: Schema) -> None:
    assert schema.columns == (
        Numeric("age", (20, 60)),
        Numeric("gain", (0, 1000), "log1p", (0, 1), 0.0, "the form allows up to 1000"),
        Categorical("city", ("Oslo", "Rome"), other=True, missing=True),
        Categorical("code", ("1", "2")),
    )
    assert schema.label == Label("y", ("no", "yes"))
    assert [column.name for column in schema.ignored] == ["id"]
    assert (schema.name, schema.missing, schema.n_features, schema.n_classes) == ("people", ("?", ""), 8, 2)
    assert schema.feature_names == (
        *("age", "gain", "city=Oslo", "city=Rome", "city=(other)", "city=(missing)"),
        *("code=1", "code=2"),
    )


def test_schema_describes_each_column(schema: Schema) -> None:
    lines = schema.describe()
    assert lines[1:] == (
        "age: numeric, clipped to [20, 60], linear onto [-1, 1] (declared in people.toml)",
        "gain: numeric, clipped to [0, 1000], log1p onto [0, 1], a missing cell counts as 0 "
        "(the form allows up to 1000)",
        "city: 2 categories + other + missing, one-hot (declared in people.toml)",
        "code: 2 categories, one-hot (declared in people.toml)",
        "y: label, classes no, yes (declared in people.toml)",
        "id: not used (declared in people.toml)",
    )


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("bounds = [20, 60]", "bounds = [60, 20]", "columns.age.bounds"),
        ("bounds = [20, 60]", "bounds = [20, inf]", "columns.age.bounds"),
        ("bounds = [20, 60]", "bounds = [20]", "columns.age.bounds"),
        ("bounds = [20, 60]", 'bounds = ["20", 60]', "columns.age.bounds"),
        ("bounds = [20, 60]", "", "columns.age.bounds"),
        ("bounds = [20, 60]", "bounds = [20, 60]\nbound = 3", "columns.age.bound: unknown key"),
        ("bounds = [0, 1000]", "bounds = [-1, 1000]", "columns.gain.bounds: log1p"),
        ('scale = "log1p"', 'scale = "log"', "columns.gain.scale"),
        ("to = [0, 1]", "to = [1, 1]", "columns.gain.to"),
        ("missing = 0", "missing = true", "columns.gain.missing"),
        ("missing = 0", "missing = nan", "columns.gain.missing"),
        ("categories = [1, 2]", "categories = []", "columns.code.categories"),
        ("categories = [1, 2]", "categories = [1, 1]", "columns.code.categories"),
        ("categories = [1, 2]", "categories = [1.5, 2]", "columns.code.categories"),
        ("categories = [1, 2]", 'categories = ["1", "?"]', "columns.code.categories: ['?']"),
        ("other = true", 'other = "yes"', "columns.city.other"),
        ('kind = "ignored"', 'kind = "text"', "columns.id.kind"),
        ('kind = "ignored"', "", "columns.id.kind: is missing"),
        ('classes = ["no", "yes"]', 'classes = ["no"]', "label.classes"),
        ('classes = ["no", "yes"]', "", "label.classes: is missing"),
        ('column = "y"', 'column = "age"', "columns: lists 'age' more than once"),
        ('[label]\ncolumn = "y"\nclasses = ["no", "yes"]', "", "label: must be a TOML table"),
        ('missing = ["?", ""]', 'missing = "?"', "missing: must be a list"),
        ('name = "people"', 'delimiter = "::"', "delimiter"),
        ('name = "people"', 'nome = "people"', "nome: unknown key"),
        ('name = "people"', "name = people", "not valid TOML"),
    ],
)
def test_schema_errors_name_file_and_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    assert old in TOML
    path = write(tmp_path, TOML.replace(old, new), "people.toml")
    with pytest.raises(DataError) as caught:
        Schema.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schema_needs_a_feature_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one numeric or categorical"):
        Schema("empty", (), Label("y", ("a", "b")))
    with pytest.raises(DataError, match=r"none\.toml: the schema cannot be read"):
        Schema.load(tmp_path / "none.toml")


# Tables

GOOD = HEADER + "7,20,0,Oslo,1,no\n8,40,1000,Rome,2,yes\n\n9,99,?,Bern,1, yes\n10,-5,30.5,?,2,no\n"
ENCODED = [
    [-1, 0, 1, 0, 0, 0, 1, 0],
    [0, 1, 0, 1, 0, 0, 0, 1],
    [1, 0, 0, 0, 1, 0, 1, 0],
    [-1, float(np.log1p(30.5) / np.log1p(1000)), 0, 0, 0, 1, 0, 1],
]


@pytest.mark.parametrize("form", ["plain", "bom", "gz", "tsv", "reordered", "crlf"])
def test_csv_by_hand(tmp_path: Path, schema: Schema, form: str) -> None:
    name = {"gz": "people.csv.gz", "tsv": "people.tsv"}.get(form, "people.csv")
    text = GOOD
    if form == "tsv":
        text = text.replace(",", "\t")
    if form == "crlf":
        text = text.replace("\n", "\r\n")
    if form == "reordered":
        text = "".join(",".join(reversed(line.split(","))) + "\n" for line in GOOD.splitlines() if line)
    raw = text.encode("utf-8-sig" if form == "bom" else "utf-8")
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if form == "gz" else raw)
    split = load_table(path, path, schema)
    torch.testing.assert_close(split.train.tensors[0], torch.tensor(ENCODED))
    assert split.train.tensors[0].dtype == torch.float32
    assert split.train.tensors[1].tolist() == [0, 1, 1, 0]
    assert torch.equal(split.test.tensors[0], split.train.tensors[0])
    assert (split.info.n_features, split.info.n_classes, split.info.input_shape) == (8, 2, (8,))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("9,x,0,Oslo,1,no", "row 3 (line 5), column 'age': 'x' is not a number"),
        ("9,nan,0,Oslo,1,no", "row 3 (line 5), column 'age': nan is not a finite number"),
        ("9,1e999,0,Oslo,1,no", "row 3 (line 5), column 'age': inf is not a finite number"),
        ("9,?,0,Oslo,1,no", "row 3 (line 5), column 'age': the cell is missing"),
        ("9,,0,Oslo,1,no", "row 3 (line 5), column 'age': the cell is missing"),
        ("9,30,0,Oslo,3,no", "row 3 (line 5), column 'code': unknown category '3'"),
        ("9,30,0,Oslo,?,no", "row 3 (line 5), column 'code': the cell is missing"),
        ("9,30,0,Oslo,1,maybe", "row 3 (line 5), column 'y': 'maybe' is not a declared class (no, yes)"),
        ("9,30,0,Oslo,1,?", "row 3 (line 5), column 'y': the label is missing"),
        ("9,30,0,Oslo,1", "row 3 (line 5): 5 fields where the header has 6"),
        ("9,30,0,Oslo,1,no,", "row 3 (line 5): 7 fields where the header has 6"),
        ('9,30,0,"Oslo,1,no', "the table cannot be read: unexpected end of data"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 50_000])
def test_bad_rows_are_named(
    tmp_path: Path, schema: Schema, monkeypatch: pytest.MonkeyPatch, row: str, says: str, chunk: int
) -> None:
    monkeypatch.setattr("diskdp.datasets.tables.CHUNK_ROWS", chunk)
    path = write(tmp_path, HEADER + "7,20,0,Oslo,1,no\n8,40,10,Rome,2,yes\n\n" + row + "\n")
    with pytest.raises(DataError) as caught:
        load_table(path, None, schema)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("id,age,gain,town,code,y", "missing column 'city'; the file has 'id', 'age'"),
        ("id,age,gain,city,code,label", "missing column 'y'"),
        ("id,age,gain,city,code,y,zip", "column 'zip' is not in the schema"),
        ("id,age,gain,city,code,y,age", "column 'age' appears more than once"),
        ("", "the first line is empty"),
        (HEADER.strip(), "the table has no rows"),
    ],
)
def test_bad_headers_are_named(tmp_path: Path, schema: Schema, header: str, says: str) -> None:
    path = write(tmp_path, header + "\n")
    with pytest.raises(DataError) as caught:
        load_table(path, None, schema)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_unreadable_table_files(tmp_path: Path, schema: Schema) -> None:
    packed = gzip.compress(GOOD.encode() * 50)
    cases: dict[str, bytes | None] = {
        "gone.csv": None,
        "table.xlsx": b"x",
        "latin.csv": (HEADER + "7,20,0,Orléans,1,no\n").encode("latin-1"),
        "nul.csv": b"id,age\0",
        "cut.csv.gz": packed[: len(packed) // 2],
        "not.csv.gz": b"plain text",
        "cut.parquet": b"PAR1 and then nothing",
    }
    for name, raw in cases.items():
        path = tmp_path / name
        if raw is not None:
            path.write_bytes(raw)
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            load_table(path, None, schema)


@pytest.mark.parametrize("before", [0, 3, 3000])  # the decoder reads ahead of the rows
def test_what_is_not_utf8_is_named(tmp_path: Path, schema: Schema, before: int) -> None:
    path = tmp_path / "latin.csv.gz"
    text = HEADER + "\n" + "7,20,0,Oslo,1,no\n" * before + "7,20,0,Orléans,1,no\n" + "7,20,0,Oslo,1,no\n" * 2000
    path.write_bytes(gzip.compress(text.encode("latin-1")))
    place = rf"row {before + 1} \(line {before + 3}\), column 'city': is not UTF-8"
    with pytest.raises(DataError, match=place):
        load_table(path, None, schema)
    path.write_bytes(gzip.compress("identité,age\n".encode("latin-1")))
    with pytest.raises(DataError, match="the header, field 1: is not UTF-8"):
        load_table(path, None, schema)


def test_a_row_is_encoded_the_same_in_any_company(tmp_path: Path, schema: Schema) -> None:
    """Whatever depended on other rows would be learned from them."""
    lines = [line for line in GOOD.splitlines()[1:] if line]
    whole = features(load_table(write(tmp_path, GOOD), None, schema))
    for line, together in zip(lines, whole, strict=True):
        alone = features(load_table(write(tmp_path, HEADER + line + "\n"), None, schema))
        assert alone == [together]


def parquet(path: Path, **changes: Any) -> Path:
    columns = {
        "id": [7, 8, 9, 10],
        "age": pa.array([20, 40, 99, -5], pa.int16()),
        "gain": pa.array([0.0, 1000.0, None, 30.5], pa.float64()),
        "city": pa.array(["Oslo", "Rome", "Bern", None]).dictionary_encode(),
        "code": pa.array([1, 2, 1, 2]),
        "y": ["no", "yes", "yes", "no"],
    }
    pq.write_table(pa.table(columns | changes), path, row_group_size=3)
    return path


def test_parquet_equals_csv(tmp_path: Path, schema: Schema) -> None:
    split = load_table(parquet(tmp_path / "people.parquet"), None, schema)
    torch.testing.assert_close(split.train.tensors[0], torch.tensor(ENCODED))
    assert split.train.tensors[1].tolist() == [0, 1, 1, 0]
    as_text = parquet(tmp_path / "text.parquet", age=["20", "40", "99", "-5"], gain=["0", "1000", "?", "30.5"])
    assert features(load_table(as_text, None, schema)) == features(split)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"age": [20.0, 40.0, 99.0, float("nan")]}, "row 4, column 'age': nan is not a finite number"),
        ({"age": [20, 40, 99, None]}, "row 4, column 'age': the cell is missing"),
        ({"age": ["20", "40", "99", "old"]}, "row 4, column 'age': 'old' is not a number"),
        ({"code": [1, 2, 1, 5]}, "row 4, column 'code': unknown category '5'"),
        ({"y": ["no", "yes", "yes", None]}, "row 4, column 'y': the label is missing"),
        ({"zip": [1, 2, 3, 4]}, "column 'zip' is not in the schema"),
    ],
)
def test_parquet_errors_name_the_cell(tmp_path: Path, schema: Schema, changes: Any, says: str) -> None:
    path = parquet(tmp_path / "people.parquet", **changes)
    with pytest.raises(DataError) as caught:
        load_table(path, None, schema)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "people.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'diskdp\[parquet\]'"):
        load_table(path, None, schema)


def test_a_csv_of_adult_equals_the_packaged_table_and_is_quick(tmp_path: Path, census: Split) -> None:
    schema = adult_schema()
    with np.load(str(resources.files("diskdp.datasets") / "files/adult.npz"), allow_pickle=False) as arrays:
        cells = {
            name: arrays[f"texts/{name}"][arrays[f"train/{name}"]]
            if f"texts/{name}" in arrays
            else arrays[f"train/{name}"]
            for name in schema.declared
        }
    path = tmp_path / "adult.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(cells)
        writer.writerows(zip(*(column.tolist() for column in cells.values()), strict=True))
    start = time.process_time()
    split = load_table(path, None, schema)
    assert time.process_time() - start < 1.5
    assert torch.equal(split.train.tensors[0], census.train.tensors[0])
    assert torch.equal(split.train.tensors[1], census.train.tensors[1])
    assert len(split.test) == 0
    assert split.test.tensors[0].shape == (0, 91)


# Images: tiny files of each format, written here from its description


def idx(data: np.ndarray) -> bytes:
    return bytes((0, 0, 8, data.ndim)) + np.array(data.shape, dtype=">u4").tobytes() + data.tobytes()


def write_idx(folder: Path, pack: bool = False) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    labels = np.array([3, 0, 9, 3, 1], dtype=np.uint8)
    files = {
        "train-images-idx3-ubyte": images,
        "train-labels-idx1-ubyte": labels,
        "t10k-images-idx3-ubyte": images[:2],
        "t10k-labels-idx1-ubyte": labels[:2],
    }
    for name, data in files.items():
        (folder / (name + ".gz" * pack)).write_bytes(gzip.compress(idx(data)) if pack else idx(data))
    return images, labels


@pytest.mark.parametrize("pack", [False, True])
def test_idx(tmp_path: Path, pack: bool) -> None:
    images, labels = write_idx(tmp_path, pack)
    split = load_images(tmp_path, scaling="mnist")
    expected = (torch.tensor(images)[:, None].double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(split.train.tensors[0], expected.float())
    assert split.train.tensors[1].tolist() == labels.tolist()
    assert split.train.tensors[1].dtype == torch.int64
    assert split.test.tensors[0].shape == (2, 1, 28, 28)
    assert split.info.input_shape == (1, 28, 28)
    assert split.info.n_classes == 10
    assert "commonly published for MNIST" in "".join(split.info.provenance)
    signed = load_images(tmp_path).train.tensors[0]
    torch.testing.assert_close(signed, (2 * expected * 0.3081 + 2 * 0.1307 - 1).float())


def test_idx_with_other_classes(tmp_path: Path) -> None:
    write_idx(tmp_path)
    assert load_images(tmp_path, n_classes=47).info.n_classes == 47
    with pytest.raises(DataError, match="label 3 of image 0 is outside the 3 declared classes"):
        load_images(tmp_path, n_classes=3)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw[:-1], "the file is damaged"),
        ("train-images-idx3-ubyte", lambda raw: raw + b"x", "the file is damaged"),
        ("train-images-idx3-ubyte", lambda raw: raw[:10], "the file is damaged"),
        ("train-images-idx3-ubyte", lambda raw: b"", "not an IDX file"),
        (
            "train-images-idx3-ubyte",
            lambda raw: b"\x00\x00\x08\x01" + raw[4:],
            "not an IDX file of 3 dimensions",
        ),
        ("t10k-labels-idx1-ubyte", lambda raw: idx(np.zeros(1, np.uint8)), "1 labels for the 2 images"),
    ],
)
def test_damaged_idx_is_named(tmp_path: Path, name: str, damage: Any, says: str) -> None:
    write_idx(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        load_images(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_missing_and_cut_idx(tmp_path: Path) -> None:
    write_idx(tmp_path, pack=True)
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    raw = path.read_bytes()
    path.write_bytes(raw[:-9])
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz: the file cannot be read"):
        load_images(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte \(or \.gz\) is missing"):
        load_images(tmp_path)


def records(labels: list[list[int]], seed: int) -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
    raw = b"".join(bytes(label) + image.tobytes() for label, image in zip(labels, pixels, strict=True))
    return raw, pixels


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10(tmp_path: Path, inner: str) -> None:
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    pixels = []
    for i in range(1, 6):
        raw, images = records([[i], [9]], seed=i)
        (folder / f"data_batch_{i}.bin").write_bytes(raw)
        pixels.append(images)
    (folder / "test_batch.bin").write_bytes(records([[7]], seed=0)[0])
    split = load_images(tmp_path, scaling="unit")
    torch.testing.assert_close(split.train.tensors[0], torch.tensor(np.concatenate(pixels)).float() / 255)
    assert split.train.tensors[1].tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    assert split.test.tensors[1].tolist() == [7]
    assert split.info.classes[7] == "horse"

    (folder / "data_batch_2.bin").write_bytes(records([[1], [10]], seed=0)[0])
    with pytest.raises(DataError, match=r"data_batch_2\.bin: label 10 is above 9"):
        load_images(tmp_path)
    (folder / "data_batch_2.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(DataError, match=r"data_batch_2\.bin: 3072 bytes is no whole number of 3073-byte records"):
        load_images(tmp_path)
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_2\.bin: the file is missing"):
        load_images(tmp_path)


def test_cifar100(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    raw, pixels = records([[19, 99], [0, 5]], seed=1)
    (folder / "train.bin").write_bytes(raw)
    (folder / "test.bin").write_bytes(records([[2, 42]], seed=2)[0])
    scaling = Scaling((0.0,), (1 / 255,), "bytes as they are")
    split = load_images(tmp_path, scaling=scaling)
    torch.testing.assert_close(split.train.tensors[0], torch.tensor(pixels).float())
    assert split.train.tensors[1].tolist() == [99, 5]  # the second label byte, the fine one
    assert split.test.tensors[1].tolist() == [42]
    assert split.info.n_classes == 100
    (folder / "test.bin").write_bytes(records([[2]], seed=2)[0])
    with pytest.raises(DataError, match=r"test\.bin: 3073 bytes is no whole number of 3074-byte records"):
        load_images(tmp_path)


def test_npz_layouts_agree(tmp_path: Path) -> None:
    images = np.random.default_rng(3).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    labels = np.array([[0], [1], [2], [1]])
    path = tmp_path / "set.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    split = load_images(path, n_classes=3, scaling="unit")
    torch.testing.assert_close(split.train.tensors[0], torch.tensor(images).permute(0, 3, 1, 2).float() / 255)
    assert split.train.tensors[1].tolist() == [0, 1, 2, 1]
    assert len(split.test) == 1
    assert split.info.input_shape == (3, 6, 5)
    np.savez(path, images=images.transpose(0, 3, 1, 2) / 255, labels=labels[:, 0])
    again = load_images(tmp_path, n_classes=3, scaling="unit")
    torch.testing.assert_close(again.train.tensors[0], split.train.tensors[0])
    assert len(again.test) == 0
    np.savez(path, images=images[..., 0], labels=labels[:, 0])
    assert load_images(path, n_classes=3).info.input_shape == (1, 6, 5)


BYTES = np.zeros((2, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": BYTES}, "needs x_train"),
        ({"images": BYTES, "labels": np.zeros(3, int)}, "labels: int64 of shape (3,)"),
        ({"images": BYTES, "labels": np.zeros(2)}, "labels: float64 of shape (2,)"),
        (
            {"images": BYTES, "labels": np.array([0, 2])},
            "label 2 of image 1 is outside the 2 declared classes",
        ),
        ({"images": BYTES, "labels": np.array([-1, 0])}, "label -1 of image 0 is outside"),
        ({"images": BYTES.astype(int), "labels": np.zeros(2, int)}, "images: int64 pixels"),
        ({"images": BYTES + 1.5, "labels": np.zeros(2, int)}, "image 0 has pixels outside [0, 1]"),
        ({"images": BYTES * np.nan, "labels": np.zeros(2, int)}, "image 0 has pixels outside [0, 1]"),
        ({"images": np.zeros((2, 3, 4, 3), np.uint8), "labels": np.zeros(2, int)}, "is not clear"),
        ({"images": np.zeros((2, 5, 4, 5), np.uint8), "labels": np.zeros(2, int)}, "is not clear"),
        ({"images": np.zeros((0, 4, 4), np.uint8), "labels": np.zeros(0, int)}, "shape (0, 4, 4)"),
        ({"images": np.array([object()] * 2), "labels": np.zeros(2, int)}, "an array cannot be read"),
    ],
)
def test_bad_npz_is_named(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError) as caught:
        load_images(path, n_classes=2)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(path, images=np.arange(32, dtype=np.uint8).reshape(2, 4, 4), labels=np.zeros(2, int))
    raw = path.read_bytes()
    with pytest.raises(DataError, match="number of classes must be declared"):
        load_images(path)
    spoiled = bytearray(raw)
    spoiled[80] ^= 255
    for damaged in (raw[: len(raw) // 2], b"", b"no archive", bytes(spoiled)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"set\.npz"):
            load_images(path, n_classes=2)
    single = tmp_path / "one.npz"
    with single.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataError, match=r"one\.npz: not an \.npz archive"):
        load_images(single, n_classes=2)


def test_what_is_in_the_folder_must_be_clear(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load_images(tmp_path / "gone")
    with pytest.raises(DataError, match="no image set found"):
        load_images(tmp_path)
    write_idx(tmp_path)
    with pytest.raises(DataError, match=r"not an \.npz file"):
        load_images(tmp_path / "train-images-idx3-ubyte")
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"several image sets \(IDX, CIFAR-100\)"):
        load_images(tmp_path)


def test_scalings_are_checked(tmp_path: Path) -> None:
    write_idx(tmp_path)
    with pytest.raises(DataError, match="unknown name 'imagenet'"):
        load_images(tmp_path, scaling="imagenet")
    with pytest.raises(DataError, match="for 3 channels, the images have 1"):
        load_images(tmp_path, scaling="cifar10")
    with pytest.raises(DataError, match="each std above 0"):
        Scaling((0.5,), (0.0,), "none")
    with pytest.raises(DataError, match="n_classes must be at least 2"):
        load_images(tmp_path, n_classes=1)


def test_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of docs/data.md with a file name are written, the Python ones are run as doctests."""
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert [kind for kind, _, _ in blocks] == ["csv", "toml", "python", "python", "python"]
    monkeypatch.chdir(tmp_path)
    for kind, name, body in blocks:
        if name:
            write(tmp_path, body, name)
        if kind == "python":
            test = doctest.DocTestParser().get_doctest(body, {}, "docs/data.md", None, 0)
            assert test.examples
            assert doctest.DocTestRunner().run(test).failed == 0
