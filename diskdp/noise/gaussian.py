"""Gaussian noise on clipped sums: Box-Muller on a cryptographic keystream, block by block.

What is added for a tensor depends on the secret, the step, the tensor's name and shape, and on nothing else.

Numerical quality. A pair of normals is (r cos a, r sin a) with r = sqrt(-2 ln u).
- u comes from a 64-bit word (63 bits and a sign that is dropped), as (|w| + 1/4) / 2**63. Converting to
  float32 keeps 24 *significant* bits of it however small u is, so the tail follows the normal law out to the
  last words, r = 9.49; torch's float32 normals come from 24 bits in all and end at 5.77.
- Near u = 1 float32 has a spacing of 2**-24, so r is coarse below about 0.01 (one pair in 20,000), where what
  is added is near zero anyway. u is scaled to stay one spacing below 1: rounding to exactly 1 would leave one
  pair in 2**25 without any noise. This adds 6e-8 to the variance, the side that is safe.
- a comes from 32 bits, more than the 24 that float32 keeps of an angle; the half that is added to the word
  keeps it from 0, so no coordinate has noise exactly 0.
- Beyond this, each operation errs by a few units in the last place of float32, as adding to the sum does.
For float64 sums everything is computed in float64, both words have 64 bits, and 53 of them count.
Results may differ in the last place between processors (vector instructions), never between thread counts.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diskdp.errors import NoiseError
from diskdp.noise.keys import Keystream, Secret

Array = npt.NDArray[Any]
Kind = np.dtype[Any]

BLOCK_PAIRS = 1 << 16  # worked on at once: 1.5 MB of buffers, and the overhead of calls stays below 1%
_PAIRS_PER_THREAD = 1 << 20  # 4 ms of work: for that long torch's own threads spin after an operation
_PROBED = 1 << 16
_MOST_THREADS = 4  # more only wait for the interpreter's lock (docs/noise.md)


class GaussianNoise:
    """Adds N(0, std² I) to named tensors, from a secret.

    Two different sums released with the noise of the same secret and step reveal their difference: use a
    step's noise for one release.

    >>> noise = GaussianNoise(Secret.from_seed(0))
    >>> sums = {"weight": torch.zeros(300, 100), "bias": torch.ones(300)}
    >>> noised = noise.add(sums, std=2.0, step=0)
    >>> noised["weight"].shape, noised["weight"].dtype, bool((noised["weight"].std() - 2.0).abs() < 0.1)
    (torch.Size([300, 100]), torch.float32, True)
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._normals = Normals()
        self._background: ThreadPoolExecutor | None = None

    def add(self, sums: Mapping[str, Tensor], std: float, step: int) -> dict[str, Tensor]:
        """New tensors `sum + std * z`, z ~ N(0, I): float64 for float64 sums, float32 for all others."""
        noised = {name: total.detach().to(result_dtype(total), copy=True) for name, total in sums.items()}
        self.add_to(noised, std, step)
        return noised

    def add_to(self, sums: Mapping[str, Tensor], std: float, step: int) -> None:
        """Add `std * z` to float32 and float64 tensors in their own memory, a block at a time.

        The CPU makes the noise, in up to `torch.get_num_threads()` threads, for sums on other devices too.
        """
        refuse_unfit(sums, std)
        if std == 0:
            return
        here = {name: t for name, t in sums.items() if t.device.type == "cpu" and t.is_contiguous()}
        # in the thread that may still be busy with an abandoned step's noise: they share their buffers
        self._thread().submit(self._write, {name: t.detach() for name, t in here.items()}, std, step, True).result()
        elsewhere = {name: t for name, t in sums.items() if name not in here}
        if elsewhere:
            for name, noise in self.begin(elsewhere, std, step).result().items():
                elsewhere[name].detach().add_(noise.to(elsewhere[name].device))

    def begin(self, like: Mapping[str, Tensor], std: float, step: int) -> Future[dict[str, Tensor]]:
        """Start making `std * z` for tensors of these names and shapes, on the CPU, beside whatever else goes on.

        The same z that `add` uses. Noise does not depend on data, so it can be made while gradients are computed.

        >>> noise, sums = GaussianNoise(Secret.from_seed(0)), {"weight": torch.zeros(3, 2)}
        >>> bool((noise.begin(sums, 2.0, step=0).result()["weight"] == noise.add(sums, 2.0, step=0)["weight"]).all())
        True
        """
        if not 0 < std < math.inf:
            raise NoiseError(f"the noise's standard deviation is {std!r}: it must be finite and positive")
        # allocated here: torch's profiler, which counts memory, does not see other threads
        drawn = {name: torch.empty(t.shape, dtype=result_dtype(t)) for name, t in like.items()}
        return self._thread().submit(self._write, drawn, std, step, False)

    def _thread(self) -> ThreadPoolExecutor:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "diskdp-noise")
        return self._background

    def _write(self, tensors: dict[str, Tensor], std: float, step: int, adding: bool) -> dict[str, Tensor]:
        self._normals.write(tensors, self._secret.derive("noise", step), std, adding)
        return tensors


