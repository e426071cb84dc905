"""The same training by one process, nn.DataParallel and DDP: runs them in turn, and says what was measured.

Every run is a set of fresh processes. Global batch, samples, seed, steps, micro-batch per device and threads per
process are the same for every way.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from safetensors.torch import load_file

from gpt2_ddp.compare.run import WARM_UP, RunResult, measure
from gpt2_ddp.compare.table import Difference, Row, Strategy, as_markdown, draw
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, LaunchConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.config.tools import CompareConfig, PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import MANIFEST
from gpt2_ddp.distributed.environment import usable_cores, world_size
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.spawn import start_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import make_output_folder
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.project import command_for

Job = TrainingConfig | JobConfig
KINDS: dict[str, tuple[type[TrainingConfig] | type[JobConfig], str]] = {
    "regression": (RegressionConfig, "configs/jobs/regression.yaml"),
    "classifier": (ClassifierConfig, "configs/jobs/mlp_clusters.yaml"),
    "transformer": (TransformerConfig, "configs/jobs/transformer.yaml"),
    "gpt2": (TrainingConfig, "configs/gpt2_30m.yaml"),
}
"""The jobs: the configuration of each one's script, and the file that stands in when none is named."""

TRIAL = 5
"""Timed steps of the first run that decides how many steps `seconds` are; the next has a tenth of those at least."""
STEPS = (5, 5000)
"""The fewest and the most steps that they may decide for."""
BUSY = 0.1
"""Share of the machine's cores in use before the first run, above which it is not idle."""


@dataclass(frozen=True)
class Machine:
    """What the runs have: `gpus` is 0 where they run on the CPU, `cores` are physical ones that may be used."""

    gpus: int
    cores: int
    device: str

    def ways(self, processes: tuple[int, ...]) -> list[tuple[Strategy, str]]:
        """All rows of a job, the single process first, each with the reason why it cannot be measured here, or ''."""
        here, lacking = torch.cuda.device_count(), "needs {} GPUs, this machine has {}"
        reason = "needs GPUs, and device is cpu" if here >= 2 and not self.gpus else lacking.format(2, here)
        replicas = Strategy("DataParallel", 1, max(self.gpus, 2)), "" if self.gpus >= 2 else reason
        found = [(Strategy("single", 1, 1), ""), replicas]
        for n in processes:
            reason = lacking.format(n, self.gpus) if self.device == "cuda" and n > self.gpus else ""
            found.append((Strategy(f"DDP-{n}", n, n), reason))
        return found


def compare(config: CompareConfig) -> list[Row]:
    """The command: measures, prints the table and writes it, its numbers and its bars to `output`, after each job anew.

    Raises:
        UserError: for whatever the user has to mend.
    """
    if world_size() > 1:
        hint = f"the comparison starts its own processes: `{command_for('compare_parallel')}`, without a launcher"
        raise UserError("processes", world_size(), hint)
    machine = find_machine(config.device)
    output = make_output_folder(config.output)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)  # the processes inherit it
    rows: list[Row] = []
    with TemporaryDirectory(prefix="compare-") as folder:
        jobs = read_jobs(config, machine, Path(folder))  # all mistakes before any work
        busy = check_idle(config.busy_ok)
        for number, (name, job) in enumerate(jobs, 1):
            rows += compare_job(name, job, config, machine, Path(folder))
            notes = find_notes(config, machine, busy)
            if left := [name for name, _ in jobs[number:]]:
                notes.insert(0, f"not finished: without {', '.join(left)}")
            write(output, config, machine, rows, [*notes, *_about_jobs(rows)], busy)
    print((output / "compare.md").read_text(encoding="utf-8"), end="")
    return rows


def check_idle(busy_ok: bool) -> float:
    """Cores that other programs keep busy just now. Raises: UserError where they are too many, unless that is fine."""
    cores = os.cpu_count() or 1
    busy = psutil.cpu_percent(interval=1) / 100 * cores
    if busy > BUSY * cores and not busy_ok:
        hint = "end them, or say --busy_ok to measure all the same"
        raise UserError("busy_ok", "false", f"other programs keep {busy:.1f} of {cores} cores busy: {hint}")
    return busy


