"""round(R z) for a normal z, decided exactly: interval arithmetic on integers, from as many random bits as it takes.

z is one of the pair (r cos a, r sin a), r = sqrt(-2 ln u), a = 2 pi v (Box and Muller 1958), and u and v are uniform
real numbers of which only the first bits are known. Where these leave two integers possible, more bits are asked for.
Slow (20 µs a number): it decides what floating point leaves open (discrete.py), and is what that is tested on.

Numbers are integers in units of 2**-p. Each function states how many units it errs at most; all are below
8 p**2, which is what is allowed for: each of at most p terms of a series is off by a few units.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from math import isqrt

_GUARD = 64  # bits beyond those that are known: 8 p**2 units stay far below what the unknown ones leave open

Reveal = Callable[[int], tuple[int, int, int]]
"""Round number (from 0) -> the first bits of u, the first bits of v, their count, which grows from round to round."""


def rounded_normal(ratio: int, sine: bool, reveal: Reveal) -> int:
    """round(ratio · z) with z = r sin a or r cos a, of the two uniform numbers that `reveal` reveals.

    >>> rounded_normal(1000, False, lambda asked: (1 << (63 + asked), 0, 64 + asked))  # u = 1/2, v = 0
    1177
    """
    for asked in itertools.count():
        radius, angle, bits = reveal(asked)
        decided = decide(ratio, sine, radius, angle, bits)
        if decided is not None:
            return decided
    raise AssertionError("unreachable")


def decide(ratio: int, sine: bool, radius: int, angle: int, bits: int) -> int | None:
    """round(ratio · z) if it is the same for all u in [radius, radius + 1] / 2**bits and v likewise; else None.

    >>> decide(1000, False, 2, 0, 2), decide(2, False, 2, 0, 10)
    (None, 7)
    """
    if radius == 0:
        return None  # r is unbounded
    p = bits + _GUARD
    slack = 8 * p * p
    shortest = isqrt(max(0, 2 * _minus_log(radius + 1, bits, p) - 2 * slack) << p)
    longest = isqrt((2 * _minus_log(radius, bits, p) + 2 * slack) << p) + 1
    turn = _turn(angle, bits, p, sine)
    off = slack + (4 << (p - bits))  # what is unknown of v moves the angle by at most pi / 2**bits from the middle
    low, high = turn - off, turn + off
    least = low * (shortest if low > 0 else longest)
    most = high * (longest if high > 0 else shortest)
    half = 1 << (2 * p - 1)
    down, up = ((ratio * bound + half) >> (2 * p) for bound in (least, most))
    return down if down == up else None


def _minus_log(numerator: int, bits: int, p: int) -> int:
    """-ln(numerator / 2**bits), 1 <= numerator <= 2**bits. Errs by less than 6 (p + 1) (bits + 1)."""
    exponent = numerator.bit_length() - 1
    power = 1 << exponent  # ln m = 2 artanh((m - 1) / (m + 1)), m = numerator / power in [1, 2)
    log = 2 * _inverse_tangent(((numerator - power) << p) // (numerator + power), p, 1)
    return (bits - exponent) * _log_2(p) - log


def _inverse_tangent(y: int, p: int, sign: int) -> int:
    """artanh y (sign 1) or arctan y (sign -1) for 0 <= y <= 1/3: y + sign y**3/3 + y**5/5 + ...

    A power of y errs by less than 2 units, as errors shrink by 9 from one to the next; with the division's, 3 a term.
    """
    square, power, total, k = (y * y) >> p, y, 0, 1
    while power:
        total += power // k if sign > 0 or k % 4 == 1 else -(power // k)
        power = (power * square) >> p
        k += 2
    return total


@functools.lru_cache(maxsize=16)
def _log_2(p: int) -> int:
    """ln 2 = 2 artanh(1/3)."""
    return 2 * _inverse_tangent((1 << p) // 3, p, 1)


@functools.lru_cache(maxsize=16)
def _pi(p: int) -> int:
    """Machin: pi = 16 arctan(1/5) - 4 arctan(1/239). Errs by less than 60 (p + 1)."""
    return 16 * _inverse_tangent((1 << p) // 5, p, -1) - 4 * _inverse_tangent((1 << p) // 239, p, -1)


def _turn(angle: int, bits: int, p: int, sine: bool) -> int:
    """Sine or cosine of 2 pi (angle + 1/2) / 2**bits."""
    turned = 2 * angle + 1  # in units of which a whole turn has 2**(bits + 1)
    quadrant, rest = divmod(turned, 1 << (bits - 1))
    if not sine:
        quadrant += 1  # cos a = sin(a + pi/2)
    x = (_pi(p) * rest) >> bits
    value = _series(x, p, 1) if quadrant % 2 == 0 else _series(x, p, 0)
    return value if quadrant % 4 < 2 else -value


def _series(x: int, p: int, first: int) -> int:
    """sin x (first = 1) or cos x (first = 0) for 0 <= x <= pi/2, by Taylor. Errs by what x does, and 4 units a term."""
    square, term, total, k = (x * x) >> p, x if first else 1 << p, 0, first
    while term:
        total += term if k % 4 < 2 else -term
        term = ((term * square) >> p) // ((k + 1) * (k + 2))
        k += 2
    return total
