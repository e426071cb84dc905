"""Reads run folders for reports, without torch. Missing and torn parts are omitted, with a note."""

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeGuard

import numpy as np

from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import no_such_folder, read_json
from gpt2_ddp.records.rows import (
    CONFIG,
    METRICS,
    STATUS,
    Row,
    compressor_scores,
    field_of,
    is_event,
    is_rollback,
    read_lines,
    valid_rows,
)
from gpt2_ddp.reports.status import health

SCORED = ("val_loss", "val_bits_per_byte")
# steps [n] and values [n], float64; a value may be NaN or infinite
Series = tuple[np.ndarray, np.ndarray]
LARGEST = 3.4e38  # about the largest number in fp32


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The readable content of a run folder. In the names of metrics, `tokens` stands for
    the run's unit."""

    folder: Path
    name: str
    # without events and what rollbacks have undone; `loss_mean` is the `loss` where that is not
    # known
    rows: list[Row]
    undone: list[list[Row]]  # the rows of steps that each rollback has undone
    events: list[Row]  # starts, rollbacks ...
    config: Row  # config.yaml, flat, with dotted keys
    status: Row
    samples: list[Row]
    compressors: dict[str, float]  # their bits per byte of the validation text
    notes: list[str]  # omitted parts
    changed: float  # when its rows last changed, in seconds since 1970

    @cached_property
    def fields(self) -> list[str]:
        """The names in the rows, in the order of their first rows."""
        return [*dict.fromkeys(name for row in self.rows for name in row)]

    @cached_property
    def unit(self) -> str:
        """What steps count: tokens, or a job's samples."""
        for name in self.fields:
            if name.endswith("_per_second"):
                return name.removesuffix("_per_second")
        return "tokens"

    def last(self, metric: str) -> Row:
        """The last row with a value of `metric`, or an empty one."""
        name = metric.replace("tokens", self.unit)
        return next((row for row in reversed(self.rows) if row.get(name) is not None), {})

    def best(self) -> Row:
        """The row with the lowest val_loss, or an empty one. Losses over other tokens than the last
        do not compare."""
        units = f"val_{self.unit}"
        newest = self.last("val_loss").get(units)
        scored = [row for row in self.rows if is_finite(row.get("val_loss"))]
        alike = [row for row in scored if row.get(units) == newest]
        return min(alike, key=lambda row: row["val_loss"], default={})

    @cache  # noqa: B019  a record lives as long as its report
    def series(self, metric: str) -> Series:
        """`metric` in the rows that hold a number, finite or not, by rising step. Above fp32's
        range, it is infinite."""
        return series_of(self.rows, metric.replace("tokens", self.unit))

    @property
    def tokens_per_step(self) -> float:
        """Tokens per optimizer step, 0 when unknown."""
        steps, tokens = self.series("tokens")
        return tokens[-1] / steps[-1] if steps.any() and np.isfinite(tokens[-1]) else 0.0

    @property
    def state(self) -> str:
        return truncate(self.status.get("state", "unknown state"), 60)

    @cached_property
    def scores(self) -> dict[str, float | None]:
        """The last value of each of SCORED; None if it is not finite."""
        values = {name: self.last(name).get(name) for name in SCORED}
        return {name: value if is_finite(value) else None for name, value in values.items()}

    @property
    def start(self) -> Row:
        """The newest start, or an empty row."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens until each of the steps [n], between rows in proportion [n]. Needs
        a known `tokens_per_step`."""
        known_steps, tokens = self.series("tokens")
        finite = np.isfinite(tokens)
        return np.interp(steps, known_steps[finite], tokens[finite])


