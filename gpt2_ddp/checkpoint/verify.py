"""Which checkpoints are intact, by their manifests and by the rows of their run.

find_checkpoint     of a command: the path of a checkpoint, or of a run folder
newest_intact       of a run folder: the newest that passes, the others set aside
verify_recorded     = verify + record_defect
verify              every file has the size and the hash of the manifest
record_defect       the rows of the run record this checkpoint, or a kill came before its row
"""

import errno
import hashlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import ValidationError
from safetensors import SafetensorError

from gpt2_ddp.checkpoint.format import (
    CONFIG,
    FOLDER,
    FORMATS,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Checkpoint,
    list_checkpoints,
    part_names,
    seal,
    step_of,
)
from gpt2_ddp.config.cli import parse_yaml
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import (
    LFS_HINT,
    check_file_name,
    free_name,
    fsync_path,
    is_lfs_pointer,
    no_such_folder,
    parse_json,
    read_small,
    regular,
    sha256_file,
    writing,
)
from gpt2_ddp.project import command_for
from gpt2_ddp.records.rows import METRICS, Row, is_rollback, read_events
from gpt2_ddp.state import KINDS, State

LARGEST = {STATE: 2**26, CONFIG: 2**16}
"""Most bytes of the files of fields. The parser of YAML takes about 10 s
per megabyte (estimate)."""
LARGEST_MANIFEST = 2**20
"""Most bytes of a manifest."""
TENSORS = ".safetensors"  # end of the large files' names
# seconds after which a file is read again that the disk or the network failed to read
PAUSES = (0.1, 1.0, 3.0)
# of the expected kind
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)

T = TypeVar("T")


class CorruptCheckpoint(Exception):
    """A checkpoint with a file that differs from what was written, for `reason`."""

    suffix = "corrupt"  # of its folder, once it is set aside

    def __init__(self, file: Path, reason: str):
        self.file = file
        self.reason = reason
        super().__init__(f"{truncate(file, 1000)}: {reason}")


class RejectedCheckpoint(CorruptCheckpoint):
    """An intact checkpoint that is not the one that its run recorded."""

    suffix = "rejected"


def newest_intact(
    folder: Path, weights: bool = True, put_aside: bool = False, until: float = math.inf
) -> Checkpoint | None:
    """The newest intact checkpoint up to step `until` that its run recorded, or None. If `weights`,
    hashes the large files too, and prints a warning for each other one; renames it to `*.corrupt`
    or `*.rejected` if `put_aside`.
    Raises: UserError."""
    for path in reversed(list_checkpoints(folder)):
        try:
            if step_of(path) <= until:
                return verify_recorded(path, weights)
        except CorruptCheckpoint as damage:
            if not path.is_dir():  # its running trainer has written a newer one and deleted this
                return newest_intact(folder, weights, put_aside, until)
            moved = ""
            if put_aside:
                with writing(path):
                    aside = free_name(path.with_name(f"{path.name}.{damage.suffix}"))
                    moved = f"moved to {path.rename(aside).name}, "
            if weights:
                print(f"warning: {damage}; {moved}trying the previous one", file=sys.stderr)
    return None


def verify_recorded(path: Path, weights: bool = True) -> Checkpoint:
    """As `verify`; and compares the checkpoint with the rows of its run, if it is in a run folder.
    Raises: as `verify`; RejectedCheckpoint."""
    checkpoint = verify(path, weights)
    rows = path.absolute().parent.parent / METRICS
    events, before = read_events(rows, checkpoint.state.log.chain)
    if defect := record_defect(checkpoint, events, before):
        raise RejectedCheckpoint(path, defect)
    return checkpoint


