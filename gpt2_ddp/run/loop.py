"""The training loop: the one that every task is trained by."""

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_ddp.config.training import RunConfig
from gpt2_ddp.run.checkpoint import list_checkpoints
from gpt2_ddp.run.folder import finite
from gpt2_ddp.run.run import Run
from gpt2_ddp.run.seeds import seed_step
from gpt2_ddp.run.session import Outcome, Session, session
from gpt2_ddp.run.stop import GivenUp
from gpt2_ddp.run.task import MakeTask, Scores
from gpt2_ddp.run.tracking import Throughput, profile


@dataclass(frozen=True)
class Result:
    """What a call of `train` came to; plain values, so that it travels between processes.

    Args:
        step: optimizer steps in all, those before a resume included.
        metrics: the newest scores: train_loss (of the last whole epoch), val_loss ...
        seconds: wall time of this call, evaluations and checkpoints included.
        run: the run folder.
    """

    outcome: Outcome
    step: int
    metrics: Scores
    seconds: float
    run: Path

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
            more = "raise its number of steps or epochs to go on"
            run.accelerator.print(f"{config.run_name} is complete at step {run.step}; {more}")
            if run.folder:
                run.folder.write_status("completed", run.step)
            run.accelerator.end_training()
        else:
            with session(run) as running:
                running.outcome = outcome = train_steps(run, running)
        seconds = time.perf_counter() - begun
        return Result(outcome, run.step, run.scores, seconds, Path(config.output_dir) / config.run_name)


def train_steps(run: Run, running: Session) -> Outcome:
    """The loop over the steps that are still to be done."""
    task, stop, throughput, steps = run.task, running.stop, running.throughput, run.steps or 0
    run.keep_start()
    if run.step == 0 and not run.owed:
        run.owed = {"row": {"step": 0, "epoch": 0.0, task.unit: 0}}
        if not follow(run, running):
            save(run, running)
    elif run.owed and follow(run, running):
        if run.step == steps and run.is_ruined():
            return ruined(running)
        save(run, running)
    if stop.is_agreed:
        return "stopped"
    run.settle()
    throughput.restart()
    with profile(run.config.train.profile_steps, run.folder) as profiler_step:
        while run.step < steps:
            begun = time.perf_counter()
            result = train_step(run)
            throughput.add(result.units)
            running.metrics.advance()
            profiler_step()
            run.guard.note(result.loss_sum / result.units, run.step_guard.bad)
            number, bad = run.step, run.guard.review(run.step, stop)
            stop.took("step", time.perf_counter() - begun)
            if bad and not recover(run, running):
                return "diverged"
            if run.step < number:
                continue
            if (every := run.config.guard.check_every) and number % every == 0:
                run.check_replicas()
            due = task.due(number, last=number == steps)
            if due.log:
                run.owed = {"row": finite(_row(run, result, throughput))}
            if run.owed and not due.evaluate:
                running.metrics.log(run.owed.pop("row"))
            if due.sample:
                run.owed = (run.owed or {}) | {"sample": True}
            if not (run.owed or due.save or stop.is_agreed):
                continue
            with throughput.paused():
                followed = follow(run, running)
                if number == steps and followed and run.is_ruined():
                    return ruined(running)
                if due.save or stop.is_agreed:
                    save(run, running)
            if stop.is_agreed and (number < steps or not followed):
                return "stopped"
    return "completed"


def follow(run: Run, running: Session) -> bool:
    """Does what is owed after a step: the evaluation that its row awaits, a sample. Collective.

    Returns:
        whether all is done. Where a stop came first, what is not is still in `run.owed`.
    """
    metrics, stop, owed = running.metrics, running.stop, run.owed or {}
    with suppress(GivenUp):  # an evaluation, by all ranks at the same batch
        if "row" in owed:
            scores = run.evaluate(stop.poll)
            if scores or run.step:
                metrics.log(owed["row"] | scores)
            del owed["row"]
    if owed.get("sample") and not stop.is_agreed:
        done, text = run.sample(lambda poll: metrics.sample(run.task, poll), stop)
        metrics.show_sample(run.step, text)
        if done:
            del owed["sample"]
    run.owed = owed or None
    stop.agreed_now()
    return not owed


