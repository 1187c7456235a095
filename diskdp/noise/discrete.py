"""Noise on a grid: sums rounded to it, exact normals rounded to it, added as integers.

Released is k + n, with k = round(s / spacing) and n = round(R z), z ~ N(0, 1) exactly, R = std / spacing an integer. As
k is one, k + n = round(k + R z): what the continuous Gaussian mechanism would release of the rounded sums, rounded. The
continuous accounting holds for it, with the sensitivity of the rounded sums (`Grid`), and the values that a release can
take are the same whatever the sums are. Floating point decides nothing here that is not shown to be decided rightly:

- `spacing` is a power of two, so that s / spacing and spacing * (k + n) are exact, and std is rounded up to R spacings.
- n is computed by Box and Muller in float64 from the first 64 bits of each of two uniform numbers. That is off from
  R z by less than R 2**-43 (below), so n is right unless R z comes as close as that to the middle between two integers.
  Then, and where u is at the ends of its range, n is decided by interval arithmetic on integers, from further bits of
  the keystream's key if need be (exact.py). So n is the exact value for its random bits, on every processor.

The error in units of e = 2**-53, where numpy's log, sin and cos are assumed within 16 e of the true value, relatively
(8 units in the last place; numpy documents at most 4), and sqrt, products and conversions rounded as IEEE 754 has it:
- u errs by e of itself, and what is not known of it is below 2**-64. So L = -2 ln u errs by 2 e + 16 e L + 2**-63 / u,
  and r = sqrt(L) by e / r + 8 e r + 2**-64 / (r u) + e r. With u >= 2**-16 and 2**-7 <= r, that is below 180 e.
- The angle errs by 3 pi e, its sine and cosine by 26 e, times r <= 4.71: 123 e. Two products: 2 e r. All: below 313 e.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diskdp.errors import NoiseError
from diskdp.noise.binding import bound_key
from diskdp.noise.exact import rounded_normal
from diskdp.noise.gaussian import place
from diskdp.noise.keys import Keystream, Secret

Integers = npt.NDArray[np.int64]

LARGEST_RATIO = 1 << 36  # above it, one number in 60 would have to be decided by interval arithmetic
TOLERANCE = 2.0**-43  # 1024 e, more than three times the error
_SHARE = 2.0**-10  # of S, that rounding to the grid may add to it
_FINEST = 1 << 20  # spacings a standard deviation, at least: finer than float32 resolves the noise
_SUMMED_SHARE = 1 / 16  # of S, that float64's rounding may add to it
_PRODUCT_ROUNDINGS = 4  # of one summed number: weight, scale, and two factors
_UNDERFLOW = Fraction(1, 2**800)  # what it can move a product of a weight and float32 numbers by, 2**128 at most
_ROOM = 1 << 61  # for the total of all parts: as much again is left for the noise
_PAIRS = 1 << 14  # at once: what stays in the cache
_PAIRS_PER_THREAD = 1 << 17
_MOST_THREADS = 4


@dataclass(frozen=True)
class Grid:
    """What the sums are rounded to, and the noise that goes with it: public, and the same whatever the data are.

    Made by `Grid.fit`. ``sensitivity`` is what one example can change the rounded totals by, at most: the noise's
    standard deviation ``std`` is at least the noise multiplier times it.
    """

    spacing: float  # a power of two
    ratio: int  # std / spacing
    sensitivity: float
    parts: int

    def __post_init__(self) -> None:
        if not (2.0**-512 <= self.spacing <= 2.0**512 and math.frexp(self.spacing)[0] == 0.5):
            raise NoiseError(
                f"a grid's spacing must be a power of two within 2**±512, not {self.spacing!r}: use Grid.fit"
            )
        if not (isinstance(self.ratio, int) and 1 <= self.ratio <= LARGEST_RATIO):
            raise NoiseError(f"noise of {self.ratio!r} spacings: a whole number from 1 to 2**36 is built; use Grid.fit")
        if not 1 <= self.parts <= 1 << 21:
            raise NoiseError(f"sums of {self.parts!r} parts: from 1 to 2**21 are built; use larger microbatches")

    @property
    def std(self) -> float:
        """The noise's standard deviation, exactly."""
        return self.ratio * self.spacing

    @property
    def limit(self) -> int:
        """The largest magnitude that a part's number is let have, in spacings: a bound that no real sum comes near."""
        return _ROOM // self.parts

    @classmethod
    def fit(
        cls,
        noise_multiplier: float,
        sensitivity: float,
        dimension: int,
        *,
        parts: int,
        examples: int,
        rows: int,
        cancellation: float,
    ) -> Grid:
        """The grid for sums of vectors of length at most ``sensitivity`` (S) in ``dimension`` coordinates.

        All arguments must be public, and hold for every data set. The total is that of ``parts`` parts at most, each
        of them a float64 sum over at most ``examples`` examples, rounded by `round`. What is assumed of such a sum:
        a coordinate adds up, in any order, at most ``rows`` numbers an example, each a product of numbers with at most
        four roundings; and the products of an example have absolute values whose vectors' lengths add up to at most
        ``cancellation`` · S (for Σ_t w l_t ⊗ r_t: w Σ_t |l_t||r_t|), to be enforced by lowering its weight w.

        Then a part is off from the sum of real numbers by less than E = γ · examples · cancellation · S with
        γ = n e / (1 - n e), n = examples · rows + 3, e = 2**-53 (Higham 2002, §3.1), and from there to the grid it is
        half a spacing a coordinate. One example may change all parts (those after it move up), in both worlds:
        sensitivity ≤ S + parts (2 E + spacing √dimension). Replacing one changes the totals by less than twice that.

        >>> grid = Grid.fit(1.0, 1.0, 10**6, parts=4, examples=512, rows=1, cancellation=64.0)
        >>> grid.spacing == 2.0**-22, grid.ratio, 1 < grid.sensitivity < 1.001, grid.std >= grid.sensitivity
        (True, 4198305, True, True)
        """
        for name, value in (("noise_multiplier", noise_multiplier), ("sensitivity", sensitivity)):
            if not 1e-60 <= value <= 1e60:
                raise NoiseError(f"{name}={value!r}: discrete noise needs it positive, from 1e-60 to 1e60")
        for name, value in (("dimension", dimension), ("parts", parts), ("examples", examples), ("rows", rows)):
            if not value >= 1:
                raise NoiseError(f"{name}={value!r}: must be at least 1")
        if not 1 <= cancellation < math.inf:
            raise NoiseError(f"cancellation={cancellation!r}: must be finite, and at least 1")
        bound = Fraction(sensitivity)
        steps = Fraction(examples * rows + _PRODUCT_ROUNDINGS - 1, 2**53)
        if steps >= Fraction(1, 2):
            raise NoiseError(
                f"sums over {examples * rows:g} numbers: float64 cannot bound their error; use fewer a part"
            )
        root = Fraction(math.isqrt(dimension << 40) + 1, 1 << 20)  # above the root of the dimension
        error = steps / (1 - steps) * examples * Fraction(cancellation) * bound
        error += _UNDERFLOW * examples * rows * root
        if 2 * parts * error > bound * Fraction(_SUMMED_SHARE):
            raise NoiseError(
                f"float64 sums of {examples} examples, {rows} numbers each, could be off by so much that one example "
                f"changes {float(2 * parts * error / bound):.2g} S more than S ({_SUMMED_SHARE:g} is allowed): "
                "use fewer parts, or microbatches of fewer examples, or a lower bound on cancellation"
            )
        coarsest = min(bound * Fraction(_SHARE) / (parts * root), Fraction(noise_multiplier) * bound / _FINEST)
        spacing = _power_of_two_below(coarsest)
        whole = _not_below(bound + parts * (2 * error + Fraction(spacing) * root))
        ratio = math.ceil(Fraction(noise_multiplier) * Fraction(whole) / Fraction(spacing))
        if ratio > LARGEST_RATIO:
            raise NoiseError(
                f"noise of 2**{math.log2(ratio):.1f} spacings would be needed for {dimension:,} coordinates, {parts} "
                f"parts and noise_multiplier={noise_multiplier:g}, and 2**36 is built: use fewer, larger microbatches"
            )
        return cls(spacing, ratio, whole, parts)

    def round(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A part's float64 sums in whole spacings, int64: to the nearest, and never beyond `limit`.

        NaN, which sums of finite examples do not hold, becomes 0: whether to go on must not depend on data.

        >>> Grid(0.25, 8, 1.0, parts=1).round({"w": torch.tensor([0.3, -9.0], dtype=torch.float64)})["w"].tolist()
        [1, -36]
        """
        wrong = [name for name, total in sums.items() if total.dtype != torch.float64]
        if wrong:
            raise NoiseError(f"{', '.join(wrong[:4])}: what is rounded to the grid must be summed in float64")
        rounded = {}
        for name, total in sums.items():
            spacings = total.detach().mul(1 / self.spacing).round_().clamp_(-self.limit, self.limit)
            rounded[name] = spacings.nan_to_num_(0.0).to(torch.int64)
        return rounded


class DiscreteNoise:
    """Adds noise on a grid to whole numbers of its spacings, from a secret and these numbers (as `SecureNoise` does).

    >>> noise, grid = DiscreteNoise(Secret.from_seed(0)), Grid(0.25, 8, 1.0, parts=1)
    >>> noised = noise.add({"w": torch.tensor([4, 0, -2])}, grid, step=0)["w"]
    >>> bool((noised % grid.spacing == 0).all())
    True
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def add(
        self, totals: Mapping[str, Tensor], grid: Grid, step: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """spacing · (total + n) for int64 totals, n = round(ratio · z), z ~ N(0, I); in float64, then in ``dtype``.

        The CPU makes the noise, in up to `torch.get_num_threads()` threads, for totals on other devices too.
        """
        wrong = [name for name, total in totals.items() if total.dtype != torch.int64]
        if wrong:
            raise NoiseError(f"{', '.join(wrong[:4])}: discrete noise is added to int64 totals, from Grid.round")
        key = bound_key(self._secret, "discrete noise", step, (grid.spacing.hex(), grid.ratio), totals)
        noised = {}
        for name, total in totals.items():
            numbers = total.detach().cpu().contiguous()
            result = torch.empty(numbers.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            self._write(numbers.numpy().reshape(-1), result.numpy().reshape(-1), key, name, grid)
            noised[name] = result.to(total.device, dtype)
        return noised

    def _write(self, total: Integers, result: npt.NDArray[Any], key: bytes, name: str, grid: Grid) -> None:
        def work(start: int) -> None:
            own = slice(start, start + 2 * _PAIRS)
            noise = discrete_normals(key, name, start // 2, len(total[own]), grid.ratio)
            noise += total[own]
            np.multiply(noise, grid.spacing, out=result[own], casting="same_kind")

        starts = range(0, len(total), 2 * _PAIRS)
        workers = min(torch.get_num_threads(), _MOST_THREADS, len(total) // (2 * _PAIRS_PER_THREAD))
        if workers <= 1:
            for start in starts:
                work(start)
        else:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, starts))


def discrete_normals(key: bytes, name: str, first: int, count: int, ratio: int) -> Integers:
    """round(ratio · z) for ``count`` consecutive numbers of a tensor, from pair number ``first`` on.

    The pair p has the keystream's block p, from the name's place on: 64 bits of u, then 64 of v. Further bits of
    either, 64 each time, come from a keyed hash of the name, p, and how often they were asked for.

    >>> whole = discrete_normals(bytes(32), "w", 0, 10, 1000)
    >>> bool((whole[4:] == discrete_normals(bytes(32), "w", 2, 6, 1000)).all())
    True
    """
    pairs = (count + 1) // 2
    buffer = bytearray(16 * pairs + Keystream.SLACK)
    stream = Keystream(key)
    stream.seek(place(name) + first)
    stream.fill(memoryview(buffer), 16 * pairs)
    words = np.frombuffer(buffer, "<u8", 2 * pairs)
    origin = place(name).to_bytes(16, "big")

    def further(pair: int, asked: int) -> bytes:
        message = b"%b%d:%d" % (origin, first + pair, asked)
        return hashlib.blake2b(message, key=key[16:], digest_size=16, person=b"diskdp.further").digest()

    return rounded_normals(words, ratio, further)[:count]


def rounded_normals(
    words: npt.NDArray[np.uint64], ratio: int, further: Callable[[int, int], bytes], tolerance: float = TOLERANCE
) -> Integers:
    """round(ratio · z), exactly, from alternating words of u and v. ``further(pair, asked)``: 64 more bits of each.

    ``tolerance`` says how near the middle between two integers, in units of ratio, is left to integer arithmetic.

    >>> rounded_normals(np.array([2**63, 0], np.uint64), 1000, lambda pair, asked: bytes(16))
    array([1177,    0])
    """
    u = words[0::2] * 2.0**-64
    with np.errstate(divide="ignore"):
        squares = np.log(u, out=u)
    squares *= -2.0
    ends = (squares < 2.0**-14) | (squares > 32 * math.log(2))  # u below 2**-16, where L > 22.18, infinity included
    np.minimum(squares, 100.0, out=squares)
    radius = np.sqrt(squares, out=squares)
    radius *= ratio
    angle = words[1::2].view(np.int64) * (math.pi * 2.0**-63)
    result = np.empty(len(words), np.int64)
    for sine, turn in ((0, np.cos), (1, np.sin)):
        exact = turn(angle)
        exact *= radius
        nearest = np.rint(exact)
        result[sine::2] = nearest
        exact -= nearest
        np.abs(exact, out=exact)
        open_ = (exact > 0.5 - tolerance * ratio) | ends
        for pair in np.flatnonzero(open_).tolist():
            result[2 * pair + sine] = rounded_normal(ratio, bool(sine), _revealed(words, pair, further))
    return result


def _revealed(
    words: npt.NDArray[np.uint64], pair: int, further: Callable[[int, int], bytes]
) -> Callable[[int], tuple[int, int, int]]:
    """The bits of the two uniform numbers of a pair: 128 of each, then 64 more each time."""

    def reveal(asked: int) -> tuple[int, int, int]:
        radius, angle = int(words[2 * pair]), int(words[2 * pair + 1])
        for number in range(asked + 1):
            more = further(pair, number)
            radius = radius << 64 | int.from_bytes(more[:8], "big")
            angle = angle << 64 | int.from_bytes(more[8:], "big")
        return radius, angle, 64 * (asked + 2)

    return reveal


def _power_of_two_below(value: Fraction) -> float:
    """The largest power of two that is not above."""
    exponent = math.frexp(float(value))[1]
    power = math.ldexp(1.0, exponent)
    while Fraction(power) > value:
        power /= 2
    return power


def _not_below(value: Fraction) -> float:
    rounded = float(value)
    return rounded if Fraction(rounded) >= value else math.nextafter(rounded, math.inf)
