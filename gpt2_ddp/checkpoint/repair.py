"""Repair of a damaged metrics.jsonl or samples.jsonl. Imported on demand."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpt2_ddp.checkpoint.run_files import read_lines
from gpt2_ddp.files import free_name, fsync_path, writing


def repaired(file: Path, problem: str, step: int) -> Iterator[bytes]:
    """The lines that a resumed run keeps of a damaged file: the sound ones up to this step. Copies the file aside, with
    a warning; moves what is no file. Raises: UserError."""
    where, aside = "", free_name(file.with_name(f"{file.name}.damaged"))
    with writing(file):
        if file.is_file():
            shutil.copyfile(file, aside)  # a copy: after a crash, the file still has the good rows
            fsync_path(aside)
            where = f"; a copy is in {aside.name}"
        elif os.path.lexists(file):
            where = f"; moved to {file.rename(aside).name}"
    print(f"warning: {file}: {problem}; lines up to step {step} are kept{where}", file=sys.stderr)
    for line in read_lines(file):
        row = line.row or {}
        if not line.torn and type(row.get("step")) is int and row["step"] <= step:
            with suppress(ValueError):  # numbers that JSON lacks
                json.dumps(row, allow_nan=False)
                yield f"{line.text}\n".encode()
