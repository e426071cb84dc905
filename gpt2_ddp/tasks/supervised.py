"""Supervised training on samples: the common part of all small jobs (a `training.task.Task`)."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.checkpoint.loading import broadcast
from gpt2_ddp.config.jobs import JobConfig, JobOptimConfig
from gpt2_ddp.config.training import OptimConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch, MicroBatch, prepare_loader
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.distributed.ranks import LONGEST, check_ranks_agree
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.optim import OF_ADAM, OF_MOMENTUM, STATE, without_dynamo
from gpt2_ddp.state import JobData, Scores, TaskState
from gpt2_ddp.training.optimizer import lr_at
from gpt2_ddp.training.task import Due, Poll, Task


@dataclass
class Samples:
    """Training or test samples as two CPU tensors. `names`: of the samples of images, in messages
    and predictions."""

    inputs: Tensor
    targets: Tensor
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples int64 [b]."""
        index = torch.from_numpy(items)
        return self.inputs[index], self.targets[index]

    def sha256(self) -> str:
        """Hash of all samples."""
        digest = hashlib.sha256()
        for part in (self.inputs, self.targets):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """What one supervised job has of its own.

    Attributes:
        model: plain, fp32, on the CPU; inputs -> outputs.
        losses: (outputs fp32, targets) -> fp32 [batch], each sample's loss.
        scores: (outputs, targets) -> further scores of each sample, [batch] by name.
        transform: (inputs as stored, positions) -> what the model takes; on the device, a batch at
            a time. Positions in the order, int64 [batch], seed the augmentation; None in
            evaluation.
        facts: of the data, which a resumed run has to have, such as `classes`.
    """

    model: nn.Module
    train: Samples
    test: Samples
    losses: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor, Tensor], dict[str, Tensor]] = lambda outputs, targets: {}
    transform: Callable[[Tensor, np.ndarray | None], Tensor] = lambda inputs, positions: inputs
    facts: Mapping[str, Any] = field(default_factory=dict)

    def score(
        self, model: nn.Module, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs of the model, and `loss` and further scores of each sample, [batch] by name."""
        outputs = model(self.transform(inputs, None)).float()
        return outputs, {"loss": self.losses(outputs, targets), **self.scores(outputs, targets)}


class Supervised(Task[JobConfig]):
    """A model that learns targets from inputs; the loss is a mean over samples.

    An epoch is a permutation of the samples, and its last step may be short. Each rank computes one
    stretch of a step. `make_job` reads the data and makes the model, on every rank alike; torch is
    seeded before.
    """

    unit = "samples"

    def __init__(
        self,
        make_job: Callable[[JobConfig, Accelerator, Mapping[str, Any] | None], Job],
        config: JobConfig,
        accelerator: Accelerator,
        saved: Checkpoint | None,
    ):
        self.config = config
        self.accelerator = accelerator
        self._make_job = make_job
        launched = config.launch.processes
        processes = accelerator.num_processes
        if config.launch.threads:
            torch.set_num_threads(config.launch.threads)
        if launched not in (None, processes):
            hint = f"the launcher started {processes}; remove one of the two"
            raise UserError("launch.processes", launched, hint)
        self.batch_size = config.train.global_batch_size
        if self.batch_size < processes:
            hint = f"should be at least 1 for each of the {processes} processes"
            raise UserError("train.global_batch_size", self.batch_size, hint)
        data = saved.state.task if saved else None
        self._saved_data = data if isinstance(data, JobData) else None

    def total_steps(self, epoch_size: int | None) -> int | None:
        """The steps of `train.epochs`."""
        if epoch_size is None:
            return None
        return self.config.train.epochs * math.ceil(epoch_size / self.batch_size)

    def load(self, watchdog: Watchdog, is_complete: bool = False) -> None:
        """Creates the job, and compares its data with the run's."""
        config = self.config
        accelerator = self.accelerator
        watchdog.heartbeat("preparing data", timeout=LONGEST.total_seconds())
        torch.manual_seed(config.seed)
        saved = self._saved_data
        self.job = self._make_job(config, accelerator, saved and saved.model_dump())
        hashes = {
            "training samples": self.job.train.sha256(),
            "test samples": self.job.test.sha256(),
        }
        self.data_hash = "".join(hashes.values())
        check_ranks_agree(hashes)
        if saved and saved.data_hash != self.data_hash:
            advice = "restore them, or choose another run_name"
            hint = f"has other data than the run was started with; {advice}"
            raise UserError("data", f"hash {self.data_hash[:16]}", hint)
        order = Permutation(config.seed, len(self.job.train))
        shares = partial(contiguous, accelerator.num_processes, config.train.micro_batch_size)
        batch = GlobalBatch(self.batch_size, shares, by_epoch=True)
        self.feed = Feed(order, batch, self.job.train, accelerator)
        self.model = self.job.model
        self._rate = job_schedule(config, math.ceil(len(self.job.train) / self.batch_size))

    def build_optimizer(self) -> Optimizer:
        return build_job_optimizer(self.model, self.config.optim)

    def schedule(self, step: int) -> dict[str, float]:
        return {"lr": self._rate(step)}

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Sum of the samples' losses, of inputs that are transformed as in training."""
        inputs, targets = batch.rows
        outputs = model(self.job.transform(inputs, batch.positions)).float()
        return self.job.losses(outputs, targets)[: batch.n_valid].sum()

    def due(self, step: int, last: bool) -> Due:
        return due(self.config, step, last, self.feed.ended_epoch, self.feed.epochs)

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        """The test samples' scores, with the main process's BatchNorm statistics."""
        broadcast(dict(self.model.named_buffers()))
        job = self.job

        def score(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            _, scores = job.score(model, inputs, targets)
            return scores

        size = self.config.eval.batch_size
        names, values = score_each(self.accelerator, model, job.test, score, size, poll)
        return means(names, values)

    def state_dict(self) -> JobData:
        """Batch and learning rate of all processes, and identity of the data."""
        return JobData(
            global_batch_size=self.batch_size,
            lr=self.config.optim.lr,
            data_hash=self.data_hash,
            **self.job.facts,
        )

    def load_state_dict(self, state: TaskState) -> None:
        """Does nothing: batch, learning rate and data were compared already."""


def due(config: JobConfig, step: int, last: bool, ended_epoch: bool, epochs: int) -> Due:
    """The work that follows a step. Jobs evaluate and save by the epoch; `epochs` of them are
    complete."""
    return Due(
        log=last or ended_epoch or step % config.tracking.log_every == 0,
        evaluate=last or (ended_epoch and epochs % config.eval.every == 0),
        save=last or (ended_epoch and epochs % config.checkpoint.every == 0),
    )


def contiguous(processes: int, largest: int, n: int) -> list[list[range]]:
    """Shares of one range per rank, in micro-batches of at most `largest` of the n items. Ranges
    differ by at most one item, and so do a rank's micro-batches; in a short step they may be empty.
    (A `feed.Shares`, once `partial` has the first two.)"""
    parts = math.ceil(math.ceil(n / processes) / largest)
    ranks = [_split(part, parts) for part in _split(range(n), processes)]
    return [list(micro_batch) for micro_batch in zip(*ranks, strict=True)]


def _split(whole: range, parts: int) -> list[range]:
    ends = [len(whole) * part // parts for part in range(parts + 1)]
    return [whole[start:stop] for start, stop in pairwise(ends)]


def means(names: Sequence[str], values: Tensor) -> Scores:
    """Of scores fp64 [N, scores], with `val_` before their names; and how many samples they are
    of."""
    scores = zip(names, values.mean(0).tolist(), strict=True)
    return {f"val_{name}": value for name, value in scores} | {"val_samples": len(values)}


def job_schedule(config: JobConfig, epoch_steps: int) -> Callable[[int], float]:
    """The learning rate of each optimizer step, of which the first is 1: that of `lr_at`, in
    epochs. `epoch_steps`: optimizer steps of an epoch."""
    optim = config.optim
    warmup = round(optim.warmup_epochs * epoch_steps)
    steps = config.train.epochs * epoch_steps
    in_steps = OptimConfig(
        lr=optim.lr, min_lr=0.0, schedule=optim.schedule, warmup_steps=warmup, decay_steps=steps
    )

    def rate(step: int) -> float:
        return lr_at(step, in_steps)

    return rate


def build_job_optimizer(model: nn.Module, config: JobOptimConfig) -> Optimizer:
    """The fused optimizer over all parameters of the plain model."""
    parameters = list(model.parameters())
    if config.name == "sgd":
        optimizer = without_dynamo(SGD)(
            parameters, config.lr, config.momentum, weight_decay=config.weight_decay, fused=True
        )
        if config.momentum:  # created now: a skipped first step would leave it uninitialised
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        optimizer.param_groups[0][STATE] = OF_MOMENTUM if config.momentum else ()
        return optimizer
    kind = Adam if config.name == "adam" else AdamW
    optimizer = without_dynamo(kind)(
        parameters, config.lr, weight_decay=config.weight_decay, fused=True
    )
    optimizer.param_groups[0][STATE] = OF_ADAM
    return optimizer


@torch.no_grad()
def score_each(
    accelerator: Accelerator,
    model: nn.Module,
    samples: Samples,
    score: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]],
    batch_size: int,
    poll: Callable[[], None] = lambda: None,
) -> tuple[list[str], Tensor]:
    """Names of the scores, and those fp64 [N, scores] of all samples, in their order; equal on
    every rank.

    Batch j belongs to rank j mod W. For several ranks, the last sample fills up their last batches;
    its repetitions are dropped. The model, plain or prepared, is in evaluation mode.

    Args:
        score: (model, inputs, targets) -> named scores [batch].
        batch_size: samples per forward pass and rank.
        poll: called before each batch, by all ranks equally often; what it raises ends the scoring.
    """
    count = len(samples)
    world = accelerator.num_processes
    rank = accelerator.process_index
    padding = -count % (batch_size * world) if world > 1 else 0
    items = np.arange(count + padding).clip(max=count - 1)
    batches = np.split(items, range(batch_size, len(items), batch_size))
    loader = prepare_loader(accelerator, map(samples.read, batches[rank::world]))
    rows: list[Tensor] = []
    names: list[str] = []
    for inputs, targets in loader:
        poll()
        with accelerator.autocast():
            scores = score(model, inputs, targets)
        names = list(scores)
        row = torch.stack([value.float() for value in scores.values()], dim=1)  # [batch, scores]
        rows.append(cast(Tensor, accelerator.gather(row)))
    return names, torch.cat(rows)[:count].cpu().double()
