"""Noise and keys: against a slow reading of the same keystream, and against the normal law."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from diskdp.errors import NoiseError
from diskdp.noise import GaussianNoise, Keystream, Secret
from diskdp.noise.gaussian import BLOCK_PAIRS, scaled_normals

# Statistical tests draw from a fresh secret of the operating system. FALSE_ALARM is the chance that one test
# (all its comparisons together) fails on a correct generator; a z-score beyond 6 has probability 2e-9, which
# leaves room for the error of the normal approximation and for many comparisons.
FALSE_ALARM = 1e-6
Z_BOUND = 6.0


def draw(size: int, dtype: torch.dtype = torch.float32, *, name: str = "w", step: int = 0) -> np.ndarray:
    noise = GaussianNoise(Secret.from_os())
    return noise.add({name: torch.zeros(size, dtype=dtype)}, 1.0, step)[name].numpy()


def correlation_score(a: np.ndarray, b: np.ndarray) -> float:
    """sqrt(n) times the sample correlation: standard normal if a and b are independent."""
    return abs(float(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1])) * math.sqrt(len(a))


def slow_noise(key: bytes, name: str, size: int, word: str, spacing: float) -> list[float]:
    """Box-Muller on the same keystream, a number at a time in float64. `word`: type of the angle, i or q."""
    origin = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")
    cipher = algorithms.AES(key[:16])
    angle_bits = 8 * struct.calcsize(word)
    normals: list[float] = []
    for start in range(0, size, 2 * BLOCK_PAIRS):
        count = min(2 * BLOCK_PAIRS, size - start)
        pairs = (count + 1) // 2
        counter = (origin + start // 2) % 2**128
        encryptor = Cipher(cipher, modes.CTR(counter.to_bytes(16, "big"))).encryptor()
        stream = encryptor.update(bytes(pairs * (8 + angle_bits // 8)))
        radii = struct.unpack(f"<{pairs}q", stream[: 8 * pairs])
        angles = struct.unpack(f"<{pairs}{word}", stream[8 * pairs :])
        radius = [math.sqrt(-2 * math.log(abs(w) / 2**63 * (1 - spacing) + 2**-65)) for w in radii]
        angle = [math.pi * (w + 0.5) / 2 ** (angle_bits - 1) for w in angles]
        both = [r * turn(a) for turn in (math.cos, math.sin) for r, a in zip(radius, angle)]
        normals += both[:count]
    return normals


# --- keys ------------------------------------------------------------------------------------------------


def test_keystream_is_aes_128_ctr():
    """NIST SP 800-38A, F.5.1: ciphertext xor plaintext of the first two blocks."""
    stream = Keystream(bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c") + bytes(16))
    buffer = bytearray(32 + Keystream.SLACK)
    stream.seek(int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16))
    stream.fill(memoryview(buffer), 32)
    expected = "ec8cdf7398607cb0f2d21675ea9ea1e4362b7c3c6773516318a077d7fc5073ae"
    assert buffer[:32].hex() == expected


def test_keystream_long_fill_equals_short_fills():
    stream, long, short = Keystream(bytes(32)), bytearray(300_015), bytearray(300_015)
    stream.fill(memoryview(long), 300_000)
    for start in range(0, 300_000, 16_000):
        stream.seek(start // 16)
        stream.fill(memoryview(short)[start:], min(16_000, 300_000 - start))
    assert long[:300_000] == short[:300_000]


def test_labels_cannot_be_confused():
    secret = Secret.from_seed(7)
    labels = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (1,), ("1",), (-1,), (1, 1), (11,), ()]
    keys = {secret.derive(*label) for label in labels}
    assert len(keys) == len(labels)
    assert all(len(key) == 32 for key in keys)
    assert Secret.from_seed(8).derive("ab", "c") not in keys


def test_secret_never_shows_and_never_repeats():
    secret = Secret.from_os()
    assert secret.key.hex() not in repr(secret)
    assert repr(secret.key) not in repr(secret)
    assert not secret.reproducible
    assert Secret.from_seed(3).reproducible
    assert len({Secret.from_os().key for _ in range(100)}) == 100
    assert len({Secret.from_seed(seed).key for seed in (0, 1, -1, 2**32, 2**64)}) == 5


def test_secret_of_wrong_length_is_refused():
    with pytest.raises(NoiseError, match="32 bytes, not 0"):
        Secret(b"", reproducible=False)


# --- what is computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "word", "spacing"), [(torch.float32, "i", 2**-24), (torch.float64, "q", 2**-53)])
@pytest.mark.parametrize("size", [1, 2, 7, 1000, 4 * BLOCK_PAIRS + 5])
def test_agrees_with_the_slow_reading(dtype, word, spacing, size):
    secret = Secret.from_os()
    sums = {"before": torch.ones(11), "w": torch.zeros(size, dtype=dtype), "z": torch.ones(3, dtype=dtype)}
    fast = GaussianNoise(secret).add(sums, 1.0, 12)["w"]
    assert fast.dtype == dtype
    slow = slow_noise(secret.derive("noise", 12), "w", size, word, spacing)
    error = np.abs(fast.numpy() - slow)
    assert error.max() < math.sqrt(spacing)  # reached where u is near 1 (see gaussian.py)
    if size >= 1000:
        assert np.quantile(error, 0.99) < 100 * spacing


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_radius_is_exact_over_the_whole_tail(kind):
    words = np.array([0, 1, -1, 3, *(sign * 2**k + 1 for k in range(3, 62) for sign in (1, -1))], np.int64)
    radius, angle, first, second = np.empty((4, len(words)), kind)
    angle_type = np.int32 if kind is np.float32 else np.int64
    scaled_normals(words, np.zeros(len(words), angle_type), 1.0, radius, angle, first, second)
    exact = [math.sqrt(-2 * math.log((abs(int(w)) + 0.25) / 2**63)) for w in words]
    np.testing.assert_allclose(radius, exact, rtol=1e-6 if kind is np.float32 else 1e-14)
    assert radius.max() > 9.49


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_no_words_leave_a_coordinate_without_noise(kind):
    angle_type = np.int32 if kind is np.float32 else np.int64
    limits = np.iinfo(angle_type)
    radius_words = np.array([-(2**63), 2**63 - 1, -(2**63) + 1, 0, 1, 2**62], np.int64)
    angle_words = np.array([0, -1, 1, limits.min, limits.max, limits.max // 2, limits.min // 2], angle_type)
    radii, angles = (grid.ravel() for grid in np.meshgrid(radius_words, angle_words))
    radius, angle, first, second = np.empty((4, len(radii)), kind)
    scaled_normals(radii, angles, 1.0, radius, angle, first, second)
    assert np.isfinite([first, second]).all()
    assert (radius > 0).all()
    assert (first != 0).all()
    assert (second != 0).all()


def test_deviation_is_never_rounded_down():
    std = 1.0 + 2.0**-26  # float32 would make it 1
    words, angles = np.zeros(1, np.int64), np.full(1, 2**30, np.int32)
    radius, angle, first, second = np.empty((4, 1), np.float32)
    scaled_normals(words, angles, 1.0, radius, angle, first, second)
    one = radius.copy()
    scaled_normals(words, angles, std, radius, angle, first, second)
    assert radius[0] > one[0]


# --- the normal law --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kolmogorov_smirnov(dtype):
    assert stats.kstest(draw(1 << 20, dtype), "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments(dtype):
    """Standard errors of the first four and the sixth raw moment of a standard normal."""
    z = draw(1 << 22, dtype).astype(np.float64)
    root = math.sqrt(len(z))
    square = z * z
    assert abs(z.mean()) * root < Z_BOUND
    assert abs(square.mean() - 1) * root / math.sqrt(2) < Z_BOUND
    assert abs((square * z).mean()) * root / math.sqrt(15) < Z_BOUND
    assert abs((square * square).mean() - 3) * root / math.sqrt(96) < Z_BOUND
    assert abs((square**3).mean() - 15) * root / math.sqrt(10395 - 225) < 1.5 * Z_BOUND  # a skewed statistic


@pytest.mark.parametrize(("bits", "threshold"), [(20, 5.8), (24, 6.2), (34, 7.2), (44, 8.1)])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_tails_beyond_what_24_bits_can_reach(kind, bits, threshold):
    """Given u < 2**-bits, |z| > threshold > sqrt(2 bits ln 2) is 2**bits times as frequent as otherwise."""
    assert threshold > math.sqrt(2 * bits * math.log(2))
    n = 1 << 19
    buffer = bytearray(16 * n + Keystream.SLACK)
    Keystream(Secret.from_os().derive("tail")).fill(memoryview(buffer), 16 * n)
    words = np.frombuffer(buffer, "<i8", 2 * n)
    angles = words[n:].astype(np.int32 if kind is np.float32 else np.int64)
    radius, angle, first, second = np.empty((4, n), kind)
    scaled_normals(words[:n] >> bits, angles, 1.0, radius, angle, first, second)
    chance = 2 * stats.norm.sf(threshold) * 2.0**bits
    for z in (first, second):
        assert stats.binomtest(int((np.abs(z) > threshold).sum()), n, chance).pvalue > FALSE_ALARM / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_two_of_a_pair_are_independent(dtype):
    z = draw(2 * BLOCK_PAIRS, dtype)
    first, second = z[:BLOCK_PAIRS], z[BLOCK_PAIRS:]
    assert correlation_score(first, second) < Z_BOUND
    assert correlation_score(first**2, second**2) < Z_BOUND
    assert correlation_score(np.abs(first), second) < Z_BOUND
    angle = (np.arctan2(second, first).astype(np.float64) / np.pi + 1) / 2
    assert stats.kstest(angle, "uniform").pvalue > FALSE_ALARM


def test_neighbours_are_independent():
    z = draw(1 << 20)
    for lag in (1, 2, 3, 16, BLOCK_PAIRS, 2 * BLOCK_PAIRS):
        assert correlation_score(z[:-lag], z[lag:]) < Z_BOUND
        assert correlation_score(z[:-lag] ** 2, z[lag:] ** 2) < Z_BOUND


def test_steps_names_and_secrets_are_independent():
    noise, other = GaussianNoise(Secret.from_os()), GaussianNoise(Secret.from_os())
    sums = {"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)}
    draws = [z.numpy() for source in (noise, other) for step in (0, 1, 2) for z in source.add(sums, 1, step).values()]
    for i in range(len(draws)):
        for j in range(i):
            assert correlation_score(draws[i], draws[j]) < Z_BOUND


def test_deviation_and_sum():
    n = 1 << 20
    noised = GaussianNoise(Secret.from_os()).add({"w": torch.full((n,), 5.0)}, 3.0, 0)["w"].double()
    assert abs(noised.mean() - 5) * math.sqrt(n) / 3 < Z_BOUND
    assert abs(noised.var() / 9 - 1) * math.sqrt(n / 2) < Z_BOUND


# --- what it depends on ----------------------------------------------------------------------------------


def test_depends_on_secret_step_name_and_shape_only():
    secret = Secret.from_os()
    shapes = {"big": (3 * BLOCK_PAIRS + 1,), "matrix": (30, 7), "scalar": (), "none": (0, 4)}
    sums = {name: torch.zeros(shape) for name, shape in shapes.items()}
    reference = GaussianNoise(secret).add(sums, 2.0, 5)
    reused = GaussianNoise(secret)
    reused.add(sums, 1.0, 4)
    for name in reversed(shapes):
        alone = reused.add({name: sums[name]}, 2.0, 5)[name]
        assert alone.shape == shapes[name]
        assert torch.equal(alone, reference[name])
    assert not torch.equal(reference["matrix"], GaussianNoise(secret).add(sums, 2.0, 6)["matrix"])
    renamed = GaussianNoise(secret).add({"other": sums["matrix"]}, 2.0, 5)["other"]
    assert not torch.equal(reference["matrix"], renamed)


def test_threads_change_nothing():
    secret = Secret.from_os()
    sums = {f"layer{i}": torch.randn(1500, 1000) for i in range(3)}
    sums["double"] = torch.randn(4_300_000, dtype=torch.float64)
    one = GaussianNoise(secret).add(sums, 0.7, 1)
    torch.set_num_threads(2)
    two = GaussianNoise(secret).add(sums, 0.7, 1)
    assert all(torch.equal(one[name], two[name]) for name in sums)


def test_global_generators_change_nothing():
    secret, sums = Secret.from_seed(1), {"w": torch.zeros(50)}
    torch.manual_seed(0)
    first = GaussianNoise(secret).add(sums, 1.0, 0)["w"]
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert torch.equal(first, GaussianNoise(secret).add(sums, 1.0, 0)["w"])
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_layout_of_the_sum_changes_nothing():
    secret, x = Secret.from_os(), torch.randn(6, 5, 4)
    plain = GaussianNoise(secret).add({"x": x}, 1.0, 0)["x"]
    permuted = GaussianNoise(secret).add({"x": x.permute(2, 0, 1).contiguous().permute(1, 2, 0)}, 1.0, 0)["x"]
    assert torch.equal(plain, permuted)


def test_dtypes():
    noise, secret_std = GaussianNoise(Secret.from_seed(2)), 1e-3
    sums = {
        name: torch.ones(1000, dtype=dtype)
        for name, dtype in [
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("f32", torch.float32),
            ("f64", torch.float64),
        ]
    }
    noised = noise.add(sums, secret_std, 0)
    assert [z.dtype for z in noised.values()] == [torch.float32] * 3 + [torch.float64]
    assert (noised["bf16"] - 1).std() == pytest.approx(1e-3, rel=0.15)  # lost if it were added in bfloat16
    assert not torch.equal(noised["f64"], noised["f64"].float().double())


def test_results_are_new_detached_and_of_their_own_storage():
    weight = torch.ones(4, 3, requires_grad=True)
    for std in (0.0, 1.0):
        sums = {"a": weight * 1, "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2)}
        noised = GaussianNoise(Secret.from_seed(0)).add(sums, std, 0)
        assert list(noised) == list(sums)
        assert not any(z.requires_grad for z in noised.values())
        for name, z in noised.items():
            z += 100
            assert torch.equal(sums[name], torch.ones_like(sums[name]))
        assert len({z.untyped_storage().data_ptr() for z in noised.values()}) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_in_place_is_the_same_noise(threads):
    torch.set_num_threads(threads)
    noise = GaussianNoise(Secret.from_seed(1))
    shapes = {"small": (7,), "none": (0,), "scalar": (), "matrix": (300, 1001), "large": (5_000_001,)}
    sums = {name: torch.randn(shape) for name, shape in shapes.items()}
    sums |= {"double": torch.randn(33, dtype=torch.float64), "transposed": torch.randn(20, 30).t()}
    expected = {name: z + sums[name] for name, z in noise.begin(sums, 0.7, step=3).result().items()}
    places = {name: total.data_ptr() for name, total in sums.items()}
    noise.add_to(sums, 0.7, step=3)
    assert all(torch.equal(sums[name], expected[name]) for name in sums)
    assert places == {name: total.data_ptr() for name, total in sums.items()}


def test_noise_in_place_waits_for_noise_that_is_being_made():
    """They share their buffers: a step that failed may have left its noise unfinished."""
    noise, like = GaussianNoise(Secret.from_seed(1)), {"a": torch.zeros(3_000_000)}
    expected = GaussianNoise(Secret.from_seed(1)).begin({"b": like["a"]}, 1.0, step=1).result()["b"]
    unfinished, total = noise.begin(like, 1.0, step=0), torch.zeros(3_000_000)
    noise.add_to({"b": total}, 1.0, step=1)
    assert torch.equal(total, expected)
    assert torch.equal(unfinished.result()["a"], GaussianNoise(Secret.from_seed(1)).begin(like, 1.0, 0).result()["a"])


def test_in_place_needs_full_precision():
    with pytest.raises(NoiseError, match="float32"):
        GaussianNoise(Secret.from_seed(1)).add_to({"w": torch.zeros(3, dtype=torch.bfloat16)}, 1.0, 0)


def test_zero_deviation_adds_nothing():
    sums = {"a": torch.randn(10), "b": torch.randn(3).bfloat16(), "c": torch.randn(3).double()}
    noised = GaussianNoise(Secret.from_os()).add(sums, 0.0, 0)
    assert all(torch.equal(noised[name], sums[name].to(noised[name].dtype)) for name in sums)
    assert [z.dtype for z in noised.values()] == [torch.float32, torch.float32, torch.float64]


def test_works_in_inference_mode():
    torch.set_num_threads(2)
    with torch.inference_mode():
        noised = GaussianNoise(Secret.from_seed(0)).add({"w": torch.zeros(4_300_000)}, 1.0, 0)["w"]
        assert noised.std() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_bad_deviation_is_refused(std):
    with pytest.raises(NoiseError, match="must be finite and not negative"):
        GaussianNoise(Secret.from_seed(0)).add({"w": torch.zeros(2)}, std, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_on_a_gpu_is_that_of_the_cpu():
    secret = Secret.from_os()
    sums = {"a": torch.randn(1000, 300), "b": torch.randn(7).bfloat16(), "c": torch.randn(5).double()}
    here = GaussianNoise(secret).add(sums, 2.0, 3)
    there = GaussianNoise(secret).add({name: x.cuda() for name, x in sums.items()}, 2.0, 3)
    for name, z in there.items():
        assert z.is_cuda
        torch.testing.assert_close(z.cpu(), here[name])
    still = GaussianNoise(secret).add({"a": sums["a"].cuda()}, 0.0, 3)["a"]
    assert torch.equal(still.cpu(), sums["a"])
