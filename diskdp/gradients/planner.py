"""The cheapest exact way to a parameter's per-example norms, chosen from shapes.

A sum of terms has its norm either from Gram matrices of the factors, or from the per-example gradients themselves.
Which is cheaper can differ by a factor of fifty between the layers of one network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TypeVar

import torch
from torch import Tensor

from diskdp.gradients import products
from diskdp.gradients.terms import Conv, Direct, Outer, Term

Factors = TypeVar("Factors", Outer, Conv)

MAX_ELEMENTS = 2**21  # working memory of one chunk of examples, in numbers: what stays in the cache


@dataclass(frozen=True)
class Norms:
    """Squared norms of one parameter's per-example gradients.

    ``scatter_B`` is the sum of the squares of what was added up: the rounding error of the square is a few units in
    the last place of it, however much cancels.
    """

    squares_B: Tensor
    scatter_B: Tensor
    precision: torch.dtype  # of the factors and their products
    gradients: Direct | None  # to use in place of the terms: they were made, and are smaller than the factors


@dataclass(frozen=True)
class Method:
    """One way to norms and weighted sum: its name, its estimated work an example, and the memory of the norms.

    Work is in multiply-adds of a large matrix product; a pass over a number in memory counts as ten.
    """

    name: str  # "direct", "gram", "rows", "per-example", "patches", "pixel-gram" or "grouped"
    cost: float
    memory: float  # numbers held an example
    keeps: bool = False  # the gradients themselves, in place of the factors


def choose(terms: Sequence[Term]) -> Method:
    """The cheapest method for these terms of one parameter.

    >>> rows = lambda t, d: torch.zeros(2, t, d)
    >>> choose([Outer(rows(1, 100), rows(1, 100), 100)]).name
    'gram'
    >>> choose([Outer(rows(500, 10), rows(500, 10), 10)]).name
    'per-example'
    """
    return min(methods(terms), key=lambda method: method.cost)


def squared_norms(terms: Sequence[Term], method: Method) -> Norms:
    """‖Σ terms‖² for each example."""
    first = terms[0]
    if len(terms) == 1 and isinstance(first, Direct):
        squares = products.squares(first.grads)
        return Norms(squares, squares, first.dtype, None)
    kept = torch.zeros(0)
    if method.keeps:
        kept = torch.zeros(first.batch, *first.gradient_shape, dtype=first.dtype, device=first.device)
    step = max(1, int(MAX_ELEMENTS // max(1.0, method.memory)))
    parts = []
    for start in range(0, first.batch, step):
        chunk = slice(start, start + step)
        some = terms if step >= first.batch else [t.take(chunk) for t in terms]
        if method.name == "gram":
            parts.append(_gram([t for t in some if isinstance(t, Outer)]))
        elif method.name == "pixel-gram":
            parts.append(_gram([t for t in some if isinstance(t, Conv)]))
        elif method.name == "rows":
            parts.append(_rows(some))
        else:
            parts.append(_from_gradients(some, method.name == "grouped", kept[chunk] if method.keeps else None))
    squares_B, scatter_B = (torch.cat(tensors) for tensors in zip(*parts))
    return Norms(squares_B, scatter_B, first.dtype, Direct(kept) if method.keeps else None)


def weighted_sum(terms: Sequence[Term], weights_B: Tensor, onto: Tensor | None = None) -> Tensor:
    """Σ_i weights_i Σ terms, added to ``onto`` in its memory if given: one matrix product a term."""
    for term in terms:
        if onto is None or onto.dtype == term.dtype:
            onto = term.weighted_sum(weights_B, onto)
        else:
            onto.add_(term.weighted_sum(weights_B))
    if onto is None:
        raise ValueError("there is no term to sum")
    return onto


_PASS = 10.0  # what a pass over a number costs, in multiply-adds
_IN_CACHE = 2**22  # numbers: per-example gradients beyond this are written to memory and read again


def methods(terms: Sequence[Term]) -> list[Method]:
    """All ways to these terms' norms and sum, with what each is estimated to cost."""
    outers = [t for t in terms if isinstance(t, Outer)]
    convs = [t for t in terms if isinstance(t, Conv)]
    size = float(math.prod(terms[0].gradient_shape))
    held = sum(t.numbers for t in terms) / max(1, terms[0].batch)
    if len(outers) == len(terms):
        return _outer_methods(outers, size, held)
    if len(convs) == len(terms):
        return _conv_methods(convs, size, held)
    return [Method("direct" if len(terms) == 1 else "per-example", 2 * size, 2 * size, size <= held)]


