"""The audits: honest configurations pass, planted faults are found by the statistics that can see them.

Every audit here has confidence 0.999 or more: an honest one fails with probability 1e-3 at most by construction, and
those that must pass run with fixed seeds. Faults planted here are found in all of the repetitions of docs/audit.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats

from diskdp import DiSK, LowPass, NoFilter, Plan, accounting, privatize
from diskdp.audit import audit_run, audit_step, one_run_epsilon, one_run_p_value
from diskdp.audit.bounds import Event, proportion_above, proportion_below, scale_below, telling_events
from diskdp.audit.canaries import ABSENT, FLIPPING, PRESENT, STEADY, draw
from diskdp.audit.claims import Claim, fixed_size_epsilon
from diskdp.cli import run
from diskdp.errors import AuditError, NotPrivateWarning, PlanError
from diskdp.filters import Filter
from tests import faults

DELTA = 1e-5
C5 = DiSK(kappa=0.5, gamma=0.2)
C5_SEPARATE = DiSK(kappa=0.5, gamma=0.2, clip="separate")


def make_plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "dataset_size": 2000,
        "batch_size": 2000,
        "steps": 2,
        "noise_multiplier": 1.0,
        "delta": DELTA,
        "max_grad_norm": 1.7,
    }
    return Plan(**{**fields, **changes})


def statistics(audit: Any) -> set[str]:
    return {finding.statistic for finding in audit.broken}


# ---- Honest


@pytest.mark.parametrize(
    ("filter", "changes", "microbatch_size"),
    [
        (NoFilter(), {}, None),
        (NoFilter(), {"clipping": "automatic"}, 700),
        (NoFilter(), {"clipping": "normalized", "max_grad_norm": 0.3}, None),
        (NoFilter(), {"clipping": "per-layer"}, 900),
        (NoFilter(), {"batch_size": 500, "steps": 5}, 200),
        (NoFilter(), {"batch_size": 20, "steps": 40, "accountant": "rdp"}, 8),
        (NoFilter(), {"noise": "secure", "batch_size": 1000}, 400),
        (NoFilter(), {"noise": "discrete", "dataset_size": 600, "batch_size": 600}, 200),
        (LowPass(kappa=0.3), {"steps": 3}, None),
        (LowPass(a=[1, -0.5], b=[0.3, 0.2]), {"steps": 3}, None),
        (DiSK(), {"steps": 4}, None),
        (DiSK(kappa=0.7, gamma=-1.0), {"steps": 3}, 700),
        (C5, {"steps": 3}, 700),
        (C5_SEPARATE, {"steps": 3, "clipping": "per-layer"}, None),
        (C5_SEPARATE, {"steps": 6, "batch_size": 1000}, 400),
    ],
    ids=lambda value: repr(value) if not isinstance(value, dict) else ",".join(map(str, value.values())),
)
def test_honest_configurations_pass(filter: Filter, changes: dict[str, Any], microbatch_size: int | None) -> None:
    audit = audit_step(
        make_plan(**changes), filter=filter, draws=2000, microbatch_size=microbatch_size, steps=None, seed=5
    )
    assert audit.passed, audit.broken
    assert 0 < audit.epsilon_lower <= audit.epsilon_claimed
    assert audit.epsilon_lower > 0.5 * audit.epsilon_claimed  # and the audit is sharp


@pytest.mark.parametrize(
    ("sampling", "adjacency", "batch_size"),
    [
        ("poisson", "zero-out", 500),
        ("poisson", "replace-one", 2000),
        ("fixed-size", "replace-one", 200),
        ("shuffled", "zero-out", 200),
        ("shuffled", "replace-one", 200),
    ],
)
def test_other_worlds(sampling: str, adjacency: str, batch_size: int) -> None:
    """Replaced records move from +C to -C; draws of fixed-size batches are only nearly independent."""
    try:
        plan = make_plan(sampling=sampling, adjacency=adjacency, batch_size=batch_size, steps=10)
    except PlanError as refused:
        pytest.skip(str(refused))
    audit = audit_step(plan, draws=2000, microbatch_size=None, seed=6)
    assert audit.passed, audit.broken
    assert audit.epsilon_lower > 0.7 * audit.epsilon_claimed
    assert not audit_step(plan, draws=2000, microbatch_size=None, privatize=faults.less_noise).passed


def test_the_battery_passes_and_is_sharp() -> None:
    audit = audit_step(draws=1024, seed=3)
    assert audit.passed, audit.broken
    assert len(audit.scenarios) == 6
    for scenario in audit.scenarios:
        assert 0.6 * scenario.epsilon_claimed < scenario.epsilon_lower <= scenario.epsilon_claimed, scenario.name


def test_false_alarms_are_rarer_than_allowed() -> None:
    """30 audits at confidence 0.9 on fresh noise: more than 13 alarms have probability 1e-6 at the allowed rate."""
    plan = make_plan(dataset_size=400, batch_size=400, steps=1)
    alarms = sum(
        not audit_step(plan, draws=400, confidence=0.9, microbatch_size=None, seed=seed).passed for seed in range(30)
    )
    assert stats.binom.sf(13, 30, 0.1) < 1e-6
    assert alarms <= 13


# ---- Faults


def test_too_little_noise_is_found_by_its_size_and_by_events() -> None:
    audit = audit_step(make_plan(), draws=3000, microbatch_size=None, privatize=faults.less_noise)
    assert not audit.passed
    assert audit.epsilon_lower > audit.epsilon_claimed
    assert {"noise, all", "noise, quietest tensor", "noise, quietest step"} <= statistics(audit)
    assert any(finding.assumes == "nothing" for finding in audit.broken)
    audit = audit_step(make_plan(batch_size=500), draws=3000, microbatch_size=200, privatize=faults.less_noise)
    assert "noise, all" in statistics(audit)


def test_separate_clipping_accounted_as_joint_is_found_by_the_flipping_canary() -> None:
    audit = audit_step(
        make_plan(), filter=C5_SEPARATE, draws=3000, microbatch_size=None, privatize=faults.separate_as_joint
    )
    assert not audit.passed
    events = {finding.statistic for finding in audit.broken if finding.assumes == "nothing"}
    assert events == {"flipping canary, last step", "flipping canary, learned combination"}


def test_an_unclipped_microbatch_is_found_by_long_gradients() -> None:
    with faults.one_microbatch_unclipped():
        audit = audit_step(make_plan(), draws=3000, microbatch_size=700)
    assert not audit.passed
    assert {"steady canary, step 1", "contribution, steady canary, step 1"} <= statistics(audit)


def test_a_tensor_without_noise_is_found_by_its_own_statistics() -> None:
    for microbatch_size in (None, 700):
        audit = audit_step(make_plan(), draws=2000, microbatch_size=microbatch_size, privatize=faults.bare_tensor)
        found = statistics(audit)
        assert {"noise, quietest tensor", "canary in bias alone, last step"} <= found
        assert "canary in table.weight alone, last step" not in found


def test_noise_used_twice_is_found_by_the_difference_of_two_steps() -> None:
    for filter in (NoFilter(), LowPass(kappa=0.4)):
        audit = audit_step(
            make_plan(steps=3), filter=filter, draws=2000, microbatch_size=None, privatize=faults.same_noise
        )
        found = statistics(audit)
        assert {"noise, difference of steps", "alternating canary, difference of two steps"} <= found
        assert not found & {"noise, all", "noise, quietest step", "steady canary, step 1", "steady canary, step 3"}


def test_shuffled_batches_claimed_as_poisson_are_found_by_their_sizes() -> None:
    plan = make_plan(dataset_size=4000, batch_size=40, steps=100, noise_multiplier=0.8)
    audit = audit_step(plan, draws=2000, microbatch_size=None, privatize=faults.shuffled)
    assert statistics(audit) == {"sampling, batch sizes"}
    assert audit.epsilon_claimed < 1.6
    assert audit.epsilon_lower > 3


def test_a_shuffle_leaks_what_is_reported() -> None:
    """The worst case by simulation, through events that assume nothing: claimed 1.5, audited above 3."""
    generator = np.random.default_rng(0)
    steps, sigma, draws = 100, 0.8, 2_000_000

    def largest(shift: float) -> Any:
        # all others contribute -C; the record is in exactly one batch, which is then `shift` above the others
        others = sigma * special.ndtri(generator.random(draws) ** (1 / (steps - 1)))
        return np.maximum(others, shift + sigma * generator.normal(size=draws))

    events = telling_events(largest(1.0), largest(2.0), 1e-3)
    audited = max(event.epsilon(DELTA) for event in events)
    claimed = accounting.epsilon(sigma, 1 / steps, steps, DELTA)
    assert 1.5 < claimed < 1.55
    assert 3 < audited < fixed_size_epsilon(sigma, 1 / steps, steps, DELTA)


def test_records_sampled_too_often_are_found() -> None:
    def twice(training: Any) -> None:
        loaded = training.loader

        def loader(dataset: Any) -> Any:
            batches = loaded(dataset)
            sampler = batches._sampler
            batches._sampler = type(sampler)(sampler.dataset_size, 2 * sampler.sample_rate, sampler.secret)
            return batches

        training.loader = loader

    plan = make_plan(batch_size=100, steps=20)
    audit = audit_step(plan, draws=1000, microbatch_size=None, privatize=faults.planted(twice))
    assert "sampling, how often" in statistics(audit)
    assert audit.epsilon_lower > 1.5 * audit.epsilon_claimed


# ---- What the worlds are made of


@pytest.mark.parametrize("filter", [NoFilter(), C5, C5_SEPARATE, LowPass(a=[1, -0.5], b=[0.3, 0.2])], ids=repr)
def test_canaries_contribute_what_they_are_meant_to(filter: Filter) -> None:
    """Almost without noise: absent ones nothing, others the whole sensitivity, the filter undone."""
    plan = make_plan(dataset_size=300, batch_size=300, steps=3, noise_multiplier=1e-4, accountant="rdp")
    found = draw(plan, filter, 3, 150, 100, privatize, np.random.default_rng(0), 0, lambda done, of: None)
    x_DT = found.released.sum(2) / math.sqrt(3)
    assert np.abs(x_DT[found.world == ABSENT]).max() < 0.02
    steady = x_DT[(found.world == PRESENT) & (found.kind == STEADY)]
    np.testing.assert_allclose(steady, 1.0, atol=0.02)
    if filter.lookahead is not None:
        flipping = x_DT[(found.world == PRESENT) & (found.kind == FLIPPING)]
        np.testing.assert_allclose(flipping[:, 0], 1.0, atol=0.02)
        np.testing.assert_allclose(flipping[:, 1:], -9.0 if filter.clip == "separate" else -1.0, atol=0.02)


# ---- Bounds


def test_proportions_against_the_binomial() -> None:
    for successes, trials in ((0, 50), (7, 50), (50, 50)):
        low, high = proportion_above(successes, trials, 1e-3), proportion_below(successes, trials, 1e-3)
        if successes:
            assert stats.binom.sf(successes - 1, trials, low) == pytest.approx(1e-3)
        if successes < trials:
            assert stats.binom.cdf(successes, trials, high) == pytest.approx(1e-3)


def test_scale_bound_covers() -> None:
    """5% of 2,000 bounds fail to cover, give or take; more than 160 would have probability 1e-8."""
    generator = np.random.default_rng(1)
    squares = generator.chisquare(40, size=2000) / 40
    failures = sum(scale_below(float(square), 40, 0.05) < 1 for square in squares)
    assert stats.binom.sf(160, 2000, 0.05) < 1e-8
    assert 50 < failures <= 160


def test_events_never_exceed_the_truth_and_come_near() -> None:
    """N(1, 1) against N(0, 1): bounds below the exact divergence for all events, at 1e-6; and not far below."""
    generator = np.random.default_rng(2)
    events = telling_events(generator.normal(size=30_000), generator.normal(size=30_000) + 1, 1e-6)
    for epsilon in (0.0, 0.5):
        exact = accounting.delta(1.0, 1.0, 1, epsilon)
        best = max(event.divergence(epsilon) for event in events)
        assert 0.7 * exact < best
        assert best <= exact


def test_an_exact_difference_of_atoms_is_found() -> None:
    events = telling_events(np.zeros(1000), np.ones(1000), 1e-3)
    assert max(event.divergence(0.0) for event in events) > 0.96


def test_an_event_is_taken_to_the_noise_that_allows_it() -> None:
    claim = Claim(make_plan(noise_multiplier=2.0))
    weaker = accounting.delta(1.0, 1.0, 2, 1.0)
    event = Event(0.0, math.inf, False, likely=weaker + math.e * 0.1, unlikely=0.1)
    assert claim.broken_by(event, 2) is not None
    assert 1.0 <= claim.noise_of(event, 1.0, 2) < 1.01


# ---- One run


def test_one_run_bound_against_the_formula() -> None:
    """β + 2mδ max_i P(v > W >= v - i) / i, term by term."""
    m, r, v, epsilon, delta = 60, 40, 31, 0.7, 1e-3
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    law = [math.comb(r, k) * right**k * (1 - right) ** (r - k) for k in range(r + 1)]
    slope = max(sum(law[v - i : v]) / i for i in range(1, v + 1))
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(sum(law[v:]) + 2 * m * delta * slope)


def test_one_run_bound_holds_for_randomised_response() -> None:
    """Each coin answered truly with odds e: ε = 1. A 95% bound above 1 in more than 5% + 1e-6's worth is a defect."""
    generator = np.random.default_rng(4)
    right = math.e / (1 + math.e)
    bounds = [one_run_epsilon(1000, 1000, int(k), 0.0, 0.05) for k in generator.binomial(1000, right, size=400)]
    assert stats.binom.sf(45, 400, 0.05) < 1e-6
    assert sum(bound > 1 for bound in bounds) <= 45
    assert np.median(bounds) > 0.8


