"""The training loop of every task: steps and pending work.

train           opens, builds and starts a run, and finishes it
  train_loop    the remaining steps, each followed by what is pending
    next_step
      train_step      forward, backward, clip, step
      write_known_rows  on GPUs, those of steps before
      poll_save, interval.forecast, stop.check, guard.judge
      roll_back       after too many bad steps
    finish_pending    evaluates, writes the row, samples, saves
"""

import math
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gpt2_ddp.checkpoint.format import list_checkpoints
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import STOPPED
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.metrics import OnRow
from gpt2_ddp.records.rows import Outcome, Row, finite
from gpt2_ddp.state import Pending, Scores
from gpt2_ddp.training.guard import StepTensors, Verdict
from gpt2_ddp.training.optimizer import named_losses
from gpt2_ddp.training.run_length import RunLength
from gpt2_ddp.training.start import (
    OpenRun,
    Trainer,
    Training,
    build,
    finish,
    finish_complete,
    open_run,
    start,
)
from gpt2_ddp.training.step_rows import (
    complete_row,
    position_of,
    rows_are_late,
    start_row,
    write_known_rows,
    write_late_rows,
)
from gpt2_ddp.training.stop import Interrupted, StopRequest
from gpt2_ddp.training.task import Due, MakeTask
from gpt2_ddp.training.trace import save_memory

ConfigT = TypeVar("ConfigT", bound=RunConfig)


@dataclass(frozen=True)
class Result:
    """The result of `train`, in plain values."""

    outcome: Outcome
    step: int  # optimizer steps in all
    metrics: Scores  # the newest: train_loss (of the last whole epoch), val_loss ...
    seconds: float  # wall time of this call
    run: Path  # the run folder
    # on the main process, the checkpoint with the lowest val_loss, if it is older than the newest
    best: Path | None

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, a folder with the weights in model.safetensors; None before the
        first."""
        return next(reversed(list_checkpoints(self.run / "checkpoints")), None)


def train(config: ConfigT, make_task: MakeTask[ConfigT], on_row: OnRow | None = None) -> Result:
    """Trains from the newest checkpoint to the last step. The main process passes each row to
    `on_row`. Raises: UserError; SystemExit 75 if only other machines were stopped, for an elastic
    launcher to start this rank again."""
    begun = time.perf_counter()
    outcome: Outcome = "completed"
    stop = None
    with open_run(config, make_task) as run:
        if run.is_complete:
            finish_complete(run)
        else:
            with within_memory(run):
                trainer = build(run)
            with start(trainer, on_row) as training:
                stop = training.stop
                with within_memory(run):
                    outcome, reason = train_loop(training)
                finish(training, outcome, reason)
        result = Result(
            outcome=outcome,
            step=run.step,
            metrics=run.progress.scores,
            seconds=time.perf_counter() - begun,
            run=run.folder.path,
            best=run.best_checkpoint,
        )
    if stop and outcome == "stopped" and stop.is_of_other_machines():
        raise SystemExit(STOPPED)
    return result


@contextmanager
def within_memory(run: OpenRun) -> Generator[None]:
    """Raises: UserError with what to do, if what is inside needs more than the GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = run.task.feed.micro_batches[1]
        advice = f"{run.task.less_memory()}, or see docs/faq.md for other ways"
        snapshot = save_memory(run.folder.path, run.accelerator.process_index)
        what = f"; {snapshot} shows what was in it" if snapshot else ""
        hint = f"needs more than the GPU's memory{what}; {advice}"
        raise UserError("train.micro_batch_size", size, hint) from error


Ending = tuple[Outcome, str]
"""How a training ended, and why; `finish` knows the reasons of a stop and of an early end."""


def train_loop(training: Training) -> Ending:
    """Trains the remaining steps of a run that was started."""
    run = training.run
    progress = run.progress
    length = RunLength(training) if progress.steps is None else None  # train.minutes
    if progress.is_new:  # a rollback may need a checkpoint
        row = position_of(run)
        progress.pending = Pending(row=row, evaluate=True, save=run.config.rollbacks > 0)
    elif progress.pending:  # a resumed run saves again once this is done
        progress.pending.save = True
    if ending := finish_pending(training):
        return ending
    training.trainer.warm_up()
    training.throughput.restart()
    while True:
        diverged = next_step(training)
        if diverged:
            return "diverged", diverged
        if length:
            length.follow()
        pending = progress.pending
        if pending or pending.save or training.stop.is_agreed:
            write_late_rows(training)
            with training.throughput.paused():
                if ending := finish_pending(training):
                    return ending


