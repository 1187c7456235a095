"""Noise on a grid: exact for its random bits, normal, and with a sensitivity that holds for what is summed."""

from __future__ import annotations

import functools
import itertools
import math
import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from diskdp.errors import NoiseError
from diskdp.noise import DiscreteNoise, GaussianNoise, Grid, Secret
from diskdp.noise import discrete as discrete_module
from diskdp.noise.binding import bound_key
from diskdp.noise.discrete import LARGEST_RATIO, TOLERANCE, discrete_normals, rounded_normals
from diskdp.noise.exact import decide, rounded_normal
from diskdp.noise.gaussian import place
from tests.test_noise import FALSE_ALARM, Z_BOUND, correlation_score

SIZE = 1 << 16
FINE = Grid(2.0**-24, 1 << 24, 1.0, parts=1)  # std 1
_PAIRS = discrete_module._PAIRS


def normals(ratio: int, count: int) -> np.ndarray:
    return discrete_normals(Secret.from_os().derive("test"), "w", 0, count, ratio)


def true_normal(ratio: int, sine: bool, radius: int, angle: int, bits: int) -> mpmath.mpf:
    """ratio · z in 700 bits, from bits of u and v that are followed by a half."""
    with mpmath.workprec(700):
        u, v = ((mpmath.mpf(2 * word + 1) / 2 ** (bits + 1)) for word in (radius, angle))
        turn = mpmath.sin if sine else mpmath.cos
        return ratio * mpmath.sqrt(-2 * mpmath.log(u)) * turn(2 * mpmath.pi * v)


def true_rounded(value: mpmath.mpf) -> int:
    with mpmath.workprec(700):
        return int(mpmath.floor(value + mpmath.mpf(1) / 2))


# --- interval arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 4, 64])
@pytest.mark.parametrize("ratio", [1, 2, 1000, 2**24, 2**36])
def test_decides_what_the_first_bits_decide(width, ratio):
    """Words of few bits leave most numbers open: more are asked for, again and again."""
    source, rounds = random.Random(width * ratio), []
    for sine, low in itertools.product((False, True), range(60)):
        u, v = source.getrandbits(400), source.getrandbits(400)
        if low % 3 == 0:
            u >>= low  # far out
        asked_for = []

        def reveal(asked: int, u: int = u, v: int = v, asked_for: list[int] = asked_for) -> tuple[int, int, int]:
            asked_for.append(asked)
            bits = width * (asked + 1)
            return u >> (400 - bits), v >> (400 - bits), bits

        assert rounded_normal(ratio, sine, reveal) == true_rounded(true_normal(ratio, sine, u, v, 400))
        assert asked_for == list(range(len(asked_for)))
        rounds.append(len(asked_for))
    if width < 64:
        assert max(rounds) > 1


@pytest.mark.parametrize(("bits", "ratio"), [(4, 1), (7, 3), (10, 10), (12, 50)])
def test_never_decides_too_early(bits, ratio):
    """Where it decides from few bits, the corners of what they leave open agree; it decides many."""
    decided = 0
    points = [Fraction(1, 2**90), Fraction(1, 3), Fraction(1) - Fraction(1, 2**90)]
    pairs = random.Random(0).sample(range(4**bits), 256)
    for pair, sine in itertools.product(pairs, (False, True)):
        radius, angle = divmod(pair, 2**bits)
        result = decide(ratio, sine, radius, angle, bits)
        if result is None:
            continue
        decided += 1
        for a, b in itertools.product(points, repeat=2):
            u, v = int((radius + a) * 2**100), int((angle + b) * 2**100)
            assert true_rounded(true_normal(ratio, sine, u, v, bits + 100)) == result
    assert 50 < decided < 512


def test_a_first_word_of_zeros_decides_nothing():
    assert decide(1, False, 0, 0, 64) is None


# --- floating point --------------------------------------------------------------------------------------


