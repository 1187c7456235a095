"""Whether one record of a data set is made of several: which records `dataset[i]` asks its containers for.

Works on shallow copies whose containers of records are replaced by recording ones; the data set itself is not touched.
Where that does not work (a container that is more than indexed), nothing is said.
"""

from __future__ import annotations

import copy
from abc import ABCMeta
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index as index_of
from typing import Any, Generic, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from diskdp.sampling.generators import Randomness
from diskdp.sampling.mixing import same

_MAX_DEPTH = 4
_MAX_NESTED = 16
_SHALLOW = 4096  # of other containers, up to which entries their outline is copied
_PLAIN = (list, tuple, dict, str, bytes, np.ndarray, torch.Tensor, TensorDataset)
_ITSELF = "[...]"

_Touched: TypeAlias = "dict[str, set[int]]"
_Moved: TypeAlias = "dict[str, dict[int, int]]"


def foreign_lookup(dataset: Any, seeds: int, indices: int = 8, depth: int = 0) -> str | None:
    """How `dataset[i]` uses records other than its own; None if that was not seen.

    >>> class Mixed:
    ...     def __init__(self):
    ...         self.images = torch.rand(50, 3)
    ...     def __len__(self):
    ...         return 50
    ...     def __getitem__(self, i):
    ...         return self.images[i] + self.images[(i + 1) % 50]
    >>> foreign_lookup(Mixed(), seeds=3)
    'Mixed.images'
    """
    if depth > _MAX_DEPTH or isinstance(dataset, _PLAIN):
        return None
    nested = _nested(dataset)
    if type(dataset) not in (Subset, ConcatDataset, StackDataset):
        found = _foreign(dataset, seeds, indices)
        if found is not None:
            return found
    for inner in nested:
        found = foreign_lookup(inner, seeds, indices, depth + 1)
        if found is not None:
            return found
    return None


def _nested(dataset: Any) -> list[Any]:
    """The data sets that this one takes its records from."""
    if isinstance(dataset, ConcatDataset | StackDataset):
        inner = dataset.datasets
        return list(inner.values() if isinstance(inner, dict) else inner)[:_MAX_NESTED]
    held = [value for value in getattr(dataset, "__dict__", {}).values() if _is_data_set(value)]
    own = [value for value in held if len(value) == len(dataset)]
    return own or held[:1] * (len(held) == 1)


def _is_data_set(value: Any) -> bool:
    indexable = all(hasattr(value, name) for name in ("__getitem__", "__len__", "__dict__"))
    return indexable and not isinstance(value, (type, *_PLAIN))


def _foreign(dataset: Any, seeds: int, indices: int) -> str | None:
    size = len(dataset)
    containers = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if _holds(value, size)}
    if size < 2 or not hasattr(dataset, "__dict__"):
        return None
    places = sorted({round(k * (size - 1) / max(1, indices - 1)) for k in range(indices)})
    random = Randomness(dataset)
    trial = _Trial.shallow(dataset, containers)
    if trial is None or not (containers or trial.sees_itself):
        return None
    trial.run(places[0], random, seeds)  # what is set up on first use may ask for everything
    seen: dict[str, dict[int, list[_Run]]] = {}
    for index in places:
        for seed in range(seeds):
            run = trial.run(index, random, seed)
            if run is None:
                continue
            for name in run.touched:
                seen.setdefault(name, {}).setdefault(index, []).append(run)
            if not run.drew:
                break
    for name, by_index in seen.items():
        if name != _ITSELF and not _of_records(name, containers[name], by_index):
            continue
        for index, runs in by_index.items():
            first = runs[0].touched[name]
            odd = next((run for run in runs if run.touched[name] != first), None)
            if odd is not None:
                found = not _disturbed(dataset, index, odd, random)
            else:
                found = len(first) > 1 and _matters(dataset, containers, name, index, first, random)
            if found:
                return type(dataset).__name__ + (name if name == _ITSELF else f".{name}")
    return None


@dataclass(frozen=True)
class _Run:
    """What a record was made of, what it is, and whether anything was drawn for it."""

    touched: _Touched
    result: Any
    drew: bool
    seed: int


