"""The same training by one process, nn.DataParallel and DDP, measured in turn.

Every run is a set of new processes. Global batch, samples, seed, steps, micro-batch per device and
threads per process are equal for all strategies.
"""

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from gpt2_ddp.cluster import read_clock
from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.saved import CONFIGS
from gpt2_ddp.config.tools import CompareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.spawn import refuse_launcher, start_processes
from gpt2_ddp.errors import UserError, is_main_process
from gpt2_ddp.files import write_atomically
from gpt2_ddp.lab.experiment import distance
from gpt2_ddp.output import make_output_folder, markdown_table, write_json
from gpt2_ddp.state import Scores
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import Supervised
from gpt2_ddp.training.loop import train_step
from gpt2_ddp.training.start import Trainer, build, open_run

Job = TrainingConfig | JobConfig
DEFAULTS = {
    "regression": ("configs/jobs/regression.yaml", 5000),
    "classifier": ("configs/jobs/mlp_clusters.yaml", 100),
    "transformer": ("configs/jobs/transformer.yaml", 2000),
    "gpt2": ("configs/gpt2_30m.yaml", 20),
}
"""The jobs, and the default configuration and number of timed steps of each."""

WARM_UP = 3  # steps before the clock starts; they train like all others
COLUMNS = [
    "job",
    "way",
    "wall s",
    "speed-up",
    "peak MB per process",
    "final metric",
    "Δ parameters",
]
Row = dict[str, Any]  # the numbers of one strategy for one job


class Strategy(NamedTuple):
    """A strategy on `devices` GPUs or CPU processes; DataParallel uses several GPUs from one
    process."""

    name: str
    processes: int
    devices: int


@dataclass(frozen=True)
class RunResult:
    """Measurements of a run, in plain values that processes can send to each other."""

    seconds: float  # wall time of the timed steps on the slowest rank
    peak_memory: int  # bytes of the largest process until then
    metrics: Scores  # val_loss and others of the final parameters
    parameters: int


def compare(config: CompareConfig) -> list[Row]:
    """The command: measures, and prints the table. After each job, writes table and numbers to
    `output`."""
    refuse_launcher()
    device = pick_device(config.device).type
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    output = make_output_folder(config.output)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)  # the processes inherit it
    rows: list[Row] = []
    machine = {"device": device, "gpus": gpus, "torch": torch.__version__}
    with TemporaryDirectory(prefix="compare-") as folder:
        # all user errors before any work
        jobs = [read_job(word, config, device, Path(folder)) for word in config.jobs]
        strategies = ways(config.processes, gpus)
        for name, job, steps in jobs:
            rows += compare_job(name, job, steps, config.repeats, strategies, Path(folder))
            write_atomically(output / "compare.md", as_markdown(rows) + "\n")
            settings = config.model_dump(mode="json")
            record = {"machine": machine, "settings": settings, "rows": rows}
            write_json(output / "compare.json", record)
    print(as_markdown(rows))
    return rows


def read_job(word: str, config: CompareConfig, device: str, folder: Path) -> tuple[str, Job, int]:
    """The name, configuration and steps of a job, KIND or KIND:FILE, changed for a comparison.
    Raises: UserError."""
    kind, _, file = word.partition(":")
    if kind not in DEFAULTS:
        hint = f"is not a job; use {', '.join(DEFAULTS)}, with or without :CONFIGURATION"
        raise UserError("jobs", word, hint)
    default, steps = DEFAULTS[kind]
    file = file or default
    # not compiled: nn.DataParallel cannot
    changes = {"output_dir": str(folder / "runs"), "tracking.log_with": (), "train.compile": "off"}
    changes |= {"train.mixed_precision": config.mixed_precision, "train.device": device}
    if kind != "gpt2":
        changes |= {"launch.processes": None, "launch.threads": None}
    job: Any = resolve(CONFIGS[kind], [file], changes)
    return Path(file).stem, job, config.steps or steps


def ways(processes: Sequence[int], gpus: int) -> list[Strategy]:
    """The strategies that this machine can measure, the single process first; a note names each
    other one."""
    measured = [Strategy("single", 1, 1)]
    data_parallel = Strategy("DataParallel", 1, max(gpus, 2))
    for way in [data_parallel, *(Strategy(f"DDP-{n}", n, n) for n in processes)]:
        if way.devices > gpus and (gpus or way.processes == 1):
            print(f"note: {way.name} is not measured: it needs {way.devices} GPUs", file=sys.stderr)
        else:
            measured.append(way)
    return measured


def compare_job(
    name: str, job: Job, steps: int, repeats: int, strategies: Sequence[Strategy], folder: Path
) -> list[Row]:
    """Measures every strategy of one job, `repeats` times, interleaved. The first is the single
    process, to which the others are compared."""
    runs: dict[Strategy, list[RunResult]] = {way: [] for way in strategies}
    differences = dict.fromkeys(runs, 0.0)
    reference = folder / f"{name}.pt"
    weights = folder / "weights.pt"
    for repeat, way in product(range(repeats), runs):
        run = run_way(f"{name}-{way.name}-{repeat}", job, way, steps, weights)
        if not reference.exists():
            shutil.copyfile(weights, reference)
        runs[way].append(run)
        differences[way] = max(differences[way], difference(weights, reference))
        measured = f"{run.seconds:.3g} s for {steps} steps"
        print(f"{name}  {way.name}  {repeat + 1}/{repeats}: {measured}", file=sys.stderr)
    singles = runs[strategies[0]]
    return [
        {"job": name, "way": way.name} | numbers(results, singles, steps, differences[way])
        for way, results in runs.items()
    ]


