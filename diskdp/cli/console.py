"""How the command line talks: tables and progress on a terminal, the same tables without colour in a pipe.

Results go to stdout; warnings and errors go to stderr, one line each.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diskdp.errors import DiskDPWarning

_PIPED_WIDTH = 240  # wide enough that nothing is folded where there is no terminal to fit


def stdout() -> Console:
    """A console on the current stdout."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False, markup=False)


def say(line: str = "") -> None:
    """One plain line, never folded."""
    stdout().print(line, soft_wrap=True)


def complain(kind: str, message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print(f"diskdp: {kind}: {' '.join(message.split())}", file=sys.stderr)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """A table whose columns in ``numbers`` are flush right; cells fold, they are never cut.

    >>> print_table(table(["method", "accuracy"], [["DiSK", "0.85"]], numbers=[1]))
    <BLANKLINE>
      method   accuracy
     ───────────────────
      DiSK         0.85
    <BLANKLINE>
    """
    grid = Table(box=box.SIMPLE_HEAD, show_edge=True, pad_edge=True)
    for i, header in enumerate(headers):
        grid.add_column(header, justify="right" if i in numbers else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def print_table(grid: Table) -> None:
    """Print a table without blanks at the ends of its lines."""
    console = stdout()
    if console.is_terminal:
        console.print(grid)
        return
    with console.capture() as capture:
        console.print(grid)
    print("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))


def progress_bars() -> Progress:
    """Live bars on a terminal, nothing in a pipe. Each task has a field ``note`` for its latest result."""
    console = stdout()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def warnings_on_one_line() -> Iterator[None]:
    """Show each of diskdp's own warnings as one line on stderr."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, DiskDPWarning):
            complain("warning", str(message))
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.simplefilter("always", DiskDPWarning)
        warnings.showwarning = show
        yield
