"""The checks of verify_run.py. docs/verify.md lists what each check finds.

    rows of metrics.jsonl      each row's chain is a hash of it and of all rows before
      |- checkpoints           hash of the manifest, which has the hashes of the files
      |   '- states            compared with the rows (`states`), tensors with the model (`layouts`)
      |- config.yaml           equal to the newest row with a configuration
      |- status.json           of a run that has ended: equal to the newest end
      |- data                  hash of the manifest, which has the hashes of the shards
      |   '- order             recomputed from seed and data (`recompute`)
      '- losses and weights    trained again, if asked for (`replay`)

A right chain confirms its rows. A broken chain confirms nothing, so nothing is compared
with its rows.
"""

import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from gpt2_ddp.checkpoint.format import MANIFEST, Checkpoint, list_checkpoints, steps_of
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, record_defect, verify
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.run import MOST_ITEMS, RunConfig
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest, token_dtype
from gpt2_ddp.data.mixture import recorded_mixture
from gpt2_ddp.data.shards import TokenStream, Windows, check_shard
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import no_such_folder, sha256_file, url_of_copy
from gpt2_ddp.records.rows import (
    CONFIG,
    METRICS,
    STATUS,
    Row,
    ended_status,
    is_event,
    is_rollback,
    lines_of,
    parse_lines,
    split_chain,
)
from gpt2_ddp.reports.layouts import tensor_defects
from gpt2_ddp.reports.recompute import Recomputed
from gpt2_ddp.reports.replay import Finding, Span, plan, replay
from gpt2_ddp.reports.states import Expected, config_differences, end_defect
from gpt2_ddp.state import FIRST_CHAIN, Count, FeedState, Mixture, Positive, next_chain
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.user_task import trusted

LINE = 1000
"""Most characters of a printed line. Names and values in the files may hold newlines and escapes,
which would imitate other lines."""
STATES = "checkpoints: state and tensors of {} are those of the rows and the configuration"
"""What is printed of the check of this number of checkpoints."""
MOST_RANGES = 200
"""Most skipped ranges of a branch, far above its parents' rollbacks: each costs time in each
recomputed step."""


class CheckedRow(FeedState, strict=True):
    """The fields of rows that the checks read. The chain holds the others."""

    step: Count
    skipped_ranges: list[tuple[Count, Count]] = Field([], max_length=MOST_RANGES)
    event: str | None = None
    config: dict[str, Any] = Field({})
    epoch_size: Positive = 1
    global_batch_size: Annotated[int, Field(ge=1, le=MOST_ITEMS)] = 1
    data_manifest: str = ""
    mixture: Mixture | None = None
    undone: Count = Field(0, alias="from")
    kept: list[Count] = Field([])
    rejected: list[str] = Field([])


class LogEnd(NamedTuple):
    """Where a row of metrics.jsonl ends."""

    events: int  # number of events up to the row
    bytes: int  # length of the file up to there


class Log:
    """The rows of metrics.jsonl, up to the first that breaks the chain. `rows` reads them again, so
    the memory holds events alone.

    Args:
        chains: chains to look for.

    Attributes:
        chain: of the last row.
        last: the last row.
        ends: where the row of each of `chains` ends, by the chain.
        loose: number of steps' rows after all of them.
        defects: why the chain is broken; a torn last line after a kill is allowed.
    """

    def __init__(self, file: Path, chains: Collection[str]):
        # the same file, if a resume replaces it
        self._stream = file.open("rb") if file.is_file() else BytesIO()
        self._count = 0
        self.loose = 0
        self.chain = FIRST_CHAIN
        self.events: list[Row] = []
        self.ends = {FIRST_CHAIN: LogEnd(0, 0)}
        self.last: Row = {}
        self.defects: list[str] = []
        for number, line in enumerate(parse_lines(lines_of(self._stream)), 1):
            if line.torn or self.defects:
                break
            self._add(f"{METRICS}, line {number}", line.text, line.row, chains)
        if [row["event"] for row in self.events[:1]] != ["start"]:
            self.defects.append(f"{METRICS}: has no start in its first row")

    def _add(self, place: str, line: str, row: Row, chains: Collection[str]) -> None:
        text, chain = split_chain(line)
        try:
            CheckedRow.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            self.defects.append(f"{place}: is no row: {field} is {first['input']}")
            return
        if not chain or chain != next_chain(self.chain, text):
            problem = "its chain is wrong: this row was changed, or one before it is missing"
            self.defects.append(f"{place}: {problem}")
            return
        self.chain = chain
        self.last = row
        self._count += 1
        if is_event(row):
            self.events.append(row)
        else:
            self.loose += 1
        if chain in chains:
            self.ends[chain] = LogEnd(len(self.events), self._stream.tell())
            self.loose = 0

    def named(self, event: str) -> list[Row]:
        """The rows of an event."""
        return [row for row in self.events if row["event"] == event]

    @property
    def config_row(self) -> Row:
        """The newest row that records a configuration: a start, or the steps of `train.minutes`."""
        return next(row for row in reversed(self.events) if "config" in row)

    def rows(self) -> Iterator[Row]:
        """The rows, in order."""
        self._stream.seek(0)
        return (line.row for line in islice(parse_lines(lines_of(self._stream)), self._count))


