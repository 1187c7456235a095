"""Nothing is lost: runs that are killed anywhere go on bit for bit, and what was seen was charged before."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp import NoFilter, Plan, PrivateTraining, privatize
from diskdp.errors import (
    BudgetExhausted,
    CheckpointError,
    GradientError,
    NewKeyWarning,
    NoiseError,
    NonFiniteError,
    NotPrivateWarning,
    OtherUpdateWarning,
    StuckWeightsWarning,
)
from diskdp.ledger import Account, Ledger, open_account, read_account
from diskdp.noise import Secret

N = 40
ROOT = Path(__file__).parent.parent


def classify(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 6, generator=generator), torch.randint(0, 4, (N,), generator=generator))


def training(folder: Path, noise: str = "secure", steps: int = 8, optimizer: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    plan = Plan(dataset_size=N, batch_size=10, steps=steps, noise_multiplier=2.0, delta=1e-3, noise=noise)
    kept = {"key_path": folder / "key"} if noise != "gaussian" and "seed" not in settings else {}
    made = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    settings = {"filter": NoFilter(), "ledger_path": folder / "ledger.jsonl", **kept, **settings}
    return privatize(model, made, plan, loss_fn=classify, **settings)


def some_steps(private: PrivateTraining, count: int) -> list[Tensor]:
    for done, batch in enumerate(private.loader(data()), 1):
        private.step(batch)
        if done == count:
            break
    return [p.detach().clone() for p in private.model.parameters()]


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("kind", "kills"), [("secure", 100), ("discrete", 20), ("adaptive", 20), ("shuffled", 20)])
def test_a_run_killed_at_a_hundred_random_instants_ends_like_an_undisturbed_one(
    kind: str, kills: int, tmp_path: Path
) -> None:
    """Dropout, augmentation, AdamW, a schedule, DiSK's two states; every result that was seen was charged."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed", str(tmp_path), str(kills), "1", kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == [], done.stderr
    assert found["kills"] >= kills
    assert len(found["places"]) >= kills // 10  # killed after many different steps


# --- steps that are run again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "settings"), [("secure", {}), ("discrete", {}), ("gaussian", {"seed": 3})])
def test_a_step_that_is_run_again_comes_out_the_same_and_costs_nothing(
    noise: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    private = training(tmp_path, noise, **settings)
    start = private.state_dict()
    first = some_steps(private, 3)
    for again in (private, training(tmp_path, noise, **settings)):
        again.load_state_dict(start)
        assert all(torch.equal(a, b) for a, b in zip(first, some_steps(again, 3)))
        assert again.steps_charged == 3
        assert again.epsilon == again.plan.epsilon_after(3)


def test_another_result_of_the_same_sample_is_charged_as_one_sample_released_twice(tmp_path: Path) -> None:
    """Both results come from one draw of the batch: jointly one sampled event with √2 less noise, not two events."""
    private = training(tmp_path)
    some_steps(private, 2)
    other = training(tmp_path)
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(1e-3)  # another library version, a forked folder, ...
    some_steps(other, 1)
    assert dict(other._ledger.releases) == {1: 1, 2: 1}
    assert other.epsilon == pytest.approx(other.plan.epsilon_of({1: 1, 2: 1}), rel=1e-9)
    assert other.epsilon > other.plan.epsilon_after(3)


def test_noise_of_another_sum_is_independent(tmp_path: Path) -> None:
    """Two sums under a kept key at the same step: their difference must not show."""
    released = []
    for shift in (0.0, 1e-3):
        private = training(tmp_path)
        with torch.no_grad():
            next(iter(private.model.parameters())).add_(shift)
        before = [p.detach().clone() for p in private.model.parameters()]
        after = some_steps(private, 1)
        released.append(torch.cat([(b - a).flatten() for a, b in zip(after, before)]) / 0.1)
    std = private.plan.noise_multiplier / private.plan.batch_size
    difference = (released[0] - released[1]) / (std * math.sqrt(2))  # 59 normals, but for the sums' small difference
    assert difference.square().mean() > 0.3  # P < 1e-6 for a chi-square of 59 degrees; 0 under shared noise


def test_the_budget_counts_releases_of_one_sample_by_what_they_cost(tmp_path: Path) -> None:
    private = training(tmp_path, steps=4)
    some_steps(private, 4)
    other = training(tmp_path, steps=4)
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(1e-3)
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(BudgetExhausted):
        some_steps(other, 1)
    assert other.steps_charged == 4
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters()))


