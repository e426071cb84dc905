"""Consistency of a run's records with each other and with its data.

docs/verify.md lists what each check finds, and the limits of all.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import get_args

from gpt2_ddp.checkpoint.checkpoint import MANIFEST, MODEL, STATE, Checkpoint
from gpt2_ddp.checkpoint.run_files import CONFIG, METRICS, SAMPLES, STATUS, Line, is_rollback, read_lines, valid_rows
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.kinds import CONFIGS, guess_kind, read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.tools import VerifyConfig, check_writable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, token_dtype
from gpt2_ddp.data.mixture import Identity, identity, past, phases_of, read_manifests, recorded, source_weights
from gpt2_ddp.data.shards import check_shard, count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_json, sha256_file, write_atomically
from gpt2_ddp.reports.replay import Finding, Span, plan, replay, rescore, setting_defects
from gpt2_ddp.reports.verify_checkpoints import Checkpoints, check_checkpoints, differing, read_checkpoints
from gpt2_ddp.reports.verify_rows import (
    Record,
    Records,
    Schedule,
    check_scored,
    check_values,
    in_parts,
    read_metrics,
    replay_order,
)
from gpt2_ddp.training.progress import Outcome

SHOWN = 5
"""Most defects of one kind to print; the others are counted."""
SAMPLED = 8
"""Number of shards that `sampled` hashes."""
FIXED = ("kind", "run_id", "epoch_size", "tokenizer_sha256", "vocab_size", "data_manifest", "data_hash")
FIXED += ("global_batch_size",)
"""Fields of starts and states that never change in a run."""
HASH = "samples_sha256"
"""SHA-256 of samples.jsonl, in rows of starts, samples and rollbacks."""
STATES = ("running", "failed", *get_args(Outcome))
"""Values of `state` in status.json."""


@dataclass(frozen=True)
class Recorded:
    """The readable content of a run folder, and the defects that reading rows and checkpoints found."""

    run: Path
    settings: Record  # config.yaml
    config: RunConfig
    rows: Records
    checkpoints: Checkpoints
    status: Record | None  # None without a status.json; {} if it is no JSON
    samples: list[Line]  # the whole lines of samples.jsonl
    row_defects: list[str]
    damage: list[str]

    @property
    def last(self) -> Record:
        """The last row; empty without rows."""
        return [{}, *self.rows.values()][-1]

    @property
    def states(self) -> Records:
        return {place: checkpoint.state for place, checkpoint in self.checkpoints.items()}

    @property
    def end(self) -> int:
        """The last recorded step."""
        return max((record["step"] for record in (self.rows | self.states).values()), default=0)

    def events(self, name: str) -> list[Record]:
        return [row for row in self.rows.values() if row.get("event") == name]


def verify_run(command: VerifyConfig) -> int:
    """Exit code of verify_run.py: 0 if the run is intact, else 1. Prints an `ok` line or the defects of each check, and
    a `note` for what could not be checked. With `--rescore`, evaluates checkpoints again; with `--replay`, trains a
    part of the run again. With `--anchor`, compares the run with a file, and writes the file anew if all is intact.
    Raises: UserError for a missing run, for steps that cannot be replayed, or for other data in `--data`."""
    run, n_defects = Path(command.run), 0
    if not os.path.isfile(run / CONFIG):
        raise UserError("run", run, "has no config.yaml; name a run folder of a training script")
    anchor = _read_anchor(command.anchor) if command.anchor else {}
    span = plan(run, command.replay) if command.replay else None
    found = _read(run)
    for what, defects in _check(found, command, span, anchor):
        if not defects:
            print(f"{'note' if defects is None else 'ok':8}{what}")
            continue
        for defect in defects[:SHOWN]:
            print(f"defect  {defect}")
        if len(defects) > SHOWN:
            print(f"defect  ... and {len(defects) - SHOWN} more like these")
        n_defects += len(defects)
    if command.anchor and not n_defects:
        print(_write_anchor(Path(command.anchor), found))
    print(f"{run} is {f'not intact, defects: {n_defects}' if n_defects else 'intact'}")
    return 1 if n_defects else 0


def _read(run: Path) -> Recorded:
    """Reads the run's files. A running training writes a row before a sample, and after a checkpoint."""
    settings = read_yaml(str(run / CONFIG), "run")
    if not settings:
        raise UserError("run", run / CONFIG, "is empty; restore the run's original file, or name another run folder")
    kind = next((line.row.get("kind") for line in read_lines(run / METRICS) if line.row), None)
    config = read_config(kind if kind in [*CONFIGS] else guess_kind(settings), settings, CONFIG)
    checkpoints, damaged = read_checkpoints(run)
    status, samples = _read_status(run), _read_samples(run)
    rows, defects = read_metrics(run / METRICS)
    if [{}, *rows.values()][-1].get("event") == "end":  # the samples are complete by now
        samples = _read_samples(run)
    status = _read_status(run) if status is None else status
    return Recorded(run, settings, config, rows, checkpoints, status, samples, defects, damaged)


