"""Before the first release for every new structure: who owns the rows, is anything missed, do examples mix.

Three measurements on one batch, at randomly perturbed weights (so that zero initialisations hide nothing):

- ownership: two backward passes, one with losses scaled by powers of two, assign rows to examples (`ownership`);
- completeness: Σ v_i g_i from the terms equals plain autograd's gradient of Σ v_i loss_i for random v;
- isolation: replacing some examples leaves the losses of the others, and every buffer, as they were.

They look at structure alone: examples whose numbers are not finite are replaced by others, they do not end a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diskdp.errors import GradientError
from diskdp.gradients import batches
from diskdp.gradients.ownership import Layout, Owner, find_layout, probe_exponents
from diskdp.gradients.pullback import parameter_terms, source_terms
from diskdp.gradients.randomness import RandomState
from diskdp.gradients.rules import default_rules
from diskdp.gradients.trace import Trace, Use

# Relative error of a sum over the batch that is taken for rounding; a missing use of relative size e passes with
# probability about 0.8 tolerance / e. Over the test models correct terms differed from autograd by at most 1.3e-7 of
# the whole gradient in float32, 3e-16 in float64 (6,220 comparisons each), so false alarms are far off.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# A parameter whose gradient is smaller than this part of the whole is compared on that scale: a bias that a
# normalisation cancels has a gradient of rounding errors.
NEGLIGIBLE = 0.03


@dataclass(frozen=True)
class Structure:
    """What was established: the layout of every use."""

    layouts: Mapping[int, Layout]

    def owner(self, use: Use, grad: Tensor, batch: int) -> Owner | None:
        """Who owns the rows of a gradient; None for a use that no loss feels."""
        layout = self.layouts.get(use.index)
        if layout is None and not grad.any():
            return None
        if layout is None or not layout.fits(grad.shape, batch):
            raise GradientError(
                f"{use.describe()}: no gradient reached this operation when the model was examined, or its shape did "
                "not follow the batch, so its rows cannot be assigned to examples; make the forward pass depend on "
                "shapes and random state only",
                use.targets,
            )
        return Owner(layout, batch)


def examine(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    parameters: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    random: RandomState,
    uses: Sequence[object],
) -> Structure:
    """Establish the structure of one kind of batch near the point ``values``, or say what is wrong with it.

    ``uses`` is the log of the forward pass that is to be explained: weights whose perturbation takes another path
    through the model are examined where they are. Leaves parameters, buffers and gradients as they were; the caller
    restores the random state.
    """
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    here = {name: values.get(name, p).detach() for name, p in parameters.items()}
    near = {name: _perturbed(value, generator) for name, value in here.items()}
    with _restored_buffers(model) as buffers, _grads_kept(parameters):
        run = _Run(model, loss_fn, parameters, near, random, buffers)
        if run.log(batch) != list(uses):
            run = replace(run, values=here)
        losses_B = run.plain(batch).detach()
        batch = _finite_examples(batch, losses_B)
        probe = _probe(run, batch, generator)
        run.compare(batch, probe)
        _isolate(run, batch, len(losses_B), generator)
    return Structure(probe.layouts)


def refuse_modules(model: nn.Module) -> None:
    """Refuse what is known to mix examples before any data is seen."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise GradientError(
                f"module {name or type(module).__name__}: BatchNorm in training mode mixes the examples of a batch; "
                "replace it by GroupNorm, or call .eval() on it",
                [f"{name}.{p}" if name else p for p, _ in module.named_parameters()],
            )


@dataclass(frozen=True)
class _Probe:
    layouts: Mapping[int, Layout]
    losses_B: Tensor
    weights_B: Tensor
    sums: Mapping[str, Tensor]  # Σ v_i g_i from the terms
    precision: torch.dtype


