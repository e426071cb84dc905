"""The training loop."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.loader import next_digest, train_batches
from gpt2_ddp.model.evaluate import Evaluation, evaluate
from gpt2_ddp.model.generate import sample_text
from gpt2_ddp.model.optim import lr_at, skip_if_not_finite
from gpt2_ddp.processes import ddp
from gpt2_ddp.processes.ranks import seed_step
from gpt2_ddp.run.session import Outcome, session
from gpt2_ddp.run.stop import StopRequest
from gpt2_ddp.run.tracking import Metrics, Throughput, peak_flops, profile
from gpt2_ddp.tasks.pretraining import Training, build


def train(config: TrainingConfig) -> Outcome:
    """Trains until `train.steps`, from wherever the run folder's newest checkpoint stands.

    Returns:
        `stopped` when a signal or the time budget ended it early, with a checkpoint saved.

    Raises:
        UserError: for whatever the user has to mend.
    """
    training = build(config)
    accelerator, state = training.accelerator, training.state
    if state.step >= training.steps:
        accelerator.print(f"{config.run_name} is complete at step {state.step}; raise --train.steps to go on")
        accelerator.end_training()
        return "completed"
    with session(accelerator, config, training.run, state, training.steps) as running:
        running.metrics.say(_opening_words(training))
        running.outcome = train_steps(training, running.metrics, running.stop)
    return running.outcome


def train_steps(training: Training, metrics: Metrics, stop: StopRequest) -> Outcome:
    """The loop over the steps that are still to be done."""
    config, accelerator, state = training.config, training.accelerator, training.state
    peak = peak_flops(accelerator.device)
    throughput = Throughput(
        training.plain_model.flops_per_token(), peak and peak * accelerator.num_processes, accelerator.device
    )
    deadline = time.monotonic() + 60 * (config.train.max_minutes or float("inf"))
    skipped = torch.full((), float(state.skipped), device=accelerator.device)
    if state.step == 0 and training.val_stream:
        metrics.log({"step": 0, "tokens": 0, **validate(training)})
    settle_buckets(training)
    batches = train_batches(accelerator, training.dataset, state.position, training.batch_size, config.data.workers)
    throughput.restart()
    with profile(config.train.profile_steps, training.run) as profiler_step:
        for step in range(state.step + 1, training.steps + 1):
            windows = training.order.windows(state.position, state.position + config.global_batch_windows)
            seed_step(config.seed, step, accelerator.process_index)
            lr = lr_at(step, config.optim)
            result = train_step(training, batches, windows, lr)

            skipped += result.skipped
            state.step = step
            state.position += len(windows)
            state.tokens += config.train.global_batch_tokens
            state.order_digest = next_digest(state.order_digest, windows)
            throughput.add(config.train.global_batch_tokens)
            metrics.advance()
            profiler_step()
            if training.run and time.monotonic() > deadline:
                stop.request(f"train.max_minutes = {config.train.max_minutes}")

            last = step == training.steps
            evaluates = training.val_stream is not None and (last or step % config.eval.every == 0)
            scores = {}
            if evaluates or last or step % config.tracking.log_every == 0:
                row = _row(training, result, skipped, lr, throughput)
                if evaluates:
                    with throughput.paused():
                        scores = validate(training)
                metrics.log(row | scores)
            stopping = stop.agreed()
            if last or stopping or step % config.checkpoint.every == 0:
                with throughput.paused():
                    state.skipped = int(skipped.item())
                    training.save(scores.get("val_loss"))
            if config.tracking.sample_every and (last or step % config.tracking.sample_every == 0):
                with throughput.paused():
                    _sample(training, metrics)
            if stopping and not last:
                return "stopped"
    return "completed"


class StepResult(NamedTuple):
    """fp32 scalars on the device: this rank's mean loss, the global gradient norm before clipping, 1 if skipped."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