def _read_status(run: Path) -> Record | None:
    try:
        return read_json(run / STATUS)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _read_samples(run: Path) -> list[Line]:
    return [line for line in read_lines(run / SAMPLES) if not line.torn]


def _check(found: Recorded, command: VerifyConfig, span: Span | None, anchor: Record) -> Iterator[Finding]:
    run, config, rows, checkpoints = found.run, found.config, found.rows, found.checkpoints
    count = sum("event" not in row for row in rows.values())
    chains = [row["chain"] for row in rows.values() if "chain" in row]
    chained = f"; {len(chains)} lines chained by hashes up to {chains[-1][:12]}" if chains else ""
    yield f"metrics.jsonl: {count} rows, steps strictly increasing{chained}", found.row_defects
    wrong = [*found.damage, *check_checkpoints(run, config, rows, checkpoints)]
    yield f"checkpoints: {len(checkpoints)}, all files unchanged, none missing", wrong
    heads = {state.get("metrics_chain") for state in found.states.values()}
    newest = takewhile(lambda row: row.get("chain") not in heads, reversed(rows.values()))
    if loose := sum("event" not in row for row in newest):
        yield f"the last {loose} rows are newer than the newest checkpoint: no checkpoint confirms them yet", None
    yield "configuration: equal in config.yaml, starts and checkpoints, with one run id", _check_configuration(found)
    yield from check_end(found)
    manifests: list[Manifest] = []
    if isinstance(config, TrainingConfig):
        folders, n_folders = config.data.moved(command.data), len(config.data.paths)
        if len(folders) != n_folders:
            hint = f"the run was trained on {n_folders} folders; name all of them, joined by `:`"
            raise UserError("data", command.data, hint)
        manifests = read_manifests(folders)
        yield from _check_data(config, folders, manifests, command, rows | found.states)
    wrong = [*check_values(rows), *check_scored(rows, config, manifests)]
    yield "numbers of the rows: known fields, none missing or negative, equal where two agree", wrong
    yield from _check_training(found, manifests)
    for branch in found.events("branch"):
        manifest = Path(str(branch.get("from"))) / MANIFEST
        same = manifest.is_file() and sha256_file(manifest) == branch.get("checkpoint_sha256")
        there = "is unchanged" if same else "is missing or changed"
        yield f"the parent checkpoint {manifest.parent} {there}: verify its own run, too", None
    if command.rescore:
        yield from rescore(run, valid_rows(rows.values()), checkpoints.values(), command.data)
    if span:
        yield from replay(run, span, checkpoints.values(), command.data)
    if not (span or command.rescore):
        hint = "--rescore scores checkpoints again, --replay A:B trains again"
        yield f"losses, norms and weights: not checked; {hint}", None
    if anchor:
        yield f"the anchor of step {anchor['step']} is part of the run", _check_anchor(anchor, found)


