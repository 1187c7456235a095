"""Image sets from their standard files: IDX (MNIST family), CIFAR binary version, .npz.

Assumes that shape, number of classes and the scaling constants are public; none is measured on the images.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from diskdp.datasets.split import DataInfo, Split, no_rows
from diskdp.errors import DataError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Pixels: TypeAlias = "npt.NDArray[np.uint8] | npt.NDArray[np.float32]"
Part: TypeAlias = "tuple[Pixels, npt.NDArray[np.int64]]"
"""Images [N, C, H, W] (bytes, or floats in [0, 1]) and labels [N]."""


@dataclass(frozen=True)
class Scaling:
    """Public constants: pixels in [0, 1] become (x - mean) / std, one number a channel or one for all.

    >>> Scaling((0.5,), (0.5,), "declared").std
    (0.5,)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or not all(std > 0 for std in self.std):
            raise DataError(f"scaling: mean {self.mean} and std {self.std} must be as many, and each std above 0")


_PUBLISHED = "the constants commonly published for {}, taken as public knowledge"
SCALINGS: Mapping[str, Scaling] = MappingProxyType(
    {
        "signed": Scaling((0.5,), (0.5,), "onto [-1, 1], no constant of the data"),
        "unit": Scaling((0.0,), (1.0,), "onto [0, 1], no constant of the data"),
        "mnist": Scaling((0.1307,), (0.3081,), _PUBLISHED.format("MNIST")),
        "fashion-mnist": Scaling((0.2860,), (0.3530,), _PUBLISHED.format("Fashion-MNIST")),
        "cifar10": Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), _PUBLISHED.format("CIFAR-10")),
        "cifar100": Scaling((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), _PUBLISHED.format("CIFAR-100")),
    }
)
"""Scalings by name."""

_IDX_NAMES = ("train-images", "train-labels", "t10k-images", "t10k-labels")
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}


def load_images(
    path: str | os.PathLike[str], *, n_classes: int | None = None, scaling: str | Scaling = "signed"
) -> Split:
    """Read an image set: float32 images [N, C, H, W] and int64 labels [N], split into train and test.

    `path` is a folder with one of the following, or an `.npz` file:

    - IDX: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-...`, each plain or `.gz`;
    - CIFAR-10 binary version: `data_batch_1.bin` ... `data_batch_5.bin`, `test_batch.bin`;
    - CIFAR-100 binary version: `train.bin`, `test.bin` (the fine labels are used);
    - one `.npz`: `x_train, y_train, x_test, y_test`, or `images, labels` (no test set).

    `n_classes` is public and declared: 10 for IDX unless given, fixed for CIFAR, required for `.npz`.
    `scaling` is a name of `SCALINGS` or a `Scaling`.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "toy.npz")
    >>> np.savez(file, images=np.full((3, 8, 8), 255, np.uint8), labels=np.array([0, 1, 1]))
    >>> split = load_images(file, n_classes=2)
    >>> split.train.tensors[0].shape, split.train.tensors[0].max(), split.info.n_classes
    (torch.Size([3, 1, 8, 8]), tensor(1.), 2)
    """
    root = Path(path)
    constants = _scaling(scaling)
    read = _reader(root)
    parts, fixed_classes, source = read(root)
    classes = _classes(root, n_classes, fixed_classes)
    train, *rest = (_tensors(root, part, len(classes), constants) for part in parts)
    shape = tuple(train.tensors[0].shape[1:])
    provenance = (
        f"images {list(shape)}: {source}",
        f"pixels: (x - {list(constants.mean)}) / {list(constants.std)} of x in [0, 1] ({constants.source})",
        f"labels: {len(classes)} classes ({'declared' if n_classes else source})",
    )
    return Split(train, rest[0] if rest else no_rows(train), DataInfo(root.resolve().stem, shape, classes, provenance))


def _scaling(scaling: str | Scaling) -> Scaling:
    if isinstance(scaling, Scaling):
        return scaling
    if scaling not in SCALINGS:
        raise DataError(f"scaling: unknown name {scaling!r}; known: {', '.join(SCALINGS)}")
    return SCALINGS[scaling]


def _classes(root: Path, declared: int | None, fixed: tuple[str, ...]) -> tuple[str, ...]:
    if declared is None:
        if not fixed:
            raise DataError(f"{root}: the number of classes must be declared; give n_classes")
        return fixed
    if declared < 2:
        raise DataError(f"{root}: n_classes must be at least 2, got {declared}")
    return fixed if len(fixed) == declared else _numbered(declared)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


