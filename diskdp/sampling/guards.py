"""What is refused as a source of records: loaders, and data sets and collate functions that mix records.

A guarantee for a record holds if it reaches the gradient through its own example alone. These guards run before
training on a few records, look at what is done with them, and never at what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from diskdp.errors import SamplingError
from diskdp.sampling.fetching import fetch
from diskdp.sampling.generators import Randomness
from diskdp.sampling.lookups import foreign_lookup
from diskdp.sampling.mixing import mixes, signature

_RECORDS = 8
_COLLATE_TRIALS = 16
_RECORD_TRIALS = 3


def refuse_loaders(dataset: Any) -> None:
    """Raise SamplingError for a torch `DataLoader`, or anything that samples by itself, in place of a data set.

    >>> refuse_loaders([1, 2, 3])
    """
    samples = hasattr(dataset, "batch_sampler") or (hasattr(dataset, "sampler") and hasattr(dataset, "dataset"))
    if not isinstance(dataset, DataLoader) and not samples:
        return
    sampler = getattr(dataset, "sampler", None) or getattr(dataset, "batch_sampler", None)
    raise SamplingError(
        f"{type(dataset).__name__} was given where a data set is needed: its sampler ({type(sampler).__name__}) would "
        "decide who is in a batch, and the accountant counts on the plan's sampling; pass loader.dataset, with "
        "collate_fn=loader.collate_fn and num_workers=loader.num_workers if they matter"
    )


def refuse_mixing(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
    """Raise SamplingError if an example is seen to be made of several records.

    Looks at what up to eight records ask the data set's own containers for, and at what collation (and `__getitems__`)
    makes of an example when its neighbours are exchanged, from several random states. Mixing that comes with
    probability p is found with about 1 - (1-p)**24 in a data set and 1 - (1-5p/6)**16 in a collate function.

    >>> refuse_mixing([[1.0], [2.0], [3.0]], lambda examples: sum(examples, []))
    """
    if isinstance(dataset, TensorDataset) and type(dataset) is TensorDataset and collate_fn is None:
        return
    where = foreign_lookup(dataset, _RECORD_TRIALS, _RECORDS)
    if where is not None:
        raise SamplingError(
            f"the data set makes an example of several records: {where} is asked for others than the example's own. "
            "One record would then be in several examples, and the guarantee would not hold; transform each record by "
            "itself (mix-up and the like cannot be had), or group what belongs together into one record"
        )
    together = getattr(dataset, "__getitems__", None)
    if collate_fn is None and not together:
        return
    places = _places(len(dataset))
    random = Randomness(dataset, collate_fn)
    if together:
        found = mixes(lambda indices: fetch(dataset, indices), places, random, _COLLATE_TRIALS)
        if found is not None:
            raise SamplingError(
                f"the data set's __getitems__ mixes records: what it gives for one ({found}) changes with the others "
                "asked for beside it; make each example of its own record alone"
            )
    if collate_fn is None:
        return
    examples = _examples(dataset, places, random)
    found = mixes(collate_fn, examples, random, _COLLATE_TRIALS)
    if found is not None:
        raise SamplingError(
            f"collate_fn mixes examples: in {found}, an example's part changes with the others beside it. One record "
            "would then be in several examples, and the guarantee would not hold; leave out mix-up, cut-mix and "
            "statistics of the batch (padding to the longest is fine)"
        )


def _places(size: int) -> list[int]:
    count = min(size, _RECORDS)
    return [round(k * (size - 1) / max(1, count - 1)) for k in range(count)]


def _examples(dataset: Any, places: list[int], random: Randomness) -> list[Any]:
    """Examples to try collation with: of one shape if possible, so that padding and random draws are the same."""
    try:
        with random.seeded(0):
            examples = [dataset[place] for place in places]
    except Exception:
        return []  # will be raised again, in its place, when batches are loaded
    alike: dict[str, list[Any]] = {}
    for example in examples:
        alike.setdefault(str(signature(example)), []).append(example)
    most = max(alike.values(), key=len, default=[])
    return most if len(most) >= 3 else examples