def _outer_methods(terms: list[Outer], size: float, held: float) -> list[Method]:
    lengths, width, rows = [t.right.shape[1] for t in terms], terms[0].right.shape[2], terms[0].rows
    if all(t.one_hot for t in terms):
        return [Method("rows", sum(lengths) * width * _PASS, sum(lengths) * width)]
    pairs = sum(a * b for a, b in combinations_with_replacement(lengths, 2))
    summed = sum(lengths) * size
    gram = Method("gram", pairs * (width + rows + _PASS) + summed, 2.0 * max(lengths) ** 2)
    if any(t.one_hot for t in terms):
        return [gram]
    return [gram, _by_gradients("per-example", summed, summed, size, held, size)]


def _conv_methods(terms: list[Conv], size: float, held: float) -> list[Method]:
    """Costs fitted to measurements of single layers, one thread; see docs/performance.md."""
    conv = terms[0]
    count, images, groups = len(terms), conv.images, conv.shape.groups
    inputs, outputs = images * conv.input[0, 0].numel(), images * conv.output[0, 0].numel()
    filters = conv.output.shape[1]
    macs = count * outputs * size
    patches = groups * size / filters * outputs  # numbers of one term's patches
    # runs of a line of the image are copied, and the shorter they are the more each number costs
    unfolding = 0.0 if math.prod(conv.shape.kernel) == 1 else count * patches * 250 / conv.output.shape[-1]
    by_patches = macs * (1.2 + 30 * groups / filters) + unfolding
    large = conv.batch * size * images > _IN_CACHE
    summed = 0.5 * macs  # oneDNN's weight gradients are twice as fast as matrix products
    shifts = _PASS * sum(conv.shape.kernel) * groups
    pairs = count * (count + 1) / 2
    gram = pairs * (inputs**2 * conv.input.shape[1] + outputs**2 * (filters + shifts))
    return [
        _by_gradients("patches", by_patches, summed, size, held, size),
        _by_gradients("grouped", (27.0 if large else 2.5) * macs, summed, size, held, size * images),
        Method("pixel-gram", gram + summed, groups * (inputs**2 + 2.0 * outputs**2)),
    ]


def _by_gradients(name: str, made: float, summed: float, size: float, held: float, memory: float) -> Method:
    """Per-example gradients take the factors' place where they are smaller; else they are made for the norm alone."""
    if size <= held:
        return Method(name, made + 3 * _PASS * size, memory, keeps=True)
    return Method(name, made + _PASS * size + summed, memory)


def _gram(factors: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """Squares and scatters from products of all pairs of rows, the gradients never made."""
    squares, scatters = [], []
    for (i, a), (j, b) in combinations_with_replacement(enumerate(factors), 2):
        if i == j:
            square, scatter = a.squared_norm()
            squares.append(square)
            scatters.append(scatter)
        else:
            squares.append(2 * a.squared_norm_with(b))
    return torch.stack(squares).sum(0), torch.stack(scatters).sum(0)


def _rows(terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
    """Sums over equal row numbers of one example, then their squares: an embedding's norm without its table."""
    outers = [t for t in terms if isinstance(t, Outer)]
    numbers = torch.cat([t.left for t in outers], 1)
    values = torch.cat([t.right if t.scale == 1 else t.right * t.scale for t in outers], 1)
    batch, length, width = values.shape
    example = torch.arange(batch, device=values.device).unsqueeze(1)
    if length == 1:
        squares = values.square().sum((1, 2))
        return squares, squares
    keys, where = torch.unique(example * outers[0].rows + numbers, return_inverse=True)
    sums = values.new_zeros(len(keys), width).index_add_(0, where.flatten(), values.reshape(-1, width))
    squares = values.new_zeros(batch).index_add_(0, keys // outers[0].rows, sums.square_().sum(1))
    return squares, values.square_().sum((1, 2))


def _from_gradients(terms: Sequence[Term], grouped: bool, onto: Tensor | None) -> tuple[Tensor, Tensor]:
    """From the per-example gradients, written to ``onto`` if given: what is summed later are these very numbers."""
    first = terms[0]
    if onto is None:
        onto = torch.zeros(first.batch, *first.gradient_shape, dtype=first.dtype, device=first.device)
    for term in terms:
        if grouped:
            onto += term.per_example()
        else:
            term.add_per_example(onto)
    squares = products.squares(onto)
    return squares, squares
