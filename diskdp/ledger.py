"""What was spent, on disk before it is released.

One line of JSON a release (a noised sum), appended and synced before anything is computed from it that could be seen.
A line names the step, the sample and a digest of the noised sum: a step that is run again and comes out the same is no
new release. A ledger holds one run, or, begun with `open_account`, all runs on one data set and what they may spend
together. Assumes one process a ledger, which a lock beside it ensures; several trainings of one process may share it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from diskdp.errors import BudgetExhausted, CheckpointError, PlanError
from diskdp.plan import Plan

try:
    import fcntl
except ImportError:  # Windows: writers are not kept apart there
    fcntl = None  # type: ignore[assignment]

_CHAIN_START = "0" * 32


@dataclass(frozen=True)
class Release:
    """One noised sum that was, or may have been, seen.

    ``sample`` tells who was in the batch apart from other draws (without telling who), ``digest`` one noised sum from
    another, ``epoch`` the batches of one order of the records, of which each record is in one. What is not known is
    empty, and then counts as a draw of its own.
    """

    step: int
    sample: str = ""
    digest: str = ""
    epoch: str = ""


@dataclass(frozen=True)
class Account:
    """What all runs of a ledger may spend together, at one delta."""

    epsilon: float
    delta: float


class Releases:
    """The releases of one run: how often which draw was released."""

    def __init__(self) -> None:
        self._digests: dict[str, set[str]] = {}  # of each known sample
        self._epochs: dict[str, int] = {}  # how often the sample was released that was released most often
        self._counts: Counter[int] = Counter()
        self.total = 0

    def add(self, release: Release) -> None:
        if self.has(release):
            return
        self._counts = self.counts_with(release)
        self.total += 1
        if release.sample and release.digest:
            self._digests.setdefault(release.sample, set()).add(release.digest)
        if release.epoch:
            self._epochs[release.epoch] = max(self._epochs.get(release.epoch, 0), self._times(release.sample), 1)

    @property
    def epochs(self) -> list[str]:
        """The orders of the records of which batches were released."""
        return list(self._epochs)

    def has(self, release: Release) -> bool:
        return bool(release.digest) and release.digest in self._digests.get(release.sample, ())

    def knows(self, sample: str) -> bool:
        return sample in self._digests

    @property
    def counts(self) -> Mapping[int, int]:
        """{r: number of draws that were released r times}; a draw is a sample, or all samples of one order of records.

        Releases of one sample are not independent events: jointly they are one sampled event with √r less noise. Of
        one order a record is in one sample, at worst in the one that was released most often.
        """
        return Counter(self._counts)

    def counts_with(self, release: Release) -> Counter[int]:
        """What `counts` would be with it."""
        counts = Counter(self._counts)
        if self.has(release):
            return counts
        times = self._times(release.sample) if release.digest else 0
        before = self._epochs.get(release.epoch, 0) if release.epoch else times
        after = max(before, times + 1)
        counts.subtract({before: 1} if before else {})
        counts[after] += 1
        return +counts

    def _times(self, sample: str) -> int:
        return len(self._digests.get(sample, ())) if sample else 0


class Ledger:
    """Counts the releases of a run; kept on disk if given a path.

    >>> ledger = Ledger(None, "plan")
    >>> ledger.record(Release(0, "first sample", "one sum"), lambda releases: releases[1] <= 1)
    True
    >>> ledger.record(Release(0, "first sample", "one sum"), lambda releases: releases[1] <= 1)  # the same again
    False
    >>> ledger.spent, dict(ledger.releases)
    (1, {1: 1})
    """

    def __init__(self, path: Path | None, plan_fingerprint: str, plan_json: str = "") -> None:
        self.path = path
        self.run = plan_fingerprint
        self._plan_json = plan_json
        self._account: Account | None = None
        self._plans: dict[str, str] = {}  # of the runs in an account
        self._runs: dict[str, Releases] = {}
        self._chains: list[str] = []  # after each whole line
        self._size = 0  # of the file, when it was last read or written
        self._owner = 0  # the process that holds the lock
        if path is not None:
            self._own(path)
        self._catch_up()
        if self._account is not None:  # runs under equal plans are not the same run
            self.run = secrets.token_hex(8)

    @property
    def account(self) -> Account | None:
        """What the runs may spend together, if the ledger is one of several runs."""
        return self._account

    @property
    def others(self) -> list[tuple[str, Mapping[int, int]]]:
        """The other runs of an account: their plans' JSON and their releases."""
        self._catch_up()
        return [(self._plans[run], own.counts) for run, own in self._runs.items() if run != self.run and own.total]

    @property
    def spent(self) -> int:
        """Releases of this run so far."""
        return self._own_releases.total

    @property
    def releases(self) -> Mapping[int, int]:
        """{r: number of draws that were released r times}: samples, or orders of the records (`Releases.counts`)."""
        return self._own_releases.counts

    def releases_with(self, release: Release) -> Mapping[int, int]:
        """What `releases` would be with one more."""
        return self._own_releases.counts_with(release)

    def go_on_as(self, run: str) -> None:
        """This is the run of that name in the account."""
        if self._account is not None:
            self.run = run

    @property
    def head(self) -> tuple[int, str]:
        """How many entries are on disk, and a hash of them all."""
        self._catch_up()
        return len(self._chains), self._chains[-1] if self._chains else _CHAIN_START

    def follows(self, head: tuple[int, str]) -> bool:
        """Whether the ledger goes on from what `head` was once: nothing was taken out or changed since."""
        self._catch_up()
        count, chain = head
        return count == 0 or (count <= len(self._chains) and self._chains[count - 1] == chain)

    def knows(self, sample: str) -> bool:
        """Whether something was released of this sample: the step that drew it is run again."""
        return self._own_releases.knows(sample)

    def record(self, release: Release, allowed: Callable[[Mapping[int, int]], bool]) -> bool:
        """Charge a release, unless it is one of those charged; returns once it is on disk, and whether it was new.

        ``allowed`` says of the counts with this one among them whether the budget has room for them.
        """
        with self._opened() as file:
            own = self._own_releases
            if own.has(release):
                return False
            if release.sample and any(run != self.run and o.knows(release.sample) for run, o in self._runs.items()):
                raise CheckpointError(
                    f"{self.path}: another run of this account drew the batch of step {release.step} too: it had the "
                    "same key, and both together would spend more than either. Begin the run anew, without its key"
                )
            if not allowed(own.counts_with(release)):
                raise BudgetExhausted("the budget has no room for one more release, by this training or another")
            self._append(file, [release])
        return True

    def at_least(self, count: int, epochs: int = 0) -> None:
        """A restored state says that ``count`` releases were charged: never count fewer, here or on disk.

        ``epochs``: of so many orders of the records, if batches are cut from orders.
        """
        with self._opened() as file:
            own, labels = self._own_releases, [""]
            unseen = max(0, epochs - sum(own.counts.values()))
            if epochs:  # what is missing is of orders that nothing here is of, or else of one that is known
                labels = [f"restored {secrets.token_hex(8)}" for _ in range(unseen)] or own.epochs[-1:]
            missing = max(count - own.total, unseen)
            self._append(file, [Release(own.total + n, epoch=labels[n % len(labels)]) for n in range(missing)])

    @property
    def _own_releases(self) -> Releases:
        self._catch_up()
        return self._own_releases_here

    @property
    def _own_releases_here(self) -> Releases:
        return self._runs.setdefault(self.run, Releases())

    def _append(self, file: IO[bytes] | None, releases: Sequence[Release]) -> None:
        if not releases:
            return
        if file is not None:
            bodies = [_release_body(self.run, release) for release in releases]
            if self._account is not None and self.run not in self._plans:
                bodies.insert(0, {"run": self.run, "plan": self._plan_json})
            lines, chains = [], [self.head[1]]
            for body in bodies:
                chain, line = _line(body, chains[-1])
                chains.append(chain)
                lines.append(line)
            size, self._size = self._written(file, b"".join(lines)), -1  # read again if what follows is interrupted
            self._chains += chains[1:]
            if self._account is not None:
                self._plans[self.run] = self._plan_json
        for release in releases:
            self._own_releases_here.add(release)
        if file is not None:
            self._size = size

    def _written(self, file: IO[bytes], text: bytes) -> int:
        """Append to the file and sync it; its size then, or -1 if it has to be read again."""
        torn = _torn(file)
        if torn and text.startswith(torn):  # the very entry that a crash cut short
            text = text[len(torn) :]
        elif torn:  # what was cut short stays as it is, on a line of its own
            text = b"\n" + text
        size = file.seek(0, os.SEEK_END)
        try:
            while text:
                text = text[file.write(text) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(size)
            raise CheckpointError(
                f"{self.path}: the ledger cannot be written ({error}); nothing was released and no weight has moved. "
                "Make room, then resume"
            ) from error
        return -1 if torn else file.tell()

    def _own(self, path: Path) -> None:
        if self._owner == os.getpid():
            return
        _Lock.take(path)
        self._owner = os.getpid()
        weakref.finalize(self, _Lock.give_back, path, self._owner)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes] | None]:
        """The file with everything in it counted; None if there is no path."""
        if self.path is None:
            yield None
            return
        self._own(self.path)
        new = not self.path.exists()
        with self.path.open("ab+", buffering=0) as file:
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
        contents = _parsed(text, self.path, self.run)
        if contents.chains[: len(self._chains)] != self._chains:
            raise CheckpointError(f"{self.path}: entries were taken out of it or changed; restore it from a copy")
        self._account, self._plans, self._runs = contents.account, contents.plans, contents.runs
        self._chains, self._size = contents.chains, len(text)


