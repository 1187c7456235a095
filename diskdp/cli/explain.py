"""`diskdp explain`: how each parameter's per-example gradients will be had, or why they cannot."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import default_collate

from diskdp.cli.build import build_from, build_model, load_data, trial
from diskdp.cli.config import load_run, parse_settings
from diskdp.cli.console import print_table, say, table
from diskdp.errors import ConfigError, GradientError
from diskdp.gradients import Explanation
from diskdp.gradients import explain as explain_gradients
from diskdp.zoo import classification_loss, sequence_loss


def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of the zoo, module:function, or a RUN.toml.")],
    input_shape: Annotated[
        str | None,
        typer.Option(help="Shape of one input: 3,32,32. For tokens: how many."),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes (or tokens).")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the model; may be repeated.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Inputs are token numbers, as for gpt.")] = False,
    batch: Annotated[int, typer.Option(help="Examples in the trial batch.")] = 8,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also time each parameter's norms and sums on the trial batch.")
    ] = False,
) -> None:
    """Show, for each parameter, which operation uses it and how its gradient norms are taken.

    Example: diskdp explain cnn5 --input-shape 3,32,32 --classes 10
    A model that cannot be trained privately is shown with the reason, and the exit code is 2.
    """
    if batch < 1:
        raise ConfigError(f"--batch {batch}: must be at least 1")
    if model.endswith(".toml"):
        explanation = _of_run_file(Path(model), batch, measure)
    else:
        if input_shape is None or classes is None:
            raise ConfigError(f"explain {model}: give --input-shape (such as 3,32,32) and --classes")
        if classes < 1:
            raise ConfigError(f"--classes {classes}: must be at least 1")
        settings = parse_settings(option or [], "--option")
        shape = _shape(input_shape)
        built = build_from(model, shape, classes, settings, Path.cwd())
        explanation = _of_model(model, built, shape, classes, tokens or model == "gpt", batch, measure)
    rows = [
        [
            row.name,
            "×".join(map(str, row.shape)) or "scalar",
            row.rule,
            "refused" if row.refused else row.method,
            "" if row.refused else f"{row.cost:.3f}",
            *["" if row.milliseconds is None else f"{row.milliseconds:.3f}"] * explanation.measured,
        ]
        for row in explanation.rows
    ]
    headers = ["parameter", "shape", "operation", "method", "Mmac/example", *["ms/batch"] * explanation.measured]
    print_table(table(headers, rows, numbers=(1, 4, 5)))
    if explanation.refused:
        raise GradientError("; ".join(dict.fromkeys(row.refused for row in explanation.rows if row.refused)))
    say(f"{len(rows)} parameters in {sum(prod(row.shape) for row in explanation.rows):,} numbers, none refused")


def _of_run_file(path: Path, batch: int, measure: bool) -> Explanation:
    config = load_run(path, {})
    split = load_data(config.data)
    model = build_model(config.model, split, path.parent)
    some = default_collate([split.train[i] for i in range(min(batch, len(split.train)))])
    return _explained(model, (some[0], some[1]), measure)


def _of_model(
    name: str, model: nn.Module, shape: tuple[int, ...], classes: int, tokens: bool, batch: int, measure: bool
) -> Explanation:
    generator = torch.Generator().manual_seed(0)
    if tokens:
        inputs = torch.randint(classes, (batch, *shape), generator=generator)
    else:
        inputs = torch.randn(batch, *shape, generator=generator)
    logits = trial(name, model, inputs)
    if logits.ndim not in (2, 3) or len(logits) != batch:
        raise ConfigError(f"model {name!r}: must return logits, examples first")
    targets = torch.randint(classes, logits.shape[:-1], generator=generator)
    return _explained(model, (inputs, targets), measure)


def _explained(model: nn.Module, batch: tuple[Tensor, Tensor], measure: bool) -> Explanation:
    return explain_gradients(
        model, batch, sequence_loss if batch[1].ndim == 2 else classification_loss, measure=measure
    )


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"--input-shape {text!r}: must be whole numbers with commas, such as 3,32,32")
    return shape