def record_defect(checkpoint: Checkpoint, events: Sequence[Row], before: int) -> str:
    """Why a checkpoint is not the one that the events of its run record; empty if it is. It was
    written after the first `before` events. A kill may have come before its row; then no checkpoint
    of its step or a later one follows."""
    folder = checkpoint.path
    later = events[before:]
    step = step_of(folder) if FOLDER.fullmatch(folder.name) else checkpoint.step
    if step != checkpoint.step:
        return f"holds the state of step {checkpoint.step}"
    starts = [row for row in events if row["event"] == "start"]
    start = starts[0] if starts else Row()
    run_id = checkpoint.state.progress.run_id
    recorded_id = start.get("run_id", run_id)
    if run_id != recorded_id:
        return f"is of the run {run_id}, its folder has the run {recorded_id}"
    recorded = [
        saved for row in later if (saved := recorded_checkpoint(row)) and saved.step == step
    ]
    if recorded:
        is_same = recorded[-1].sha256 == sha256_file(folder / MANIFEST)
        return "" if is_same else f"its manifest's SHA-256 differs from {METRICS}'s"
    if _is_too_late(step, events[:before]):
        return f"holds the chain of a row in {METRICS} after which the run did not save it"
    passed = [
        row
        for row in later
        if row["event"] in ("start", "checkpoint", "end") and row["step"] >= step
    ]
    # rows that begin with a later start were deleted
    return f"is not recorded in {METRICS}" if passed and step > start.get("step", step) else ""


def _is_too_late(step: int, before: Sequence[Row]) -> bool:
    """Whether no run saves a checkpoint of this step after these events: it ended, or it saved this
    step or a later one and neither started nor rolled back since. Otherwise a forged checkpoint
    could name a row after its own record."""
    for row in reversed(before):
        saved = recorded_checkpoint(row) if row["event"] == "checkpoint" else None
        if row["event"] == "end" or (saved and saved.step >= step):
            return True
        if row["event"] == "start" or is_rollback(row):
            return False
    return False


class Recorded(NamedTuple):
    """A checkpoint as an event records it. The file may have any value as the hash."""

    step: int
    sha256: object


def recorded_checkpoint(row: Row) -> Recorded | None:
    """The checkpoint that an event records: the one just saved or, at a start, the newest."""
    match row if row["event"] == "checkpoint" else row.get("checkpoint"):
        case {"step": int(step), "sha256": sha256}:
            return Recorded(step, sha256)
        case _:
            return None


def verify(checkpoint: Path, weights: bool = True) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest; without `weights`, only sizes of the
    large files. Raises: CorruptCheckpoint for a damaged file; UserError for another format, and for
    a file that the disk fails to read."""
    manifest = _read(checkpoint / MANIFEST, lambda file: read_small(file, LARGEST_MANIFEST))
    files = _parse_manifest(checkpoint, manifest)

    def check(name: str) -> bytes:
        size, sha256 = files[name]
        is_hashed = weights or not name.endswith(TENSORS)
        return _read(
            checkpoint / name, lambda file: _check_file(file, size, sha256 if is_hashed else "")
        )

    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing and reading release Python's lock
        content = dict(zip(files, pool.map(check, files), strict=True))

    def parsed(name: str, parse: Callable[[bytes], T]) -> T:
        try:
            return parse(content[name])
        except ValueError as error:
            raise CorruptCheckpoint(checkpoint / name, " ".join(str(error).split())) from error

    state = parsed(STATE, parse_state)
    config = parsed(CONFIG, _parse_config)
    verified = Checkpoint(checkpoint, state, config, files)
    if weights:
        for name in (MODEL, OPTIMIZER):
            _check_header(verified, name)
    return verified


def _check_header(checkpoint: Checkpoint, name: str) -> None:
    """Reads the headers of the file `MODEL` or `OPTIMIZER`, or of its parts. Raises:
    CorruptCheckpoint for a file that is no safetensors file: its hash may fit, as anybody can
    compute hashes."""
    try:
        checkpoint.tensors(name)
        return
    except SafetensorError as error:
        problem = f"is no safetensors file ({one_line(error)})"
        cause = error
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        cause = error
    raise CorruptCheckpoint(checkpoint.path / name, problem) from cause


def one_line(error: Exception) -> str:
    """The beginning of a library's message."""
    return truncate(" ".join(str(error).split()), 150)


def parse_state(text: str | bytes) -> State:
    """The state in a file's text. Raises: ValueError that names the first wrong field."""
    try:
        kind = State.model_validate_json(text, strict=True).kind
        return KINDS.get(kind, State).model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the state"
        raise ValueError(f"{field}: {first['msg']}") from error


def _parse_config(text: bytes) -> dict[str, Any]:
    """The configuration in a file's text. Raises: ValueError."""
    config = parse_yaml(text.decode())
    if not isinstance(config, dict):
        raise ValueError("is no configuration")
    return cast(dict[str, Any], config)


