"""Per-example gradients as sums of products of factors, without the gradients themselves.

A term stands for one use of one parameter at one point: a tensor g_i of the parameter's shape for each of the
B examples. `Outer` keeps Σ_t left_{i,t} ⊗ right_{i,t}, `Conv` keeps a convolution's input and output gradient,
`Direct` keeps the g_i. Factors arrive in the dtype in which sums are to be taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.gradients.products import add_products, dots, gram_products, sum_of_outers

# Points are mixed by differences of their factors where Σ|a_k| is beyond this: nearly equal points could cancel.
_MODERATE = 4.0
_PATCHES_AT_ONCE = 2**18  # numbers: what stays in the cache until it is multiplied


@dataclass(frozen=True)
class Direct:
    """The per-example gradients themselves, [B, *shape]."""

    grads: Tensor

    @property
    def batch(self) -> int:
        return self.grads.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    @property
    def device(self) -> torch.device:
        return self.grads.device

    @property
    def numbers(self) -> int:
        """Held in memory for the term."""
        return self.grads.numel()

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        return tuple(self.grads.shape[1:])

    def per_example(self) -> Tensor:
        return self.grads

    def add_per_example(self, onto: Tensor) -> None:
        onto.add_(self.grads)

    def weighted_sum(self, weights_B: Tensor, onto: Tensor | None = None) -> Tensor:
        """Σ_i weights_i g_i, added to ``onto`` in its memory if given."""
        total = torch.mv(self.grads.reshape(self.batch, -1).t(), weights_B.to(self.grads.dtype))
        return _added(total.view(self.grads.shape[1:]), onto)

    def take(self, examples: slice | Tensor) -> Direct:
        return Direct(self.grads[examples])

    def double(self) -> Direct:
        return Direct(self.grads.double())

    def without(self, bad_B: Tensor) -> Direct:
        return Direct(_blank(self.grads, bad_B))


@dataclass(frozen=True)
class Outer:
    """scale · Σ_t left_t ⊗ right_t for a matrix [P, D]: left [B, T, P] (or row numbers [B, T]), right [B, T, D].

    Row numbers stand for one-hot rows that are never expanded: the gradient of an embedding.
    """

    left: Tensor
    right: Tensor
    rows: int  # P
    scale: float = 1.0

    @property
    def batch(self) -> int:
        return self.right.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.right.dtype

    @property
    def device(self) -> torch.device:
        return self.right.device

    @property
    def one_hot(self) -> bool:
        return self.left.dim() == 2

    @property
    def numbers(self) -> int:
        """Held in memory for the term."""
        return self.left.numel() + self.right.numel()

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        return (self.rows, self.right.shape[2])

    def per_example(self) -> Tensor:
        if not self.one_hot:
            grads = torch.bmm(self.left.transpose(1, 2), self.right)
        else:
            grads = self.right.new_zeros(self.batch, self.rows, self.right.shape[2])
            grads.scatter_add_(1, self.left.unsqueeze(2).expand_as(self.right), self.right)
        return grads if self.scale == 1 else grads.mul_(self.scale)

    def add_per_example(self, onto: Tensor) -> None:
        if self.one_hot:
            right = self.right if self.scale == 1 else self.right * self.scale
            onto.scatter_add_(1, self.left.unsqueeze(2).expand_as(right), right)
        else:
            add_products(self.left.transpose(1, 2), self.right.transpose(1, 2), self.scale, onto)

    def weighted_sum(self, weights_B: Tensor, onto: Tensor | None = None) -> Tensor:
        """Σ_i weights_i G_i, added to ``onto`` in its memory if given."""
        weights = (weights_B * self.scale).to(self.right.dtype)[:, None, None]
        width = self.right.shape[2]
        if self.one_hot:
            total = self.right.new_zeros(self.rows, width) if onto is None else onto
            return total.index_add_(0, self.left.flatten(), (self.right * weights).reshape(-1, width))
        left, right = self.left, self.right
        if self.rows <= width:  # scale the smaller factor
            left = left * weights
        else:
            right = right * weights
        return sum_of_outers(left.reshape(-1, self.rows), right.reshape(-1, width), onto)

    def take(self, examples: slice | Tensor) -> Outer:
        return replace(self, left=self.left[examples], right=self.right[examples])

    def double(self) -> Outer:
        return replace(self, left=self.left if self.one_hot else self.left.double(), right=self.right.double())

    def without(self, bad_B: Tensor) -> Outer:
        left = self.left if self.one_hot else _blank(self.left, bad_B)
        return replace(self, left=left, right=_blank(self.right, bad_B))

    def squared_norm(self) -> tuple[Tensor, Tensor]:
        """‖G_i‖² and Σ_t |left_t|²|right_t|² for each example."""
        if self.right.shape[1] == 1:
            square = self.squared_norm_with(self)
            return square, square
        products = self._products(self)
        factor = self.scale**2
        return products.sum((1, 2)) * factor, products.diagonal(dim1=1, dim2=2).sum(1) * factor

    def squared_norm_with(self, other: Outer) -> Tensor:
        """<G_i, G'_i> for each example: Σ_{t,s} (left_t · left'_s)(right_t · right'_s)."""
        factor = self.scale * other.scale
        if not self.one_hot and not other.one_hot and self.left.shape[1] == other.left.shape[1] == 1:
            return dots(self.left, other.left).mul_(dots(self.right, other.right)).mul_(factor)
        return self._products(other).sum((1, 2)).mul_(factor)

    def _products(self, other: Outer) -> Tensor:
        if not self.one_hot and not other.one_hot:
            return gram_products([(self.right, other.right), (self.left, other.left)])
        return gram_products([(self.right, other.right)]).mul_(_one_hot_gram(self, other))


@dataclass(frozen=True)
class ConvShape:
    """What a convolution does, apart from its tensors; padding is symmetric and already numeric."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Conv:
    """scale · a convolution's input [B·K, C, *S] and output gradient [B·K, P, *O], K images an example, in order."""

    input: Tensor
    output: Tensor
    batch: int
    shape: ConvShape
    scale: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return self.output.dtype

    @property
    def device(self) -> torch.device:
        return self.output.device

    @property
    def numbers(self) -> int:
        """Held in memory for the term."""
        return self.input.numel() + self.output.numel()

    @property
    def images(self) -> int:
        """K, the images of one example."""
        return self.input.shape[0] // self.batch

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        return (self.output.shape[1], self.input.shape[1] // self.shape.groups, *self.shape.kernel)

    def per_example(self) -> Tensor:
        """Weight gradients by one grouped convolution over all images (stride and dilation change places)."""
        x, r, conv = self.input, self.output, self.shape
        images, channels, filters = x.shape[0], x.shape[1], r.shape[1]
        blocks = images * conv.groups
        taps = x.reshape(blocks, channels // conv.groups, *x.shape[2:]).transpose(0, 1)
        kernels = r.reshape(images * filters, 1, *r.shape[2:])
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(conv.kernel) - 1]
        grads = convolve(taps, kernels, None, conv.dilation, conv.padding, conv.stride, blocks)
        for axis, size in enumerate(conv.kernel):  # a stride that does not divide leaves extra positions
            grads = grads.narrow(2 + axis, 0, size)
        grads = grads.reshape(channels // conv.groups, images, filters, *conv.kernel).movedim(0, 2)
        grads = grads if self.images == 1 else grads.unflatten(0, (self.batch, -1)).sum(1)
        return grads if self.scale == 1 else grads * self.scale

    def add_per_example(self, onto: Tensor) -> None:
        """The same by one matrix product an image and group, of the output gradient and the patches it met.

        Patches are written where those of other images have just been read: they stay in the cache.
        """
        groups, filters = self.shape.groups, self.output.shape[1]
        rows = self.output.reshape(self.batch, self.images, groups, filters // groups, -1)
        size = math.prod(self.gradient_shape) // filters  # of a filter
        total = onto.view(self.batch, groups, filters // groups, size)
        windows = self._windows().unflatten(0, (self.batch, self.images))
        step = max(1, _PATCHES_AT_ONCE // max(1, groups * size * rows.shape[-1]))
        space = windows.new_empty(min(step, self.batch), *windows.shape[2:])
        for start in range(0, self.batch, step):
            chunk = slice(start, start + step)
            for image in range(self.images):
                taken = windows[chunk, image]
                patches = space[: len(taken)].copy_(taken).view(-1, size, rows.shape[-1])
                add_products(rows[chunk, image].flatten(0, 1), patches, self.scale, total[chunk].flatten(0, 1))

    def _windows(self) -> Tensor:
        """The receptive field of every output position, [B·K, C, *kernel, *positions]: a view of the padded input."""
        conv, out = self.shape, self.output.shape[2:]
        x = F.pad(self.input, [p for pad in reversed(conv.padding) for p in (pad, pad)]).contiguous()
        steps = x.stride()[2:]
        return x.as_strided(
            (*x.shape[:2], *conv.kernel, *out),
            (
                *x.stride()[:2],
                *(s * d for s, d in zip(steps, conv.dilation)),
                *(s * d for s, d in zip(steps, conv.stride)),
            ),
        )

    def squared_norm(self) -> tuple[Tensor, Tensor]:
        """‖G_i‖² and Σ_t |output_t|²|patch_t|² for each example."""
        products, factor = self._products(self), self.scale**2
        diagonal = products.diagonal(dim1=1, dim2=2).sum(1)
        return self._over_groups(products.sum((1, 2)) * factor), self._over_groups(diagonal * factor)

    def squared_norm_with(self, other: Conv) -> Tensor:
        """<G_i, G'_i> for each example, both of one shape."""
        return self._over_groups(self._products(other).sum((1, 2)) * (self.scale * other.scale))

    def _products(self, other: Conv) -> Tensor:
        """(output_t · output'_s)(patch_t · patch'_s) for all positions t, s of an example and a group: [B·g, T, T].

        The patches' products are sums over the kernel of shifted products of pixels: no patch is ever written down.
        """
        a, b, conv = self._by_group(self.input), other._by_group(other.input), self.shape
        places = torch.bmm(a.flatten(2).transpose(1, 2), b.flatten(2))
        sizes, outputs = self._sizes(self.input), self._sizes(self.output)
        places = places.view(len(a), *sizes, *sizes)
        for i in range(len(conv.kernel)):
            axes = 2 + i, 2 + i + len(sizes)
            window = conv.kernel[i], conv.stride[i], conv.padding[i], conv.dilation[i]
            places = _sum_along_kernel(places, axes, outputs[1 + i], *window)
        rows_a, rows_b = self._by_group(self.output).flatten(2), other._by_group(other.output).flatten(2)
        return gram_products([(rows_a.transpose(1, 2), rows_b.transpose(1, 2))]).mul_(
            places.reshape(len(a), rows_a.shape[2], rows_b.shape[2])
        )

    def _sizes(self, values: Tensor) -> tuple[int, ...]:
        """Axes of an example's positions: images first."""
        return (self.images, *values.shape[2:])

    def _by_group(self, values: Tensor) -> Tensor:
        """[B·K, C, *S] -> [B·g, C/g, K, *S]."""
        split = values.reshape(self.batch, self.images, self.shape.groups, -1, *values.shape[2:])
        return split.movedim(1, 3).flatten(0, 1)

    def _over_groups(self, values: Tensor) -> Tensor:
        return values.view(self.batch, -1).sum(1)

    def weighted_sum(self, weights_B: Tensor, onto: Tensor | None = None) -> Tensor:
        """Σ_i weights_i G_i, added to ``onto`` in its memory if given."""
        x, conv = self.input, self.shape
        weights = (weights_B * self.scale).to(x.dtype).repeat_interleave(self.images)
        scaled = self.output * weights.view(-1, *[1] * (x.dim() - 1))
        result = torch.ops.aten.convolution_backward(
            scaled,
            x,
            x.new_empty(self.gradient_shape),
            None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0] * len(conv.kernel),
            conv.groups,
            [False, True, False],
        )
        return _added(result[1], onto)

    def take(self, examples: slice | Tensor) -> Conv:
        x = self.input.unflatten(0, (self.batch, -1))[examples]
        r = self.output.unflatten(0, (self.batch, -1))[examples]
        return replace(self, input=x.flatten(0, 1), output=r.flatten(0, 1), batch=x.shape[0])

    def double(self) -> Conv:
        return replace(self, input=self.input.double(), output=self.output.double())

    def without(self, bad_B: Tensor) -> Conv:
        bad = bad_B.repeat_interleave(self.images)
        return replace(self, input=_blank(self.input, bad), output=_blank(self.output, bad))


def _sum_along_kernel(
    products: Tensor, axes: tuple[int, int], outputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> Tensor:
    """Products of pixels -> of windows: Σ_o products[.., s t + d o - p, .., s t' + d o - p, ..] for all t, t'."""
    if (kernel, stride, padding) == (1, 1, 0):
        return products
    inputs, total = products.shape[axes[0]], None
    for offset in sorted((dilation * o - padding for o in range(kernel)), key=abs):
        first = max(0, -(offset // stride))  # outputs from here on see a pixel, not padding
        last = min(outputs - 1, (inputs - 1 - offset) // stride)
        if last < first:
            continue
        piece = products
        for axis in axes:
            index = [slice(None)] * products.dim()
            index[axis] = slice(first * stride + offset, last * stride + offset + 1, stride)
            piece = piece[tuple(index)]
        if total is None:
            shape = [outputs if i in axes else size for i, size in enumerate(products.shape)]
            whole = last - first + 1 == outputs
            total = piece.clone(memory_format=torch.contiguous_format) if whole else products.new_zeros(shape)
            if whole:
                continue
        place = total.narrow(axes[0], first, last - first + 1).narrow(axes[1], first, last - first + 1)
        place += piece
    if total is None:  # the kernel meets nothing but padding
        return products.new_zeros([outputs if i in axes else size for i, size in enumerate(products.shape)])
    return total


Term: TypeAlias = Direct | Outer | Conv


def combine(terms: Sequence[Term], coefficients: Sequence[float]) -> list[Term]:
    """Terms of one use at several points -> terms of the weighted sum Σ_k a_k G_k.

    A factor that is the same at every point (a layer's input data, token numbers) leaves a single term. Otherwise each
    point keeps its own, unless large coefficients of opposite sign could make nearly equal points cancel. Then
    differences are taken in the factors, before anything is squared:
    Σ_k a_k l_k ⊗ r_k = l_0 ⊗ (Σ_k a_k r_k) + Σ_{k>0} a_k (l_k - l_0) ⊗ r_k.

    >>> l, r = torch.ones(1, 1, 2), torch.ones(1, 1, 3)
    >>> [len(combine([Outer(l, r, 2), Outer(x, y, 2)], [0.25, 0.75])) for x, y in [(2 * l, 2 * r), (l, 2 * r)]]
    [2, 1]
    """
    first = terms[0]
    if len(terms) == 1:
        return [_scaled(first, coefficients[0])]
    moderate = sum(abs(a) for a in coefficients) <= _MODERATE
    if isinstance(first, Direct):
        return [Direct(_mix([t.per_example() for t in terms], coefficients))]
    if isinstance(first, Conv):
        convs = [t for t in terms if isinstance(t, Conv)]
        same = all(same_data(t.input, first.input) for t in convs)
        if moderate and not same:
            return [_scaled(t, a) for t, a in zip(convs, coefficients)]
        mixed: list[Term] = [replace(first, output=_mix([t.output for t in convs], coefficients))]
        for a, conv in zip(coefficients[1:], convs[1:]):
            if not same:
                mixed.append(replace(first, input=conv.input - first.input, output=conv.output, scale=a * conv.scale))
        return mixed
    outers = [t for t in terms if isinstance(t, Outer)]
    if all(same_data(t.left, first.left) for t in outers):
        return [replace(first, right=_mix([t.right for t in outers], coefficients))]
    if all(same_data(t.right, first.right) for t in outers):
        return [replace(first, left=_mix([t.left for t in outers], coefficients))]
    if moderate or first.one_hot:  # different rows of a table: nothing to cancel
        return [_scaled(t, a) for t, a in zip(outers, coefficients)]
    result: list[Term] = [replace(first, right=_mix([t.right for t in outers], coefficients))]
    for a, t in zip(coefficients[1:], outers[1:]):
        result.append(replace(first, left=t.left - first.left, right=t.right, scale=a * t.scale))
    return result


def pairable(terms: Sequence[Term]) -> bool:
    """Whether `combine` may treat these as one use seen at several points."""
    first = terms[0]
    for other in terms[1:]:
        if type(other) is not type(first):
            return False
        if isinstance(first, Outer) and isinstance(other, Outer):
            same = first.left.shape == other.left.shape and first.right.shape == other.right.shape
        elif isinstance(first, Conv) and isinstance(other, Conv):
            same = (first.input.shape, first.output.shape, first.shape) == (
                other.input.shape,
                other.output.shape,
                other.shape,
            )
        else:
            same = first.per_example().shape == other.per_example().shape
        if not same:
            return False
    return True


def same_data(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the very same numbers (no comparison of values)."""
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    )


def _mix(values: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """Σ_k a_k v_k, by way of differences."""
    if len(values) == 2 and math.isclose(sum(coefficients), 1, rel_tol=1e-15):
        return torch.lerp(values[0], values[1], coefficients[1])
    total = values[0] * sum(coefficients)
    for a, value in zip(coefficients[1:], values[1:]):
        total.add_(value - values[0], alpha=a)
    return total


def _scaled(term: Term, a: float) -> Term:
    if a == 1:
        return term
    if isinstance(term, Direct):
        return Direct(term.grads * a)
    return replace(term, scale=term.scale * a)


def _added(total: Tensor, onto: Tensor | None) -> Tensor:
    return total if onto is None else onto.add_(total)


def _one_hot_gram(a: Outer, b: Outer) -> Tensor:
    """Products of left rows, at least one of them one-hot: no more than a comparison or a lookup."""
    if a.one_hot and b.one_hot:
        return (a.left.unsqueeze(2) == b.left.unsqueeze(1)).to(a.right.dtype)
    if b.one_hot:  # row b.left[s] of the dense factor: [B, T, S]
        return a.left.gather(2, b.left.unsqueeze(1).expand(-1, a.left.shape[1], -1))
    return _one_hot_gram(b, a).transpose(1, 2)


def _blank(values: Tensor, bad_B: Tensor) -> Tensor:
    return values.masked_fill(bad_B.view(-1, *[1] * (values.dim() - 1)), 0)
