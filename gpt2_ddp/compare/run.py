"""One measured run of a comparison: the work of each process, for any task."""

import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.ranks import is_main
from gpt2_ddp.state import Scores
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import Supervised
from gpt2_ddp.training.loop import train_step
from gpt2_ddp.training.run import Trainer, build, open_run

WARM_UP = 3  # steps before the clock starts; they train like all others
ROUNDS = 5  # pairs of readings, with and without synchronised gradients
BLOCK = 500  # most steps per reading; otherwise a long training would take twice as long


@dataclass(frozen=True)
class RunResult:
    """Measurements of a run, in plain values that processes can send to each other."""

    seconds: float  # wall time of the timed steps on the slowest rank
    peak_memory: int  # bytes of the largest process until then
    communication: float | None  # share of a step, mean over the ranks; None for one process
    metrics: Scores  # val_loss and others of the final parameters
    parameters: int


def measure(
    config: TrainingConfig | JobConfig, data_parallel: bool, threads: int, steps: int, weights: Path
) -> RunResult:
    """Trains `WARM_UP` and then `steps` steps, timed, on every rank. Keeps no checkpoint; writes the final parameters
    to the file `weights`, as a vector. With `data_parallel`, one process splits each micro-batch among all GPUs."""
    gpt2 = isinstance(config, TrainingConfig)
    replicas = ReplicatedGPT if gpt2 else nn.DataParallel
    with open_run(config, Pretraining if gpt2 else partial(Supervised, make_job)) as opened:
        run = build(opened, replicas if data_parallel else lambda model: model)
        torch.set_num_threads(threads)
        accelerator = run.accelerator
        run.warm_up()
        time_steps(run, WARM_UP)
        seconds, _ = time_steps(run, steps)
        memory = peak_memory(accelerator.device)
        metrics = run.evaluate(run.watchdog.progress)
        parameters = nn.utils.parameters_to_vector(run.task.model.parameters()).detach().cpu()
        if is_main():
            torch.save(parameters, weights)
        share = None
        if accelerator.num_processes > 1:
            share = communication_share(run, min(max(steps // (2 * ROUNDS), 1), BLOCK))
        seconds_of_ranks, peaks, shares = zip(*gather_object([(seconds, memory, share)]), strict=True)
        accelerator.end_training()
    return RunResult(
        seconds=max(seconds_of_ranks),
        peak_memory=max(peaks),
        communication=None if share is None else mean(shares),
        metrics=metrics,
        parameters=len(parameters),
    )


def time_steps(run: Trainer, steps: int) -> tuple[float, int]:
    """Trains steps, which all ranks begin together; returns this rank's seconds and the samples of all ranks."""
    run.accelerator.wait_for_everyone()
    _await_device(run.accelerator)
    begun = time.perf_counter()
    units = sum(train_step(run).units for _ in range(steps))
    _await_device(run.accelerator)
    return time.perf_counter() - begun, units // run.task.units_per_item


def communication_share(run: Trainer, block: int) -> float:
    """Share of this rank's step that synchronising gradients costs: 0 to 1 and, by chance, less. Blocks of `block`
    ordinary steps take turns with blocks under `no_sync`, which leave out DDP's all-reduce alone. The difference is the
    exposed communication (docs/compare.md). Without synchronisation the replicas diverge, so this comes last."""
    together, apart = [], []
    for _ in range(ROUNDS):
        for found, context in ((together, nullcontext()), (apart, run.accelerator.no_sync(run.model))):
            with context:
                seconds, n_samples = time_steps(run, block)  # an epoch's last step may be a short one
            found.append(seconds / n_samples)
    return 1 - median(apart) / median(together)


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors took (the fullest GPU's, of several), on the CPU the largest resident set,
    PyTorch's own libraries included."""
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    if sys.platform == "linux":  # ru_maxrss would be that of the parent, where it was larger when it started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


class ReplicatedGPT(nn.Module):
    """A GPT on all GPUs of the machine, by nn.DataParallel, which gathers rows and not sums."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.replicas = nn.DataParallel(model)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """int64 [B, T], int64 [B, T] -> fp32 scalar, or [B, T] with reduction `none`; as `GPT.forward`."""
        losses = self.replicas(tokens, targets, reduction="none")
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def _await_device(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)  # DataParallel's last work too happens here, on the first GPU