def verify_run(command: VerifyConfig) -> int:
    """Exit code of verify_run.py: 0 if the run is intact, else 1. Prints an `ok` line or the
    defects of each check, and a `note` for what could not be checked. With `--replay`, trains a
    part of the run again.

    Raises: UserError for a missing run, for steps that cannot be replayed, or for other
    data in `--data`.
    """
    run = Path(command.run)
    n_defects = 0
    if not any(os.path.isfile(run / name) for name in (CONFIG, METRICS)):
        hint = no_such_folder(run) or "has no config.yaml; name a run folder of a training script"
        raise UserError("run", url_of_copy(run), hint)
    if not os.path.lexists(run / METRICS) and os.path.isfile(run / MANIFEST):
        hint = f"is a checkpoint; name its run folder, {run.resolve().parent.parent}"
        raise UserError("run", run, hint)
    span = plan(run, command.replay) if command.replay else None
    for check, defects in _check(run, command, span):
        if defects is None:
            lines = [f"note    {check}"]
        elif defects:
            lines = [f"defect  {defect}" for defect in defects]
            n_defects += len(defects)
        else:
            lines = [f"ok      {check}"]
        for line in lines:
            print(truncate(line, LINE))
    verdict = f"not intact, defects: {n_defects}" if n_defects else "intact"
    print(truncate(f"{url_of_copy(run)} is {verdict}", LINE))
    return 1 if n_defects else 0


def _check(run: Path, command: VerifyConfig, span: Span | None) -> Iterator[Finding]:
    """Reads the run's files, and checks them. A running training writes a row
    after its checkpoint."""
    settings = _read_settings(run)
    status = ended_status(run)
    folders = list_checkpoints(run / "checkpoints")
    checkpoints, wrong = _read_checkpoints(run, folders)
    chains = {checkpoint.state.log.chain for checkpoint in checkpoints.values()}
    log = Log(run / METRICS, {*chains, command.anchor or ""})
    yield f"{METRICS}: all rows chained by hashes up to {log.chain}", log.defects
    if command.anchor:
        lost = [f"{METRICS}: lacks the anchor: rows were rewritten or cut off"]
        yield "the anchor is the chain of a row", [] if command.anchor in log.ends else lost
    pinned: dict[str, Checkpoint] = {}
    if not log.defects:
        wrong += _check_folder(run / "checkpoints", log.events, steps_of(folders))
        for place, checkpoint in checkpoints.items():
            if defect := _pin_defect(checkpoint, log):
                wrong.append(f"{place}: {defect}")
            else:
                pinned[place] = checkpoint
    yield f"checkpoints: {len(checkpoints)}, all files unchanged, none missing", wrong
    if log.defects:
        unchecked = "configuration, data, order and learning rates"
        yield f"{unchecked}: not checked, since the chain is broken", None
        return
    if log.loose:
        newer = f"the last {log.loose} rows are newer than the newest checkpoint"
        yield f"{newer}: no checkpoint confirms them yet", None
    yield f"{CONFIG}: as {METRICS} recorded it", _check_settings(settings, log)
    yield from _check_end(run, status, log)
    is_right = yield from _check_training(log, pinned, command)
    for branch in log.named("branch"):
        manifest = Path(str(branch.get("parent"))) / MANIFEST
        is_same = manifest.is_file() and sha256_file(manifest) == branch.get("checkpoint_sha256")
        state = "is unchanged" if is_same else "is missing or changed"
        yield f"the parent checkpoint {manifest.parent} {state}: verify its own run, too", None
    if span is None:
        yield "losses, norms and weights: pinned, not recomputed; --replay A:B trains again", None
    elif is_right:
        intact = {checkpoint.step: checkpoint for checkpoint in pinned.values()}
        yield replay(run, span, log.config_row["config"], intact, command)
    else:
        unknown = "not possible, since the order of the data is not known to be that of the run"
        yield f"replay of {command.replay}: {unknown}", None