def series_of(rows: Iterable[Row], name: str) -> Series:
    """A field of the rows that hold a number in it, as `RunRecord.series`."""
    pairs = ((row["step"], row[name]) for row in rows if _is_number(row.get(name)))
    steps, values = np.fromiter(pairs, np.dtype((np.float64, 2))).T
    steps, numbers = np.unique(steps, return_index=True)
    values = values[numbers]
    values[abs(values) > LARGEST] = np.inf
    return steps, values


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Reads run folders, each once, named by their paths below the folder that has all of them.
    Raises: UserError for a folder without a complete row."""
    paths = dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders)
    above = os.path.commonpath([path.parent for path in paths])
    return [_read_run(path, os.path.relpath(path, above)) for path in paths]


def share_tokens(runs: Iterable[RunRecord]) -> bool:
    """Whether losses per token can be compared: all known tokenizers are the same."""
    starts = [run.start for run in runs]
    hashes = {str(start["tokenizer_sha256"]) for start in starts if "tokenizer_sha256" in start}
    return len(hashes) < 2


def _read_run(folder: Path, name: str) -> RunRecord:
    if not os.path.isfile(folder / METRICS):
        hint = f"is no run folder, as it has no {METRICS}; name one, like runs/stdlib"
        raise UserError("runs", folder, no_such_folder(folder) or hint)
    notes: list[str] = []
    lines = _read_rows(folder / METRICS, notes)
    rows = valid_rows(lines)
    if not rows:
        hint = "has no complete row in metrics.jsonl yet; wait for one, or name another run"
        raise UserError("runs", folder, hint)
    content = _read(folder / CONFIG, lambda file: read_yaml(str(file)), notes)
    # a section without settings is no field
    config = {name: value for name, value in flat(content).items() if value != {}}
    events = [*filter(is_event, lines)]
    # runs of equal minutes belong together, whatever steps they had the time for
    for event in events:
        match event:
            case {"event": "length", "steps": steps, "minutes": minutes}:
                if steps == config.get("train.steps"):
                    config["train.minutes"] = minutes
                    config |= {"train.steps": None, "optim.decay_steps": None}
                    config["optim.earlier_ends"] = []
            case _:
                pass
    status = _read(folder / STATUS, read_json, notes)
    if status.get("state") == "running":  # it may have been killed since
        now = health(folder)
        status |= {"state": now.state, "reason": now.detail}
    changed = (folder / METRICS).stat().st_mtime
    samples = [row for row in valid_rows(lines, "sample") if isinstance(row.get("text"), str)]
    compressors = compressor_scores(folder)
    return RunRecord(
        folder=folder,
        name=name,
        rows=rows,
        undone=_undone(lines),
        events=events,
        config=config,
        status=status,
        samples=samples,
        compressors=compressors,
        notes=notes,
        changed=changed,
    )


def _undone(lines: Iterable[Row]) -> list[list[Row]]:
    """The rows of steps that each rollback has undone."""
    valid: list[Row] = []
    undone: list[list[Row]] = []
    for row in lines:
        if is_rollback(row):
            undone.append([before for before in valid if before["step"] > row["step"]])
            valid = [before for before in valid if before["step"] <= row["step"]]
        elif not is_event(row):
            valid.append(row)
    return undone


def _read_rows(file: Path, notes: list[str]) -> list[Row]:
    """All rows with a step; `notes` get the number of other lines."""
    rows: list[Row] = []
    unreadable = 0
    for line in read_lines(file):
        row = line.row
        step = row.get("step")
        if type(step) is not int or step < 0:
            unreadable += bool(line.text.strip())
            continue
        row.pop("chain", None)
        row |= {
            name: math.nan
            for name, value in row.items()
            if value is None and field_of(name).kind == "repeated"
        }
        if "loss" in row and not (is_finite(row["loss"]) and is_finite(row.get("loss_mean"))):
            row["loss_mean"] = row["loss"]
        rows.append(row)
    if unreadable:
        notes.append(f"{file.name}: unreadable lines omitted: {unreadable}")
    return rows


def _read(file: Path, read: Callable[[Path], Row], notes: list[str]) -> Row:
    """The content of a file; empty, with a note, for a missing or unreadable one."""
    with suppress(UserError, OSError, ValueError):
        return read(file)
    problem = "unreadable" if os.path.lexists(file) else "missing"
    notes.append(f"{file.name}: {problem}")
    return {}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number of fp32's range: neither NaN nor infinite."""
    return _is_number(value) and abs(value) <= LARGEST