def hard_words() -> np.ndarray:
    """Pairs of words at the ends of u's and v's ranges and of floating point's approximations, and ordinary ones."""
    source = random.Random(5)
    radii = [2**k + d for k in range(1, 64) for d in (-1, 0, 1)]
    radii += [2**64 - 2**k + d for k in range(1, 63) for d in (-1, 0, 1)]
    angles = [(q << 61) + d for q in range(8) for d in (0, 1, 12345, 2**40)] + [2**64 - 1, 2**61 - 1, 2**63 - 2**12]
    pairs = [(r, a) for r in radii for a in (angles[source.randrange(len(angles))], source.getrandbits(64))]
    pairs += [(source.getrandbits(64), a) for a in angles for _ in range(4)]
    pairs += [(source.getrandbits(64), source.getrandbits(64)) for _ in range(1500)]
    return np.array(pairs, np.uint64).ravel()


def test_floating_point_errs_less_than_it_is_allowed():
    """The steps of `rounded_normals` up to rint, against 700 bits: below the 313 e of its header."""
    words = hard_words()
    angle = words[1::2].view(np.int64) * (math.pi * 2.0**-63)
    with np.errstate(divide="ignore"):
        squares = -2.0 * np.log(words[0::2] * 2.0**-64)
    usual = (squares >= 2.0**-14) & (squares <= 32 * math.log(2))
    worst = 0.0
    for sine, turn in ((False, np.cos), (True, np.sin)):
        z = np.sqrt(np.minimum(squares, 100.0)) * turn(angle)
        for pair in np.flatnonzero(usual).tolist():
            true = true_normal(1, sine, int(words[2 * pair]), int(words[2 * pair + 1]), 64)
            worst = max(worst, abs(float(true - mpmath.mpf(float(z[pair])))))
    assert usual.sum() > 1500
    assert 0 < worst < 313 * 2.0**-53 < TOLERANCE / 3


@functools.cache
def bits_of(pair: int, asked: int) -> bytes:
    return random.Random(1000 * pair + asked).randbytes(16)


@pytest.mark.parametrize("ratio", [1, 3, 1000, 2**24, 2**33 + 1, LARGEST_RATIO])
def test_every_number_is_the_exact_one(ratio):
    words = hard_words()
    fast = rounded_normals(words, ratio, bits_of)
    for i, result in enumerate(fast.tolist()):
        pair, sine = divmod(i, 2)
        radius, angle = int(words[2 * pair]), int(words[2 * pair + 1])
        for asked in range(4):
            more = bits_of(pair, asked)
            radius, angle = (
                radius << 64 | int.from_bytes(more[:8], "big"),
                angle << 64 | int.from_bytes(more[8:], "big"),
            )
        assert result == true_rounded(true_normal(ratio, bool(sine), radius, angle, 320))


def test_what_is_left_to_integers_changes_nothing():
    """Floating point and integer arithmetic give the same numbers: here all of them both ways."""
    words = np.frombuffer(random.Random(2).randbytes(16 * 4000), "<u8")
    for ratio in (1, 1000, 2**24):
        by_integers = rounded_normals(words, ratio, bits_of, tolerance=1.0)
        assert (rounded_normals(words, ratio, bits_of) == by_integers).all()


def test_further_bits_are_those_of_the_pair(monkeypatch):
    """With a first word of 0 all depends on them; another pair, name or key has others."""
    key = Secret.from_os().derive("test")
    seen = set()

    def spied(words, ratio, further):
        seen.update(further(pair, asked) for pair in range(3) for asked in range(3))
        return rounded_normals(words, ratio, further)

    monkeypatch.setattr(discrete_module, "rounded_normals", spied)
    for name, first, own in (("a", 0, key), ("b", 0, key), ("a", 3, key), ("a", 0, key[:16] + bytes(16))):
        discrete_normals(own, name, first, 6, 1000)
    assert len(seen) == 4 * 9
    discrete_normals(key, "a", 1, 6, 1000)  # pairs 1 to 3, of which all bits were seen
    assert len(seen) == 4 * 9


