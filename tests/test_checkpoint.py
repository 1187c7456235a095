"""Checkpoints: exact both ways, whole or not at all, damage found."""

from __future__ import annotations

import collections
import enum
import json
import math
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diskdp.checkpoint import load_tree, save_tree
from diskdp.errors import CheckpointError


def assert_same(a: object, b: object) -> None:
    """Same types, same structure, same bits, keys in the same order."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        assert torch.equal(*flat)
    elif isinstance(a, dict):
        assert_same(list(a), list(b))
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    else:
        assert a == b


def round_trip(path, tree):
    save_tree(path, tree)
    return load_tree(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        0,
        -(2**200),
        "",
        "tensor",
        "żółw \x00 \ud800 \U0001f980",
        [],
        (),
        {},
        [[], (), {}, [None], ({},)],
        {"tensor": "0", "tuple": [1], "dict": [[1, 2]], "float": "nan"},
        {0: "int", "0": "str", True: "shadows nothing here", None: 1, 2.5: 1, (1, "a"): 2},
        [
            0.1,
            1 / 3,
            5e-324,
            -0.0,
            1.7976931348623157e308,
            math.inf,
            -math.inf,
            math.nan,
            1e22,
            123456789.123456789,
        ],
    ],
)
def test_values_round_trip(path, tree):
    assert_same(round_trip(path, tree), tree)


INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)])
def test_tensors_round_trip(path, dtype, shape):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape), dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape)  # any bits: NaN payloads, subnormals, negative zeros
    assert_same(round_trip(path, {"x": [tensor]}), {"x": [tensor]})


def test_layouts_and_sharing(path):
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(base)
    tree = [
        base,
        base.t(),
        base[1:3, ::2],
        base[0].expand(3, 6),
        parameter,
        base,
        torch.empty(0),
        torch.empty(0),
    ]
    loaded = round_trip(path, tree)
    assert_same(loaded, [x.detach() for x in tree])
    assert all(x.is_contiguous() and not x.requires_grad for x in loaded)
    loaded[0].zero_()
    assert torch.equal(loaded[5], base)


def test_loaded_tensors_do_not_depend_on_the_file(path):
    loaded = round_trip(path, torch.ones(1000))
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(loaded, torch.ones(1000))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS])
def test_training_resumes_bit_for_bit(path, make):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.01, **options)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def train(model, optimizer, scheduler, steps):
        x = torch.linspace(-1, 1, 40).reshape(10, 4)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
            scheduler.step()

    parts = build()
    train(*parts, 3)
    states = [part.state_dict() for part in parts]
    loaded = round_trip(path, {"parts": states, "generator": torch.get_rng_state()})
    assert_same(loaded["parts"][1], states[1])
    fresh = build()
    for part, state in zip(fresh, loaded["parts"]):
        part.load_state_dict(state)
    train(*parts, 3)
    train(*fresh, 3)
    assert all(torch.equal(a, b) for a, b in zip(parts[0].parameters(), fresh[0].parameters()))


def test_subclasses_are_saved_as_the_plain_type(path):
    class Level(enum.IntEnum):
        HIGH = 3

    point = collections.namedtuple("point", "x y")(1, 2)
    ordered = collections.OrderedDict(b=1, a=2)
    tree = [point, ordered, torch.Size([2, 3]), Level.HIGH, collections.defaultdict(list, a=[1])]
    assert_same(round_trip(path, tree), [(1, 2), {"b": 1, "a": 2}, (2, 3), 3, {"a": [1]}])


def test_numpy_scalars_are_converted_exactly(path):
    tree = [
        np.float32(0.1),
        np.float64(0.1),
        np.int64(-5),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.float16(3e-8),
    ]
    assert_same(round_trip(path, tree), [x.item() for x in tree])
    assert_same(load_tree(path)[0], 0.10000000149011612)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"a": [0, {1, 2}]}, r"tree\['a'\]\[1\] is a builtins.set"),
        ({"a": np.zeros(3)}, r"tree\['a'\] is a numpy.ndarray"),
        ([np.longdouble(1)], r"tree\[0\] is a numpy.longdouble"),
        (b"bytes", "tree is a builtins.bytes"),
        (1j, "tree is a builtins.complex"),
        ((torch.nn.Linear(1, 1),), r"tree\[0\] is a torch.nn.modules.linear.Linear"),
        (
            {"z": torch.zeros(2, dtype=torch.complex64)},
            r"tree\['z'\] is a tensor of layout .* torch.complex64",
        ),
        ({"s": torch.eye(2).to_sparse()}, r"tree\['s'\] is a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_saved_is_named(path, node, message):
    save_tree(path, "before")
    with pytest.raises(CheckpointError, match=message):
        save_tree(path, node)
    assert load_tree(path) == "before"


# --- damage ----------------------------------------------------------------------------------------------

TREE = {"weight": torch.arange(6.0), "step": 7, "betas": (0.9, 0.999), "nested": [{"x": torch.ones(2, 2)}]}


def test_every_truncation_is_found(path):
    save_tree(path, TREE)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=path.name):
            load_tree(path)


def test_every_flipped_bit_is_found_or_harmless(path):
    """Harmless: the header's padding and the order of its entries. All else must be refused."""
    save_tree(path, TREE)
    whole = path.read_bytes()
    refused = 0
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << (i % 8))]) + whole[i + 1 :])
        try:
            loaded = load_tree(path)
        except CheckpointError:
            refused += 1
        else:
            assert_same(loaded, TREE)
    assert refused > 0.97 * len(whole)


