"""Reads run folders for reports. Missing and torn parts are omitted, with a note."""

import marshal
import math
import os
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np
from pydantic import BaseModel, NonNegativeInt
from safetensors import SafetensorError, safe_open

from gpt2_ddp.checkpoint.checkpoint import MODEL, list_checkpoints
from gpt2_ddp.checkpoint.run_files import CONFIG, METRICS, SAMPLES, STATUS, is_event, read_lines, valid_rows
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_json, read_small, regular
from gpt2_ddp.reports.status import health, no_run

NEVER_UNKNOWN = ("loss", "val_loss", "grad_norm")
Row = dict[str, Any]
Series = tuple[np.ndarray, np.ndarray]  # steps [n] and values [n], float64; a value may be NaN or infinite
LARGEST_PICTURE = 2**23  # most bytes of a picture; 24 images take 300,000
AXES = ("steps", "tokens", "time")  # x axes; time is training time in seconds
LAST_STEP, LARGEST, SMALLEST = 2**53, 3.4e38, 1.2e-38  # limit of steps; largest and smallest normal number in fp32
NAME_LENGTH = 32
T = TypeVar("T")


class Classes(BaseModel):
    """A classifier's predictions at a step: names of the classes and, for each, the predicted classes' counts."""

    step: NonNegativeInt
    classes: list[str]
    confusion: list[dict[NonNegativeInt, NonNegativeInt]]


def _read_classes(file: Path) -> Classes:
    """Raises: OSError; ValueError for other content than evaluate.py's."""
    found = Classes.model_validate(read_json(file))
    number = len(found.classes)
    if len(found.confusion) != number or any(other >= number for row in found.confusion for other in row):
        raise ValueError("classes and confusion differ in size")
    return found


def _read_png(file: Path) -> bytes:
    """Raises: OSError; ValueError for another format."""
    content = read_small(file, LARGEST_PICTURE)
    if not content.startswith(b"\x89PNG"):
        raise ValueError("is no PNG")
    return content