# --- the law ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
def test_frequencies_are_those_of_the_rounded_normal(ratio):
    """Chi-square over all whole numbers that 10 or more are expected of, and what lies beyond on either side."""
    n = 1 << 20
    found = normals(ratio, n)
    edge = max(k for k in range(8 * ratio) if n * stats.norm.sf((k - 0.5) / ratio) >= 10)
    observed = np.bincount(np.clip(found, -edge, edge) + edge, minlength=2 * edge + 1)
    below = stats.norm.cdf((np.arange(-edge, edge) + 0.5) / ratio)
    expected = n * np.diff(np.concatenate([[0.0], below, [1.0]]))
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("ratio", [10_007, 2**24, 2**33])
def test_fine_grids_are_normal(ratio):
    """Kolmogorov-Smirnov (rounding moves the law by less than 1e-4 / 4), moments, and signs."""
    n = 1 << 19
    z = normals(ratio, n) / ratio
    assert stats.kstest(z, "norm").pvalue > FALSE_ALARM / 8
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - mean) / math.sqrt(variance / n) < Z_BOUND
    positive, zero = int((z > 0).sum()), int((z == 0).sum())
    assert stats.binomtest(positive, n - zero, 0.5).pvalue > FALSE_ALARM / 8
    assert correlation_score(z[0::2], z[1::2]) < Z_BOUND
    assert correlation_score(z[0::2] ** 2, z[1::2] ** 2) < Z_BOUND
    assert correlation_score(z[:-2], z[2:]) < Z_BOUND


@pytest.mark.parametrize("threshold", [4.0, 5.0])
def test_tails(threshold):
    n, ratio = 1 << 22, 1 << 20
    exceeding = int((np.abs(normals(ratio, n)) > threshold * ratio).sum())
    assert stats.binomtest(exceeding, n, 2 * stats.norm.sf(threshold + 0.5 / ratio)).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("bits", "threshold"), [(20, 5.8), (34, 7.2), (44, 8.1)])
def test_far_tails(bits, threshold):
    """Given u < 2**-bits, |z| > threshold > sqrt(2 bits ln 2) is 2**bits times as frequent as otherwise."""
    n, ratio, key = 1 << 13, 1 << 20, Secret.from_os().derive("tail")
    stream = Cipher(algorithms.AES(key[:16]), modes.CTR(bytes(16))).encryptor().update(bytes(16 * n))
    words = np.frombuffer(stream, "<u8").copy()
    words[0::2] >>= bits
    chance = 2 * stats.norm.sf(threshold) * 2.0**bits
    z = rounded_normals(words, ratio, lambda pair, asked: Secret(key, False).derive(pair, asked)[:16]) / ratio
    for half in (z[0::2], z[1::2]):
        assert stats.binomtest(int((np.abs(half) > threshold).sum()), n, chance).pvalue > FALSE_ALARM / 2


# --- what it depends on ----------------------------------------------------------------------------------


