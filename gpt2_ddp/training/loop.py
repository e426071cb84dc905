"""The training loop of every task: steps, pending work, rollbacks of a diverged run."""

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_ddp.checkpoint.checkpoint import list_checkpoints
from gpt2_ddp.checkpoint.run_files import finite
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import STOPPED
from gpt2_ddp.distributed.ranks import on_main, sum_over_ranks
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.training.guard import Verdict
from gpt2_ddp.training.meters import profile
from gpt2_ddp.training.progress import Outcome, Pending, Scores
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.stop import Interrupted
from gpt2_ddp.training.task import MakeTask


@dataclass(frozen=True)
class Result:
    """The result of `train`, in plain values."""

    outcome: Outcome
    step: int  # optimizer steps in all
    metrics: Scores  # the newest: train_loss (of the last whole epoch), val_loss ...
    seconds: float  # wall time of this call
    run: Path  # the run folder
    best: Path | None  # on the main process, the checkpoint with the lowest val_loss, if it is older than the newest

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, a folder with the weights in model.safetensors."""
        return list_checkpoints(self.run / "checkpoints")[-1]


def train(config: RunConfig, make_task: MakeTask) -> Result:
    """Trains until the last step, from the newest checkpoint in the run folder. Raises: UserError; SystemExit 75 if
    only other machines were stopped, for an elastic launcher to start this rank again."""
    begun, outcome = time.perf_counter(), "completed"
    with Run(config, make_task) as run:
        run.build()
        if run.is_complete:
            run.record_completed()
        else:
            run.start()
            outcome = train_loop(run)
            run.finish(outcome)
        seconds, folder = time.perf_counter() - begun, Path(config.output_dir) / config.run_name
        result = Result(outcome, run.step, run.scores, seconds, folder, run.best_checkpoint)
    if outcome == "stopped" and run.stop.is_of_other_machines():
        raise SystemExit(STOPPED)
    return result


def train_loop(run: Run) -> Outcome:
    """Trains the remaining steps of a run that was started."""
    task, stop = run.task, run.stop
    if outcome := _before_first_step(run):
        return outcome
    run.warm_up()
    run.throughput.restart()
    with profile(run.config.train.profile_steps, run.folder) as profiler_step:
        while not run.is_complete:
            with stop.timed("step"):
                result = train_step(run)
                run.throughput.add(result.units)
                run.metrics.advance()
                profiler_step()
                run.poll_save()
                stop.check()
                verdict = run.guard.judge(run.step, result.loss_sum / result.units, run.optimizer.bad)
            warn_of_bad_step(run, verdict)
            if verdict is Verdict.DIVERGED:
                if not roll_back(run):
                    return "diverged"
                continue
            if (every := run.config.guard.check_every) and run.step % every == 0:
                run.check_replicas()
            due = task.due(run.step, last=run.step == run.steps)
            row = finite(_row(run, result)) if due.log or due.evaluate else {}
            run.pending = Pending(row, due.evaluate, due.sample)
            if not (run.pending or due.save or stop.is_agreed):
                continue
            with run.throughput.paused():
                finish_pending(run)
                if run.is_complete and is_ruined(run):
                    return "diverged"
                if due.save or run.is_new_best or run.is_complete or stop.is_agreed:
                    run.save()
            if stop.is_agreed and not run.is_complete:
                return "stopped"
    return "completed"


def _before_first_step(run: Run) -> Outcome | None:
    """Evaluates a new run, or finishes pending work, and saves. Returns the outcome if the run ends here, else None."""
    is_new, was_pending = run.is_new, bool(run.pending)
    if is_new:
        digest = {"order_digest": run.task.feed.order_digest} if run.step else {}
        run.pending = Pending(_position(run) | digest, evaluate=True)
    finish_pending(run)
    if was_pending and run.is_complete and is_ruined(run):
        return "diverged"
    needed = run.config.rollbacks or run.pending or run.is_new_best  # a rollback may need it
    if (is_new and needed) or (was_pending and not run.pending):
        run.save()
    return "stopped" if run.stop.is_agreed else None


def finish_pending(run: Run) -> None:
    """Does the pending evaluation, row and sample. Collective. A stop interrupts them; the rest stays pending."""
    pending, metrics, stop = run.pending, run.metrics, run.stop
    is_long = pending.evaluate or pending.sample
    if stop.is_agreed:
        run.check_folder()
    with suppress(Interrupted):
        if pending.evaluate:
            scores = run.evaluate(stop.poll)
            has_row = bool(scores) or run.step > run.first_step  # before the first step: scores only
            pending.row, pending.evaluate = (pending.row | scores if has_row else {}), False
        if pending.row:
            metrics.log(pending.row)
            pending.row = {}
        if run.early_end and run.task.due(run.step, last=True).sample:
            pending.sample = is_long = True
        if pending.sample and not stop.is_agreed:
            metrics.show_samples(run.step, run.sample())
            pending.sample = False
    if is_long:
        stop.sync()


def is_ruined(run: Run) -> bool:
    """Whether weights or validation loss are not finite, or no step changed anything. Collective; sets `run.reason`."""
    finite_weights = torch.stack([parameter.isfinite().all() for parameter in run.parameters]).all().item()
    nothing_changed = run.step > 0 and round(run.skipped.item()) == run.step
    loss = run.scores.get("val_loss")
    ruined = not finite_weights or nothing_changed or (loss is not None and not math.isfinite(loss))
    if ruined:
        run.reason = "weights or validation loss are not finite, or no step changed the weights"
    return ruined


class StepResult(NamedTuple):
    loss_sum: Tensor  # of this rank, fp32 scalar
    grad_norm: Tensor  # global, before clipping, fp32 scalar
    lr: float
    units: int  # of all ranks


def train_step(run: Run) -> StepResult:
    """Takes the next optimizer step: forward, backward, clip, step. Does not wait for the device.

    A rank's loss is the sum over its units, divided by the units of all ranks, times the number of ranks, as DDP
    averages over them. So each unit weighs the same. Gradients are all-reduced once, in the last backward pass.
    """
    accelerator, task, optimizer, number = run.accelerator, run.task, run.optimizer, run.step + 1
    run.watchdog.heartbeat("data", number)
    step = task.feed.next_step()
    units = len(step.items) * task.units_per_item
    loss_sum, n_valid = torch.zeros((), device=accelerator.device), 0
    for m, batch in enumerate(step.micro_batches):
        run.watchdog.heartbeat("forward/backward")
        seed_micro_batch(run.config.seed, number, m * accelerator.num_processes + accelerator.process_index)
        with nullcontext() if batch.last else accelerator.no_sync(run.model):
            loss = task.loss(run.model, batch)
            optimizer.backward(loss * (accelerator.num_processes / units))
        loss_sum += loss.detach()
        n_valid += batch.n_valid * task.units_per_item
        run.watchdog.heartbeat("step" if batch.last else "data")
    grad_norm, lr = optimizer.clip(run.parameters, run.config.optim.grad_clip), task.lr_at(number)
    skipped = optimizer.step(lr, grad_norm)
    run.record_step(number, loss_sum, n_valid, skipped)
    return StepResult(loss_sum, grad_norm, lr, units)


def warn_of_bad_step(run: Run, verdict: Verdict) -> None:
    """Prints a warning at the first bad step of this process."""
    if verdict is not Verdict.OK and run.guard.bad_steps == 1:
        done = f"its update is {'skipped' if run.config.guard.skip else 'applied'}; no later one is printed"
        run.metrics.print(f"warning: step {run.guard.judged} is bad: {run.guard.problem}; {done}")


def roll_back(run: Run) -> bool:
    """Loads the newest checkpoint from before the bad steps, and skips the data read since. Collective. If no rollback
    or no good checkpoint is left: False, and sets `run.reason`."""
    guard, checkpoints = run.guard, run.checkpoints
    run.wait_for_save()
    problem = f"{run.config.guard.patience} bad steps in a row up to step {guard.judged}: {guard.problem}"
    if run.rollbacks < run.config.rollbacks and _load_good_checkpoint(run):
        if checkpoints:  # once the rollback is recorded
            checkpoints.remove_after(run.step)
        a, b = run.task.feed.skipped_ranges[-1]
        run.metrics.print(f"warning: {problem}; rolled back to step {run.step}; skips data positions [{a}, {b})")
        run.throughput.restart()
        return True
    run.reason = problem + (f", after {run.rollbacks} rollbacks" if run.rollbacks else "")
    if checkpoints and checkpoints.newest_until(guard.last_good):  # otherwise only bad ones exist
        checkpoints.remove_after(guard.last_good)
    return False


def _load_good_checkpoint(run: Run) -> bool:
    feed, checkpoints = run.task.feed, run.checkpoints
    diverged_at, end, rollbacks = run.step, feed.position, run.rollbacks + 1
    run.watchdog.heartbeat("restore", timeout=FIRST_TIMEOUT)
    good = on_main(run.accelerator, lambda: checkpoints.newest_until(run.guard.last_good) if checkpoints else None)
    if not good:
        return False
    run.load(good.read() if checkpoints else None)
    run.rollbacks, run.pending = rollbacks, Pending()
    start = int(feed.positions_from(feed.position)[0])
    feed.skip_range(start, end)
    event = {"event": "rollback", "step": run.step, "from": diverged_at, "passed": [start, end]}
    run.metrics.go_back(event | {"order_digest": feed.order_digest})
    return True


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seeds torch for the dropout of one micro-batch: a pure function of its arguments, so no generator's state has to
    be saved. `number` counts the micro-batches of a step over all ranks: any number of ranks has the same masks."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + number * 0x94D049BB133111EB) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    value = (mixed ^ (mixed >> 32)) % 2**63
    torch.default_generator.manual_seed(value)
    # torch.manual_seed would queue a call with a stack trace in every step while CUDA is not initialized
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(value)


def _position(run: Run) -> dict[str, Any]:
    """The first fields of a row: step, epoch, and units trained on."""
    task, feed = run.task, run.task.feed
    epoch = round(feed.position / len(feed.order), 4)
    row = {"step": run.step, "epoch": epoch, task.unit: feed.consumed * task.units_per_item}
    return row | feed.by_source(task.unit, task.units_per_item)


def _row(run: Run, result: StepResult) -> dict[str, Any]:
    """The row of a step for metrics.jsonl. Collective. The only place where the loop waits for the device."""
    feed = run.task.feed
    run.watchdog.heartbeat("all-reduce")
    loss = sum_over_ranks(run.accelerator, result.loss_sum) / result.units
    loss_value, grad_norm, skipped = torch.stack([loss, result.grad_norm, run.skipped]).tolist()
    loss_mean, not_finite = run.since_row.pop_mean()
    row = {
        **_position(run),
        "loss": loss_value,
        "loss_mean": loss_mean,
        **({"not_finite": not_finite} if not_finite else {}),
        "lr": result.lr,
        "grad_norm": grad_norm,
        "skipped": round(skipped),
        **run.throughput.read(),
        "order_digest": feed.order_digest,
    }
    if feed.ended_epoch:
        run.scores["train_loss"] = row["train_loss"] = run.epoch.pop_mean()[0]
    return row