def _read_settings(run: Path) -> Row | str:
    """The content of config.yaml, or why it cannot be read."""
    try:
        return read_yaml(str(run / CONFIG), CONFIG)
    except UserError as error:
        return str(error)


def _read_checkpoints(
    run: Path, folders: Sequence[Path]
) -> tuple[dict[str, Checkpoint], list[str]]:
    """The checkpoints whose files have the hashes of their manifest, by their place in the run
    folder, and the defects of the others. The oldest is first."""
    checkpoints: dict[str, Checkpoint] = {}
    defects: list[str] = []
    for folder in folders:
        try:
            checkpoints[f"checkpoints/{folder.name}"] = verify(folder)
        except CorruptCheckpoint as damage:
            if folder.is_dir():  # not deleted meanwhile by a running training
                defects.append(f"{damage.file.relative_to(run)}: {damage.reason}")
    return checkpoints, defects


def _check_folder(folder: Path, events: Sequence[Row], listed: Sequence[int]) -> Iterator[str]:
    """Yields the checkpoints that the rows keep and that are missing; and those that a start or a
    rollback rejected. `listed`: steps in the folder before the rows were read. A running training
    may have deleted one of these since, and written its row first."""
    kept: list[int] = []
    for row in events:
        if is_rollback(row):
            kept = [step for step in kept if step <= row["step"]]
        kept = row.get("kept", kept)
    for step in dict.fromkeys(kept):
        name = f"step-{step:08d}"
        if step not in listed and not (folder / name).is_dir():
            yield f"checkpoints/{name}: is missing"
    rejected = {file.name for file in folder.glob("step-*.rejected*")}
    for row in events:
        rejected |= set(row.get("rejected", ()))
    for name in sorted(rejected):
        problem = f"is not what {METRICS} recorded; a start or a rollback rejected it"
        yield f"checkpoints/{name}: {problem}"


def _pin_defect(checkpoint: Checkpoint, log: Log) -> str:
    """Why a checkpoint is not the one that a row recorded, or holds the chain of no row; empty if
    all is right."""
    saved = checkpoint.state.log
    if saved.chain not in log.ends:
        return f"its chain is not in {METRICS}"
    end = log.ends[saved.chain]
    if saved.bytes != end.bytes:
        return f"log.bytes is {saved.bytes}, but the row of its chain ends at {end.bytes}"
    try:
        return record_defect(checkpoint, log.events, end.events)
    except FileNotFoundError:  # deleted meanwhile by a running training
        return ""


def _check_settings(settings: Row | str, log: Log) -> list[str]:
    """Why config.yaml is unreadable, or its fields that are not those of the newest row with a
    configuration, which is written first."""
    newest = log.config_row
    if log.last is newest:  # a kill may have come before its config.yaml
        return []
    if isinstance(settings, str):
        return [settings]
    return config_differences(CONFIG, settings, newest["config"])


def _check_end(run: Path, status: Row, log: Log) -> Iterator[Finding]:
    """Checks that the rows have the end of status.json. `status`: that of a run that had ended
    before the rows were read."""
    if status and status == ended_status(run):  # no training has begun meanwhile
        defect = end_defect(status, log.events, log.last)
        yield f"{STATUS}: as {METRICS} recorded the end", [defect] if defect else []


