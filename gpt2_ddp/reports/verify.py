"""The seal of a run: the chain of its rows, and what their hashes pin. docs/verify.md lists what each check finds.

A row's chain is a hash of all rows before it, so what a sound chain holds needs no rule of its own. The rows pin the
checkpoints, the samples, the configuration and the data. What follows from these is recomputed (`recompute`), and
steps can be trained again (`replay`).
"""

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gpt2_ddp.checkpoint.checkpoint import MANIFEST, Checkpoint, list_checkpoints
from gpt2_ddp.checkpoint.intact import CorruptCheckpoint, record_defect, verify
from gpt2_ddp.checkpoint.run_files import (
    CONFIG,
    HASH,
    METRICS,
    SAMPLES,
    is_event,
    is_rollback,
    parse_lines,
    read_events,
    read_lines,
    sets_config,
    split_chain,
)
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import MOST_ITEMS
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest, token_dtype
from gpt2_ddp.data.mixture import recorded
from gpt2_ddp.data.shards import TokenStream, Windows, check_shard
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import sha256_file
from gpt2_ddp.reports.recompute import Recomputed, Record
from gpt2_ddp.reports.replay import Finding, Span, plan, replay
from gpt2_ddp.state import FIRST_CHAIN, NO_SAMPLES, Count, FeedState, Mixture, Positive, next_chain
from gpt2_ddp.tasks.own_code import trusted
from gpt2_ddp.tasks.pretraining import Pretraining

LINE = 1000
"""Most characters of a printed line."""
SHOWN = 5
"""Most defects of one kind to print; the others are counted."""


class Row(FeedState, strict=True):
    """The fields of rows that the checks read. The chain holds the others."""

    step: Count
    event: str | None = None
    config: dict[str, Any] = Field({})
    lr: float | None = None
    epoch_size: Positive = 1
    global_batch_size: Annotated[int, Field(ge=1, le=MOST_ITEMS)] = 1
    data_manifest: str = ""
    mixture: Mixture | None = None
    undone: Count = Field(0, alias="from")
    kept: list[Count] = Field([])
    rejected: list[str] = Field([])


class Log:
    """The rows of metrics.jsonl. `rows` reads them again, so the memory holds events alone.

    Args:
        chains: chains to look for.

    Attributes:
        events: by place. last: the last row. chain: of the last row.
        seen: of each of `chains`, the number of events up to its row. loose: number of steps' rows after all of them.
        defects: of the rows and the chain; a torn last line after a kill is allowed.
    """

    def __init__(self, file: Path, chains: set[str]):
        self._stream = file.open("rb") if file.is_file() else BytesIO()  # the same file, if a resume replaces it
        self._lines = self.loose = 0
        self.chain = FIRST_CHAIN
        self.events: dict[str, Record] = {}
        self.seen: dict[str, int] = {}
        self.last: Record = {}
        self.defects: list[str] = []
        for line in parse_lines(self._stream):
            if not line.torn:
                self._lines = line.number
                self._add(f"{METRICS}, line {line.number}", line.text, line.row or {}, chains)
        if next(iter(self.events.values()), {}).get("event") != "start":
            self.defects.append(f"{METRICS}: has no start in its first row")

    def _add(self, place: str, line: str, row: Record, chains: set[str]) -> None:
        text, chain = split_chain(line)
        if chain != next_chain(self.chain, text):
            self.defects.append(f"{place}: its chain is wrong: this row was changed, or one before it is missing")
        self.chain = chain or self.chain
        try:
            Row.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            self.defects.append(f"{place}: is no row: {'.'.join(map(str, first['loc']))} is {first['input']}")
            return
        self.last = row
        if is_event(row):
            self.events[place] = row
        else:
            self.loose += 1
        if chain in chains:
            self.seen[chain] = len(self.events)
            self.loose = 0

    def named(self, event: str) -> list[Record]:
        """The rows of an event."""
        return [row for row in self.events.values() if row["event"] == event]

    @property
    def config_row(self) -> Record:
        """The newest row that records a configuration; empty without one."""
        return next((row for row in reversed(self.events.values()) if sets_config(row)), {})

    def rows(self) -> Iterator[tuple[str, Record]]:
        """The place and content of each row, if there are no defects."""
        self._stream.seek(0)
        for line in islice(parse_lines(self._stream), self._lines):
            yield f"{METRICS}, line {line.number}", line.row or {}


