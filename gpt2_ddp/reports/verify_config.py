"""What a run was: its configuration, its id and its data, wherever they were written down. And how it ended."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import STATE, Checkpoint
from gpt2_ddp.checkpoint.run_files import CONFIG, SAMPLES, STATUS, is_rollback, read_lines
from gpt2_ddp.config.base import complete, flat
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.data.manifest import Manifest, token_dtype
from gpt2_ddp.data.shards import check_shard
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.reports.verify_checkpoints import Checkpoints
from gpt2_ddp.reports.verify_order import Record, Records
from gpt2_ddp.training.resume import check_resumable

FIXED = (
    "kind",
    "run_id",
    "epoch_size",
    "tokenizer_sha256",
    "vocab_size",
    "data_manifest",
    "data_hash",
    "global_batch_size",
)
"""Facts that stay as long as a run does."""

SAMPLED = 8
"""Shards that are hashed where not all are."""


def check_configuration(settings: Record, config: RunConfig, rows: Records, checkpoints: Checkpoints) -> list[str]:
    """What contradicts itself in the run's configuration, id, data's hash, processes and device: those of config.yaml,
    of each start and of each checkpoint.

    Args:
        settings: the run's config.yaml.
    """
    starts = {place: row for place, row in rows.items() if isinstance(row.get("config"), dict)}
    configs = {place.replace(STATE, CONFIG): checkpoint.config for place, checkpoint in checkpoints.items()}
    states = {place: checkpoint.state for place, checkpoint in checkpoints.items()}
    documents = {place: row["config"] for place, row in starts.items()} | configs | {CONFIG: settings}
    first = next(iter(documents.values()))
    defects = [f"{at}: {mistake}" for at, found in documents.items() for mistake in _unlike(config, found, first)]

    records = starts | states
    for name in FIXED:
        known = {place: record[name] for place, record in records.items() if record.get(name) is not None}
        right = next(iter(known.values()), None)
        origin = next(iter(known), "")
        defects += [f"{at}: {name} is {value}, in {origin} {right}" for at, value in known.items() if value != right]

    newest: tuple[str, Record] | None = None
    sessions: dict[str, tuple[str, Record]] = {}  # the start that each row's chain comes after
    for place, row in rows.items():
        newest = (place, row) if place in starts else newest
        if newest and "chain" in row:
            sessions[row["chain"]] = newest
    for place, state in states.items():
        if begun := sessions.get(state.get("metrics_chain", "")):
            at, start = begun
            facts = [name for name in ("processes", "device", "versions") if state.get(name) != start.get(name)]
            defects += [f"{place}: {name} is {state.get(name)}, in {at} {start.get(name)}" for name in facts]
            there = place.replace(STATE, CONFIG)
            defects += _altered(config, there, configs[there], at, start["config"])
    if newest and newest[0] != list(rows)[-1]:  # a start that nothing follows may have been killed before it wrote it
        defects += _altered(config, CONFIG, settings, newest[0], newest[1]["config"])
    return list(dict.fromkeys(defects))


def _unlike(config: RunConfig, found: Record, first: Record) -> Iterator[str]:
    """What a run has to keep, and is not in `found` as in its first configuration."""
    try:
        check_resumable(read_config(config.kind, found, CONFIG), Checkpoint(Path(), {"kind": config.kind}, first))
    except UserError as error:
        yield from (mistake.partition(";")[0] for mistake in error.mistakes)


def _altered(config: RunConfig, place: str, found: Record, origin: str, right: Record) -> Iterator[str]:
    """Fields that are not as in the start that they were written at."""
    now, before = (flat(complete(type(config), values)[0]) for values in (found, right))
    for name in now:
        if now[name] != before[name]:
            yield f"{place}: {name} is {now[name]}, in {origin} {before[name]}"


def check_shards(folder: Path, manifest: Manifest, how: str) -> tuple[str, list[str]]:
    """Hashes all shards (`full`) or a few, drawn anew each time (`sampled`): which ones, and what is wrong."""
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    chosen = shards if how == "full" else random.sample(shards, min(SAMPLED, len(shards)))
    defects = []
    for shard in chosen:
        try:
            check_shard(folder, shard, token_dtype(manifest.vocab_size))
            if sha256_file(folder / shard.file) != shard.sha256:
                defects.append(f"{folder / shard.file}: its SHA-256 is not the one of {folder / 'manifest.json'}")
        except UserError as error:
            defects += error.mistakes
    names = "" if how == "full" else f" ({', '.join(shard.file for shard in chosen)})"
    return f"data: {len(chosen)} of {len(shards)} shards{names} as they were prepared", defects


def check_end(run: Path, rows: Records, states: Records) -> Iterator[str]:
    """What is wrong with status.json and samples.jsonl, held against the rows."""
    status = read_status(run)
    state, step = status.get("state"), status.get("step")
    last = list(rows.values())[-1] if rows else {}
    newest = max((saved["step"] for saved in states.values()), default=None)
    if state in ("completed", "stopped", "diverged") and any(row.get("event") == "start" for row in rows.values()):
        if last.get("event") == "start":  # the status is the last session's still
            right = state == "diverged" or step == last["step"]
        else:
            right = (state, step) == (last.get("outcome"), last["step"])
        if last.get("event") not in ("start", "end"):
            yield f"{STATUS}: says {state}, and metrics.jsonl does not end with an end"
        elif not right:
            said = last.get("outcome", "a start")
            yield f"{STATUS}: says {state} at step {step}, metrics.jsonl {said} at step {last['step']}"
    elif state in ("completed", "stopped") and newest not in (None, step):
        yield f"{STATUS}: says {state} at step {step}, and the newest checkpoint is of step {newest}"
    yield from _check_samples(run, rows, states)


def _check_samples(run: Path, rows: Records, states: Records) -> Iterator[str]:
    """What is wrong with the steps of samples.jsonl. A rollback may have undone one that was not reached again."""
    last = list(rows.values())[-1] if rows else {}
    end = max((record["step"] for record in [*rows.values(), *states.values()]), default=0)
    if last.get("event") != "end":  # a killed or running process may have sampled at a step without a row
        end = max([end, *(row["steps"] for row in rows.values() if isinstance(row.get("steps"), int))])
    before = 0
    for line in read_lines(run / SAMPLES):
        step = line.row.get("step") if line.row else None
        place = f"{SAMPLES}, line {line.number}"
        if line.torn:
            continue
        if not line.row or type(step) is not int:
            yield f"{place}: is not a row with a step"
        elif not is_rollback(line.row) and not before <= step <= end:
            yield f"{place}: is of step {step}, after step {before} of a run of {end} steps"
        before = step if type(step) is int else before


def read_status(folder: Path) -> dict[str, Any]:
    """The content of status.json; empty if it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / STATUS).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
