"""Each way to the norms of each layer, estimated and measured: is the model of cost right about the cheapest?

python benchmarks/methods.py --model cnn5 --points 2

Milliseconds are of norms and weighted sum together, for the whole batch, the least of some repeats. What the planner
takes by estimate is in bold; a ratio above 1 in the last column is what it loses against the fastest.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from diskdp.bench.cases import CASES
from diskdp.gradients import Engine, Point
from diskdp.gradients.planner import choose, methods
from diskdp.gradients.tuning import milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CASES), default="cnn5")
    parser.add_argument("--points", type=int, choices=(1, 2), default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--least", type=float, default=0.5, metavar="MS", help="leave out cheaper layers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[arguments.model].build()
    points: list[Point] = [(1.0, None)]
    if arguments.points == 2:
        ahead = {n: p.detach() + 1e-3 * torch.randn_like(p) for n, p in case.model.named_parameters()}
        points = [(1 / 7, None), (6 / 7, ahead)]
    terms = Engine(case.model, case.losses).gradients(case.microbatch(0), points).terms
    table = Table("parameter", "shape", "method: estimate (Mmac an example), measured (ms)", "chosen / fastest")
    total = fastest_total = 0.0
    for name, own in terms.items():
        if not own or len(candidates := methods(own)) < 2:
            continue
        chosen = choose(own)
        times = {m.name: milliseconds(own, m, arguments.repeats) for m in candidates if m.cost <= 20 * chosen.cost}
        total, fastest_total = total + times[chosen.name], fastest_total + min(times.values())
        if times[chosen.name] < arguments.least:
            continue
        shown = [
            f"{'[bold]' if m.name == chosen.name else ''}{m.name}: {m.cost / 1e6:.1f}, {times[m.name]:.2f}"
            + ("[/bold]" if m.name == chosen.name else "")
            for m in candidates
            if m.name in times
        ]
        shape = "×".join(map(str, own[0].gradient_shape))
        table.add_row(name, shape, "\n".join(shown), f"{times[chosen.name] / min(times.values()):.2f}")
    console = Console(width=110)
    console.print(table)
    console.print(f"all layers: chosen {total:.1f} ms, fastest {fastest_total:.1f} ms")


if __name__ == "__main__":
    main()
