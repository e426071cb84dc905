"""What happened to a run, as marks on its curves: resumes, rollbacks, branches and bad steps."""

from collections.abc import Iterator
from typing import NamedTuple

from gpt2_ddp.errors import truncate
from gpt2_ddp.records.rows import Row, is_rollback
from gpt2_ddp.reports.runs import RunRecord, is_finite


class Happening(NamedTuple):
    """What happened after a step: its kind (`chart.SYMBOLS`), and where, as a text."""

    kind: str
    step: int
    text: str


def happenings(run: RunRecord) -> list[Happening]:
    """What happened to a run, in the order of the rows; of bad steps only those that no rollback
    has undone."""
    return [*_events(run), *_bad_steps(run.rows)]


def _events(run: RunRecord) -> Iterator[Happening]:
    has_started = False
    for event in run.events:
        step = event["step"]
        if event["event"] == "start":
            if has_started:
                yield Happening("resumed", step, f"at step {step:,}")
            has_started = True
        elif event["event"] == "branch":
            parent = truncate(event.get("parent", "another run"))
            yield Happening("branched", step, f"at step {step:,} from {parent}")
        elif is_rollback(event):
            begin = event.get("from")
            source = f"from step {begin:,} " if type(begin) is int else ""
            yield Happening("rolled back", step, f"{source}to step {step:,}")


def _bad_steps(rows: list[Row]) -> Iterator[Happening]:
    """Between rows: skipped steps, and losses that were not finite."""
    skipped_before = 0
    step_before = 0
    for row in rows:
        step = row["step"]
        skipped = row.get("skipped")
        is_next = step == step_before + 1
        span = f"in step {step:,}" if is_next else f"in steps {step_before + 1:,} to {step:,}"
        if type(skipped) is int:
            if skipped > skipped_before:
                count = skipped - skipped_before
                yield Happening("bad steps", step, f"{count:,} {span}")
            skipped_before = skipped
        elif "loss" in row and not is_finite(row["loss"]):
            yield Happening("bad steps", step, f"no finite loss at step {step:,}")
        step_before = step
