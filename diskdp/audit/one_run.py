"""The audit of one whole training: canaries in or out by fair coins, guessed from what was released.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run". Cheap and rigorous, and weak: it sees
gross faults only (docs/audit.md).
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from diskdp.audit.bounds import Array
from diskdp.audit.canaries import Privatize, Progress
from diskdp.audit.results import RunAudit
from diskdp.datasets import adult
from diskdp.errors import AuditError
from diskdp.filters import Filter, NoFilter
from diskdp.plan import Plan
from diskdp.private import privatize as diskdp_privatize

_GUESSED = (0.02, 0.1, 0.3)  # parts of the canaries that are guessed; the best counts, each at a third of the error
_LARGEST_EPSILON = 50.0


def audit_run(
    plan: Plan | None = None,
    *,
    kind: Literal["gradient", "input"] = "gradient",
    view: Literal["white-box", "final-model"] = "white-box",
    canaries: int = 2000,
    filter: Filter | None = None,
    confidence: float = 0.95,
    privatize: Privatize = diskdp_privatize,
    microbatch_size: int | None = None,
    seed: int | None = None,
    progress: Progress = lambda done, of: None,
) -> RunAudit:
    """Train a small network on the Adult table and ``canaries`` more records once, and guess which of those took part.

    ``kind``: canaries whose gradient is one coordinate of a parameter of their own ("gradient"), or records of random
    inputs and labels ("input"). ``view``: scores from all gradients that the optimizer was handed ("white-box"), or
    from the final weights ("final-model"). ``plan.dataset_size`` counts the canaries; one that is left out contributes
    nothing.

    >>> plan = Plan(dataset_size=1500, batch_size=1500, steps=2, noise_multiplier=1.0, delta=1e-5)
    >>> audit = audit_run(plan, canaries=1000, seed=0)
    >>> audit.passed, 0 < audit.epsilon_lower < audit.epsilon_claimed
    (True, True)
    """
    started = time.perf_counter()
    if plan is None:
        plan = Plan(dataset_size=6000, batch_size=1500, steps=20, epsilon=4.4, delta=1e-5)
    train = adult().train
    _check(plan, kind, view, canaries, confidence, len(train))
    generator = np.random.default_rng(seed)
    inside = generator.random(canaries) < 0.5
    inputs, labels = (
        t[torch.from_numpy(generator.permutation(len(train))[: plan.dataset_size])] for t in train.tensors
    )
    rows = plan.dataset_size - canaries
    owner = torch.zeros(plan.dataset_size, dtype=torch.long)
    natural, dirac = torch.ones(plan.dataset_size), torch.zeros(plan.dataset_size)
    owner[rows:] = torch.arange(canaries)
    weight = torch.from_numpy(inside.astype(np.float32))
    if kind == "gradient":
        natural[rows:], dirac[rows:] = 0.0, -10.0 * plan.max_grad_norm * weight
    else:
        natural[rows:] = weight
        inputs[rows:] = torch.from_numpy(generator.normal(size=(canaries, inputs.shape[1]))).to(inputs.dtype)
        labels[rows:] = torch.from_numpy(generator.integers(0, 2, canaries))
    order = torch.from_numpy(generator.permutation(plan.dataset_size))
    dataset = TensorDataset(*(t[order] for t in (inputs, labels, owner, natural, dirac)))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(1 << 31)))
        model = _WithCanaries(inputs.shape[1], canaries)
    model.canaries.requires_grad_(kind == "gradient")
    optimizer = _Recording(p for p in model.parameters() if p.requires_grad)
    private = privatize(
        model,
        optimizer,
        plan,
        loss_fn=_loss,
        filter=filter or NoFilter(),
        microbatch_size=microbatch_size,
        seed=seed,
    )
    probe = (inputs[rows:], labels[rows:])
    scores = np.zeros(canaries) if view == "white-box" else _score(model, kind, probe)
    for batch in private.loader(dataset):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        private.step(batch)
        progress(batch.step + 1, plan.steps)
        if view == "white-box":
            scores += _moved(model, before, optimizer.seen, kind, probe)
    if view == "final-model":
        scores = _score(model, kind, probe) - scores

    lower, guesses, correct = _guessed(scores, inside, plan.delta, 1 - confidence)
    return RunAudit(
        epsilon_lower=lower,
        epsilon_claimed=plan.epsilon,
        delta=plan.delta,
        confidence=confidence,
        passed=lower <= plan.epsilon,
        kind=kind,
        view=view,
        canaries=canaries,
        guesses=guesses,
        correct=correct,
        steps=plan.steps,
        seconds=time.perf_counter() - started,
    )


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The chance that an (ε, δ)-private training lets ``correct`` or more of ``guesses`` be right.

    Theorem 5.2 of Steinke, Nasr and Jagielski 2023: β + 2mδ max_i P(v > W ≥ v - i) / i, where W is binomial with
    probability exp(ε) / (1 + exp(ε)) and β = P(W ≥ v). Under pure ε the number of right guesses is dominated by W;
    with δ each canary may be given away by chance, and the maximum is the best an adversary makes of that.

    >>> one_run_p_value(100, 100, 100, 0.0, 0.0) == 2.0**-100
    True
    """
    if not 0 <= correct <= guesses <= canaries:
        raise AuditError(f"{correct} of {guesses} guesses about {canaries} canaries cannot be right")
    right = 1 / (1 + math.exp(-epsilon))
    beyond = float(stats.binom.sf(correct - 1, guesses, right))
    if correct == 0 or delta == 0:
        return min(1.0, beyond)
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)
    steepest = float(np.max(np.cumsum(below) / np.arange(1, correct + 1)))
    return min(1.0, beyond + 2 * canaries * delta * steepest)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """The largest ε that this many right guesses exclude, wrongly with probability at most ``error``.

    >>> round(one_run_epsilon(1000, 100, 95, 1e-5, 0.05), 2)
    2.17
    """
    low, high = 0.0, _LARGEST_EPSILON
    if one_run_p_value(canaries, guesses, correct, low, delta) > error:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, correct, middle, delta) <= error:
            low = middle
        else:
            high = middle
    return low


