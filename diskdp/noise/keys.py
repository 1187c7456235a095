"""Where randomness comes from: one secret, keys derived from it by label, and the keystreams of these keys.

Everything random about who is in a batch and what noise is added comes from here and from nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from diskdp.errors import NoiseError

_KEY_FORMAT = "diskdp-key/1"
_ZEROS = memoryview(bytes(1 << 17))  # what is encrypted; a larger piece is no faster and leaves the cache


@dataclass(frozen=True)
class Secret:
    """32 bytes that nobody else may know, and whether they can be had again (from a seed).

    The generators of torch and numpy do not serve here: on the CPU `torch.Generator.manual_seed` keeps 32
    bits of its seed, and the state of either can be computed from enough of its output.

    >>> secret = Secret.from_seed(1)
    >>> secret.derive("noise", 3) == Secret.from_seed(1).derive("noise", 3)
    True
    >>> secret
    Secret(reproducible=True)
    """

    key: bytes = field(repr=False)
    reproducible: bool

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise NoiseError(f"a secret is 32 bytes, not {len(self.key)}: use Secret.from_os()")

    @classmethod
    def from_os(cls) -> Secret:
        """A new secret from the operating system: what a private run uses."""
        return cls(secrets.token_bytes(32), reproducible=False)

    @classmethod
    def from_seed(cls, seed: int) -> Secret:
        """The same secret for the same seed: for tests. Who knows the seed can subtract the noise."""
        digest = hashlib.blake2b(str(int(seed)).encode(), digest_size=32, person=b"diskdp.seed")
        return cls(digest.digest(), reproducible=True)

    @classmethod
    def kept(cls, path: Path) -> Secret:
        """The secret in a file that only its owner can read, made of the operating system's randomness if new.

        Whoever has the file can subtract the noise of the run. Only noise that depends on the sum may use a kept
        secret: with any other, a step that is run again under another sum would release both under the same noise.
        """
        if not path.exists():
            cls._write(path, secrets.token_bytes(32))
        try:
            shared = os.name == "posix" and path.stat().st_mode & 0o077
            word, _, digits = path.read_text(encoding="ascii").strip().partition(" ")
            key = bytes.fromhex(digits)
        except (OSError, ValueError) as error:
            raise NoiseError(f"{path}: no key of a run ({error}); restore it from a copy, or start a new run") from None
        if shared:
            raise NoiseError(f"{path}: the key can be read by others; take it as known, and start a new run")
        if word != _KEY_FORMAT or len(key) != 32:
            raise NoiseError(f"{path}: no key of a run; restore it from a copy, or start a new run")
        return cls(key, reproducible=False)

    @classmethod
    def _write(cls, path: Path, key: bytes) -> None:
        """Whole or not at all, and never readable by others."""
        partial = path.with_name(f".{path.name}.partial")
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{_KEY_FORMAT} {key.hex()}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            raise NoiseError(f"{path}: the key cannot be written ({error}); check the folder") from error

    def derive(self, *labels: str | int) -> bytes:
        """32 bytes that depend on the secret and every label (their order, their types, where one ends)."""
        message = hashlib.blake2b(key=self.key, digest_size=32, person=b"diskdp.derive")
        for label in labels:
            text = str(label).encode()
            message.update(b"%c%d:%b" % (b"s" if isinstance(label, str) else b"i", len(text), text))
        return message.digest()


class Keystream:
    """The AES-128-CTR keystream of a key from `Secret.derive`, readable from any 16-byte block.

    AES-128 rather than AES-256: its security is not what limits the guarantee, every step has a key of its
    own, and it yields a third more bytes a second. Block numbers wrap around at 2**128.

    >>> stream, whole, part = Keystream(bytes(32)), bytearray(47), bytearray(31)
    >>> stream.seek(0); stream.fill(memoryview(whole), 32)
    >>> stream.seek(1); stream.fill(memoryview(part), 16)
    >>> whole[16:32] == part[:16]
    True
    """

    SLACK = 15
    """Bytes that a buffer must have beyond what is asked for: older versions of `cryptography` insist."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key[:16]), modes.CTR(bytes(16))).encryptor()

    def seek(self, block: int) -> None:
        """Go to the start of a block of 16 bytes."""
        self._encryptor.reset_nonce((block % (1 << 128)).to_bytes(16, "big"))

    def fill(self, buffer: memoryview, size: int) -> None:
        """Write the next `size` bytes to the start of `buffer`."""
        for start in range(0, size, len(_ZEROS)):
            self._encryptor.update_into(_ZEROS[: min(len(_ZEROS), size - start)], buffer[start:])
