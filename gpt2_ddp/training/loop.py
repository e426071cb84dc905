"""The training loop of every task: steps and pending work."""

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_ddp.checkpoint.format import list_checkpoints
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import STOPPED
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.rows import Outcome, finite
from gpt2_ddp.state import Pending, Scores
from gpt2_ddp.training.guard import Verdict
from gpt2_ddp.training.optimizer import named_losses
from gpt2_ddp.training.run_length import settle_length
from gpt2_ddp.training.start import (
    Trainer,
    Training,
    build,
    finish,
    finish_complete,
    open_run,
    start,
)
from gpt2_ddp.training.stop import Interrupted
from gpt2_ddp.training.task import Due, MakeTask, check_numbers


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


def train(config: RunConfig, make_task: MakeTask, on_row: Any = None) -> Result:
    """Trains from the newest checkpoint to the last step. The main process passes each row to
    `on_row`. Raises: UserError; SystemExit 75 if only other machines were stopped, for an elastic
    launcher to start this rank again."""
    begun = time.perf_counter()
    outcome = "completed"
    stop = None
    with open_run(config, make_task) as run:
        if run.is_complete:
            finish_complete(run)
        else:
            with start(build(run), on_row) as training:
                stop = training.stop
                try:
                    outcome, reason = train_loop(training)
                except torch.OutOfMemoryError as error:
                    hint = "needs more than the GPU's memory; halve it, or see docs/faq.md for other ways"
                    raise UserError(
                        "train.micro_batch_size", training.task.feed.micro_batches[1], hint
                    ) from error
                finish(training, outcome, reason)
        seconds = time.perf_counter() - begun
        result = Result(
            outcome, run.step, run.progress.scores, seconds, run.folder.path, run.best_checkpoint
        )
    if stop and outcome == "stopped" and stop.is_of_other_machines():
        raise SystemExit(STOPPED)
    return result


Ending = tuple[Outcome, str]
"""How a training ended, and why; `finish` knows the reasons of a stop and of an early end."""


def train_loop(run: Training) -> Ending:
    """Trains the remaining steps of a run that was started."""
    progress = run.progress
    begun = time.monotonic()
    if progress.is_new:  # a rollback may need a checkpoint
        progress.pending = Pending(row=_position(run), evaluate=True, save=run.config.rollbacks > 0)
    elif progress.pending:  # a resumed run saves again once this is done
        progress.pending.save = True
    if ending := finish_pending(run):
        return ending
    run.warm_up()
    run.throughput.restart()
    while True:
        diverged = next_step(run)
        if diverged:
            return "diverged", diverged
        if run.steps is None:
            run = settle_length(run, begun)
        pending = run.progress.pending
        if pending or pending.save or run.stop.is_agreed:
            with run.throughput.paused():
                if ending := finish_pending(run):
                    return ending


def finish_pending(run: Training) -> Ending | None:
    """Evaluates, writes the row, samples and saves, as far as this is pending. Collective. A stop
    interrupts all but the save, and the rest stays pending. Returns how the run ended; None if it
    goes on."""
    progress = run.progress
    stop = run.stop
    _evaluate_log_sample(run)
    if run.guard.judge_evaluation(progress.val_loss, progress.best) is Verdict.DIVERGED:
        problem = _roll_back(run)
        return ("diverged", problem) if problem else None
    if run.is_complete and (ruin := find_ruin(run)):
        return "diverged", ruin
    if progress.pending.save or run.is_complete or stop.is_agreed:
        with stop.timed("save"):
            run.save()
        stop.sync()
    if run.is_complete:
        return "completed", ""
    return ("stopped", "") if stop.is_agreed else None