def write(
    output: Path, config: CompareConfig, machine: Machine, rows: list[Row], notes: list[str], busy: float
) -> None:
    """What was measured so far, as table, numbers and bars."""
    found = {
        "machine": {"device": machine.device, "gpus": machine.gpus, "cores": machine.cores, "torch": torch.__version__},
        "settings": config.model_dump(mode="json"),
        "busy_cores_before": busy,
        "notes": notes,
        "rows": [row.numbers() for row in rows],
    }
    write_atomically(output / "compare.md", as_markdown(rows, notes) + "\n")
    write_atomically(output / "compare.json", json.dumps(found, indent=1) + "\n")
    write_atomically(output / "compare.png", draw(rows))


def find_machine(device: str) -> Machine:
    """What there is to run on. Raises: UserError when the device is not there."""
    kind = pick_device(device).type
    cores = usable_cores()
    return Machine(torch.cuda.device_count(), cores, "cuda") if kind == "cuda" else Machine(0, cores, "cpu")


def read_jobs(config: CompareConfig, machine: Machine, folder: Path) -> list[tuple[str, Job]]:
    """Every job's name and configuration (`read_job`), and `data_path` given to the one that reads data.

    Raises:
        UserError: as `read_job`; or there is not exactly one job for `data_path`.
    """
    jobs = [read_job(word, config, machine, folder) for word in config.jobs]
    if config.data_path is None:
        return jobs
    readers = [name for name, job in jobs if _reads_data(job)]
    if len(readers) != 1:
        hint = f"is for one job that reads images or tokens, and of those named do: {', '.join(readers) or 'none'}"
        raise UserError("data_path", config.data_path, hint)
    return [(name, _with_path(job, config.data_path) if name in readers else job) for name, job in jobs]


def _reads_data(job: Job) -> bool:
    return isinstance(job, TrainingConfig) or (isinstance(job, ClassifierConfig) and job.data.name != "clusters")


def _with_path(job: Job, path: str) -> Job:
    assert isinstance(job, TrainingConfig | ClassifierConfig), "others read nothing"
    own = {"path": path} | ({"prepare": None} if isinstance(job, TrainingConfig) else {})
    return job.model_copy(update={"data": job.data.model_copy(update=own)})


def read_job(word: str, config: CompareConfig, machine: Machine, folder: Path) -> tuple[str, Job]:
    """The name and configuration of a job given as KIND or KIND:FILE, with what a comparison wants otherwise.

    Raises:
        UserError: there is no such job, its file is wrong, or its batch cannot be shared out.
    """
    kind, _, file = word.partition(":")
    if kind not in KINDS:
        raise UserError("jobs", word, f"is no job; name {', '.join(KINDS)}, with a configuration after a colon")
    command, default = KINDS[kind]
    job = load(command, ["--config", file or default])
    train: dict[str, object] = {"mixed_precision": config.mixed_precision, "device": machine.device}
    train["compile"] = "off"  # nn.DataParallel cannot
    changes: dict[str, object] = {"output_dir": str(folder / "runs"), "fresh": False}
    changes["tracking"] = job.tracking.model_copy(update={"log_with": ()})
    if isinstance(job, TrainingConfig):
        size, field = job.global_batch_windows, "train.global_batch_tokens / model.block_size"
    else:
        size, field = job.train.global_batch_size, "train.global_batch_size"
        changes |= {"scale_with_processes": False, "launch": LaunchConfig(backend=job.launch.backend)}
    for n in config.processes:
        if size % n and not config.weak:
            hint = f"does not divide the global batch of {word}, {size} ({field}); name processes that do"
            raise UserError("processes", n, hint)
    changes["train"] = job.train.model_copy(update=train)
    return Path(file or default).stem, job.model_copy(update=changes)


def with_data(job: Job, folder: Path) -> Job:
    """The job with tokens to train on: those that are not there yet are prepared in the comparison's own folder."""
    if not isinstance(job, TrainingConfig) or not job.data.prepare or (Path(job.data.paths[0]) / MANIFEST).exists():
        return job
    path = str(folder / "data" / Path(job.data.prepare).stem)
    prepare(load(PrepareConfig, ["--config", job.data.prepare, "--output", path]))
    return _with_path(job, path)