def test_one_run_finds_the_absence_of_noise_and_little_else() -> None:
    honest = audit_run(seed=0)
    less = audit_run(privatize=faults.less_noise)
    plan = make_plan(dataset_size=4000, batch_size=4000, steps=1, noise_multiplier=2.0)
    bare = audit_run(plan, privatize=faults.planted(lambda training: faults._noise(training, factor=0.1)))
    assert honest.passed
    assert 0.5 < honest.epsilon_lower < 2.5
    assert less.passed  # a gross fault to the two-world audit, invisible here
    assert not bare.passed
    other = audit_run(kind="input", view="final-model", canaries=500, seed=0)
    assert other.passed
    assert other.epsilon_lower < other.epsilon_claimed


# ---- Refusals and the command line


def test_refusals() -> None:
    with pytest.raises(AuditError, match="steps=5"):
        audit_step(make_plan(), steps=5)
    with pytest.raises(AuditError, match="give a plan"):
        audit_step(steps=2)
    with pytest.raises(AuditError, match="draws=10"):
        audit_step(draws=10)
    with pytest.raises(AuditError, match="confidence"):
        audit_step(confidence=1.0)
    with pytest.warns(NotPrivateWarning):
        nothing = make_plan(noise_multiplier=0.0)
    with pytest.raises(AuditError, match="claims nothing"):
        audit_step(nothing)
    with pytest.raises(AuditError, match="canaries=5000"):
        audit_run(make_plan(), canaries=5000)


