"""Consistency of a run's records with each other and with its data.

docs/verify.md lists what each check finds, and the limits of all.
"""

import hashlib
import json
import os
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from gpt2_ddp.checkpoint.checkpoint import MANIFEST, MODEL, STATE, Checkpoint
from gpt2_ddp.checkpoint.run_files import CONFIG, HASH, METRICS, SAMPLES, STATUS, Outcome, is_rollback, read_lines
from gpt2_ddp.config.base import flat, leaves, nearest
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.hints import complete
from gpt2_ddp.config.kinds import CONFIGS, guess_kind, read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.tools import VerifyConfig, check_writable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, token_dtype
from gpt2_ddp.data.mixture import identity, past, phases_of, read_manifests, recorded
from gpt2_ddp.data.shards import check_shard, count_windows
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_json, sha256_file, write_atomically
from gpt2_ddp.reports.replay import Finding, Span, plan, replay, rescore, setting_defects
from gpt2_ddp.reports.verify_checkpoints import Checkpoints, check_checkpoints, check_tokenizer_file, read_checkpoints
from gpt2_ddp.reports.verify_rows import Log, Record, Records, Schedule, Values, differing, in_parts, replay_order
from gpt2_ddp.state import FIRST_CHAIN, NO_SAMPLES, Count, Digest, FeedState

LINE = 1000
"""Most characters of a printed line."""
SHOWN = 5
"""Most defects of one kind to print; the others are counted."""
SAMPLED = 8
"""Number of shards that `sampled` hashes."""
FIXED = ("kind", "run_id", "epoch_size", "tokenizer_sha256", "vocab_size", "data_manifest", "data_hash")
FIXED += ("global_batch_size",)
"""Fields of starts and states that never change in a run."""
OF_STEP = {"step", "val_loss", "noise_scale", "rollbacks", "skipped", *FeedState.model_fields}
"""Fields of states that the start before them does not have."""
STATES = ("running", "failed", *get_args(Outcome))
"""Values of `state` in status.json."""


class SampleLine(NamedTuple):
    """A line of samples.jsonl: its row without texts, and the SHA-256 of the file up to it."""

    step: Any
    is_rollback: bool
    sha256: str


class Anchor(BaseModel, strict=True):
    """A checkpoint that the run must have passed: its step, its chain, and the SHA-256 of its weights."""

    step: Count
    chain: Digest
    sha256: Digest


@dataclass(frozen=True)
class Recorded:
    """The readable content of a run folder, and the defects that reading checkpoints found."""

    run: Path
    settings: Record  # config.yaml
    config: RunConfig
    log: Log
    checkpoints: Checkpoints
    status: Record | None  # None without a status.json; {} if it is no JSON
    samples: list[SampleLine]  # the whole lines of samples.jsonl
    damage: list[str]

    @property
    def states(self) -> Records:
        return {place: checkpoint.state.record for place, checkpoint in self.checkpoints.items()}

    def events(self, name: str) -> list[Record]:
        return [row for row in self.log.events.values() if row["event"] == name]


def verify_run(command: VerifyConfig) -> int:
    """Exit code of verify_run.py: 0 if the run is intact, else 1. Prints an `ok` line or the defects of each check, and
    a `note` for what could not be checked. With `--rescore`, evaluates checkpoints again; with `--replay`, trains a
    part of the run again. With `--anchor`, compares the run with a file, and writes the file anew if all is intact.
    Raises: UserError for a missing run, for steps that cannot be replayed, or for other data in `--data`."""
    run, n_defects = Path(command.run), 0
    if not os.path.isfile(run / CONFIG):
        raise UserError("run", run, "has no config.yaml; name a run folder of a training script")
    anchor = _read_anchor(command.anchor) if command.anchor else None
    span = plan(run, command.replay) if command.replay else None
    found = _read(run, anchor)
    for what, defects in _check(found, command, span, anchor):
        if not defects:
            _print(f"{'note' if defects is None else 'ok':8}{what}")
            continue
        for defect in defects[:SHOWN]:
            _print(f"defect  {defect}")
        if len(defects) > SHOWN:
            _print(f"defect  ... and {len(defects) - SHOWN} more like these")
        n_defects += len(defects)
    if command.anchor and not n_defects:
        _print(_write_anchor(Path(command.anchor), found))
    _print(f"{run} is {f'not intact, defects: {n_defects}' if n_defects else 'intact'}")
    return 1 if n_defects else 0


