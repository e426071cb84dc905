"""The same training by one process, nn.DataParallel and DDP, measured in turn. Ratios are of medians.

Every run is a set of new processes. Global batch, samples, seed, steps, micro-batch per device and threads per process
are equal for all strategies.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from gpt2_ddp.compare.run import WARM_UP, RunResult, measure
from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.config.tools import CompareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.environment import usable_cores, world_size
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.spawn import start_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import make_output_folder, markdown_table
from gpt2_ddp.project import command_for

Job = TrainingConfig | JobConfig
KINDS: dict[str, tuple[type[TrainingConfig] | type[JobConfig], str]] = {
    "regression": (RegressionConfig, "configs/jobs/regression.yaml"),
    "classifier": (ClassifierConfig, "configs/jobs/mlp_clusters.yaml"),
    "transformer": (TransformerConfig, "configs/jobs/transformer.yaml"),
    "gpt2": (TrainingConfig, "configs/gpt2_30m.yaml"),
}
"""The jobs: the configuration class of each one's script, and its default file."""

TRIAL = 5  # timed steps of the first run, which determines the number of steps for `seconds`
STEPS = (5, 5000)  # least and most steps
WALL = "wall s (min–max)"
BUSY = 0.1  # fraction of the machine's cores in use before the first run above which a note says so


class Strategy(NamedTuple):
    """A strategy on `devices` GPUs or CPU processes; DataParallel uses several GPUs from one process."""

    name: str
    processes: int
    devices: int


@dataclass(frozen=True)
class Row:
    """One strategy for one job: a row of the table."""

    job: str
    way: Strategy
    why_missing: str  # reason why it could not be measured; or empty
    runs: list[RunResult]  # its repeats
    singles: list[RunResult]  # those of one process, each run right before the same repeat of this way
    differences: list[tuple[float, float]]  # `difference` of each repeat from the first single run

    def numbers(self) -> dict[str, Any]:
        """Everything measured, as plain values. Figures are medians of the repeats, except the largest differences and
        the peak memory of the largest process. `communication` is None for one process; its noise is the larger one of
        the median within a repeat and that between repeats."""
        about = {"job": self.job, "way": self.way.name, "processes": self.way.processes, "devices": self.way.devices}
        if self.why_missing:
            return about | {"why_missing": self.why_missing}
        first, times, singles = self.runs[0], [run.seconds for run in self.runs], [run.seconds for run in self.singles]
        seconds = median(times)
        speed_up = median(singles) / seconds
        share = noise = None
        if fractions := [run.communication for run in self.runs if run.communication]:
            shares, noises = zip(*fractions, strict=True)
            share, noise = median(shares), max(median(noises), stdev(shares) if len(shares) > 1 else 0.0)
        norms, largest = zip(*self.differences, strict=True)
        return about | {
            **{name: getattr(first, name) for name in ("parameters", "threads", "steps", "samples", "steps_per_epoch")},
            "seconds": seconds,
            "seconds_of_each_run": times,
            "samples_per_second": first.samples / seconds,
            "speed_up": speed_up,
            "speed_up_of_each_repeat": [one / own for one, own in zip(singles, times, strict=True)],
            "efficiency": speed_up / self.way.devices,
            "peak_memory_bytes": max(max(run.peak_memory) for run in self.runs),
            "peak_memory_bytes_of_each_process": [list(run.peak_memory) for run in self.runs],
            "communication": share,
            "communication_noise": noise,
            "communication_of_each_run": [run.communication and run.communication.share for run in self.runs],
            "metrics": dict(first.metrics),
            "difference_norm": max(norms),
            "difference_largest": max(largest),
        }


def table_row(found: dict[str, Any]) -> dict[str, str]:
    """The row of the table for a row's numbers, by column; a missing strategy has the first three."""
    place = {"job": found["job"], "way": found["way"]}
    if "why_missing" in found:
        return place | {WALL: found["why_missing"]}
    metrics, rate, share = found["metrics"], found["samples_per_second"], found["communication"]
    metric = next((name for name in ("val_accuracy", "val_loss") if name in metrics), None)
    communication = "–"
    if share is not None:
        noise = found["communication_noise"]
        communication = (f"{share:.1%} " if share > noise else "below the noise of ") + f"± {noise:.1%}"
    return place | {
        WALL: _with_extremes(found["seconds"], found["seconds_of_each_run"], "{:.3g}"),
        "samples/s": f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}",
        "speed-up (min–max)": _with_extremes(found["speed_up"], found["speed_up_of_each_repeat"], "{:.2f}"),
        "efficiency": f"{found['efficiency']:.0%}",
        "peak MB per process": f"{found['peak_memory_bytes'] / 1e6:,.0f}",
        "communication": communication,
        "final metric": f"{metric} {metrics[metric]:.4f}" if metric else "–",
        "Δ parameters / norm": f"{found['difference_norm']:.1e}",
        "largest Δ": f"{found['difference_largest']:.1e}",
    }


