"""Keys that are bound to what they protect: a step, what is public about a release, and every bit of the sums.

As in synthetic-IV encryption: the same sums have the same key, so that a step that is repeated exactly repeats its
noise; any other sums have a key that is independent of it.

The bits of all tensors together go through a keyed universal hash, and its tag through the keyed BLAKE2b of
`Secret.derive`, with all else that is hashed. Two messages that differ meet in one key only if their tags meet:
- The tag is GMAC (NIST SP 800-38D), the value at a secret point H of a polynomial over GF(2**128) whose coefficients
  are the message in blocks of 16 bytes and its length. Two of them differ in a polynomial of degree at most the
  number of blocks, n + 1, so they have equal tags for at most n + 1 of the 2**128 points: with a terabyte of sums,
  2**-92 a pair of messages. Whoever chose the sums knows nothing of H: tags are never shown, only noise that is a
  pseudorandom function of them. That is also why GMAC's nonce can stay fixed.
- H comes from a hash key of the step's own, so that one step's sums do not count against another's.
- The message is unambiguous: names, types and shapes, each with its length, go through BLAKE2b, and they fix where
  in the hashed bytes a tensor starts and ends.
Contents are compared as bytes: 0.0 and -0.0 differ, and so do two NaN of different payloads.
GMAC because it is some twenty times as fast as keyed BLAKE2b where processors multiply without carry (docs/noise.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from diskdp.noise.keys import Secret

_AT_ONCE = 1 << 20  # bytes a call: what `cryptography` and OpenSSL take at once ends at 2**31
_NONCE = bytes(12)


def bound_key(
    secret: Secret, purpose: str, step: int, public: tuple[str | int, ...], sums: Mapping[str, Tensor]
) -> bytes:
    """32 bytes that depend on the secret, on all that is given, and on nothing else; the order of sums is not given.

    >>> import torch
    >>> def key(value):
    ...     return bound_key(Secret.from_seed(0), "doctest", 3, ("public",), {"w": torch.tensor([value, 1.0])})
    >>> key(0.5) == key(0.5), key(0.5) == key(0.5 + 2**-24), key(0.0) == key(-0.0)
    (True, False, False)
    """
    forms: list[str | int] = []
    for name in sorted(sums):
        shape = sums[name].shape
        forms += [name, str(sums[name].dtype), len(shape), *shape]
    tag = _tag(secret.derive("contents", purpose, step), sums)
    return secret.derive(purpose, step, len(public), *public, len(sums), *forms, tag.hex())


def _tag(key: bytes, sums: Mapping[str, Tensor]) -> bytes:
    """GMAC of the bytes of all tensors, by name; those that are not on the CPU in one piece are copied, one by one."""
    hashed = Cipher(algorithms.AES(key[:16]), modes.GCM(_NONCE)).encryptor()
    for name in sorted(sums):
        numbers = sums[name].detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8)
        for start in range(0, numbers.size, _AT_ONCE):
            hashed.authenticate_additional_data(numbers[start : start + _AT_ONCE].data)
    hashed.finalize()
    return hashed.tag