class _Trial:
    """A copy of a data set that records what its containers are asked for."""

    def __init__(self, subject: Any, touched: _Touched, sees_itself: bool) -> None:
        self._subject, self._touched, self.sees_itself = subject, touched, sees_itself

    @classmethod
    def shallow(cls, dataset: Any, containers: dict[str, Any]) -> _Trial | None:
        """Shares what the data set holds; so its contents have to be the right ones."""
        try:
            subject = _copied(dataset)
            own = vars(subject)
            for name, value in list(own.items()):
                if isinstance(value, dict | list | set | deque) and name not in containers and len(value) <= _SHALLOW:
                    own[name] = copy.copy(value)
        except Exception:
            return None
        touched: _Touched = {}
        for name, value in containers.items():
            own[name] = _Recorded(value, name, touched, {})
        return cls(subject, touched, _record_itself(subject, touched, {}))

    @classmethod
    def deep(cls, dataset: Any, containers: dict[str, Any], moved: _Moved) -> _Trial | None:
        """Shares nothing that can be written to but tensors; so its contents may be wrong ones."""
        touched: _Touched = {}
        memo: dict[int, Any] = {
            id(value): value
            for value in vars(dataset).values()
            if isinstance(value, torch.Tensor | np.ndarray) and len(value.shape)
        }
        for name, value in containers.items():
            memo[id(value)] = _Recorded(value, name, touched, moved.get(name, {}))
        try:
            subject = _copied(dataset, memo)
        except Exception:
            return None
        return cls(subject, touched, _record_itself(subject, touched, moved.get(_ITSELF, {})))

    def run(self, index: int, random: Randomness, seed: int) -> _Run | None:
        """One record from one random state; None where it cannot be had."""
        self._touched.clear()
        with random.seeded(seed):
            before = random.state()
            try:
                result = self._subject[index]
            except Exception:
                return None
            drew = random.state() != before
        return _Run({name: set(records) for name, records in self._touched.items()}, result, drew, seed)


def _copied(dataset: Any, memo: dict[int, Any] | None = None) -> Any:
    """A shallow copy, or a deep one but for what is in ``memo``."""
    if hasattr(type(dataset), "__del__"):  # of the copy, it would close what is still in use
        raise TypeError("copies would be torn down")
    subject = copy.copy(dataset) if memo is None else copy.deepcopy(dataset, memo)
    if vars(subject) is vars(dataset):
        raise TypeError("copies share their attributes")
    return subject


class _Recorded:
    """A container that notes which of its first axis's elements are asked for, and may give others in their place.

    Written to, it keeps to itself what was written.
    """

    __slots__ = ("_base", "_moved", "_name", "_touched", "_written")

    def __init__(self, base: Any, name: str, touched: _Touched, moved: dict[int, int]) -> None:
        self._base, self._name, self._touched, self._moved = base, name, touched, moved
        self._written: dict[int, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        first, *rest = key if isinstance(key, tuple) and key else (key,)
        place = _place(first, len(self._base))
        if place is not None:
            self._note([place])
            if place in self._written and not rest:
                return self._written[place]
            moved = self._moved.get(place, place)
            return self._base[(moved, *rest) if isinstance(key, tuple) else moved]
        places = _places(first, len(self._base))
        if places is None:
            return self._base[key]
        self._note(places)
        if not any(p in self._moved for p in places):
            return self._base[key]
        given = [self._moved.get(p, p) for p in places]
        if isinstance(self._base, list | tuple):
            return type(self._base)(self._base[p] for p in given)
        return self._base[(given, *rest)] if rest else self._base[given]

    def _note(self, places: list[int]) -> None:
        self._touched.setdefault(self._name, set()).update(places)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = _place(key, len(self._base))
        if place is None:
            raise TypeError("only single elements can be written here")
        self._written[place] = value

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self._base)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `__getitems__`, so that records are asked for one by one; numpy's protocols
            raise AttributeError(name)
        return getattr(self._base, name)

    def __array__(self, *args: Any, **options: Any) -> npt.NDArray[Any]:
        return np.asarray(self._base, *args, **options)

    def __eq__(self, other: object) -> Any:
        return self._base == other

    def __ne__(self, other: object) -> Any:
        return self._base != other

    __hash__ = None  # type: ignore[assignment]