def _check_configuration(found: Recorded) -> list[str]:
    """Contradictions between config.yaml, the starts and the checkpoints."""
    starts = {place: row for place, row in found.rows.items() if isinstance(row.get("config"), dict)}
    documents = {place: row["config"] for place, row in starts.items()}
    documents |= {place.replace(STATE, CONFIG): checkpoint.config for place, checkpoint in found.checkpoints.items()}
    documents[CONFIG] = found.settings
    first = Checkpoint(Path(), {"kind": found.config.kind}, next(iter(documents.values())))
    defects: list[str] = []
    for place, document in documents.items():
        defects += [f"{place}: {defect.partition(';')[0]}" for defect in setting_defects(document, CONFIG, first)]
    known: dict[str, tuple[str, Record]] = {}  # the first record of each field
    for place, record in (starts | found.states).items():
        for name in (name for name in FIXED if record.get(name) is not None):
            defects += differing(place, record, *known.setdefault(name, (place, record)), [name])

    def altered(place: str, start: str) -> list[str]:
        now, right = flat(documents[place]), flat(documents[start])
        return differing(place, now, start, right, dict.fromkeys([*now, *right]))

    newest = ""
    sessions: dict[str, str] = {}  # place of the start that each row's chain comes after
    for place, row in found.rows.items():
        newest = place if place in starts else newest
        if newest and "chain" in row:
            sessions[row["chain"]] = newest
    for place, state in found.states.items():
        if start := sessions.get(state.get("metrics_chain", "")):
            same = [name for name in starts[start] if name in state and name != "step"]
            defects += differing(place, state, start, starts[start], same)
            defects += altered(place.replace(STATE, CONFIG), start)
    if newest and found.last is not starts[newest]:  # a start that nothing follows may be killed before it wrote it
        defects += altered(CONFIG, newest)
    return list(dict.fromkeys(defects))


def check_end(found: Recorded) -> Iterator[Finding]:
    """Checks status.json and samples.jsonl against the rows."""
    count, recorded = len(found.samples), [row[HASH] for row in found.rows.values() if HASH in row]
    yield f"{STATUS}: agrees with metrics.jsonl", [*_check_status(found)]
    defects = [*_check_samples(found, recorded)]
    if count or defects:
        yield f"{SAMPLES}: {count} lines" + ", all chained by metrics.jsonl" * bool(recorded), defects
    if count and not recorded:
        yield f"{SAMPLES}: metrics.jsonl has no hash of it: an earlier release trained the run", None


def _check_status(found: Recorded) -> Iterator[str]:
    last, event = found.last, found.last.get("event")
    if found.status is None:
        if {row.get("event") for row in found.rows.values()} - {"start", "branch"}:
            yield f"{STATUS}: is missing"
        return
    state, step = found.status.get("state"), found.status.get("step")
    newest = max((saved["step"] for saved in found.states.values()), default=step)
    if state not in STATES or type(step) is not int:
        yield f"{STATUS}: has state {state} at step {step}; state should be one of {', '.join(STATES)}"
    elif state in get_args(Outcome) and found.events("start"):
        expected = state if event == "start" else last.get("outcome")  # after a start, it is the last session's still
        if event not in ("start", "end"):
            yield f"{STATUS}: has state {state}, but metrics.jsonl has no end row"
        elif (state, step) != (expected, last["step"]) and (state, event) != ("diverged", "start"):
            outcome = last.get("outcome", "a start")
            yield f"{STATUS}: has {state} at step {step}, metrics.jsonl {outcome} at step {last['step']}"
    elif state in ("completed", "stopped") and newest != step:
        yield f"{STATUS}: has {state} at step {step}, but the newest checkpoint is of step {newest}"


def _check_samples(found: Recorded, recorded: list[str]) -> Iterator[str]:
    """Defects of the steps in samples.jsonl, and of its hashes in metrics.jsonl. Where the run has not ended, samples
    may be missing: their rows are written before them."""
    has_ended, end, before = found.last.get("event") == "end", found.end, 0
    if not has_ended:  # a killed or running process may have sampled at a step without a row
        end = max([end, *(row["steps"] for row in found.rows.values() if isinstance(row.get("steps"), int))])
    digest, right, newest = hashlib.sha256(), 0, hashlib.sha256().hexdigest()
    for line in found.samples:
        place, row = f"{SAMPLES}, line {line.number}", line.row or {}
        digest.update(f"{line.text}\n".encode())
        if digest.hexdigest() in recorded:
            right, newest = line.number, digest.hexdigest()
        if type(row.get("step")) is not int:
            yield f"{place}: is not a row with a step"
            continue
        if not is_rollback(row) and not before <= row["step"] <= end:  # a rollback may have undone it
            yield f"{place}: is of step {row['step']}, after step {before} of a run of {end} steps"
        before = row["step"]
    if recorded and right < len(found.samples):
        yield f"{SAMPLES}, line {right + 1}: was changed or added, or one before it: metrics.jsonl lacks its hash"
    elif recorded and has_ended and newest != recorded[-1]:
        yield f"{SAMPLES}: lines are missing after line {right}"


