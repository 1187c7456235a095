"""Plans: what they resolve, what they refuse, and that a written one reads back unchanged or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import time
import warnings
from typing import Any

import numpy as np
import pytest

from diskdp import accounting
from diskdp.errors import NotPrivateWarning, PlanError, TruncationWarning, WeakDeltaWarning
from diskdp.plan import Plan, epsilon_by_epoch

NAMED: dict[str, Any] = {"dataset_size": 10_000, "batch_size": 500, "epochs": 5, "epsilon": 2.0, "delta": 1e-5}


def changed(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**NAMED, **changes}.items() if value is not None}


def test_all_four_numbers_are_resolved() -> None:
    plan = Plan(**NAMED)
    assert (plan.steps, plan.epochs, plan.epsilon, plan.sample_rate) == (100, 5.0, 2.0, 0.05)
    assert plan.noise_multiplier == accounting.calibrate(2.0, 0.05, 100, 1e-5)
    assert 1.99 < plan.epsilon_after(100) <= 2.0
    assert plan.is_private

    by_noise = Plan(**changed(epsilon=None, noise_multiplier=1.5, epochs=None, steps=100))
    assert by_noise.epochs == 5.0
    assert by_noise.epsilon == by_noise.epsilon_after(100) == accounting.epsilon(1.5, 0.05, 100, 1e-5)


@pytest.mark.parametrize(
    ("dataset_size", "batch_size", "epochs", "steps"),
    [
        (1000, 100, 1.1, 11),  # 1.1 * 1000 / 100 is 11.000000000000002
        (1000, 100, 0.3, 3),
        (1000, 300, 1, 4),
        (32_561, 512, 10, 636),
        (1000, 1000, 7, 7),
        (1000, 500, 0.01, 1),
        (3, 1, 1 / 3, 1),
    ],
)
def test_steps_are_the_epochs_rounded_up(dataset_size: int, batch_size: int, epochs: float, steps: int) -> None:
    plan = Plan(dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, noise_multiplier=2.0, delta=1e-6)
    assert plan.steps == steps
    assert plan.epochs == epochs


def test_steps_survive_epochs_and_back() -> None:
    for steps in range(1, 400, 7):
        plan = Plan(dataset_size=32_561, batch_size=512, steps=steps, noise_multiplier=50.0, delta=1e-6)
        again = Plan(dataset_size=32_561, batch_size=512, epochs=plan.epochs, noise_multiplier=50.0, delta=1e-6)
        assert again.steps == steps


def test_full_batch() -> None:
    plan = Plan(dataset_size=50, batch_size=50, steps=4, noise_multiplier=4.0, delta=1e-3)
    assert plan.sample_rate == 1.0
    assert plan.epsilon == accounting.epsilon(2.0, 1.0, 1, 1e-3)  # four releases are one of half the noise


def test_epsilon_after() -> None:
    plan = Plan(**NAMED)
    assert plan.epsilon_after(0) == 0
    assert plan.epsilon_after(1) < plan.epsilon_after(np.int64(50)) < plan.epsilon_after(150)
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(PlanError, match="steps must be a whole number, zero or more"):
            plan.epsilon_after(wrong)


def test_rdp_is_selectable_and_looser() -> None:
    assert Plan(**changed(accountant="rdp")).noise_multiplier > Plan(**NAMED).noise_multiplier * 1.01


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accountant": "rdp", "clipping": "per-layer", "unit": "patient é", "max_grad_norm": 0.1},
        {"epsilon": None, "noise_multiplier": 1 / 3, "epochs": None, "steps": 7},
        {"epochs": 0.7, "batch_size": 10_000},
        {"epsilon": math.inf, "max_grad_norm": math.inf},
    ],
)
@pytest.mark.filterwarnings("ignore::diskdp.errors.NotPrivateWarning")
def test_json_round_trip_without_calibrating_again(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(**changed(**changes))
    text = plan.to_json()

    def refuse(*_: object) -> float:
        raise AssertionError("calibrated again")

    monkeypatch.setattr(accounting.Mechanism, "calibrate", refuse)
    again = Plan.from_json(text)
    assert again == plan
    assert again.noise_multiplier.hex() == plan.noise_multiplier.hex()
    assert again.to_json() == text
    assert again.fingerprint == plan.fingerprint
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.7}, "claims epsilon=2 but noise_multiplier=0.7 spends"),
        ({"epsilon": 1.9}, "claims epsilon=1.9 but"),
        ({"steps": 101}, "5 epochs are not 101 steps"),
        ({"epochs": 6}, "6 epochs are not 100 steps"),
        ({"epochs": "inf"}, "inf epochs are not 100 steps"),
        ({"batch_size": 20_000}, "larger than dataset_size"),
        ({"batch_size": 500.0}, "batch_size must be a whole number"),
        ({"delta": 2}, "delta must be"),
        ({"delta": "1e-5"}, "delta must be a number"),
        ({"epsilon": None}, "epsilon must be a number"),
        ({"sampling": "fixed-size"}, "no guarantee under adjacency='add-remove'"),
        ({"noise": "correlated"}, "not built yet"),
        ({"batch_size": None}, "batch_size must be a whole number"),
        ({"steps": None}, "steps must be a whole number"),
        ({"noise_multiplier": None}, "noise_multiplier must be a number"),
        ({"max_batch_size": 600}, "max_batch_size=600 has no meaning"),
        ({"examples_per_unit": 0}, "examples_per_unit must be positive"),
        ({"examples_per_unit": 3}, "claims epsilon=2 but"),
        ({"paper_accounting": 1}, "paper_accounting must be True or False"),
        ({"clipping": ["flat"]}, "clipping=\\['flat'\\] is unknown"),
        ({"format": "diskdp-plan/1"}, "of format 'diskdp-plan/1'; this version reads 'diskdp-plan/2'"),
        ({"secret": 1}, "missing or unknown entries: secret"),
    ],
)
def test_tampered_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    values = {**json.loads(Plan(**NAMED).to_json()), **changes}
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not a plan"), ("[]", "object was expected"), ("{}", "of format None")]
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_missing_entry_is_refused() -> None:
    values = json.loads(Plan(**NAMED).to_json())
    del values["unit"]
    with pytest.raises(PlanError, match="missing or unknown entries: unit"):
        Plan.from_json(json.dumps(values))


def test_fingerprint_identifies_the_plan() -> None:
    plan = Plan(**NAMED)
    assert plan.fingerprint == Plan(**NAMED).fingerprint
    others = [{"epochs": 6}, {"unit": "patient"}, {"clipping": "automatic"}, {"max_grad_norm": 2.0}, {"delta": 2e-5}]
    prints = {plan.fingerprint, *(Plan(**changed(**other)).fingerprint for other in others)}
    assert len(prints) == 1 + len(others)
    assert all(len(each) == 64 and int(each, 16) for each in prints)


def test_a_plan_is_a_value() -> None:
    plan = Plan(**NAMED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epsilon = 3.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(Plan(**NAMED))
    assert "noise_multiplier=" in repr(plan)
    with pytest.raises(TypeError):
        Plan(10_000, 500)  # type: ignore[misc]
    numpy_plan = Plan(**changed(dataset_size=np.int64(10_000), batch_size=np.int32(500), epsilon=np.float64(2)))
    assert numpy_plan == plan
    assert numpy_plan.to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0}, "epsilon must be positive"),
        ({"epsilon": -1.0}, "epsilon must be positive"),
        ({"epsilon": math.nan}, "epsilon must be a number"),
        ({"epsilon": "8"}, "epsilon must be a number"),
        ({"delta": 0.0}, "delta must be strictly between 0 and 1"),
        ({"delta": 1.0}, "delta must be strictly between 0 and 1"),
        ({"delta": math.nan}, "delta must be a number"),
        ({"batch_size": 10_001}, "batch_size=10001 is larger than dataset_size=10000"),
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"dataset_size": 10_000.5}, "dataset_size must be a whole number"),
        ({"dataset_size": True}, "dataset_size must be a whole number"),
        ({"dataset_size": -5}, "dataset_size must be positive"),
        ({"epochs": None, "steps": 0}, "steps must be positive"),
        ({"epochs": None, "steps": -3}, "steps must be positive"),
        ({"epochs": None, "steps": 2.5}, "steps must be a whole number"),
        ({"epochs": 0}, "epochs must be positive and finite"),
        ({"epochs": math.inf}, "epochs must be positive and finite"),
        ({"steps": 10}, "exactly one of epochs and steps"),
        ({"epochs": None}, "exactly one of epochs and steps"),
        ({"noise_multiplier": 1.0}, "exactly one of epsilon and noise_multiplier"),
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier must be finite and not negative"),
        ({"epsilon": None, "noise_multiplier": math.inf}, "noise_multiplier must be finite and not negative"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a number"),
        ({"max_grad_norm": math.inf}, "max_grad_norm=inf .* needs noise_multiplier=0"),
        ({"unit": " "}, "unit is empty"),
        ({"clipping": "adaptive", "quantile_noise": 0.5}, "would cost more than the plan pays for"),
        ({"clipping": "adaptive", "target_quantile": 1.0}, "strictly between 0 and 1"),
        ({"clipping": "adaptive", "noise": "discrete"}, "no grid"),
        ({"target_quantile": 0.5}, "no meaning for clipping='flat'"),
        ({"clipping": "soft"}, "clipping='soft' is unknown"),
        ({"sampling": "balls-in-bins"}, "sampling='balls-in-bins' is not built yet, since the bounds at hand"),
        ({"sampling": "uniform"}, "sampling='uniform' is unknown"),
        ({"adjacency": "replace"}, "adjacency='replace' is unknown"),
        ({"noise": "correlated"}, "noise='correlated' is not built yet"),
        ({"paper_accounting": "yes"}, "paper_accounting must be True or False"),
        ({"paper_accounting": True}, "needs sampling='fixed-size', adjacency='add-remove'"),
        ({"examples_per_unit": 1.5}, "examples_per_unit must be a whole number"),
        ({"examples_per_unit": 10_001}, "examples_per_unit=10001 is larger than dataset_size=10000"),
        ({"max_batch_size": 600}, "max_batch_size=600 has no meaning for sampling='poisson'"),
        ({"sampling": "truncated-poisson"}, "needs max_batch_size"),
        ({"sampling": "truncated-poisson", "max_batch_size": 499}, "max_batch_size=499 is smaller than batch_size=500"),
        ({"sampling": "truncated-poisson", "max_batch_size": 700, "accountant": "rdp"}, "use accountant='pld'"),
        ({"sampling": "fixed-size"}, "exactly batch_size records of N can be drawn only if N stays; use adjacency"),
        ({"sampling": "fixed-size", "adjacency": "zero-out"}, "adjacency='replace-one' alone, which covers 'zero-out'"),
        ({"sampling": "shuffled"}, "moves the others to other batches; use adjacency='zero-out' or 'replace-one'"),
        ({"examples_per_unit": 2, "accountant": "rdp"}, "no Renyi accounting here with Poisson batches"),
        ({"examples_per_unit": 2, "adjacency": "replace-one"}, "not been worked out for adjacency='replace-one'"),
        (
            {"examples_per_unit": 2, "adjacency": "replace-one", "sampling": "fixed-size"},
            "not been worked out for sampling='fixed-size'",
        ),
        ({"accountant": "moments"}, "accountant='moments' is unknown"),
    ],
)
def test_bad_input_gets_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Plan(**changed(**changes))
    assert "\n" not in str(caught.value)


def test_privacy_is_turned_off_only_by_name_and_loudly() -> None:
    with pytest.warns(NotPrivateWarning, match="nothing is private") as caught:
        plan = Plan(**changed(epsilon=math.inf, max_grad_norm=math.inf))
    assert caught[0].filename == __file__
    assert (plan.noise_multiplier, plan.epsilon, plan.is_private) == (0.0, math.inf, False)
    assert plan.epsilon_after(0) == 0
    assert plan.epsilon_after(1) == math.inf
    with pytest.warns(NotPrivateWarning):
        plan = Plan(**changed(epsilon=None, noise_multiplier=0))
    assert (plan.epsilon, plan.is_private) == (math.inf, False)
    assert [row.epsilon for row in epsilon_by_epoch(plan)] == [math.inf] * 5
    with pytest.raises(PlanError, match="max_grad_norm=inf"):
        Plan(**changed(epsilon=math.inf, max_grad_norm=math.inf, clipping="normalized"))


def test_weak_delta_warns_and_a_good_plan_is_silent() -> None:
    with pytest.warns(WeakDeltaWarning, match="delta=0.0001 is not below 1/dataset_size=0.0001"):
        Plan(**changed(delta=1e-4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Plan(**NAMED)


def test_epsilon_by_epoch() -> None:
    plan = Plan(**changed(epochs=2.5))
    rows = epsilon_by_epoch(plan)
    assert [(row.epochs, row.steps) for row in rows] == [(1.0, 20), (2.0, 40), (2.5, 50)]
    assert [row.epsilon for row in rows] == [plan.epsilon_after(row.steps) for row in rows]


@pytest.mark.parametrize("epochs", [0.2, 1, 49, 50, 51, 99, 101, 1000])
def test_epsilon_by_epoch_is_short_and_ends_at_the_end(epochs: float) -> None:
    plan = Plan(dataset_size=1000, batch_size=300, epochs=epochs, noise_multiplier=9.0, delta=1e-4, accountant="rdp")
    rows = epsilon_by_epoch(plan)
    assert len(rows) <= 50
    assert (rows[-1].epochs, rows[-1].steps, rows[-1].epsilon) == (plan.epochs, plan.steps, plan.epsilon)
    steps = [row.steps for row in rows]
    assert steps == sorted(set(steps))
    assert all(row.epsilon <= after.epsilon for row, after in itertools.pairwise(rows))
    assert len(epsilon_by_epoch(plan, max_rows=3)) <= 3


SETTINGS: dict[str, dict[str, Any]] = {
    "zero-out": {"adjacency": "zero-out"},
    "replaced": {"adjacency": "replace-one"},
    "truncated": {"sampling": "truncated-poisson", "max_batch_size": 700, "adjacency": "zero-out"},
    "fixed-size": {"sampling": "fixed-size", "adjacency": "replace-one"},
    "fixed-size by rdp": {"sampling": "fixed-size", "adjacency": "replace-one", "accountant": "rdp"},
    "shuffled": {"sampling": "shuffled", "adjacency": "zero-out"},
    "people": {"examples_per_unit": 3, "unit": "person"},
    "discrete": {"noise": "discrete"},
    "secure": {"noise": "secure"},
}
EACH = pytest.mark.parametrize("changes", [pytest.param(changes, id=name) for name, changes in SETTINGS.items()])


@EACH
def test_every_setting_is_planned_spent_and_read_back(changes: dict[str, Any]) -> None:
    plan = Plan(**changed(**changes))
    assert 1.99 < plan.epsilon_after(plan.steps) <= 2.0
    assert plan.delta_after(plan.steps, 2.0) <= plan.delta
    assert plan.delta_after(plan.steps, 1.0) > plan.delta
    assert plan.delta_after(0, 1.0) == 0
    assert plan.epsilon_of({1: plan.steps}) == plan.epsilon_after(plan.steps)
    assert plan.epsilon_of({1: plan.steps - 1, 3: 1}) > plan.epsilon_after(plan.steps)
    assert plan.is_guarantee
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.mechanism == plan.mechanism
    assert again.fingerprint == plan.fingerprint != Plan(**NAMED).fingerprint


def test_zero_out_needs_what_add_remove_does_and_replaced_records_more() -> None:
    plan = Plan(**NAMED)
    assert Plan(**changed(adjacency="zero-out")).noise_multiplier == plan.noise_multiplier
    replaced = Plan(**changed(adjacency="replace-one")).noise_multiplier
    assert plan.noise_multiplier < replaced < 2 * plan.noise_multiplier
    assert Plan(**changed(noise="discrete")).noise_multiplier == plan.noise_multiplier


def test_shuffled_epochs_have_a_last_smaller_batch() -> None:
    shuffled = {"sampling": "shuffled", "adjacency": "zero-out", "batch_size": 300}
    plan = Plan(**changed(**shuffled))
    assert (plan.steps_per_epoch, plan.steps, plan.epochs) == (34, 170, 5.0)
    assert plan.epsilon_after(1) == plan.epsilon_after(34) < plan.epsilon_after(35)
    assert Plan(**changed(**shuffled, epochs=None, steps=171)).epochs == 171 / 34
    assert Plan(**changed(**shuffled, epochs=0.5)).steps == 17
    assert [row.steps for row in epsilon_by_epoch(plan)] == [34, 68, 102, 136, 170]
    whole = Plan(dataset_size=10, batch_size=10, steps=5, noise_multiplier=plan.noise_multiplier, delta=1e-5)
    assert plan.epsilon_after(plan.steps) == pytest.approx(whole.epsilon, rel=1e-12)
    assert Plan(**changed(batch_size=300)).steps == 167  # Poisson batches: as many as have that many expected records


def test_releases_are_checked() -> None:
    plan = Plan(**NAMED)
    assert plan.epsilon_of({}) == 0
    assert plan.epsilon_of({np.int64(1): np.int64(3)}) == plan.epsilon_after(3)
    for wrong in ({0: 1}, {-1: 2}, {1: -1}, {1.5: 2}, {1: 0.5}, {True: 1}):
        with pytest.raises(PlanError, match="must be"):
            plan.epsilon_of(wrong)


@EACH
def test_the_most_steps_that_fit(changes: dict[str, Any]) -> None:
    solved = Plan(**changed(**changes, epochs=None, noise_multiplier=4.0))
    assert (solved.epsilon, solved.noise_multiplier) == (2.0, 4.0)
    assert solved.epsilon_after(solved.steps) <= 2.0 < solved.epsilon_after(solved.steps + solved.steps // 5000 + 1)
    assert Plan.from_json(solved.to_json()) == solved


@EACH
@pytest.mark.parametrize("length", [{"epochs": None, "steps": 60}, {"epochs": 3.0}])
@pytest.mark.filterwarnings("ignore::diskdp.errors.TruncationWarning")
def test_the_largest_batch_that_fits(changes: dict[str, Any], length: dict[str, Any]) -> None:
    solved = Plan(**changed(**changes, **length, batch_size=None, noise_multiplier=4.0))
    assert (solved.epsilon, solved.noise_multiplier) == (2.0, 4.0)
    assert solved.epsilon_after(solved.steps) <= 2.0
    limit = changes.get("max_batch_size", 10_000)
    if solved.batch_size < limit:
        larger = {**changes, **length, "batch_size": solved.batch_size + 1 + solved.batch_size // 200}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert Plan(**changed(**larger, epsilon=None, noise_multiplier=4.0)).epsilon > 2.0
    assert Plan.from_json(solved.to_json()) == solved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.0}, "with all given, nothing is left to solve for"),
        ({"noise_multiplier": 1.0, "epochs": None, "batch_size": None}, "do not fix both length and batch_size"),
        ({"batch_size": None}, "give batch_size; it may be left out only if epsilon and noise_multiplier"),
        ({"epsilon": None, "batch_size": None, "noise_multiplier": 1.0}, "give batch_size"),
        ({"epochs": None}, "both may be left out only if epsilon and noise_multiplier are both given"),
        ({"epsilon": None}, "give exactly one of epsilon and noise_multiplier; got neither"),
        ({"epochs": None, "epsilon": math.inf, "noise_multiplier": 1.0}, "without privacy nothing limits"),
        ({"epochs": None, "noise_multiplier": 0.0}, "without privacy nothing limits"),
        ({"epochs": None, "epsilon": 0.1, "noise_multiplier": 0.5}, "not even one step"),
        ({"batch_size": None, "epsilon": 0.01, "noise_multiplier": 0.3}, "not even batch_size=1"),
        ({"epochs": None, "batch_size": 1, "noise_multiplier": 500.0, "epsilon": 9.0}, "more than 10,000,000 steps"),
    ],
)
def test_what_cannot_be_solved_says_what_to_give(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**changed(**changes))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"adjacency": "replace-one"},
        {"sampling": "fixed-size", "adjacency": "replace-one"},
        {"sampling": "truncated-poisson", "max_batch_size": 700, "adjacency": "zero-out"},
    ],
)
def test_each_number_is_found_in_a_second_and_a_half_up_to_a_hundred_thousand_steps(
    setting: dict[str, Any], accountant: str
) -> None:
    if accountant == "rdp" and "max_batch_size" in setting:
        pytest.skip("refused: there is no Renyi accounting of truncated batches")
    base = {"dataset_size": 100_000, "delta": 1e-6, "accountant": accountant, **setting}
    plan = Plan(**base, batch_size=500, steps=100_000, epsilon=3.0)
    sigma = plan.noise_multiplier
    solves = {
        "noise": {"batch_size": 500, "steps": 99_999, "epsilon": 3.0},
        "epsilon": {"batch_size": 500, "steps": 99_998, "noise_multiplier": sigma},
        "steps": {"batch_size": 500, "epsilon": 3.0, "noise_multiplier": sigma},
        "batch": {"steps": 100_000, "epsilon": 3.0, "noise_multiplier": sigma},
    }
    for name, given in solves.items():
        start = time.process_time()
        solved = Plan(**base, **given)  # type: ignore[arg-type]
        seconds = time.process_time() - start
        assert seconds < 1.5, f"{name} took {seconds:.2f} s"
        assert solved.epsilon_after(solved.steps) <= 3.0 * (1 + 1e-3)
        if name == "steps":
            assert 99_980 <= solved.steps <= 100_400
        if name == "batch":
            assert 499 <= solved.batch_size <= 503


def test_paper_accounting_is_no_guarantee() -> None:
    with pytest.warns(NotPrivateWarning, match="epsilon=2 is not a guarantee") as caught:
        plan = Plan(**changed(sampling="fixed-size", paper_accounting=True))
    assert caught[0].filename == __file__
    assert plan.noise_multiplier == Plan(**NAMED).noise_multiplier
    assert plan.is_private
    assert not plan.is_guarantee
    with pytest.warns(NotPrivateWarning, match="not a guarantee"):
        assert Plan.from_json(plan.to_json()) == plan


def test_a_cap_near_the_batch_size_warns() -> None:
    truncated = {"sampling": "truncated-poisson", "adjacency": "zero-out"}
    with pytest.warns(TruncationWarning, match="max_batch_size=600 is within 6 .* raise it to 631") as caught:
        Plan(**changed(**truncated, max_batch_size=600))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Plan(**changed(**truncated, max_batch_size=631))
        Plan(**changed(**truncated, max_batch_size=10_000, batch_size=10_000))