def test_agrees_with_a_reading_one_number_at_a_time():
    secret, grid, step = Secret.from_os(), Grid(0.125, 12345, 1.0, parts=1), 7
    totals = {"w": torch.arange(-50, 51), "v": torch.tensor(3)}
    key = bound_key(secret, "discrete noise", step, ((0.125).hex(), 12345), totals)
    noised = DiscreteNoise(secret).add(totals, grid, step, torch.float64)
    for name, total in totals.items():
        counter = place(name).to_bytes(16, "big")
        stream = Cipher(algorithms.AES(key[:16]), modes.CTR(counter)).encryptor().update(bytes(16 * 51))
        for i, (was, is_now) in enumerate(zip(total.flatten().tolist(), noised[name].flatten().tolist())):
            words = stream[16 * (i // 2) : 16 * (i // 2) + 16]
            radius, angle = (int.from_bytes(word, "little") for word in (words[:8], words[8:]))
            n = true_rounded(true_normal(12345, i % 2 == 1, radius, angle, 64))
            assert is_now == 0.125 * (was + n)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_blocks_and_threads_change_nothing(block, monkeypatch):
    secret, total = Secret.from_os(), torch.arange(6001 if block < 100 else 2 * 2**17 * 2 + 5)
    totals = {"before": torch.ones(11, dtype=torch.int64), "w": total, "matrix": total[:6000].reshape(60, 100).t()}
    torch.set_num_threads(1)
    expected = DiscreteNoise(secret).add(totals, FINE, 3)
    monkeypatch.setattr(discrete_module, "_PAIRS", block)
    torch.set_num_threads(2)
    again = DiscreteNoise(secret).add(dict(reversed(totals.items())), FINE, 3)
    assert all(torch.equal(expected[name], again[name]) for name in totals)
    assert again["matrix"].shape == (100, 60)


def test_anything_else_is_independent():
    secret, base = Secret.from_os(), torch.zeros(SIZE, dtype=torch.int64)
    changed, longer = base.clone(), torch.zeros(SIZE, 1, dtype=torch.int64)
    changed[-1] = 1
    releases = [
        (secret, {"w": base}, FINE, 0),
        (secret, {"w": changed}, FINE, 0),
        (secret, {"w": base}, FINE, 1),
        (secret, {"w": base}, Grid(FINE.spacing, FINE.ratio + 1, 1.0, parts=1), 0),
        (secret, {"w": base}, Grid(FINE.spacing / 2, FINE.ratio, 1.0, parts=1), 0),
        (secret, {"v": base}, FINE, 0),
        (secret, {"w": longer}, FINE, 0),
        (secret, {"w": base, "x": base[:0]}, FINE, 0),
        (Secret.from_os(), {"w": base}, FINE, 0),
    ]
    draws = []
    for own, totals, grid, step in releases:
        noised = next(iter(DiscreteNoise(own).add(totals, grid, step, torch.float64).values()))
        draws.append(noised.flatten().numpy() / grid.std)
    for a, b in itertools.combinations(draws, 2):
        assert correlation_score(a, b) < Z_BOUND
        assert correlation_score(a**2, b**2) < Z_BOUND
        assert stats.kstest((a - b) / math.sqrt(2), "norm").pvalue > FALSE_ALARM / 36
    again = DiscreteNoise(secret).add({"w": base.clone()}, FINE, 0, torch.float64)["w"]
    assert (again.numpy() == draws[0]).all()


# --- the grid --------------------------------------------------------------------------------------------


def test_every_release_lies_on_the_grid():
    grid = Grid.fit(1.3, 0.7, SIZE, parts=3, examples=100, rows=4, cancellation=16.0)
    parts = [{"w": torch.randn(SIZE, dtype=torch.float64)} for _ in range(3)]
    total = sum(grid.round(part)["w"] for part in parts)
    for dtype in (torch.float32, torch.float64):
        noised = DiscreteNoise(Secret.from_os()).add({"w": total}, grid, 0, dtype)["w"]
        assert noised.dtype == dtype
        assert (noised.double() % grid.spacing == 0).all()
    noise = noised - sum(part["w"] for part in parts)
    assert abs(noise.var() / grid.std**2 - 1) * math.sqrt(SIZE / 2) < Z_BOUND


def test_floats_give_sums_away_and_grids_do_not():
    """Mironov 2012. Near 0 float32 is fine, but what is left of a sum of 1 after noise of about -1 is not: nearly all
    values that the noise of 0 takes there are impossible for 1. On a grid what is possible is the same for both."""
    n = 1 << 21
    drawn = GaussianNoise(Secret.from_os()).add({"zero": torch.zeros(n), "one": torch.ones(n)}, 1.0, 0)
    near = {name: z[z.abs() < 2.0**-8].double() for name, z in drawn.items()}
    coarse = {name: (z % 2.0**-26 == 0).double().mean().item() for name, z in near.items()}
    assert min(len(z) for z in near.values()) > 1000
    assert coarse["one"] == 1.0
    assert coarse["zero"] < 0.2
    grid = Grid(0.125, 8, 1.0, parts=1)
    totals = {"zero": torch.zeros(n, dtype=torch.int64), "one": torch.full((n,), 8)}
    released = DiscreteNoise(Secret.from_os()).add(totals, grid, 0)
    support = {name: set(z.tolist()) for name, z in released.items()}
    between = {0.125 * k for k in range(-16, 25)}  # within 3 std of both: each is drawn with probability > 1e-4
    assert between <= support["zero"]
    assert between <= support["one"]


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 20.0])
@pytest.mark.parametrize(("dimension", "parts"), [(1, 1), (1000, 7), (10**8, 50)])
def test_grid_costs_less_than_a_thousandth(noise_multiplier, dimension, parts):
    for sensitivity in (1e-3, 0.1, 1.0, 7.0):
        grid = Grid.fit(noise_multiplier, sensitivity, dimension, parts=parts, examples=100, rows=1, cancellation=2.0)
        exact = Fraction(sensitivity) + parts * Fraction(grid.spacing) * Fraction(math.isqrt(dimension))
        assert exact <= Fraction(grid.sensitivity) < Fraction(sensitivity) * Fraction(1001, 1000)
        assert Fraction(grid.ratio) * Fraction(grid.spacing) >= Fraction(noise_multiplier) * Fraction(grid.sensitivity)
        assert grid.std / grid.sensitivity < noise_multiplier * (1 + 2e-6)
        assert grid.std == Fraction(grid.ratio) * Fraction(grid.spacing)
        assert grid.spacing <= grid.std / 2**20


