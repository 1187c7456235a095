"""Figures of the experiments, from their rows alone; colours and dashes as in `diskdp.report.plots`.

Assumes rows as the run functions return them.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

from diskdp.experiments.results import Row

_INK, _QUIET = "#222222", "#6b6b6b"
_LOOKS = {
    "noisy GD": ("#444444", "-", "o"),
    "low pass": ("#009E73", (0, (5, 1.8)), "s"),
    "DiSK": ("#D55E00", "-", "D"),
    "DiSK, Kalman gain": ("#E69F00", (0, (3, 1.2)), "P"),
    "noisy GD, falling rate": ("#56B4E9", (0, (1.6, 1.4)), "^"),
    "DiSK, falling rate": ("#CC79A7", (0, (6, 1.6, 1.4, 1.6)), "v"),
}
_CURVES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_SPECTRA = {"white": "white features", "power": "features scaled by $i^{-1/2}$"}


def draw_linear_regression(rows: Sequence[Row]) -> Figure:
    """Final loss, and its ratio to noisy GD's over the same seeds, against the noise level; 95% bands."""
    spectra = list(dict.fromkeys(str(row["spectrum"]) for row in rows))
    figure = _figure(
        5.2 * len(spectra),
        7.4,
        "Linear regression with noisy full gradients, every method tuned on other seeds",
        f"mean over {rows[0]['seeds']} problems, each with its own data and noise; bands are 95% intervals. "
        "“Falling rate”: linearly to 0.",
    )
    for column, spectrum in enumerate(spectra):
        here = [row for row in rows if row["spectrum"] == spectrum]
        above = figure.add_subplot(2, len(spectra), column + 1)
        below = figure.add_subplot(2, len(spectra), len(spectra) + column + 1)
        for axes, what in ((above, "loss"), (below, "ratio")):
            for method in dict.fromkeys(str(row["method"]) for row in here):
                points = [row for row in here if row["method"] == method]
                colour, dashes, marker = _LOOKS[method]
                x = [float(row["noise_std"]) for row in points]
                low, mean, high = ([float(row[f"{what}_{part}"]) for row in points] for part in ("low", "mean", "high"))
                axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
                axes.plot(x, mean, color=colour, linestyle=dashes, marker=marker, markersize=4, lw=1.8, label=method)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(sorted({float(row["noise_std"]) for row in here})))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            _quiet(axes)
        above.set_yscale("log")
        above.set_title(_SPECTRA.get(spectrum, spectrum), loc="left", fontsize=10, color=_INK)
        below.set_ylim(bottom=0)
        below.set_xlabel("noise σ on each coordinate of the gradient", fontsize=9, color=_QUIET)
        if column == 0:
            above.set_ylabel("final loss F(x_T) − F*", fontsize=9, color=_QUIET)
            below.set_ylabel("final loss / that of noisy GD", fontsize=9, color=_QUIET)
            above.legend(fontsize=8, frameon=False, loc="lower right")
    figure.subplots_adjust(left=0.085, right=0.985, top=0.875, bottom=0.075, wspace=0.16, hspace=0.16)
    return figure


