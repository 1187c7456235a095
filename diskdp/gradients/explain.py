"""How each parameter's per-example gradients will be had, or why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from diskdp.errors import GradientError
from diskdp.gradients.engine import Engine, LossFunction
from diskdp.gradients.planner import choose
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.tuning import milliseconds

_REPEATS = 5


@dataclass(frozen=True)
class ParameterRow:
    """One trainable parameter: the operations that use it, how its norms are taken, what that costs.

    Costs are of norm and weighted sum, beyond the forward and backward pass: estimated an example, measured (if that
    was asked for) for the whole batch.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    method: str
    cost: float  # million multiply-adds an example
    refused: str | None = None
    milliseconds: float | None = None


@dataclass(frozen=True)
class Explanation:
    """A row for each trainable parameter; printing it shows a table."""

    rows: tuple[ParameterRow, ...]

    @property
    def refused(self) -> bool:
        return any(row.refused is not None for row in self.rows)

    @property
    def measured(self) -> bool:
        return any(row.milliseconds is not None for row in self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        table = [["parameter", "shape", "operation", "method", "Mmac/example", *["ms/batch"] * self.measured]]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            cost = "" if row.refused else f"{row.cost:.3f}"
            measured = "" if row.milliseconds is None else f"{row.milliseconds:.3f}"
            line = [row.name, shape, row.rule, "refused" if row.refused else row.method, cost]
            table.append([*line, *[measured] * self.measured])
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        reasons = dict.fromkeys(row.refused for row in self.rows if row.refused)
        return "\n".join([*lines, *(f"refused: {reason}" for reason in reasons)])


def explain(model: nn.Module, batch: Any, loss_fn: LossFunction, *, measure: bool = False) -> Explanation:
    """Examine the model on a batch and say, for each trainable parameter, which rule and method serve it.

    With ``measure``, norm and weighted sum of each parameter are also timed on this batch, the best of several times.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> rows = explain(model, torch.randn(4, 3), lambda model, x: model(x).sum(1))
    >>> [(row.name, row.rule, row.method) for row in rows]
    [('weight', 'linear', 'gram'), ('bias', 'linear', 'direct')]
    """
    engine = Engine(model, loss_fn)
    parameters = engine.parameters()
    random = RandomState.capture()
    try:
        gradients = engine.gradients(batch, [(1.0, None)])
    except GradientError as error:
        blamed = set(error.parameters) or set(parameters)
        return Explanation(
            tuple(
                ParameterRow(name, tuple(p.shape), "", "", 0.0, str(error) if name in blamed else None)
                for name, p in parameters.items()
            )
        )
    finally:
        random.restore()
    rows = []
    for name, p in parameters.items():
        terms = gradients.terms[name]
        if terms:
            method = choose(terms)
            rule = gradients.operations.get(name, "")
            measured = milliseconds(terms, method, _REPEATS) if measure else None
            rows.append(ParameterRow(name, tuple(p.shape), rule, method.name, method.cost / 1e6, None, measured))
        else:
            rows.append(ParameterRow(name, tuple(p.shape), "", "zero", 0.0, None, 0.0 if measure else None))
    return Explanation(tuple(rows))
