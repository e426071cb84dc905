"""Consistency of a run's records with each other and with its data.

docs/verify.md says what each check finds, and what none can.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpt2_ddp.checkpoint.checkpoint import MANIFEST
from gpt2_ddp.checkpoint.run_files import CONFIG, METRICS, is_event
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.kinds import guess_kind, read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.mixture import Identity, identity, past, phases_of, read_manifests, recorded, source_weights
from gpt2_ddp.data.shards import count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.reports.replay import Span, plan, replay
from gpt2_ddp.reports.verify_checkpoints import check_checkpoints, read_checkpoints, unconfirmed
from gpt2_ddp.reports.verify_config import check_configuration, check_end, check_shards
from gpt2_ddp.reports.verify_order import Record, Records, in_parts, replay_order
from gpt2_ddp.reports.verify_rows import Schedule, read_metrics

SPACING = "; rows, evaluations and checkpoints at the steps that they were due"
SHOWN = 5
"""Defects of one kind that are printed; more of them are counted."""

Finding = tuple[str, list[str] | None]
"""What was checked, and its defects; or what could not be, and None."""


def verify_run(command: VerifyConfig) -> int:
    """Exit code of verify_run.py: 0 if the run is intact, else 1.

    Prints an `ok` line or the defects of each check, and a `note` for what could not be checked. With `--replay`,
    trains a part of the run again.

    Raises:
        UserError: there is no such run, no such steps to replay, or `--data` is not what it was trained on.
    """
    run = Path(command.run)
    if not os.path.isfile(run / CONFIG):
        raise UserError("run", run, "holds no config.yaml; name a run folder, as the training scripts write it")
    settings = read_yaml(str(run / CONFIG), "run")
    if not settings:
        raise UserError("run", run / CONFIG, "is empty; put the run's own file back, or give it another run folder")
    config = read_config(guess_kind(settings), settings, CONFIG)
    span = plan(run, command.replay) if command.replay else None
    found = sum(_tell(*finding) for finding in _check(run, settings, config, command, span))
    print(f"{run} is {f'not intact, defects: {found}' if found else 'intact'}")
    return 1 if found else 0


def _check(
    run: Path, settings: Record, config: RunConfig, command: VerifyConfig, span: Span | None
) -> Iterator[Finding]:
    """Checks one thing after another, each when its turn has come."""
    checkpoints, damaged = read_checkpoints(run)  # before the rows: a run that goes on records first
    rows, defects = read_metrics(run / METRICS)
    states = {place: checkpoint.state for place, checkpoint in checkpoints.items()}
    yield from _check_chain(rows, defects)
    wrong = damaged + list(check_checkpoints(run, config, rows, checkpoints))
    yield f"checkpoints: {len(states)}, every file as it was written, all that were kept", wrong
    if loose := unconfirmed(rows, states):
        yield f"the last {loose} rows come after the newest checkpoint: nothing else confirms their chain yet", None
    wrong = check_configuration(settings, config, rows, checkpoints) + list(check_end(run, rows, states))
    yield "configuration: the same in config.yaml, starts and checkpoints, with one run id", wrong
    manifests: list[Manifest] = []
    if isinstance(config, TrainingConfig):
        folders = config.data.moved(command.data)
        if len(folders) != len(config.data.paths):
            hint = f"the run was trained on {len(config.data.paths)} folders; name all of them, joined by `:`"
            raise UserError("data", command.data, hint)
        manifests = read_manifests(folders)
        yield from _check_data(config, folders, manifests, command, rows | states)
    yield from _check_training(config, manifests, rows, states)
    yield from _tell_parents(rows)
    if span:
        yield from replay(run, span, checkpoints.values(), command.data)
    else:
        yield "losses, norms and weights: only training again proves them, --replay A:B", None


def _check_chain(rows: Records, defects: list[str]) -> Iterator[Finding]:
    count = sum(not is_event(row) for row in rows.values())
    chains = [row["chain"] for row in rows.values() if "chain" in row]
    chained = f"; {len(chains)} lines chained by hashes up to {chains[-1][:12]}" if chains else ""
    yield f"metrics.jsonl: {count} rows, steps strictly increasing{chained}", defects


def _check_data(
    config: TrainingConfig, folders: Sequence[str], manifests: list[Manifest], command: VerifyConfig, records: Records
) -> Iterator[Finding]:
    """Whether the folders' manifests are those that were trained on, with the weights of config.yaml, and their shards
    those of the manifests.

    Raises:
        UserError: they are others, and were named on the command line.
    """
    hashes = [manifest.hash for manifest in manifests]
    known: dict[str, Identity] = {}
    defects: list[str] = []
    for place, record in records.items():
        try:
            known |= {place: found} if (found := recorded(record)) else {}
        except ValueError:
            defects.append(f"{place}: its mixture is none: {record.get('mixture')}")
    others = [place for place, found in known.items() if found.manifests != hashes[: len(found.manifests)]]
    if others:
        if command.data and len(others) == len(known):
            raise UserError(
                "data", command.data, "other tokens than the run was trained on; name their folder with --data"
            )
        hint = "--data names a folder that they have moved to"
        defects.append(f"{' '.join(folders)}: holds other tokens than the run was trained on; {hint}")
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
        yield "data: the manifest that was trained on", defects
        yield "no shard was read: whether the tokens are those of the manifest is unknown", None
    for folder, manifest in zip(folders, manifests, strict=True) if command.shards != "none" else ():
        checked, wrong = check_shards(Path(folder), manifest, command.shards)
        yield f"{checked} in {folder}" if several else checked, defects + wrong
        defects = []


def _check_training(config: RunConfig, manifests: list[Manifest], rows: Records, states: Records) -> Iterator[Finding]:
    """The order of the data in rows and states; and what was recorded when, and the learning rates."""
    history = replay_order(config, manifests, rows, states)
    if history is None:
        yield "the order of the data is not known yet: it takes a checkpoint, or the end of an epoch", None
        return
    validates = not isinstance(config, TrainingConfig) or bool(source_weights(config, manifests))
    branched = any(row.get("event") == "branch" for row in rows.values())
    schedule = Schedule(config, history, validates, begun=branched)
    placed, order = in_parts(rows, states)
    missing: list[str] = []
    for place, record in placed:
        wrong = [f"{place}: {defect}" for defect in history.check(record)]
        order += wrong
        if place in rows and not any("does not go" in defect for defect in wrong):  # or it might have us count to it
            missing += [f"{place}: {defect}" for defect in schedule.check(record)]
    end = max((record["step"] for record in (rows | states).values()), default=0)
    yield f"order of the data: every digest up to step {end}, recomputed from seed {config.seed}", order
    yield "learning rates as scheduled" + SPACING * (schedule.steps is not None), missing


def _tell_parents(rows: Records) -> Iterator[Finding]:
    for branch in (row for row in rows.values() if row.get("event") == "branch"):
        file = Path(str(branch.get("from"))) / MANIFEST
        same = file.is_file() and sha256_file(file) == branch.get("checkpoint_sha256")
        there = "is still what it was" if same else "is not there as it was"
        yield f"it began with {file.parent}, which {there}: how that was trained, its own run has to prove", None


def _tell(what: str, defects: list[str] | None) -> int:
    """Prints a finding; returns the number of its defects."""
    if not defects:
        print(f"{'note' if defects is None else 'ok':8}{what}")
    for defect in (defects or [])[:SHOWN]:
        print(f"defect  {defect}")
    if defects and len(defects) > SHOWN:
        print(f"defect  ... and {len(defects) - SHOWN} more like these")
    return len(defects or [])
