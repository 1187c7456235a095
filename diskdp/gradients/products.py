"""Products and squares: the fastest kernels that keep float32's full precision.

Norms bound what an example contributes, so none of them may be computed in the reduced formats (TF32, bfloat16) that
torch can be told to multiply float32 matrices in, and none by one long running sum, which float32 leaves too low.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diskdp.errors import GradientError

_BLOCK = 1024  # numbers whose squares may be added up one after the other: 1e-7 too low at most
# Below so many multiply-adds a call of oneDNN costs more than it saves; measured at 12 µs a call.
_WORTH_A_CALL = 2**20
PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may compute otherwise
_OWN_KERNELS = ContextVar("own kernels", default=True)
_AT_ONCE = 2**19  # numbers of a product that is then added to another: what stays in the cache


def float32_precision() -> str:
    """How precisely torch multiplies float32 matrices."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:  # set in two ways that torch cannot reconcile
        raise GradientError(
            "the precision of float32 products was set by torch.backends' fp32_precision, which cannot be read back; "
            'use torch.set_float32_matmul_precision("highest") alone'
        ) from error


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 matrices and convolutions in float32 inside, whatever the user allows elsewhere.

    >>> torch.set_float32_matmul_precision("medium")
    >>> with full_precision():
    ...     torch.get_float32_matmul_precision()
    'highest'
    >>> torch.get_float32_matmul_precision()
    'medium'
    >>> torch.set_float32_matmul_precision("highest")
    """
    matmul = float32_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    if matmul == "highest" and not convolutions:
        yield
        return
    try:
        if matmul != "highest":
            torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        if matmul != "highest":
            torch.set_float32_matmul_precision(matmul)


@contextmanager
def kernels_of_torch() -> Iterator[None]:
    """Products inside by the kernels that torch itself would use.

    The examination compares with the model as it runs on its own. Another kernel rounds otherwise, and where an input
    of a ReLU is a rounding error away from 0, that decides whether a whole unit has a gradient.
    """
    token = _OWN_KERNELS.set(False)
    try:
        yield
    finally:
        _OWN_KERNELS.reset(token)


def squares(values: Tensor) -> Tensor:
    """|v_i|² for each example, [B, ...] -> [B] in float64.

    In blocks: over 300,000 numbers a running sum in float32 comes out low by 6e-6, over a million by 2e-5.

    >>> squares(torch.ones(2, 2048)).tolist()
    [2048.0, 2048.0]
    """
    values = values.reshape(len(values), -1)
    whole = values.shape[1] // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(values[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2) if whole else None
    rest = torch.linalg.vector_norm(values[:, whole:], dim=1).double().square_()
    return rest if blocks is None else rest.add_(blocks.double().square_().sum(1))


def dots(a: Tensor, b: Tensor) -> Tensor:
    """a_i · b_i for each example, [B, ...] -> [B]; summed in pairs, as a batched product would not."""
    if a is b:
        return squares(a).to(a.dtype)
    return (a * b).flatten(1).sum(1)


def gram_products(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The product, element by element, of the Gram matrices of pairs of factors [B, T, D], [B, S, D] -> [B, T, S]."""
    first, second = pairs[0]
    work = first.shape[1] * second.shape[1] * sum(a.shape[2] for a, _ in pairs)
    if work >= 4 * _WORTH_A_CALL and all(_served(a) for a, _ in pairs):
        result = first.new_empty(len(first), first.shape[1], second.shape[1])
        for i, product in enumerate(result.unbind()):  # long enough for a call of its own
            product.copy_(_times_transposed(first[i], second[i]))
            for a, b in pairs[1:]:
                product.mul_(_times_transposed(a[i], b[i]))
        return result
    result = torch.bmm(first, second.transpose(1, 2))
    for a, b in pairs[1:]:
        result.mul_(torch.bmm(a, b.transpose(1, 2)))
    return result