def _check_data(
    config: TrainingConfig, folders: Sequence[str], manifests: list[Manifest], command: VerifyConfig, records: Records
) -> Iterator[Finding]:
    """Whether the run was trained on these manifests, with the weights of config.yaml, and whether the shards are those
    of the manifests. Raises: UserError for other manifests, if the command line named their folders."""
    hashes = [manifest.hash for manifest in manifests]
    known: dict[str, Identity] = {}
    defects: list[str] = []
    for place, record in records.items():
        try:
            known |= {place: found} if (found := recorded(record)) else {}
        except ValueError:
            defects.append(f"{place}: its mixture is invalid: {record.get('mixture')}")
    others = [place for place, found in known.items() if found.manifests != hashes[: len(found.manifests)]]
    if others and command.data and len(others) == len(known):
        raise UserError("data", command.data, "has other tokens than the run was trained on; name the run's data")
    if others:
        hint = "if they have moved, name the folder with --data"
        defects.append(f"{' '.join(folders)}: has other tokens than the run was trained on; {hint}")
    several = len(manifests) > 1
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


def _check_training(found: Recorded, manifests: list[Manifest]) -> Iterator[Finding]:
    """Checks the order of the data in rows and states, the steps of all records, and the learning rates."""
    config, rows, states = found.config, found.rows, found.states
    history = replay_order(config, manifests, rows, states)
    if history is None:
        yield "the order of the data is not known yet, before a checkpoint or the end of an epoch", None
        return
    validates = not isinstance(config, TrainingConfig) or bool(source_weights(config, manifests))
    schedule = Schedule(config, history, validates, is_branch=bool(found.events("branch")))
    placed, order = in_parts(rows, states)
    missing: list[str] = []
    for place, record in placed:
        wrong = [f"{place}: {defect}" for defect in history.check(record)]
        order += wrong
        if place in rows and not any("does not match" in defect for defect in wrong):  # its step may be huge
            missing += [f"{place}: {defect}" for defect in schedule.check(record)]
    yield f"order of the data: all digests up to step {found.end}, recomputed from seed {config.seed}", order
    when = "; rows, evaluations and checkpoints at their due steps" if schedule.steps is not None else ""
    yield f"learning rates as scheduled{when}", missing


def _read_anchor(file: str) -> Record:
    """The anchor in a file; empty without a file. Raises: UserError, also for a file that cannot be written."""
    check_writable(file, "anchor")
    try:
        anchor = read_json(Path(file)) if os.path.exists(file) else {}
    except ValueError:
        anchor = {"": None}
    if anchor and not {"step", "chain", "sha256"} <= anchor.keys():
        raise UserError("anchor", file, "is no anchor; name a file that --anchor has written, or a new file")
    return anchor


def _write_anchor(file: Path, found: Recorded) -> str:
    """Writes step, chain and SHA-256 of the weights of the newest checkpoint. Returns a line of output."""
    newest = max(found.checkpoints.values(), key=lambda checkpoint: checkpoint.state["step"], default=None)
    if newest is None or not newest.state.get("metrics_chain"):
        return "note    no checkpoint holds a chain yet: no anchor is written"
    step, chain = newest.state["step"], newest.state["metrics_chain"]
    write_atomically(file, json.dumps({"step": step, "chain": chain, "sha256": _weights_hash(newest)}) + "\n")
    return f"ok      the anchor of step {step} is in {file}"


def _weights_hash(checkpoint: Checkpoint) -> str:
    return json.loads((checkpoint.path / MANIFEST).read_bytes())["files"][MODEL]["sha256"]


def _check_anchor(anchor: Record, found: Recorded) -> list[str]:
    """Whether the rows continue the anchor's chain, and its checkpoint, if it still exists, has the same weights."""
    step, defects = anchor["step"], []
    if anchor["chain"] not in [row.get("chain") for row in found.rows.values()]:
        defects += [f"{METRICS}: lacks the anchor's chain, of step {step}: earlier rows were rewritten or cut off"]
    for checkpoint in found.checkpoints.values():
        if checkpoint.state["step"] == step and _weights_hash(checkpoint) != anchor["sha256"]:
            defects += [f"checkpoints/{checkpoint.path.name}/{MODEL}: differs from the anchor's weights"]
    return defects
