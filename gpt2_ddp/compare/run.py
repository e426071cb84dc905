"""One measured run of a comparison: what each of its processes does, whichever trainer the job belongs to."""

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data import loader
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import lr_at
from gpt2_ddp.processes.ddp import settle_buckets
from gpt2_ddp.processes.ranks import seed_step
from gpt2_ddp.run import loop as train
from gpt2_ddp.tasks import samples, supervised
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.jobs_build import build_fitting
from gpt2_ddp.tasks.pretraining import build

WARM_UP = 3
"""Steps before the clock starts; they train like all others."""
ROUNDS = 5
"""Pairs of readings, with and without synchronised gradients."""


@dataclass(frozen=True)
class Run:
    """What a run came to; plain values, so that it travels between processes.

    Args:
        steps: timed steps.
        samples: that the timed steps trained on, over all ranks.
        seconds: wall time of the timed steps on the slowest rank.
        peak_memory: of each rank until then, in bytes (`peak_memory`).
        communication: share of a step that synchronising gradients costs (`communication_share`), mean over the ranks;
            None for one process.
        metrics: val_loss and others of the final parameters.
        parameters: how many the model has.
        threads: of each process.
    """

    steps: int
    samples: int
    seconds: float
    peak_memory: tuple[int, ...]
    communication: float | None
    metrics: dict[str, float | int]
    parameters: int
    threads: int


@dataclass(frozen=True)
class Trainee:
    """A training that is ready for its first step.

    Args:
        model: as Accelerate prepared it. plain_model: its parameters by their plain names.
        step: trains step `number`, 1, 2, 3, ... in turn; returns the samples of all ranks.
        evaluate: scores of the present parameters.
    """

    accelerator: Accelerator
    model: nn.Module
    plain_model: nn.Module
    step: Callable[[int], int]
    evaluate: Callable[[], dict[str, float | int]]


