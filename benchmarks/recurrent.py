"""Clipped sums of recurrent layers over a non-private forward and backward pass, CPU time, methods interleaved.

python benchmarks/recurrent.py --threads 1

One layer as wide as its input, the mean of its outputs classified; the first sum is checked against a float64 loop.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diskdp.clipping import Clipper
from diskdp.gradients import Engine, Point, clip, clipped_gradient

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.layer = kind(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x_BTD: Tensor) -> Tensor:
        output, _ = self.layer(x_BTD)
        return self.head(output.mean(1))


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def check(model: nn.Module, batch: Batch) -> None:
    """Two examples, nothing clipped: the sum is autograd's gradient in float64."""
    x, y = batch[0][:2], batch[1][:2]
    found, _ = clipped_gradient(model, (x, y), losses, max_norm=1e9)
    exact = copy.deepcopy(model).double()
    losses(exact, (x.double(), y)).sum().backward()
    for name, p in exact.named_parameters():
        assert p.grad is not None
        error = (found[name].double() - p.grad).norm() / p.grad.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def measure(model: nn.Module, batch: Batch, repeats: int) -> dict[str, float]:
    ahead = {name: p.detach() + 0.01 * torch.randn_like(p) for name, p in model.named_parameters()}
    engine, clipper = Engine(model, losses), Clipper("flat", 1.0)

    def plain() -> None:
        losses(model, batch).mean().backward()
        model.zero_grad()

    def clipped(points: list[Point]) -> Callable[[], object]:
        return lambda: clip(engine, batch, points, clipper).summed()

    methods = {"plain": plain, "one": clipped([(1.0, None)]), "two": clipped([(0.4, None), (0.6, ahead)])}
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(repeats):
        for name, method in methods.items():
            start = time.process_time()
            method()
            best[name] = min(best[name], 1000 * (time.process_time() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'layer':<12} {'width':>5} {'plain ms':>9} {'one point':>10} {'two points':>11}")
    for kind, layers in ((nn.LSTM, 1), (nn.LSTM, 2), (nn.GRU, 1), (nn.RNN, 1)):
        for width in (128, 256):
            torch.manual_seed(0)
            model = Classifier(kind, width, layers)
            batch = torch.randn(arguments.batch, arguments.length, width), torch.randint(0, 10, (arguments.batch,))
            check(model, batch)
            best = measure(model, batch, arguments.repeats)
            ratios = best["one"] / best["plain"], best["two"] / best["plain"]
            name = f"{kind.__name__} x {layers}"
            print(f"{name:<12} {width:>5} {best['plain']:>9.1f} {ratios[0]:>10.2f} {ratios[1]:>11.2f}")


if __name__ == "__main__":
    main()
