"""The rows of steps for metrics.jsonl, and when they are written.

    step s      start_row           what the host knows of it
    step s + 2  complete_row        the numbers of the step, once `Guard` has them

Where a row is all that is due, GPUs write it two steps late (`LATE_ROWS_ON`). The loop would
otherwise wait until the device's queue is empty, and the device would then wait for the next step.
What else is due, or is recorded, waits for the rows of the steps before: a checkpoint has all of
them. A process that dies lacks the rows of its last two steps, which a resume trains again.
"""

from gpt2_ddp.records.rows import Row
from gpt2_ddp.training.start import OpenRun, StartedRow, Training
from gpt2_ddp.training.task import check_numbers

LATE_ROWS_ON: tuple[str, ...] = ("cuda",)
"""Types of devices on which rows are late."""


def rows_are_late(training: Training) -> bool:
    """Whether rows are written late on this device."""
    return training.throughput.device.type in LATE_ROWS_ON


def position_of(run: OpenRun) -> Row:
    """The first fields of a row: step, epoch, and units trained on."""
    task = run.task
    feed = task.feed
    epoch = round(feed.state.position / len(feed.order), 4)
    row = {"step": run.step, "epoch": epoch, task.unit: feed.state.consumed * task.units_per_item}
    return row | feed.order.by_source(feed.state, task.unit, task.units_per_item)


def start_row(
    run: OpenRun, settings: dict[str, float], units: int, fields: dict[str, float] | None
) -> StartedRow:
    """The part of a row that does not wait for the device, right after its step. It has copies of
    what a task returned, which may change its values for the next step."""
    feed = run.task.feed
    return StartedRow(
        step=run.step,
        position=position_of(run),
        settings={**settings},
        order_digest=feed.state.order_digest,
        ends_epoch=feed.ended_epoch,
        units=units,
        fields=None if fields is None else {**fields},
    )


def complete_row(training: Training, started: StartedRow) -> Row:
    """The row of a step, whose numbers are the next ones in `guard.rows`. Collective at the end of
    an epoch."""
    guard = training.trainer.guard
    scores = training.run.progress.scores
    numbers, losses, skipped = guard.rows.popleft()
    assert numbers.step == started.step, "rows are written in their order"
    row: Row = {
        **started.position,
        "loss": numbers.loss,
        "loss_mean": losses.mean,
    }
    not_finite = losses.units - losses.valid
    if not_finite:
        row["not_finite"] = not_finite
    row |= started.settings
    row["grad_norm"] = numbers.grad_norm
    row["skipped"] = skipped
    row |= training.throughput.read(started.step)
    row["order_digest"] = started.order_digest
    if started.ends_epoch:
        scores["train_loss"] = row["train_loss"] = guard.end_epoch()
    others = {name: total / started.units for name, total in numbers.others.items()}
    if others:
        row |= check_numbers("loss", others, row | scores)
    if started.fields is not None:
        row |= check_numbers("row_fields", started.fields, row | scores)
    return row


def write_known_rows(training: Training) -> None:
    """Writes the late rows whose numbers are known. Waits for nothing."""
    while training.late_rows and training.trainer.guard.rows:
        row = complete_row(training, training.late_rows.popleft())
        training.metrics.log(row, training.run.progress.steps)


def write_late_rows(training: Training) -> None:
    """Writes all late rows. Collective; waits for the device if there are any."""
    if training.late_rows:
        training.run.watchdog.heartbeat("all-reduce")
        training.trainer.guard.flush()
        write_known_rows(training)