def finish_pending(training: Training) -> Ending | None:
    """Evaluates, writes the row, samples and saves, as far as this is pending. Collective. A stop
    interrupts all but the save, and the rest stays pending. Returns how the run ended; None if it
    goes on."""
    run = training.run
    progress = run.progress
    stop = training.stop
    if training.interval and training.interval.must_precede(progress.pending):
        _save(training)
    _evaluate_log_sample(training)
    verdict = training.trainer.guard.judge_evaluation(progress.val_loss, progress.best)
    if verdict is Verdict.DIVERGED:
        problem = roll_back(training)
        return ("diverged", problem) if problem else None
    if run.is_complete:
        ruin = find_ruin(training.trainer)
        if ruin:
            return "diverged", ruin
    if progress.pending.save or run.is_complete or stop.is_agreed:
        _save(training)
    if run.is_complete:
        return "completed", ""
    return ("stopped", "") if stop.is_agreed else None


def _save(training: Training) -> None:
    with training.stop.timed("save"):
        training.save()
    training.stop.sync()


def _evaluate_log_sample(training: Training) -> None:
    run = training.run
    progress = run.progress
    pending = progress.pending
    metrics = training.metrics
    stop = training.stop
    is_long = pending.evaluate or pending.sample
    with suppress(Interrupted):
        if pending.evaluate:
            with stop.timed("evaluation"):
                scores = training.trainer.evaluate(stop.poll)
            # before the first step: scores only
            has_row = bool(scores) or run.step > progress.first_step
            pending.row = pending.row | scores if has_row else {}
            pending.evaluate = False
            pending.save = pending.save or (progress.is_best and _saves_best(training))
        if pending.row:
            metrics.log(pending.row, progress.steps)
            pending.row = {}
        if run.early_end and run.task.due(run.step, last=True).sample:
            pending.sample = is_long = True
        if pending.sample and not stop.is_agreed:
            with stop.timed("sample"):
                metrics.show_samples(run.step, training.sample())
            pending.sample = False
    if is_long:  # a signal that came meanwhile stops all ranks here, and not a step later
        stop.sync()


def _saves_best(training: Training) -> bool:
    """Whether a new lowest val_loss is saved. Collective."""
    if training.run.patience is not None:
        return True
    return training.interval is not None and training.interval.allows()


def find_ruin(trainer: Trainer) -> str:
    """Why the weights are useless: they, their average or the validation loss are not finite, or no
    step changed anything; empty if they are not. Collective: the replicas are compared before, so
    that all ranks find the same."""
    run = trainer.run
    trainer.check_replicas()
    tensors = *trainer.parameters, *trainer.average.values.values()
    local_parts = map(run.strategy.local, tensors)
    is_finite = torch.stack([part.isfinite().all() for part in local_parts])
    wrong_parts = sum_over_ranks(run.accelerator, (~is_finite).sum()).item()
    trainer.guard.flush()
    nothing_changed = run.step > 0 and trainer.guard.losses.skipped == run.step
    val_loss = run.progress.scores.get("val_loss")
    is_loss_wrong = val_loss is not None and not math.isfinite(val_loss)
    if wrong_parts or nothing_changed or is_loss_wrong:
        return "weights or validation loss are not finite, or no step changed the weights"
    return ""


class StepResult(NamedTuple):
    losses: dict[str, Tensor]  # sums of this rank, fp32 scalars; `loss` first
    settings: dict[str, float]  # of the schedule
    units: int  # of all ranks
    due: Due
    fields: dict[str, float] | None  # the task's `row_fields`, if there are any


def train_step(trainer: Trainer) -> StepResult:
    """Takes the next optimizer step: forward, backward, clip, step. Does not wait for the device.

    A rank's loss is the sum over its units, divided by the units of all ranks, times the number of
    ranks, as DDP averages over them. So each unit weighs the same. Gradients are all-reduced once,
    in the last backward pass.
    """
    run = trainer.run
    task = run.task
    model = trainer.model
    optimizer = trainer.optimizer
    watchdog = run.watchdog
    world = run.accelerator.num_processes
    rank = run.accelerator.process_index
    number = run.step + 1
    watchdog.heartbeat("data", number)
    step = task.feed.next_step()
    units = len(step.items) * task.units_per_item
    sums: dict[str, Tensor] = {}
    valid_units = 0
    with trainer.casts.in_use():
        for m, batch in enumerate(step.micro_batches):
            watchdog.heartbeat("forward/backward")
            seed_micro_batch(task.config.seed, number, m * world + rank)
            with nullcontext() if batch.last else run.strategy.no_sync(model):
                losses = named_losses(task.loss(model, batch))
                optimizer.backward(reduce(add, losses.values()) * (world / units), batch.last)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0) + loss.detach()
            valid_units += batch.n_valid * task.units_per_item
            watchdog.heartbeat("step" if batch.last else "data")
    due = task.due(number, last=number == run.progress.steps)
    fields = task.row_fields(number) if due.row else None
    grad_norm = run.strategy.clip(trainer.parameters, task.config.optim.grad_clip or math.inf)
    settings = task.schedule(number)
    skipped = trainer.guard.judge_gradient(grad_norm)
    bad = optimizer.step(settings, grad_norm, skipped)
    task.after_step(number)
    trainer.average.update(number)
    run.progress.step = number
    if task.feed.skipped_end:  # no step ended that epoch
        trainer.guard.end_epoch()
    trainer.guard.add(number, valid_units, StepTensors(bad, skipped, grad_norm, sums), due.row)
    return StepResult(sums, settings, units, due, fields)