def _tensors(root: Path, part: Part, n_classes: int, scaling: Scaling) -> TensorDataset:
    """Scale in place: at 60,000 colour images a second float copy is felt."""
    pixels, labels = part
    channels = pixels.shape[1]
    if len(scaling.mean) not in (1, channels):
        raise DataError(f"{root}: the scaling is for {len(scaling.mean)} channels, the images have {channels}")
    outside = (labels < 0) | (labels >= n_classes)
    if outside.any():
        i = int(outside.argmax())
        raise DataError(f"{root}: label {labels[i]} of image {i} is outside the {n_classes} declared classes")
    top = 255.0 if pixels.dtype == np.uint8 else 1.0
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (scaling.mean, scaling.std))
    images = torch.from_numpy(pixels.astype(np.float32, order="C")).div_(top).sub_(mean).div_(std)
    return TensorDataset(images, torch.from_numpy(labels))


_Found: TypeAlias = "tuple[list[Part], tuple[str, ...], str]"


def _reader(root: Path) -> Callable[[Path], _Found]:
    """Which format is there; exactly one must be."""
    if not root.exists():
        raise DataError(f"{root}: no such file or folder")
    if root.is_file():
        if root.suffix.lower() != ".npz":
            raise DataError(f"{root}: not an .npz file; for IDX or CIFAR give the folder")
        return _read_npz
    found: dict[str, Callable[[Path], _Found]] = {}
    if any(_idx_files(root, name) for name in _IDX_NAMES):
        found["IDX"] = _read_idx
    if any((_cifar_folder(root, "cifar10") / name).is_file() for name in _CIFAR10_FILES):
        found["CIFAR-10"] = _read_cifar10
    if any((_cifar_folder(root, "cifar100") / name).is_file() for name in ("train.bin", "test.bin")):
        found["CIFAR-100"] = _read_cifar100
    if any(root.glob("*.npz")):
        found[".npz"] = _read_npz
    if len(found) != 1:
        what = f"several image sets ({', '.join(found)})" if found else "no image set"
        raise DataError(f"{root}: {what} found; the folder must hold one of IDX, CIFAR-10, CIFAR-100, .npz")
    return next(iter(found.values()))


def _contents(file: Path) -> Bytes:
    try:
        raw = file.read_bytes()
        return np.frombuffer(gzip.decompress(raw) if file.suffix == ".gz" else raw, dtype=np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: the file cannot be read: {error}") from error


# IDX


def _idx_files(root: Path, name: str) -> list[Path]:
    """Both spellings in use, `train-images-idx3-ubyte` and `train-images.idx3-ubyte`, plain or compressed."""
    rank = "idx3" if name.endswith("images") else "idx1"
    spellings = (f"{name}{mark}{rank}-ubyte{ending}" for ending in ("", ".gz") for mark in "-.")
    return [root / spelling for spelling in spellings if (root / spelling).is_file()]


def _idx(root: Path, name: str) -> tuple[Path, Bytes]:
    files = _idx_files(root, name)
    if not files:
        raise DataError(f"{root}: {name}-idx{3 if name.endswith('images') else 1}-ubyte (or .gz) is missing")
    file, data = files[0], _contents(files[0])
    rank = 3 if name.endswith("images") else 1
    magic = bytes((0, 0, 8, rank))  # IDX: two zeros, type 8 (unsigned byte), number of dimensions
    if data[:4].tobytes() != magic:
        raise DataError(f"{file}: not an IDX file of {rank} dimensions (starts with {data[:4].tobytes().hex()})")
    header = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(data[4:header].tobytes().ljust(4 * rank, b"\0"), dtype=">u4"))
    expected = header + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise DataError(f"{file}: {len(data)} bytes where the header {shape} needs {expected}; the file is damaged")
    return file, data[header:].reshape(shape)


def _idx_part(root: Path, which: str) -> Part:
    image_file, images = _idx(root, f"{which}-images")
    label_file, labels = _idx(root, f"{which}-labels")
    if len(images) != len(labels):
        raise DataError(f"{label_file}: {len(labels)} labels for the {len(images)} images of {image_file.name}")
    return images[:, None], labels.astype(np.int64)


