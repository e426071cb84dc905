"""Did a run train on what it should have, and are its checkpoints what was written? Recomputed from its configuration.

The items of every step follow from the seed, the step's size and the number of items alone: a feed that reads nothing
replays their order, and its digest is compared with what each row of metrics.jsonl and each checkpoint recorded.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.config.yaml_file import read_yaml
from gpt2_ddp.data.feed import Feed, contiguous
from gpt2_ddp.data.shards import read_manifest
from gpt2_ddp.data.windows import count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.replay import plan, replay
from gpt2_ddp.run.checkpoint import STATE, Damaged, guess_kind, list_checkpoints, verify
from gpt2_ddp.run.folder import CONFIG, METRICS, is_rollback, read_lines

SHOWN = 5
"""Defects of one kind that are printed; more of them are counted."""

Records = dict[str, dict[str, Any]]
"""Rows of metrics.jsonl and states of checkpoints, by the place where they stand."""


def verify_run(config: VerifyConfig) -> int:
    """The command: checks metrics, checkpoints and data order, and prints an `ok` line for each, or its defects; where
    it is told to, trains a part of the run again.

    Returns:
        0 when the run is intact, 1 when it is not.

    Raises:
        UserError: there is no such run, no such steps to replay, or the data are not those that it was trained on.
    """
    run = Path(config.run)
    if not os.path.isfile(run / CONFIG):
        raise UserError("run", run, "holds no config.yaml; name a run folder, as the training scripts write it")
    settings = read_yaml(str(run / CONFIG), "run")
    if not settings:
        raise UserError("run", run / CONFIG, "is empty; put the run's own file back, or give it another run folder")

    span = plan(run, config.replay) if config.replay else None
    rows, defects = read_metrics(run / METRICS)
    found = _tell(f"metrics.jsonl: {len(rows)} rows, steps strictly increasing", defects)
    states, defects = read_states(run / "checkpoints")
    found += _tell(f"checkpoints: {len(states)}, every file as it was written", defects)
    records = rows | states
    defects = check_order(settings, config.data, records)
    end = max((record["step"] for record in records.values()), default=0)
    if defects is None:
        print("note    the order of the data is not known yet: it takes a checkpoint, or the end of an epoch")
    else:
        whole = f"order of the data: every digest up to step {end}, recomputed from seed {settings.get('seed')}"
        found += _tell(whole, defects)
    for compared, defects in replay(run, span, states, config.data) if span else ():
        found += _tell(compared, defects)
    print(f"{run} is {f'not intact, defects: {found}' if found else 'intact'}")
    return 1 if found else 0


def read_metrics(file: Path) -> tuple[Records, list[str]]:
    """The rows of metrics.jsonl, rollbacks among them, and what is wrong with them. A torn last line is what a kill
    leaves, and no defect."""
    rows: Records = {}
    defects, before = [], -1
    for line in read_lines(file):
        place = f"metrics.jsonl, line {line.number}"
        if line.torn:
            continue
        if line.row is None or not isinstance(line.row.get("step"), int):
            defects.append(f"{place}: is not a row with a step")
            continue
        if line.row["step"] <= before and not is_rollback(line.row):
            defects.append(f"{place}: step {line.row['step']} after step {before}")
        before = line.row["step"]
        rows[place] = line.row
    return rows, defects or ([] if rows else ["metrics.jsonl: has no rows"])


def read_states(folder: Path) -> tuple[Records, list[str]]:
    """state.json of every checkpoint whose hashes are right, and what is wrong with the other checkpoints."""
    states: Records = {}
    defects = []
    for checkpoint in list_checkpoints(folder):
        try:
            state = verify(checkpoint).state
        except Damaged as damage:
            defects.append(f"{damage.file.relative_to(folder.parent)}: {damage.reason}")
            continue
        place = f"checkpoints/{checkpoint.name}/{STATE}"
        if checkpoint.name != f"step-{state['step']:08d}":
            defects.append(f"{place}: is the state of step {state['step']}")
        states[place] = state
    return states, defects


def check_order(settings: dict[str, Any], data: str | None, records: Records) -> list[str] | None:
    """Compares what `records` count, their positions, order digests and rollbacks with those that `settings` and the
    data ask for.

    Args:
        settings: the run's config.yaml. data: folder of shards in place of the configured one.
        records: rows in their order; a checkpoint's state, which says how many rollbacks it has behind it.

    Returns:
        What is wrong; None while nothing says how many samples or processes a small job has.

    Raises:
        UserError: the folder is not one of shards, or not the one that the checkpoints were trained on.
    """
    replay = _replay(settings, data, records)
    if replay is None:
        return None
    feed, unit, per_item = replay
    defects, order = [], _History(feed)
    parts: list[Records] = [{}]  # between the rollbacks
    for place, record in records.items():
        if is_rollback(record):
            parts.append({place: record})
        elif record["step"] > 0 and record.get("rollbacks", len(parts) - 1) < len(parts):
            parts[record.get("rollbacks", -1)][place] = record
        elif record["step"] > 0:
            defects.append(f"{place}: has {record['rollbacks']} rollbacks behind it, metrics.jsonl {len(parts) - 1}")
    for part in parts:
        for place, record in part.items():
            defects += [f"{place}: {defect}" for defect in order.check(record, unit, per_item)]
    return defects


class _History:
    """Where the data stood after each step, as `feed` replays them."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.stood = [self._now()]

    def check(self, record: dict[str, Any], unit: str, per_item: int) -> Iterator[str]:
        """What is wrong with a row or a state; a rollback changes what is right from there on."""
        feed, step, digest = self.feed, record["step"], record.get("order_digest")
        if is_rollback(record):
            begun, passed = record.get("from"), record.get("passed")
            ends = passed if isinstance(passed, list) and len(passed) == 2 else [0, 0]
            # so that nonsense does not have us count to it
            if not isinstance(begun, int) or not 0 <= step < begun or feed.consumed_after(begun) > ends[1]:
                yield f"from step {begun} to {step}, over {passed}, does not go together"
                return
            end, _, _ = self._at(begun)
            position, before, gaps = self._at(step)
            del self.stood[step + 1 :]
            feed.seek(position, before, gaps)
            start = int(feed.take(position)[0])
            feed.pass_over(start, end)
            self.stood[step] = self._now()
            if (passed, digest) != ([start, end], feed.order_digest):
                right = f"{[start, end]}, order_digest {feed.order_digest[:12]}"
                yield f"passed over {passed}, order_digest {str(digest)[:12]}, not {right}"
            return
        items, position = feed.consumed_after(step), record.get("position")
        gaps = sum(stop - start for start, stop in self.stood[-1][2])
        if record.get(unit) != items * per_item or position not in (None, items + gaps):
            yield f"step {step} does not go with {unit} {record.get(unit)}, position {position}"
            return
        _, right, passed = self._at(step)
        if digest != right:
            yield f"order_digest of step {step} is {str(digest)[:12]}, not {right[:12]}"
        elif "passed" in record and [tuple(gap) for gap in record["passed"]] != passed:
            yield f"passed over {record['passed']}, not {passed}"

    def _at(self, step: int) -> tuple[int, str, list[tuple[int, int]]]:
        while len(self.stood) <= step:
            self.feed.next_step()
            self.stood.append(self._now())
        return self.stood[step]

    def _now(self) -> tuple[int, str, list[tuple[int, int]]]:
        return self.feed.position, self.feed.order_digest, list(self.feed.passed)