def train_step(
    training: Training, batches: Iterator[tuple[Tensor, np.ndarray]], windows: np.ndarray, lr: float
) -> StepResult:
    """One optimizer step over the global batch `windows`, of which this rank's share comes from `batches`.

    Gradients are all-reduced once, in the last micro-batch's backward. Nothing here waits for the device.
    """
    accelerator, model, optimizer = training.accelerator, training.model, training.optimizer
    loss_sum = torch.zeros((), device=accelerator.device)
    for micro in range(training.accumulation):
        tokens, delivered = next(batches)  # [b, T + 1], [b]
        first = (micro * accelerator.num_processes + accelerator.process_index) * training.batch_size
        if not np.array_equal(delivered, windows[first : first + training.batch_size]):
            raise RuntimeError(f"micro-batch {micro} holds windows {delivered}, not the order's")
        with nullcontext() if micro == training.accumulation - 1 else accelerator.no_sync(model):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / training.accumulation
            accelerator.backward(loss)
        loss_sum += loss.detach()
    max_norm = training.config.optim.grad_clip or float("inf")
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    assert isinstance(grad_norm, Tensor)
    for group in optimizer.param_groups:
        group["lr"] = lr
    skipped = skip_if_not_finite(training.plain_optimizer, grad_norm, accelerator.scaler)
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(loss_sum, grad_norm, skipped)


def settle_buckets(training: Training) -> None:
    """Has DDP settle its gradient buckets before the first step, so that a resumed run sums like one that was not."""
    block_size = training.config.model.block_size
    tokens = torch.zeros(training.batch_size, block_size, dtype=torch.int64, device=training.accelerator.device)
    ddp.settle_buckets(training.model, training.optimizer, tokens, tokens)


def _row(
    training: Training, result: StepResult, skipped: Tensor, lr: float, throughput: Throughput
) -> dict[str, float | int | str | None]:
    """A row of metrics.jsonl. Reading the numbers is the only place where the loop waits for the device."""
    loss = training.accelerator.reduce(result.loss, reduction="mean")  # over ranks: the loss of the global batch
    assert isinstance(loss, Tensor)
    loss_value, grad_norm, skipped_steps = torch.stack([loss, result.grad_norm, skipped]).tolist()
    tokens_per_second, mfu = throughput.read()
    return {
        "step": training.state.step,
        "tokens": training.state.tokens,
        "loss": loss_value,
        "lr": lr,
        "grad_norm": grad_norm,
        "skipped": round(skipped_steps),
        "tokens_per_second": round(tokens_per_second, 1),
        "mfu": mfu,
        "order_digest": training.state.order_digest,
    }


def validate(training: Training) -> dict[str, float | int]:
    """The model's scores on the validation split, as metrics.jsonl names them."""
    assert training.val_stream is not None
    config = training.config
    result: Evaluation = evaluate(
        training.accelerator,
        training.accelerator.unwrap_model(training.model, keep_torch_compile=True),
        training.val_stream,
        config.model.block_size,
        config.eval.batch_size,
        config.eval.tokens,
        training.tokenizer.token_bytes(),
    )
    return {"val_loss": result.loss, "val_tokens": result.tokens, "val_bits_per_byte": result.bits_per_byte}


def _sample(training: Training, metrics: Metrics) -> None:
    if training.run:
        config, state = training.config, training.state
        text = sample_text(training.plain_model, training.tokenizer, config.tracking.sample_prompt, 200, config.seed)
        training.run.append_sample(state.step, text)
        metrics.say(f"--- sample at step {state.step} ---\n{text}\n---")


def _opening_words(training: Training) -> str:
    accelerator, state, model = training.accelerator, training.state, training.plain_model
    begins = f"goes on from step {state.step}" if state.step else "starts"
    return (
        f"{training.config.run_name} {begins}: {model.num_parameters() / 1e6:.1f}M parameters, "
        f"{accelerator.num_processes} x {accelerator.device.type}, precision {accelerator.mixed_precision}, "
        f"{training.accumulation} x {training.batch_size} windows of {model.config.block_size} tokens per process"
    )