class Machine(NamedTuple):
    """Resources of the runs. `gpus`: 0 on the CPU; `cores`: usable physical cores."""

    device: str
    gpus: int
    cores: int

    def ways(self, processes: tuple[int, ...]) -> list[tuple[Strategy, str]]:
        """All rows of a job, the single process first, each with the reason why it cannot be measured here, or ''."""
        found = [Strategy("single", 1, 1), Strategy("DataParallel", 1, max(self.gpus, 2))]
        found += [Strategy(f"DDP-{n}", n, n) for n in dict.fromkeys(processes)]

        def reason(way: Strategy) -> str:
            lacks = way.devices > self.gpus and (self.device == "cuda" or way.name == "DataParallel")
            return f"needs {way.devices} GPUs, this comparison has {self.gpus}" if lacks else ""

        return [(way, reason(way)) for way in found]


def compare(config: CompareConfig) -> list[Row]:
    """The command: measures, and prints the table. After each job, writes table and numbers to `output`."""
    if world_size() > 1:
        hint = f"the comparison starts its own processes: run `{command_for('compare_parallel')}` without a launcher"
        raise UserError("processes", world_size(), hint)
    machine = find_machine(config.device)
    output = make_output_folder(config.output)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)  # the processes inherit it
    rows: list[Row] = []
    with TemporaryDirectory(prefix="compare-") as folder:
        # all user errors before any work
        jobs = [read_job(word, config, machine, Path(folder)) for word in config.jobs]
        busy = busy_cores()
        for number, (name, job) in enumerate(jobs, 1):
            rows += compare_job(name, job, config, machine, Path(folder))
            notes = find_notes(config, machine, busy)
            if left := [name for name, _ in jobs[number:]]:
                notes.insert(0, f"not finished: without {', '.join(left)}")
            notes += [*_about_jobs(rows), "next: docs/compare.md explains the columns, docs/ddp-lab.md common mistakes"]
            found = {
                "machine": {**machine._asdict(), "torch": torch.__version__},
                "settings": config.model_dump(mode="json"),
                "busy_cores_before": busy,
                "notes": notes,
                "rows": [row.numbers() for row in rows],
            }
            write_atomically(output / "compare.md", as_markdown(rows, notes) + "\n")
            write_atomically(output / "compare.json", json.dumps(found, indent=1) + "\n")
    print((output / "compare.md").read_text(encoding="utf-8"), end="")
    return rows


def busy_cores() -> float:
    """Cores that other programs keep busy now."""
    return psutil.cpu_percent(interval=1) / 100 * (os.cpu_count() or 1)


def find_machine(device: str) -> Machine:
    """The machine to run on. Raises: UserError if the device does not exist."""
    on_gpus = pick_device(device).type == "cuda"
    return Machine("cuda" if on_gpus else "cpu", torch.cuda.device_count() if on_gpus else 0, usable_cores())


def read_job(word: str, config: CompareConfig, machine: Machine, folder: Path) -> tuple[str, Job]:
    """The name and configuration of a job, KIND or KIND:FILE, changed for a comparison. Raises: UserError."""
    kind, _, file = word.partition(":")
    if kind not in KINDS:
        raise UserError("jobs", word, f"is not a job; use {', '.join(KINDS)}, with or without :CONFIGURATION")
    command, default = KINDS[kind]
    changes = {"output_dir": str(folder / "runs"), "fresh": False, "tracking.log_with": (), "train.compile": "off"}
    changes |= {"train.mixed_precision": config.mixed_precision, "train.device": machine.device}
    if kind != "gpt2":
        changes |= {"scale_with_processes": False, "launch.processes": None, "launch.threads": None}
    job = resolve(command, [file or default], changes)  # not compiled: nn.DataParallel cannot
    if isinstance(job, TrainingConfig):
        size, field = job.global_batch_windows, "train.global_batch_tokens / model.block_size"
    else:
        size, field = job.train.global_batch_size, "train.global_batch_size"
    for n in config.processes:
        if size % n:
            hint = f"does not divide the global batch of {word}, {size} ({field}); choose another number"
            raise UserError("processes", n, hint)
    return Path(file or default).stem, job