def add_products(a_BPT: Tensor, b_BDT: Tensor, scale: float, onto_BPD: Tensor) -> None:
    """Add scale · a_i b_iᵀ to each example's matrix."""
    if a_BPT.shape[1] * b_BDT.shape[1] * b_BDT.shape[2] >= _WORTH_A_CALL // 2 and _served(a_BPT):
        for a, b, total in zip(a_BPT.unbind(), b_BDT.unbind(), onto_BPD.unbind()):
            total.add_(_times_transposed(a, b), alpha=scale)
    else:
        onto_BPD.baddbmm_(a_BPT, b_BDT.transpose(1, 2), alpha=scale)


def sum_of_outers(left_NP: Tensor, right_ND: Tensor, onto: Tensor | None = None) -> Tensor:
    """Σ_n left_n ⊗ right_n, [P, D], added to ``onto`` in its memory if given.

    >>> sum_of_outers(torch.ones(3, 2), torch.ones(3, 4), torch.ones(2, 4))
    tensor([[4., 4., 4., 4.],
            [4., 4., 4., 4.]])
    """
    rows, columns = left_NP.shape[1], right_ND.shape[1]
    if len(left_NP) * rows * columns < _WORTH_A_CALL or not _served(left_NP):
        return left_NP.t() @ right_ND if onto is None else onto.addmm_(left_NP.t(), right_ND)
    if rows > 2 * columns and columns <= 256:  # oneDNN is up to four times faster with the wider matrix second
        product = _times_transposed(right_ND.t(), left_NP.t()).t()
        return product.contiguous() if onto is None else onto.add_(product)
    if rows * columns <= _AT_ONCE:
        product = _times_transposed(left_NP.t(), right_ND.t())
        return product if onto is None else onto.add_(product)
    total = left_NP.new_zeros(rows, columns) if onto is None else onto
    step = max(1, _AT_ONCE // columns)
    for start in range(0, rows, step):
        total[start : start + step].add_(_times_transposed(left_NP[:, start : start + step].t(), right_ND.t()))
    return total


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, faster where weight and bias need no gradient.

    >>> bool(torch.allclose(linear(torch.ones(2, 3), torch.ones(4, 3), None), torch.full((2, 4), 3.0)))
    True
    """
    fast = (
        all(t is None or (type(t) in PLAIN and t.layout is torch.strided) for t in (input, weight, bias))
        and weight.dim() == 2
        and input.dim() > 1
        and input.shape[-1] == weight.shape[1]
        and input.numel() * len(weight) >= _WORTH_A_CALL
        and all(t is None or (_served(t) and not t.requires_grad) for t in (weight, bias))
        and _served(input)
        # oneDNN reads a bias as so many numbers in a row, whatever its strides and shape
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and float32_precision() == "highest"  # who allows less gets torch's own choice
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None  # no vmap or grad around
    )
    if not fast:
        return F.linear(input, weight, bias)
    result: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """x Wᵀ + b by oneDNN, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _times_transposed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return _times_transposed(grad, weight.t()) if ctx.needs_input_grad[0] else None, None, None


def times_transposed(matrix: Tensor, rows: int, uses: int = 1) -> Callable[[Tensor], Tensor]:
    """a -> a · matrixᵀ, for a of so many rows: for several uses the matrix is brought into the kernel's order once.

    >>> times_transposed(torch.tensor([[1.0, 2.0]]), rows=1)(torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    if rows * matrix.numel() < _WORTH_A_CALL or not _served(matrix):
        columns = matrix.t()
        return lambda a: a @ columns
    if uses == 1:
        return lambda a: _times_transposed(a, matrix)
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), rows)
    return lambda a: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")


def _served(values: Tensor) -> bool:
    return (
        values.dtype == torch.float32
        and values.device.type == "cpu"
        and _OWN_KERNELS.get()
        and _has_onednn()
        and _onednn_enabled()
    )


def _onednn_enabled() -> bool:
    return bool(torch.backends.mkldnn.enabled)  # type: ignore[attr-defined]


@functools.cache
def _has_onednn() -> bool:
    """Whether torch's oneDNN product is there: on AMD processors twice as fast as MKL's, which torch.mm uses.

    Decided by the machine alone, not by timing: a resumed run must round as the first one did.
    """
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ + bias by oneDNN; neither needs to be contiguous."""
    if not (b.is_contiguous() or b.t().is_contiguous()):  # rows with gaps between them: 1000 times slower
        b = b.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result