def verify_run(command: VerifyConfig) -> int:
    """Exit code of verify_run.py: 0 if the run is intact, else 1. Prints an `ok` line or the defects of each check, and
    a `note` for what could not be checked. With `--replay`, trains a part of the run again.
    Raises: UserError for a missing run, for steps that cannot be replayed, or for other data in `--data`."""
    run, n_defects = Path(command.run), 0
    if not any(os.path.isfile(run / name) for name in (CONFIG, METRICS)):
        raise UserError("run", run, "has no config.yaml; name a run folder of a training script")
    span = plan(run, command.replay) if command.replay else None
    for what, defects in _check(run, command, span):
        if not defects:
            _print(f"{'note' if defects is None else 'ok':8}{what}")
            continue
        for defect in defects[:SHOWN]:
            _print(f"defect  {defect}")
        if len(defects) > SHOWN:
            _print(f"defect  ... and {len(defects) - SHOWN} more like these")
        n_defects += len(defects)
    _print(f"{run} is {f'not intact, defects: {n_defects}' if n_defects else 'intact'}")
    return 1 if n_defects else 0


def _print(line: str) -> None:
    """Prints one line: names and values in the files may hold newlines and escapes, to imitate other lines."""
    print(truncate(line, LINE))


def _read_settings(run: Path) -> Record | str:
    try:
        return read_yaml(str(run / CONFIG), CONFIG)
    except UserError as error:
        return str(error)


def _hash_samples(run: Path) -> list[str]:
    digest = hashlib.sha256()
    hashes = []
    for line in read_lines(run / SAMPLES):
        if not line.torn:
            digest.update(f"{line.text}\n".encode())
            hashes.append(digest.hexdigest())
    return hashes


def _read_checkpoints(run: Path) -> tuple[dict[str, Checkpoint], list[str]]:
    """The checkpoints whose files have the hashes of their manifest, by their place in the run folder, and the defects
    of the others. The oldest is first."""
    checkpoints: dict[str, Checkpoint] = {}
    defects = []
    for folder in list_checkpoints(run / "checkpoints"):
        try:
            checkpoints[f"checkpoints/{folder.name}"] = verify(folder)
        except CorruptCheckpoint as damage:
            if folder.is_dir():  # not deleted meanwhile by a running training
                defects.append(f"{damage.file.relative_to(run)}: {damage.reason}")
    return checkpoints, defects


