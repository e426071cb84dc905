"""Repair of a damaged metrics.jsonl or samples.jsonl. Imported on demand."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpt2_ddp.checkpoint.run_files import Line, is_rollback, read_lines
from gpt2_ddp.files import free_name, fsync_path, writing


def repaired(file: Path, problem: str, step: int, rollbacks: int) -> Iterator[bytes]:
    """The lines that a resumed run keeps of a damaged file: the sound ones up to rollback number `rollbacks`, and those
    of steps until `step` after it. Copies the file aside, with a warning."""
    _set_aside(file, f"{problem}; lines up to step {step} are kept")
    backs = [0, *(line.number for line in read_lines(file) if _is_sound(line) and is_rollback(line.row or {}))]
    last = backs[: rollbacks + 1][-1]
    for line in filter(_is_sound, read_lines(file)):
        row = line.row or {}
        if line.number <= last or (row["step"] <= step and not is_rollback(row)):
            yield f"{line.text}\n".encode()


def _is_sound(line: Line) -> bool:
    """Whether the line is whole, and its row has a step and only numbers of JSON."""
    if not line.row or line.torn or type(line.row.get("step")) is not int:
        return False
    with suppress(ValueError):
        json.dumps(line.row, allow_nan=False)
        return True
    return False


def _set_aside(file: Path, problem: str) -> None:
    """Copies a damaged file, for repair, with a warning; moves what is no file. Raises: UserError."""
    where, aside = "", free_name(file.with_name(f"{file.name}.damaged"))
    with writing(file):
        if file.is_file():
            shutil.copyfile(file, aside)  # a copy: after a crash, the file still has the good rows
            fsync_path(aside)
            where = f"; a copy is in {aside.name}"
        elif os.path.lexists(file):
            where = f"; moved to {file.rename(aside).name}"
    print(f"warning: {file}: {problem}{where}", file=sys.stderr)
