"""Plots of runs and plans: accuracy against steps with a band for the spread over seeds, ε and σ of a plan.

Colour-blind readers can tell the colours apart (Okabe and Ito 2008); each curve has its own dashes too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from diskdp.plan import Plan, epsilon_by_epoch
from diskdp.tradeoff import TradeOff

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ((), (5, 1.8), (1.6, 1.4), (6, 1.6, 1.4, 1.6))
_INK, _QUIET = "#222222", "#6b6b6b"


@dataclass(frozen=True)
class Curves:
    """One method's accuracies, [seeds][points], at ``steps``."""

    label: str
    steps: tuple[int, ...]
    accuracies: tuple[tuple[float, ...], ...]


def plot_accuracy(
    path: str | os.PathLike[str],
    curves: Sequence[Curves],
    title: str,
    subtitle: str,
    from_accuracy: float = 0.0,
) -> None:
    """Draw mean accuracy against steps to a PNG; the band is ± one standard deviation over seeds.

    ``from_accuracy`` is where the vertical axis begins, so that the first steps do not flatten the rest.
    """
    figure, axes = _canvas(title, subtitle)
    ends, highest = [], 0.0
    for i, curve in enumerate(curves):
        values = np.asarray(curve.accuracies)
        mean = values.mean(0)
        spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
        colour, dashes = _COLOURS[i % len(_COLOURS)], _DASHES[i % len(_DASHES)]
        axes.fill_between(curve.steps, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)
        (line,) = axes.plot(curve.steps, mean, color=colour, linewidth=2, label=curve.label)
        if dashes:
            line.set_dashes(dashes)
        highest = max(highest, float((mean + spread).max()))
        ends.append((float(mean[-1]), f"{curve.label}  {mean[-1]:.1%}", colour))
    axes.set_ylim(from_accuracy, min(1.0, highest + 0.08 * (highest - from_accuracy)))
    axes.set_xlim(0, max(curve.steps[-1] for curve in curves))
    axes.yaxis.set_major_locator(MultipleLocator(_tick(axes)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("step")
    axes.set_title("test accuracy", loc="left", fontsize=9.5, color=_INK, pad=8)
    _label_ends(axes, ends)
    figure.savefig(Path(path), dpi=160)


def plot_epsilon(path: str | os.PathLike[str], plan: Plan) -> None:
    """Draw what the plan has spent after each epoch to a PNG."""
    rows = epsilon_by_epoch(plan)
    subtitle = (
        f"δ = {plan.delta:.2g}, σ = {plan.noise_multiplier:.3g}, N = {plan.dataset_size:,}, "
        f"B = {plan.batch_size:,}, {plan.accountant.upper()} accountant"
    )
    figure, axes = _canvas("Privacy spent during training", subtitle)
    axes.plot([0, *(r.epochs for r in rows)], [0, *(r.epsilon for r in rows)], color=_COLOURS[0], linewidth=2)
    axes.set_xlim(0, rows[-1].epochs)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_title("ε", loc="left", fontsize=9.5, color=_INK, pad=8)
    _label_ends(axes, [(rows[-1].epsilon, f"ε = {rows[-1].epsilon:.3g}", _COLOURS[0])])
    figure.savefig(Path(path), dpi=160)


def plot_trade_off(path: str | os.PathLike[str], plan: Plan, explored: TradeOff) -> None:
    """Draw the noise that each budget needs, against steps or batch size, to a PNG."""
    fixed = f"B = {plan.batch_size:,}" if explored.by == "steps" else f"{plan.epochs:g} epochs"
    subtitle = f"δ = {plan.delta:.2g}, N = {plan.dataset_size:,}, {fixed}, {plan.sampling}, {plan.adjacency}"
    figure, axes = _canvas("The noise that a budget needs", subtitle)
    ends = []
    for i, (budget, row) in enumerate(zip(explored.budgets, explored.noise_multipliers)):
        known = [(value, sigma) for value, sigma in zip(explored.values, row) if sigma is not None]
        if known:
            colour, dashes = _COLOURS[i % len(_COLOURS)], _DASHES[i % len(_DASHES)]
            (line,) = axes.plot(*zip(*known), color=colour, linewidth=2, marker="o", markersize=4)
            if dashes:
                line.set_dashes(dashes)
            ends.append((known[-1][1], f"ε = {budget:.3g}", colour))
    axes.set_xscale("log", base=2)
    axes.set_xticks(explored.values, [f"{value:,}" for value in explored.values])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("steps" if explored.by == "steps" else "batch size B")
    axes.set_title("σ, noise multiplier", loc="left", fontsize=9.5, color=_INK, pad=8)
    _label_ends(axes, ends)
    figure.savefig(Path(path), dpi=160)


def _canvas(title: str, subtitle: str) -> tuple[Figure, Axes]:
    """An empty chart: no global state, no display needed."""
    figure = Figure(figsize=(8, 4.8))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.085, 0.125, 0.70, 0.69))
    figure.text(0.02, 0.94, title, fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.02, 0.89, subtitle, fontsize=9, color=_QUIET)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    return figure, axes


def _tick(axes: Axes) -> float:
    """Whole percents, at most eight of them."""
    low, high = axes.get_ylim()
    return next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if (high - low) / step <= 8 or step == 0.2)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name each curve at its end; names that would overlap are moved apart, around where the curves are."""
    low, high = axes.get_ylim()
    gap, places = 0.055 * (high - low), list[float]()
    ordered = sorted(ends)
    for value, _, _ in ordered:
        places.append(max(value, places[-1] + gap) if places else value)
    shift = sum(place - value for place, (value, _, _) in zip(places, ordered)) / len(ordered)
    for place, (value, text, colour) in zip(places, ordered):
        axes.annotate(
            text,
            xy=(1.0, value),
            xytext=(1.03, place - shift),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            color=colour,
            fontsize=10,
            va="center",
            annotation_clip=False,
        )