def _print(line: str) -> None:
    """Prints one line: names and values in the files may hold newlines and escapes, to imitate other lines."""
    print(truncate(line, LINE))


def _read(run: Path, anchor: Anchor | None) -> Recorded:
    """Reads the run's files. A running training writes a row before a sample, and after a checkpoint."""
    settings = read_yaml(str(run / CONFIG), "run")
    if not settings:
        raise UserError("run", run / CONFIG, "is empty; restore the run's original file, or name another run folder")
    kind = next((line.row.get("kind") for line in read_lines(run / METRICS) if line.row), None)
    config = read_config(kind if kind in [*CONFIGS] else guess_kind(settings), settings, CONFIG)
    checkpoints, damaged = read_checkpoints(run)
    status, samples = _read_status(run), _read_samples(run)
    states = [checkpoint.state for checkpoint in checkpoints.values()]
    chains = {state.log.chain for state in states} | ({anchor.chain} if anchor else set())
    log = Log(run / METRICS, {state.step for state in states}, chains)
    if log.last.get("event") == "end":  # the samples are complete by now
        samples = _read_samples(run)
    status = _read_status(run) if status is None else status
    start = next((row["config"] for row in reversed(log.events.values()) if row.get("config")), settings)
    gone = complete(type(config), start)[1]
    if strange := [name for name in complete(type(config), settings)[1] if name not in gone]:
        known = dict(leaves(type(config)))
        damaged += [f"{CONFIG}: {name}: unknown key{nearest(name, [*known])}" for name in strange]
        settings, config = start, read_config(config.kind, start, METRICS)
    return Recorded(run, settings, config, log, checkpoints, status, samples, damaged)


def _read_status(run: Path) -> Record | None:
    try:
        return read_json(run / STATUS) if (run / STATUS).exists() else None
    except (OSError, ValueError):
        return {}


def _read_samples(run: Path) -> list[SampleLine]:
    digest, samples = hashlib.sha256(), []
    for line in read_lines(run / SAMPLES):
        if not line.torn:
            digest.update(f"{line.text}\n".encode())
            row = line.row or {}
            samples.append(SampleLine(row.get("step"), is_rollback(row), digest.hexdigest()))
    return samples


