"""Which example each row of an operation's output belongs to: established by measurement, never assumed.

Gradients of the losses are taken twice, the second time with loss i scaled by 2^k_i. Scaling by powers of two is
exact in floating point, so every element of a gradient that belongs to example i is scaled by exactly 2^k_i; an
element to which several examples contribute is not. A layout that explains every element is the owner of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_EXPONENT = 15


@dataclass(frozen=True)
class Layout:
    """Axis ``axis`` of length P·B·Q, ``outer`` being P: row r is one of example (r // Q) % B.

    P = 1 are examples side by side, Q = 1 examples in turn; between them lie views of a batch flattened with it.
    """

    axis: int
    outer: int = 1

    def copies(self, shape: torch.Size, batch: int) -> int | None:
        """P·Q, the rows an example has on the axis; None if the shape does not fit."""
        if self.axis >= len(shape) or shape[self.axis] == 0 or shape[self.axis] % (batch * self.outer):
            return None
        return shape[self.axis] // batch


@dataclass(frozen=True)
class Owner:
    """A layout together with the number of examples: splits a tensor by example."""

    layout: Layout
    batch: int

    def by_example(self, values: Tensor) -> Tensor:
        """[..., P·B·Q, ...] -> [B, P·Q, ...others in order].

        >>> Owner(Layout(1), batch=3).by_example(torch.zeros(5, 6, 7)).shape
        torch.Size([3, 2, 5, 7])
        """
        moved = values.movedim(self.layout.axis, 0)
        split = moved.unflatten(0, (self.layout.outer, self.batch, -1))
        return split.transpose(0, 1).flatten(1, 2)

    def examples(self, values: Tensor) -> Tensor:
        """Which example each row on the layout's axis belongs to.

        >>> Owner(Layout(0, outer=2), batch=3).examples(torch.zeros(12, 5)).tolist()
        [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
        """
        size = values.shape[self.layout.axis]
        row = torch.arange(size, device=values.device)
        return row // (size // (self.layout.outer * self.batch)) % self.batch

    def rows(self, values: Tensor) -> Tensor:
        """[..., B·K, ..., D] -> [B, T, D]: all axes but the last become rows of their example.

        >>> Owner(Layout(1), batch=3).rows(torch.zeros(5, 6, 7)).shape
        torch.Size([3, 10, 7])
        """
        return self.by_example(values).reshape(self.batch, -1, values.shape[-1])

    def masked(self, values: Tensor, examples: Tensor) -> Tensor:
        """One copy of ``values`` for each of ``examples``, zero outside that example's rows."""
        mask = self.examples(values) == examples.unsqueeze(1)  # [examples, rows]
        shape = [1] * values.dim()
        shape[self.layout.axis] = mask.shape[1]
        return torch.where(mask.view(len(examples), *shape), values, values.new_zeros(()))

    def sum_to(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Sum each example's elements down to ``shape``, which broadcasts to ``values``' shape: [B, *shape].

        >>> Owner(Layout(0), batch=3).sum_to(torch.ones(6, 7, 2), torch.Size([1, 2]))[:, 0, 0]
        tensor([14., 14., 14.])
        """
        split = self.by_example(values)  # [B, K, ...others]: where axis `axis` was, nothing is left
        axis = self.layout.axis
        others = [i for i in range(values.dim()) if i != axis]
        aligned = (1,) * (values.dim() - len(shape)) + tuple(shape)
        if aligned[axis] != 1:  # the parameter runs along the batch axis: every example owns rows of its own
            everyone = torch.arange(self.batch, device=values.device)
            return self.masked(values, everyone).sum_to_size(self.batch, *aligned).reshape(self.batch, *shape)
        summed = [2 + j for j, i in enumerate(others) if aligned[i] == 1]
        return split.sum([1, *summed]).reshape(self.batch, *shape)


def probe_exponents(batch: int, generator: torch.Generator) -> Tensor:
    """Random k_i in 0..MAX_EXPONENT, all values about equally often so that neighbours rarely agree."""
    return torch.randperm(batch, generator=generator) % (MAX_EXPONENT + 1)


def live_rows(owner: Owner, values: Tensor) -> Tensor:
    """Which of an example's P·Q rows are not 0 in every example.

    >>> live_rows(Owner(Layout(0), batch=2), torch.tensor([[1.0], [0.0], [0.0], [0.0]])).tolist()
    [True, False]
    """
    split = owner.by_example(values)
    return (split != 0).movedim(1, 0).flatten(1).any(1)


def candidates(shape: torch.Size, batch: int) -> Iterator[Layout]:
    """All layouts that a tensor of this shape could have; plain batch axes first."""
    for axis, size in enumerate(shape):
        if size == batch:
            yield Layout(axis)
    for axis, size in enumerate(shape):
        if size > batch and size % batch == 0:
            copies = size // batch
            for outer in range(1, copies + 1):
                if copies % outer == 0:
                    yield Layout(axis, outer)


def explanations(plain: Tensor, scaled: Tensor, exponents_B: Tensor) -> list[Layout]:
    """All layouts under which ``scaled`` is ``plain`` with example i's elements times 2^k_i.

    Elements that are not finite explain nothing and contradict nothing. A wrong layout passes only where every
    non-zero element happens to agree: with M independent rows the chance is about 16^-M for each candidate. Rounding
    cannot reject a right one, since no rounding happens.

    >>> k = torch.tensor([3, 0, 1]); g = torch.rand(4, 3, 2)
    >>> explanations(g, g * (2.0 ** k)[None, :, None], k)
    [Layout(axis=1, outer=1)]
    >>> explanations(g, g * 3, k)
    []
    """
    factors = torch.exp2(exponents_B.double()).to(plain.device)
    plain, scaled = plain.double(), scaled.double()
    finite = torch.isfinite(plain) & torch.isfinite(scaled)
    plain, scaled = torch.where(finite, plain, 0.0), torch.where(finite, scaled, 0.0)
    floor = 1e-9 * scaled.abs().amax()

    def agree(plain: Tensor, scaled: Tensor, factors: Tensor) -> bool:
        # vendor kernels may order a sum by alignment, so a last place is allowed to differ
        return bool(((scaled - plain * factors).abs() <= 1e-5 * scaled.abs() + floor).all())

    found = []
    for axis in range(plain.dim()):
        # of each row: cheap, and enough to tell most layouts apart
        largest, largest_scaled = (t.abs().movedim(axis, 0).reshape(t.shape[axis], -1).amax(1) for t in (plain, scaled))
        for layout in candidates(plain.shape, len(exponents_B)):
            if layout.axis == axis:
                of_row = factors[Owner(layout, len(exponents_B)).examples(plain)]
                of_element = of_row.view([-1 if i == axis else 1 for i in range(plain.dim())])
                if agree(largest, largest_scaled, of_row) and agree(plain, scaled, of_element):
                    found.append(layout)
    return sorted(found, key=lambda layout: plain.shape[layout.axis] != len(exponents_B))