class Normals:
    """Writes `std * z` for named tensors from a key, in several threads; keeps their buffers for the next time.

    >>> Normals().write(drawn := {"w": torch.empty(2, 3)}, bytes(32), 1.0, adding=False)
    >>> bool(drawn["w"].isfinite().all())
    True
    """

    def __init__(self) -> None:
        self._workspaces: dict[tuple[Kind, int], _Workspace] = {}

    def write(self, tensors: Mapping[str, Tensor], key: bytes, std: float, adding: bool) -> None:
        """Fill contiguous tensors on the CPU with noise, or add it to what they hold."""
        pieces: dict[Kind, list[_Piece]] = {np.dtype(np.float32): [], np.dtype(np.float64): []}
        for name, tensor in tensors.items():
            result = tensor.numpy().reshape(-1)
            pieces[result.dtype] += _cut(name, result)
        for kind, cut in pieces.items():
            self._run(kind, _batches(cut), key, std, adding)

    def _run(self, kind: Kind, batches: list[list[_Piece]], key: bytes, std: float, adding: bool) -> None:
        pairs = sum(piece.pairs for batch in batches for piece in batch)
        workers = max(1, min(torch.get_num_threads(), _MOST_THREADS, pairs // _PAIRS_PER_THREAD))
        for worker in range(workers):
            if (kind, worker) not in self._workspaces:
                self._workspaces[kind, worker] = _Workspace(kind)

        def work(worker: int) -> None:
            self._workspaces[kind, worker].run(batches[worker::workers], Keystream(key), std, adding)

        if workers == 1:
            work(0)
        else:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, range(workers)))


class _Piece(NamedTuple):
    """At most two blocks' worth of consecutive elements of one tensor, and where its keystream starts."""

    keystream_block: int
    pairs: int
    result: Array


class _Workspace:
    """The buffers of one thread."""

    def __init__(self, kind: Kind) -> None:
        self._word_bytes = bytearray(8 * BLOCK_PAIRS + Keystream.SLACK)
        self._angle_bytes = bytearray(kind.itemsize * BLOCK_PAIRS + Keystream.SLACK)
        self._radius_words = np.frombuffer(self._word_bytes, "<i8", BLOCK_PAIRS)
        self._angle_words = np.frombuffer(self._angle_bytes, f"<i{kind.itemsize}", BLOCK_PAIRS)
        self._radius, self._angle, self._first, self._second = (np.empty(BLOCK_PAIRS, kind) for _ in range(4))

    def run(self, batches: list[list[_Piece]], keystream: Keystream, std: float, adding: bool) -> None:
        radius_bytes, angle_bytes = memoryview(self._word_bytes), memoryview(self._angle_bytes)
        angle_size = self._angle_words.itemsize
        for batch in batches:
            end = 0
            for piece in batch:
                keystream.seek(piece.keystream_block)
                keystream.fill(radius_bytes[8 * end :], 8 * piece.pairs)
                keystream.fill(angle_bytes[angle_size * end :], angle_size * piece.pairs)
                end += piece.pairs
            alone = len(batch) == 1 and not adding  # a large tensor's noise is written where it belongs at once
            first = batch[0].result[:end] if alone else self._first[:end]
            second = batch[0].result[end:] if alone else self._second[:end]
            words, angles = self._radius_words[:end], self._angle_words[:end]
            scaled_normals(words, angles, std, self._radius[:end], self._angle[:end], first, second)
            if not alone:
                start = 0
                for piece in batch:
                    rest = piece.result.size - piece.pairs
                    halves = piece.result[: piece.pairs], piece.result[piece.pairs :]
                    noise = first[start : start + piece.pairs], second[start : start + rest]
                    for half, values in zip(halves, noise):
                        np.add(half, values, out=half) if adding else np.copyto(half, values)
                    start += piece.pairs


