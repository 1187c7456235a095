"""The folder that one run writes: what may be released in one half, what may not in the other.

Assumes one process a folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from diskdp.checkpoint import load_tree, previous_of, workroom
from diskdp.errors import CheckpointError, ConfigError
from diskdp.report.card import PrivacyCard

_README = (
    "`release/` (weights, privacy card) may be released under the guarantee on its card; `private/` "
    "(configuration, metrics, checkpoints, ledger, key) may not: it holds un-noised figures of the training data, and "
    "whoever has the key can subtract the noise.\n"
)
_COPIED = ("config.json", "checkpoint.safetensors", "ledger.jsonl", "metrics.jsonl")
_NOTICE = "un-noised figures of the training data: for the data holder alone, not covered by the guarantee"


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, and how each file is written.

    >>> RunFolder(Path("runs/first")).weights.as_posix()
    'runs/first/release/weights.safetensors'
    """

    root: Path

    @property
    def release(self) -> Path:
        return self.root / "release"

    @property
    def private(self) -> Path:
        return self.root / "private"

    @property
    def weights(self) -> Path:
        return self.release / "weights.safetensors"

    @property
    def checkpoint(self) -> Path:
        return self.private / "checkpoint.safetensors"

    @property
    def ledger(self) -> Path:
        return self.private / "ledger.jsonl"

    @property
    def key(self) -> Path:
        return self.private / "key"

    @property
    def metrics(self) -> Path:
        return self.private / "metrics.jsonl"

    @property
    def config(self) -> Path:
        return self.private / "config.json"

    def refuse_existing(self) -> None:
        """A run never writes into a folder that has something in it."""
        if self.root.is_dir() and not self.root.is_symlink() and not any(self.root.iterdir()):
            return  # left by a run that was cut off before its first file
        if self.root.exists() or self.root.is_symlink():
            raise ConfigError(f"{self.root}: exists already, left as it is; choose another --out, or --resume that run")

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder with the resolved configuration in it; its private half is for its owner alone."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.refuse_existing()
        self.root.mkdir(exist_ok=True)
        self.fill(config)

    def fill(self, config: Mapping[str, Any]) -> None:
        """What belongs into the folder before training begins."""
        self.private.mkdir(mode=0o700, exist_ok=True)
        (self.root / "README.md").write_text(_README, encoding="utf-8")
        self.append({"notice": _NOTICE})
        self._write_config(config)

    def discard(self) -> None:
        """Remove a folder in which nothing was trained."""
        if not self.ledger.exists():
            shutil.rmtree(self.root, ignore_errors=True)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        partial = self.config.with_suffix(".partial")
        partial.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self.config)

    def begun(self, config: Mapping[str, Any]) -> bool:
        """For going on with a run: whether there is a checkpoint, of a run that is the same but for settings of speed.

        A run that was cut off before its first checkpoint has released nothing, and begins anew. (In an account, whose
        ledger is elsewhere, the ledger refuses batches that were drawn before.)
        """
        if not self.private.is_dir():
            raise CheckpointError(f"{self.root}: no run to resume; leave out --resume")
        if not self.checkpoint.is_file():
            if self.ledger.exists():
                previous = previous_of(self.checkpoint)
                source = f"{previous.name} beside it" if previous.exists() else "a copy"
                raise CheckpointError(
                    f"{self.checkpoint}: is missing, but the ledger has steps; restore it from {source}"
                )
            return False
        self._require_same(config)
        return True

    def damaged(self, error: CheckpointError) -> CheckpointError:
        """The error, and what to do if it is that the checkpoint cannot be read."""
        previous = previous_of(self.checkpoint)
        try:
            load_tree(self.checkpoint)
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                step = load_tree(previous)["state"]["step"]
                return CheckpointError(
                    f"{error}. {previous.name} beside it is whole, of step {step}: copy it to {self.checkpoint.name}, "
                    "then resume"
                )
        return error

    def copy_to(self, root: Path) -> RunFolder:
        """A copy of the run that goes on by itself, with a key of its own.

        Under the same key it would draw the same batches as the original. The checkpoint is copied before the ledger,
        so that the ledger has every step of it.
        """
        copy = RunFolder(root)
        copy.refuse_existing()
        if not self.checkpoint.is_file():
            raise CheckpointError(f"{self.root}: no run to copy: it has no checkpoint")
        try:
            copy.private.mkdir(parents=True, mode=0o700)
            shutil.copyfile(self.root / "README.md", root / "README.md")
            for name in sorted(_COPIED):
                if (self.private / name).exists():
                    shutil.copyfile(self.private / name, copy.private / name)
            config = self.read_config()
            config["run"]["out"] = str(root.resolve())
            copy._write_config(config)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        return copy

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration of the run."""
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
            if not all(isinstance(config[section], dict) for section in ("plan", "run")):
                raise ValueError("no configuration of a run")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.config}: damaged ({error}); restore it from a copy") from None
        return dict(config)

    def _require_same(self, config: Mapping[str, Any]) -> None:
        before = self.read_config()
        for section in ("plan", "filter", "optimizer", "model", "data"):
            then, now = before.get(section), json.loads(json.dumps(config[section]))
            if then != now:
                raise CheckpointError(
                    f"{self.root}: was run with another {section} ({_difference(then, now)}); resume with "
                    "the same, or start a new run with another --out"
                )
        if before.get("run", {}).get("seed") != config["run"]["seed"]:
            raise CheckpointError(f"{self.root}: was run with another seed; resume with the same, or start a new run")

    def append(self, record: Mapping[str, Any]) -> None:
        """One line of metrics; what is not finite becomes null."""
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")

    def publish(self, model: nn.Module, card: PrivacyCard) -> None:
        """Write the half that may be released: weights and card."""
        self.release.mkdir(exist_ok=True)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        own = {name for name, _ in named}  # whatever else a module adds to its state stays here
        state = {name: t for name, t in model.state_dict().items() if name in own}
        weights = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
        self.private.mkdir(mode=0o700, exist_ok=True)
        with workroom(self.private / ".weights.partial") as room:  # what a kill leaves stays out of release/
            save_file(weights, room / "weights", metadata={"format": "pt"})
            os.replace(room / "weights", self.weights)
        (self.release / "card.json").write_text(card.to_json() + "\n", encoding="utf-8")
        (self.release / "card.md").write_text(card.to_markdown(), encoding="utf-8")


def _difference(then: object, now: object) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        changed = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
        return ", ".join(f"{key}: then {then.get(key)!r}, now {now.get(key)!r}" for key in changed)
    return f"then {then!r}, now {now!r}"
