"""The files of a run folder: names, and rows of metrics.jsonl. No torch.

A row is of a step or, with an `event`, of the run: a start, a checkpoint, a sample, a rollback, a
branch, an end. Each line ends with its `chain`, a hash of all lines up to it, so changed and
removed rows are detected.
"""

import fcntl
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from gpt2_ddp.files import (
    free_name,
    fsync_path,
    parse_json,
    read_json,
    regular,
    writing,
)
from gpt2_ddp.state import FIRST_CHAIN, FeedState, GPTData, JobData, Parent, Setup, next_chain

METRICS = "metrics.jsonl"
STATUS = "status.json"
CONFIG = "config.yaml"
RECORDS = (METRICS, CONFIG, STATUS)
"""In the order of their writing at the end of a run. Who copies them reads them in the other order:
so no status is newer than the rows beside it."""
COMPRESSORS = "compressors.json"
"""What compressors need for the run's validation text; a completed run may have it."""
LONGEST_LINE = 2**26
"""Most bytes of a line that is read as a row. A line may have no end: a hole of a file
looks like zeros."""
PATIENCE = 20
"""Most seconds in which the end of a stopped run is copied to its mirror."""
Outcome = Literal["completed", "stopped", "diverged"]
"""How a run ended: `stopped` on request, with a checkpoint; `diverged` by too many bad steps, or
useless weights."""

Row = dict[str, Any]
"""A row of metrics.jsonl, of a step or an event: values by their fields' names."""


class Field(NamedTuple):
    """A field of rows. docs/files.md has units and meanings."""

    text: str = ""  # in the terminal
    panel: str = ""  # title in a report
    kind: Literal["repeated", "measured", "counted", "own"] = "repeated"
    """What readers expect of the value:

    - repeated: equal when trained again, floats up to the order of sums; null if not finite.
    - measured: differs when trained again; null if unknown.
    - counted: a share of samples, which another order of sums may change.
    - own: a task's own number, of which nothing is expected.
    """
    unit: str = ""  # in a report
    scale: float = 1.0  # what a report divides by, to have that unit


FIELDS = {
    # of every row
    "event": Field(),
    "chain": Field(kind="measured"),
    # of steps, in the order in which the terminal shows them
    "step": Field(),
    "epoch": Field(),
    "epoch/NAME": Field(),
    "tokens": Field(),
    "tokens/NAME": Field(),
    "samples": Field(),
    "loss": Field(),
    "loss_mean": Field(text="loss_mean {:.4f}"),
    "not_finite": Field(),
    "train_loss": Field(),
    "val_loss": Field(text="val_loss {:.4f}"),
    "val_loss/NAME": Field(),
    "val_bits_per_byte": Field(text="bits/byte {:.4f}"),
    "val_bits_per_byte/NAME": Field(),
    "val_tokens": Field(),
    "val_samples": Field(),
    "val_accuracy": Field(text="val_accuracy {:.2%}", kind="counted"),
    "val_top5": Field(kind="counted"),
    "lr": Field(text="lr {:.3g}", panel="Learning rate"),
    "grad_norm": Field(text="norm {:.3g}", panel="Gradient norm (before clipping, log scale)"),
    "skipped": Field(),
    "tokens_per_second": Field(panel="Throughput ({unit} per second)", kind="measured"),
    "mfu": Field(text="mfu {:.1%}", kind="measured"),
    "memory": Field(panel="Memory of the main process (GB)", kind="measured", unit="GB", scale=1e9),
    "data_share": Field(panel="Waiting for data (share of the time)", kind="measured"),
    "order_digest": Field(),
}
"""Every field that the core writes to the rows of steps, by name. NAME is a source of a mixture,
and any task's speed is declared as `tokens_per_second`. A name that is missing here is a task's own
number, and no replay compares it. So a test trains runs and looks up the names in their rows."""
EVENTS = {
    "start": (
        *("kind", "run_id"),
        *Setup.model_fields,
        *GPTData.model_fields,
        *JobData.model_fields,
        *("steps", "config", "command", "commit", "hardware", "checkpoint", "kept", "rejected"),
        "forecast",  # of a new run whose settings a rule has chosen
    ),
    "checkpoint": ("sha256", "kept"),
    "length": (
        *("steps", "minutes", "passed_seconds"),
        *("step_seconds", "evaluation_seconds", "save_seconds", "sample_seconds", "config"),
    ),
    "interval": (
        *("every", "every_seconds", "lost_seconds", "share"),
        *("step_seconds", "save_seconds", "written_seconds"),
    ),
    "rollback": ("from", "skipped_range", "order_digest"),
    "sample": ("prompt", "text"),
    "branch": (*Parent.model_fields, *FeedState.model_fields),
    "end": ("outcome", "kept"),
}
"""The fields of each event, besides `event`, `step` and `chain`. A task's own number in the rows of
steps may have one of these names."""
OWN = Field(kind="own")


@cache
def field_of(name: str) -> Field:
    """The declaration of a field in a row of a step. Any name that is not declared is a task's own
    number."""
    source = name.partition("/")[0]
    if name.endswith("_per_second"):
        return FIELDS["tokens_per_second"]
    if source != name:
        return FIELDS.get(f"{source}/NAME", OWN)
    return FIELDS.get(name, OWN)


def is_locked(folder: Path) -> bool:
    """Whether a trainer has locked the run folder. For other processes: in the trainer, this would
    unlock it."""
    with suppress(OSError), regular(folder / ".lock").open() as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def ended_status(run: Path) -> Row:
    """The content of status.json of a run that has ended; empty for any other run, and without a
    readable file."""
    with suppress(OSError, ValueError):
        status = read_json(run / STATUS)
        if status.get("state") in get_args(Outcome):
            return status
    return {}


