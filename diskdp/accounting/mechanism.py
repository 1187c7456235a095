"""Which samplers are accounted under which adjacency, and what one step of each is: the table, and `Mechanism`.

Assumes that the dataset's size is public. A cell without a proof is refused, with the way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diskdp.accounting import solve
from diskdp.accounting.releases import FixedSize, Gaussian, Group, Poisson, PoissonReplaced, Release, Truncated
from diskdp.errors import PlanError

# Setting -> (what has been built, what is known by name but has not).
_CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "clipping": (("flat", "automatic", "normalized", "per-layer", "adaptive"), ()),
    "sampling": (("poisson", "truncated-poisson", "fixed-size", "shuffled"), ("balls-in-bins",)),
    "adjacency": (("add-remove", "replace-one", "zero-out"), ()),
    "accountant": (("pld", "rdp"), ("prv", "gdp")),
    "noise": (("gaussian", "secure", "discrete"), ("correlated",)),
}
_WHY_NOT = {
    "balls-in-bins": ", since the bounds at hand for it are sampled or loose",
    "correlated": ", since noise that is correlated across steps needs an accounting of its own",
}


def require_built(*, clipping: str, sampling: str, adjacency: str, accountant: str, noise: str) -> None:
    """Raise `PlanError` unless each setting, by itself, has been built. `Mechanism` checks that they go together.

    >>> require_built(clipping="flat", sampling="roulette", adjacency="add-remove", accountant="pld",
    ...               noise="gaussian")
    Traceback (most recent call last):
    diskdp.errors.PlanError: sampling='roulette' is unknown; choose one of: poisson, truncated-poisson, \
fixed-size, shuffled
    """
    chosen = {
        "clipping": clipping,
        "sampling": sampling,
        "adjacency": adjacency,
        "accountant": accountant,
        "noise": noise,
    }
    for setting, value in chosen.items():
        built, planned = _CHOICES[setting]
        if value not in built:
            problem = f"is not built yet{_WHY_NOT.get(value, '')}" if value in planned else "is unknown"
            raise PlanError(f"{setting}={value!r} {problem}; choose one of: {', '.join(built)}")


@dataclass(frozen=True)
class Mechanism:
    """Everything that a run's accounting needs but the noise and the number of steps.

    `noise_multiplier` is always the noise's standard deviation over what one record can contribute, whatever the
    adjacency: where a record is replaced, the sum may change by twice that, and the accounting allows for it.

    >>> mechanism = Mechanism("poisson", "add-remove", dataset_size=60_000, batch_size=600)
    >>> round(mechanism.epsilon(0.7, 120, 1e-5), 6)
    2.461238
    >>> Mechanism("poisson", "replace-one", dataset_size=100, batch_size=100).epsilon(2.0, 1, 1e-5) == \
Mechanism("poisson", "add-remove", dataset_size=100, batch_size=100).epsilon(1.0, 1, 1e-5)
    True
    >>> Mechanism("fixed-size", "add-remove", dataset_size=100, batch_size=10)
    Traceback (most recent call last):
    diskdp.errors.PlanError: sampling='fixed-size' has no guarantee under adjacency='add-remove': exactly \