def draw_gain_convergence(rows: Sequence[Row]) -> Figure:
    """k_t and p_t on the left; |k_t - k_∞| with the corrected and the printed rate on the right."""
    figure = _figure(
        10.4,
        4.4,
        "The gain settles within a few steps, faster than printed",
        r"p and k of the scalar recursion from $p=\sigma_w^2$. Right: solid, iterated; black dashes, corrected rate; "
        "dotted, rate as printed.",
    )
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    groups = list(dict.fromkeys((row["observation_var"], row["hessian_var"], row["process_var"]) for row in rows))
    for colour, group in zip(_CURVES, groups):
        curve = [row for row in rows if (row["observation_var"], row["hessian_var"], row["process_var"]) == group]
        steps = [int(row["step"]) for row in curve]
        label = (
            rf"$\sigma_w^2={group[0]:g},\ \sigma_H^2={group[1]:g},\ \sigma_v^2={group[2]:g}$: "
            rf"$k_\infty={curve[0]['gain_limit']:.3f}$"
        )
        left.plot(steps, [float(row["gain"]) for row in curve], color=colour, lw=2, label=label)
        left.plot(steps, [float(row["variance"]) for row in curve], color=colour, lw=1.4, linestyle=(0, (5, 1.8)))
        distance = [float(row["distance"]) for row in curve]
        shown = [t for t in steps if distance[t] > 1e-13]
        right.plot(shown, [distance[t] for t in shown], color=colour, lw=2)
        for rate, dashes, ink in (("rate", (0, (5, 4)), _INK), ("rate_as_printed", (0, (1.2, 1.4)), colour)):
            # lines of each rate through one point past the first transient
            anchor = min(6, len(curve) - 1)
            line = [distance[anchor] * float(curve[0][rate]) ** (t - anchor) for t in steps]
            kept = [t for t in steps if line[t] > 1e-13]
            right.plot(kept, [line[t] for t in kept], color=ink, lw=1.3, linestyle=dashes)
    left.set_ylim(0, 1)
    left.set_title("gain k (solid) and variance p (dashed)", loc="left", fontsize=10, color=_INK)
    left.legend(fontsize=8, frameon=False)
    right.set_yscale("log")
    right.set_title("distance of the gain from its limit", loc="left", fontsize=10, color=_INK)
    for axes in (left, right):
        axes.set_xlabel("step", fontsize=9, color=_QUIET)
        axes.set_xlim(0, max(int(row["step"]) for row in rows))
        _quiet(axes)
    figure.subplots_adjust(left=0.05, right=0.985, top=0.8, bottom=0.11, wspace=0.14)
    return figure


def draw_ablation(rows: Sequence[Row]) -> Figure:
    """Final loss of each combination over that of one point without a filter, a panel a clipping and noise level."""
    clippings = list(dict.fromkeys(str(row["clipping"]) for row in rows))
    levels = list(dict.fromkeys(float(row["noise_multiplier"]) for row in rows))
    height = 2.7 * len(clippings) + 1.2
    least = min(float(row["ratio_low"]) for row in rows)
    most = max(float(row["ratio_high"]) for row in rows)
    margin = 0.06 * max(most - least, 0.1)
    figure = _figure(
        3.0 * len(levels) + 2.4,
        height,
        "Second point, filter, joint or separate clip: which one carries the gain",
        f"final loss over that of DP-SGD, all tuned on other seeds; mean and 95% interval over {rows[0]['seeds']} "
        "problems. Filled: with the filter.",
    )
    for line, clipping in enumerate(clippings):
        for column, level in enumerate(levels):
            axes = figure.add_subplot(len(clippings), len(levels), line * len(levels) + column + 1)
            here = [row for row in rows if row["clipping"] == clipping and float(row["noise_multiplier"]) == level]
            for i, row in enumerate(here):
                mean, low, high = (float(row[f"ratio_{part}"]) for part in ("mean", "low", "high"))
                colour = _CURVES[0] if row["points"] == "one" else _CURVES[1 if row["clip"] == "joint" else 2]
                face = colour if row["filter"] == "average" else "white"
                axes.plot([low, high], [i, i], color=colour, lw=2.4, alpha=0.55, solid_capstyle="round")
                axes.plot([mean], [i], color=colour, marker="o", markersize=6, markerfacecolor=face, linestyle="none")
            axes.axvline(1, color="#999999", lw=1.0, dashes=(4, 3), zorder=1)
            axes.set_xlim(least - margin, most + margin)  # one scale for all panels
            axes.set_ylim(len(here) - 0.5, -0.5)
            axes.set_yticks(range(len(here)))
            axes.set_yticklabels([_cell(row) for row in here] if column == 0 else [])
            axes.set_title(f"{clipping} clipping, noise multiplier {level:g}", loc="left", fontsize=9.5, color=_INK)
            if line == len(clippings) - 1:
                axes.set_xlabel("final loss / DP-SGD's", fontsize=9, color=_QUIET)
            _quiet(axes)
    figure.subplots_adjust(left=0.2, right=0.985, top=1 - 0.98 / height, bottom=0.5 / height, wspace=0.08, hspace=0.3)
    return figure


def _cell(row: Row) -> str:
    points = "one point" if row["points"] == "one" else f"two points, {row['clip']} clip"
    return points + (", filter" if row["filter"] == "average" else ", no filter")


def _figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.text(0.015, 1 - 0.34 / height, title, fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.015, 1 - 0.6 / height, subtitle, fontsize=9, color=_QUIET)
    return figure


def _quiet(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=_QUIET, labelsize=8)
    axes.grid(axis="both", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_minor_formatter(NullFormatter())