def save(run: Run, running: Session) -> None:
    """Saves a checkpoint of the present step. Collective; afterwards all know of a stop that came meanwhile."""
    begun = time.perf_counter()
    run.save()
    running.stop.took("save", time.perf_counter() - begun)
    running.stop.agreed_now()


def recover(run: Run, running: Session) -> bool:
    """What is done about a bad step: a word about the first, and when the run has diverged, a step back. Collective.

    Returns:
        whether the run can go on.
    """
    guard, say = run.guard, running.metrics.say
    if guard.bad_steps == 1:
        left_out = "left out" if run.config.guard.skip else "trained on"
        say(f"warning: step {guard.judged} is bad: {guard.wrong}; {left_out}, and no further one is mentioned here")
    if not guard.diverged:
        return True
    count = f"{run.config.guard.patience} bad steps in a row up to step {guard.judged}: {guard.wrong}"
    if run.rollbacks < run.config.rollbacks and (event := run.roll_back()):
        running.metrics.go_back(event)
        a, b = event["passed"]
        say(f"warning: {count}; went back to step {run.step}, and passes over the data at [{a}, {b})")
        running.throughput.restart()
        return True
    running.reason = count + (f", after {run.rollbacks} rollbacks" if run.rollbacks else "")
    run.drop_bad()
    return False


def ruined(running: Session) -> Outcome:
    """The end of a run that has done all of its steps in vain."""
    running.reason = "its parameters or its validation loss are not finite, or no step changed them"
    return "diverged"


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
    number = run.step + 1
    seed_step(run.config.seed, number, accelerator.process_index)
    run.watch.at("data", number)
    step = task.feed.next_step()
    units = len(step.items) * task.units_per_item
    loss_sum = torch.zeros((), device=accelerator.device)
    for batch in step.micro_batches:
        run.watch.at("forward/backward")
        with nullcontext() if batch.last else accelerator.no_sync(model):
            loss = task.loss(model, batch)
            accelerator.backward(loss * (accelerator.num_processes / units))
        loss_sum += loss.detach()
        run.watch.at("step" if batch.last else "data")
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), run.config.optim.grad_clip or float("inf"))
    assert isinstance(grad_norm, Tensor)
    lr = task.lr_at(number)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler = accelerator.scaler
    skipped = run.step_guard.judge(grad_norm, run.guard.norms, getattr(scaler, "_scale", None))
    optimizer.step()
    # DDP's gradients are views of its buckets, and None would lose them; alone, None saves a pass over the memory
    optimizer.zero_grad(set_to_none=accelerator.num_processes == 1)
    run.step = number
    run.skipped += skipped
    run.epoch_loss += torch.where(skipped.bool(), 0, loss_sum)  # of what was trained on
    run.epoch_units += units * (1 - skipped)
    return StepResult(loss_sum, grad_norm, lr, units)


def _row(run: Run, result: StepResult, throughput: Throughput) -> dict[str, Any]:
    """A row of metrics.jsonl. Reading the numbers is the only place where the loop waits for the device."""
    task, feed = run.task, run.task.feed
    run.watch.at("all-reduce")
    loss = run.sum_over_ranks(result.loss_sum) / result.units
    loss_value, grad_norm, skipped = torch.stack([loss, result.grad_norm, run.skipped]).tolist()
    row = {
        "step": run.step,
        "epoch": round(feed.position / len(feed.order), 4),
        task.unit: feed.consumed * task.units_per_item,
        "loss": loss_value,
        "lr": result.lr,
        "grad_norm": grad_norm,
        "skipped": round(skipped),
        **throughput.read(),
        "order_digest": feed.order_digest,
    }
    return row | {"train_loss": run.end_epoch()} if feed.ended_epoch else row
