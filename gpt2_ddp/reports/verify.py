"""Did a run train on what it should have, and are its checkpoints what was written? Recomputed from its configuration.

The windows of every step follow from the seed, the global batch, the block size and the number of tokens alone: their
running digest is computed again and compared with what each row of metrics.jsonl and each checkpoint recorded.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.loader import FIRST_DIGEST, Order, count_windows, next_digest
from gpt2_ddp.data.shards import read_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.run.checkpoint import STATE, Damaged, list_checkpoints, verify

SHOWN = 5
"""Defects of one kind that are printed; more of them are counted."""

Records = dict[str, dict[str, Any]]
"""Rows of metrics.jsonl and states of checkpoints, by the place where they stand."""


def verify_run(config: VerifyConfig) -> int:
    """The command: checks metrics, checkpoints and data order, and prints an `ok` line for each, or its defects.

    Returns:
        0 when the run is intact, 1 when it is not.

    Raises:
        UserError: there is no such run, or the data are not those that it was trained on.
    """
    run = Path(config.run)
    if not (run / "config.yaml").is_file():
        raise UserError("run", run, "holds no config.yaml; name a run folder, as train_gpt2.py writes it")
    settings = load(TrainingConfig, ["--config", str(run / "config.yaml")])

    rows, defects = read_metrics(run / "metrics.jsonl")
    found = _tell(f"metrics.jsonl: {len(rows)} rows, steps strictly increasing", defects)
    states, defects = read_states(run / "checkpoints")
    found += _tell(f"checkpoints: {len(states)}, every file as it was written", defects)
    records = {place: record for place, record in (rows | states).items() if record["step"] > 0}
    defects = check_order(settings, Path(config.data or settings.data.path), records)
    end = max((record["step"] for record in records.values()), default=0)
    found += _tell(f"order of the data: every digest up to step {end}, recomputed from seed {settings.seed}", defects)
    print(f"{run} is {f'not intact, defects: {found}' if found else 'intact'}")
    return 1 if found else 0


def read_metrics(file: Path) -> tuple[Records, list[str]]:
    """The rows of metrics.jsonl and what is wrong with them. A torn last line is what a kill leaves, and no defect."""
    rows: Records = {}
    defects, before = [], -1
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        place = f"metrics.jsonl, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            defects.append(f"{place}: is not a row with a step")
            continue
        if row["step"] <= before:
            defects.append(f"{place}: step {row['step']} after step {before}")
        before = row["step"]
        rows[place] = row
    return rows, defects or ([] if rows else ["metrics.jsonl: has no rows"])


def read_states(folder: Path) -> tuple[Records, list[str]]:
    """state.json of every checkpoint whose hashes are right, and what is wrong with the other checkpoints."""
    states: Records = {}
    defects = []
    for checkpoint in list_checkpoints(folder):
        try:
            state = verify(checkpoint)
        except Damaged as damage:
            defects.append(f"{damage.file.relative_to(folder.parent)}: {damage.reason}")
            continue
        place = f"checkpoints/{checkpoint.name}/{STATE}"
        if checkpoint.name != f"step-{state['step']:08d}":
            defects.append(f"{place}: is the state of step {state['step']}")
        states[place] = state
    return states, defects


def check_order(settings: TrainingConfig, data: Path, records: Records) -> list[str]:
    """Compares the tokens, positions and order digests of `records` with those that `settings` and `data` ask for.

    Raises:
        UserError: `data` is not a folder of shards, or not the one that the checkpoints were trained on.
    """
    manifest = read_manifest(data)
    if any(record.get("data_manifest", manifest.hash) != manifest.hash for record in records.values()):
        raise UserError("data", data, "other tokens than the run was trained on; name their folder with --data")
    per_step, per_window = settings.global_batch_windows, settings.model.block_size
    defects, sound = [], {}
    for place, record in records.items():  # first, so that a nonsensical step does not have us count to it
        step, tokens, position = record["step"], record.get("tokens"), record.get("position")
        if tokens != step * per_step * per_window or position not in (None, step * per_step):
            defects.append(f"{place}: step {step} does not go with tokens {tokens}, position {position}")
        else:
            sound[place] = record
    order = Order(settings.seed, count_windows(manifest.tokens("train"), settings.model.block_size))
    digests = _recompute(order, per_step, {record["step"] for record in sound.values()})
    for place, record in sound.items():
        step, digest = record["step"], record.get("order_digest")
        if digest != digests[step]:
            defects.append(f"{place}: order_digest of step {step} is {str(digest)[:12]}, not {digests[step][:12]}")
    return defects


def _recompute(order: Order, windows_per_step: int, steps: Iterable[int]) -> dict[int, str]:
    """The order digest after each of `steps`."""
    digest, position, digests = FIRST_DIGEST, 0, {}
    for step in sorted(steps):
        while position < step * windows_per_step:
            digest = next_digest(digest, order.windows(position, position + windows_per_step))
            position += windows_per_step
        digests[step] = digest
    return digests


def _tell(checked: str, defects: list[str]) -> int:
    """Prints what was checked, or its defects; returns their number."""
    if not defects:
        print(f"ok      {checked}")
    for defect in defects[:SHOWN]:
        print(f"defect  {defect}")
    if len(defects) > SHOWN:
        print(f"defect  ... and {len(defects) - SHOWN} more like these")
    return len(defects)
