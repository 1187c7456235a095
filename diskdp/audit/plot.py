"""The trade-off curve that a plan allows, and the points that an audit has shown to lie above or below.

Assumes findings in a `StepAudit`; asks the accountant for the claimed curve.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diskdp.audit.bounds import Array
from diskdp.audit.claims import Claim
from diskdp.audit.results import Scenario, StepAudit
from diskdp.plan import Plan

_CLAIMED, _SHOWN, _INK, _QUIET = "#0072B2", "#D55E00", "#222222", "#6b6b6b"
_COLUMNS = 3
_CURVE = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def plot_tradeoff(path: str | os.PathLike[str], audit: StepAudit) -> None:
    """Draw, for each scenario, false against missed detections: what the claim allows, and what was found, to a PNG.

    A test with a point below the curve tells the two worlds apart better than the claim lets anyone. Each point is
    drawn where its bounds put it, at the pessimistic end of its confidence interval in both directions.
    """
    rows = -(-len(audit.scenarios) // _COLUMNS)
    columns = min(_COLUMNS, len(audit.scenarios))
    figure = Figure(figsize=(3.1 * columns + 0.6, 3.0 * rows + 1.0))
    FigureCanvasAgg(figure)
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.36 / height, "What steps give away about one record", fontsize=13, fontweight="bold")
    verdict = "passed" if audit.passed else "failed"
    figure.text(
        0.02,
        1 - 0.62 / height,
        f"{verdict}; confidence {audit.confidence:g}. Points below the curve contradict the claim.",
        fontsize=9,
        color=_QUIET,
    )
    for number, scenario in enumerate(audit.scenarios):
        axes = figure.add_subplot(rows, columns, number + 1)
        false, missed = _claimed_curve(scenario)
        axes.fill_between(false, 0, missed, color=_CLAIMED, alpha=0.10, linewidth=0)
        axes.plot(false, missed, color=_CLAIMED, linewidth=1.8, label="claimed")
        points = np.array([point[:2] for point in scenario.tradeoff]).reshape(-1, 2)
        swapped = np.array([bool(point[2]) for point in scenario.tradeoff], dtype=bool)
        # an event that is likely without the record detects its absence: its complement detects the record
        false_alarms = np.where(swapped, points[:, 1], points[:, 0])
        misses = np.where(swapped, points[:, 0], points[:, 1])
        axes.scatter(false_alarms, misses, s=9, color=_SHOWN, alpha=0.7, label="found, with confidence", zorder=3)
        axes.plot([0, 1], [1, 0], color="#bbbbbb", linewidth=0.8, dashes=(4, 3))
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_aspect("equal")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#bbbbbb")
        axes.tick_params(colors=_QUIET, labelsize=8)
        axes.set_title(
            f"{scenario.name}\nε ≥ {scenario.epsilon_lower:.3g}, claimed {scenario.epsilon_claimed:.3g}",
            loc="left",
            fontsize=8.5,
            color=_INK if scenario.passed else _SHOWN,
        )
        if number % columns == 0:
            axes.set_ylabel("missed", fontsize=8.5, color=_QUIET)
        if number // columns == rows - 1 or number + columns >= len(audit.scenarios):
            axes.set_xlabel("false alarms", fontsize=8.5, color=_QUIET)
        if number == 0:
            axes.legend(fontsize=7.5, frameon=False, loc="upper right")
    figure.subplots_adjust(
        left=0.55 / figure.get_figwidth(),
        right=0.98,
        top=1 - 1.15 / height,
        bottom=0.45 / height,
        hspace=0.42,
        wspace=0.22,
    )
    figure.savefig(Path(path), dpi=160)


def _claimed_curve(scenario: Scenario) -> tuple[Array, Array]:
    """The least missed detections that the claimed δ(ε) leaves at each rate of false alarms (Dong et al. 2022)."""
    claim = Claim(Plan.from_json(scenario.plan))
    false = np.linspace(0, 1, 201)
    missed = np.zeros_like(false)
    for epsilon in _CURVE:
        rest, factor = 1 - claim.delta(scenario.steps, epsilon), np.exp(epsilon)
        missed = np.maximum.reduce([missed, rest - factor * false, (rest - false) / factor])
    return false, missed
