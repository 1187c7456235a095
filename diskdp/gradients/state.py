"""What a model would release, its parameters and buffers, and whether a forward pass has written into it.

Three ways, by cost: `Marks` compares version counters (writes through ``.data`` or numpy escape it), `digests`
compares every bit, `Snapshot` does so too and can put everything back. Plain attributes of modules are not looked at.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from diskdp.gradients.settings import modules

_Item = TypeVar("_Item")
Digest: TypeAlias = "tuple[object, ...] | None"

_FOLD = 64  # words that are added before their place counts
_SMALL = 1 << 16  # bytes: what a checksum on the CPU reads faster than tensor operations start


def digest(tensor: Tensor) -> Digest:
    """Type, shape and a checksum of every bit; that two contents agree by chance has probability 2^-32 or less.

    >>> digest(torch.tensor([0.0, float("nan")])) == digest(torch.tensor([0.0, float("nan")]))
    True
    >>> digest(torch.tensor([0.0])) == digest(torch.tensor([-0.0]))
    False
    """
    flat = _bits(tensor.detach())
    kind = (tensor.dtype, tuple(tensor.shape))
    if flat.device.type == "cpu" and flat.numel() <= _SMALL:
        return (*kind, zlib.crc32(flat.numpy().data))
    words = flat[: flat.numel() // (8 * _FOLD) * (8 * _FOLD)]
    rest = flat[words.numel() :].cpu()
    folded = words.view(torch.int64).view(-1, _FOLD).sum(1)
    place = torch.arange(1, 2 * len(folded), 2, device=folded.device)
    return (*kind, int((folded * place).sum()), zlib.crc32(rest.numpy().data))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().view(-1).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % 8 else flat


Digests: TypeAlias = "dict[tuple[str, int], Digest]"


def digests(model: nn.Module, others: Sequence[Mapping[str, Tensor]]) -> Digests:
    """The digest of everything in the model's state (number 0), and of values that stand for it elsewhere."""
    found = {(name, 0): digest(t) for name, t in _tensors(model)}
    return {**found, **{(name, k): digest(t) for k, values in enumerate(others, 1) for name, t in values.items()}}


def differing(before: Digests, after: Digests) -> set[tuple[str, int]]:
    """What differs in content, or is in only one of the two."""
    return {key for key in {*before, *after} if before.get(key) != after.get(key)}


@dataclass(frozen=True)
class Marks:
    """Version and place in memory of every tensor in a model's state, and of other ``values`` that stand for it."""

    held: list[Tensor]  # alive, so that an address means one tensor
    entries: list[tuple[int, int, int]]
    values: Mapping[str, Tensor]

    @classmethod
    def take(cls, model: nn.Module, values: Mapping[str, Tensor]) -> Marks:
        """Costs well under a microsecond a tensor."""
        held = [
            tensor
            for module in modules(model)
            for group in (module._parameters, module._buffers)
            for tensor in group.values()
            if tensor is not None
        ]
        held += values.values()
        try:
            entries = [(id(t), t._version, t.data_ptr()) for t in held]
        except RuntimeError:  # tensors without a version (inference mode) or without memory of their own
            entries = [_mark(t) for t in held]
        return cls(held, entries, values)

    def changed(self, model: nn.Module) -> set[str]:
        """Names of what was written to or exchanged since."""
        after = Marks.take(model, self.values)
        if after.entries == self.entries:
            return set()
        before = set(self.entries)
        names = {name for name, t in _tensors(model) if _mark(t) not in before}
        names |= {name for name, t in self.values.items() if _mark(t) not in before}
        return names if len(after.entries) >= len(self.entries) else names | {"a tensor that was removed"}


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return id(tensor), version, tensor.data_ptr()
    except RuntimeError:
        return id(tensor), version, 0


class Snapshot:
    """A model's state at one time: a copy, what has changed since, and the way back.

    ``only`` limits the copy to some names. Copies of what has not moved since ``earlier`` are taken from there.
    """

    def __init__(self, model: nn.Module, only: Container[str] | None = None, earlier: Snapshot | None = None) -> None:
        self._model, self._only = model, only
        self._modules = [
            (module, dict(module._parameters), dict(module._buffers), dict(module._modules), _hidden(module))
            for module in modules(model)
        ]
        self._held: dict[str, tuple[Tensor, Tensor]] = {}  # the tensor, and the memory that it had
        self._copies: dict[str, Tensor] = {}
        self._digests: dict[str, Digest] = {}
        for name, tensor in _tensors(model):
            if only is not None and name not in only:
                continue
            memory = tensor.data
            self._held[name] = tensor, memory
            if earlier is not None and name in earlier._copies and _mark(earlier._held[name][1])[2] == _mark(memory)[2]:
                self._copies[name], self._digests[name] = earlier._copies[name], earlier._digests[name]
            else:
                self._copies[name] = memory.clone()
                self._digests[name] = digest(memory)
        self._marks = {name: _mark(tensor) for name, (tensor, _) in self._held.items()}

    def changed(self) -> dict[str, Digest]:
        """What was written to, differs in any bit, was exchanged, is new or gone (None), with its present digest."""
        now = {name: t for name, t in _tensors(self._model) if self._only is None or name in self._only}
        found: dict[str, Digest] = {}
        for name, tensor in now.items():
            found[name] = digest(tensor)
            if self._marks.get(name) == _mark(tensor) and found[name] == self._digests[name]:
                del found[name]
        return {**found, **{name: None for name in self._held if name not in now}}

    @torch.no_grad()
    def restore(self) -> None:
        """Everything as it was, the very same tensors in the same memory."""
        for module, parameters, buffers, children, hidden in self._modules:
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)
            _refill(module._modules, children)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(hidden)
        for name, (tensor, memory) in self._held.items():
            if _mark(tensor)[2] != _mark(memory)[2] or tensor.shape != memory.shape:
                tensor.data = memory
            if digest(memory) != self._digests[name]:
                memory.copy_(self._copies[name])
        self._marks = {name: _mark(tensor) for name, (tensor, _) in self._held.items()}


def _refill(group: dict[str, _Item], content: Mapping[str, _Item]) -> None:
    now = dict(group.items())
    if now.keys() != content.keys() or any(now[key] is not item for key, item in content.items()):
        group.clear()
        group.update(content)


def _hidden(module: nn.Module) -> set[str]:
    return set(module._non_persistent_buffers_set)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names; buffers that are not saved too."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for group in (module._parameters, module._buffers):
            for key, tensor in group.items():
                if tensor is not None:
                    yield (f"{prefix}.{key}" if prefix else key), tensor