def is_complete(run: Path) -> bool:
    """Whether a run is recorded as completed."""
    return ended_status(run).get("state") == "completed"


def compressor_scores(run: Path) -> dict[str, float]:
    """Bits per byte that compressors need for a run's validation text, by their names; none if the
    run has no readable file of them."""
    with suppress(OSError, ValueError):
        scores = read_json(run / COMPRESSORS).get("bits_per_byte")
        if isinstance(scores, dict) and all(type(bits) is float for bits in scores.values()):
            return scores
    return {}


def split_chain(line: str) -> tuple[str, str | None]:
    """The row's JSON text without its chain, and the chain; None if it has none."""
    chained = re.fullmatch(r'(.*), "chain": "([0-9a-f]{64})"}', line)
    if not chained:
        return line, None
    return chained[1] + "}", chained[2]


def is_own(name: str) -> bool:
    """Whether a field of a row is a task's own number."""
    return field_of(name).kind == "own"


def is_event(row: Row) -> bool:
    """Whether a row records an event of the run (start, checkpoint, rollback, end ...) instead
    of a step."""
    return "event" in row


def is_rollback(row: Row) -> bool:
    """Whether a row records a rollback to its step; later rows continue from that step."""
    return row.get("event") == "rollback"


def valid_rows(rows: Iterable[Row], event: str | None = None) -> list[Row]:
    """The rows of steps, or of this event, that no rollback undid."""
    valid: list[Row] = []
    for row in rows:
        if is_rollback(row):
            while valid and valid[-1]["step"] > row["step"]:
                valid.pop()
        elif row.get("event") == event:
            valid.append(row)
    return valid


def finite(row: Row) -> Row:
    """The row with None for numbers that are not finite, which JSON lacks."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def time_left(row: Row, steps: int) -> float | None:
    """Seconds to step `steps` at the row's speed, without evaluations and checkpoints; None if the
    row has no speed."""
    unit, rate = speed_of(row)
    if not rate:
        return None
    units_left = (steps - row["step"]) * row[unit] / row["step"]
    return units_left / rate


def speed_of(row: Row) -> tuple[str, float]:
    """The unit of the row's speed, and units per second; ("", 0) without a speed."""
    name = next((name for name in row if name.endswith("_per_second")), "")
    return name.removesuffix("_per_second"), row.get(name) or 0.0


class Line(NamedTuple):
    """A line of a .jsonl file."""

    text: str
    row: Row  # empty if the line is no object, or torn
    torn: bool  # without a newline, after a crash


def read_lines(file: Path) -> Iterator[Line]:
    """Yields the lines of a .jsonl file; none if the file is missing."""
    if file.is_file():
        with file.open("rb") as stream:
            yield from parse_lines(lines_of(stream))


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, a longer one in parts of `LONGEST_LINE`."""
    while line := stream.readline(LONGEST_LINE):
        yield line


def parse_lines(lines: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a .jsonl file, as `lines_of` yields them. A part of a longer one is no row."""
    for line in lines:
        text = line.removesuffix(b"\n")
        row = None
        is_whole = line.endswith(b"\n")
        if is_whole:
            with suppress(ValueError):
                row = parse_json(text)
        torn = not is_whole and len(line) < LONGEST_LINE
        yield Line(text.decode(errors="replace"), row if isinstance(row, dict) else {}, torn)


def read_events(file: Path, chain: str = FIRST_CHAIN) -> tuple[list[Row], int]:
    """The events of metrics.jsonl, and how many come up to the row with this chain; 0 if no
    row has it."""
    events: list[Row] = []
    before = 0
    with file.open("rb") if file.is_file() else BytesIO() as stream:
        # a long run has a million rows of steps: only these are parsed
        lines = (line for line in lines_of(stream) if b'"event"' in line or chain.encode() in line)
        for line in parse_lines(lines):
            if is_event(line.row) and type(line.row.get("step")) is int:
                events.append(line.row)
            if line.row.get("chain") == chain:
                before = len(events)
    return events, before


def head(file: Path, size: int) -> Iterator[bytes]:
    """The lines of a file's first `size` bytes; none if the file is missing."""
    if file.is_file():
        with file.open("rb") as stream:
            while size > 0 and (line := stream.readline(min(size, LONGEST_LINE))):
                size -= len(line)
                yield line


def chain_of(file: Path, size: int) -> str:
    """The chain of the rows in the first `size` bytes, or in a shorter file; empty if they are no
    whole rows with right chains."""
    chain = FIRST_CHAIN
    for line in head(file, size):
        text, written = split_chain(line.decode(errors="replace").removesuffix("\n"))
        chain = next_chain(chain, text)
        if written != chain or not line.endswith(b"\n"):
            return ""
    return chain


def repaired(file: Path, step: int) -> Iterator[bytes]:
    """The rows that a resumed run keeps of a damaged file: the sound ones up to this step. Copies
    the file aside, with a warning. Raises: UserError."""
    problem = "is missing"
    effect = f"the rows up to step {step} are lost"
    if file.is_file():
        aside = free_name(file.with_name(f"{file.name}.damaged"))
        with writing(file):
            shutil.copyfile(file, aside)  # a copy: after a crash, the file still has the good rows
            fsync_path(aside)
        problem = "a row before the checkpoint is missing or changed"
        effect = f"rows up to step {step} are kept; a copy is in {aside.name}"
    print(f"warning: {file}: {problem}; {effect}", file=sys.stderr)
    for line in read_lines(file):
        if type(line.row.get("step")) is int and line.row["step"] <= step:
            with suppress(ValueError):  # numbers that JSON lacks
                json.dumps(line.row, allow_nan=False)
                yield f"{line.text}\n".encode()