def compare_job(name: str, job: Job, config: CompareConfig, machine: Machine, folder: Path) -> Iterator[Row]:
    """Measures every way of one job, `repeats` times in turn. Raises: UserError, as the job does."""
    job = with_data(job, folder)
    ways = machine.ways(config.processes)
    able = [way for way, reason in ways if not reason]
    reference = folder / "reference.safetensors"
    steps = config.steps or steps_for(name, job, config, able[0], folder)
    runs: dict[Strategy, list[RunResult]] = {way: [] for way in able}
    differences: dict[Strategy, list[Difference]] = {way: [] for way in able}
    for repeat in range(config.repeats):
        for way in able:
            weights = folder / "weights.safetensors"
            run = run_way(f"{name}-{way.name}-{repeat}", job, config, way, steps, weights)
            if not reference.exists():
                weights.replace(reference)
                weights = reference
            runs[way].append(run)
            differences[way].append(difference(weights, reference))
            progress = f"{name}  {way.name}  {repeat + 1}/{config.repeats}: {run.seconds:.3g} s for {steps} steps"
            print(progress, file=sys.stderr, flush=True)
    reference.unlink()
    for way, reason in ways:
        yield Row(name, way, reason, runs.get(way, []), runs[able[0]], differences.get(way, []))


def difference(file: Path, reference: Path) -> Difference:
    """How far the parameters in one safetensors file are from those in another."""
    one, other = load_file(file), load_file(reference)
    assert one.keys() == other.keys(), "both are of the same model"
    apart = [(one[name] - other[name]).flatten() for name in other]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in apart]
    whole = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in other.values()]
    relative = torch.stack(norms).norm() / torch.stack(whole).norm()
    return Difference(relative.item(), max(part.abs().max().item() for part in apart))


def find_notes(config: CompareConfig, machine: Machine, busy: float) -> list[str]:
    """What a reader of the table has to know, first of all where it is not what it seems."""
    notes, threads = [], f"{config.threads} thread{'s' * (config.threads > 1)}"
    for n in config.processes if machine.device == "cpu" else ():
        if n * config.threads > machine.cores:
            wanted = f"{n} processes with {threads} each share {machine.cores:g}"
            notes.append(f"DDP-{n}: too few cores: {wanted}, so it cannot show its speed-up")
    if busy > BUSY * (os.cpu_count() or 1):
        notes.append(f"other programs kept {busy:.1f} cores busy at the start: measure again on an idle machine")
    if config.mixed_precision != "no":
        notes.append(f"in {config.mixed_precision} the ways' parameters part through rounding")
    if config.weak:
        notes.append("weak scaling: the global batch grows with the processes, and so do the parameters' differences")
    where = f"{machine.gpus} GPUs" if machine.gpus else f"CPU, {machine.cores:g} physical cores"
    return [
        *notes,
        f"{where}; {threads} per process, in every row alike",
        f"medians of {config.repeats} interleaved runs, each of fresh processes; start, data, warm-up and evaluation "
        "are not in the wall time",
        "communication: what a step gains when gradients are not synchronised, waiting for other ranks included",
    ]


def _about_jobs(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row.way.name == "single":
            run = row.runs[0]
            samples = f"{run.samples / run.steps:.3g} samples per step"
            epochs = (WARM_UP + run.steps) / run.steps_per_epoch
            yield f"{row.job}: {run.parameters:,} parameters, {samples}, {run.steps} steps timed, {epochs:.3g} epochs"


def run_way(name: str, job: Job, config: CompareConfig, way: Strategy, steps: int, weights: Path) -> RunResult:
    """One run of a job, in fresh processes. Raises: UserError, as the job does."""
    train: dict[str, object] = {}
    size = job.train.micro_batch_size
    if way.data_parallel and size != "auto":  # each GPU's share of a micro-batch is as large as in the other ways
        train["micro_batch_size"] = size * way.devices
    if config.weak:
        field = "global_batch_tokens" if isinstance(job, TrainingConfig) else "global_batch_size"
        train[field] = getattr(job.train, field) * way.devices
    job = job.model_copy(update={"run_name": name, "train": job.train.model_copy(update=train)})
    return start_processes(measure, way.processes, job, way.data_parallel, config.threads, steps, weights)


def steps_for(name: str, job: Job, config: CompareConfig, single: Strategy, folder: Path) -> int:
    """How many steps take one process about `seconds`, or end with the last of `epochs`.

    A few steps of a small model take as long as chance has it, so trials grow to a tenth of the steps.
    """
    steps, wanted = 0, 10 * TRIAL
    while 10 * steps < wanted:
        steps = max(ceil(wanted / 10), 4 * steps)
        trial = run_way(f"{name}-trial-{steps}", job, config, single, steps, folder / "trial.safetensors")
        if config.epochs:
            return max(config.epochs * trial.steps_per_epoch - WARM_UP, 1)
        wanted = min(max(round(config.seconds / trial.seconds * steps), STEPS[0]), STEPS[1])
    return wanted
