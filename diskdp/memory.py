"""How much memory a piece of work takes, how much there is, and how many examples fit into it.

Counts what torch allocates on the device of the work: by its profiler on the CPU, by the allocator's own count on CUDA.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType, _profiler_enabled

from diskdp.errors import MemoryLimitError

# Of what is free, for work on microbatches. On the CPU running out ends the process, more often than it raises.
FRACTIONS = {"cpu": 0.5, "cuda": 0.8}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_FIRST = (1, 2, 4, 8)
_GROWTH = 8  # a prediction is trusted no further than this many times the largest size that was measured
_CLOSE = 0.05  # of the size: the search ends when the largest that fits is known this well
_ROUNDS = 16


def parse_memory(budget: int | str) -> int:
    """Bytes, from a number or a text with a unit.

    >>> parse_memory("4 GiB"), parse_memory("1.5GB"), parse_memory(1000)
    (4294967296, 1500000000, 1000)
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?i?)b?\s*", budget, re.IGNORECASE)
        if match is None or match[2].lower() not in _UNITS:
            raise MemoryLimitError(f'memory_budget={budget!r}: must be bytes, or a text such as "4 GiB" or "800 MB"')
        budget = int(float(match[1]) * _UNITS[match[2].lower()])
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise MemoryLimitError(f'memory_budget={budget!r}: must be positive, bytes or a text such as "4 GiB"')
    return budget


def shown_memory(size: float) -> str:
    """
    >>> shown_memory(3 * 2**29), shown_memory(2000)
    ('1.5 GiB', '1.95 KiB')
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out.

    >>> out_of_memory(torch.OutOfMemoryError()), out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch's CPU allocator, MPS and cuBLAS raise a plain RuntimeError
    signs = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def free_unused(device: torch.device) -> None:
    """Give back what an abandoned piece of work may still hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated now: on the GPU, on the machine, or within the container's limit."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [limit for limit in (_of_machine(), _of_container(Path("/sys/fs/cgroup"))) if limit is not None]
    if not found:
        raise MemoryLimitError('this system does not tell its free memory; give memory_budget, such as "4 GiB"')
    return min(found)


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """The most that ``work`` held at any time, beyond what was held before: bytes on the device.

    >>> peak_memory(lambda: torch.zeros(1000).sum(), torch.device("cpu")) // 1000
    4
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise MemoryLimitError(f"memory on {device.type} cannot be measured; give microbatch_size as a number")
    if _profiler_enabled():
        raise MemoryLimitError("memory cannot be measured while a profiler runs; give microbatch_size as a number")
    with _quiet_profiler():
        # CPU alone, and kept short: what is wanted is each allocation's and release's size, in their order
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            work()
        events = [
            (event.start_ns(), event.nbytes())
            for event in profile.profiler.kineto_results.events()  # type: ignore[union-attr]
            if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
        ]
    held = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Fit:
    """How many examples fit at once, by the cost model ``base + slope · examples`` around that size."""

    size: int
    peak: int  # measured at that size
    base: float
    slope: float

    def predicted(self, size: int) -> float:
        return self.base + self.slope * size


def largest_fit(peak_of: Callable[[int], int | None], budget: int, most: int) -> Fit | None:
    """The largest size up to ``most`` whose measured peak is within the budget; None if not even 1 is.

    Measures 1, 2, 4 and 8, then where the line through the two measurements next to the budget meets it, and so on
    until the largest that fits is known to 5%. ``peak_of`` returns None where memory ran out.

    >>> fit = largest_fit(lambda m: 1000 + 30 * m, budget=10_000, most=10**6)
    >>> fit.size, fit.peak, fit.base, fit.slope
    (300, 10000, 1000.0, 30.0)
    """
    fitting: dict[int, int] = {}
    beyond: dict[int, int] = {}  # measured and too large
    smallest_beyond = most + 1

    def fits(size: int) -> bool:
        nonlocal smallest_beyond
        peak = peak_of(size)
        if peak is not None and peak <= budget:
            fitting[size] = peak
            return True
        smallest_beyond = min(smallest_beyond, size)
        if peak is not None:
            beyond[size] = peak
        return False

    for size in _FIRST:
        if size > most or not fits(size):
            break
    if not fitting:
        return None
    for number in range(_ROUNDS):
        best, bounded = max(fitting), smallest_beyond <= most
        if best == most or (bounded and smallest_beyond - best <= max(1, _CLOSE * best)):
            break
        base, slope = _line(fitting, beyond)
        guess = int((budget - base) / slope) if slope > 0 else _GROWTH * best
        if not bounded and guess <= best:
            break  # by the model nothing larger fits
        if not bounded:
            guess = min(guess, most)
        elif not best < guess < smallest_beyond or number % 2:  # a curve can hold a line's prediction in one place
            guess = (best + smallest_beyond) // 2
        fits(min(guess, _GROWTH * best))
    best = max(fitting)
    return Fit(best, fitting[best], *_line(fitting, beyond))


def _line(fitting: dict[int, int], beyond: dict[int, int]) -> tuple[float, float]:
    """a + b m through the two measured sizes next to the budget."""
    low = sorted(fitting.items())
    points = [low[-1], min(beyond.items())] if beyond else low[-2:]
    if len(points) == 1:
        return 0.0, float(points[0][1])
    (m, peak), (other, other_peak) = points
    slope = (other_peak - peak) / (other - m)
    return peak - slope * m, slope


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        [free] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(free) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return None


def _of_container(root: Path) -> int | None:
    """What a control group leaves (both versions), file cache that it would drop counted as free."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            total, taken = int((root / limit).read_text()), int((root / used).read_text())
            stat = (root / limit).with_name("memory.stat").read_text().splitlines()
            droppable = sum(int(line.split()[1]) for line in stat if line.split()[0] == cache)
        except (OSError, ValueError, IndexError):
            continue  # no such group, or no limit ("max")
        return max(0, total - taken + droppable)
    return None


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Without the profiler's own lines on stderr."""
    key = "KINETO_LOG_LEVEL"
    before = os.environ.get(key)
    os.environ.setdefault(key, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