Sequence.register(_Recorded)  # `random.sample` asks


def _place(key: Any, size: int) -> int | None:
    if isinstance(key, bool | np.bool_):
        return None
    try:
        place = index_of(key)
    except (TypeError, ValueError, RuntimeError):
        return None
    return place % size if -size <= place < size else None


def _places(key: Any, size: int) -> list[int] | None:
    if isinstance(key, slice):
        return list(range(size)[key])
    if not isinstance(key, list | np.ndarray | torch.Tensor):
        return None
    try:
        return [int(p) for p in np.arange(size)[np.asarray(key)].ravel()]
    except (IndexError, TypeError, ValueError):
        return None


def _record_itself(subject: Any, touched: _Touched, moved: dict[int, int]) -> bool:
    """Give a copy a class that notes which records it asks itself for; whether that could be done."""
    cls, size = type(subject), len(subject)
    plain_class = type(cls) in (type, ABCMeta)
    usual = getattr(Generic.__init_subclass__, "__func__", None)
    quiet = getattr(cls.__init_subclass__, "__func__", None) in (None, usual)
    if not (plain_class and quiet):  # making a subclass would run code of the user's
        return False
    inside: list[int] = []

    def recorded(self: Any, index: Any) -> Any:
        place = _place(index, size)
        if place is not None:
            touched.setdefault(_ITSELF, set()).add(place)
            if inside:
                index = moved.get(place, place)
        inside.append(0)
        try:
            return cls.__getitem__(self, index)
        finally:
            inside.pop()

    try:
        subject.__class__ = type(cls.__name__, (cls,), {"__getitem__": recorded, "__slots__": ()})
    except TypeError:
        return False
    return True


def _holds(value: Any, size: int) -> bool:
    """Whether an attribute holds something for each record."""
    if isinstance(value, type | dict | str | bytes) or not hasattr(value, "__getitem__"):
        return False
    try:
        return len(value) == size
    except Exception:
        return False


def _of_records(name: str, container: Any, by_index: dict[int, list[_Run]]) -> bool:
    """Whether a container holds records rather than, say, as many words as there happen to be records.

    Plain numbers and names are taken for records' only if each record asks for its own place.
    """
    if isinstance(container, torch.Tensor | np.ndarray):
        if container.ndim > 1:
            return True
    elif not isinstance(container, list | tuple) or not isinstance(container[0], str | bytes | int | float):
        return True
    return all(index in run.touched[name] for index, runs in by_index.items() for run in runs)


def _disturbed(dataset: Any, index: int, run: _Run, random: Randomness) -> bool:
    """Whether recording changed the record, which is then no evidence."""
    results = []
    for _ in range(2):
        try:
            with random.seeded(run.seed):
                results.append(_copied(dataset)[index])
        except Exception:
            return True
    return same(*results) and not same(results[0], run.result)


def _matters(
    dataset: Any, containers: dict[str, Any], name: str, index: int, records: set[int], random: Randomness
) -> bool:
    """Whether what comes out changes with every choice of the one record that stays, the others being exchanged.

    If for some record it does not, that one alone counts, and the others were read ahead. Made on deep copies: wrong
    contents must not reach a cache.
    """

    def run(moved: _Moved) -> _Run | None:
        trial = _Trial.deep(dataset, containers, moved)
        return None if trial is None else trial.run(index, random, 0)

    usual, again = run({}), run({})
    if usual is None or again is None or not same(usual.result, again.result):
        return False
    spare = [k for k in range(len(dataset)) if k not in records][:_MAX_NESTED] or sorted(records)
    for own in [index] if index in records else sorted(records)[:_MAX_NESTED]:
        others = sorted(records - {own})
        exchanged = {record: spare[(5 * k + 3) % len(spare)] for k, record in enumerate(others)}
        outcome = run({name: exchanged})
        if outcome is None or same(usual.result, outcome.result):
            return False
    return not _disturbed(dataset, index, usual, random)