def _replay(settings: dict[str, Any], data: str | None, records: Records) -> tuple[Feed, str, int] | None:
    """The feed of the run's order, which reads nothing; the name of what its rows count, and how many an item has. None
    while nothing says how many samples or processes a small job has."""
    config = read_config(guess_kind(settings), settings, CONFIG)
    newest = list(records.values())[-1] if records else {}
    share = contiguous(1, 1)
    if isinstance(config, TrainingConfig):
        folder = Path(data or config.data.path)
        manifest = read_manifest(folder)
        if any(record.get("data_manifest", manifest.hash) != manifest.hash for record in records.values()):
            raise UserError("data", folder, "other tokens than the run was trained on; name their folder with --data")
        items = count_windows(manifest.tokens("train"), config.model.block_size)
        feed = Feed(range(items), config.seed, config.global_batch_windows, share)
        return feed, "tokens", config.model.block_size
    assert isinstance(config, JobConfig), "the other kinds"
    whole = [record for record in records.values() if record.get("epoch") and "train_loss" in record]
    sizes = [round(record["samples"] / record["epoch"]) for record in whole]  # before checkpoints had epoch_size
    own: dict[str, Any] = config.model_dump()["data"]
    generated = own.get("sequences") or (own.get("points") if own.get("name", "clusters") == "clusters" else None)
    items = newest.get("epoch_size") or generated or next(iter(sizes), None)
    batch = newest.get("global_batch_size") or (None if config.scale_with_processes else config.train.global_batch_size)
    if not items or not batch:
        return None
    return Feed(range(items), config.seed, batch, share, by_epoch=True), "samples", 1


def _tell(checked: str, defects: list[str]) -> int:
    """Prints what was checked, or its defects; returns their number."""
    if not defects:
        print(f"ok      {checked}")
    for defect in defects[:SHOWN]:
        print(f"defect  {defect}")
    if len(defects) > SHOWN:
        print(f"defect  ... and {len(defects) - SHOWN} more like these")
    return len(defects)
