"""The training loop: the one that every task is trained by."""

import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_ddp.config.training import RunConfig
from gpt2_ddp.run.run import Run
from gpt2_ddp.run.seeds import seed_step
from gpt2_ddp.run.session import Outcome, Session, session
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
        return self.run / "checkpoints" / f"step-{self.step:08d}"


def train(config: RunConfig, make_task: MakeTask) -> Result:
    """Trains until the last step, from wherever the run folder's newest checkpoint stands.

    Raises:
        UserError: for whatever the user has to mend.
    """
    begun, outcome = time.perf_counter(), "completed"
    with closing(Run(config, make_task)) as run:
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
    task, metrics, throughput = run.task, running.metrics, running.throughput
    if run.step == 0 and (scores := run.evaluate()):
        metrics.log({"step": 0, "epoch": 0.0, task.unit: 0, **scores})
    run.settle()
    throughput.restart()
    with profile(run.config.train.profile_steps, run.folder) as profiler_step:
        for step in range(run.step + 1, (run.steps or 0) + 1):
            result = train_step(run)
            throughput.add(result.units)
            metrics.advance()
            profiler_step()
            due = task.due(step, last=step == run.steps)
            scores = {}
            if due.log:
                row = _row(run, result, throughput)
                if due.evaluate:
                    with throughput.paused():
                        scores = run.evaluate()
                metrics.log(row | scores)
            stopping = running.stop.agreed()
            if due.save or stopping:
                with throughput.paused():
                    run.save(scores.get("val_loss"))
            if due.sample:
                with throughput.paused():
                    metrics.show_sample(step, task)
            if stopping and step != run.steps:
                return "stopped"
    return "completed"


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
    step = task.feed.next_step()
    units = len(step.items) * task.units_per_item
    loss_sum = torch.zeros((), device=accelerator.device)
    for batch in step.micro_batches:
        with nullcontext() if batch.last else accelerator.no_sync(model):
            loss = task.loss(model, batch)
            accelerator.backward(loss * (accelerator.num_processes / units))
        loss_sum += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), run.config.optim.grad_clip or float("inf"))
    assert isinstance(grad_norm, Tensor)
    lr = task.lr_at(number)
    for group in optimizer.param_groups:
        group["lr"] = lr
    skipped = run.guard.judge(grad_norm)
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
