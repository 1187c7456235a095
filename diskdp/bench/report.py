"""Results as tables of text and as a plot. Times in milliseconds a step, memory in MB (10^6 bytes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from diskdp.bench.methods import BASELINE
from diskdp.bench.results import Part, Results, Row, Skipped

Table = tuple[list[str], list[list[str]]]  # headers, rows

_STYLES = {
    "dp-sgd": ("o", "#0072B2"),
    "disk": ("D", "#D55E00"),
    "disk-one-point": ("s", "#56B4E9"),
    "opacus-ghost": ("^", "#7a7a7a"),
    "opacus-hooks": ("v", "#b0b0b0"),
    "compiled": ("x", "#009E73"),
}
_INK, _QUIET = "#222222", "#6b6b6b"


def methods_table(rows: Sequence[Row], skipped: Sequence[Skipped] = ()) -> Table:
    """One model: a row a method, those left out at the end."""
    headers = ["method", "ratio", "goal", "CPU ratio", "memory", "error", "wall ms", "CPU ms", "MB", "spread", "n"]
    cells = [
        [
            row.title,
            f"{row.ratio:.2f}",
            "" if row.goal is None else f"{row.goal:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.peak_memory_ratio:.2f}",
            f"{row.max_relative_error:.0e}",
            f"{row.wall_ms:.1f}",
            f"{row.cpu_ms:.1f}",
            f"{row.peak_bytes / 1e6:.1f}",
            f"{row.spread:.2f}",
            str(row.repeats),
        ]
        for row in rows
    ]
    return headers, cells + [[item.method, *["–"] * 10] for item in skipped]


def parts_table(parts: Sequence[Part], unit: str) -> Table:
    """The parts of a step alone, in multiples of ``unit``."""
    headers = ["part alone", f"{unit} = 1", "CPU ratio", "wall ms", "CPU ms"]
    cells = [[p.part, f"{p.ratio:.2f}", f"{p.cpu_ratio:.2f}", f"{p.wall_ms:.2f}", f"{p.cpu_ms:.2f}"] for p in parts]
    return headers, cells


def summary_table(results: Results, titles: Mapping[str, str]) -> Table:
    """All models: ratio (and peak memory) of each method."""
    methods = {row.method: row.title for row in results.rows if row.method != BASELINE}
    found = {(row.model, row.method): row for row in results.rows}
    cells = []
    for model in dict.fromkeys(row.model for row in results.rows):
        own = [found.get((model, method)) for method in methods]
        shown = ["–" if row is None else f"{row.ratio:.2f} ({row.peak_memory_ratio:.2f})" for row in own]
        cells.append([titles.get(model, model), *shown])
    return ["time (memory), non-private = 1", *methods.values()], cells


def timing_notes(rows: Sequence[Row]) -> str:
    """How the times of whole steps were had."""
    ways = dict.fromkeys(row.timing for row in rows)
    return "timed: " + "; ".join(ways)


def plot_ratios(path: Path, results: Results, titles: Mapping[str, str], subtitle: str) -> None:
    """Draw every method's ratio for every model to a PNG, on a logarithmic axis, with the floors 1 and 2."""
    rows = [row for row in results.rows if row.method != BASELINE]
    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(9, 1.9 + 0.46 * len(models)))
    FigureCanvasAgg(figure)
    height = figure.get_figheight()
    axes = figure.add_axes((0.36, 0.95 / height, 0.61, 1 - 1.85 / height))
    figure.text(0.02, 1 - 0.34 / height, "A private step over a non-private one", fontsize=13, fontweight="bold")
    figure.text(0.02, 1 - 0.58 / height, subtitle, fontsize=9, color=_QUIET)
    for floor, name in ((1.0, "1"), (2.0, "2: two evaluations")):
        axes.axvline(floor, color=_INK, linewidth=1.1, dashes=(4, 2))
        axes.text(floor, -0.72, name, fontsize=8.5, color=_INK, ha="center", va="bottom")
    seen: dict[str, str] = {}
    for row in rows:
        marker, colour = _STYLES.get(row.method, ("*", _QUIET))
        axes.plot(
            row.ratio,
            models.index(row.model),
            marker,
            color=colour,
            markersize=8,
            markeredgecolor="white",
            clip_on=False,
        )
        seen[row.method] = row.title
    axes.set_xscale("log")
    highest = max((row.ratio for row in rows), default=2.0)
    lowest = min((row.ratio for row in rows), default=1.0)
    axes.set_xlim(min(0.9, 0.95 * lowest), max(4.0, 1.15 * highest))
    axes.set_ylim(len(models) - 0.5, -0.75)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([t for t in (1, 1.5, 2, 3, 4, 6, 10, 20, 50, 100) if t <= max(4.0, 1.15 * highest)])
    axes.set_yticks(range(len(models)), [titles.get(model, model) for model in models])
    axes.tick_params(colors=_QUIET, labelsize=8.5, length=0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("wall time of a step, non-private step of the same run = 1", fontsize=9, color=_INK)
    handles = [
        Line2D([], [], marker=_STYLES.get(m, ("*", _QUIET))[0], color=_STYLES.get(m, ("*", _QUIET))[1], linestyle="")
        for m in seen
    ]
    figure.legend(handles, seen.values(), loc="lower left", ncols=3, fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=160)
