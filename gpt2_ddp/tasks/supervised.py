"""fit(): the one training loop of all the small supervised jobs."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.data.loader import next_digest
from gpt2_ddp.model.optim import skip_if_not_finite
from gpt2_ddp.processes.ddp import settle_buckets
from gpt2_ddp.processes.ranks import seed_step
from gpt2_ddp.run.session import Outcome, session
from gpt2_ddp.run.stop import StopRequest
from gpt2_ddp.run.tracking import Metrics, Throughput
from gpt2_ddp.tasks.jobs_build import Fitting, Job, build_fitting
from gpt2_ddp.tasks.samples import train_batches


@dataclass(frozen=True)
class JobResult:
    """What a job came to; plain values, so that it travels between processes.

    Args:
        outcome: `stopped` when a signal or the time budget ended it early, with a checkpoint saved.
        step: optimizer steps in all, those before a resume included.
        metrics: of the last epoch: train_loss, val_loss, val_accuracy ...
        seconds: wall time of this call, evaluations and checkpoints included.
        samples_per_second: of the training alone, in this call; 0 when there was nothing left to do.
        data_share: share of the training time spent waiting for batches.
        run: the run folder.
        checkpoint: the newest checkpoint, which holds the parameters (model.safetensors).
    """

    outcome: Outcome
    step: int
    metrics: dict[str, float]
    seconds: float
    samples_per_second: float
    data_share: float
    run: Path
    checkpoint: Path


def fit(config: JobConfig, make_job: Callable[[JobConfig, Accelerator], Job], data_parallel: bool = False) -> JobResult:
    """Trains for `train.epochs`, from wherever the run folder's newest checkpoint stands.

    Args:
        make_job: reads the data and makes the model; the same on every rank.
        data_parallel: one process splits each batch among the machine's GPUs (nn.DataParallel), for comparison.

    Raises:
        UserError: for whatever the user has to mend.
    """
    begun = time.perf_counter()
    fitting = build_fitting(config, make_job, data_parallel)
    accelerator, state, run = fitting.accelerator, fitting.state, fitting.run
    throughput = Throughput(0, None, accelerator.device)
    if state.step >= fitting.steps:
        accelerator.print(f"{config.run_name} is complete at step {state.step}; raise --train.epochs to go on")
        accelerator.end_training()
        return _result(fitting, "completed", begun, throughput, 0, 0.0)
    before = state.samples
    with session(accelerator, config, run, state, fitting.steps) as running:
        running.metrics.say(_opening_words(fitting))
        running.outcome, waited = fit_steps(fitting, running.metrics, running.stop, throughput)
    return _result(fitting, running.outcome, begun, throughput, state.samples - before, waited)


def fit_steps(fitting: Fitting, metrics: Metrics, stop: StopRequest, throughput: Throughput) -> tuple[Outcome, float]:
    """The loop over the steps that are still to be done.

    Returns:
        How it ended, and the seconds spent waiting for batches.
    """
    config, accelerator, state, plan = fitting.config, fitting.accelerator, fitting.state, fitting.plan
    deadline = time.monotonic() + 60 * (config.train.max_minutes or float("inf"))
    totals = Totals(fitting)
    if state.step == 0:
        metrics.log({"step": 0, "epoch": 0, "samples": 0, **fitting.evaluate()})
    example = fitting.job.train.inputs[: plan.processes].to(accelerator.device)
    settle_buckets(fitting.model, fitting.optimizer, fitting.job.transform(example, False))
    batches = train_batches(accelerator, fitting.job.train, plan, state.step + 1)
    throughput.restart()
    for step in range(state.step + 1, fitting.steps + 1):
        positions = plan.positions(step)
        seed_step(config.seed, step, accelerator.process_index)
        result = train_step(fitting, batches, positions)

        state.step = step
        state.samples += len(positions)
        state.order_digest = next_digest(state.order_digest, plan.order.windows(positions.start, positions.stop))
        totals.add(result, len(positions))
        throughput.add(len(positions))
        metrics.advance()
        if fitting.run and time.monotonic() > deadline:
            stop.request(f"train.max_minutes = {config.train.max_minutes}")

        last = step == fitting.steps
        epoch, rest = divmod(step, plan.steps_per_epoch)
        scores = {}
        if rest == 0 or step % config.tracking.log_every == 0:
            row = totals.row(throughput)
            if rest == 0:
                scores = totals.end_epoch()
                if last or epoch % config.eval.every == 0:
                    with throughput.paused():
                        scores |= fitting.evaluate()
                fitting.metrics = scores
            metrics.log(row | scores)
        stopping = stop.agreed()
        if last or stopping or (rest == 0 and epoch % config.checkpoint.save_every == 0):
            with throughput.paused():
                totals.record()
                fitting.save(scores.get("val_loss"))
        if stopping and not last:
            throughput.read()
            return "stopped", totals.waited
    return "completed", totals.waited


class StepResult(NamedTuple):
    """fp32 scalars on the device: this rank's part of the step's mean loss, the global gradient norm before clipping,
    1 if skipped; and the seconds spent waiting for the batches."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    waited: float


