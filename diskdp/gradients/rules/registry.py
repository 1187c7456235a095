"""The table from operation to rule. A rule belongs to an operation, not to a module class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from diskdp.gradients.rules import arithmetic, attention, bags, convolution, lookup, matrix, normalization, recurrent
from diskdp.gradients.trace import Rule, Rules


@functools.cache
def library_rules() -> Rules:
    """All rules that come with the library."""
    table: dict[Callable[..., Any], Rule] = {}
    for family in (matrix, convolution, attention, recurrent, lookup, bags, normalization, arithmetic):
        for functions, rule in family.RULES:
            table.update(dict.fromkeys(functions, rule))
    return Rules(table, normalization.GUARDS, arithmetic.expanded_or_vjp, matrix.FASTER)
