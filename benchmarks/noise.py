"""Milliseconds to add noise, beside `torch.randn` of the same size: methods interleaved, minimum of repeats.

python benchmarks/noise.py --threads 2 --sizes 1800000 125000000
python benchmarks/noise.py --hashes
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable

import torch

from diskdp.noise import DiscreteNoise, GaussianNoise, Grid, Secret, SecureNoise
from diskdp.noise.binding import bound_key

SECRET = Secret.from_os()


def milliseconds(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(repeats):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def measure(size: int, tensors: int, log_ratio: int) -> dict[str, float]:
    """Each of the library's methods writes the noised sums to new memory (`add`) but "in place" (`add_to`)."""
    sums = {str(i): torch.zeros(size // tensors) for i in range(tensors)}
    totals = {name: torch.zeros_like(total, dtype=torch.int64) for name, total in sums.items()}
    gaussian, secure, discrete = GaussianNoise(SECRET), SecureNoise(SECRET), DiscreteNoise(SECRET)
    grid = Grid(2.0**-20, 1 << log_ratio, 1.0, parts=1)

    def randn() -> object:
        return [torch.randn(x.shape) for x in sums.values()]

    def randn_added() -> object:
        return [torch.randn(x.shape).mul_(0.7).add_(x) for x in sums.values()]

    methods: dict[str, Callable[[], object]] = {
        "gaussian": lambda: gaussian.add(sums, 0.7, 0),
        "secure": lambda: secure.add(sums, 0.7, 0),
        "discrete": lambda: discrete.add(totals, grid, 0),
        "gaussian, in place": lambda: gaussian.add_to(sums, 0.7, 0),
        "secure, in place": lambda: secure.add_to(sums, 0.7, 0),
        "randn": randn,
        "randn, added": randn_added,
    }
    return milliseconds(methods, repeats=max(3, min(50, 40_000_000 // size)))


def hashes(size: int) -> dict[str, float]:
    """The ways to hash all sums that were considered, for so many float32 numbers."""
    total = torch.randn(size)
    data = memoryview(total.numpy()).cast("B")
    return milliseconds(
        {
            "GMAC (used)": lambda: bound_key(SECRET, "benchmark", 0, (), {"w": total}),
            "BLAKE2b": lambda: hashlib.blake2b(data, key=bytes(32)).digest(),
            "SHA-256": lambda: hashlib.sha256(data).digest(),
        },
        repeats=3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_800_000, 125_000_000])
    parser.add_argument("--tensors", type=int, default=1, help="split each size into this many tensors")
    parser.add_argument("--log-ratio", type=int, default=24, help="discrete: spacings a standard deviation, 2 to this")
    parser.add_argument("--hashes", action="store_true", help="time ways to hash the sums instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for size in arguments.sizes:
        best = hashes(size) if arguments.hashes else measure(size, arguments.tensors, arguments.log_ratio)
        print(f"{size:,} elements, {arguments.tensors} tensors, {arguments.threads} threads (ms)")
        print("  " + "  ".join(f"{name} {value:.2f}" for name, value in best.items()))


if __name__ == "__main__":
    main()