def train_step(fitting: Fitting, batches: Iterator[tuple[Tensor, Tensor, Tensor]], positions: range) -> StepResult:
    """One optimizer step over the samples at `positions`, of which this rank's share comes from `batches`.

    Every rank sums its losses and divides by the samples of all ranks; times W, as DDP averages over ranks. So each
    sample weighs the same, whatever the shares, in the short last step of an epoch too. Gradients are all-reduced once,
    in the last micro-batch's backward. Nothing here waits for the device.
    """
    accelerator, model, optimizer, job = fitting.accelerator, fitting.model, fitting.optimizer, fitting.job
    loss_sum = torch.zeros((), device=accelerator.device)
    waited = 0.0
    shares = fitting.plan.shares(positions)
    for micro, ranks in enumerate(shares):
        asked = time.perf_counter()
        inputs, targets, index = next(batches)
        waited += time.perf_counter() - asked
        own = len(ranks[accelerator.process_index])
        assert len(index) == max(own, 1), "the sampler and this loop share out the step alike"
        with nullcontext() if micro == len(shares) - 1 else accelerator.no_sync(model):
            outputs = model(job.transform(inputs, True)).float()
            losses = job.losses(outputs, targets)[:own]  # an empty share: nothing of the sample that stands in
            loss = losses.sum() / len(positions)
            accelerator.backward(loss * accelerator.num_processes)
        loss_sum += loss.detach()
    max_norm = fitting.config.optim.grad_clip or float("inf")
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    assert isinstance(grad_norm, Tensor)
    skipped = skip_if_not_finite(fitting.plain_optimizer, grad_norm, accelerator.scaler)
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(loss_sum, grad_norm, skipped, waited)


class Totals:
    """Sums over steps, kept on the device; reading them is the only place where the loop waits for it."""

    def __init__(self, fitting: Fitting):
        self.fitting = fitting
        self.device = fitting.accelerator.device
        self.exact = torch.float64 if self.device.type != "mps" else torch.float32  # mps has no fp64
        self.waited = 0.0
        main = fitting.accelerator.is_main_process  # what was summed before a resume counts once
        self._epoch_loss = torch.tensor(fitting.state.epoch_loss if main else 0.0, dtype=self.exact, device=self.device)
        self._skipped = torch.full((), float(fitting.state.skipped), device=self.device)
        self._last: StepResult | None = None
        self._waited_before = 0.0
        self._seconds_before = 0.0

    def add(self, result: StepResult, samples: int) -> None:
        """Counts a step."""
        self._epoch_loss += result.loss.to(self.exact) * samples
        self._skipped += result.skipped
        self.waited += result.waited
        self._last = result

    def row(self, throughput: Throughput) -> dict[str, float | int | str | None]:
        """A row of metrics.jsonl about the last step."""
        assert self._last is not None
        fitting, state = self.fitting, self.fitting.state
        loss = self._sum_over_ranks(self._last.loss)
        loss_value, grad_norm, skipped = torch.stack([loss, self._last.grad_norm, self._skipped]).tolist()
        samples_per_second, _ = throughput.read()
        data_share = (self.waited - self._waited_before) / (throughput.seconds - self._seconds_before)
        self._waited_before, self._seconds_before = self.waited, throughput.seconds
        return {
            "step": state.step,
            "epoch": round(state.step / fitting.plan.steps_per_epoch, 4),
            "samples": state.samples,
            "loss": loss_value,
            "lr": fitting.lr,
            "grad_norm": grad_norm,
            "skipped": round(skipped),
            "samples_per_second": round(samples_per_second, 1),
            "data_share": round(data_share, 4),
            "order_digest": state.order_digest,
        }

    def end_epoch(self) -> dict[str, float]:
        """The mean loss of the epoch's samples, each as it was when it was trained on."""
        mean = self._sum_over_ranks(self._epoch_loss).item() / self.fitting.plan.order.n_windows
        self._epoch_loss.zero_()
        return {"train_loss": mean}

    def record(self) -> None:
        """Writes the sums into the run's state."""
        self.fitting.state.epoch_loss = self._sum_over_ranks(self._epoch_loss).item()
        self.fitting.state.skipped = round(self._skipped.item())

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total = self.fitting.accelerator.reduce(value.clone(), reduction="sum")
        assert isinstance(total, Tensor)
        return total


def _result(
    fitting: Fitting,
    outcome: Outcome,
    begun: float,
    throughput: Throughput,
    samples: int,
    waited: float,
) -> JobResult:
    config, step = fitting.config, fitting.state.step
    run = Path(config.output_dir) / config.run_name
    return JobResult(
        outcome=outcome,
        step=step,
        metrics=fitting.metrics,
        seconds=time.perf_counter() - begun,
        samples_per_second=samples / throughput.seconds if throughput.seconds else 0.0,
        data_share=waited / throughput.seconds if throughput.seconds else 0.0,
        run=run,
        checkpoint=run / "checkpoints" / f"step-{step:08d}",
    )


def _opening_words(fitting: Fitting) -> str:
    config, accelerator, state, plan = fitting.config, fitting.accelerator, fitting.state, fitting.plan
    begins = f"goes on from step {state.step}" if state.step else "starts"
    parameters = sum(parameter.numel() for parameter in fitting.job.model.parameters())
    micro_batches = plan.shares(plan.positions(1))
    return (
        f"{config.run_name} {begins}: {parameters:,} parameters, {accelerator.num_processes} x "
        f"{accelerator.device.type}, precision {accelerator.mixed_precision}, global batch {plan.global_batch_size}: "
        f"{len(micro_batches)} x {len(micro_batches[0][0])} samples per process"
    )
