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
            line = json.dumps({"plan": self._fingerprint, "step": step}) + "\n"
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._spent += 1

    def at_least(self, steps: int) -> None:
        """A restored state says that ``steps`` were charged: never count fewer."""
        self._spent = max(self._spent, steps)


def _read(path: Path, plan_fingerprint: str) -> int:
    """Entries in a ledger; an incomplete last line (a crash while writing) still counts as a step."""
    lines = path.read_text(encoding="utf-8").split("\n")
    complete, last = lines[:-1], lines[-1]
    for number, line in enumerate(complete, 1):
        try:
            plan = json.loads(line)["plan"]
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: line {number} is damaged; restore the ledger from a copy") from None
        if plan != plan_fingerprint:
            raise CheckpointError(f"{path}: line {number} belongs to another plan; use a new run folder")
    return len(complete) + (1 if last else 0)