class PackedRows(UserList[Any]):
    """Rows as bytes of their values, with shared names: a fifth of the memory of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[tuple[str, ...]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def append(self, item: Row) -> None:
        names = tuple(item)
        if names not in self._numbers:
            self._numbers[names] = len(self._names)
            self._names.append(names)
        self.data.append(marshal.dumps((self._numbers[names], *item.values())))

    def __getitem__(self, i: Any) -> Any:
        number, *values = marshal.loads(self.data[i])
        return dict(zip(self._names[number], values, strict=True))


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The readable content of a run folder."""

    name: str
    rows: PackedRows  # `tokens` and `tokens_per_second` count the unit; `loss_mean` is that since the row before
    events: list[Row]  # starts, rollbacks ...
    config: Row  # config.yaml, flat, with dotted keys
    status: Row
    samples: list[Row]
    parameters: int | None  # in the newest checkpoint; None without one
    notes: list[str]  # omitted parts
    unit: str  # tokens or samples
    classes: Classes | None  # of a classifier, from evaluate.py
    wrong: bytes  # PNG of misclassified test images; or empty

    def last(self, metric: str) -> Row:
        """The last row that holds a number as `metric`, or an empty one."""
        return next((row for row in reversed(self.rows) if _is_number(row.get(metric))), {})

    def best(self, metric: str) -> Row:
        """The row with the lowest `metric`, or an empty one. Losses over other tokens than the last do not compare."""
        scored = self.last(metric).get("val_tokens")
        alike = (row for row in self.rows if row.get("val_tokens") == scored and is_finite(row.get(metric)))
        return min(alike, key=lambda row: row[metric], default={})

    @cache  # noqa: B019, a report lives as long as its process
    def series(self, metric: str) -> Series:
        """`metric` in the rows that hold a number, finite or not. Outside fp32's range, it is infinite or 0."""
        rows = (row for row in self.rows if _is_number(row.get(metric)))
        steps, values = _pairs((row["step"], row[metric]) for row in rows)
        values[abs(values) > LARGEST], values[abs(values) < SMALLEST] = np.inf, 0
        return steps, values

    @property
    def tokens_per_step(self) -> float:
        """Tokens per optimizer step, 0 when unknown."""
        end = self.last("tokens")
        return end["tokens"] / end["step"] if end.get("step") and is_finite(end["tokens"]) else 0.0

    @property
    def start(self) -> Row:
        """The newest start, or an empty row."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    @cached_property
    def clock(self) -> Series:
        """Steps, and the seconds of training until each step, without a branch's parent: tokens of the logged intervals
        over their tokens per second, so without evaluations, saves and pauses."""
        begun = next((event for event in self.events if event["event"] == "branch"), {"step": 0})
        tokens = begun.get(self.unit)
        start: float = tokens if is_finite(tokens) else begun["step"] * self.tokens_per_step

        def found() -> Iterator[tuple[float, float]]:
            seconds, before = 0.0, start
            yield begun["step"], seconds
            for row in self.rows:
                speed, tokens = row.get("tokens_per_second"), row.get("tokens")
                if is_finite(speed) and is_finite(tokens) and speed > SMALLEST:
                    seconds, before = seconds + max(tokens - before, 0) / speed, tokens
                    yield row["step"], seconds

        return _pairs(found())

    def along(self, axis: str, steps: np.ndarray) -> np.ndarray | None:
        """Positions of steps [n] on one of AXES [n]; None if the rows lack it."""
        if axis == "steps":
            return steps
        places, values = self.clock if axis == "time" else self.series("tokens")
        finite = np.isfinite(values)
        return np.interp(steps, places[finite], values[finite]) if values[finite].any() else None

    def median(self, metric: str) -> float | None:
        """Median of the finite values of `metric`, if there are any."""
        values = self.series(metric)[1]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Reads run folders, each once, named by the shortest ends of their paths that differ. Raises: UserError for a
    folder without a complete row."""
    paths = list(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        parent = os.path.commonpath(paths)
        names = [os.path.relpath(path, parent) for path in paths]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def share_tokens(runs: Sequence[RunRecord]) -> bool:
    """Whether losses per token can be compared: all known tokenizers are the same."""
    return len({str(run.start["tokenizer_sha256"]) for run in runs if "tokenizer_sha256" in run.start}) < 2


def short_names(names: Sequence[str], most: int = NAME_LENGTH) -> list[str]:
    """Names that fit into a legend, cut in their middle; those that become equal get their number."""
    cut = [truncate(name, most) for name in names]
    return [f"{name} ({number})" if cut.count(name) > 1 else name for number, name in enumerate(cut, 1)]


def _read_run(folder: Path, name: str) -> RunRecord:
    if not os.path.isfile(folder / METRICS):
        raise no_run(folder, METRICS)
    notes: list[str] = []
    rates = (key.removesuffix("_per_second") for row in _steps(folder) for key in row if key.endswith("_per_second"))
    unit = next(rates, "") or next(("samples" for row in _steps(folder) if "samples" in row), "tokens")
    rows, events = _read_rows(folder / METRICS, notes, unit)
    if not rows:
        raise UserError("runs", folder, "no complete row in metrics.jsonl yet; wait for one, or name another run")
    config = _read(folder / CONFIG, lambda file: read_yaml(str(file)), notes) or {}
    status = _read(folder / STATUS, read_json, notes) or {}
    if status.get("state") == "running":  # it may have been killed since
        found = health(folder)
        status |= {"state": found.state, "reason": found.detail}
    samples = [row for row in _read_rows(folder / SAMPLES, notes, unit)[0] if isinstance(row.get("text"), str)]
    newest = max(folder.glob("evaluations/step-*/classes.json"), default=None)
    classes, wrong = _read(newest, _read_classes, notes) if newest else None, b""
    if newest and classes and (picture := newest.with_name("wrong.png")).exists():
        wrong = _read(picture, _read_png, notes) or b""
    parameters = _count_parameters(folder)
    return RunRecord(name, rows, events, flat(config), status, samples, parameters, notes, unit, classes, wrong)


def _steps(folder: Path) -> Iterator[Row]:
    return (line.row for line in read_lines(folder / METRICS) if line.row and not is_event(line.row))


def _read_rows(file: Path, notes: list[str], unit: str) -> tuple[PackedRows, list[Row]]:
    """The rows of a .jsonl file that no rollback has undone, and its events; `notes` get the number of other lines."""
    rows, events, unreadable = PackedRows(), [], 0
    for row in (line.row or {} for line in read_lines(file) if line.text.strip()):
        if not _is_step(row.get("step")):
            unreadable += 1
            continue
        if is_event(row):
            events.append(row)
        valid_rows([_in_tokens(row, unit)], rows)
    if unreadable:
        notes.append(f"{file.name}: {unreadable} unreadable line{'s' if unreadable > 1 else ''} omitted")
    return rows, events


def _in_tokens(row: Row, unit: str) -> Row:
    """The row without its chain, with NaN for null, as JSON has no NaN, and with its `unit` as tokens."""
    row = {name: value for name, value in row.items() if name != "chain"}
    row |= {metric: math.nan for metric in NEVER_UNKNOWN if metric in row and row[metric] is None}
    if "loss" in row and not (is_finite(row["loss"]) and is_finite(row.get("loss_mean"))):
        row["loss_mean"] = row["loss"]
    return row | {key.replace(unit, "tokens"): row[key] for key in (unit, f"{unit}_per_second") if key in row}


def _read(file: Path, read: Callable[[Path], T], notes: list[str]) -> T | None:
    """The content of a file; None, with a note, for a missing or unreadable one."""
    with suppress(UserError, OSError, ValueError):
        return read(file)
    notes.append(f"{file.name}: {'unreadable' if os.path.lexists(file) else 'missing'}")
    return None


def _count_parameters(folder: Path) -> int | None:
    """Parameters in the newest checkpoint; None if unknown."""
    with suppress(OSError, SafetensorError, IndexError):
        newest = list_checkpoints(folder / "checkpoints")[-1]
        with safe_open(regular(newest / MODEL), framework="numpy") as tensors:
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118, no dict
    return None


def _pairs(values: Iterable[tuple[float, float]]) -> Series:
    steps, second = np.fromiter(values, np.dtype((np.float64, 2))).T.copy()
    return steps, second


def _is_step(value: object) -> bool:
    return _is_number(value) and 0 <= value < LAST_STEP and value % 1 == 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number of fp32's range: neither NaN nor infinite."""
    return _is_number(value) and abs(value) <= LARGEST