def edited(path, change) -> None:
    """Rewrite the JSON header of a file by `change(header)`."""
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("__metadata__"), "has the format None"),
        (
            lambda header: header["__metadata__"].update(format="diskdp-tree-2"),
            "has the format 'diskdp-tree-2'",
        ),
        (lambda header: header["__metadata__"].pop("format"), "has the format None"),
        (lambda header: header["__metadata__"].pop("skeleton"), "not a whole checkpoint .'skeleton'"),
        (lambda header: header["__metadata__"].pop("sha256"), "not a whole checkpoint .'sha256'"),
        (lambda header: header["__metadata__"].update(skeleton="[]"), "checksum is wrong"),
        (lambda header: header["0"].update(dtype="I32"), "checksum is wrong"),
        (lambda header: header["0"].update(shape=[2, 3]), "checksum is wrong"),
        (lambda header: header.update({"7": header.pop("0")}), "checksum is wrong"),
        (lambda header: header.pop("0"), "not a whole checkpoint"),
    ],
)
def test_edited_headers_are_refused(path, change, message):
    save_tree(path, TREE)
    edited(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_tree(path)


def test_other_files_are_refused(path, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_tree(path)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load_tree(tmp_path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="has the format None"):
        load_tree(path)
    torch.save({"a": 1}, path)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load_tree(path)


# --- a writer that fails ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(path, tmp_path):
    with pytest.raises(CheckpointError, match=r"could not write .*missing"):
        save_tree(tmp_path / "missing" / "state", 1)
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(CheckpointError, match="could not write"):
        save_tree(path, 1)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_saving_leaves_one_file(path):
    for i in range(3):
        save_tree(path, i)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def run(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_a_full_disk_loses_nothing(path):
    """The operating system refuses the write midway (a limit on the file's size)."""
    save_tree(path, TREE)
    process = run(
        """
        import resource, signal, sys, torch
        from diskdp.checkpoint import save_tree
        from diskdp.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save_tree(sys.argv[1], torch.zeros(1_000_000))
        except CheckpointError as error:
            print(error)
        """,
        str(path),
    )
    assert f"could not write the checkpoint {path}" in process.communicate()[0]
    assert_same(load_tree(path), TREE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_writer_leaves_a_whole_checkpoint(path):
    process = run(
        """
        import itertools, sys, torch
        from diskdp.checkpoint import save_tree
        for i in itertools.count():
            save_tree(sys.argv[1], {"i": i, "x": torch.full((300_000,), float(i))})
            print(i, flush=True)
        """,
        str(path),
    )
    for _ in range(5):
        process.stdout.readline()
    for _ in range(20):
        os.kill(process.pid, signal.SIGSTOP)  # wherever it is
        tree = load_tree(path)
        assert (tree["x"] == tree["i"]).all()
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.003)
    process.kill()
    process.communicate()
    tree = load_tree(path)
    assert (tree["x"] == tree["i"]).all()
    assert tree["i"] >= 4
    save_tree(path, "next")  # a leftover of the killed writer is in nobody's way
    assert [p.name for p in path.parent.iterdir()] == [path.name]
