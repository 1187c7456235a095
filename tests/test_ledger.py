"""The ledger: what is counted, what a crash or an intruder may have done to the file, who may write."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskdp.errors import BudgetExhausted, CheckpointError, PlanError
from diskdp.ledger import Account, Ledger, Release, open_account, read_account


def anything(releases: Mapping[int, int]) -> bool:
    return True


def at_most(count: int):
    return lambda releases: sum(releases.values()) <= count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def filled(path: Path, steps: int = 4) -> Ledger:
    ledger = Ledger(path, "abc")
    for step in range(steps):
        assert ledger.record(Release(step, f"sample {step}", f"sum {step}"), anything)
    return ledger


# --- counting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
@given(entries=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
@settings(max_examples=30, deadline=None)
def test_counts_are_those_of_a_set(kept: bool, entries: list[tuple[int, int]], tmp_path_factory) -> None:
    """The oracle: a release is new unless (sample, digest) was seen; a sample was released once for each digest."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl" if kept else None
    ledger = Ledger(path, "abc")
    seen: set[tuple[int, int]] = set()
    for sample, digest in entries:
        new = ledger.record(Release(0, f"s{sample}", f"d{digest}"), anything)
        assert new == ((sample, digest) not in seen)
        seen.add((sample, digest))
    times = [sum(s == sample for s, _ in seen) for sample in range(4)]
    expected = {r: times.count(r) for r in range(1, 5) if times.count(r)}
    for one in (ledger, Ledger(path, "abc") if kept else ledger):
        assert one.spent == len(seen)
        assert dict(one.releases) == expected


def test_what_is_not_known_counts_each_time(path: Path) -> None:
    ledger = Ledger(path, "abc")
    for _ in range(2):
        assert ledger.record(Release(3), anything)
    assert ledger.spent == Ledger(path, "abc").spent == 2
    assert ledger.releases == {1: 2}


def test_what_is_allowed_is_asked_with_the_release_counted(path: Path) -> None:
    asked: list[dict[int, int]] = []

    def note(releases: Mapping[int, int]) -> bool:
        asked.append(dict(releases))
        return True

    ledger = Ledger(path, "abc")
    for sample, digest in (("a", "1"), ("b", "1"), ("a", "2"), ("a", "2"), ("a", "3"), ("", "")):
        ledger.record(Release(0, sample, digest), note)
    assert asked == [{1: 1}, {1: 2}, {1: 1, 2: 1}, {1: 1, 3: 1}, {1: 2, 3: 1}]


def test_two_trainings_on_one_ledger_cannot_pass_the_plan(path: Path) -> None:
    one, other = Ledger(path, "abc"), Ledger(path, "abc")
    for step in range(3):
        one.record(Release(step, f"one {step}", "x"), at_most(5))
    other.record(Release(0, "other 0", "x"), at_most(5))
    assert one.spent == other.spent == 4
    other.record(Release(1, "other 1", "x"), at_most(5))
    with pytest.raises(BudgetExhausted, match="or another"):
        one.record(Release(3, "one 3", "x"), at_most(5))
    assert one.spent == 5
    assert len(path.read_text().splitlines()) == 5


def test_a_ledger_is_filled_up_to_what_a_checkpoint_says(path: Path) -> None:
    ledger = Ledger(path, "abc")
    ledger.at_least(3)
    ledger.at_least(2)
    assert ledger.spent == Ledger(path, "abc").spent == 3


# --- damage -----------------------------------------------------------------------------------------------------------


def test_an_entry_that_a_crash_cut_short_counts_until_it_is_completed(path: Path) -> None:
    """At every length of what was written: the same step run again completes it, another one leaves it counted."""
    filled(path)
    whole = path.read_bytes()
    third = whole[: whole.rstrip().rfind(b"\n") + 1]
    for length in range(len(third) + 1, len(whole)):
        path.write_bytes(whole[:length])
        cut = Ledger(path, "abc")
        assert cut.spent == 4
        assert cut.record(Release(3, "sample 3", "sum 3"), anything) == (length < len(whole) - 1)
        if length < len(whole) - 1:  # else only the newline was missing
            assert path.read_bytes() == whole
        assert cut.spent == Ledger(path, "abc").spent == 4
        path.write_bytes(whole[:length])
        other = Ledger(path, "abc")
        other.record(Release(3, "other sample", "another sum"), anything)
        alike = length <= whole.index(b'"sample 3') + 1  # nothing of the cut entry tells it from the other one
        assert other.spent == Ledger(path, "abc").spent == (4 if alike else 5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], lines[2], lines[3]], "line 2 does not follow"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 does not follow"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2 does not follow"),
        (lambda lines: [lines[0], lines[1].replace("sum 1", "sum 9"), *lines[2:]], "line 2 does not follow"),
        (lambda lines: [*lines[:2], "not an entry", *lines[2:]], "line 3 is damaged"),
        (lambda lines: [line.replace("abc", "abd") for line in lines], "line 1 does not follow"),
        (lambda lines: [lines[0].replace('"step"', '"steps"'), *lines[1:]], "line 1 is damaged"),
        (lambda lines: ["\x00" * 80, *lines], "line 1 is damaged"),
    ],
)
def test_damage_is_refused_with_the_line(path: Path, damage, message: str) -> None:
    filled(path)
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(CheckpointError, match=message):
        Ledger(path, "abc")