def test_the_audit_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    audit_step(make_plan(dataset_size=400, batch_size=400), draws=400, microbatch_size=None)
    assert torch.equal(torch.rand(3), expected)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "--draws", "400", "--noise-multiplier", "1", "--dataset-size", "800", "--seed", "1"]
    file, picture = tmp_path / "audit.json", tmp_path / "audit.png"
    assert run([*arguments, "--json", str(file), "--plot", str(picture)]) == 0
    assert "passed" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert 0 < report["epsilon_lower"] <= report["epsilon_claimed"]
    assert report["confidence"] == 0.999
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(["audit", "--method", "neither"]) == 2
    assert run([*arguments, "--json", str(tmp_path / "nowhere" / "audit.json")]) == 2


def test_command_line_says_when_an_audit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from diskdp.private import PrivateTraining

    honest = PrivateTraining.sensitivity.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(PrivateTraining, "sensitivity", property(lambda self: 0.5 * honest(self)))
    assert run(["audit", "--draws", "400", "--noise-multiplier", "1", "--dataset-size", "800"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_a_filter_that_changes_with_its_outputs_is_refused() -> None:
    """Its outputs are no fixed combination of the gradients before it, and would look like too little noise."""
    with pytest.raises(AuditError, match="changes with what was released"):
        audit_step(make_plan(), filter=DiSK(gain="adaptive"), draws=300)
