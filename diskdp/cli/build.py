"""From a run's configuration to the things that train: data, model, optimizer, filter, learning rate."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from diskdp.cli.config import DataConfig, FilterConfig, ModelConfig, OptimizerConfig, PlanConfig, nearest
from diskdp.datasets import Scaling, Split, adult, load_images, load_table
from diskdp.errors import ConfigError
from diskdp.filters import DiSK, Filter, LowPass, NoFilter
from diskdp.plan import Plan
from diskdp.zoo import build

_DATA_KEYS = {
    "csv": (("train", "schema"), ("test",)),
    "parquet": (("train", "schema"), ("test",)),
    "images": (("folder",), ("classes", "scaling", "mean", "std")),
    "adult": ((), ()),
}
_FILTER_KEYS = {
    "disk": ((), ("kappa", "gamma", "clip", "c", "gain")),
    "lowpass": ((), ("kappa", "a", "b")),
    "none": ((), ()),
}


def load_data(config: DataConfig) -> Split:
    """Training and test examples, with a line for all that was declared about them."""
    _applicable(config, "data", config.kind, _DATA_KEYS[config.kind])
    if config.kind == "adult":
        return adult()
    if config.kind == "images":
        assert config.folder is not None
        return load_images(config.folder, n_classes=config.classes, scaling=_scaling(config))
    assert config.train is not None
    assert config.schema is not None
    for path in (config.train, config.test):
        if path is not None and (path.suffix in (".parquet", ".pq")) != (config.kind == "parquet"):
            raise ConfigError(f'[data] kind: "{config.kind}" does not fit the file {path}')
    return load_table(config.train, config.test, config.schema)


def build_plan(config: PlanConfig, rows: int, seeded: bool) -> Plan:
    """The plan; N is the number of training rows, taken as public, or the declared one."""
    return Plan(
        dataset_size=rows if config.dataset_size is None else config.dataset_size,
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps=config.steps,
        epsilon=config.epsilon,
        noise_multiplier=config.noise_multiplier,
        delta=config.delta,
        max_grad_norm=config.max_grad_norm,
        clipping=config.clipping,
        sampling=config.sampling,
        adjacency=config.adjacency,
        accountant=config.accountant,
        noise=config.noise or ("gaussian" if seeded else "secure"),
        unit=config.unit,
        max_batch_size=config.max_batch_size,
        examples_per_unit=config.examples_per_unit,
        paper_accounting=config.paper_accounting,
        target_quantile=config.target_quantile,
        quantile_noise=config.quantile_noise,
    )


def build_model(config: ModelConfig, split: Split, code_folder: Path) -> nn.Module:
    """The model, shown to work on rows of zeros. ``module:function`` is also looked for in ``code_folder``."""
    info = split.info
    with ExitStack() as stack:
        if config.init_seed is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(config.init_seed)
        model = build_from(config.name, split.info.input_shape, split.info.n_classes, config.options, code_folder)
    inputs = torch.zeros_like(split.train.tensors[0][:4])  # a model may be initialised by what it sees first
    expected, found = [len(inputs), info.n_classes], list(trial(config.name, model, inputs).shape)
    if found != expected:
        raise ConfigError(f"model {config.name!r}: must return logits {expected} here, and returns {found}")
    return model


def build_from(
    name: str, input_shape: Sequence[int], classes: int, options: dict[str, object], code_folder: Path
) -> nn.Module:
    """`zoo.build`, with ``code_folder`` on the Python path for ``module:function``."""
    folder = str(code_folder.resolve())
    if ":" in name and folder not in sys.path:
        sys.path.insert(0, folder)
    return build(name, input_shape, classes, options)


def trial(name: str, model: nn.Module, inputs: Tensor) -> Tensor:
    """What the model makes of some inputs, in eval mode, so that running statistics see nothing of them."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            outputs = model.eval()(inputs)
    except Exception as error:  # whatever the model raises on an input of this shape
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r}: fails on inputs of shape {list(inputs.shape[1:])} ({reason})") from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"model {name!r}: returns {type(outputs).__name__}, not a tensor of logits")
    return outputs


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name, its options checked against its signature."""
    base = torch.optim.Optimizer
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    if config.name not in known:
        raise ConfigError(f"[optimizer] name: torch.optim has no {config.name!r}{nearest(config.name, list(known))}")
    if not 0 < config.lr < math.inf:
        raise ConfigError(f"[optimizer] lr: must be positive and finite, got {config.lr}")
    if not 0 <= config.warmup < 1:
        raise ConfigError(f"[optimizer] warmup: a fraction of the steps, in [0, 1), got {config.warmup}")
    accepted = list(inspect.signature(known[config.name]).parameters)[1:]
    for option in config.options:
        if option not in accepted or option == "lr":
            hint = "; give lr beside name" if option == "lr" else nearest(option, accepted)
            raise ConfigError(f"[optimizer] options.{option}: {config.name} does not take it here{hint}")
    try:
        return known[config.name](model.parameters(), lr=config.lr, **config.options)
    except Exception as error:  # an option's value that torch refuses
        raise ConfigError(f"[optimizer] {config.name} cannot be made ({error})") from error


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of a step: a function of the step alone, so that resuming needs no state.

    >>> config = OptimizerConfig("SGD", 2.0, schedule="warmup-cosine", warmup=0.5)
    >>> [round(learning_rate(config, step, 8), 3) for step in range(8)]
    [0.5, 1.0, 1.5, 2.0, 2.0, 1.707, 1.0, 0.293]
    """
    if config.schedule == "constant":
        return config.lr
    warmup = round(config.warmup * steps) if config.schedule == "warmup-cosine" else 0
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def build_filter(config: FilterConfig) -> Filter:
    """The filter; settings that do not belong to its kind are refused."""
    _applicable(config, "filter", config.kind, _FILTER_KEYS[config.kind])
    if config.kind == "none":
        return NoFilter()
    if config.kind == "lowpass":
        coefficients = config.a is not None or config.b is not None
        kappa = DiSK.kappa if config.kappa is None and not coefficients else config.kappa
        return LowPass(kappa=kappa, a=config.a, b=config.b)
    return DiSK(
        kappa=DiSK.kappa if config.kappa is None else config.kappa,
        gamma=DiSK.gamma if config.gamma is None else config.gamma,
        clip=DiSK.clip if config.clip is None else config.clip,
        c=config.c,
        gain=config.gain or "constant",
    )


def _scaling(config: DataConfig) -> str | Scaling:
    if config.mean is None and config.std is None:
        return config.scaling or "signed"
    if config.mean is None or config.std is None or config.scaling is not None:
        raise ConfigError("[data] scaling: give a name, or mean and std, not both")
    return Scaling(tuple(config.mean), tuple(config.std), "declared in the run file")


def _applicable(config: object, section: str, kind: str, keys: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    """The keys that a kind needs are there, and none that it has no use for."""
    needed, optional = keys
    given = [name for name, value in vars(config).items() if name != "kind" and value is not None]
    for name in needed:
        if name not in given:
            raise ConfigError(f'[{section}] {name}: is missing; kind "{kind}" needs it')
    for name in given:
        if name not in needed + optional:
            takes = ", ".join(needed + optional) or "no further keys"
            raise ConfigError(f'[{section}] {name}: has no meaning for kind "{kind}", which takes {takes}')