def _check(run: Path, command: VerifyConfig, span: Span | None) -> Iterator[Finding]:
    """Reads the run's files, and checks them. A running training writes a row before a sample, and after a checkpoint;
    and the samples that a checkpoint pins before it."""
    settings = _read_settings(run)
    checkpoints, wrong = _read_checkpoints(run)
    samples = _hash_samples(run)
    chains = {checkpoint.state.log.chain for checkpoint in checkpoints.values()}
    log = Log(run / METRICS, {*chains, command.anchor or ""})
    if log.last.get("event") == "end":  # the samples are complete by now
        samples = _hash_samples(run)
    yield f"{METRICS}: all rows chained by hashes up to {log.chain}", log.defects
    pinned: dict[int, Checkpoint] = {}
    for place, checkpoint in checkpoints.items():
        if defect := _pin_defect(checkpoint, log):
            wrong.append(f"{place}: {defect}")
        else:
            pinned[checkpoint.step] = checkpoint
    wrong += _check_folder(run, log)
    yield f"checkpoints: {len(checkpoints)}, all files unchanged, none missing", wrong
    if log.loose:
        yield f"the last {log.loose} rows are newer than the newest checkpoint: no checkpoint confirms them yet", None
    yield f"{CONFIG}: as {METRICS} recorded it", _check_settings(settings, log)
    newest = next(reversed(checkpoints.values()), None)
    least = newest.state.log.samples_sha256 if newest else NO_SAMPLES
    yield f"{SAMPLES}: {len(samples)} lines, all pinned by {METRICS}", [*_check_samples(samples, log, least)]
    is_right = yield from _check_training(log, newest, command)
    for branch in log.named("branch"):
        manifest = Path(str(branch.get("parent"))) / MANIFEST
        is_same = manifest.is_file() and sha256_file(manifest) == branch.get("checkpoint_sha256")
        state = "is unchanged" if is_same else "is missing or changed"
        yield f"the parent checkpoint {manifest.parent} {state}: verify its own run, too", None
    if command.anchor:
        lost = [f"{METRICS}: lacks the anchor: rows were rewritten or cut off"]
        yield "the anchor is the chain of a row", [] if command.anchor in log.seen else lost
    if span is None:
        yield "losses, norms and weights: pinned, not recomputed; --replay A:B trains again", None
    elif is_right:
        yield replay(run, span, log.config_row["config"], pinned, command)
    else:
        unknown = "not possible, since the order of the data is not known to be that of the run"
        yield f"replay of {command.replay}: {unknown}", None


def _pin_defect(checkpoint: Checkpoint, log: Log) -> str:
    """Why a checkpoint is not the one that a row recorded, or holds the chain of no row; empty if all is right."""
    chain = checkpoint.state.log.chain
    events = [*log.events.values()]
    is_lost = chain not in log.seen and (chain != FIRST_CHAIN or not events or checkpoint.step > events[0]["step"])
    with suppress(FileNotFoundError):  # deleted meanwhile by a running training
        defect = record_defect(checkpoint, events, log.seen.get(chain, 0))
        return defect or f"its chain is not in {METRICS}" * is_lost
    return ""


def _check_folder(run: Path, log: Log) -> Iterator[str]:
    """Checkpoints that the rows keep and that are missing, or that a start or rollback rejected."""
    folder, events = run / "checkpoints", [*log.events.values()]
    rejected = {file.name for file in folder.glob("step-*.rejected*")}
    for name in sorted(rejected.union(*(row.get("rejected", []) for row in events))):
        yield f"checkpoints/{name}: is not what {METRICS} recorded; a start or a rollback rejected it"
    gone = [step for step in _kept(events) if not (folder / f"step-{step:08d}").is_dir()]
    # a running training may have deleted them meanwhile, which it records first
    still_kept = _kept(read_events(run / METRICS)[0]) if gone else []
    yield from (f"checkpoints/step-{step:08d}: is missing" for step in gone if step in still_kept)


def _kept(events: Iterable[Record]) -> list[int]:
    kept: list[int] = []
    for row in events:
        if is_rollback(row):
            kept = [step for step in kept if step <= row["step"]]
        kept = row.get("kept", kept)
    return kept


def _check_settings(found: Record | str, log: Log) -> list[str]:
    """Why config.yaml is unreadable, or its fields that are not those of the newest row with a configuration, which is
    written first."""
    newest = log.config_row
    if log.last is newest or not newest:  # a kill may have come before its config.yaml
        return []
    if isinstance(found, str):
        return [found]
    now, right = flat(found), flat(newest["config"])
    names = [name for name in right | now if now.get(name, ...) != right.get(name, ...)]
    return [f"{CONFIG}: {name} is {now.get(name)}, in {METRICS} {right.get(name)}" for name in names]