def _check(found: Recorded, command: VerifyConfig, span: Span | None, anchor: Anchor | None) -> Iterator[Finding]:
    run, config, log, checkpoints = found.run, found.config, found.log, found.checkpoints
    chained = f"; {log.chained} lines chained by hashes up to {log.chain[:12]}" if log.chained else ""
    yield f"metrics.jsonl: {log.count} rows, steps strictly increasing{chained}", log.defects
    wrong = [*found.damage, *check_checkpoints(run, config, log, checkpoints)]
    yield f"checkpoints: {len(checkpoints)}, all files unchanged, none missing", wrong
    if log.loose:
        yield f"the last {log.loose} rows are newer than the newest checkpoint: no checkpoint confirms them yet", None
    yield "configuration: equal in config.yaml, starts and checkpoints, with one run id", _check_configuration(found)
    yield from check_end(found)
    manifests: list[Manifest] = []
    n_folders = len(config.data.paths) if isinstance(config, TrainingConfig) else 1
    if command.data and len(command.data) != n_folders:
        hint = f"the run was trained on {n_folders} folder{'s' * (n_folders > 1)}; name as many, separated by spaces"
        raise UserError("data", " ".join(command.data), hint)
    if isinstance(config, TrainingConfig):
        folders = command.data or config.data.paths
        manifests = read_manifests(folders)
        yield from _check_data(config, folders, manifests, command, log.events | found.states)
    is_replayable = yield from _check_training(found, manifests)
    for branch in found.events("branch"):
        manifest = Path(str(branch.get("parent"))) / MANIFEST
        same = manifest.is_file() and sha256_file(manifest) == branch.get("checkpoint_sha256")
        there = "is unchanged" if same else "is missing or changed"
        yield f"the parent checkpoint {manifest.parent} {there}: verify its own run, too", None
    if command.rescore:
        yield from rescore(run, log.by_step.values(), checkpoints.values(), command.data)
    if span and is_replayable:
        yield from replay(run, span, found.events("rollback"), checkpoints.values(), command.data)
    elif span:
        yield f"replay of {command.replay}: not possible, since the order of the data is not that of the run", None
    if not (span or command.rescore):
        hint = "--rescore scores checkpoints again, --replay A:B trains again"
        yield f"losses, norms and weights: not checked; {hint}", None
    if anchor:
        yield f"the anchor of step {anchor.step} is part of the run", _check_anchor(anchor, found)


def _check_configuration(found: Recorded) -> list[str]:
    """Contradictions between config.yaml, the starts and the checkpoints."""
    events, states, checkpoints = found.log.events, found.states, found.checkpoints
    starts = {place: row for place, row in events.items() if row.get("config")}
    documents = {place: row["config"] for place, row in starts.items()}
    documents |= {place.replace(STATE, CONFIG): checkpoint.config for place, checkpoint in checkpoints.items()}
    documents[CONFIG] = found.settings
    first, newest = next(iter(starts), ""), next(reversed(starts), "")
    defects = [
        f"{place}: {defect.partition(';')[0]}"
        for place, document in documents.items()
        for defect in setting_defects(document, CONFIG, found.config.kind, documents[first or CONFIG])
    ]
    # a start that nothing follows may be killed before it wrote config.yaml
    origins = {CONFIG: newest} if newest and found.log.last is not starts[newest] else {}
    for place, row in starts.items():
        defects += differing(place, row, first, starts[first], FIXED)
    for place, state in states.items() if first else ():
        before = list(events)[: found.log.seen.get(checkpoints[place].state.log.chain, 0)]
        start = next((other for other in reversed(before) if other in starts), "")
        same = [name for name in state if name not in OF_STEP] if start else FIXED
        defects += differing(place, state, start or first, starts[start or first], same)
        origins |= {place.replace(STATE, CONFIG): start} if start else {}
    for place, start in origins.items():
        now, right = flat(documents[place]), flat(documents[start])
        defects += differing(place, now, start, right, dict.fromkeys([*now, *right]))
    return list(dict.fromkeys(defects))


def check_end(found: Recorded) -> Iterator[Finding]:
    """Checks status.json and samples.jsonl against the rows."""
    yield f"{STATUS}: agrees with metrics.jsonl", [*_check_status(found)]
    defects = [*_check_samples(found)]
    if found.samples or defects:
        yield f"{SAMPLES}: {len(found.samples)} lines, all chained by metrics.jsonl", defects


def _check_status(found: Recorded) -> Iterator[str]:
    last, event = found.log.last, found.log.last.get("event")
    if found.status is None:
        if found.log.count or {row["event"] for row in found.log.events.values()} - {"start", "branch"}:
            yield f"{STATUS}: is missing"
        return
    state, step = found.status.get("state"), found.status.get("step")
    if state not in STATES or type(step) is not int:
        yield f"{STATUS}: has state {state} at step {step}; state should be one of {', '.join(STATES)}"
    elif state in get_args(Outcome) and event not in ("start", "end"):
        yield f"{STATUS}: has state {state}, but metrics.jsonl has no end row"
    elif state in get_args(Outcome) and (state, event) != ("diverged", "start"):
        outcome = state if event == "start" else last.get("outcome")  # after a start, the last session's stays
        if (state, step) != (outcome, last["step"]):
            found_there = f"{last.get('outcome', 'a start')} at step {last['step']}"
            yield f"{STATUS}: has {state} at step {step}, metrics.jsonl {found_there}"