def _read_idx(root: Path) -> _Found:
    return [_idx_part(root, "train"), _idx_part(root, "t10k")], _numbered(10), "IDX files, the MNIST family"


# CIFAR binary version: records of label byte(s) and 3072 pixel bytes, channel by channel


def _cifar_folder(root: Path, kind: str) -> Path:
    inner = root / _CIFAR_FOLDERS[kind]
    return inner if inner.is_dir() else root


def _cifar(file: Path, label_bytes: int) -> Part:
    if not file.is_file():
        raise DataError(f"{file}: the file is missing")
    data, record = _contents(file), label_bytes + 3072
    if not len(data) or len(data) % record:
        raise DataError(f"{file}: {len(data)} bytes is no whole number of {record}-byte records; the file is damaged")
    rows = data.reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


def _checked(file: Path, part: Part, n_classes: int) -> Part:
    """A label byte that the format does not allow means that records are out of step."""
    if part[1].max() >= n_classes:
        raise DataError(
            f"{file}: label {part[1].max()} is above {n_classes - 1}; the file is damaged or another format"
        )
    return part


def _read_cifar10(root: Path) -> _Found:
    folder = _cifar_folder(root, "cifar10")
    *batches, test = (_checked(folder / name, _cifar(folder / name, 1), 10) for name in _CIFAR10_FILES)
    train = np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])
    return [train, test], _CIFAR10_CLASSES, "CIFAR-10 binary version"


def _read_cifar100(root: Path) -> _Found:
    folder = _cifar_folder(root, "cifar100")
    parts = [_checked(folder / name, _cifar(folder / name, 2), 100) for name in ("train.bin", "test.bin")]
    return parts, _numbered(100), "CIFAR-100 binary version, fine labels"


# .npz


def _read_npz(root: Path) -> _Found:
    files = [root] if root.is_file() else sorted(root.glob("*.npz"))
    if len(files) > 1:
        raise DataError(f"{root}: several .npz files ({', '.join(f.name for f in files)}); give the path of one")
    file = files[0]
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file}: not an .npz archive, or cut short")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return _npz_parts(file, arrays), (), ".npz arrays"
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: the file cannot be read: {error}") from error
    except DataError:
        raise
    except ValueError as error:  # a pickled array, or a header that makes no sense
        raise DataError(f"{file}: an array cannot be read: {error}") from error


def _npz_parts(file: Path, arrays: Mapping[str, Any]) -> list[Part]:
    four = ("x_train", "y_train", "x_test", "y_test")
    if all(name in arrays for name in four):
        names = [four[:2], four[2:]]
    elif "images" in arrays and "labels" in arrays:
        names = [("images", "labels")]
    else:
        has = ", ".join(arrays) or "nothing"
        raise DataError(f"{file}: needs {', '.join(four)}, or images and labels; it has {has}")
    return [(_npz_images(file, x, arrays[x]), _npz_labels(file, y, arrays[y], len(arrays[x]))) for x, y in names]


def _npz_images(file: Path, name: str, images: npt.NDArray[Any]) -> Pixels:
    key = f"{file}: {name}"
    if images.ndim not in (3, 4) or not len(images):
        raise DataError(f"{key}: shape {images.shape} is none of [N, H, W], [N, H, W, C], [N, C, H, W]")
    if images.ndim == 3:
        images = images[:, None]
    else:
        first, last = images.shape[1] in (1, 3, 4), images.shape[3] in (1, 3, 4)
        if first == last:
            problem = "both ends could be the channels" if first else "neither end has 1, 3 or 4 channels"
            raise DataError(f"{key}: shape {images.shape} is not clear: {problem}")
        images = images.transpose(0, 3, 1, 2) if last else images
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images)
    if not np.issubdtype(images.dtype, np.floating):
        raise DataError(f"{key}: {images.dtype} pixels; store bytes (uint8), or floats in [0, 1]")
    inside = (images >= 0) & (images <= 1)
    if not inside.all():
        i = int(np.argwhere(~inside)[0, 0])
        raise DataError(f"{key}: image {i} has pixels outside [0, 1]; store bytes (uint8), or floats in [0, 1]")
    return np.ascontiguousarray(images, dtype=np.float32)


def _npz_labels(file: Path, name: str, labels: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        needed = f"must be {count} whole numbers, one an image"
        raise DataError(f"{file}: {name}: {labels.dtype} of shape {labels.shape}; {needed}")
    return labels.astype(np.int64)