def _evaluate_log_sample(run: Training) -> None:
    pending = run.progress.pending
    metrics = run.metrics
    stop = run.stop
    is_long = pending.evaluate or pending.sample
    with suppress(Interrupted):
        if pending.evaluate:
            with stop.timed("evaluation"):
                scores = run.evaluate(stop.poll)
            # before the first step: scores only
            has_row = bool(scores) or run.step > run.progress.first_step
            pending.row = pending.row | scores if has_row else {}
            pending.evaluate = False
            pending.save = pending.save or (run.progress.is_best and run.patience is not None)
        if pending.row:
            metrics.log(pending.row, run.steps)
            pending.row = {}
        if run.early_end and run.task.due(run.step, last=True).sample:
            pending.sample = is_long = True
        if pending.sample and not stop.is_agreed:
            metrics.show_samples(run.step, run.sample())
            pending.sample = False
    if is_long:
        stop.sync()


def _roll_back(run: Training) -> str:
    return roll_back(run)


def find_ruin(run: Training) -> str:
    """Why the weights are useless: they or the validation loss are not finite, or no step changed
    anything; empty if they are not. Collective: the replicas are compared before, so that all ranks
    find the same."""
    run.check_replicas()
    is_finite = torch.stack(
        [run.strategy.local(parameter).isfinite().all() for parameter in run.parameters]
    )
    finite_weights = not sum_over_ranks(run.accelerator, (~is_finite).sum()).item()
    run.guard.flush()
    nothing_changed = run.step > 0 and run.guard.losses.skipped == run.step
    loss = run.progress.scores.get("val_loss")
    ruined = not finite_weights or nothing_changed or (loss is not None and not math.isfinite(loss))
    return (
        "weights or validation loss are not finite, or no step changed the weights"
        if ruined
        else ""
    )


class StepResult(NamedTuple):
    losses: dict[str, Tensor]  # sums of this rank, fp32 scalars; `loss` first
    settings: dict[str, float]  # of the schedule
    units: int  # of all ranks
    due: Due
    fields: dict[str, float] | None  # the task's `row_fields`, if there are any


def train_step(run: Trainer) -> StepResult:
    """Takes the next optimizer step: forward, backward, clip, step. Does not wait for the device.

    A rank's loss is the sum over its units, divided by the units of all ranks, times the number of
    ranks, as DDP averages over them. So each unit weighs the same. Gradients are all-reduced once,
    in the last backward pass.
    """
    accelerator = run.accelerator
    task = run.task
    optimizer = run.optimizer
    number = run.progress.step + 1
    run.watchdog.heartbeat("data", number)
    step = task.feed.next_step()
    units = len(step.items) * task.units_per_item
    sums: dict[str, Tensor] = {}
    n_valid = 0
    for m, batch in enumerate(step.micro_batches):
        run.watchdog.heartbeat("forward/backward")
        seed_micro_batch(
            task.config.seed, number, m * accelerator.num_processes + accelerator.process_index
        )
        with nullcontext() if batch.last else run.strategy.no_sync(run.model):
            losses = named_losses(task.loss(run.model, batch))
            optimizer.backward(
                reduce(add, losses.values()) * (accelerator.num_processes / units), batch.last
            )
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0) + loss.detach()
        n_valid += batch.n_valid * task.units_per_item
        run.watchdog.heartbeat("step" if batch.last else "data")
    due = task.due(number, last=number == run.steps)
    row_fields = getattr(task, "row_fields", None)
    fields = row_fields(number) if row_fields and (due.log or due.evaluate) else None
    grad_norm = run.strategy.clip(run.parameters, task.config.optim.grad_clip or math.inf)
    settings = task.schedule(number)
    skipped = run.guard.judge_gradient(grad_norm)
    bad = optimizer.step(settings, grad_norm, skipped)
    if after_step := getattr(task, "after_step", None):
        after_step(number)
    run.progress.step = number
    if task.feed.skipped_end:  # no step ended that epoch
        run.guard.end_epoch()
    run.guard.add(number, n_valid, [bad, skipped, grad_norm, *sums.values()])
    return StepResult(sums, settings, units, due, fields)