def _check_samples(samples: list[str], log: Log, least: str) -> Iterator[str]:
    """A row pins the file up to each line, and is written before the line. The newest checkpoint pins the `least`."""
    is_cut = log.last.get("event") == "end" or least not in (NO_SAMPLES, *samples)
    newest = NO_SAMPLES
    pins = []
    for place, row in log.events.items():
        if HASH in row and row["event"] != "start":
            pins.append(row[HASH])
        elif row.get(HASH, newest) != newest:  # a resume keeps the samples up to the newest hash
            yield f"{place}: someone changed {SAMPLES} before this start"
        newest = row.get(HASH, newest)
    for number, (line, pin) in enumerate(zip_longest(samples, pins), 1):
        if line is None and is_cut:  # a killed or running process may lack newer ones
            yield f"{SAMPLES}: lines are missing after line {number - 1}"
        elif line is not None and line != pin:
            yield f"{SAMPLES}, line {number}: was changed or added, or one before it: {METRICS} lacks its hash"
        else:
            continue
        return


def _check_training(log: Log, newest: Checkpoint | None, command: VerifyConfig) -> Generator[Finding, None, bool]:
    """Checks the data, and what follows from them and from the configuration. Returns whether the order is right."""
    if log.defects:
        yield "data, order and learning rates: not checked, since the chain of rows is broken", None
        return False
    starts = log.named("start")
    start = starts[-1]
    config = read_config(str(start.get("kind")), log.config_row["config"], METRICS)
    manifests: list[Manifest] = []
    sources: list[Windows] = []
    if isinstance(config, TrainingConfig):
        folders = command.data or config.data.paths
        try:
            manifests = [read_manifest(Path(folder)) for folder in folders]
        except UserError as error:
            if isinstance(error.__cause__, OSError):  # the data have moved
                raise
            yield "data", error.mistakes
            return False
        known = [mixture.manifests for row in starts if (mixture := recorded(row))]
        hashes = [manifest.hash for manifest in manifests]
        if len(folders) != len(config.data.paths) or any(one != hashes[: len(one)] for one in known):
            hint = "has other tokens than the run was trained on"
            if command.data:
                raise UserError("data", " ".join(folders), f"{hint}; name the run's data")
            yield "data", [f"{' '.join(folders)}: {hint}; if they have moved, name the folder with --data"]
            return False
        for folder, manifest in zip(folders, manifests, strict=True):
            yield _check_shards(Path(folder), manifest)
            sources.append(Windows(TokenStream(Path(folder), manifest, "train", check=False), config.model.block_size))
    kind, problem = _task_class(starts, newest, command.trust_run_code)
    if problem:
        yield f"order of the data, tokens, learning rates: not checked: {problem}", None
        return command.trust_run_code
    returns = {row["step"] for row in log.named("rollback")}
    defects = Recomputed(config, start, kind, sources, returns).first_defects(log.rows())
    yield f"order of the data, tokens, learning rates: recomputed from seed {config.seed}", defects
    return not defects


def _task_class(starts: list[Record], newest: Checkpoint | None, trust_code: bool) -> tuple[type[Pretraining], str]:
    """The class of a GPT run, and why it is not known; else an empty text."""
    hashes = {(row.get("code") or {}).get("sha256") for row in starts}
    if hashes == {None}:
        return Pretraining, ""
    try:
        code = trusted(newest, trust_code) if newest else None
        if code and hashes == {code.sha256}:
            return code.load(Pretraining), ""
    except UserError as error:
        return Pretraining, str(error)
    return Pretraining, "the class changed during the run, or no checkpoint has it"


def _check_shards(folder: Path, manifest: Manifest) -> Finding:
    """Hashes the tokenizer and all shards."""
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    defects = []
    tokenizer = folder / manifest.tokenizer
    if tokenizer.suffix == ".json" and (not tokenizer.is_file() or sha256_file(tokenizer) != manifest.tokenizer_sha256):
        defects.append(f"{tokenizer}: is missing, or its SHA-256 differs from {folder / MANIFEST}'s")
    for shard in shards:
        try:
            check_shard(folder, shard, token_dtype(manifest.vocab_size))
            if sha256_file(folder / shard.file) != shard.sha256:
                defects.append(f"{folder / shard.file}: its SHA-256 differs from {folder / MANIFEST}'s")
        except UserError as error:
            defects += error.mistakes
    return f"data: {len(shards)} shards unchanged in {folder}", defects