def open_account(path: Path, account: Account) -> None:
    """Begin a ledger for all runs on one data set: none may start that could take them beyond the account together.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_account(Path(folder) / "ledger.jsonl", Account(epsilon=8.0, delta=1e-5))
    ...     Ledger(Path(folder) / "ledger.jsonl", "plan").account
    Account(epsilon=8.0, delta=1e-05)
    """
    if not account.epsilon > 0 or not 0 < account.delta < 1:
        raise PlanError(f"an account needs epsilon above 0 and delta between 0 and 1, got {account}")
    if math.isinf(account.epsilon):
        raise PlanError("an account needs a finite epsilon: without one it would bound nothing")
    try:
        with path.open("xb") as file:
            file.write(_line({"account": asdict(account)}, _CHAIN_START)[1])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: no ledger can be begun here ({error.strerror}); choose a new file") from error


def read_account(path: Path) -> tuple[Account | None, list[tuple[str, Mapping[int, int]]]]:
    """A ledger's account, and its runs: their plans' JSON (their fingerprint, without an account) and releases."""
    try:
        contents = _parsed(path.read_bytes(), path, None)
    except OSError as error:
        raise CheckpointError(f"{path}: no ledger that can be read ({error.strerror}); check the path") from error
    return contents.account, [(contents.plans.get(run, run), own.counts) for run, own in contents.runs.items()]