batch_size records of N can be drawn only if N stays; use adjacency='replace-one'
    """

    sampling: str
    adjacency: str
    dataset_size: int
    batch_size: int
    max_batch_size: int | None = None
    examples_per_unit: int = 1
    accountant: str = "pld"
    paper_accounting: bool = False

    def __post_init__(self) -> None:
        require_built(
            clipping="flat",
            sampling=self.sampling,
            adjacency=self.adjacency,
            accountant=self.accountant,
            noise="gaussian",
        )
        for name in ("dataset_size", "batch_size", "examples_per_unit"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be positive, got {getattr(self, name)}")
        if self.batch_size > self.dataset_size:
            raise PlanError(f"batch_size={self.batch_size} is larger than dataset_size={self.dataset_size}; lower it")
        if self.examples_per_unit > self.dataset_size:
            raise PlanError(
                f"examples_per_unit={self.examples_per_unit} is larger than dataset_size={self.dataset_size}; lower it"
            )
        self._check_cap()
        if self.paper_accounting:
            self._check_paper()
        else:
            self._check_cell()

    @property
    def sample_rate(self) -> float:
        """The chance that a record is in a batch (but for truncation), or the share of the data in it."""
        return self.batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches that cover the data once: ceil(dataset_size / batch_size)."""
        return -(-self.dataset_size // self.batch_size)

    @property
    def release(self) -> Release:
        """One step's worst case; for shuffled batches, one epoch's."""
        replaced = self.adjacency == "replace-one"
        rate, size = self.sample_rate, self.examples_per_unit
        if self.paper_accounting:
            return Poisson(rate) if rate < 1 else Gaussian(1.0)
        if self.sampling == "shuffled" or rate == 1:
            # one record more than a cap of N takes another's place
            displaced = self.max_batch_size == self.dataset_size and self.adjacency == "add-remove"
            return Gaussian(2.0 * size if replaced or displaced or self.sampling == "fixed-size" else 1.0 * size)
        if self.sampling == "fixed-size":
            return FixedSize(rate)
        if self.sampling == "truncated-poisson":
            assert self.max_batch_size is not None
            least = self.dataset_size - 1
            others = (least, least + 1) if self.adjacency == "add-remove" else (least,)
            return Truncated(rate, self.max_batch_size, others, replaced)
        if size > 1:
            return Group(rate, size)
        return PoissonReplaced(rate) if replaced else Poisson(rate)

    def parts(self, noise_multiplier: float, releases: Mapping[int, int]) -> solve.Parts:
        """The worst case of `releases[r]` samples that were each released r times with independent noise.

        The r releases of one sample are one event at 1/sqrt(r) of the noise. Shuffled, a record is in one sample an
        epoch, at worst in those that were released most often.
        """
        for times, samples in releases.items():
            if times < 1 or samples < 0:
                raise PlanError(f"releases must map counts of 1 and more to numbers of samples, got {dict(releases)}")
        if not 0 <= noise_multiplier < math.inf:
            raise PlanError(f"noise_multiplier must be a finite number, zero or more, got {noise_multiplier}")
        if self.sampling == "shuffled" and not self.paper_accounting:
            releases = self._most_released(releases)
        return tuple(
            (self.release, noise_multiplier / math.sqrt(times), samples)
            for times, samples in releases.items()
            if samples
        )

    def epsilon(self, noise_multiplier: float, steps: int, delta: float) -> float:
        """The epsilon that `steps` steps spend at `delta`."""
        return solve.epsilon_of(self.parts(noise_multiplier, {1: _whole(steps)}), delta, self.accountant)

    def epsilon_of(self, noise_multiplier: float, releases: Mapping[int, int], delta: float) -> float:
        """The epsilon that `releases[r]` samples, each released r times, spend at `delta`."""
        return solve.epsilon_of(self.parts(noise_multiplier, releases), delta, self.accountant)

    def delta(self, noise_multiplier: float, steps: int, epsilon: float) -> float:
        """The delta that `steps` steps spend at `epsilon`."""
        return solve.delta_of(self.parts(noise_multiplier, {1: _whole(steps)}), epsilon, self.accountant)

    def calibrate(self, epsilon: float, steps: int, delta: float) -> float:
        """The smallest noise multiplier (to 0.1%) whose `steps` steps spend at most `epsilon` at `delta`.

        An infinite epsilon gives 0. Where dp-accounting has an accountant of that name for the step, with its
        defaults it finds no more than `epsilon` spent.
        """
        ((step, _, count),) = self.parts(1.0, {1: _whole(steps)}) or ((self.release, 1.0, 0),)
        return solve.calibrate(step, count, float(epsilon), float(delta), self.accountant)

    def largest_steps(self, noise_multiplier: float, epsilon: float, delta: float, limit: int) -> int | None:
        """The most steps, up to `limit`, that spend at most `epsilon` at `delta`; None if not even one fits."""
        return solve.largest(
            lambda steps: self.parts(noise_multiplier, {1: steps}), 1, limit, epsilon, delta, self.accountant
        )

    def _most_released(self, releases: Mapping[int, int]) -> dict[int, int]:
        left = -(-sum(releases.values()) // self.steps_per_epoch)
        kept = {}
        for times in sorted(releases, reverse=True):
            kept[times] = min(left, releases[times])
            left -= kept[times]
        return kept

    def _check_cap(self) -> None:
        if self.sampling != "truncated-poisson":
            if self.max_batch_size is not None:
                raise PlanError(
                    f"max_batch_size={self.max_batch_size} has no meaning for sampling={self.sampling!r}; "
                    "leave it out, or use sampling='truncated-poisson'"
                )
        elif self.max_batch_size is None:
            raise PlanError("sampling='truncated-poisson' needs max_batch_size, the most records in a batch")
        elif self.max_batch_size < self.batch_size:
            raise PlanError(
                f"max_batch_size={self.max_batch_size} is smaller than batch_size={self.batch_size}, the expected "
                "size; raise it"
            )

    def _check_cell(self) -> None:
        sampling, adjacency, full = self.sampling, self.adjacency, self.batch_size == self.dataset_size
        if sampling == "fixed-size" and adjacency == "add-remove":
            raise PlanError(
                "sampling='fixed-size' has no guarantee under adjacency='add-remove': exactly batch_size records of N "
                "can be drawn only if N stays; use adjacency='replace-one'"
            )
        if sampling == "fixed-size" and adjacency == "zero-out":
            raise PlanError(
                "sampling='fixed-size' is accounted under adjacency='replace-one' alone, which covers 'zero-out' "
                "(the replacement may be a record that contributes nothing); use that"
            )
        if sampling == "shuffled" and adjacency == "add-remove":
            raise PlanError(
                "sampling='shuffled' has no guarantee under adjacency='add-remove': one record more or less moves the "
                "others to other batches; use adjacency='zero-out' or 'replace-one'"
            )
        if sampling == "truncated-poisson" and self.accountant == "rdp" and not full:
            raise PlanError("sampling='truncated-poisson' has no Renyi accounting here; use accountant='pld'")
        if self.examples_per_unit > 1 and not (full and sampling == "poisson") and sampling != "shuffled":
            self._check_group()

    def _check_group(self) -> None:
        what = f"examples_per_unit={self.examples_per_unit}"
        if self.sampling != "poisson":
            raise PlanError(
                f"{what} has not been worked out for sampling={self.sampling!r}; use sampling='poisson' or 'shuffled'"
            )
        if self.adjacency == "replace-one":
            raise PlanError(
                f"{what} has not been worked out for adjacency='replace-one' with Poisson batches; "
                "use adjacency='add-remove' or 'zero-out'"
            )
        if self.accountant == "rdp":
            raise PlanError(f"{what} has no Renyi accounting here with Poisson batches; use accountant='pld'")

    def _check_paper(self) -> None:
        if self.sampling != "fixed-size" or self.adjacency != "add-remove" or self.examples_per_unit > 1:
            raise PlanError(
                "paper_accounting=True means batches of a fixed size accounted as Poisson ones: it needs "
                "sampling='fixed-size', adjacency='add-remove' and examples_per_unit=1, got "
                f"sampling={self.sampling!r}, adjacency={self.adjacency!r} and "
                f"examples_per_unit={self.examples_per_unit}"
            )


def composed_epsilon(runs: Iterable[tuple[Mechanism, float, Mapping[int, int]]], delta: float) -> float:
    """The epsilon that several runs on one dataset spend together at `delta`.

    Each run is a mechanism, its noise multiplier and its releases, as for `Mechanism.epsilon_of`. Under zero-out and
    add-remove a step has the same worst case or, truncated, no larger one under zero-out: such runs go together, and
    what comes out holds for zero-out. Replaced records, units of another size and other accountants do not mix.

    >>> run = Mechanism("poisson", "add-remove", dataset_size=1000, batch_size=10)
    >>> together = composed_epsilon([(run, 1.0, {1: 60}), (run, 1.0, {1: 40})], 1e-5)
    >>> together == run.epsilon(1.0, 100, 1e-5)
    True
    """
    runs = list(runs)
    for what, found in (
        ("accountants", {mechanism.accountant for mechanism, _, _ in runs}),
        ("examples_per_unit", {mechanism.examples_per_unit for mechanism, _, _ in runs}),
        ("adjacencies", {mechanism.adjacency == "replace-one" for mechanism, _, _ in runs}),
    ):
        if len(found) > 1:
            raise PlanError(
                f"these runs cannot be accounted together: they differ in {what}; "
                "state a guarantee for each, or plan them alike"
            )
    if any(mechanism.paper_accounting for mechanism, _, _ in runs):
        raise PlanError("a run with paper_accounting=True has no guarantee that could be composed with others")
    parts = tuple(part for mechanism, sigma, releases in runs for part in mechanism.parts(sigma, releases))
    return solve.epsilon_of(parts, delta, runs[0][0].accountant if runs else "pld")


def _whole(steps: int) -> int:
    if steps < 0 or steps != int(steps):
        raise PlanError(f"steps must be a whole number, zero or more, got {steps}")
    return int(steps)
