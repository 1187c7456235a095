"""The command line. Exit codes: 0 done, 1 an audit failed, 2 the user's input was wrong, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from diskdp import __version__
from diskdp.cli import audit, bench, copy, demo, explain, ledger, plan, reproduce, train
from diskdp.cli.console import complain, warnings_on_one_line
from diskdp.errors import DiskDPError

app = typer.Typer(
    name="diskdp",
    help="Differentially private training with filtered gradients. Start with: diskdp demo",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    demo.demo,
    plan.plan,
    train.train,
    copy.copy,
    ledger.ledger,
    audit.audit,
    explain.explain,
    bench.bench,
    reproduce.reproduce,
):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"diskdp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; what the user got wrong is one line on stderr.

    >>> run(["--version"])
    diskdp 0.1.0
    0
    """
    with warnings_on_one_line():
        try:
            code = app(args=arguments, prog_name="diskdp", standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return 130
        except BrokenPipeError:  # the reader of our output has left
            sys.stderr.close()
            return 1
        except typer.TyperException as error:
            complain("error", error.format_message() if hasattr(error, "format_message") else str(error))
            return 2
        except (DiskDPError, OSError) as error:
            complain("error", str(error))
            return 2
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of `diskdp` and `python -m diskdp`."""
    sys.exit(run())