def test_a_ledger_that_was_cut_is_found_by_what_a_checkpoint_remembers(path: Path) -> None:
    ledger = filled(path)
    head = ledger.head
    assert head[0] == 4
    lines = path.read_text().splitlines(keepends=True)
    for kept in range(4):
        path.write_text("".join(lines[:kept]))
        assert not Ledger(path, "abc").follows(head)
    path.write_text("".join(lines))
    again = Ledger(path, "abc")
    again.record(Release(4, "sample 4", "sum 4"), anything)
    assert again.follows(head)
    path.unlink()
    other = Ledger(path, "abc")
    for step in range(5):
        other.record(Release(step, f"another {step}", "x"), anything)
    assert not other.follows(head)
    assert other.follows((0, ""))


def test_a_ledger_changed_under_a_training_is_noticed(path: Path) -> None:
    ledger = filled(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(CheckpointError, match="taken out"):
        ledger.record(Release(4, "sample 4", "sum 4"), anything)


def test_a_ledger_of_another_run_is_refused(path: Path) -> None:
    filled(path)
    with pytest.raises(CheckpointError, match="line 1 belongs to another plan"):
        Ledger(path, "abd")


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_a_full_disk_releases_nothing_and_loses_nothing(path: Path) -> None:
    filled(path)
    before = path.read_bytes()
    code = """
        import resource, signal, sys
        from pathlib import Path
        from diskdp.errors import CheckpointError
        from diskdp.ledger import Account, Ledger, Release, open_account, read_account
        path = Path(sys.argv[1])
        ledger = Ledger(path, "abc")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
        try:
            ledger.record(Release(4, "sample 4", "sum 4"), lambda releases: True)
        except CheckpointError as error:
            print(ledger.spent, error)
        """
    for room in (0, 1, 100):
        answer = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(path), str(len(before) + room)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert answer.startswith("4 "), answer
        assert "cannot be written" in answer
        assert path.read_bytes() == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # here there is room
    assert Ledger(path, "abc").record(Release(4, "sample 4", "sum 4"), anything)


# --- one process ------------------------------------------------------------------------------------------------------

HOLDER = """
    import sys, time
    from pathlib import Path
    from diskdp.ledger import Ledger
    ledger = Ledger(Path(sys.argv[1]), "abc")
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_a_second_process_is_refused_until_the_first_ends(path: Path) -> None:
    process = holder(path)
    with pytest.raises(CheckpointError, match="another process is writing"):
        Ledger(path, "abc")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert filled(path).spent == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_a_second_process(path: Path) -> None:
    ledger = filled(path)
    child = os.fork()
    if child == 0:
        try:
            ledger.record(Release(9, "sample 9", "sum 9"), anything)
        except CheckpointError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(path.read_text().splitlines()) == 4
    assert ledger.record(Release(4, "sample 4", "sum 4"), anything)


def test_the_lock_ends_with_the_last_training(path: Path) -> None:
    one, other = filled(path), Ledger(path, "abc")
    del one
    code = f"from pathlib import Path; from diskdp.ledger import Ledger; Ledger(Path({str(path)!r}), 'abc')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1
    del other
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_entries_are_json_with_nothing_of_the_data(path: Path) -> None:
    filled(path, 1)
    assert json.loads(path.read_text()).keys() == {"run", "step", "sample", "release", "chain"}


# --- several runs on one data set -------------------------------------------------------------------------------------


def test_runs_of_an_account_are_kept_apart_and_together(path: Path) -> None:
    open_account(path, Account(2.0, 1e-5))
    one, other = Ledger(path, "abc", "plan a"), Ledger(path, "abc", "plan a")  # equal plans, two runs
    for step in range(3):
        one.record(Release(step, f"one {step}", "x"), anything)
    other.record(Release(0, "other 0", "x"), anything)
    assert (one.spent, other.spent) == (3, 1)
    assert one.others == [("plan a", {1: 1})]
    assert other.others == [("plan a", {1: 3})]
    later = Ledger(path, "xyz", "plan b")
    assert later.account == Account(2.0, 1e-5)
    assert later.spent == 0
    assert sorted(later.others) == [("plan a", {1: 1}), ("plan a", {1: 3})]
    later.go_on_as(one.run)
    assert later.spent == 3
    assert read_account(path) == (Account(2.0, 1e-5), [("plan a", {1: 3}), ("plan a", {1: 1})])


def test_an_account_cannot_be_begun_over_a_ledger(path: Path) -> None:
    filled(path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="choose a new file"):
        open_account(path, Account(2.0, 1e-5))
    assert path.read_bytes() == before


@pytest.mark.parametrize("account", [Account(0, 1e-5), Account(float("inf"), 1e-5), Account(1, 0), Account(1, 1)])
def test_accounts_that_bound_nothing(account: Account, path: Path) -> None:
    with pytest.raises(PlanError):
        open_account(path, account)
    assert not path.exists()


def test_restored_orders_never_count_fewer(path: Path) -> None:
    """After any sequence of restored states there are as many releases and orders as the largest of them says."""
    for ledger in (Ledger(None, "abc"), Ledger(path, "abc")):
        most = most_orders = 0
        for count, orders in ((5, 1), (10, 2), (3, 1), (10, 4), (12, 4), (15, 5)):
            ledger.at_least(count, orders)
            most, most_orders = max(most, count), max(most_orders, orders)
            assert ledger.spent >= most
            assert sum(ledger.releases.values()) == most_orders
    assert Ledger(path, "abc").releases == {1: 5}


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupted_write_is_read_again(where: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of an entry: what is on disk counts, and nothing is taken for damage."""
    ledger = filled(path)
    written = Ledger._written

    def interrupted(self: Ledger, file: object, text: bytes) -> int:
        if where == "after":
            written(self, file, text)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_written", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.record(Release(4, "sample 4", "sum 4"), anything)
    assert ledger.spent == (5 if where == "after" else 4)
    assert ledger.record(Release(4, "sample 4", "sum 4"), anything) == (where == "before")
    assert ledger.spent == Ledger(path, "abc").spent == 5


def test_orders_of_the_records_count_by_their_most_released_batch(path: Path) -> None:
    """A record is in one batch of an order: two orders of three batches are two draws, however many were released."""
    ledger = Ledger(path, "abc")
    for order in ("a", "b"):
        for step in range(3):
            ledger.record(Release(step, f"{order}{step}", "x", order), anything)
    assert dict(ledger.releases) == {1: 2}
    assert ledger.spent == 6
    ledger.record(Release(1, "b1", "y", "b"), anything)  # this batch came out otherwise when it was run again
    assert dict(ledger.releases) == dict(Ledger(path, "abc").releases) == {1: 1, 2: 1}
    ledger.record(Release(2, "b2", "y", "b"), anything)  # whoever was in that one was not in this one
    assert dict(ledger.releases) == {1: 1, 2: 1}
    ledger.at_least(11, epochs=4)
    assert ledger.spent == 11
    assert dict(ledger.releases) == {1: 3, 2: 1}


def test_a_key_may_serve_one_run_of_an_account(path: Path) -> None:
    open_account(path, Account(2.0, 1e-5))
    Ledger(path, "abc", "plan a").record(Release(0, "a batch", "x"), anything)
    again = Ledger(path, "abc", "plan a")
    with pytest.raises(CheckpointError, match="same key"):
        again.record(Release(0, "a batch", "y"), anything)
    assert again.spent == 0
    assert again.record(Release(0, "another batch", "y"), anything)


@pytest.mark.parametrize("plan_line", ["", '{"run": "12", "pl', '{"run"'])
def test_an_account_whose_first_entry_was_cut_short(plan_line: str, path: Path) -> None:
    """Nothing had been released: the account goes on."""
    open_account(path, Account(2.0, 1e-5))
    with path.open("a") as file:
        file.write(plan_line)
    ledger = Ledger(path, "abc", "plan a")
    assert ledger.others == []
    assert ledger.record(Release(0, "a batch", "x"), anything)
    assert read_account(path)[1] == [("plan a", {1: 1})]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_a_link_to_a_ledger_is_the_same_ledger(path: Path) -> None:
    filled(path)
    (path.parent / "elsewhere").mkdir()
    link = path.parent / "elsewhere" / "ledger.jsonl"
    link.symlink_to(path)
    process = holder(path)
    try:
        with pytest.raises(CheckpointError, match="another process is writing"):
            Ledger(link, "abc")
    finally:
        process.kill()
        process.communicate()


def test_a_plan_that_was_cut_at_its_own_brace(path: Path) -> None:
    """Every length of an account's first entries: nothing was released before the last is whole."""
    open_account(path, Account(2.0, 1e-5))
    begun = path.read_bytes()
    Ledger(path, "abc", '{"a": {"b": 1}}').record(Release(0, "a batch", "x"), anything)
    whole = path.read_bytes()
    for length in range(len(begun), len(whole)):
        path.write_bytes(whole[:length])
        assert sum(sum(counts.values()) for _, counts in read_account(path)[1]) <= 1
        assert Ledger(path, "abc", "{}").record(Release(0, "another batch", "y"), anything)
