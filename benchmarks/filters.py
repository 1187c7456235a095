"""Filters on problems whose gradients are known: how far each one's output is from the gradient, and where it leads.

SGD from one start, gradients with normal noise and no clipping; κ of constant gains is the best of a grid for the
final loss on other seeds, everything else is at its defaults. Run: python benchmarks/filters.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diskdp.filters import (
    AdaptiveGain,
    CurvatureKalman,
    DiSK,
    Filter,
    FollowsWeights,
    FullKalman,
    LowPass,
    due_coefficients,
    started,
)

Array = npt.NDArray[np.float64]
STEPS, RATE = 400, 0.2
GRID = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
TUNING, REPORTED = range(100, 103), range(5)


@dataclass(frozen=True)
class Problem:
    """A function of d variables by its gradient, and what it is above its minimum."""

    name: str
    start: Array
    gradient: Callable[[Array], Array]
    loss: Callable[[Array], float]
    curvature: Array  # at the minimum


def quadratic(dimension: int) -> Problem:
    """Curvatures spread evenly in logarithm over two decades up to 2, in a random basis."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    H = basis @ np.diag(np.logspace(-2, 0, dimension) * 2) @ basis.T
    H = (H + H.T) / 2
    start = rng.standard_normal(dimension)
    return Problem(f"quadratic, d = {dimension}", start, lambda x: H @ x, lambda x: float(x @ H @ x / 2), H)


def logistic(dimension: int) -> Problem:
    """Logistic regression on 1,000 points, with a penalty of .005‖x‖²; full-batch gradients."""
    rng = np.random.default_rng(1)
    A = rng.standard_normal((1000, dimension)) * np.logspace(-0.5, 0.5, dimension)
    y = (rng.random(1000) < 1 / (1 + np.exp(-A @ rng.standard_normal(dimension)))).astype(float)

    def gradient(x: Array) -> Array:
        return A.T @ (1 / (1 + np.exp(-A @ x)) - y) / 1000 + 0.01 * x

    def value(x: Array) -> float:
        z = A @ x
        return float(np.mean(np.logaddexp(0, z) - y * z) + 0.005 * x @ x)

    best = np.zeros(dimension)
    for _ in range(50):  # Newton
        p = 1 / (1 + np.exp(-A @ best))
        H = (A.T * (p * (1 - p))) @ A / 1000 + 0.01 * np.eye(dimension)
        best = best - np.linalg.solve(H, gradient(best))
    least = value(best)
    return Problem(f"logistic, d = {dimension}", np.zeros(dimension), gradient, lambda x: value(x) - least, H)


def descend(problem: Problem, filter: Filter, deviation: float, seed: int) -> tuple[float, float]:
    """Mean squared error of the filtered gradients in the second half, over the noise's variance; the final loss."""
    rng = np.random.default_rng(seed)
    state = started(filter, deviation**2)
    gamma = filter.lookahead or 0.0
    x, d = problem.start.copy(), np.zeros_like(problem.start)
    error = 0.0
    for t in range(STEPS):
        here, ahead = due_coefficients(filter, state)
        g = here * problem.gradient(x)
        if ahead:
            g = g + ahead * problem.gradient(x + gamma * d)
        estimate = state.update([torch.from_numpy(g + deviation * rng.standard_normal(len(x)))])[0].numpy().copy()
        if t >= STEPS // 2:
            error += float(np.square(estimate - problem.gradient(x)).mean()) / (STEPS - STEPS // 2)
        d = -RATE * estimate
        x = x + d
        if isinstance(state, FollowsWeights):
            state.moved([torch.from_numpy(d)])
    return error / deviation**2, problem.loss(x)


def best_kappa(problem: Problem, of: Callable[[float], Filter], deviation: float) -> float:
    return min(GRID, key=lambda k: np.mean([descend(problem, of(k), deviation, s)[1] for s in TUNING]))


def main() -> None:
    print(f"SGD, {STEPS} steps at rate {RATE}; mean of {len(REPORTED)} seeds, ± standard error of the loss")
    for problem in (quadratic(50), quadratic(500), logistic(50)):
        for deviation in (0.05, 0.5):
            tuned: dict[str, Callable[[float], Filter]] = {
                "low-pass, best κ": lambda k: LowPass(kappa=k),
                "DiSK γ=.5, best κ": lambda k: DiSK(kappa=k, gamma=0.5),
                "DiSK γ=-1, best κ": lambda k: DiSK(kappa=k, gamma=-1.0),
            }
            rows: list[tuple[str, Filter]] = [("none", DiSK(kappa=1.0))]
            for name, of in tuned.items():
                kappa = best_kappa(problem, of, deviation)
                rows.append((f"{name} = {kappa:g}", of(kappa)))
            rows += [
                ("adaptive, one point", DiSK(gamma=None, gain=AdaptiveGain())),
                ("adaptive, γ=.5, any c", DiSK(gamma=0.5, gain=AdaptiveGain(largest_weight=math.inf))),
                ("adaptive, γ=.5", DiSK(gamma=0.5, gain="adaptive")),
                ("adaptive, γ=5", DiSK(gamma=5.0, gain="adaptive")),
            ]
            if len(problem.start) <= 100:
                rows += [
                    ("full, H at the minimum", FullKalman(process_var=1e-6, curvature=problem.curvature)),
                    ("full, H learned", CurvatureKalman(curvature_var=0.1, process_var=1e-6)),
                ]
            print(f"\n{problem.name}, noise {deviation}: error of the gradient / noise, final loss")
            for name, filter in rows:
                results = np.array([descend(problem, filter, deviation, seed) for seed in REPORTED])
                error, loss = results.mean(axis=0)
                spread = results[:, 1].std(ddof=1) / np.sqrt(len(results))
                print(f"  {name:28} {error:8.3g}   {loss:9.4g} ± {spread:.1g}")


if __name__ == "__main__":
    main()
