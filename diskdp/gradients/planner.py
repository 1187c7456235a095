"""The cheapest exact way to a parameter's per-example norms, chosen from shapes.

A sum of terms has its norm either from Gram matrices of the factors, or from the per-example gradients themselves.
Which is cheaper can differ by a factor of fifty between the layers of one network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from diskdp.gradients.terms import Conv, Direct, Outer, Term

MAX_ELEMENTS = 2**25  # working memory of one chunk of examples, in numbers


@dataclass(frozen=True)
class Norms:
    """Squared norms of one parameter's per-example gradients.

    ``scatter_B`` is the sum of the squares of what was added up: the rounding error of the square is a few units in
    the last place of it, however much cancels.
    """

    squares_B: Tensor
    scatter_B: Tensor
    kept: Tensor | None  # the per-example gradients, if they were made and are small enough to keep


@dataclass(frozen=True)
class Method:
    """One way to the norms: its name, and its estimated work an example in multiply-adds."""

    name: str  # "direct", "gram", "rows", "per-example", "patches", "patch-gram" or "grouped"
    cost: float
    memory: float  # numbers held an example

    @property
    def materialises(self) -> bool:
        return self.name in ("direct", "per-example", "patches", "grouped")


def choose(terms: Sequence[Term]) -> Method:
    """The cheapest method for these terms of one parameter.

    >>> rows = lambda t, d: torch.zeros(2, t, d)
    >>> choose([Outer(rows(1, 100), rows(1, 100), 100)]).name
    'gram'
    >>> choose([Outer(rows(500, 10), rows(500, 10), 10)]).name
    'per-example'
    """
    return min(_methods(terms), key=lambda method: method.cost)


def squared_norms(terms: Sequence[Term], method: Method) -> Norms:
    """‖Σ terms‖² for each example."""
    batch = terms[0].batch
    step = max(1, int(MAX_ELEMENTS // max(1.0, method.memory)))
    if step >= batch:
        return _EVALUATE[method.name](terms)
    chunks = [slice(start, start + step) for start in range(0, batch, step)]
    parts = [_EVALUATE[method.name]([t.take(chunk) for t in terms]) for chunk in chunks]
    return Norms(torch.cat([p.squares_B for p in parts]), torch.cat([p.scatter_B for p in parts]), None)


def weighted_sum(terms: Sequence[Term], weights_B: Tensor, kept: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """Σ_i weights_i Σ terms, added to ``onto`` in its memory if given.

    From the kept per-example gradients, or by one matrix product a term.
    """
    for term in terms if kept is None else [Direct(kept)]:
        if onto is None or onto.dtype == term.dtype:
            onto = term.weighted_sum(weights_B, onto)
        else:
            onto.add_(term.weighted_sum(weights_B))
    if onto is None:
        raise ValueError("there is no term to sum")
    return onto


def _methods(terms: Sequence[Term]) -> list[Method]:
    outers = [t for t in terms if isinstance(t, Outer)]
    convs = [t for t in terms if isinstance(t, Conv)]
    if len(outers) == len(terms):
        return _outer_methods(outers)
    if len(convs) == len(terms):
        return _conv_methods(convs)
    size = terms[0].per_example().numel() / terms[0].batch if isinstance(terms[0], Direct) else _size(terms[0])
    return [Method("direct" if len(terms) == 1 else "per-example", 2 * size, 2 * size)]


def _outer_methods(terms: list[Outer]) -> list[Method]:
    lengths, width, rows = [t.right.shape[1] for t in terms], terms[0].right.shape[2], terms[0].rows
    if all(t.one_hot for t in terms):
        return [Method("rows", sum(lengths) * width * 8.0, sum(lengths) * width)]
    pairs = sum(a * b for a, b in combinations_with_replacement(lengths, 2))
    gram = Method("gram", pairs * (width + rows), 2.0 * max(lengths) ** 2)
    if any(t.one_hot for t in terms):
        return [gram]
    size = rows * width
    return [gram, Method("per-example", sum(lengths) * size + 16.0 * size, size)]


def _conv_methods(terms: list[Conv]) -> list[Method]:
    """Costs fitted to the four layers of a small CNN, 64 images, one thread; see docs/performance.md."""
    conv = terms[0]
    count, images = len(terms), conv.input.shape[0] // conv.batch
    positions = images * conv.output[0, 0].numel()
    filters, size = conv.output.shape[1], _size(conv)
    patch = size / filters * conv.shape.groups
    products = count * positions * size
    large = conv.batch * size * images > _IN_CACHE
    grouped = Method("grouped", (27.0 if large else 2.4) * products, size * images)
    if conv.shape.groups > 1:
        return [grouped]
    unfolded = count * positions * patch * 25.0
    kept = products + unfolded + (150.0 if large else 30.0) * size
    pairs = count * (count + 1) / 2 * positions**2
    return [
        grouped,
        Method("patches", kept, size * images + positions * patch),
        # the sum is another product where the gradients are not kept
        Method("patch-gram", 1.5 * pairs * (patch + filters) + unfolded + products, 2.0 * positions**2),
    ]


_IN_CACHE = 2**22  # numbers: per-example gradients beyond this are written to memory and read again


def _size(term: Term) -> float:
    if isinstance(term, Conv):
        kernel = 1
        for k in term.shape.kernel:
            kernel *= k
        return float(term.output.shape[1] * term.input.shape[1] // term.shape.groups * kernel)
    if isinstance(term, Outer):
        return float(term.rows * term.right.shape[2])
    return term.grads[0].numel() if term.batch else 0.0


def _gram(terms: Sequence[Term]) -> Norms:
    outers = [t for t in terms if isinstance(t, Outer)]
    total = outers[0].right.new_zeros(outers[0].batch)
    scatter = total.clone()
    for (i, a), (j, b) in combinations_with_replacement(enumerate(outers), 2):
        if i == j:
            square, diagonal = a.squared_norm()
            total += square
            scatter += diagonal
        else:
            total.add_(a.squared_norm_with(b), alpha=2)
    return Norms(total, scatter, None)


def _patch_gram(terms: Sequence[Term]) -> Norms:
    return _gram([t.outer() for t in terms if isinstance(t, Conv)])


def _rows(terms: Sequence[Term]) -> Norms:
    """Sums over equal row numbers of one example, then their squares: an embedding's norm without its table."""
    outers = [t for t in terms if isinstance(t, Outer)]
    numbers = torch.cat([t.left for t in outers], 1)
    values = torch.cat([t.right if t.scale == 1 else t.right * t.scale for t in outers], 1)
    batch, length, width = values.shape
    example = torch.arange(batch, device=values.device).unsqueeze(1)
    if length == 1:
        squares = values.square().sum((1, 2))
        return Norms(squares, squares, None)
    keys, where = torch.unique(example * outers[0].rows + numbers, return_inverse=True)
    sums = values.new_zeros(len(keys), width).index_add_(0, where.flatten(), values.reshape(-1, width))
    squares = values.new_zeros(batch).index_add_(0, keys // outers[0].rows, sums.square_().sum(1))
    return Norms(squares, values.square_().sum((1, 2)), None)


def _from_gradients(make: Callable[[Term], Tensor]) -> Callable[[Sequence[Term]], Norms]:
    def evaluate(terms: Sequence[Term]) -> Norms:
        grads = make(terms[0])
        for term in terms[1:]:
            grads = grads + make(term)
        squares = torch.linalg.vector_norm(grads.reshape(len(grads), -1), dim=1).square_()
        return Norms(squares, squares, grads)  # what is summed are these very numbers

    return evaluate


def _by_patches(term: Term) -> Tensor:
    return term.per_example_by_patches() if isinstance(term, Conv) else term.per_example()


_EVALUATE: dict[str, Callable[[Sequence[Term]], Norms]] = {
    "direct": _from_gradients(lambda term: term.per_example()),
    "per-example": _from_gradients(lambda term: term.per_example()),
    "grouped": _from_gradients(lambda term: term.per_example()),
    "patches": _from_gradients(_by_patches),
    "gram": _gram,
    "rows": _rows,
    "patch-gram": _patch_gram,
}
