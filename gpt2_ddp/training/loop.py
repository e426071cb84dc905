"""The training loop: the one that every task is trained by."""

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt2_ddp.checkpoint.checkpoint import list_checkpoints
from gpt2_ddp.checkpoint.run_files import finite
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.training.recovery import keep_start, poll_background_save, recover, save
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.session import Outcome, Session, session
from gpt2_ddp.training.stop import Interrupted
from gpt2_ddp.training.task import MakeTask, Scores
from gpt2_ddp.training.throughput import Throughput, profile


@dataclass(frozen=True)
class Result:
    """What a call of `train` came to; plain values, so that it travels between processes.

    Args:
        step: optimizer steps in all, those before a resume included.
        metrics: the newest scores: train_loss (of the last whole epoch), val_loss ...
        seconds: wall time of this call, evaluations and checkpoints included.
        run: the run folder.
        best: on the main process, the checkpoint with the lowest val_loss where the newest has another.
    """

    outcome: Outcome
    step: int
    metrics: Scores
    seconds: float
    run: Path
    best: Path | None

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, which holds the parameters (model.safetensors)."""
        return list_checkpoints(self.run / "checkpoints")[-1]


def train(config: RunConfig, make_task: MakeTask) -> Result:
    """Trains until the last step, from wherever the run folder's newest checkpoint stands.

    Raises:
        UserError: for whatever the user has to mend.
    """
    begun, outcome = time.perf_counter(), "completed"
    with Run(config, make_task) as run:
        if not run.is_complete:
            run.build()
        if run.is_complete:
            more = f"{run.early_end}; raise that" if run.early_end else "raise its number of steps or epochs"
            run.accelerator.print(f"{config.run_name} is complete at step {run.step}; {more} to go on")
            if run.folder:
                run.folder.record_completed(run)
            run.accelerator.end_training()
        else:
            with session(run) as running:
                running.outcome = outcome = train_steps(run, running)
        seconds = time.perf_counter() - begun
        folder = Path(config.output_dir) / config.run_name
        return Result(outcome, run.step, run.scores, seconds, folder, run.best_checkpoint)


def train_steps(run: Run, running: Session) -> Outcome:
    """The loop over the steps that are still to be done."""
    task, stop, throughput, steps = run.task, running.stop, running.throughput, run.steps or 0
    keep_start(run)
    if run.step == run.first_step and not run.pending and not run.scores:
        run.pending = {"row": _place(run) | ({"order_digest": task.feed.order_digest} if run.step else {})}
        if not finish_pending(run, running) or run.keeps_best or stop.is_agreed:
            save(run, running)
    elif run.pending and finish_pending(run, running):
        if run.is_complete and is_ruined(run, running):
            return "diverged"
        save(run, running)
    if stop.is_agreed:
        return "stopped"
    run.warm_up()
    throughput.restart()
    with profile(run.config.train.profile_steps, run.folder) as profiler_step:
        while not run.is_complete:
            begun = time.perf_counter()
            result = train_step(run)
            throughput.add(result.units)
            running.metrics.advance()
            profiler_step()
            poll_background_save(run, stop)
            run.guard.record(result.loss_sum / result.units, run.step_guard.bad)
            number, bad = run.step, run.guard.judge(run.step, stop)
            stop.record_duration("step", time.perf_counter() - begun)
            if bad and not recover(run, running):
                return "diverged"
            if run.step < number:
                continue
            if (every := run.config.guard.check_every) and number % every == 0:
                run.check_replicas()
            due = task.due(number, last=number == steps)
            if due.log:
                run.pending = {"row": finite(_row(run, result, throughput))}
            if run.pending and not due.evaluate:
                running.metrics.log(run.pending.pop("row"))
            if due.sample:
                run.pending = (run.pending or {}) | {"sample": True}
            if not (run.pending or due.save or stop.is_agreed):
                continue
            with throughput.paused():
                finish_pending(run, running)
                if run.early_end and not due.sample and task.due(number, last=True).sample:
                    run.pending = {"sample": True} | (run.pending or {})
                    finish_pending(run, running)
                if run.is_complete and is_ruined(run, running):
                    return "diverged"
                if due.save or run.keeps_best or run.is_complete or stop.is_agreed:
                    save(run, running)
            if stop.is_agreed and not run.is_complete:
                return "stopped"
    return "completed"


def finish_pending(run: Run, running: Session) -> bool:
    """Does what is owed after a step: the evaluation that its row awaits, a sample. Collective.

    Returns:
        whether all is done. Where a stop came first, what is not is still in `run.pending`.
    """
    metrics, stop, owed = running.metrics, running.stop, run.pending or {}
    with suppress(Interrupted):  # an evaluation, by all ranks at the same batch
        if "row" in owed:
            scores = run.evaluate(stop.poll)
            if scores or run.step > run.first_step:
                metrics.log(owed["row"] | scores)
            del owed["row"]
    if owed.get("sample") and not stop.is_agreed:
        done, samples = run.sample(lambda: metrics.attempt("sample", lambda: run.task.sample(stop.poll)), stop)
        metrics.show_samples(run.step, samples)
        if done:
            del owed["sample"]
    run.pending = owed or None
    stop.sync()
    return not owed


def is_ruined(run: Run, running: Session) -> bool:
    """Whether a run has done all of its steps in vain: the parameters or the newest validation loss are not finite, or
    no step has changed anything. Collective; says so in `running`."""
    parameters = torch.stack([parameter.isfinite().all() for parameter in run.task.model.parameters()])
    none = run.step > 0 and round(run.skipped.item()) == run.step
    loss = run.scores.get("val_loss")
    ruined = not parameters.all().item() or none or (loss is not None and not math.isfinite(loss))
    if ruined:
        running.reason = "its parameters or its validation loss are not finite, or no step changed them"
    return ruined


class StepResult(NamedTuple):
    """fp32 scalars on the device: the sum of this rank's losses, the global gradient norm before clipping; the step's
    learning rate, and its units over all ranks."""

    loss_sum: Tensor
    grad_norm: Tensor
    lr: float
    units: int


def train_step(run: Run) -> StepResult:
    """The next optimizer step. Nothing here waits for the device.

    Every rank sums the losses of its units and divides by the units of all ranks; times W, as DDP averages over ranks.
    So each unit weighs the same, whatever the shares and the micro-batches, in a short step too. Gradients are
    all-reduced once, in the last micro-batch's backward.
    """
    accelerator, task, model, optimizer = run.accelerator, run.task, run.model, run.optimizer
    # Accelerate's own backward, clip_grad_norm_, step and zero_grad would do the same, and in every step divide by 1,
    # look for DTensors, for an optional package and at signatures
    scaler, plain, number = accelerator.scaler, optimizer.optimizer, run.step + 1
    seed_step(run.config.seed, number, accelerator.process_index)
    run.watchdog.heartbeat("data", number)
    step = task.feed.next_step()
    units = len(step.items) * task.units_per_item
    loss_sum, own = torch.zeros((), device=accelerator.device), 0
    for batch in step.micro_batches:
        run.watchdog.heartbeat("forward/backward")
        with nullcontext() if batch.last else accelerator.no_sync(model):
            loss = task.loss(model, batch)
            part = loss * (accelerator.num_processes / units)
            (scaler.scale(part) if scaler else part).backward()
        loss_sum += loss.detach()
        own += batch.n_valid * task.units_per_item
        run.watchdog.heartbeat("step" if batch.last else "data")
    if scaler:
        accelerator.unscale_gradients(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(run.parameters, run.config.optim.grad_clip or math.inf)
    lr = task.lr_at(number)
    for group in plain.param_groups:
        group["lr"] = lr * group.get("relative_lr", 1.0)
    skipped = run.step_guard.judge(grad_norm, run.guard.norms, getattr(scaler, "_scale", None))
    (optimizer if scaler else plain).step()
    # DDP's gradients are views of its buckets, and None would lose them; alone, None saves a pass over the memory
    plain.zero_grad(set_to_none=accelerator.num_processes == 1)
    run.step = number
    run.skipped += skipped
    run.epoch.add(loss_sum, own, skipped)  # of what was trained on
    run.since_row.add(loss_sum, own)
    return StepResult(loss_sum, grad_norm, lr, units)


def _place(run: Run) -> dict[str, Any]:
    """Where a run stands, as a row begins."""
    task, feed = run.task, run.task.feed
    epoch = round(feed.position / len(feed.order), 4)
    whole = {"step": run.step, "epoch": epoch, task.unit: feed.consumed * task.units_per_item}
    return whole | feed.by_source(task.unit, task.units_per_item)


def _row(run: Run, result: StepResult, throughput: Throughput) -> dict[str, Any]:
    """A row of metrics.jsonl. Reading the numbers is the only place where the loop waits for the device."""
    feed = run.task.feed
    run.watchdog.heartbeat("all-reduce")
    loss = sum_over_ranks(run.accelerator, result.loss_sum) / result.units
    loss_value, grad_norm, skipped = torch.stack([loss, result.grad_norm, run.skipped]).tolist()
    loss_mean, not_finite = run.since_row.pop_mean()
    row = {
        **_place(run),
        "loss": loss_value,
        "loss_mean": loss_mean,
        **({"not_finite": not_finite} if not_finite else {}),
        "lr": result.lr,
        "grad_norm": grad_norm,
        "skipped": round(skipped),
        **throughput.read(),
        "order_digest": feed.order_digest,
    }
    if feed.ended_epoch:
        run.scores["train_loss"] = row["train_loss"] = run.epoch.pop_mean()[0]
    return row


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch for what one step draws: dropout, augmentation."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    value = (mixed ^ (mixed >> 32)) % 2**63
    torch.default_generator.manual_seed(value)
    # not torch.manual_seed: where CUDA is not in use it queues a call with a stack trace for it, every time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(value)
