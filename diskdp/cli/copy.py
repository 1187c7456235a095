"""`diskdp copy RUN NEW`: a run to be gone on with elsewhere, under a key of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diskdp.cli.console import say
from diskdp.cli.folder import RunFolder


def copy(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    new: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
) -> None:
    """Copy a run, so that it can be gone on with in two ways: diskdp train RUN.toml --out NEW --resume.

    The copy takes a new key: it draws batches and noise of its own from here on.
    """
    RunFolder(run).copy_to(new)
    say(f"{new}: a copy of {run}, with a key of its own from the next step on")
    say("each card will account for its own run; whoever sees both runs sees more than either card says")
