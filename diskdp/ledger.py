"""What was spent, on disk before it is released.

One line of JSON a step, appended and synced before the noised result exists. Several trainings may write to one
ledger: each counts what the others wrote before it adds its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from diskdp.errors import BudgetExhausted, CheckpointError

try:
    import fcntl
except ImportError:  # Windows: writers are not kept apart there
    fcntl = None  # type: ignore[assignment]


class Ledger:
    """Counts the noised sums that were (or may have been) seen; kept on disk if given a path.

    >>> ledger = Ledger(None, "plan")
    >>> ledger.record(0, limit=1); ledger.spent
    1
    """

    def __init__(self, path: Path | None, plan_fingerprint: str) -> None:
        self.path = path
        self._fingerprint = plan_fingerprint
        self._spent = 0
        self._size = 0  # of the file, when it was last read or written
        self._catch_up()

    @property
    def spent(self) -> int:
        """Steps charged so far, repeated ones included."""
        self._catch_up()
        return self._spent

    @property
    def recorded(self) -> int:
        """Entries on disk."""
        return 0 if self.path is None else self.spent

    def record(self, step: int, limit: int) -> None:
        """Charge one step, unless ``limit`` have been charged; returns once the entry is on disk."""
        with self._opened() as file:
            if self._spent >= limit:
                raise BudgetExhausted(f"all {limit} steps of the plan have been charged, by this training or another")
            self._append(file, [step])

    def at_least(self, steps: int) -> None:
        """A restored state says that ``steps`` were charged: never count fewer, here or on disk."""
        with self._opened() as file:
            self._append(file, range(self._spent, steps))

    def _append(self, file: IO[bytes] | None, steps: Iterable[int]) -> None:
        lines = [json.dumps({"plan": self._fingerprint, "step": step}).encode() + b"\n" for step in steps]
        if file is not None and lines:
            if not _ends_a_line(file):  # what a crash cut short stays as it is, on a line of its own
                file.write(b"\n")
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()
        self._spent += len(lines)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes] | None]:
        """The file, locked, with everything in it counted; None if there is no path."""
        if self.path is None:
            yield None
            return
        new = not self.path.exists()
        with self.path.open("ab+") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            self._catch_up()
            yield file
        if new:  # the folder's entry must survive a crash too
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _catch_up(self) -> None:
        if self.path is None or not self.path.exists() or self.path.stat().st_size == self._size:
            return
        text = self.path.read_bytes()
        self._spent = max(self._spent, _count(text, self.path, self._fingerprint))
        self._size = len(text)


def _ends_a_line(file: IO[bytes]) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _count(text: bytes, path: Path, plan_fingerprint: str) -> int:
    """Entries in a ledger. A line cut short by a crash counts as a step: its noise may have been seen."""
    entries = [line for line in text.split(b"\n") if line]
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