def _check_samples(found: Recorded) -> Iterator[str]:
    """Defects of samples.jsonl: metrics.jsonl has a row for each line, with the SHA-256 up to it, written before it."""
    hashed, newest, rows = {place: row for place, row in found.log.events.items() if HASH in row}, NO_SAMPLES, []
    for place, row in hashed.items():
        if row["event"] != "start":
            rows.append(row)
        elif row[HASH] != newest:  # a resume keeps the samples up to the newest hash
            yield f"{place}: samples_sha256 differs from the one before: someone changed {SAMPLES} before this start"
        newest = row[HASH]
    for number, (line, row) in enumerate(zip_longest(found.samples, rows), 1):
        if line and line.sha256 != (row or {}).get(HASH):
            yield f"{SAMPLES}, line {number}: was changed or added, or one before it: metrics.jsonl lacks its hash"
            return
        if not line:  # a killed or running process may lack some
            if found.log.last.get("event") == "end":
                yield f"{SAMPLES}: lines are missing after line {number - 1}"
            return
        if (line.step, line.is_rollback) != (row["step"], is_rollback(row)):
            yield f"{SAMPLES}, line {number}: is of step {line.step}, its {row['event']} row of step {row['step']}"


def _check_data(
    config: TrainingConfig, folders: Sequence[str], manifests: list[Manifest], command: VerifyConfig, records: Records
) -> Iterator[Finding]:
    """Whether the run was trained on these manifests, with the weights of config.yaml, and whether the shards are those
    of the manifests. Raises: UserError for other manifests, if the command line named their folders."""
    hashes, several = [manifest.hash for manifest in manifests], len(manifests) > 1
    known = {place: mixture for place, record in records.items() if (mixture := recorded(record))}
    others = [place for place, found in known.items() if found.manifests != hashes[: len(found.manifests)]]
    if others and command.data and len(others) == len(known):
        raise UserError(
            "data", " ".join(command.data), "has other tokens than the run was trained on; name the run's data"
        )
    defects: list[str] = []
    if others:
        hint = "if they have moved, name the folder with --data"
        defects.append(f"{' '.join(folders)}: has other tokens than the run was trained on; {hint}")
    if several:
        windows = [count_windows(manifest.tokens("train"), config.model.block_size) for manifest in manifests]
        right = identity(manifests, phases_of(config, windows))
        for place, found in known.items():
            position = records[place].get("position", records[place]["step"] * config.global_batch_windows)
            ours, theirs = (past(one, position, len(manifests)) for one in (right, found))
            if ours != theirs:
                defects.append(f"{place}: data.weights and data.phases are {theirs}, by {CONFIG} {ours}")
    if command.shards == "none":
        yield "data: the manifest of the training", defects
        yield "no shard was read: the tokens are not checked", None
        return
    for folder, manifest in zip(folders, manifests, strict=True):
        defects += check_tokenizer_file(Path(folder) / manifest.tokenizer, manifest.tokenizer_sha256, MANIFEST)
        checked, wrong = _check_shards(Path(folder), manifest, command.shards)
        yield f"{checked} in {folder}" if several else checked, defects + wrong
        defects = []


