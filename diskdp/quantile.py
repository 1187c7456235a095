"""Clipping whose threshold follows a quantile of the norms (Andrew et al. 2021), paid for in the same release.

Assumes that a step releases the sum of clip(u_i), and beside it the sum of w (b_i - 1/2), b_i = 1 if ‖u_i‖ ≤ C: one
vector an example, one more coordinate long. With w = σ_Δ C/σ_b its length is at most S = √(C² + w²/4) = C σ_Δ/σ, so
noise σS on all of it is noise σ_Δ C on the gradients and σ_b examples on the count: 1/σ_Δ² + 1/(4σ_b²) = 1/σ².
"""

from __future__ import annotations

import math

from diskdp.errors import CheckpointError
from diskdp.plan import Plan

COUNT = "count of short gradients / no parameter"
"""The further coordinate among a release's tensors; no parameter has a name with a blank."""

_RATE = 0.2  # of the geometric update, as in the paper
_FARTHEST = 1e9  # that the threshold moves from where it began, either way


class QuantileThreshold:
    """C_{t+1} = C_t exp(-0.2 (b̃_t - γ)), b̃_t the released share of gradients no longer than C_t.

    >>> plan = Plan(dataset_size=1000, batch_size=200, steps=5, noise_multiplier=1.0, delta=1e-4, clipping="adaptive")
    >>> threshold = QuantileThreshold(plan)
    >>> threshold.value, round(threshold.sensitivity, 4)
    (1.0, 1.0013)
    >>> threshold.follow(threshold.weight * 100 / 200)  # all 200 short: the count of b - 1/2 is 100
    >>> round(threshold.value, 4)
    0.9048
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.target_quantile is not None
        assert plan.quantile_noise is not None
        self._target, self._count_noise, self._batch_size = plan.target_quantile, plan.quantile_noise, plan.batch_size
        self._start = self.value = plan.max_grad_norm
        sigma = plan.noise_multiplier
        self._ratio = 1 / math.sqrt(1 - (sigma / (2 * self._count_noise)) ** 2)  # σ_Δ/σ
        self._gradient_noise = sigma * self._ratio

    @property
    def sensitivity(self) -> float:
        """S: what one example can contribute to gradients and count together."""
        return self.value * self._ratio

    @property
    def weight(self) -> float:
        """w: what an example's b - 1/2 counts."""
        return self._gradient_noise * self.value / self._count_noise

    def follow(self, released: float) -> None:
        """Take the threshold on, by the released coordinate (over the public batch size)."""
        share = released / self.weight + 0.5 if self.weight else self._target
        moved = self.value * math.exp(-_RATE * (min(max(share, -1.0), 2.0) - self._target))
        self.value = min(max(moved, self._start / _FARTHEST), self._start * _FARTHEST)

    def restore(self, value: float | None) -> None:
        if value is None or not 0 < value < math.inf:
            raise CheckpointError("the checkpoint has no threshold of adaptive clipping; it belongs to another plan")
        self.value = float(value)