def _read(file: Path, read: Callable[[Path], T]) -> T:
    """`read(file)`. Raises: CorruptCheckpoint for no file; UserError for an error of the
    disk that persists."""
    reason = ""
    for pause in (*PAUSES, 0):
        try:
            return read(file)
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
            if error.errno == errno.ENOENT:
                reason = "is missing"
            if error.errno in NO_FILE:
                raise CorruptCheckpoint(file, reason) from error
            # a network disk may answer again; a checkpoint set aside for its silence would be lost
            time.sleep(pause)
    hint = "check that disk, then run the same command again"
    raise UserError("checkpoint", file, f"{reason}; {hint}")


def _check_file(file: Path, size: int, sha256: str) -> bytes:
    """Checks a file's size and, unless it is empty, its SHA-256. Returns the content of a
    file of fields."""
    found_size = regular(file).stat().st_size
    if found_size != size:
        if is_lfs_pointer(file):  # it is not damaged, and stays in its place
            raise UserError("checkpoint", file, LFS_HINT)
        raise CorruptCheckpoint(file, f"has {found_size} bytes instead of {size}")
    if not sha256:
        return b""
    if size > (most := LARGEST.get(file.name, size)):
        raise CorruptCheckpoint(file, f"has {size:,} bytes, more than {most:,}")
    with file.open("rb") as stream:
        content = stream.read() if file.name in (STATE, CONFIG) else b""
        digest = hashlib.sha256(content) if content else hashlib.file_digest(stream, "sha256")
    if digest.hexdigest() != sha256:
        raise CorruptCheckpoint(file, "its SHA-256 differs from the manifest's")
    return content


def _parse_manifest(checkpoint: Path, content: bytes) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of each file."""
    file = checkpoint / MANIFEST
    try:
        manifest = parse_json(content)
        files = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
        format = manifest.get("format")
        sealed = manifest["sha256"] == seal(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(file, f"cannot be read ({error})") from error
    if not sealed:
        raise CorruptCheckpoint(file, "its own SHA-256 differs")
    if format not in FORMATS:
        known = " and ".join(map(str, FORMATS))
        formats = f"has format {format}, this release reads formats {known}"
        raise UserError("checkpoint", checkpoint, f"{formats}; use the release that wrote it")
    for name in (CONFIG, MODEL, OPTIMIZER, STATE):
        if not part_names(name, files):
            raise CorruptCheckpoint(file, f"does not list {name}")
    for name in files:
        try:
            check_file_name(name)
        except ValueError as error:
            problem = f"lists {truncate(name, 40)}, outside of the folder"
            raise CorruptCheckpoint(file, problem) from error
    return files


def find_checkpoint(
    path: Path, field: str = "checkpoint", weights: bool = True, kind: str = ""
) -> Checkpoint:
    """The checkpoint `path`, or the newest intact one of the run folder `path`, of a run of this
    `kind` (empty: any). Hashes the large files too if `weights`. Raises: UserError for the user's
    `field`, which names this path."""
    if FOLDER.fullmatch(path.name) or os.path.isfile(path / STATE):
        try:
            checkpoint = verify_recorded(path, weights)
        except CorruptCheckpoint as damage:
            file = damage.file
            problem = damage.reason
            if missing := no_such_folder(path):
                file = path
                problem = missing
            raise UserError(field, file, f"{problem}; name another checkpoint") from damage
    elif os.path.isdir(path / "checkpoints"):
        checkpoint = newest_intact(path / "checkpoints", weights)
    else:
        checkpoint = None
    if not checkpoint:
        problem = no_such_folder(path) or "holds no intact checkpoint"
        hint = "name a run folder or a step-XXXXXXXX folder in it"
        raise UserError(field, path, f"{problem}; {hint}")
    if kind and checkpoint.kind != kind:
        hint = f"name one of a {kind} run, or score it with `{command_for('evaluate')}`"
        raise UserError(field, path, f"is of a {checkpoint.kind} run; {hint}")
    return checkpoint


def recover(folder: Path) -> None:
    """Repairs a checkpoints folder after a killed or failed save: undoes a replacement, and deletes
    partial folders.
    Raises: UserError, as `files.writing`."""
    with writing(folder):
        for replaced in folder.glob(".step-*.replaced"):
            path = replaced.with_name(replaced.name[1 : -len(".replaced")])
            if not path.exists():
                replaced.rename(path)
                fsync_path(folder)
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover)
