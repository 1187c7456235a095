"""Milliseconds to add noise, beside `torch.randn` of the same size: methods interleaved, minimum of repeats.

python benchmarks/noise.py --threads 2 --sizes 1800000 125000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from diskdp.noise import GaussianNoise, Secret


def milliseconds(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(repeats):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def measure(noise: GaussianNoise, size: int, tensors: int) -> dict[str, float]:
    sums = {str(i): torch.zeros(size // tensors) for i in range(tensors)}

    def added() -> object:
        return noise.add(sums, 0.7, 0)

    def randn() -> object:
        return [torch.randn(x.shape) for x in sums.values()]

    def randn_added() -> object:
        return [torch.randn(x.shape).mul_(0.7).add_(x) for x in sums.values()]

    methods = {"diskdp": added, "randn": randn, "added": randn_added}
    return milliseconds(methods, repeats=max(3, min(50, 40_000_000 // size)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_800_000, 125_000_000])
    parser.add_argument("--tensors", type=int, default=1, help="split each size into this many tensors")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    noise = GaussianNoise(Secret.from_os())
    print(f"{'elements':>12} {'diskdp, added':>14} {'torch.randn':>12} {'randn, added':>13}  (ms)")
    for size in arguments.sizes:
        best = measure(noise, size, arguments.tensors)
        print(f"{size:>12,} {best['diskdp']:>14.2f} {best['randn']:>12.2f} {best['added']:>13.2f}")


if __name__ == "__main__":
    main()