def measure(config: TrainingConfig | JobConfig, data_parallel: bool, threads: int, steps: int, weights: Path) -> Run:
    """Trains `WARM_UP` and then `steps` steps, timed, on every rank alike.

    Args:
        config: the job's; its number of steps does not matter. Nothing is kept in its run folder.
        data_parallel: one process splits each micro-batch among the machine's GPUs.
        weights: safetensors file for the final parameters.

    Raises:
        UserError: for whatever the user has to mend.
    """
    trainee = make_trainee(config, data_parallel)
    torch.set_num_threads(threads)
    accelerator, last = trainee.accelerator, WARM_UP + steps
    time_steps(trainee, range(1, WARM_UP + 1))
    seconds, n_samples = time_steps(trainee, range(WARM_UP + 1, last + 1))
    memory = peak_memory(accelerator.device)
    metrics = trainee.evaluate()
    parameters = {name: value.detach().cpu() for name, value in trainee.plain_model.named_parameters()}
    if accelerator.is_main_process:
        save_file(parameters, weights)
    share = communication_share(trainee, last + 1, max(steps // (2 * ROUNDS), 1))
    ranks = gather_object([(seconds, memory, share)])
    accelerator.end_training()
    return Run(
        steps=steps,
        samples=n_samples,
        seconds=max(seconds for seconds, _, _ in ranks),
        peak_memory=tuple(memory for _, memory, _ in ranks),
        communication=None if share is None else mean(share for _, _, share in ranks),
        metrics=metrics,
        parameters=sum(value.numel() for value in parameters.values()),
        threads=torch.get_num_threads(),
    )


def time_steps(trainee: Trainee, numbers: Iterable[int]) -> tuple[float, int]:
    """Trains steps, which all ranks begin together; returns this rank's seconds and the samples of all ranks."""
    trainee.accelerator.wait_for_everyone()
    _await_device(trainee.accelerator)
    begun = time.perf_counter()
    n_samples = sum(trainee.step(number) for number in numbers)
    _await_device(trainee.accelerator)
    return time.perf_counter() - begun, n_samples


def communication_share(trainee: Trainee, first: int, block: int) -> float | None:
    """Share of this rank's step that synchronising gradients costs, between 0 and 1; None for one process.

    Blocks of ordinary steps take turns with blocks under `no_sync`, which do all the same but for DDP's all-reduce. The
    difference is the exposed communication: what runs hidden behind the backward pass costs nothing, while waiting for
    a slower rank counts, and so does what the all-reduce takes away from the computation (a core, memory bandwidth).
    Without synchronisation the ranks' parameters part, so this comes last.

    Args:
        first: number of the next step. block: steps in each block.
    """
    accelerator = trainee.accelerator
    if accelerator.num_processes == 1:
        return None
    together, apart = [], []
    for number in range(first, first + 2 * ROUNDS * block, 2 * block):
        together.append(_seconds_per_sample(trainee, range(number, number + block)))
        with accelerator.no_sync(trainee.model):
            apart.append(_seconds_per_sample(trainee, range(number + block, number + 2 * block)))
    return max(1 - median(apart) / median(together), 0.0)


def _seconds_per_sample(trainee: Trainee, numbers: range) -> float:
    seconds, n_samples = time_steps(trainee, numbers)  # an epoch's last step may be a short one
    return seconds / n_samples


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors took (the fullest GPU's, of several), on the CPU the largest resident set.

    The latter holds PyTorch's own libraries as well.
    """
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    if sys.platform == "linux":  # ru_maxrss would be that of the parent, where it was larger when it started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def make_trainee(config: TrainingConfig | JobConfig, data_parallel: bool) -> Trainee:
    """Builds the job of `config` with its own trainer's parts.

    Raises:
        UserError: for whatever the user has to mend.
    """
    if isinstance(config, TrainingConfig):
        return _gpt2(config, data_parallel)
    return _small_job(config, data_parallel)


class DataParallelGPT(nn.Module):
    """A GPT on all GPUs of the machine; the loss is the mean over all targets, however the rows were split."""

    def __init__(self, model: GPT):
        super().__init__()
        self.replicas = nn.DataParallel(model)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """int64 [B, T], int64 [B, T] -> fp32 scalar, or [B, T] with reduction `none`."""
        losses = self.replicas(tokens, targets, reduction="none")
        return losses.mean() if reduction == "mean" else losses


def _gpt2(config: TrainingConfig, data_parallel: bool) -> Trainee:
    training = build(config)
    accelerator = training.accelerator
    if data_parallel:
        training.plain_model.__dict__.pop("forward", None)  # Accelerate's wrapper; each GPU's copy would call this one
        training.model = accelerator.prepare_model(DataParallelGPT(training.plain_model))
    train.settle_buckets(training)
    batches = loader.train_batches(accelerator, training.dataset, 0, training.batch_size, config.data.workers)
    size = config.global_batch_windows

    def step(number: int) -> int:
        windows = training.order.windows((number - 1) * size, number * size)
        seed_step(config.seed, number, accelerator.process_index)
        train.train_step(training, batches, windows, lr_at(number, training.config.optim))
        return size

    def evaluate() -> dict[str, float | int]:
        return train.validate(training) if training.val_stream else {}

    return Trainee(accelerator, training.model, training.plain_model, step, evaluate)


def _small_job(config: JobConfig, data_parallel: bool) -> Trainee:
    fitting = build_fitting(config, make_job, data_parallel)
    accelerator, plan, job = fitting.accelerator, fitting.plan, fitting.job
    example = job.train.inputs[: plan.processes].to(accelerator.device)
    settle_buckets(fitting.model, fitting.optimizer, job.transform(example, False))
    batches = samples.train_batches(accelerator, job.train, plan, 1)

    def step(number: int) -> int:
        positions = plan.positions(number)
        seed_step(config.seed, number, accelerator.process_index)
        supervised.train_step(fitting, batches, positions)
        return len(positions)

    return Trainee(accelerator, fitting.model, job.model, step, fitting.evaluate)


def _await_device(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)  # DataParallel's last work too happens here, on the first GPU
