"""What was spent, on disk before it is released.

One line of JSON a step, appended and synced before the noised result exists. Assumes one writer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from diskdp.errors import CheckpointError


class Ledger:
    """Counts the noised sums that were (or may have been) seen; kept on disk if given a path.

    >>> ledger = Ledger(None, "plan")
    >>> ledger.record(0); ledger.spent
    1
    """

    def __init__(self, path: Path | None, plan_fingerprint: str) -> None:
        self.path = path
        self._fingerprint = plan_fingerprint
        self._spent = _read(path, plan_fingerprint) if path is not None and path.exists() else 0

    @property
    def spent(self) -> int:
        """Steps charged so far, repeated ones included."""
        return self._spent

    def record(self, step: int) -> None:
        """Charge one step; returns once the entry is on disk."""
        if self.path is not None:
            _append(self.path, json.dumps({"plan": self._fingerprint, "step": step}))
        self._spent += 1

    def at_least(self, steps: int) -> None:
        """A restored state says that ``steps`` were charged: never count fewer."""
        self._spent = max(self._spent, steps)


def _append(path: Path, line: str) -> None:
    """Add a line and sync it; a line that a crash cut short stays as it is, on a line of its own."""
    new = not path.exists()
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:  # the folder's entry must survive a crash too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(path: Path, plan_fingerprint: str) -> int:
    """Entries in a ledger. A line cut short by a crash counts as a step: its noise may have been seen."""
    lines = path.read_bytes().split(b"\n")
    entries = [line for line in lines if line]
    for number, line in enumerate(entries, 1):
        try:
            plan = json.loads(line)["plan"]
        except (ValueError, KeyError, TypeError):
            if _cut_short(line, plan_fingerprint):
                continue
            raise CheckpointError(f"{path}: line {number} is damaged; restore the ledger from a copy") from None
        if plan != plan_fingerprint:
            raise CheckpointError(f"{path}: line {number} belongs to another plan; use a new run folder")
    return len(entries)


def _cut_short(line: bytes, plan_fingerprint: str) -> bool:
    """Whether a line is the beginning of an entry of this plan."""
    start = json.dumps({"plan": plan_fingerprint, "step": 0})[:-2].encode()
    return start.startswith(line) or (line.startswith(start) and line[len(start) :].strip(b"0123456789") == b"")