def next_step(training: Training) -> str:
    """Takes the next step, and says in `progress.pending` what follows it. After too many bad
    steps, goes back to a checkpoint, and takes the step after that. Returns why it cannot; else an
    empty text."""
    run = training.run
    guard = training.trainer.guard
    feed = run.task.feed
    interval = training.interval
    while True:
        step = run.step + 1
        recorded = training.trace.around(step, run.progress.steps, training.throughput)
        with recorded, training.stop.timed("step"):
            result = train_step(training.trainer)
            write_known_rows(training)
            if rows_are_late(training):
                training.throughput.follow(run.step)
            poll_save(run, training.stop)
            if interval:
                interval.forecast(run.step)
            training.stop.check()
            verdict = guard.judge(run.step, feed.order.phase_at(feed.state.position))
        is_first_bad = guard.bad_steps == 1 and guard.judged == guard.first_bad
        if is_first_bad:
            bad = f"warning: step {guard.judged} is bad: {guard.problem}"
            training.metrics.print(f"{bad}; its update is skipped; no later one is printed")
        if verdict is not Verdict.DIVERGED:
            break
        problem = roll_back(training)
        if problem:
            return problem
    due = result.due
    save = due.save or (interval is not None and interval.is_due(run.step))
    is_last = run.step == run.progress.steps
    is_alone = not (due.evaluate or due.sample or save or feed.ended_epoch or is_last)
    row: Row = {}
    if due.row:
        started = start_row(run, result.settings, result.units, result.fields)
        if rows_are_late(training) and is_alone:
            training.late_rows.append(started)
        else:
            run.watchdog.heartbeat("all-reduce")
            guard.flush()
            write_known_rows(training)
            row = finite(complete_row(training, started))
    run.progress.pending = Pending(row=row, evaluate=due.evaluate, sample=due.sample, save=save)
    return ""


def poll_save(run: OpenRun, stop: StopRequest) -> None:
    """Checks the background save after a step: if it failed, asks all ranks to stop; if it is
    overdue, waits."""
    background = run.store.background
    if background.is_working:
        if background.seconds > background.timeout:
            run.watchdog.heartbeat("save")
            background.join()
        stop.record_duration("write", background.seconds)
    if background.error:
        stop.request("a checkpoint could not be written")
    if run.log.is_gone:
        stop.request("the run folder or its rows are gone")  # the next save or end raises it


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seeds torch for the dropout of one micro-batch: a pure function of its arguments, so no
    generator's state has to be saved. `number` counts the micro-batches of a step over all ranks:
    any number of ranks has the same masks."""
    mixed = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + number * 0x94D049BB133111EB
    ) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    value = (mixed ^ (mixed >> 32)) % 2**63
    torch.default_generator.manual_seed(value)
    # torch.manual_seed would queue a call with a stack trace in every step while CUDA is not
    # initialized
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(value)


def roll_back(training: Training) -> str:
    """Loads the newest checkpoint from before the divergence, and skips the data read since.
    Collective. Returns why it cannot, if no rollback or no good checkpoint is left; else an empty
    text."""
    run = training.run
    guard = training.trainer.guard
    progress = run.progress
    feed = run.task.feed
    diverged_at = run.step
    end = feed.state.position
    rollbacks = progress.rollbacks
    problem = guard.divergence
    write_late_rows(training)
    training.wait_for_save()
    run.watchdog.heartbeat("restore", timeout=FIRST_TIMEOUT)
    good = run.store.newest(guard.last_good)
    if rollbacks >= run.config.rollbacks or not good:
        if good:  # otherwise only bad ones exist
            run.store.remove_after(guard.last_good)
        return f"{problem}, after {rollbacks} rollbacks" if rollbacks else problem
    training.trainer.load(good)
    if training.interval:
        training.interval.restart()
    progress.rollbacks = rollbacks + 1
    progress.pending = Pending()
    begin = feed.next_position
    feed.skip_range(begin, end)
    event = {"event": "rollback", "step": run.step, "from": diverged_at}
    event |= {"skipped_range": [begin, end], "order_digest": feed.state.order_digest}
    run.log.append(event)
    run.store.remove_after(run.step)  # once the rollback is recorded
    skipped = f"skips data positions [{begin}, {end})"
    training.metrics.print(f"warning: {problem}; rolled back to step {run.step}; {skipped}")
    training.throughput.restart()
    return ""
