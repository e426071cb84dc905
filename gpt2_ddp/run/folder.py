"""A run's folder: its lock, configuration, status and metrics, and what may change when the run goes on."""

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.training import RunConfig, TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically
from gpt2_ddp.processes.ranks import on_main


class RunFolder:
    """`output_dir/run_name`, held by one trainer at a time; on the main process only.

    Raises:
        UserError: the folder cannot be written, another trainer holds it, or `--fresh` finds it in use.
    """

    def __init__(self, config: RunConfig):
        self.path = Path(config.output_dir) / config.run_name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            cure = f"cannot be written ({error.strerror}); choose another output_dir"
            raise UserError("output_dir", self.path, cure) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it however we die
        except BlockingIOError as error:
            cure = "another trainer is running in this folder; stop it or choose another run_name"
            raise UserError("run_name", config.run_name, cure) from error
        if config.fresh and (any(self.checkpoints.iterdir()) or self.metrics.exists()):
            cure = f"{self.path} already holds a run, and nothing is overwritten; remove it or choose another run_name"
            raise UserError("fresh", "true", cure)

    def write_config(self, config: RunConfig) -> None:
        """Records the resolved configuration; `--config` takes it back."""
        write_atomically(self.path / "config.yaml", dump(config))

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Records running, completed, stopped or failed."""
        content = {"state": state, "step": step, "reason": reason}
        write_atomically(self.path / "status.json", json.dumps(content) + "\n")

    def cut_metrics(self, step: int) -> None:
        """Drops the rows after `step`, which will be trained again, and a last line that a crash left torn."""
        for file in (self.metrics, self.path / "samples.jsonl"):
            if file.exists():
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                kept = [line for line in lines if _step(line) <= step]
                write_atomically(file, "".join(line + "\n" for line in kept))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Adds a row to metrics.jsonl."""
        _append(self.metrics, row)

    def append_sample(self, step: int, text: str) -> None:
        """Adds a sample to samples.jsonl."""
        _append(self.path / "samples.jsonl", {"step": step, "text": text})


def check_resumable(saved: dict[str, Any], saved_manifest: str, config: TrainingConfig, manifest_hash: str) -> None:
    """Checks that going on with a run continues the same training.

    Model, seed, optimizer and schedule, block size, global batch and data have to be the run's own. Steps, micro-batch,
    processes, evaluation, logging and checkpoint settings may change.

    Args:
        saved: the run's configuration. saved_manifest: its data's manifest hash.

    Raises:
        UserError: naming every field that differs.
    """
    now = config.model_dump(mode="json")
    fixed = [("seed",), *[("model", name) for name in now["model"]], *[("optim", name) for name in now["optim"]]]
    fixed.append(("train", "global_batch_tokens"))
    mistakes = differences(saved, now, fixed)
    if saved_manifest != manifest_hash:
        cure = "its tokens are not the ones that the run was started with; give those back, or choose another run_name"
        mistakes += UserError("data.path", config.data.path, cure).mistakes
    if mistakes:
        raise UserError.join(mistakes)


def differences(saved: dict[str, Any], now: dict[str, Any], fixed: list[tuple[str, ...]]) -> list[str]:
    """The mistakes, in words, where configurations differ in fields that a run keeps; each field as its path."""
    mistakes = []
    for path in fixed:
        was, is_now = _get(saved, path), _get(now, path)
        if was != is_now:
            cure = f"the run was started with {was}; give that back, or choose another run_name for a new run"
            mistakes += UserError(".".join(path), is_now, cure).mistakes
    return mistakes


def open_run(accelerator: Accelerator, config: RunConfig) -> RunFolder | None:
    """The run's folder on the main process, None on the others.

    Raises:
        UserError: on every rank, as `RunFolder` does.
    """
    opened: list[RunFolder] = []  # it holds a lock, so it stays on the main process
    on_main(accelerator, lambda: opened.append(RunFolder(config)))
    return opened[0] if opened else None


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # torn: after every step


def _get(values: dict[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        values = values.get(name, {})
    return values
