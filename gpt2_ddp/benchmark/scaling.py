"""DDP over several processes against one: the same global batch (strong), and as much for each process (weak)."""

import os
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from gpt2_ddp.benchmark.sides import Unavailable
from gpt2_ddp.benchmark.step import GPT2_IDS, precisions, random_tokens
from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.compare.compare import find_machine, read_job, run_way, steps_for
from gpt2_ddp.compare.run import CommFraction, RunResult
from gpt2_ddp.compare.table import Strategy, share_words
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.compare import CompareConfig
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import TrainingConfig

PRESET = "configs/gpt2_30m.yaml"


def check(config: BenchmarkConfig) -> None:
    """Raises: Unavailable where there is but one core or GPU; UserError where the batch cannot be shared out."""
    if not _processes(config):
        raise Unavailable("needs two GPUs, or two cores and --device cpu")
    _job(config, Path("/"))


def measure(config: BenchmarkConfig) -> Table:
    """Samples per second, by the clock on the wall. Each turn is of fresh processes (`compare.run.measure`)."""
    cases, notes = [], []
    with TemporaryDirectory(prefix="benchmark-") as folder:
        name, job, chosen = _job(config, Path(folder))
        random_tokens(Path(job.data.paths[0]), _ids(config))
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # the processes inherit it
        steps = steps_for(name, job, chosen, Strategy("single", 1, 1), Path(folder))
        for n in _processes(config):
            tokens = job.train.global_batch_tokens * n
            more = job.model_copy(update={"train": job.train.model_copy(update={"global_batch_tokens": tokens})})
            kinds = {"one process": (job, 1), "strong": (job, n), "weak": (more, n)}
            sides = {
                kind: partial(
                    run_way, f"{kind[:4]}-{n}", of, chosen, Strategy(kind, k, k), steps, Path(folder, "weights")
                )
                for kind, (of, k) in kinds.items()
            }
            found = interleave(sides, config.repeats, warm_up=0)
            rates = {kind: [reading.samples / reading.seconds for reading in of] for kind, of in found.items()}
            for kind in ("strong", "weak"):
                figures = {OURS: rates[kind], "one process": rates["one process"]}
                case = Case(f"{name}, {n} processes, {kind}", "samples/s", figures)
                cases.append(case)
                notes.append(_note(case, n, found[kind]))
    return Table("scaling", cases, config.model_dump(mode="json"), notes)


def _note(case: Case, n: int, readings: list[RunResult]) -> str:
    efficiency = median(case.ratios("one process")) / n
    shares = [reading.communication for reading in readings if reading.communication]
    noise = max(share.noise for share in shares)
    words = share_words(CommFraction(median(share.share for share in shares), noise))
    return f"{case.what}: efficiency {efficiency:.1%}; exposed communication {words} of a step"


def _ids(config: BenchmarkConfig) -> int:
    """Of the tokenizer that the preset trains, as a head for GPT-2's would be half of a small model; else GPT-2's."""
    prepared = load(TrainingConfig, ["--config", config.preset or PRESET]).data.prepare
    return (prepared and load(PrepareConfig, ["--config", prepared]).vocab_size) or GPT2_IDS


def _processes(config: BenchmarkConfig) -> list[int]:
    machine = find_machine(config.device)
    most = machine.gpus or int(machine.cores) // config.threads
    return [n for n in (2, 4, 8) if n <= most]


def _job(config: BenchmarkConfig, folder: Path) -> tuple[str, TrainingConfig, CompareConfig]:
    precision = precisions(config)[0]
    machine = find_machine(config.device)
    processes = tuple(_processes(config))
    chosen = CompareConfig(
        processes=processes, threads=config.threads, seconds=10 * config.seconds, mixed_precision=precision
    )
    name, job = read_job(f"gpt2:{config.preset or PRESET}", chosen, machine, folder)
    assert isinstance(job, TrainingConfig)
    data = job.data.model_copy(update={"path": str(folder / "data"), "prepare": None})
    return name, job.model_copy(update={"data": data}), chosen