@dataclass(frozen=True)
class _Run:
    """The model at perturbed weights, every time from the same random state and buffers."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    parameters: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    random: RandomState
    buffers: Mapping[str, Tensor]

    def reset(self) -> None:
        self.random.restore()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])

    def plain(self, batch: Any) -> Tensor:
        """The losses as the model computes them on its own, without any tracing."""
        self.reset()
        with _exchanged(self.parameters, self.values), torch.enable_grad():
            return batches.checked_losses(self.loss_fn(self.model, batch))

    def traced(self, batch: Any) -> tuple[Trace, Tensor]:
        """The losses, and the trace that saw them computed."""
        self.reset()
        trace = Trace(self.parameters, self.values, batches.tensors(batch), default_rules())
        return trace, trace.losses(self.loss_fn, self.model, batch)

    def log(self, batch: Any) -> list[object]:
        """Operations that use parameters, in order."""
        return list(self.traced(batch)[0].log)

    def compare(self, batch: Any, probe: _Probe) -> None:
        """The terms' weighted sums against plain autograd."""
        self.reset()
        weights_B = probe.weights_B
        with _exchanged(self.parameters, self.values), torch.enable_grad():
            losses_B = batches.checked_losses(self.loss_fn(self.model, batch))
            for p in self.parameters.values():
                p.grad = None
            (losses_B * weights_B.to(losses_B)).sum().backward()  # reentrant checkpointing refuses grad()
            exact = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        tolerance = TOLERANCE[probe.precision]
        if not torch.allclose(losses_B, probe.losses_B, rtol=10 * tolerance, atol=tolerance):
            raise GradientError(
                "the losses change from one evaluation to the next with the same random state, so the two points of "
                "DiSK could not share dropout masks; draw randomness from torch's, numpy's or Python's global generator"
            )
        unused = [name for name in self.parameters if name not in exact]
        if unused:
            raise GradientError(
                f"{_listed(unused)}: trainable, but the loss does not depend on it; use it in the forward pass or "
                "freeze it with requires_grad_(False)",
                unused,
            )
        whole = torch.stack([g.double().norm() for g in exact.values()]).norm().item()
        for name, gradient in exact.items():
            mine = probe.sums.get(name)
            error = (gradient.double() - (0 if mine is None else mine.double())).norm().item()
            if not error <= tolerance * max(gradient.double().norm().item(), NEGLIGIBLE * whole):
                hidden = _custom_functions(losses_B)
                cause = f"; the graph contains the custom autograd Function {_listed(hidden)}" if hidden else ""
                raise GradientError(
                    f"{name}: its per-example gradients do not add up to autograd's gradient (relative error "
                    f"{error / max(gradient.double().norm().item(), 1e-300):.1e}), so some use of it was not seen"
                    f"{cause}. Write that use with ordinary torch operations",
                    [name],
                )