def next_step(run: Training) -> str:
    """Takes the next step, and says in `run.progress.pending` what follows it. After too many bad
    steps, goes back to a checkpoint, and takes the step after that. Returns why it cannot; else an
    empty text."""
    while True:
        with run.stop.timed("step"):
            result = train_step(run)
            poll_save(run)
            run.stop.check()
            feed = run.task.feed
            guard = run.guard
            verdict = guard.judge(run.progress.step, feed.order.phase_at(feed.state.position))
        if guard.bad_steps == 1 and guard.judged == guard.first_bad:
            bad = f"warning: step {guard.judged} is bad: {guard.problem}"
            run.metrics.print(f"{bad}; its update is skipped; no later one is printed")
        if verdict is not Verdict.DIVERGED:
            break
        if problem := _roll_back(run):
            return problem
    due = result.due
    row = finite(_row(run, result)) if due.log or due.evaluate else {}
    run.progress.pending = Pending(row=row, evaluate=due.evaluate, sample=due.sample, save=due.save)
    return ""


def poll_save(run: Training) -> None:
    """Checks the background save after a step: if it failed, asks all ranks to stop; if it is
    overdue, waits."""
    background = run.store.background
    if background.is_working:
        if background.seconds > background.timeout:
            run.watchdog.heartbeat("save")
            background.join()
        run.stop.record_duration("write", background.seconds)
    if background.error:
        run.stop.request("a checkpoint could not be written")
    if run.log.is_gone:
        run.stop.request("the run folder or its rows are gone")  # the next save or end raises it


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


def _position(run: Training) -> dict[str, Any]:
    """The first fields of a row: step, epoch, and units trained on."""
    task = run.task
    feed = run.task.feed
    epoch = round(feed.state.position / len(feed.order), 4)
    row = {"step": run.step, "epoch": epoch, task.unit: feed.state.consumed * task.units_per_item}
    return row | feed.order.by_source(feed.state, task.unit, task.units_per_item)


def _row(run: Training, result: StepResult) -> dict[str, Any]:
    """The row of a step for metrics.jsonl. Collective. The only place where the loop waits for the
    device."""
    feed = run.task.feed
    run.watchdog.heartbeat("all-reduce")
    numbers = run.guard.flush()
    losses = run.guard.end_row()
    assert numbers
    others = dict(
        zip([*result.losses][1:], (total / result.units for total in numbers.others), strict=True)
    )
    not_finite = losses.units - losses.valid
    row = {
        **_position(run),
        "loss": numbers.loss,
        "loss_mean": losses.mean,
        **({"not_finite": not_finite} if not_finite else {}),
        **result.settings,
        "grad_norm": numbers.grad_norm,
        "skipped": run.guard.losses.skipped,
        **run.throughput.read(),
        "order_digest": feed.state.order_digest,
    }
    if feed.ended_epoch:
        run.progress.scores["train_loss"] = row["train_loss"] = run.guard.end_epoch()
    for method, given in (("loss", others or None), ("row_fields", result.fields)):
        if given is not None:
            row |= check_numbers(method, given, row | run.progress.scores)
    return row


def roll_back(run: Training) -> str:
    """Loads the newest checkpoint from before the divergence, and skips the data read since.
    Collective. Returns why it cannot, if no rollback or no good checkpoint is left; else an empty
    text."""
    guard = run.guard
    store = run.store
    feed = run.task.feed
    diverged_at = run.step
    end = feed.state.position
    rollbacks = run.progress.rollbacks
    problem = guard.divergence
    run.wait_for_save()
    run.watchdog.heartbeat("restore", timeout=FIRST_TIMEOUT)
    good = store.newest(guard.last_good)
    if rollbacks >= run.config.rollbacks or not good:
        if good:  # otherwise only bad ones exist
            store.remove_after(guard.last_good)
        return problem + (f", after {rollbacks} rollbacks" if rollbacks else "")
    run.load(good)
    run.progress.rollbacks, run.progress.pending = rollbacks + 1, Pending()
    start = feed.next_position
    feed.skip_range(start, end)
    event = {
        "event": "rollback",
        "step": run.step,
        "from": diverged_at,
        "skipped_range": [start, end],
    }
    run.log.append(event | {"order_digest": feed.state.order_digest})
    store.remove_after(run.step)  # once the rollback is recorded
    run.metrics.print(
        f"warning: {problem}; rolled back to step {run.step}; skips data positions [{start}, {end})"
    )
    run.throughput.restart()
    return ""