def test_all_steps_again_after_the_last_one(tmp_path: Path) -> None:
    private = training(tmp_path, steps=4)
    start = private.state_dict()
    first = some_steps(private, 4)
    private.load_state_dict(start)
    assert all(torch.equal(a, b) for a, b in zip(first, some_steps(private, 4)))
    assert private.steps_charged == 4


def test_the_ledger_has_the_result_before_the_weights_move(tmp_path: Path) -> None:
    class Watching(torch.optim.SGD):
        lines: list[int] = []  # noqa: RUF012

        def step(self, closure: Any = None) -> Any:
            self.lines.append(len((tmp_path / "ledger.jsonl").read_text().splitlines()))
            return super().step(closure)

    some_steps(training(tmp_path, optimizer=Watching), 3)
    assert Watching.lines == [1, 2, 3]


# --- the key ----------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    made = Secret.kept(tmp_path / "key")
    assert Secret.kept(tmp_path / "key") == made
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert not made.reproducible
    assert Secret.kept(tmp_path / "other").key != made.key


@pytest.mark.parametrize("text", ["", "diskdp-key/1", "diskdp-key/1 12", "diskdp-key/2 " + "00" * 32, "x" * 90])
def test_no_key(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(NoiseError, match="no key of a run"):
        Secret.kept(path)
    assert path.read_text() == text


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Secret.kept(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(NoiseError, match="read by others"):
        Secret.kept(tmp_path / "key")


def test_keys_that_would_not_be_safe(tmp_path: Path) -> None:
    with pytest.raises(NoiseError, match="does not depend on the sum"):
        training(tmp_path, "gaussian", key_path=tmp_path / "key")
    with pytest.raises(NoiseError, match="add ledger_path"):
        training(tmp_path, ledger_path=None)
    assert not (tmp_path / "key").exists()


def test_a_lost_key_is_replaced_and_its_steps_are_charged_again(tmp_path: Path) -> None:
    private = training(tmp_path)
    start = private.state_dict()
    first = some_steps(private, 3)
    (tmp_path / "key").unlink()
    other = training(tmp_path)
    with pytest.warns(NewKeyWarning, match="charged again"):
        other.load_state_dict(start)
    assert not any(torch.equal(a, b) for a, b in zip(first, some_steps(other, 3)))
    assert other.steps_charged == 6


# --- states -----------------------------------------------------------------------------------------------------------


def test_dropout_and_schedules_go_on(tmp_path: Path) -> None:
    def make() -> PrivateTraining:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        plan = Plan(dataset_size=N, batch_size=10, steps=8, noise_multiplier=2.0, delta=1e-3)
        return privatize(model, optimizer, plan, loss_fn=classify, scheduler=scheduler, seed=1)

    whole = some_steps(make(), 8)
    cut = make()
    some_steps(cut, 3)
    cut.save(tmp_path / "state")
    torch.rand(5)
    fresh = make()
    torch.rand(7)
    again = privatize.resume(
        tmp_path / "state", fresh.model, fresh.optimizer, loss_fn=classify, scheduler=fresh.scheduler, seed=1
    )
    assert again.optimizer.param_groups[0]["lr"] == cut.optimizer.param_groups[0]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(whole, some_steps(again, 5)))
    with pytest.raises(CheckpointError, match="there is none here"):
        privatize.resume(tmp_path / "state", fresh.model, fresh.optimizer, loss_fn=classify)


def test_schedulers_that_cannot_be(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    plan = Plan(dataset_size=N, batch_size=10, steps=8, noise_multiplier=2.0, delta=1e-3)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(GradientError, match="carries no noise"):
        privatize(model, optimizer, plan, loss_fn=classify, scheduler=plateau)  # type: ignore[arg-type]
    constant = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(GradientError, match="another optimizer"):
        privatize(model, optimizer, plan, loss_fn=classify, scheduler=constant)


def test_the_checkpoint_before_is_kept(tmp_path: Path) -> None:
    private = training(tmp_path)
    loader = iter(private.loader(data()))
    for _ in range(3):
        private.step(next(loader))
        private.save(tmp_path / "state.safetensors")
    for name, step in (("state.safetensors", 3), ("state.previous.safetensors", 2)):
        fresh = training(tmp_path)
        fresh = privatize.resume(
            tmp_path / name,
            fresh.model,
            fresh.optimizer,
            loss_fn=classify,
            filter=NoFilter(),
            ledger_path=tmp_path / "ledger.jsonl",
            key_path=tmp_path / "key",
        )
        assert fresh.steps_done == step


@pytest.mark.parametrize("name", ["truncated", "flipped", "empty"])
def test_damaged_checkpoints_are_refused_and_change_nothing(name: str, tmp_path: Path) -> None:
    private = training(tmp_path)
    some_steps(private, 2)
    private.save(tmp_path / "state")
    content = bytearray((tmp_path / "state").read_bytes())
    if name == "flipped":
        content[-3] ^= 4
    (tmp_path / "state").write_bytes(content if name == "flipped" else content[: len(content) // 2 * (name[0] == "t")])
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    fresh = training(tmp_path)
    before = [p.detach().clone() for p in fresh.model.parameters()]
    with pytest.raises(CheckpointError, match=r"damaged|not a whole checkpoint"):
        privatize.resume(tmp_path / "state", fresh.model, fresh.optimizer, loss_fn=classify, filter=NoFilter())
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.model.parameters()))
    assert (tmp_path / "ledger.jsonl").read_bytes() == ledger


def test_a_ledger_that_lost_entries_is_refused(tmp_path: Path) -> None:
    private = training(tmp_path)
    some_steps(private, 3)
    private.save(tmp_path / "state")
    del private
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_text("".join(lines[:2]))
    fresh = training(tmp_path)
    with pytest.raises(CheckpointError, match="cut short"):
        fresh.load_state_dict(_state(tmp_path / "state"))


def _state(path: Path) -> Any:
    from diskdp.checkpoint import load_tree

    return load_tree(path)["state"]


# --- shuffled epochs under a new secret -------------------------------------------------------------------------------


def shuffled(folder: Path | None = None, **settings: Any) -> PrivateTraining:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plan = Plan(
        dataset_size=N,
        batch_size=10,
        epochs=5,
        noise_multiplier=4.0,
        delta=1e-3,
        sampling="shuffled",
        adjacency="zero-out",
        noise=settings.pop("noise", "gaussian"),
    )
    if folder is not None:
        settings["ledger_path"] = folder / "ledger.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return privatize(model, optimizer, plan, loss_fn=classify, filter=NoFilter(), **settings)


@pytest.mark.parametrize("kept", [False, True])
def test_a_new_permutation_within_an_epoch_counts_as_an_epoch_more(kept: bool, tmp_path: Path) -> None:
    private = shuffled(tmp_path if kept else None)
    plan = private.plan
    some_steps(private, 6)  # one epoch and a half
    assert private.epsilon == plan.epsilon_after(8)
    private.load_state_dict(private.state_dict())
    some_steps(private, 2)  # each record once more in what is left of the second epoch, in another order
    assert private.epsilon == plan.epsilon_after(12)
    with pytest.raises(BudgetExhausted):
        some_steps(private, 9)
    assert private.epsilon <= plan.epsilon


def test_a_state_without_a_ledger_keeps_its_epochs() -> None:
    private = shuffled()
    some_steps(private, 6)
    other = shuffled()
    other.load_state_dict(private.state_dict())
    assert other.epsilon == other.plan.epsilon_after(8)
    some_steps(other, 1)
    assert other.epsilon == other.plan.epsilon_after(12)


def test_shuffled_trainings_on_one_ledger_count_each_order(tmp_path: Path) -> None:
    """A script that was cut off at step 6 and began anew, and two trainings that take turns."""
    first, again = shuffled(tmp_path), shuffled(tmp_path)
    some_steps(first, 6)
    some_steps(again, 1)
    assert again.epsilon == again.plan.epsilon_after(12)
    assert again.steps_charged == 7
    some_steps(first, 1)
    assert first.epsilon == first.plan.epsilon_after(12)  # still in its second order


def test_a_copied_key_and_a_new_one(tmp_path: Path) -> None:
    """As `diskdp copy` in the middle of an epoch: under the new key every record may come once more in it."""
    settings = {"noise": "secure", "key_path": tmp_path / "key"}
    private = shuffled(tmp_path, **settings)
    some_steps(private, 6)
    state = private.state_dict()
    (tmp_path / "key").unlink()
    with pytest.warns(NewKeyWarning):
        (copy := shuffled(tmp_path, **settings)).load_state_dict(state)
    some_steps(copy, 2)
    assert copy.epsilon == copy.plan.epsilon_after(12)


class Interrupted(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise KeyboardInterrupt


@pytest.mark.parametrize("failing", ["optimizer", "ledger"])
def test_a_step_that_fails_gives_up_its_secret_and_its_noise_together(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next loader draws another sample, and its noise comes from the same new secret."""

    def interrupted(self: Ledger, file: object, text: bytes) -> int:
        raise KeyboardInterrupt

    private = training(tmp_path, "gaussian", optimizer=Interrupted if failing == "optimizer" else None)
    if failing == "ledger":
        monkeypatch.setattr(Ledger, "_written", interrupted)
    used = []
    for _ in range(3):
        batch = next(iter(private.loader(data())))
        used.append((private._secret.key, private._noise._secret.key))
        with pytest.raises(KeyboardInterrupt):
            private.step(batch)
    assert all(sampling == noise for sampling, noise in used)
    assert len({sampling for sampling, _ in used}) == 3


# --- what may stop a run ----------------------------------------------------------------------------------------------


def test_a_noised_gradient_that_is_not_finite_stops_before_the_weights_move(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    plan = Plan(dataset_size=N, batch_size=1, steps=3, noise_multiplier=2e38, delta=1e-3)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        loss_fn=classify,
        filter=NoFilter(),
        ledger_path=tmp_path / "ledger.jsonl",
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError, match="weight"):
        some_steps(private, 3)
    assert private.steps_charged >= 1
    assert all(bool(p.isfinite().all()) for p in before)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Elsewhere(torch.optim.SGD):
    """Moves copies of the weights, as an optimizer does that was wrapped for another device."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.detach().clone().sub_(p.grad)


def test_weights_that_do_not_move_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(GradientError, match="not moved by 3 steps"):
        some_steps(training(tmp_path, optimizer=Elsewhere), 4)


def test_some_weights_that_do_not_move_are_named(tmp_path: Path) -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].grad = None
            return super().step(closure)

    with pytest.warns(StuckWeightsWarning, match=r"0\.weight: not moved"):
        some_steps(training(tmp_path, optimizer=Half), 4)


def test_a_learning_rate_of_zero_is_no_fault(tmp_path: Path, recwarn: Iterator[Any]) -> None:
    private = training(tmp_path)
    private.optimizer.param_groups[0]["lr"] = 0.0
    some_steps(private, 5)
    assert not [w for w in recwarn if issubclass(w.category, StuckWeightsWarning)]


def test_a_second_optimizer_step_does_nothing(tmp_path: Path) -> None:
    private = training(tmp_path, optimizer=torch.optim.Adam)
    after = some_steps(private, 2)
    private.optimizer.step()
    assert all(torch.equal(a, p) for a, p in zip(after, private.model.parameters()))


def test_ledgers_of_other_plans_are_refused(tmp_path: Path) -> None:
    some_steps(training(tmp_path), 1)
    with pytest.raises(CheckpointError, match="belongs to another plan"):
        training(tmp_path, steps=9)
    assert Ledger(tmp_path / "other.jsonl", "abc").spent == 0


def test_updates_of_ones_own_between_steps_are_noticed(tmp_path: Path, recwarn: Any) -> None:
    """A step along a gradient without noise; weights that are put back as they were (after an average's) are fine."""
    private = training(tmp_path)
    for batch in private.loader(data()):
        if private.steps_done == 2:
            held = [p.detach().clone() for p in private.model.parameters()]
            with torch.no_grad():
                for p, value in zip(private.model.parameters(), held):
                    p.zero_()
                    p.copy_(value)
        if private.steps_done == 4:
            classify(private.model, list(data().tensors)).mean().backward()
            private.optimizer.step()
        private.step(batch)
    found = [str(w.message) for w in recwarn if issubclass(w.category, OtherUpdateWarning)]
    assert len(found) == 1
    assert "between steps 3 and 4" in found[0]


def test_a_load_that_is_interrupted_leaves_no_secret_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between the weights and the new secret: the step that is due again must not have the noise that it had."""
    private = training(tmp_path, "gaussian")
    start = private.state_dict()
    some_steps(private, 1)
    before = private._secret.key

    def interrupted(self: Any, state: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(private._filter_state), "load_state_dict", interrupted)
        with pytest.raises(KeyboardInterrupt):
            private.load_state_dict(start)
    private.loader(data())
    assert private._secret.key != before


def test_shuffled_steps_without_noise_go_to_the_end() -> None:
    model = nn.Linear(6, 4)
    with pytest.warns(NotPrivateWarning):
        plan = Plan(
            dataset_size=N,
            batch_size=9,
            steps=7,
            noise_multiplier=0.0,
            delta=1e-3,
            sampling="shuffled",
            adjacency="zero-out",
        )
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=classify, filter=NoFilter())
    some_steps(private, 7)
    assert private.steps_done == 7


def test_a_run_of_an_account_that_is_cut_off_twice_before_it_saves(tmp_path: Path) -> None:
    """Its name is in no entry when it saves first, and in all of them afterwards."""
    open_account(tmp_path / "ledger.jsonl", Account(50.0, 1e-3))
    first = training(tmp_path)
    start = first.state_dict()
    weights = some_steps(first, 0 + 1)
    second = training(tmp_path)
    second.load_state_dict(start)
    assert all(torch.equal(a, b) for a, b in zip(weights, some_steps(second, 1)))
    third = training(tmp_path)
    third.load_state_dict(start)
    some_steps(third, 3)
    assert third.steps_charged == 3
    assert len(read_account(tmp_path / "ledger.jsonl")[1]) == 1


def test_a_copy_in_an_account_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Under a key of its own, with the past that it shares counted for both."""
    open_account(tmp_path / "ledger.jsonl", Account(50.0, 1e-3))
    original = training(tmp_path)
    some_steps(original, 3)
    state = original.state_dict()
    (tmp_path / "key").rename(tmp_path / "original's key")
    copy = training(tmp_path)
    with pytest.warns(NewKeyWarning):
        copy.load_state_dict(state)
    some_steps(copy, 5)
    assert copy.steps_done == 8
    assert copy.steps_charged == 8
    assert sorted(sum(counts.values()) for _, counts in read_account(tmp_path / "ledger.jsonl")[1]) == [3, 8]