def numbers(runs: list[RunResult], singles: list[RunResult], steps: int, difference: float) -> Row:
    """Everything measured. Lists have a value for each repeat."""
    return {
        "parameters": runs[0].parameters,
        "steps": steps,
        "seconds": [run.seconds for run in runs],
        "speed_up": [
            single.seconds / run.seconds for single, run in zip(singles, runs, strict=True)
        ],
        "peak_memory_bytes": max(run.peak_memory for run in runs),
        "metrics": dict(runs[0].metrics),
        "difference": difference,
    }


def difference(file: Path, reference: Path) -> float:
    """Norm of the difference between two files' vectors of parameters, relative to the reference's
    norm."""
    return distance(torch.load(file), torch.load(reference))


def run_way(name: str, job: Job, way: Strategy, steps: int, weights: Path) -> RunResult:
    """One run of a job with one strategy, for `steps` steps from the same weights, in new
    processes."""
    train: dict[str, object] = {}
    data_parallel = way.processes < way.devices
    if data_parallel:  # each GPU's part of a micro-batch is as large as with the other strategies
        train["micro_batch_size"] = job.train.micro_batch_size * way.devices
    job = job.model_copy(update={"run_name": name, "train": job.train.model_copy(update=train)})
    return start_processes(measure, way.processes, job, data_parallel, steps, weights)


def as_markdown(rows: Sequence[Row]) -> str:
    """The table. A figure is the median of the repeats, with the least and the largest."""
    lines = []
    for row in rows:
        seconds = row["seconds"]
        speed_up = row["speed_up"]
        metrics = row["metrics"]
        metric = "val_accuracy" if "val_accuracy" in metrics else "val_loss"
        lines.append([
            row["job"],
            row["way"],
            f"{median(seconds):.3g} ({min(seconds):.3g}–{max(seconds):.3g})",
            f"{median(speed_up):.2f} ({min(speed_up):.2f}–{max(speed_up):.2f})",
            f"{row['peak_memory_bytes'] / 1e6:,.0f}",
            f"{metric} {metrics[metric]:.4f}" if metric in metrics else "–",
            f"{row['difference']:.1e}",
        ])  # fmt: skip
    return markdown_table(COLUMNS, lines)


def measure(
    config: TrainingConfig | JobConfig, data_parallel: bool, steps: int, weights: Path
) -> RunResult:
    """Trains `WARM_UP` and then `steps` steps, timed, on every rank. Keeps no checkpoint; writes
    the final parameters to the file `weights`, as a vector. With `data_parallel`, one process
    splits each micro-batch among all GPUs."""
    if isinstance(config, TrainingConfig):
        replicas = ReplicatedGPT
        opened = open_run(config, Pretraining)
    else:
        replicas = nn.DataParallel
        opened = open_run(config, partial(Supervised, make_job))
    with opened as run:
        trainer = build(run, replicas if data_parallel else lambda model: model)
        accelerator = run.accelerator
        trainer.warm_up()
        time_steps(trainer, WARM_UP)
        seconds = time_steps(trainer, steps)
        memory = peak_memory(accelerator.device)
        metrics = trainer.evaluate(run.watchdog.progress)
        parameters = nn.utils.parameters_to_vector(run.task.model.parameters()).detach().cpu()
        if is_main_process():
            torch.save(parameters, weights)
        seconds_of_ranks, peaks = zip(*gather_object([(seconds, memory)]), strict=True)
        accelerator.end_training()
    return RunResult(max(seconds_of_ranks), max(peaks), metrics, len(parameters))


def time_steps(trainer: Trainer, steps: int) -> float:
    """Trains steps, which all ranks begin together; returns this rank's seconds. DataParallel's
    last work, too, is on the first GPU."""
    accelerator = trainer.run.accelerator
    accelerator.wait_for_everyone()
    begun = read_clock(accelerator.device)
    for _ in range(steps):
        train_step(trainer)
    return read_clock(accelerator.device) - begun


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors took (the fullest GPU's, of several), on the CPU the
    largest resident set, PyTorch's own libraries included."""
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    # ru_maxrss would be that of the parent, where it was larger when it started this one
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


class ReplicatedGPT(nn.Module):
    """A GPT on all GPUs of the machine, by nn.DataParallel, which gathers rows and not sums."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.replicas = nn.DataParallel(model)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """int64 [B, T], int64 [B, T] -> fp32 scalar, or [B, T] with reduction `none`; as
        `GPT.forward`."""
        losses: Tensor = self.replicas(tokens, targets, reduction="none")
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.mean()
