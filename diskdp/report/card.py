"""The privacy card of a run: what is promised, to whom, by which mechanism, and what the promise leaves out.

Holds nothing that was measured on data without noise, so it can be released with the weights.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from diskdp.private import PrivateTraining

_ADJACENCY = {
    "add-remove": "data sets that differ by one {unit}, added or removed",
    "replace-one": "data sets that differ by one {unit}, replaced by another",
    "zero-out": "data sets that differ by one {unit}, replaced by one that contributes nothing",
}
_SAMPLING = {
    "poisson": "Poisson: each {record} joins each batch independently with probability q = B/N",
    "truncated-poisson": (
        "truncated Poisson: each {record} joins each batch independently with probability q = B/N; "
        "of more than {cap} a uniformly random subset of that size is kept"
    ),
    "fixed-size": "fixed size: each batch is exactly B of N, drawn uniformly without replacement",
    "shuffled": ("shuffled: each epoch a fresh permutation, cut into batches; no amplification is claimed"),
}
_CLIPPING = {
    "flat": "flat: each {record}'s gradient is shortened to norm C if it is longer",
    "automatic": "automatic: each {record}'s gradient is scaled by C / (norm + 0.01)",
    "normalized": "normalised: each {record}'s gradient is scaled by min(1/C, 1/norm)",
    "adaptive": "adaptive: each {record}'s gradient is shortened to a threshold if it is longer, which begins at C and "
    "follows the {target}-quantile of the norms, by a count that is released with the gradients, noised with them (by "
    "{count} records) and part of S, which is that of the last threshold",
    "per-layer": "per layer: each of L layers' gradients is shortened to norm C/√L",
}
_ACCOUNTANTS = {
    "pld": "privacy loss distributions (exact Gaussian at q = 1)",
    "rdp": "Rényi differential privacy",
}
_NOISE = {
    "gaussian": "Gaussian",
    "secure": "Gaussian, keyed by the sum it is added to",
    "discrete": "Gaussian, rounded to a public grid as the sums are; what rounding adds to S is allowed for",
}
NOT_ACCOUNTED = (
    "hyper-parameter search: every other run on the same data, and the choice among them",
    "local diagnostics: losses, clipped fractions, gradient norms and batch sizes carry no noise",
    "choices made by looking at the data: the model, the schema, the cleaning of the table",
    "test data: a score on held-out rows says something about those rows",
    "timing, memory and other side channels of the machine that trained",
)


@dataclass(frozen=True)
class PrivacyCard:
    """What a reader of released weights needs to know. ``epsilon`` is what was spent, with repeated steps.

    ``private`` is whether (epsilon, delta) is a guarantee. ``sensitivity`` is S, the most that one record can
    contribute to a step's sum; the noise on that sum has standard deviation σS, and the sum is divided by B.
    """

    private: bool
    epsilon: float
    epsilon_planned: float
    delta: float
    unit: str
    adjacency: str
    sampling: str
    dataset_size: int
    batch_size: int
    max_batch_size: int | None
    examples_per_unit: int
    paper_accounting: bool
    sample_rate: float
    noise: str
    noise_multiplier: float
    noise_source: str
    clipping: str
    max_grad_norm: float
    sensitivity: float
    filter: str
    filter_factor: float
    steps_planned: int
    steps_charged: int
    accountant: str
    accountant_version: str
    public: tuple[str, ...]
    not_accounted: tuple[str, ...]
    warnings: tuple[str, ...]
    software: Mapping[str, str]

    def to_json(self) -> str:
        """The card as JSON; what is infinite is the text "inf"."""
        values = {
            name: "inf" if isinstance(value, float) and math.isinf(value) else value
            for name, value in asdict(self).items()
        }
        return json.dumps({"format": "diskdp-card/1", **values}, indent=2, ensure_ascii=False, allow_nan=False)

    def to_markdown(self) -> str:
        """The card as a page for people."""
        return _markdown(self)


def card_of(private: PrivateTraining, public: Sequence[str] = ()) -> PrivacyCard:
    """The card of a training as it stands; ``public`` says what else was taken as public, a line each.

    >>> import torch
    >>> from diskdp import Plan, privatize
    >>> model = torch.nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = Plan(
    ...     dataset_size=100, batch_size=10, steps=5, noise_multiplier=2.0, delta=1e-3, unit="patient"
    ... )
    >>> private = privatize(model, sgd, plan, loss_fn=lambda model, batch: model(batch)[:, 0])
    >>> card = card_of(private)
    >>> card.private, card.epsilon, card.steps_planned, card.adjacency
    (True, 0.0, 5, 'add-remove: data sets that differ by one patient, added or removed')
    """
    plan = private.plan
    record = plan.unit if plan.examples_per_unit == 1 else "record"
    warnings = []
    if not plan.is_private:
        warnings.append("NOT PRIVATE: epsilon is infinite, the plan adds no noise that protects anybody")
    if plan.paper_accounting:
        warnings.append(
            "NOT A GUARANTEE: batches of a fixed size were accounted with the formula of Poisson ones, as papers do; "
            "epsilon is for comparison with such papers alone"
        )
    if private.reproducible:
        warnings.append("NOT PRIVATE: a seed was given, and whoever knows it can subtract the noise")
    if plan.is_private and plan.delta >= 1 / plan.dataset_size:
        warnings.append(f"delta is not below 1/N = {1 / plan.dataset_size:.3g}: publishing one record would satisfy it")
    factor = sum(abs(a) for a in private.filter.coefficients) if private.filter.clip == "separate" else 1.0
    return PrivacyCard(
        private=plan.is_guarantee and not private.reproducible,
        epsilon=private.epsilon,
        epsilon_planned=plan.epsilon,
        delta=plan.delta,
        unit=plan.unit,
        adjacency=f"{plan.adjacency}: {_ADJACENCY[plan.adjacency].format(unit=plan.unit)}",
        sampling=_SAMPLING[plan.sampling].format(record=record, cap=plan.max_batch_size),
        dataset_size=plan.dataset_size,
        batch_size=plan.batch_size,
        max_batch_size=plan.max_batch_size,
        examples_per_unit=plan.examples_per_unit,
        paper_accounting=plan.paper_accounting,
        sample_rate=plan.sample_rate,
        noise=plan.noise,
        noise_multiplier=plan.noise_multiplier,
        noise_source=_noise_source(private),
        clipping=_CLIPPING[plan.clipping].format(record=record, target=plan.target_quantile, count=plan.quantile_noise),
        max_grad_norm=plan.max_grad_norm,
        sensitivity=private.sensitivity,
        filter=repr(private.filter),
        filter_factor=factor,
        steps_planned=plan.steps,
        steps_charged=private.steps_charged,
        accountant=_ACCOUNTANTS[plan.accountant],
        accountant_version=f"dp-accounting {metadata.version('dp-accounting')}",
        public=(
            f"N = {plan.dataset_size}, the number of records: it fixes q; checked against the data at set-up",
            *_about_units(private),
            *public,
        ),
        not_accounted=NOT_ACCOUNTED,
        warnings=tuple(warnings),
        software={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("diskdp", "torch", "numpy", "dp-accounting")},
        },
    )


def _about_units(private: PrivateTraining) -> list[str]:
    most = private.plan.examples_per_unit
    if most == 1:
        return []
    how = "checked against the units that were named" if private.units_checked else "declared, and checked by nothing"
    return [f"that no {private.plan.unit} has more than {most} records: {how}"]


def _noise_source(private: PrivateTraining) -> str:
    if private.reproducible:
        return "a seed (reproducible)"
    return (
        "a secret key, kept in the private half of the run"
        if private.keeps_secret
        else ("a secret of the operating system, not kept")
    )


def _markdown(card: PrivacyCard) -> str:
    unproved = "**NOT A GUARANTEE.** " if card.paper_accounting else ""
    promise = (
        f"**({_number(card.epsilon)}, {card.delta:.3g})-differential privacy** for each {card.unit}, "
        f"under {card.adjacency.partition(': ')[0]} adjacency."
        if card.private
        else f"{unproved}**This run is NOT private.**"
    )
    facts = (
        ("unit of privacy", f"one {card.unit}{_records(card.examples_per_unit)}"),
        ("adjacency", card.adjacency),
        ("ε spent", f"{_number(card.epsilon)} (planned: {_number(card.epsilon_planned)})"),
        ("δ", f"{card.delta:.6g}"),
        ("accountant", f"{card.accountant}, {card.accountant_version}"),
        ("sampling", card.sampling),
        ("N, data set size", str(card.dataset_size)),
        ("B, expected batch size", str(card.batch_size)),
        ("q = B/N", f"{card.sample_rate:.6g}"),
        ("steps", f"{card.steps_charged} charged, {card.steps_planned} planned"),
        ("noise", f"{_NOISE[card.noise]}, standard deviation σS on the sum; from {card.noise_source}"),
        ("σ, noise multiplier", f"{card.noise_multiplier:.6g}"),
        ("clipping", card.clipping),
        ("C, clipping norm", _number(card.max_grad_norm)),
        (
            "S, sensitivity",
            f"{_number(card.sensitivity)} (the filter's clip mode multiplies it by {card.filter_factor:g})"
            + ("; a replaced record moves a sum by up to 2S" if card.adjacency.startswith("replace-one") else ""),
        ),
        ("filter", f"{card.filter}: works on noised gradients, at no privacy cost"),
    )
    software = ", ".join(f"{name} {version}" for name, version in card.software.items())
    lines = [
        "# Privacy card",
        "",
        *(f"> **Warning.** {warning}\n" for warning in card.warnings),
        promise,
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in facts),
        "",
        "## Taken as public knowledge",
        "",
        *(f"- {line}" for line in card.public),
        "",
        "## Not accounted",
        "",
        *(f"- {line}" for line in card.not_accounted),
        "",
        f"Made with {software}.",
    ]
    return "\n".join(lines) + "\n"


def _records(examples_per_unit: int) -> str:
    return "" if examples_per_unit == 1 else f", with at most {examples_per_unit} records"


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.6g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