def _check_training(
    log: Log, checkpoints: Mapping[str, Checkpoint], command: VerifyConfig
) -> Generator[Finding, None, bool]:
    """Checks the data, what follows from them and from the configuration, and the states of the
    `checkpoints`. Returns whether the order is right."""
    starts = log.named("start")
    start = starts[-1]
    states = STATES.format(len(checkpoints))
    try:
        config = read_config(str(start.get("kind")), log.config_row["config"], METRICS)
    except UserError as error:
        yield "the configuration in the rows", error.mistakes
        return False
    sources: list[Windows] = []
    if isinstance(config, TrainingConfig):
        folders = command.data or config.data.paths
        try:
            manifests = [read_manifest(Path(folder), "data") for folder in folders]
        except UserError as error:
            if isinstance(error.__cause__, OSError):  # the data have moved
                raise
            yield "data", error.mistakes
            yield states, _follow(log, checkpoints, None)[1]
            return False
        trained_on = recorded_mixture(start)
        hashes = [manifest.hash for manifest in manifests]
        if not trained_on or trained_on.manifests != hashes:
            hint = "has other tokens than the run was trained on; name the run's data with --data"
            differs = UserError("data", " ".join(folders), hint)
            if command.data:
                raise differs
            yield "data", differs.mistakes
            yield states, _follow(log, checkpoints, None)[1]
            return False
        for folder, manifest in zip(folders, manifests, strict=True):
            yield _check_shards(Path(folder), manifest)
            stream = TokenStream(Path(folder), manifest, "train", check=False)
            sources.append(Windows(stream, config.model.block_size, config.shifts))
    newest = [*checkpoints.values()][-1] if checkpoints else None
    kind, problem = task_class(starts, newest, command.trust_run_code)
    if problem:
        yield states, _follow(log, checkpoints, None)[1]
        yield f"order of the data, tokens, learning rates: not checked: {problem}", None
        return command.trust_run_code
    return (yield from _check_order(log, checkpoints, config, kind, sources))


def _check_order(
    log: Log,
    checkpoints: Mapping[str, Checkpoint],
    config: RunConfig,
    kind: type[Pretraining],
    sources: Sequence[Windows],
) -> Generator[Finding, None, bool]:
    """Checks the order of the data, and states and tensors of the `checkpoints`. Returns whether
    both are right."""
    returns = {row["step"] for row in log.named("rollback")}
    try:
        recomputed = Recomputed(config, log.named("start")[-1], kind, sources, returns)
        in_rows, in_states = _follow(log, checkpoints, recomputed)
    except UserError as error:
        yield "the configuration in the rows", error.mistakes
        return False
    for place, checkpoint in checkpoints.items():
        with suppress(FileNotFoundError):  # deleted meanwhile by a running training
            in_states += tensor_defects(place, checkpoint, kind)
    yield STATES.format(len(checkpoints)), in_states
    yield f"order of the data, tokens, learning rates: recomputed from seed {config.seed}", in_rows
    return not in_rows and not in_states


def _follow(
    log: Log, checkpoints: Mapping[str, Checkpoint], recomputed: Recomputed | None
) -> tuple[list[str], list[str]]:
    """Reads the rows again, and compares them with what is recomputed.

    Returns the defects of the first row that does not follow from the data and the rows before. And
    those of the states of checkpoints, by the rows before each. Up to that row, states are also
    compared with what is recomputed.
    """
    scores: set[str] = set()
    for checkpoint in checkpoints.values():
        scores |= checkpoint.state.progress.scores.keys()
    expected = Expected(scores, {row["step"] for row in log.named("rollback")})
    after: dict[str, list[str]] = {}  # names of checkpoints, by the chain of the row before them
    for place, checkpoint in checkpoints.items():
        after.setdefault(checkpoint.state.log.chain, []).append(place)
    in_rows: list[str] = []
    in_events: list[str] = []
    in_states: list[str] = []
    for number, row in enumerate(log.rows(), 1):
        line = f"{METRICS}, line {number}"
        in_events += [f"{line}: {defect}" for defect in expected.add(row)]
        if recomputed and not in_rows:
            in_rows = [f"{line}: {defect}" for defect in recomputed.row_defects(row)]
        for place in after.get(row["chain"], ()):
            in_states += expected.defects(place, checkpoints[place])
            if recomputed and not in_rows:
                in_states += recomputed.state_defects(place, checkpoints[place])
    return in_rows, in_events + in_states


def task_class(
    starts: list[Row], newest: Checkpoint | None, trust_code: bool
) -> tuple[type[Pretraining], str]:
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
    defects: list[str] = []
    differs = f"its SHA-256 differs from {folder / MANIFEST}'s"
    tokenizer = folder / manifest.tokenizer
    if tokenizer.suffix == ".json":  # else the name of an encoding
        is_there = tokenizer.is_file()
        if not is_there or sha256_file(tokenizer) != manifest.tokenizer_sha256:
            defects.append(f"{tokenizer}: is missing, or {differs}")
    for shard in shards:
        try:
            check_shard(folder, shard, token_dtype(manifest.vocab_size))
            if sha256_file(folder / shard.file) != shard.sha256:
                defects.append(f"{folder / shard.file}: {differs}")
        except UserError as error:
            defects += error.mistakes
    return f"data: {len(shards)} shards unchanged in {folder}", defects
