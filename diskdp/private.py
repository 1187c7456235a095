"""The step: batch -> clipped sum -> noise -> ledger entry -> filter -> optimizer.

Assumes that batches come from `PrivateTraining.loader`, which samples them the way the plan's accountant assumes.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from diskdp.accounting import composed_epsilon
from diskdp.backoff import add_all
from diskdp.checkpoint import load_tree, save_tree
from diskdp.clipping import Clipper
from diskdp.errors import (
    BudgetExhausted,
    CheckpointError,
    GradientError,
    MemoryLimitError,
    NewKeyWarning,
    NoiseError,
    OtherUpdateWarning,
    SamplingError,
    UncheckedUnitsWarning,
)
from diskdp.filters import DiSK, Filter, FollowsWeights, due_coefficients, started
from diskdp.gradients import (
    Clipped,
    Engine,
    LossFunction,
    Point,
    RandomState,
    Tuner,
    advance_buffers,
    choose,
    clip,
    clip_in_float64,
    refuse_modules,
)
from diskdp.ledger import Ledger, Release, samples
from diskdp.memory import (
    FRACTIONS,
    Fit,
    available_memory,
    free_unused,
    largest_fit,
    out_of_memory,
    parse_memory,
    peak_memory,
    shown_memory,
)
from diskdp.noise import DiscreteNoise, GaussianNoise, Grid, Secret, SecureNoise, bound_key, noise_source
from diskdp.plan import Plan
from diskdp.preflight import (
    Still,
    check_clipping,
    check_evaluations,
    check_finite,
    check_key,
    check_knowledge,
    check_losses,
    check_optimizer,
    check_same_model,
    check_scheduler,
    forms,
    some_of,
    warn_of_low_precision,
)
from diskdp.quantile import COUNT, QuantileThreshold
from diskdp.sampling import LogicalBatch, PrivateLoader, Units, sampler_for

_STATE_FORMAT = "diskdp-training/1"
_CHECKED_EXAMPLES = 8
_MEASUREMENTS = 4  # of memory at one size, at most


@dataclass(frozen=True)
class StepResult:
    """What the data holder may look at after a step. None of it is private: never release it.

    ``loss`` and ``median_norm`` are NaN for an empty batch, ``clipped_fraction`` is 0.
    """

    step: int
    loss: float
    batch_size: int
    clipped_fraction: float
    median_norm: float


class PrivateTraining:
    """A model, an optimizer and a plan in training. Made by `privatize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        loss_fn: LossFunction,
        filter: Filter,
        microbatch_size: int | Literal["auto"] | None,
        memory_budget: int | str | None,
        autotune: bool,
        scheduler: LRScheduler | None,
        seed: int | None,
        ledger_path: Path | None,
        key_path: Path | None,
    ) -> None:
        if not (microbatch_size in (None, "auto") or (isinstance(microbatch_size, int) and microbatch_size >= 1)):
            raise SamplingError(
                f'microbatch_size={microbatch_size!r} must be at least 1, "auto", or None for whole batches'
            )
        if memory_budget is not None and microbatch_size != "auto":
            raise MemoryLimitError('memory_budget: has no meaning without microbatch_size="auto"')
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.filter = filter
        self.microbatch_size = None if microbatch_size == "auto" else microbatch_size  # "auto": found by loader()
        self.memory_fit: Fit | None = None  # what "auto" found
        self._automatic = microbatch_size == "auto"
        self._memory_budget = None if memory_budget is None else parse_memory(memory_budget)
        self._threshold = QuantileThreshold(plan) if plan.clipping == "adaptive" else None
        self.clipper = Clipper("flat" if self._threshold else plan.clipping, plan.max_grad_norm)
        self._choose = Tuner().choose if autotune else choose
        self._engine = Engine(model, loss_fn)
        self._parameters = self._engine.parameters()
        self._forms = forms(self._parameters)
        check_optimizer(optimizer, self._parameters)
        check_knowledge(optimizer, plan, filter)
        check_clipping(plan, filter)
        warn_of_low_precision(self._parameters)
        refuse_modules(model)
        self._needs_closure = check_evaluations(optimizer)
        self.scheduler = scheduler
        check_scheduler(scheduler, optimizer)
        check_key(key_path, ledger_path, plan)
        self._ledger = Ledger(ledger_path, plan.fingerprint, plan.to_json())
        self._kept = seed is None and key_path is not None  # the secret outlives this process
        self._secret = _secret(seed, key_path)
        self._noise = noise_source(plan.noise, self._secret)
        self._most_a_part = 0  # examples, that the grid allows for
        self._grid = self._grid_of_plan() if plan.noise == "discrete" else None
        self._filter_state = started(filter, self._noise_std**2)
        self._lookahead: dict[str, Tensor] | None = None  # x_t + γ (x_t - x_{t-1}); None until weights have moved
        self._step = 0
        self._loader: PrivateLoader | None = None  # the current one
        self._left: Tensor | None = None  # some of the weights, as the last step left them
        self._still = Still(self._parameters if plan.noise_multiplier else {})  # noise moves every weight
        self._together = ("", math.inf)  # what was asked of the account last, and ε
        self.units_checked = False  # whether loader() was told each record's unit
        self._process = os.getpid()
        self._compromised = False
        self._seeded = self._secret.reproducible  # also if only an earlier part of the training was

    @property
    def steps_done(self) -> int:
        """Steps of the plan that this training has taken."""
        return self._step

    @property
    def steps_charged(self) -> int:
        """Noised sums that were, or may have been, seen: repeated steps included."""
        return self._ledger.spent

    @property
    def epsilon(self) -> float:
        """ε spent so far at the plan's δ, by the plan's accountant, repeated steps included."""
        return self.plan.epsilon_of(samples(self.plan, self._ledger.releases))

    @property
    def reproducible(self) -> bool:
        """Whether a seed was given, here or before a resumption: whoever knows it can subtract the noise."""
        return self._seeded

    @property
    def keeps_secret(self) -> bool:
        """Whether the secret is kept in a file, so that a step that is run again comes out the same."""
        return self._kept

    @property
    def sensitivity(self) -> float:
        """S: what one example can contribute to the sum. The noise's standard deviation is σS."""
        if self._threshold is not None:
            return self._threshold.sensitivity
        if self.filter.clip == "separate":
            return self.clipper.sensitivity * sum(abs(a) for a in self.filter.coefficients)
        return self.clipper.sensitivity

    def loader(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        units: Units | None = None,
    ) -> PrivateLoader:
        """The plan's remaining batches, drawn from ``dataset`` as the plan says.

        ``units`` names each record's unit: none may have more records than the plan's ``examples_per_unit``.
        Checks the length of the data set against the plan, and on a few examples, on one, and on as many as a
        (micro)batch has that the model's per-example gradients can be established: structural faults are found here,
        before any training. With ``microbatch_size="auto"`` it then measures, on the first examples, how many fit.
        """
        if self._compromised:
            self._renew_secret()
        self._check_account()
        if self.plan.examples_per_unit > 1 and units is None:
            warnings.warn(
                f"examples_per_unit={self.plan.examples_per_unit} is taken on trust: pass units= (each record's unit) "
                "to have it checked that none has more",
                UncheckedUnitsWarning,
                stacklevel=2,
            )
        loader = PrivateLoader(
            dataset,
            sampler_for(self.plan, self._secret),
            plan_token=self.plan.fingerprint,
            first_step=self._step,
            last_step=self.plan.steps,
            microbatch_size=self.microbatch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            units=units,
            examples_per_unit=self.plan.examples_per_unit,
        )
        self.units_checked = units is not None
        random = RandomState.capture()
        count = min(self.plan.dataset_size, self.microbatch_size or _CHECKED_EXAMPLES, _CHECKED_EXAMPLES)
        while not self._checked(loader, count) and count > 1:
            count //= 2
        if count > 1:  # a batch of one is a structure of its own
            self._checked(loader, 1)
        if self._automatic and not (self._step and self.microbatch_size):  # a run that goes on rounds as it did
            self.memory_fit = self._fitted(loader)
            self.microbatch_size = loader.microbatch_size = self.memory_fit.size
        usual = min(self.plan.dataset_size, self.microbatch_size or self.plan.batch_size)
        if usual > count:
            self._checked(loader, usual)
        random.restore()
        self._loader = loader
        return loader

    def _checked(self, loader: PrivateLoader, examples: int) -> bool:
        """`check` on the first examples; whether there was memory for it, where fewer may do."""
        try:
            self.check(loader.collated(np.arange(examples)), examples)
        except (RuntimeError, MemoryError) as error:
            if not (self._automatic and out_of_memory(error)):
                raise
            if examples == 1:
                raise MemoryLimitError(
                    "memory ran out with a single example at work: make the model or the inputs smaller"
                ) from error
            return False
        return True

    def check(self, microbatch: Any, examples: int) -> None:
        """Raise GradientError unless exact gradients of each of the microbatch's ``examples`` can be had."""
        check_losses(self._engine.gradients(microbatch, [(1.0, None)]).losses_B, examples)

    def step(self, batch: LogicalBatch) -> StepResult:
        """One step of the plan: charges it, then moves the weights."""
        self._accept(batch)
        self._warn_of_other_updates()
        seen = _Seen()
        step = self._step
        parts = len(batch.sizes) * len(self._passes())
        if isinstance(self._noise, DiscreteNoise):
            noised = self._summed_on_grid(batch, seen, self._noise)
        elif parts == 1 and not self._automatic and not self._threshold and isinstance(self._noise, GaussianNoise):
            noised = self._summed_onto_noise(batch, seen, self._noise)
        else:
            noised = self._summed_then_noised(batch, seen, self._noise)
        self._compromised = True  # until all is done, this step's sample and noise may be seen without its weights
        try:
            released = noised()
            # on disk before anything is computed from it that can be seen
            self._ledger.record(self._release(step, released), self._affordable)
            check_finite(released)
            self._update(self._in_order(released))
            self._adapt(released)
            self._left = some_of(self._parameters)
            self._step += 1
            self._compromised = False
        except BaseException:
            self._renew_secret()  # this step's sample and noise may have been seen: never use them again
            raise
        return seen.result(step, batch.size)

    def _warn_of_other_updates(self) -> None:
        left, self._left = self._left, None  # once in a row
        if left is not None and not torch.equal(left, some_of(self._parameters)):
            warnings.warn(
                f"the weights were changed between steps {self._step - 1} and {self._step} by something else than "
                "private.step: unless that was computed from what had been released, what is trained from here on is "
                "not covered by the guarantee",
                OtherUpdateWarning,
                stacklevel=3,
            )

    def _release(self, step: int, released: Mapping[str, Tensor] | None = None) -> Release:
        """What stands for a step in the ledger: keyed hashes, which tell one from another and nothing else.

        Without a file nothing is ever run again under the same secret: then results need no name.
        """
        digest = ""
        if released is not None and self._ledger.path is not None:
            digest = bound_key(self._secret, "result", step, (), released)[:16].hex()
        epoch = ""
        if self.plan.sampling == "shuffled":
            epoch = self._secret.derive("order of an epoch", step // self.plan.steps_per_epoch)[:16].hex()
        return Release(step, self._secret.derive("sample of a step", step)[:16].hex(), digest, epoch)

    def _affordable(self, releases: Mapping[int, int]) -> bool:
        """Whether these releases, {times: draws}, are no more than the plan pays for."""
        whole = {1: self.plan.steps}
        spent = samples(self.plan, releases)
        if not self.plan.is_private:
            return self._ledger.spent < self.plan.steps
        if self.plan.sampling == "shuffled" or not spent.keys() <= {1}:
            enough = self.plan.epsilon_of(spent) <= self.plan.epsilon_of(whole)
        else:
            enough = spent.get(1, 0) <= self.plan.steps
        return enough and self._account_pays(whole if spent.keys() <= {1} else spent)

    def _check_account(self) -> None:
        account = self._ledger.account
        if account is not None and not self._account_pays({1: self.plan.steps}):
            raise BudgetExhausted(
                f"{self._ledger.path}: the account of (epsilon {account.epsilon:g}, delta {account.delta:g}) has no "
                f"room for this plan beside the {len(self._ledger.others)} runs so far: together they would spend "
                f"epsilon {self._spent_together({1: self.plan.steps}):.4g}; give the plan a smaller epsilon or fewer "
                "steps"
            )

    def _account_pays(self, releases: Mapping[int, int]) -> bool:
        """Whether the account, if the ledger has one, has room for these releases beside those of the other runs."""
        account = self._ledger.account
        return account is None or self._spent_together(releases) <= account.epsilon

    def _spent_together(self, releases: Mapping[int, int]) -> float:
        """The ε of all runs in the ledger, this one's releases being these, at the account's δ."""
        account, others = self._ledger.account, self._ledger.others
        assert account is not None
        key = repr((others, sorted(releases.items())))
        if self._together[0] != key:
            plans = [(plan, samples(plan, own)) for plan, own in ((Plan.from_json(text), own) for text, own in others)]
            runs = [(plan.mechanism, plan.noise_multiplier, own) for plan, own in [*plans, (self.plan, releases)]]
            self._together = key, composed_epsilon(runs, account.delta)
        return self._together[1]

    @property
    def epsilon_together(self) -> float:
        """ε of all runs on the data set so far, if the ledger is an account (`diskdp.ledger.open_account`)."""
        if self._ledger.account is None:
            return self.epsilon
        return self._spent_together(samples(self.plan, self._ledger.releases))

    def _may_go_on(self) -> bool:
        """Whether the step that is due is one that was charged already, or one that the plan still pays for."""
        release = self._release(self._step)
        return self._ledger.knows(release.sample) or self._affordable(self._ledger.releases_with(release))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later `load_state_dict` needs: the state of model, optimizer, scheduler and filter, and
        torch's, numpy's and Python's global generators, from which dropout and augmentation draw.

        Belongs to the private half of a run: the plan's guarantee covers the weights and the filter, but the secret
        of the noise is never in it.
        """
        lookahead = self._lookahead
        return {
            "plan": self.plan.fingerprint,
            "filter": repr(self.filter),
            "optimizer_class": type(self.optimizer).__qualname__,
            "step": self._step,
            "format": _STATE_FORMAT,
            "spent": self._ledger.spent,
            "epochs": sum(self._ledger.releases.values()) if self.plan.sampling == "shuffled" else 0,
            "ledger": self._ledger.head,
            "run": self._ledger.run,
            "account": self._ledger.account is not None,
            "secret": self._secret_name,
            "seeded": self._seeded,
            "microbatch_size": self.microbatch_size,
            "threshold": None if self._threshold is None else self._threshold.value,
            "random": RandomState.capture().to_tree(),
            "scheduler": None if self.scheduler is None else _copied(self.scheduler.state_dict()),
            "model": {name: t.detach().clone() for name, t in self.model.state_dict().items()},
            "optimizer": _copied(self.optimizer.state_dict()),
            "filter_state": self._filter_state.state_dict(),
            "lookahead": None if lookahead is None else {name: t.clone() for name, t in lookahead.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same plan and filter. What was spent is never counted down.

        With a kept key (or a seed) a step that is run again comes out the same, bit for bit, and costs nothing. Without
        one, sampling and noise go on from a new secret: a repeated step is a new event, and is charged.
        """
        if state.get("format") != _STATE_FORMAT:
            raise CheckpointError(
                f"the checkpoint is of format {state.get('format')!r}, and this version goes on from "
                f"{_STATE_FORMAT!r}; resume with the version that made it"
            )
        for key, own in (
            ("plan", self.plan.fingerprint),
            ("filter", repr(self.filter)),
            ("optimizer_class", type(self.optimizer).__qualname__),
        ):
            if state.get(key) != own:
                what = key.removesuffix("_class")
                raise CheckpointError(
                    f"the checkpoint belongs to another {what} ({state.get(key)}, here {own}); "
                    f"resume with the {what} it was made with"
                )
        recorded, head = state["ledger"]
        if not self._ledger.follows((recorded, head)):
            where = (
                "no ledger_path was given"
                if self._ledger.path is None
                else f"{self._ledger.path} has fewer or others: it was cut short, or is another run's"
            )
            raise CheckpointError(
                f"the checkpoint's run has a ledger of {recorded} entries or more, and {where}; what was spent "
                "since would not count: resume with the run's own ledger"
            )
        if (self.scheduler is None) != (state["scheduler"] is None):
            raise CheckpointError(
                "the checkpoint was made with a scheduler and there is none here"
                if self.scheduler is None
                else "the checkpoint was made without a scheduler; resume without one"
            )
        check_same_model(self.model, state["model"])
        self._compromised = True  # until there is a new secret
        another_key = self._kept and state["secret"] != self._secret_name
        if state["account"] and not another_key:  # under another key it is a run of its own, with the same past
            self._ledger.go_on_as(state["run"])
        self._ledger.at_least(int(state["spent"]), int(state["epochs"]))
        self._seeded = self._seeded or bool(state["seeded"])
        self.model.load_state_dict(state["model"])
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's optimizer state does not fit this optimizer ({error})") from error
        self._filter_state = started(self.filter, self._noise_std**2)
        self._filter_state.load_state_dict(state["filter_state"])
        lookahead = state["lookahead"]
        self._lookahead = None if lookahead is None else {name: t.clone() for name, t in lookahead.items()}
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self._automatic:  # with as many examples at once as before, sums round as before
            self.microbatch_size = state["microbatch_size"]
        if self._threshold is not None:
            self._threshold.restore(state["threshold"])
            self.clipper = Clipper("flat", self._threshold.value)
        self._step = int(state["step"])
        self._left = None
        self._renew_secret()
        if another_key:
            warnings.warn(
                f"the checkpoint was made under another key than this run's, so steps after step {self._step} are "
                "drawn anew and charged again; resume with the run's own key if it was lost by mistake",
                NewKeyWarning,
                stacklevel=2,
            )
        RandomState.from_tree(state["random"]).restore()

    def save(self, path: str | Path) -> None:
        """Write state and plan to one file (safetensors).

        The file that was there stays whole until it is replaced, and is kept beside the new one as ``NAME.previous``.
        """
        save_tree(path, {"plan": self.plan.to_json(), "state": self.state_dict()}, keep_previous=True)

    def __deepcopy__(self, memo: Any = None) -> PrivateTraining:
        raise SamplingError(
            "a copy of a private training would add the same noise to other sums, whose difference has none; "
            "make a new one with privatize and load state_dict() into it"
        )

    __copy__ = __reduce__ = __deepcopy__  # type: ignore[assignment]

    def _renew_secret(self) -> None:
        """Sampling and noise go on from a new secret; loaders must be made anew.

        A seeded run has none to protect. A kept one stays: its noise is another one for another sum, and the ledger
        knows by the sample what was released of it before.
        """
        self._loader = None
        self._process = os.getpid()
        keep = self._secret.reproducible or self._kept
        secret = self._secret if keep else Secret.from_os()
        # the source too: a thread of its own does not survive a fork
        self._secret, self._noise = secret, noise_source(self.plan.noise, secret)
        self._compromised = False

    @property
    def _secret_name(self) -> str:
        """Tells one secret from another, and nothing else about it."""
        return self._secret.derive("name of the secret")[:8].hex()

    def _accept(self, batch: LogicalBatch) -> None:
        if os.getpid() != self._process or self._compromised:
            self._renew_secret()  # after a fork two processes would share it
        current = None if self._loader is None else self._loader.loader_id
        if not isinstance(batch, LogicalBatch) or batch.loader_id != current:
            raise SamplingError(
                f"step() was given {type(batch).__name__ if not isinstance(batch, LogicalBatch) else 'a batch'} that "
                "does not come from this training's current loader, so the accountant's sampling would not hold; "
                "iterate over private.loader(dataset)"
            )
        if batch.step != self._step:
            raise SamplingError(
                f"step() was given the batch of step {batch.step}, but step {self._step} is due; use each batch once, "
                "in the loader's order"
            )
        now = self._engine.parameters()
        if now.keys() != self._parameters.keys() or any(now[name] is not p for name, p in self._parameters.items()):
            raise GradientError(
                "the model's trainable parameters are not those that privatize() was given: one was frozen, unfrozen "
                "or replaced; change the model before, or make a new private training"
            )
        if forms(now) != self._forms:
            raise GradientError(
                "the model was cast or moved after privatize(), and the optimizer's and the filter's state was not; "
                "call .to(...) before the optimizer is made, or make a new private training"
            )
        if not self._may_go_on():
            raise BudgetExhausted(
                f"all {self.plan.steps} steps of the plan have been charged (epsilon {self.epsilon:.4g} at delta "
                f"{self.plan.delta:g}); one more would pass the plan. Training ends here"
            )

    @property
    def _noise_std(self) -> float:
        """σS/B, of the noise on the mean."""
        if self.plan.noise_multiplier == 0:
            return 0.0  # also where nothing is clipped and S is infinite
        return self.plan.noise_multiplier * self.sensitivity / self.plan.batch_size

    def _grid_of_plan(self) -> Grid:
        """For sums of parts of at most so many examples each, made in float64: public, whoever is drawn."""
        if self._automatic:
            raise NoiseError(
                'noise="discrete" needs a number for microbatch_size: '
                "the grid depends on how many parts a sum is made of"
            )
        if self.plan.noise_multiplier == 0:
            raise NoiseError('noise="discrete" with noise_multiplier=0: there is no noise to be discrete; leave it out')
        most = self.plan.dataset_size if self.plan.sampling == "poisson" else self._largest_batch
        self._most_a_part = examples = min(self.microbatch_size or most, most)
        separate = self.filter.clip == "separate" and all(self.filter.coefficients)
        return Grid.fit(
            self.plan.noise_multiplier,
            self.sensitivity,
            sum(p.numel() for p in self._parameters.values()),
            parts=-(-most // examples) * (2 if separate else 1),
            examples=examples,
            rows=1,  # every example's gradient is one vector, made before it is weighted
            cancellation=1.0,
        )

    @property
    def _largest_batch(self) -> int:
        return sampler_for(self.plan, self._secret).largest_batch

    def _in_order(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [tensors[name] for name in self._parameters]

    def _passes(self, moved: bool = False) -> list[tuple[float, list[Point]]]:
        """What is clipped by itself in this step, and its weight: all points at once, or each for separate clipping.

        ``moved``: as if there were a look-ahead point already.
        """
        here, ahead = self.filter.coefficients if moved else due_coefficients(self.filter, self._filter_state)
        points: list[Point] = [(1.0, None)]  # the first step has d = 0: both points are x_0
        lookahead = self._parameters if moved and self._lookahead is None else self._lookahead
        if lookahead is not None and ahead != 0:
            points = [(a, values) for a, values in ((here, None), (ahead, lookahead)) if a != 0]
        if self.filter.clip == "joint" or len(points) == 1:
            return [(1.0, points)]
        return [(a, [(1.0, values)]) for a, values in points]

    def _clipped(
        self, microbatch: Any, examples: int, seen: _Seen, moved: bool = False
    ) -> Iterator[tuple[float, Clipped]]:
        """Clipped gradients and the weights with which they enter the sum, to be summed one by one."""
        passes = self._passes(moved)
        random = RandomState.capture() if len(passes) > 1 else None
        for number, (weight, points) in enumerate(passes):
            if random is not None:
                random.restore()
            if self._grid is None:
                clipped = clip(self._engine, microbatch, points, self.clipper, self._choose)
            else:
                clipped = clip_in_float64(self._engine, microbatch, points, self.clipper)
            check_losses(clipped.losses_B, examples)
            if number == 0:
                seen.add(clipped)
            yield weight, clipped

    def _summed_onto_noise(
        self, batch: LogicalBatch, seen: _Seen, source: GaussianNoise
    ) -> Callable[[], dict[str, Tensor]]:
        """Clipped gradients of a batch in one part; what is returned sums them, in the memory of the noise.

        The noise does not depend on them and is made beside them.
        """
        noise = source.begin(self._parameters, self._noise_std, self._step) if self._noise_std else None
        [(examples, microbatch)] = zip(batch.sizes, batch.microbatches())
        [(weight, clipped)] = self._clipped(microbatch, examples, seen)

        def noised() -> dict[str, Tensor]:
            drawn = None if noise is None else noise.result()
            onto = drawn and {name: z.to(self._parameters[name].device) for name, z in drawn.items()}
            return clipped.summed(onto, weight / self.plan.batch_size)

        return noised

    def _summed_then_noised(
        self, batch: LogicalBatch, seen: _Seen, source: GaussianNoise | SecureNoise
    ) -> Callable[[], dict[str, Tensor]]:
        """The mean over a batch in several parts or none; what is returned adds the noise, in the mean's own memory."""
        sums = _Sums(self._clipped, self.plan.batch_size, seen)
        if self._automatic:
            self._add_as_memory_allows(batch, sums)
        else:
            for examples, microbatch in zip(batch.sizes, batch.microbatches()):
                sums.add(microbatch, examples)
        mean = sums.mean
        if mean is None:
            mean = {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in self._parameters.items()}

        def noised() -> dict[str, Tensor]:
            if self._threshold is not None:
                count = self._threshold.weight * seen.shorter_than_half() / self.plan.batch_size
                mean[COUNT] = torch.tensor(count, dtype=torch.float64)
            source.add_to(mean, self._noise_std, self._step)
            return mean

        return noised

    def _summed_on_grid(
        self, batch: LogicalBatch, seen: _Seen, source: DiscreteNoise
    ) -> Callable[[], dict[str, Tensor]]:
        """The sum in whole spacings of the grid, each part rounded to it; what is returned adds whole noise.

        Sum and noise are exact integers. The mean is computed of their sum, which has been privatised.
        """
        grid = self._grid
        assert grid is not None
        if max(batch.sizes, default=0) > self._most_a_part or len(batch.sizes) * len(self._passes()) > grid.parts:
            raise SamplingError(
                "microbatch_size was changed after the grid was made for it; make a new private training, and load "
                "this one's state_dict() into it"
            )
        totals = {name: torch.zeros_like(p, dtype=torch.int64) for name, p in self._parameters.items()}
        for examples, microbatch in zip(batch.sizes, batch.microbatches()):
            for weight, clipped in self._clipped(microbatch, examples, seen):
                for name, part in grid.round(clipped.summed(weight=weight)).items():
                    totals[name] += part

        def noised() -> dict[str, Tensor]:
            released = source.add(totals, grid, self._step, torch.float64)
            return {n: (released[n] / self.plan.batch_size).to(_sum_dtype(p)) for n, p in self._parameters.items()}

        return noised

    def _add_as_memory_allows(self, batch: LogicalBatch, sums: _Sums) -> None:
        """Every member once; where memory runs out, in smaller microbatches from here on."""
        size = self.microbatch_size or max(1, batch.size)
        fitting = add_all(batch, sums, size, self._device())
        if fitting < size:
            self.microbatch_size = fitting
            if self._loader is not None:
                self._loader.microbatch_size = fitting

    def _fitted(self, loader: PrivateLoader) -> Fit:
        """How many of the loader's examples fit into the budget at once, measured on the first ones."""
        device = self._device()
        numbers = {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in self._parameters.items()}
        held = sum(t.nbytes for t in numbers.values())  # the mean, to which the noise is added in place
        budget = self._memory_budget
        if budget is None:
            # what the filter, the look-ahead point and an optimizer such as Adam are yet to take stays free
            budget = int(FRACTIONS.get(device.type, 0.5) * max(0, available_memory(device) - 4 * held))
        largest = self._largest_batch
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}

        def work(size: int) -> None:
            for weight, clipped in self._clipped(loader.collated(np.arange(size)), size, _Seen(), moved=True):
                clipped.summed(numbers, weight / self.plan.batch_size)

        def peak_of(size: int) -> int | None:
            try:
                if size == 1:
                    work(size)  # so that what is kept from the first call on is not counted
                for _ in range(_MEASUREMENTS):
                    known = self._engine.examinations
                    peak = peak_memory(lambda: work(size), device)
                    if self._engine.examinations == known:  # an examination takes more, and is rare
                        break
                return held + peak
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            free_unused(device)
            return None

        try:
            fit = largest_fit(peak_of, budget, min(self.microbatch_size or largest, largest))
        finally:
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])
        if fit is None:
            raise MemoryLimitError(
                f"one example alone takes more than the memory budget of {shown_memory(budget)}, the sums over all "
                f"parameters included ({shown_memory(held)}); give a larger memory_budget, or make the model smaller"
            )
        return fit

    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _adapt(self, released: Mapping[str, Tensor]) -> None:
        """Take the threshold of adaptive clipping on, by what was released."""
        if self._threshold is not None:
            self._threshold.follow(float(released[COUNT]))
            self.clipper = Clipper("flat", self._threshold.value)

    def _update(self, gradients: list[Tensor]) -> None:
        """Filter the privatised gradients, let the optimizer step along them, look ahead along the step it took."""
        filtered = self._filter_state.update(gradients)
        if filtered is not gradients:  # the filter's own tensors: an optimizer may write into its gradients
            torch._foreach_copy_(gradients, filtered)
        weights = [p.detach() for p in self._parameters.values()]
        follower = self._filter_state if isinstance(self._filter_state, FollowsWeights) else None
        left = [] if follower is None else [w.to(torch.float64, copy=True) for w in weights]
        gamma = self.filter.lookahead
        if gamma is not None:  # the look-ahead point has served: its memory holds x_t during the update
            if self._lookahead is None:
                self._lookahead = {name: p.detach().clone() for name, p in self._parameters.items()}
            else:
                torch._foreach_copy_(list(self._lookahead.values()), weights)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # optimizers move a frozen parameter too, along a gradient that it still has
        for parameter, gradient in zip(self._parameters.values(), gradients):
            parameter.grad = gradient.to(parameter.dtype)
        self._still.before(self.optimizer)
        if self._needs_closure:
            self.optimizer.step(lambda: 0.0)
        else:
            self.optimizer.step()
        self._still.after()
        for parameter in self._parameters.values():
            parameter.grad = None  # a second optimizer step must not see it
        if self.scheduler is not None:
            self.scheduler.step()
        advance_buffers(self.model)
        if gamma is not None and self._lookahead is not None:
            torch._foreach_lerp_(list(self._lookahead.values()), weights, 1 + gamma)
        if follower is not None:
            follower.moved([w.double() - before for w, before in zip(weights, left)])


class _Privatize:
    """`privatize(...)` starts a training, `privatize.resume(path, ...)` goes on with a saved one."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        loss_fn: LossFunction,
        filter: Filter = DiSK(),  # noqa: B008  (a frozen value)
        microbatch_size: int | Literal["auto"] | None = None,
        memory_budget: int | str | None = None,
        autotune: bool = False,
        scheduler: LRScheduler | None = None,
        seed: int | None = None,
        ledger_path: str | Path | None = None,
        key_path: str | Path | None = None,
    ) -> PrivateTraining:
        """Train ``model`` by ``optimizer`` under ``plan``.

        ``loss_fn(model, batch)`` returns one loss an example, shape [B]. ``microbatch_size`` bounds how many examples
        are worked on at once and changes nothing else; "auto" finds the most that fit into ``memory_budget`` (bytes or
        a text such as "4 GiB": what a step may take beyond the weights and states; a part of what is free, unless
        given), and goes on with fewer where memory runs out. ``autotune`` chooses the method for each layer's norms by
        timing instead of by estimate, which costs a moment once and may round differently. ``scheduler`` moves on after
        every step, and is saved with the rest. ``seed`` makes the run reproducible, and not private.
        ``ledger_path`` names a file in which every step is recorded before it is released. ``key_path`` names a file in
        which the secret of sampling and noise is kept, so that a run that was cut off goes on bit for bit and pays for
        no step twice; it takes a ledger, and noise that is keyed by the sum ("secure" or "discrete").

        >>> model = nn.Linear(2, 1)
        >>> plan = Plan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-5)
        >>> private = privatize(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), plan,
        ...     loss_fn=lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square(),
        ... )
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.randn(100))
        >>> [private.step(batch).step for batch in private.loader(data)]
        [0, 1, 2, 3, 4]
        """
        return PrivateTraining(
            model,
            optimizer,
            plan,
            loss_fn,
            filter,
            microbatch_size,
            memory_budget,
            autotune,
            scheduler,
            seed,
            None if ledger_path is None else Path(ledger_path),
            None if key_path is None else Path(key_path),
        )

    def resume(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan | None = None,
        *,
        loss_fn: LossFunction,
        filter: Filter = DiSK(),  # noqa: B008
        microbatch_size: int | Literal["auto"] | None = None,
        memory_budget: int | str | None = None,
        autotune: bool = False,
        scheduler: LRScheduler | None = None,
        seed: int | None = None,
        ledger_path: str | Path | None = None,
        key_path: str | Path | None = None,
    ) -> PrivateTraining:
        """Go on from a file that `PrivateTraining.save` wrote; ``plan``, if given, must be the one saved there."""
        tree = load_tree(path)
        if not isinstance(tree, dict) or not {"plan", "state"} <= tree.keys():
            raise CheckpointError(f"{path}: not a checkpoint of a private training")
        saved = Plan.from_json(tree["plan"])
        if plan is not None and plan.fingerprint != saved.fingerprint:
            raise CheckpointError(f"{path}: belongs to another plan; resume with the plan it was made with")
        private = self(
            model,
            optimizer,
            saved,
            loss_fn=loss_fn,
            filter=filter,
            microbatch_size=microbatch_size,
            memory_budget=memory_budget,
            autotune=autotune,
            scheduler=scheduler,
            seed=seed,
            ledger_path=ledger_path,
            key_path=key_path,
        )
        private.load_state_dict(tree["state"])
        return private


privatize = _Privatize()


class _Sums:
    """The mean over a logical batch so far, and what was seen of its examples."""

    def __init__(
        self, clipped: Callable[[Any, int, _Seen], Iterator[tuple[float, Clipped]]], batch_size: int, seen: _Seen
    ) -> None:
        self._clipped, self._batch_size, self._seen = clipped, batch_size, seen
        self.mean: dict[str, Tensor] | None = None
        self.intact = True

    def add(self, microbatch: Any, examples: int) -> None:
        seen = _Seen()
        for weight, clipped in self._clipped(microbatch, examples, seen):
            self.intact = False  # from the first sum to the last there is a part of this microbatch in the mean
            self.mean = clipped.summed(self.mean, weight / self._batch_size)
        self._seen.extend(seen)
        self.intact = True

    def clear(self) -> None:
        self.mean = None
        self._seen.clear()
        self.intact = True


class _Seen:
    """The diagnostics of one logical batch's examples."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._losses: list[Tensor] = []

    def clear(self) -> None:
        for values in (self._norms, self._clipped, self._losses):
            values.clear()

    def extend(self, other: _Seen) -> None:
        self._norms += other._norms
        self._clipped += other._clipped
        self._losses += other._losses

    def add(self, clipped: Clipped) -> None:
        self._norms.append(clipped.norms_B)
        self._clipped.append(clipped.clipped_B)
        self._losses.append(clipped.losses_B.float())

    def shorter_than_half(self) -> float:
        """Σ (b_i - 1/2), b_i = 1 for an example that clipping left as it is."""
        return sum(float((~clipped).sum()) - clipped.numel() / 2 for clipped in self._clipped)

    def result(self, step: int, batch_size: int) -> StepResult:
        if not self._losses:
            return StepResult(step, math.nan, batch_size, 0.0, math.nan)
        norms, clipped, losses = torch.cat(self._norms), torch.cat(self._clipped), torch.cat(self._losses)
        return StepResult(
            step, losses.mean().item(), batch_size, clipped.float().mean().item(), norms.nanmedian().item()
        )


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _secret(seed: int | None, key_path: Path | None) -> Secret:
    if seed is not None:
        return Secret.from_seed(seed)
    return Secret.from_os() if key_path is None else Secret.kept(key_path)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree
