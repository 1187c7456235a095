"""What an audit found, as values that can be printed and written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One statistic: a lower bound on ε beside what the plan claims for the same number of steps, at the plan's δ.

    ``assumes`` is "nothing" (an event's probabilities: independent draws and nothing else) or the family within which
    ``noise_multiplier`` is an upper bound of the noise there is. ``broken`` says that the claim does not hold.
    """

    scenario: str
    statistic: str
    assumes: str
    draws: int
    steps: int
    epsilon_lower: float
    epsilon_claimed: float
    noise_multiplier: float | None
    broken: bool
    detail: str


@dataclass(frozen=True)
class Scenario:
    """One configuration under audit: what was found and, for the plot, its strongest events."""

    name: str
    plan: str
    filter: str
    steps: int
    microbatch_size: int | None
    draws: int
    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    findings: tuple[Finding, ...]
    tradeoff: tuple[tuple[float, float, float], ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.epsilon_lower <= self.epsilon_claimed


@dataclass(frozen=True)
class StepAudit:
    """The verdict of a two-world audit. ``epsilon_lower`` and ``epsilon_claimed`` are those of the worst scenario.

    An honest library passes with probability ``confidence`` at least, all scenarios and statistics together.
    """

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    passed: bool
    scenarios: tuple[Scenario, ...]
    seconds: float

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all scenarios."""
        return tuple(finding for scenario in self.scenarios for finding in scenario.findings)

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The statistics that contradict the claim."""
        return tuple(finding for finding in self.findings if finding.broken)

    def to_dict(self) -> dict[str, Any]:
        """As for JSON."""
        return {"method": "two-world", **asdict(self)}


@dataclass(frozen=True)
class RunAudit:
    """The verdict of a one-run audit: ``correct`` of ``guesses`` about ``canaries`` were right.

    ``epsilon_claimed`` is the plan's ε. A pass excludes gross faults only (docs/audit.md).
    """

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    passed: bool
    kind: str
    view: str
    canaries: int
    guesses: int
    correct: int
    steps: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As for JSON."""
        return {"method": "one-run", **asdict(self)}