def _check_shards(folder: Path, manifest: Manifest, how: str) -> tuple[str, list[str]]:
    """Hashes all shards (`full`) or a few random ones (`sampled`)."""
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    chosen = shards if how == "full" else random.sample(shards, min(SAMPLED, len(shards)))
    defects = []
    for shard in chosen:
        try:
            check_shard(folder, shard, token_dtype(manifest.vocab_size))
            if sha256_file(folder / shard.file) != shard.sha256:
                defects.append(f"{folder / shard.file}: its SHA-256 differs from {folder / MANIFEST}'s")
        except UserError as error:
            defects += error.mistakes
    names = "" if how == "full" else f" ({', '.join(shard.file for shard in chosen)})"
    return f"data: {len(chosen)} of {len(shards)} shards{names} unchanged", defects


def _check_training(found: Recorded, manifests: list[Manifest]) -> Generator[Finding, None, bool]:
    """Checks the numbers of the rows, the order of the data in rows and states, the steps of all records, and the
    learning rates. Returns whether the order is right."""
    config, events, states = found.config, found.log.events, found.states
    history = replay_order(config, manifests, events, states)
    schedule = history and Schedule(config, history, bool(found.events("branch")), manifests)
    count, values = len(found.events("rollback")), Values()
    wrong: dict[Any, list[str]] = {values: [], schedule: [], history: []}
    later = {place: n for place, state in states.items() if (n := state["rollbacks"]) > count}
    wrong[history] += [f"{place}: comes after {n} rollbacks, in metrics.jsonl {count}" for place, n in later.items()]
    for place, record in in_parts(found.log.items(), states):
        # the schedule first: before a rollback, it looks for the records that were due
        for check in filter(None, [history] if place in states else wrong):
            wrong[check] += [f"{place}: {defect}" for defect in check.check(record)]
    yield "numbers of the rows: known fields, none missing or negative, equal where two agree", wrong[values]
    if schedule is None:
        yield "the order of the data is not known: no record has the number of samples and the global batch", None
        return True
    end = max([found.log.end, *(state["step"] for state in states.values())])
    yield f"order of the data: all digests up to step {end}, recomputed from seed {config.seed}", wrong[history]
    yield "learning rates as scheduled; rows, evaluations and checkpoints at their due steps", wrong[schedule]
    return not wrong[history]


def _read_anchor(file: str) -> Anchor | None:
    """The anchor in a file; None without a file. Raises: UserError, also for a file that cannot be written."""
    check_writable(file, "anchor")
    try:
        return Anchor.model_validate(read_json(Path(file))) if os.path.exists(file) else None
    except ValueError as error:
        hint = "is no anchor; name a file that --anchor has written, or a new file"
        raise UserError("anchor", file, hint) from error


def _write_anchor(file: Path, found: Recorded) -> str:
    """Writes an anchor of the newest checkpoint. Returns a line of output."""
    newest = max(found.checkpoints.values(), key=lambda checkpoint: checkpoint.step, default=None)
    if newest is None or newest.state.log.chain == FIRST_CHAIN:
        return "note    no checkpoint holds a chain yet: no anchor is written"
    anchor = Anchor(step=newest.step, chain=newest.state.log.chain, sha256=_weights_hash(newest))
    write_atomically(file, json.dumps(anchor.model_dump()) + "\n")
    return f"ok      the anchor of step {newest.step} is in {file}"


def _weights_hash(checkpoint: Checkpoint) -> str:
    return json.loads((checkpoint.path / MANIFEST).read_bytes())["files"][MODEL]["sha256"]


def _check_anchor(anchor: Anchor, found: Recorded) -> list[str]:
    """Whether the rows continue the anchor's chain, and its checkpoint, if it still exists, has the same weights."""
    defects = []
    if anchor.chain not in found.log.seen:
        defects += [
            f"{METRICS}: lacks the anchor's chain, of step {anchor.step}: earlier rows were rewritten or cut off"
        ]
    for checkpoint in found.checkpoints.values():
        if checkpoint.step == anchor.step and _weights_hash(checkpoint) != anchor.sha256:
            defects += [f"checkpoints/{checkpoint.path.name}/{MODEL}: differs from the anchor's weights"]
    return defects
