"""One measured run of a comparison: the work of each process, for any task."""

import resource
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from gpt2_ddp.cluster import read_clock
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.state import Scores
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import Supervised
from gpt2_ddp.training.loop import train_step
from gpt2_ddp.training.opening import open_run
from gpt2_ddp.training.run import Trainer, build

WARM_UP = 3  # steps before the clock starts; they train like all others


@dataclass(frozen=True)
class RunResult:
    """Measurements of a run, in plain values that processes can send to each other."""

    seconds: float  # wall time of the timed steps on the slowest rank
    peak_memory: int  # bytes of the largest process until then
    metrics: Scores  # val_loss and others of the final parameters
    parameters: int


def measure(config: TrainingConfig | JobConfig, data_parallel: bool, steps: int, weights: Path) -> RunResult:
    """Trains `WARM_UP` and then `steps` steps, timed, on every rank. Keeps no checkpoint; writes the final parameters
    to the file `weights`, as a vector. With `data_parallel`, one process splits each micro-batch among all GPUs."""
    gpt2 = isinstance(config, TrainingConfig)
    replicas = ReplicatedGPT if gpt2 else nn.DataParallel
    with open_run(config, Pretraining if gpt2 else partial(Supervised, make_job)) as opened:
        run = build(opened, replicas if data_parallel else lambda model: model)
        accelerator = run.accelerator
        run.warm_up()
        time_steps(run, WARM_UP)
        seconds = time_steps(run, steps)
        memory = peak_memory(accelerator.device)
        metrics = run.evaluate(run.watchdog.progress)
        parameters = nn.utils.parameters_to_vector(run.task.model.parameters()).detach().cpu()
        if is_main_process():
            torch.save(parameters, weights)
        seconds_of_ranks, peaks = zip(*gather_object([(seconds, memory)]), strict=True)
        accelerator.end_training()
    return RunResult(max(seconds_of_ranks), max(peaks), metrics, len(parameters))


def time_steps(run: Trainer, steps: int) -> float:
    """Trains steps, which all ranks begin together; returns this rank's seconds. DataParallel's last work, too, is on
    the first GPU."""
    run.accelerator.wait_for_everyone()
    begun = read_clock(run.accelerator.device)
    for _ in range(steps):
        train_step(run)
    return read_clock(run.accelerator.device) - begun


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