class _WithCanaries(nn.Module):
    """A small network, and a number for each canary."""

    def __init__(self, features: int, canaries: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 2))
        self.canaries = nn.Embedding(canaries, 1)
        nn.init.zeros_(self.canaries.weight)

    def forward(self, inputs: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(inputs), self.canaries(owner).squeeze(1)


class _Recording(torch.optim.SGD):
    """Keeps the gradients that it was handed last."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)
        self.seen: list[Tensor] = []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for p in self.param_groups[0]["params"]]
        super().step()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels, owner, natural, dirac = batch
    logits, number = model(inputs, owner)
    return natural * F.cross_entropy(logits, labels, reduction="none") + dirac * number


def _score(model: _WithCanaries, kind: str, probe: tuple[Tensor, Tensor]) -> Array:
    """Higher for canaries that the weights have taken in."""
    with torch.no_grad():
        if kind == "gradient":
            return model.canaries.weight[:, 0].double().numpy().copy()
        return -F.cross_entropy(model.network(probe[0]), probe[1], reduction="none").double().numpy()


def _moved(
    model: _WithCanaries, before: dict[str, Tensor], seen: list[Tensor], kind: str, probe: tuple[Tensor, Tensor]
) -> Array:
    """The product of each canary's gradient with the released one, at the weights of the step."""
    released = dict(zip((name for name, p in model.named_parameters() if p.requires_grad), seen))
    if kind == "gradient":
        return -released["canaries.weight"][:, 0].double().numpy()
    names = [name for name in before if name.startswith("network.")]

    def losses(weights: dict[str, Tensor]) -> Tensor:
        network = {name.removeprefix("network."): w for name, w in weights.items()}
        logits = torch.func.functional_call(model.network, network, (probe[0],))
        return F.cross_entropy(logits, probe[1], reduction="none")

    point, direction = ({name: values[name] for name in names} for values in (before, released))
    return torch.func.jvp(losses, (point,), (direction,))[1].detach().double().numpy()


def _guessed(scores: Array, inside: Array, delta: float, error: float) -> tuple[float, int, int]:
    """The best bound of a few numbers of guesses: half for the highest scores, half against the lowest."""
    order = np.argsort(scores)
    best = (-1.0, 0, 0)
    for part in _GUESSED:
        half = max(1, round(part * len(scores) / 2))
        correct = int(np.count_nonzero(inside[order[-half:]]) + np.count_nonzero(~inside[order[:half]]))
        bound = one_run_epsilon(len(scores), 2 * half, correct, delta, error / len(_GUESSED))
        best = max(best, (bound, 2 * half, correct))
    return best


def _check(plan: Plan, kind: str, view: str, canaries: int, confidence: float, available: int) -> None:
    if kind not in ("gradient", "input") or view not in ("white-box", "final-model"):
        raise AuditError(f"kind={kind!r}, view={view!r}: choose gradient or input, and white-box or final-model")
    if not plan.is_private:
        raise AuditError("this plan claims nothing (no noise, or an infinite epsilon): there is nothing to audit")
    if plan.adjacency == "replace-one":
        raise AuditError("a one-run audit leaves records out, which replace-one says nothing about; use audit_step")
    if not 100 <= canaries < plan.dataset_size <= available:
        raise AuditError(
            f"canaries={canaries} in a plan for {plan.dataset_size} records: use 100 or more canaries, fewer than the "
            f"plan's records, of which there can be {available} at most"
        )
    if not 0.5 <= confidence < 1:
        raise AuditError(f"confidence={confidence} must lie in [0.5, 1), for instance 0.999")