def samples(plan: Plan, draws: Mapping[int, int]) -> dict[int, int]:
    """Draws as `Plan.epsilon_of` counts them: shuffled, a draw is an order of the records, with all of its batches.

    >>> plan = Plan(dataset_size=10, batch_size=4, epochs=2, noise_multiplier=2.0, delta=1e-3, sampling="shuffled",
    ...             adjacency="zero-out")
    >>> samples(plan, {1: 2})
    {1: 6}
    """
    each = plan.steps_per_epoch if plan.sampling == "shuffled" else 1
    return {times: each * count for times, count in draws.items()}


class _Lock:
    """One process a ledger: a POSIX lock, which ends with its process and is not inherited, on a file beside it."""

    _held: ClassVar[dict[str, tuple[int, int, int]]] = {}  # path: descriptor, process, holders

    @classmethod
    def take(cls, path: Path) -> None:
        if fcntl is None:
            return
        path = path.resolve()  # whatever name it is reached by
        key = str(path)
        descriptor, process, holders = cls._held.get(key, (-1, 0, 0))
        if process != os.getpid():
            place = path.with_name(f".{path.name}.lock")
            try:
                descriptor, holders = os.open(place, os.O_RDWR | os.O_CREAT, 0o600), 0
            except OSError as error:
                raise CheckpointError(f"{path}: the ledger cannot be kept here ({error}); check the folder") from error
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise CheckpointError(
                    f"{path}: another process is writing this ledger; two trainings at once could spend more than "
                    "either knows. Wait for it to end, or use a ledger of its own"
                ) from None
        cls._held[key] = descriptor, os.getpid(), holders + 1

    @classmethod
    def give_back(cls, path: Path, owner: int) -> None:
        key = str(path.resolve())
        if fcntl is None or owner != os.getpid() or key not in cls._held:
            return
        descriptor, process, holders = cls._held.pop(key)
        if holders > 1:
            cls._held[key] = descriptor, process, holders - 1
        else:
            os.close(descriptor)


@dataclass(frozen=True)
class _Contents:
    account: Account | None
    plans: dict[str, str]
    runs: dict[str, Releases]
    chains: list[str]


def _release_body(run: str, release: Release) -> dict[str, Any]:
    body = {"run": run, "step": release.step, "sample": release.sample, "release": release.digest}
    return {**body, "epoch": release.epoch} if release.epoch else body


def _line(body: Mapping[str, Any], chain: str) -> tuple[str, bytes]:
    """The hash of the ledger with this entry, and the entry's line."""
    text = json.dumps(body)[:-1]
    chain = hashlib.sha256((chain + text).encode()).hexdigest()[: len(chain)]
    return chain, f'{text}, "chain": "{chain}"}}\n'.encode()


def _parsed(text: bytes, path: Path, run: str | None) -> _Contents:
    """What a ledger holds. Without an account all of it must be of ``run``, if that is given.

    A line that was cut short counts as a release of which nothing is known, until it is completed.
    """
    account: Account | None = None
    plans: dict[str, str] = {}
    runs: dict[str, Releases] = {}
    chains: list[str] = []
    latest = "" if run is None else run
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line:
            continue
        body = _body(line)
        if body is None:
            if not _cut_short(line):
                raise CheckpointError(f"{path}: line {number} is damaged; restore it from a copy")
            if account is None or latest in plans:  # a run's plan is there, whole, before its first release
                runs.setdefault(latest, Releases()).add(Release(-1))
            continue
        chain, whole = _line(body, chains[-1] if chains else _CHAIN_START)
        if whole != line + b"\n":
            raise CheckpointError(
                f"{path}: line {number} does not follow from the lines before it: entries were changed, taken out "
                "or put in; restore the ledger from a copy"
            )
        if "account" in body:
            account = Account(**body["account"])
        elif "plan" in body:
            plans[body["run"]] = body["plan"]
            latest = body["run"]
        else:
            latest = body["run"]
            if account is None and run is not None and latest != run:
                raise CheckpointError(f"{path}: line {number} belongs to another plan; use a new run folder")
            release = Release(body["step"], body["sample"], body["release"], body.get("epoch", ""))
            runs.setdefault(latest, Releases()).add(release)
        chains.append(chain)
    return _Contents(account, plans, runs, chains)


_RELEASE = {"run", "step", "sample", "release"}
_KINDS = ({"account"}, {"run", "plan"}, _RELEASE, {*_RELEASE, "epoch"})


def _body(line: bytes) -> dict[str, Any] | None:
    """A line's entry without its hash; None if it is not a whole one."""
    try:
        body = json.loads(line)
        del body["chain"]
    except (ValueError, KeyError, TypeError):
        return None
    return body if isinstance(body, dict) and body.keys() in _KINDS else None


def _cut_short(line: bytes) -> bool:
    """Whether a line may be the beginning of an entry, and no more than that.

    >>> _cut_short(b'{"run": "abc", "st'), _cut_short(b"something else"), _cut_short(b'{"run": "abc"}')
    (True, False, False)
    """
    start = b'{"run": "'
    try:
        json.loads(line)
    except ValueError:
        return start.startswith(line) or line.startswith(start)
    return False


def _torn(file: IO[bytes]) -> bytes:
    """What the file holds after its last whole line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4096))
    return file.read().rpartition(b"\n")[2]
