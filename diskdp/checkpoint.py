"""Trees of tensors and plain values in one safetensors file: exact, atomic, and read without running code.

The tensors are entries of the file; the rest is a JSON skeleton in its metadata, beside a SHA-256 of it all,
which finds damage, not tampering.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diskdp.errors import CheckpointError

FORMAT = "diskdp-tree-1"

_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def save_tree(path: str | os.PathLike[str], tree: Any, keep_previous: bool = False) -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, strings, booleans and None to `path`.

    The file at `path` is either the old one or the new one, whole, whatever happens in between; with `keep_previous`
    the old one stays as `previous_of(path)`. Tensors are saved from any device as contiguous copies, subclasses of the
    containers as the plain type.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tree(f"{folder}/state", {"step": 3, 0: (torch.ones(2), math.inf)})
    ...     load_tree(f"{folder}/state")
    {'step': 3, 0: (tensor([1., 1.]), inf)}
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(_encode(tree, "tree", tensors), allow_nan=False)
    _unshare(tensors)
    metadata = {"format": FORMAT, "skeleton": skeleton, "sha256": _digest(skeleton, tensors)}
    try:
        with workroom(path.with_name(f".{path.name}.partial")) as room:
            partial = room / path.name
            save_file(tensors, partial, metadata=metadata)
            with safe_open(partial, framework="pt"):  # what cannot be read back must not replace what can
                _flush(partial)
            if keep_previous and path.exists():
                _keep(path)
            os.replace(partial, path)
            _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"could not write the checkpoint {path} ({error}): check that the folder exists, is writable and "
            "has room; a checkpoint that was there is still whole"
        ) from error


@contextlib.contextmanager
def workroom(place: Path) -> Iterator[Path]:
    """An empty folder at ``place``, gone afterwards: when it is killed, safetensors leaves files of its own in it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, workroom(Path(folder) / "room") as room:
    ...     list(room.iterdir())
    []
    """
    if place.is_file():
        place.unlink()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def previous_of(path: str | os.PathLike[str]) -> Path:
    """Where the checkpoint before the one at `path` is kept.

    >>> previous_of("run/state.safetensors").name
    'state.previous.safetensors'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _keep(path: Path) -> None:
    """A second name for the file, so that `path` itself is there at every moment; a copy where there are no links."""
    partial = path.with_name(f".{path.name}.previous")  # a link that a crash left behind is taken away
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    try:
        os.link(path, partial)
    except OSError:
        shutil.copyfile(path, partial)
    os.replace(partial, previous_of(path))


def load_tree(path: str | os.PathLike[str]) -> Any:
    """Read what `save_tree` wrote: equal to it bit for bit, with all tensors on the CPU."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        found = metadata.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"{path} has the format {found!r}, not {FORMAT!r}: read it with the program that wrote it"
            )
        skeleton = metadata["skeleton"]
        if _digest(skeleton, tensors) != metadata["sha256"]:
            raise CheckpointError(f"{path} is damaged (its checksum is wrong): go back to an older one")
        return _decode(json.loads(skeleton), tensors)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {path}: check the path") from error
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        message = f"{path} is not a whole checkpoint ({error}): go back to an older one"
        raise CheckpointError(message) from error


def _encode(node: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of a node. Objects are tags: {"tensor": name}, {"tuple": [...]}, {"dict": [[key, value], ..]}."""
    if isinstance(node, np.generic):
        node = node.item()
    if node is None or isinstance(node, (bool, str)):
        return node
    if isinstance(node, int):
        return int(node)
    if isinstance(node, float):
        return float(node) if math.isfinite(node) else {"float": str(float(node))}
    if isinstance(node, Tensor):
        name = str(len(tensors))
        tensors[name] = _plain(node, place)
        return {"tensor": name}
    if isinstance(node, Mapping):
        return {
            "dict": [
                [_encode(key, f"a key of {place}", tensors), _encode(value, f"{place}[{key!r}]", tensors)]
                for key, value in node.items()
            ]
        }
    if isinstance(node, (list, tuple)):
        items = [_encode(item, f"{place}[{i}]", tensors) for i, item in enumerate(node)]
        return {"tuple": items} if isinstance(node, tuple) else items
    raise CheckpointError(
        f"{place} is a {type(node).__module__}.{type(node).__qualname__}, which a checkpoint cannot hold: "
        "save dicts, lists and tuples of tensors, numbers, strings, booleans and None"
    )


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    [(tag, content)] = node.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "float":
        return float(content)
    if tag == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if tag == "dict":
        return {_decode(key, tensors): _decode(value, tensors) for key, value in content}
    raise ValueError(f"unknown tag {tag!r}")


def _plain(tensor: Tensor, place: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{place} is a tensor of layout {tensor.layout} and type {tensor.dtype}, which cannot be saved: "
            "convert it to a dense tensor of booleans, integers or real floating point numbers"
        )
    return tensor.detach().cpu().contiguous()


def _unshare(tensors: dict[str, Tensor]) -> None:
    """The format has no sharing: tensors on one storage become tensors of their own."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensors[name] = tensor.clone()
        seen.add(storage)


def _digest(skeleton: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(skeleton.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Have the operating system put a file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
