"""Noise bound to the sums: the same for the same bits, independent of it for any others, and normal."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from scipy import stats

from diskdp.errors import NoiseError
from diskdp.noise import GaussianNoise, Secret, SecureNoise
from diskdp.noise import secure as secure_module
from diskdp.noise.binding import _AT_ONCE, bound_key
from diskdp.noise.gaussian import arithmetic
from tests.test_noise import FALSE_ALARM, Z_BOUND, correlation_score, slow_noise

SIZE = 1 << 16


def noise_of(noise: SecureNoise, sums: dict[str, torch.Tensor], std: float = 1.0, step: int = 0) -> np.ndarray:
    """What is added to all tensors, in units of std, end to end."""
    noised = noise.add(sums, std, step)
    return np.concatenate([((noised[n].double() - sums[n].double()) / std).numpy().ravel() for n in sorted(sums)])


def slow_key(secret: Secret, purpose: str, step: int, public: tuple, sums: dict[str, torch.Tensor]) -> bytes:
    """The key by other means: `struct` for the bytes, one call of AES-GCM, BLAKE2b over a message built by hand."""

    def derive(*labels: str | int) -> bytes:
        message = b""
        for label in labels:
            text = str(label).encode()
            message += (b"s" if isinstance(label, str) else b"i") + str(len(text)).encode() + b":" + text
        return hashlib.blake2b(message, key=secret.key, digest_size=32, person=b"diskdp.derive").digest()

    contents, forms = b"", []
    for name, total in sorted(sums.items()):
        letter = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}[total.dtype]
        numbers = total.flatten().tolist()
        contents += struct.pack(f"<{len(numbers)}{letter}", *numbers)
        forms += [name, str(total.dtype), total.dim(), *total.shape]
    tag = AESGCM(derive("contents", purpose, step)[:16]).encrypt(bytes(12), b"", contents)
    return derive(purpose, step, len(public), *public, len(sums), *forms, tag.hex())


# --- the key ---------------------------------------------------------------------------------------------


def test_key_is_what_the_module_says_it_is():
    secret = Secret.from_os()
    sums = {
        "b": torch.randn(7, 3),
        "a": torch.randn(5, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "whole": torch.arange(-4, 5),
        "long": torch.randn(_AT_ONCE // 4 + 3),  # more than is hashed at once
    }
    for public in ((), ("0x1p+0", 3), ("0x1p+0", "3")):
        assert bound_key(secret, "a purpose", 12, public, sums) == slow_key(secret, "a purpose", 12, public, sums)


def test_every_bit_is_in_the_key():
    secret, total = Secret.from_os(), torch.randn(9, dtype=torch.float64)
    keys = {bound_key(secret, "p", 0, (), {"other": torch.zeros(3), "w": total})}
    for position, bit in itertools.product(range(9), range(64)):
        bits = total.clone().view(torch.int64)
        bits[position] ^= torch.tensor(np.array([1 << bit], np.uint64).view(np.int64)).squeeze()
        keys.add(bound_key(secret, "p", 0, (), {"other": torch.zeros(3), "w": bits.view(torch.float64)}))
    assert len(keys) == 1 + 9 * 64


def test_forms_cannot_be_confused():
    """The same bytes in other tensors, names, shapes or types, and the same labels in other places."""
    secret = Secret.from_os()
    z = torch.zeros
    forms = [
        {"a": z(4)},
        {"b": z(4)},
        {"a": z(2, 2)},
        {"a": z(4, 1)},
        {"a": z(1, 4)},
        {"a": z(2, dtype=torch.float64)},
        {"a": z(2, dtype=torch.int64)},
        {"a": z(2), "b": z(2)},
        {"a": z(1), "b": z(3)},
        {"a": z(4), "b": z(0)},
        {"a": z(0), "b": z(4)},
        {"a": z(5)},
        {"a": z(0)},
        {"a": z(())},
        {},
    ]
    keys = {bound_key(secret, "p", 0, (), form) for form in forms}
    keys |= {bound_key(secret, "p", 0, public, {"a": z(4)}) for public in (("x",), ("x", "y"), ("xy",), (1,), ("1",))}
    keys |= {bound_key(secret, "p", 1, (), {"a": z(4)}), bound_key(secret, "q", 0, (), {"a": z(4)})}
    keys.add(bound_key(Secret.from_os(), "p", 0, (), {"a": z(4)}))
    assert len(keys) == len(forms) + 5 + 3


def test_contents_are_compared_as_bytes():
    secret = Secret.from_os()
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    values = [torch.tensor([0.0]), torch.tensor([-0.0]), quiet.reshape(1), other.reshape(1)]
    assert len({bound_key(secret, "p", 0, (), {"w": value}) for value in values}) == 4


def test_neither_layout_nor_order_is_in_the_key():
    secret, x, y = Secret.from_os(), torch.randn(6, 5, 4), torch.randn(3)
    plain = bound_key(secret, "p", 0, (), {"x": x, "y": y})
    assert plain == bound_key(secret, "p", 0, (), {"y": y, "x": x.permute(2, 0, 1).contiguous().permute(1, 2, 0)})
    assert plain == bound_key(secret, "p", 0, (), {"y": torch.zeros(6).add_(1)[::2] * 0 + y, "x": x.requires_grad_()})


# --- what is added ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "word", "spacing"), [(torch.float32, "i", 2**-24), (torch.float64, "q", 2**-53)])
def test_agrees_with_the_slow_reading(dtype, word, spacing):
    secret, std, step = Secret.from_os(), 0.7, 12
    sums = {"a": torch.randn(5), "w": torch.zeros(1001, dtype=dtype)}
    key = slow_key(secret, "secure noise", step, (std.hex(), arithmetic()), sums)
    fast = SecureNoise(secret).add(sums, std, step)["w"]
    slow = slow_noise(key, "w", 1001, word, spacing)
    assert fast.dtype == dtype
    assert np.abs(fast.numpy() / std - slow).max() < math.sqrt(spacing)  # reached where u is near 1 (gaussian.py)


@pytest.mark.parametrize("threads", [1, 2])
def test_same_sums_same_noise(threads):
    shapes = {"small": (7,), "none": (0,), "scalar": (), "matrix": (300, 1001), "large": (2_300_001,)}
    sums = {name: torch.randn(shape) for name, shape in shapes.items()}
    sums |= {"double": torch.randn(33, dtype=torch.float64), "transposed": torch.randn(20, 30).t()}
    secret = Secret.from_os()
    torch.set_num_threads(1)
    expected = SecureNoise(secret).add(sums, 0.7, 3)
    torch.set_num_threads(threads)
    noise = SecureNoise(secret)
    noise.add({"something else": torch.ones(11)}, 2.0, 3)
    in_place = {name: total.clone() for name, total in reversed(sums.items())}
    places = {name: total.data_ptr() for name, total in in_place.items()}
    noise.add_to(in_place, 0.7, 3)
    assert all(torch.equal(in_place[name], expected[name]) for name in sums)
    assert places == {name: total.data_ptr() for name, total in in_place.items()}
    assert not any(torch.equal(expected[name], sums[name]) for name in sums if sums[name].numel())


def other_releases() -> dict[str, tuple[Secret, dict[str, torch.Tensor], float, int]]:
    """A release, and those that differ from it in one thing."""
    secret = Secret.from_os()
    base = {"w": torch.randn(SIZE), "v": torch.randn(SIZE // 2, 2, dtype=torch.float64)}

    def changed(name: str, position: int) -> dict[str, torch.Tensor]:
        sums = {n: total.clone() for n, total in base.items()}
        flat = sums[name].flatten()
        flat[position] = torch.nextafter(flat[position], torch.tensor(math.inf, dtype=flat.dtype))
        return sums | {name: flat.view_as(base[name])}

    return {
        "itself": (secret, base, 1.0, 0),
        "one bit of the first": (secret, changed("w", 0), 1.0, 0),
        "one bit of the last": (secret, changed("v", SIZE - 1), 1.0, 0),
        "deviation": (secret, base, 1.0 + 2.0**-52, 0),
        "step": (secret, base, 1.0, 1),
        "secret": (Secret.from_os(), base, 1.0, 0),
        "names": (secret, {"w": base["w"], "v2": base["v"]}, 1.0, 0),
        "shapes": (secret, {"w": base["w"], "v": base["v"].reshape(-1)}, 1.0, 0),
        "tensors": (secret, base | {"x": torch.zeros(0)}, 1.0, 0),
    }


def test_anything_else_is_independent():
    """Also one tensor from the next. 37 comparisons of 2**16 normals or more, each at 2e-9."""
    draws = [noise_of(SecureNoise(secret), sums, std, step) for secret, sums, std, step in other_releases().values()]
    for a, b in itertools.combinations(draws, 2):
        assert correlation_score(a, b) < Z_BOUND
    assert correlation_score(draws[0][:SIZE], draws[0][SIZE:]) < Z_BOUND


def test_differences_of_two_releases_have_the_noise_of_both():
    """What tells a reader of both releases most: their difference must be N(0, 2), not the difference of the sums."""
    releases = list(other_releases().values())
    first = noise_of(SecureNoise(releases[0][0]), *releases[0][1:])
    for secret, sums, std, step in releases[1:]:
        difference = (noise_of(SecureNoise(secret), sums, std, step) - first) / math.sqrt(2)
        assert stats.kstest(difference, "norm").pvalue > FALSE_ALARM / 8


def test_steps_of_a_run_are_independent():
    noise, sums = SecureNoise(Secret.from_os()), {"w": torch.zeros(SIZE)}
    draws = [noise_of(noise, sums, 1.0, step) for step in range(12)]
    for a, b in itertools.combinations(draws, 2):
        assert correlation_score(a, b) < Z_BOUND
        assert correlation_score(a**2, b**2) < Z_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_law(dtype):
    """Kolmogorov-Smirnov, the first four moments, and how many exceed 4 and 5 deviations."""
    n = 1 << 20
    z = noise_of(SecureNoise(Secret.from_os()), {"w": torch.zeros(n, dtype=dtype)}, 3.0)
    assert stats.kstest(z, "norm").pvalue > FALSE_ALARM / 4
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - mean) / math.sqrt(variance / n) < Z_BOUND
    for threshold in (4.0, 5.0):
        exceeding = int((np.abs(z) > threshold).sum())
        assert stats.binomtest(exceeding, n, 2 * stats.norm.sf(threshold)).pvalue > FALSE_ALARM / 4


def test_another_arithmetic_has_another_noise(monkeypatch):
    """Noise that differed in its last place alone would show where a sum rounds."""
    noise, sums = SecureNoise(Secret.from_os()), {"w": torch.zeros(SIZE)}
    here = noise_of(noise, sums)
    monkeypatch.setattr(secure_module, "arithmetic", lambda: "another processor")
    assert correlation_score(here, noise_of(noise, sums)) < Z_BOUND


def test_noise_is_not_that_of_the_step_alone():
    secret, sums = Secret.from_os(), {"w": torch.zeros(SIZE)}
    plain = GaussianNoise(secret).add(sums, 1.0, 0)["w"].double().numpy()
    assert correlation_score(plain, noise_of(SecureNoise(secret), sums)) < Z_BOUND


def test_sums_that_are_not_finite():
    """They are hashed and noised like others: whether to go on is not decided here."""
    sums = {"w": torch.tensor([math.nan, math.inf, 1.0])}
    noised = SecureNoise(Secret.from_os()).add(sums, 1.0, 0)["w"]
    assert noised[0].isnan()
    assert noised[1] == math.inf
    assert noised[2].isfinite()


def test_zero_deviation_adds_nothing():
    sums = {"a": torch.randn(10), "b": torch.randn(3).bfloat16(), "c": torch.randn(3).double()}
    noised = SecureNoise(Secret.from_os()).add(sums, 0.0, 0)
    assert all(torch.equal(noised[name], sums[name].to(noised[name].dtype)) for name in sums)


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_bad_deviation_is_refused(std):
    with pytest.raises(NoiseError, match="must be finite and not negative"):
        SecureNoise(Secret.from_seed(0)).add_to({"w": torch.zeros(2)}, std, 0)


def test_in_place_needs_full_precision():
    with pytest.raises(NoiseError, match="float32"):
        SecureNoise(Secret.from_seed(1)).add_to({"w": torch.zeros(3, dtype=torch.bfloat16)}, 1.0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_on_a_gpu_is_that_of_the_cpu():
    secret = Secret.from_os()
    sums = {"a": torch.randn(1000, 300), "c": torch.randn(5).double()}
    here = SecureNoise(secret).add(sums, 2.0, 3)
    there = SecureNoise(secret).add({name: x.cuda() for name, x in sums.items()}, 2.0, 3)
    for name, z in there.items():
        assert z.is_cuda
        torch.testing.assert_close(z.cpu(), here[name])


def test_ranks_with_secrets_of_their_own_are_independent():
    """Two workers that add noise to the same sums: keys derived by rank. |correlation| of 10**6 pairs, at 1e-7."""
    secret, zeros = Secret.from_seed(3), torch.zeros(10**6)
    one, other = (SecureNoise(Secret(secret.derive("rank", r), True)).add({"w": zeros}, 1.0, 0)["w"] for r in range(2))
    assert abs(float((one.double() * other.double()).mean())) < 5.4e-3