def scaled_normals(
    radius_words: Array, angle_words: Array, std: float, radius: Array, angle: Array, first: Array, second: Array
) -> None:
    """Write pairs of normals of the given deviation to `first` and `second`, from signed random words.

    `radius` and `angle` are scratch space; they, `first` and `second` have one floating dtype, in which all is
    computed. `second` may be shorter than `first`.

    >>> radius, angle, first, second = np.empty((4, 1), np.float32)
    >>> scaled_normals(np.array([0]), np.array([2**30], np.int32), 1.0, radius, angle, first, second)
    >>> second.round(3)  # the smallest u, the angle pi / 2
    array([9.493], dtype=float32)
    """
    kind = radius.dtype.type
    np.copyto(radius, radius_words, casting="unsafe")
    np.abs(radius, out=radius)
    np.multiply(radius, kind(2.0**-63 * (1 - np.finfo(kind).epsneg)), out=radius)
    np.add(radius, kind(2.0**-65), out=radius)
    np.log(radius, out=radius)
    np.multiply(radius, kind(-2), out=radius)
    np.sqrt(radius, out=radius)
    np.multiply(radius, _not_below(std, kind), out=radius)

    np.copyto(angle, angle_words, casting="unsafe")
    np.add(angle, kind(0.5), out=angle)
    np.multiply(angle, kind(np.pi * 2.0 ** (1 - 8 * angle_words.itemsize)), out=angle)
    np.cos(angle, out=first)
    np.multiply(first, radius, out=first)
    rest = len(second)
    np.sin(angle[:rest], out=second)
    np.multiply(second, radius[:rest], out=second)


@functools.cache
def arithmetic() -> str:
    """Names the way this machine computes normals: another one may differ in the last place of some of them.

    A hash of 65,536 normals of each precision from fixed words, which takes some milliseconds, once.
    """
    message = hashlib.blake2b(np.__version__.encode(), digest_size=16, person=b"diskdp.numerics")
    for kind in (torch.float32, torch.float64):
        drawn = torch.empty(_PROBED, dtype=kind)
        Normals().write({"probe": drawn}, bytes(32), 1.0, adding=False)
        message.update(drawn.numpy().tobytes())
    return message.hexdigest()


def refuse_unfit(sums: Mapping[str, Tensor], std: float) -> None:
    """Raise NoiseError unless `std` is a deviation and the sums can be noised in place."""
    if not 0 <= std < math.inf:
        raise NoiseError(f"the noise's standard deviation is {std!r}: it must be finite and not negative")
    if any(total.dtype != result_dtype(total) for total in sums.values()):
        raise NoiseError("noise is added in place to float32 and float64 sums alone; use add() for others")


def _not_below(std: float, kind: type[np.floating[Any]]) -> np.floating[Any]:
    """`std` rounded up, so that rounding never takes noise away."""
    rounded = kind(std)
    return rounded if float(rounded) >= std else np.nextafter(rounded, kind(np.inf))


def result_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def place(name: str) -> int:
    """A tensor's place among the keystream's 2**128 blocks, its name's hash: no two tensors meet."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")


def _cut(name: str, result: Array) -> Iterator[_Piece]:
    """A tensor in pieces."""
    origin = place(name)
    for start in range(0, result.size, 2 * BLOCK_PAIRS):
        stop = min(start + 2 * BLOCK_PAIRS, result.size)
        block = origin + start // 2  # a pair takes at most one block of 16 bytes
        yield _Piece(block, (stop - start + 1) // 2, result[start:stop])


def _batches(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Neighbouring pieces together, up to a block: many small tensors cost little more than a large one."""
    batches: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        if piece.pairs > room:
            batches.append([])
            room = BLOCK_PAIRS
        batches[-1].append(piece)
        room -= piece.pairs
    return batches
