"""Run folders as a report reads them back: what is missing or torn is left out, and said."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import SafetensorError, safe_open

from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.status import health
from gpt2_ddp.run.checkpoint import MODEL, list_checkpoints
from gpt2_ddp.run.folder import read_lines, standing

NEVER_UNKNOWN = ("loss", "val_loss", "grad_norm")
Row = dict[str, Any]
Series = tuple[np.ndarray, np.ndarray]
"""Steps [n] and values [n], float64; a value may be NaN or infinite."""


@dataclass(frozen=True)
class RunRecord:
    """A run folder as far as it could be read.

    Args:
        rows: what they count, tokens or another `unit` (samples), they hold as `tokens` and `tokens_per_second`.
        config: config.yaml, flat, with dotted keys.
        parameters: as nanoGPT counts them (no position embeddings), in the newest checkpoint; None when there is none.
        notes: what was left out, in words.
    """

    name: str
    rows: list[Row]
    config: Row
    status: Row
    samples: list[Row]
    parameters: int | None
    notes: list[str]
    unit: str = "tokens"

    def last(self, metric: str) -> Row:
        """The last row that holds a number as `metric`, or an empty one."""
        return next((row for row in reversed(self.rows) if _is_number(row.get(metric))), {})

    def series(self, metric: str) -> Series:
        """`metric` in the rows that hold a number, finite or not."""
        rows = [row for row in self.rows if _is_number(row.get(metric))]
        steps = np.array([row["step"] for row in rows], dtype=np.float64)
        return steps, np.array([row[metric] for row in rows], dtype=np.float64)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per optimizer step, 0 when unknown."""
        end = self.last("tokens")
        return end["tokens"] / end["step"] if end.get("step") else 0.0

    def median(self, metric: str) -> float | None:
        """Median of the finite values of `metric`, if there are any."""
        values = self.series(metric)[1]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Reads run folders, each once, named by as little of their paths as tells them apart.

    Raises:
        UserError: a folder is missing, or its metrics.jsonl is or has no complete row.
    """
    paths = list(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        parent = os.path.commonpath(paths)
        names = [os.path.relpath(path, parent) for path in paths]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_rows(file: Path, notes: list[str]) -> list[Row]:
    """The objects in a .jsonl file, if there is one; lines that hold none are told to `notes`."""
    lines = [line for line in read_lines(file) if line.text.strip()]
    rows = [line.row for line in lines if line.row is not None]
    if unreadable := len(lines) - len(rows):
        notes.append(f"{file.name}: {unreadable} unreadable line{'s' if unreadable > 1 else ''} left out")
    return rows


def _read_run(folder: Path, name: str) -> RunRecord:
    if not os.path.isfile(folder / "metrics.jsonl"):
        places = [place for place in (folder, folder.parent) if os.path.isdir(place)]
        problem = "holds no metrics.jsonl" if folder in places else "there is no such folder"
        near = sorted(str(row.parent) for place in places for row in place.glob("*/metrics.jsonl"))
        cure = "give a run folder, " + (f"like {', '.join(near[:3])}" if near else "as train_gpt2.py writes it")
        raise UserError("runs", folder, f"{problem}; {cure}")
    notes: list[str] = []
    rows = standing(row for row in read_rows(folder / "metrics.jsonl", notes) if _is_number(row.get("step")))
    for row in rows:  # JSON has no NaN: tracking writes null where a number was not finite
        row |= {metric: math.nan for metric in NEVER_UNKNOWN if metric in row and row[metric] is None}
    rates = (key.removesuffix("_per_second") for row in rows for key in row if key.endswith("_per_second"))
    unit = next(rates, "samples" if any("samples" in row for row in rows) else "tokens")
    for row in rows:
        row |= {key.replace(unit, "tokens"): row[key] for key in (unit, f"{unit}_per_second") if key in row}
    if not rows:
        raise UserError("runs", folder, "no complete row in metrics.jsonl yet; wait for one, or give another run")
    config = _read_mapping(folder / "config.yaml", notes)
    status = _read_mapping(folder / "status.json", notes)
    if status.get("state") == "running":  # it may have been killed since
        found = health(folder)
        status |= {"state": found.state, "reason": found.detail}
    written = standing(row for row in read_rows(folder / "samples.jsonl", notes) if _is_number(row.get("step")))
    samples = [row for row in written if isinstance(row.get("text"), str)]
    return RunRecord(name, rows, dict(_flat(config)), status, samples, _count_parameters(folder), notes, unit)


def _read_mapping(file: Path, notes: list[str]) -> Row:
    """A YAML or JSON object (JSON is YAML); an absent or unreadable one is empty and goes to `notes`."""
    value = None
    if file.is_file():
        try:
            value = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, yaml.YAMLError):
            value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{file.name}: {'unreadable' if file.is_file() else 'missing'}")
    return {}


def _count_parameters(folder: Path) -> int | None:
    try:
        newest = list_checkpoints(folder / "checkpoints")[-1] / MODEL
        with safe_open(newest, framework="numpy") as tensors:  # reads the header alone
            names = [name for name in tensors.keys() if name != "wpe.weight"]  # noqa: SIM118, it is not a dict
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    except (IndexError, OSError, SafetensorError):
        return None


def _flat(config: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