def _probe(run: _Run, batch: Any, generator: torch.Generator) -> _Probe:
    """Two backward passes over one traced forward pass: layouts, and the terms' weighted sums."""
    plain: dict[int, tuple[Use, Sequence[Tensor], Tensor]] = {}
    scaled: dict[int, Tensor] = {}

    def record(use: Use, saved: Sequence[Tensor], grad: Tensor) -> None:
        plain[use.index] = (use, saved, grad)

    def record_scaled(use: Use, saved: Sequence[Tensor], grad: Tensor) -> None:
        scaled[use.index] = grad

    trace, losses_B = run.traced(batch)
    batch_size = len(losses_B)
    exponents_B = probe_exponents(batch_size, generator)
    trace.differentiate(losses_B, torch.ones_like(losses_B), record, keep_graph=True)
    first = len(trace.log)
    trace.differentiate(losses_B, torch.exp2(exponents_B.double()).to(losses_B), record_scaled)
    shift = len(trace.log) - first if not scaled.keys() >= plain.keys() else 0  # recomputed segments count on
    layouts, collected = {}, []
    weights_B = torch.randn(batch_size, generator=generator, dtype=torch.float64)
    precision = losses_B.dtype
    for index, (use, saved, grad) in plain.items():
        again = scaled.get(index, scaled.get(index + shift))
        assert again is not None
        if not grad.any():
            continue
        precision = min(precision, grad.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        layout = Layout(0) if batch_size == 1 and grad.dim() else find_layout(grad, again, exponents_B)
        if layout is None:
            raise GradientError(
                f"{use.describe()}: the gradient at its output mixes examples, so no example's contribution can be "
                "bounded; remove what combines examples after this operation (batch statistics, a loss over pairs, a "
                "sum over the batch), or keep the examples on one axis",
                use.targets,
            )
        layouts[index] = layout
        collected += source_terms(use, saved, grad, Owner(layout, batch_size))
    sums = {}
    for name, terms in parameter_terms(collected).items():
        weights = weights_B.to(grad.device)
        sums[name] = torch.stack([term.weighted_sum(weights) for term in terms.values()]).sum(0)
    return _Probe(layouts, losses_B.detach(), weights_B, sums, precision)


def _isolate(run: _Run, batch: Any, batch_size: int, generator: torch.Generator) -> None:
    """Replace half of the examples by one another; the others must not notice, nor may any buffer."""
    if batch_size < 2:
        return
    order = torch.randperm(batch_size, generator=generator)
    changed, kept = order[: batch_size // 2], order[batch_size // 2 :]
    by = kept[: len(changed)]
    before = run.plain(batch).detach()
    buffers = {name: b.clone() for name, b in run.model.named_buffers()}
    for axis in (0, 1):  # tensors whose first two axes both have the batch's length leave a doubt
        after = run.plain(batches.replace_examples(batch, batch_size, changed, by, axis)).detach()
        for name, buffer in run.model.named_buffers():
            if not torch.equal(buffer.nan_to_num(), buffers[name].nan_to_num()):
                raise GradientError(
                    f"buffer {name} is computed from the batch: it would store un-noised data in the model; "
                    "set track_running_stats=False, or put that module in eval mode"
                )
        index = kept.to(before.device)
        if torch.allclose(before[index], after[index], rtol=1e-4, atol=1e-5, equal_nan=True):
            return
    raise GradientError(
        "the loss of one example changes when other examples of the batch are replaced, so one example's data reaches "
        "another's gradient; remove what looks across the batch (batch statistics, contrastive terms, normalisation "
        "of the inputs over the batch)"
    )


def _finite_examples(batch: Any, losses_B: Tensor) -> Any:
    """The batch with examples of non-finite loss replaced by others."""
    finite = torch.isfinite(losses_B.detach())
    if bool(finite.all()) or not bool(finite.any()):
        return batch
    bad, good = (~finite).nonzero().flatten(), finite.nonzero().flatten()
    return batches.replace_examples(batch, len(losses_B), bad, good[torch.arange(len(bad)) % len(good)], 0)


def _perturbed(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """The parameter plus noise of 5% of its size, and at least .02."""
    scale = max(0.02, 0.05 * float(parameter.detach().double().square().mean().sqrt().nan_to_num(0.0)))
    noise = torch.randn(parameter.shape, generator=generator) * scale
    return parameter.detach() + noise.to(parameter)


@contextlib.contextmanager
def _exchanged(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """The parameters hold ``values``' tensors inside, and the very tensors they held before afterwards."""
    held = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = values[name]
        yield
    finally:
        for name, p in parameters.items():
            p.data = held[name]


@contextlib.contextmanager
def _grads_kept(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters without gradients inside, and with the gradients they had before afterwards."""
    held = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        yield
    finally:
        for name, p in parameters.items():
            p.grad = held[name]


@contextlib.contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    saved = {name: b.clone() for name, b in model.named_buffers()}
    try:
        yield saved
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(saved[name])


def _custom_functions(losses_B: Tensor) -> list[str]:
    """Names of autograd Functions written in Python in the graph of the losses."""
    found: dict[str, None] = {}
    stack, seen = [losses_B.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[type(node).__name__.removesuffix("Backward")] = None
        stack += [parent for parent, _ in node.next_functions]
    return list(found)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