def length(vector: list[Fraction]) -> Fraction:
    """From above."""
    square = sum((x * x for x in vector), Fraction(0))
    scale = 1 << 200
    return Fraction(math.isqrt(int(square * scale * scale)) + 1, scale)


def root_above(dimension: int) -> Fraction:
    return length([Fraction(1)] * dimension)


def cancelling_example(source: random.Random, dimension: int, rows: int, bound: float, cancellation: float):
    """Rows weight · left · right, large ones that nearly cancel in pairs, as (products in float64, exact products)."""
    terms = []
    for _ in range(rows // 2):
        left, right = np.float32(source.uniform(-1, 1)), np.float32([source.uniform(-1, 1) for _ in range(dimension)])
        terms += [(left, right), (left, -right * np.float32(1 + 10.0 ** -source.uniform(2, 5)))]
    exact = [[Fraction(float(left)) * Fraction(float(x)) for x in right] for left, right in terms]
    norm = length([sum(column, Fraction(0)) for column in zip(*exact)])
    mass = sum((length(row) for row in exact), Fraction(0))
    weight = 0.999999 * float(min(Fraction(bound) / norm, Fraction(cancellation) * Fraction(bound) / mass))
    weighted = [[Fraction(weight) * x for x in row] for row in exact]
    assert length([sum(column, Fraction(0)) for column in zip(*weighted)]) <= bound
    assert sum(length(row) for row in weighted) <= cancellation * bound
    return [[weight * float(left) * float(x) for x in right] for left, right in terms], weighted


@pytest.mark.parametrize("seed", range(12))
def test_neighbouring_sums_stay_within_the_sensitivity(seed):
    """Brute force in fractions: products that nearly cancel, added in float64 in other orders in the two worlds and in
    other parts, on grids so coarse that rounding shows and so fine that the sums' own error does."""
    source = random.Random(seed)
    dimension, members, rows, per_part, cancellation, bound = 3, 9, 6, 4, 1e4, 1.0
    parts = math.ceil(members / per_part)
    examples = [cancelling_example(source, dimension, rows, bound, cancellation) for _ in range(members)]
    fitted = Grid.fit(1.0, bound, dimension, parts=parts, examples=per_part, rows=rows, cancellation=cancellation)
    steps = Fraction(per_part * rows + 3, 2**53)
    error = steps / (1 - steps) * per_part * Fraction(cancellation) * Fraction(bound)
    errors = []

    def rounded(who: list[int], grid: Grid) -> list[int]:
        totals = [0] * dimension
        for start in range(0, len(who), per_part):
            own = who[start : start + per_part]
            products = [row for i in own for row in examples[i][0]]
            source.shuffle(products)
            summed = [float(np.add.accumulate(column)[-1]) for column in zip(*products)]
            true = [sum(column, Fraction(0)) for column in zip(*(row for i in own for row in examples[i][1]))]
            errors.append(length([Fraction(a) - b for a, b in zip(summed, true)]))
            part = grid.round({"w": torch.tensor(summed, dtype=torch.float64)})["w"].tolist()
            totals = [a + b for a, b in zip(totals, part)]
        return totals

    for spacing in (fitted.spacing, 2.0**-3, 2.0**-10, 2.0**-45):
        grid = Grid(spacing, 8, 1.0, parts=parts)
        allowed = Fraction(bound) + parts * (2 * error + Fraction(spacing) * root_above(dimension))
        if spacing == fitted.spacing:
            assert (
                allowed * (1 - Fraction(1, 10**9)) <= Fraction(fitted.sensitivity) <= allowed * (1 + Fraction(1, 10**5))
            )
        everyone = rounded(list(range(members)), grid)
        for i in range(members):
            fewer = rounded([j for j in range(members) if j != i], grid)
            assert length([Fraction(spacing) * (a - b) for a, b in zip(everyone, fewer)]) <= allowed
    assert Fraction(1, 10**14) < max(errors) <= error


def test_rounding_does_add_to_what_one_example_can_change():
    """The term spacing √dimension is not there for safety's sake: without it the bound is wrong."""
    dimension, grid = 100, Grid(2.0**-4, 8, 1.0, parts=1)
    below = torch.full((dimension,), 0.49 * grid.spacing, dtype=torch.float64)
    bound = 0.04 * grid.spacing * math.sqrt(dimension)
    change = torch.full((dimension,), 0.039 * grid.spacing, dtype=torch.float64)
    assert change.norm() <= bound
    totals = [grid.round({"w": sums})["w"].double() * grid.spacing for sums in (below, below + change)]
    difference = (totals[0] - totals[1]).norm().item()
    assert difference > 20 * bound
    assert difference <= bound + grid.spacing * math.sqrt(dimension)


def test_rounding_to_the_grid():
    grid = Grid(2.0**-20, 2**20, 1.0, parts=5)
    generator = random.Random(0)
    numbers = [generator.uniform(-1, 1) * 10.0**k for k in range(-12, 9) for _ in range(20)]
    rounded = grid.round({"w": torch.tensor(numbers, dtype=torch.float64)})["w"].tolist()
    for number, spacings in zip(numbers, rounded):
        assert abs(Fraction(number) - spacings * Fraction(grid.spacing)) <= Fraction(grid.spacing) / 2
    strange = torch.tensor([math.inf, -math.inf, math.nan, 1e300, 5e-324], dtype=torch.float64)
    limit = int(float(grid.limit))
    assert grid.round({"w": strange})["w"].tolist() == [limit, -limit, 0, limit, 0]
    assert grid.parts * limit + 14 * LARGEST_RATIO < 2**63
    sums = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert not grid.round({"w": sums})["w"].requires_grad
    assert sums.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        ({"sensitivity": math.inf}, "sensitivity=inf"),
        ({"sensitivity": math.nan}, "sensitivity=nan"),
        ({"dimension": 0}, "dimension=0"),
        ({"parts": 0}, "parts=0"),
        ({"cancellation": 0.5}, "cancellation=0.5"),
        ({"cancellation": 1e12}, "lower bound on cancellation"),
        ({"rows": 1 << 52}, "float64 cannot bound"),
        ({"dimension": 10**9, "parts": 10_000}, "larger microbatches"),
    ],
)
def test_grids_that_would_not_hold_are_refused(changed, message):
    usual = {"noise_multiplier": 1.0, "sensitivity": 1.0, "dimension": 1000, "parts": 2}
    usual |= {"examples": 100, "rows": 10, "cancellation": 8.0}
    Grid.fit(**usual)
    with pytest.raises(NoiseError, match=message):
        Grid.fit(**(usual | changed))


@pytest.mark.parametrize(
    ("spacing", "ratio", "parts"), [(0.3, 8, 1), (0.0, 8, 1), (0.5, 0, 1), (0.5, 2**37, 1), (1, 1, 0)]
)
def test_grids_by_hand_are_checked(spacing, ratio, parts):
    with pytest.raises(NoiseError):
        Grid(spacing, ratio, 1.0, parts)


def test_types_are_checked():
    with pytest.raises(NoiseError, match="summed in float64"):
        FINE.round({"w": torch.zeros(3)})
    with pytest.raises(NoiseError, match="int64"):
        DiscreteNoise(Secret.from_seed(0)).add({"w": torch.zeros(3)}, FINE, 0)
