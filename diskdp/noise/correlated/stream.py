"""Correlated noise, step by step: i.i.d. normals in, C⁻¹ z out, with as many tensors in memory as the strategy needs.

What may not happen is that two sums meet the same fresh normals, or noise that differs by what is known: then their
difference shows. So a step's key depends on the secret, the step, the sums bit by bit, the deviation, the strategy, and
by `history` on all of that for every step before. A run that is repeated exactly repeats its noise; where it comes to
another sum, everything fresh is independent from there on (docs/correlated.md says what that costs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from diskdp.errors import CheckpointError, NoiseError
from diskdp.noise.binding import bound_key
from diskdp.noise.correlated.strategies import MOST_STEPS, Banded, Strategy, Tree
from diskdp.noise.gaussian import Normals, arithmetic, place, refuse_unfit, result_dtype
from diskdp.noise.keys import Keystream, Secret

Tensors: TypeAlias = dict[str, Tensor]
Fresh: TypeAlias = Callable[[int], Tensors]  # the i-th fresh normals of a step, scaled

_HIDDEN = {torch.float32: torch.int32, torch.float64: torch.int64}
_SHOWN = {hidden: shown for shown, hidden in _HIDDEN.items()}


def advance(
    strategy: Strategy, step: int, memory: Mapping[int, Tensors], fresh: Fresh
) -> tuple[Tensors, dict[int, Tensors]]:
    """The noise of a step, and the memory after it; the memory given is left as it is.

    ``fresh`` hands over new tensors at each call. Products and sums are operations of their own, each rounded as IEEE
    754 has it, so that no processor and no number of threads comes to other bits.

    Banded: noise_t = z_t - Σ_{0<i<b} c_i noise_{t-i}, from the last b - 1. BLT: noise_t = z_t - Σ_j weights_j s_j,
    then s_j ← decays_j s_j + noise_t. Trees: the estimate of the node that is complete, less what it replaces.

    >>> first, memory = advance(Banded((1.0, 0.5)), 0, {}, lambda draw: {"w": torch.ones(1)})
    >>> second, memory = advance(Banded((1.0, 0.5)), 1, memory, lambda draw: {"w": torch.ones(1)})
    >>> first["w"].item(), second["w"].item()
    (1.0, 0.5)
    """
    if isinstance(strategy, Tree):
        return _advance_tree(strategy, step, memory, fresh)
    if isinstance(strategy, Banded):
        noise, before = fresh(0), strategy.bands - 1
        for back in range(1, min(before, step) + 1):
            _add(noise, memory[(step - back) % before], -strategy.coefficients[back])
        return noise, {**memory, step % before: noise} if before else {}
    noise = fresh(0)
    for buffer, weight in enumerate(strategy.weights):
        if buffer in memory:
            _add(noise, memory[buffer], -weight)
    after = {}
    for buffer, decay in enumerate(strategy.decays):
        held = memory.get(buffer, {name: torch.zeros_like(z) for name, z in noise.items()})
        after[buffer] = {name: held[name] * decay + z for name, z in noise.items()}
    return noise, after


def _advance_tree(
    strategy: Tree, step: int, memory: Mapping[int, Tensors], fresh: Fresh
) -> tuple[Tensors, dict[int, Tensors]]:
    """Memory: the estimates of the nodes that make up the present sum, by level."""
    kept = {} if step % strategy.restart_every == 0 else dict(memory)
    highest = strategy.completes(step)
    weights = strategy.variances(highest + 1)
    estimate = fresh(0)
    for level in range(1, highest + 1):
        if strategy.reduced:
            left, own = kept[level - 1], fresh(level)
            share = weights[level]
            estimate = {name: own[name] * share + (left[name] + e) * (1 - share) for name, e in estimate.items()}
    noise = {name: e.clone() for name, e in estimate.items()}
    for level in range(highest):
        _add(noise, kept.pop(level), -1.0)
    kept[highest] = estimate
    return noise, kept


class CorrelatedNoise:
    """Adds C⁻¹ z to named tensors, a step after the other, for as many steps as the sensitivity was computed for.

    One object is one mechanism. To start anew, make another with another secret: the two compose as two mechanisms.

    >>> noise = CorrelatedNoise(Secret.from_seed(0), Banded((1.0, 1.0)), steps=2)
    >>> first, second = (noise.add({"w": torch.zeros(30_000)}, std=1.0, step=t)["w"] for t in range(2))
    >>> round(float((first * second).mean()), 1), round(float((first + second).var()), 1)
    (-1.0, 1.0)
    """

    def __init__(self, secret: Secret, strategy: Strategy, steps: int) -> None:
        if not 1 <= steps <= MOST_STEPS:
            raise NoiseError(f"steps={steps!r}: must be from 1 to {MOST_STEPS}")
        self._secret = secret
        self._strategy = strategy
        self._steps = steps
        self._normals = Normals()
        self._step = 0
        self._std: float | None = None
        self._forms: tuple[str, ...] = ()
        self._history = ""
        self._memory: dict[int, Tensors] = {}

    def add(self, sums: Mapping[str, Tensor], std: float, step: int) -> dict[str, Tensor]:
        """New tensors `sum + std * (C⁻¹ z)_step`: float64 for float64 sums, float32 for all others."""
        noised = {name: total.detach().to(result_dtype(total), copy=True) for name, total in sums.items()}
        self.add_to(noised, std, step)
        return noised

    def add_to(self, sums: Mapping[str, Tensor], std: float, step: int) -> None:
        """Add `std * (C⁻¹ z)_step` to float32 and float64 tensors in their own memory.

        `std` is that of z: noise multiplier · S · `sensitivity(strategy, participation)`. It, and the tensors' names,
        shapes and types, stay what they are at step 0; steps follow one another.
        """
        refuse_unfit(sums, std)
        if step != self._step:
            raise NoiseError(
                f"step {step} where step {self._step} is due: correlated noise is made in order, once a step; load an "
                "earlier state to repeat steps, or start a new mechanism with a new secret"
            )
        if step >= self._steps:
            raise NoiseError(f"step {step} is beyond the {self._steps} that the sensitivity was computed for")
        forms = tuple(sorted(f"{name}: {total.dtype} {tuple(total.shape)}" for name, total in sums.items()))
        if step and (std != self._std or forms != self._forms):
            raise NoiseError("the deviation, or the tensors' names, shapes or types changed: start a new mechanism")
        public = (repr(self._strategy), self._steps, float(std).hex(), arithmetic(), self._history)
        key = bound_key(self._secret, "correlated noise", step, public, sums).hex()
        if std:
            noise, memory = advance(self._strategy, step, self._memory, self._fresh(sums, key, std))
            # from here on nothing is left half done but the sums, which their caller throws away
            self._memory = memory
        self._std, self._forms, self._step = std, forms, step + 1
        self._history = self._secret.derive("correlated history", key).hex()
        if std:
            for name, total in sums.items():
                total.detach().add_(noise[name].to(total.device))

    def _fresh(self, like: Mapping[str, Tensor], key: str, std: float) -> Fresh:
        def draw(number: int) -> Tensors:
            drawn = {name: torch.empty(total.shape, dtype=total.dtype) for name, total in like.items()}
            self._normals.write(drawn, self._secret.derive("correlated draw", key, number), std, adding=False)
            return drawn

        return draw

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on with the same secret. Memory is past noise, so it is encrypted under the secret.

        As in synthetic-IV encryption (binding.py): the key of the mask is a keyed hash of all that is kept, so no mask
        serves for two contents, and what was changed, or made with another secret, is not loaded.
        """
        clear = {f"{slot}/{name}": t for slot, tensors in self._memory.items() for name, t in tensors.items()}
        seal = self._seal(self._step, self._std, self._forms, self._history, clear)
        return {
            "strategy": repr(self._strategy),
            "steps": self._steps,
            "step": self._step,
            "std": self._std,
            "forms": list(self._forms),
            "history": self._history,
            "seal": seal,
            "memory": {name: self._masked(seal, name, t.view(_HIDDEN[t.dtype])) for name, t in clear.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of the same strategy, number of steps and secret; others are refused."""
        try:
            made_for = state["strategy"], state["steps"]
            step, std, history, seal = int(state["step"]), state["std"], str(state["history"]), str(state["seal"])
            forms, hidden = tuple(state["forms"]), {str(n): t.detach().cpu() for n, t in state["memory"].items()}
            clear = {name: self._masked(seal, name, t).view(_SHOWN[t.dtype]) for name, t in hidden.items()}
            sound = seal == self._seal(step, std, forms, history, clear)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"no state of correlated noise ({error!r}); start a new mechanism") from error
        if made_for != (repr(self._strategy), self._steps):
            raise CheckpointError(
                f"noise of {made_for[0]} over {made_for[1]} steps cannot go on as {self._strategy!r} over "
                f"{self._steps}; make the same strategy, or start a new mechanism with a new secret"
            )
        if not sound:
            raise CheckpointError(
                "the state of the correlated noise is damaged or was made with another secret; restore a copy, or "
                "start a new mechanism with a new secret, which composes with what was released"
            )
        self._step, self._std, self._forms, self._history = step, std, forms, history
        self._memory = {}
        for whole, tensor in clear.items():
            slot, _, name = whole.partition("/")
            self._memory.setdefault(int(slot), {})[name] = tensor

    def _seal(
        self, step: int, std: float | None, forms: tuple[str, ...], history: str, clear: Mapping[str, Tensor]
    ) -> str:
        public: tuple[str | int, ...] = (repr(self._strategy), self._steps, repr(std), len(forms), *forms, history)
        return bound_key(self._secret, "correlated state", step, public, clear).hex()

    def _masked(self, seal: str, name: str, numbers: Tensor) -> Tensor:
        """Whole numbers xor the seal's keystream at the place of their name."""
        size = numbers.numel() * numbers.element_size()
        mask = bytearray(size + Keystream.SLACK)
        stream = Keystream(self._secret.derive("correlated state mask", seal))
        stream.seek(place(name))
        stream.fill(memoryview(mask), size)
        kind = np.dtype(np.int32 if numbers.dtype == torch.int32 else np.int64)
        words = np.frombuffer(mask, kind, numbers.numel()).reshape(tuple(numbers.shape))
        return torch.from_numpy(np.asarray(numbers.contiguous().numpy() ^ words))


def _add(to: Tensors, these: Tensors, times: float) -> None:
    for name, tensor in these.items():
        to[name].add_(tensor * times)