def compare_job(name: str, job: Job, config: CompareConfig, machine: Machine, folder: Path) -> list[Row]:
    """Measures every strategy of one job, `repeats` times, interleaved."""
    singles: list[RunResult] = []
    rows = [Row(name, way, reason, [], singles, []) for way, reason in machine.ways(config.processes)]
    rows[0] = replace(rows[0], runs=singles)
    steps = config.steps or steps_for(name, job, config, rows[0].way, folder)
    reference, weights = folder / "reference.safetensors", folder / "weights.safetensors"
    for repeat, row in product(range(config.repeats), [row for row in rows if not row.why_missing]):
        run = run_way(f"{name}-{row.way.name}-{repeat}", job, config, row.way, steps, weights)
        if not singles:
            shutil.copyfile(weights, reference)
        row.runs.append(run)
        row.differences.append(difference(weights, reference))
        progress = f"{name}  {row.way.name}  {repeat + 1}/{config.repeats}: {run.seconds:.3g} s for {steps} steps"
        print(progress, file=sys.stderr, flush=True)
    return rows


def difference(file: Path, reference: Path) -> tuple[float, float]:
    """Relative norm and largest absolute value of the difference between two safetensors files' parameters."""
    found = (load_file(one) for one in (file, reference))
    one, other = (torch.cat([parameters[name].flatten() for name in sorted(parameters)]) for parameters in found)
    apart, whole = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in (one - other, other))
    return (apart / whole).item(), (one - other).abs().max().item()


def find_notes(config: CompareConfig, machine: Machine, busy: float) -> list[str]:
    """The notes below the table, its limits first."""
    notes, threads = [], f"{config.threads} thread{'s' * (config.threads > 1)}"
    for n in config.processes:
        if machine.device == "cpu" and n * config.threads > machine.cores:
            wanted = f"{n} processes with {threads} each share {machine.cores:g}"
            notes.append(f"DDP-{n}: too few cores for a full speed-up: {wanted}")
    if busy > BUSY * (os.cpu_count() or 1):
        notes.append(f"other programs kept {busy:.1f} cores busy at the start: measure again on an idle machine")
    if config.mixed_precision != "no":
        notes.append(f"in {config.mixed_precision}, rounding makes the strategies' parameters differ")
    where = f"{machine.gpus} GPUs" if machine.gpus else f"CPU, {machine.cores:g} physical cores"
    medians = f"medians of {config.repeats} interleaved runs, each with new processes"
    return [
        *notes,
        f"{where}; {threads} per process in all rows",
        f"{medians}; start, data, warm-up and evaluation are not in the wall time",
        "communication: time saved per step without gradient synchronisation; includes waiting for other ranks",
    ]


def _about_jobs(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row.way.name == "single":
            run = row.runs[0]
            samples = f"{run.samples / run.steps:.3g} samples per step"
            epochs = (WARM_UP + run.steps) / run.steps_per_epoch
            yield f"{row.job}: {run.parameters:,} parameters, {samples}, {run.steps} steps timed, {epochs:.3g} epochs"


def run_way(name: str, job: Job, config: CompareConfig, way: Strategy, steps: int, weights: Path) -> RunResult:
    """One run of a job with one strategy, for `steps` steps from the same weights, in new processes."""
    train: dict[str, object] = {}
    size, data_parallel = job.train.micro_batch_size, way.processes < way.devices
    if data_parallel and size != "auto":  # each GPU's part of a micro-batch is as large as with the other strategies
        train["micro_batch_size"] = size * way.devices
    job = job.model_copy(update={"run_name": name, "train": job.train.model_copy(update=train)})
    return start_processes(measure, way.processes, job, data_parallel, config.threads, steps, weights)


def steps_for(name: str, job: Job, config: CompareConfig, single: Strategy, folder: Path) -> int:
    """Number of steps that take one process about `seconds`, or `epochs`. A few steps of a small model are too noisy,
    so trials grow to a tenth of the steps."""
    steps, wanted = 0, 10 * TRIAL
    while 10 * steps < wanted:
        steps = max(ceil(wanted / 10), 4 * steps)
        trial = run_way(f"{name}-trial-{steps}", job, config, single, steps, folder / "trial.safetensors")
        if config.epochs:
            return max(config.epochs * trial.steps_per_epoch - WARM_UP, 1)
        wanted = min(max(round(config.seconds / trial.seconds * steps), STEPS[0]), STEPS[1])
    return wanted


def _with_extremes(value: float, readings: Sequence[float], layout: str) -> str:
    """A figure, with the least and the largest of its readings if they differ."""
    least, most = min(readings), max(readings)
    return layout.format(value) + (f" ({layout.format(least)}–{layout.format(most)})" if least < most else "")


def as_markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table, and the notes below it. The first row is that of one process, which is never missing."""
    cells = [table_row(row.numbers()) for row in rows]
    lines = [[line.get(column, "–") for column in cells[0]] for line in cells]
    return "\n".join([markdown_table(list(cells[0]), lines), "", *[f"- {note}" for note in notes]])
