"""Several records of one unit (a person, a device): finding out how many there are, and keeping only so many.

A plan for `examples_per_unit` = k promises something about a unit only if no unit has more than k records.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diskdp.errors import SamplingError
from diskdp.noise.keys import Secret
from diskdp.sampling.samplers import Members, uniform_order, words_of

Units: TypeAlias = "Sequence[Hashable] | npt.NDArray[Any]"


def bound_contributions(units: Units, most: int, secret: Secret | None = None) -> Members:
    """Indices, in ascending order, that keep at most `most` records of each unit.

    `units` names the unit of each record. Which records of a unit stay is uniformly random among its own and
    independent of the other units, from the operating system's randomness unless a secret is given; so the records
    kept of one unit never depend on another's.

    >>> kept = bound_contributions(["ann", "bob", "ann", "ann", "cyd"], 1)
    >>> len(kept), 1 in kept, 4 in kept
    (3, True, True)
    """
    _check_most(most)
    codes = _codes(units)
    if not len(codes):
        return np.empty(0, np.int64)
    # The order of all records, restricted to the records of one unit, is uniform and independent of the others'.
    order = uniform_order(words_of(secret or Secret.from_os(), "contributions"), len(codes))
    grouped = order[np.argsort(codes[order], kind="stable")]
    first = np.flatnonzero(np.diff(codes[grouped], prepend=-1))  # where each unit's records begin
    rank = np.arange(len(codes)) - np.repeat(first, np.diff(np.append(first, len(codes))))
    return np.sort(grouped[rank < most])


def check_contributions(units: Units, most: int, dataset_size: int | None = None) -> None:
    """Raise SamplingError if a unit has more than `most` records, or there are not `dataset_size` of them in all.

    >>> check_contributions(["ann", "bob", "ann"], 2)
    """
    _check_most(most)
    codes = _codes(units)
    if dataset_size is not None and len(codes) != dataset_size:
        raise SamplingError(
            f"units names {len(codes)} records but there are {dataset_size}: give the unit of each record, in order"
        )
    counts = np.bincount(codes) if len(codes) else np.zeros(1, np.int64)
    if counts.max() > most:
        raise SamplingError(
            f"a unit has {counts.max()} records, where the plan counts on at most {most} ({(counts > most).sum()} "
            f"units have more): train on Subset(dataset, bound_contributions(units, {most})) with a plan for that many "
            f"records, or make a plan with examples_per_unit={counts.max()}"
        )


def _codes(units: Units) -> npt.NDArray[np.int64]:
    """A number for each unit; equal names are one unit, as they are for a dictionary."""
    as_list = getattr(units, "tolist", None)  # of an array, a tensor, a column: what it holds, not views of it
    named: Iterable[Any] = units if as_list is None else as_list()
    numbers: dict[Any, int] = {}
    try:
        codes = np.array([numbers.setdefault(unit, len(numbers)) for unit in named], np.int64)
        unlike_itself = any(unit != unit for unit in numbers)  # NaN would be a unit of its own each time
    except TypeError as error:
        raise SamplingError(
            f"the units cannot be told apart ({error}): give one name or number for each record"
        ) from None
    if unlike_itself:
        raise SamplingError("a unit is NaN: give every record a unit, those without one a common name")
    if any(isinstance(unit, torch.Tensor) for unit in numbers):
        raise SamplingError("a unit is a tensor, which equals no other: give numbers, as unit.item() does")
    return codes


def _check_most(most: int) -> None:
    if most < 1:
        raise SamplingError(f"at most {most} records of each unit leaves none: give at least 1")
