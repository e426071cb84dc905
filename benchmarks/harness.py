"""The benchmark harness: measurements in turns; tables with the ratios of each turn."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.collect_env import get_env_info

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.cluster import read_clock
from gpt2_ddp.compare import peak_memory
from gpt2_ddp.distributed.spawn import start_processes
from gpt2_ddp.output import make_output_folder, markdown_table, write_json
from gpt2_ddp.project import git_commit

T = TypeVar("T")

OURS = "ours"
HEADER = ["what", "unit", "contender", "figure", "ours is better by"]
WARM_UP = 2  # steps before the clock starts; the first one loads libraries and compiles graphs
Done = Callable[[], object]  # a contender calls it after each of its steps, which never end
Contender = Callable[[Done], None]  # it is pickled


class StepTiming(NamedTuple):
    """One turn."""

    seconds: float  # per step
    memory: int  # peak of the process, in bytes (`peak_memory`)


class Case(NamedTuple):
    """One measured quantity: `figures` of each contender, one per turn; more is better for rates
    only."""

    what: str
    unit: str
    figures: dict[str, list[float]]
    more_is_better: bool = True

    def ratios(self, baseline: str) -> list[float]:
        """How many times better ours was than the baseline in each turn; empty where ours was not
        measured."""
        pairs = zip(self.figures.get(OURS, []), self.figures[baseline], strict=False)
        return [
            ours / other if self.more_is_better else other / ours
            for ours, other in pairs
            if ours and other
        ]

    def lines(self) -> Iterator[list[str]]:
        """Rows of the table below `HEADER`, one per contender."""
        for name, figures in self.figures.items():
            ratios = self.ratios(name) if name != OURS else []
            spread = f"{median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})" if ratios else ""
            yield [self.what, self.unit, name, f"{median(figures):,.4g}", spread]


def run_benchmarks(config: BenchmarkConfig) -> list[list[Case]]:
    """The command: the cases of each benchmark, which is a module with `measure(config)`. Raises:
    UserError."""
    output = make_output_folder(config.output)
    benchmarks: list[list[Case]] = []
    for name in config.only:
        cases = [*import_module(f"benchmarks.{name}").measure(config)]
        benchmarks.append(cases)
        table = markdown_table(HEADER, [line for case in cases for line in case.lines()])
        print(f"{name}\n\n{table}\n", flush=True)
        record = {
            "benchmark": name,
            **environment_info(),
            "settings": config.model_dump(mode="json"),
        }
        record["cases"] = [case._asdict() for case in cases]
        write_json(output / f"{name}.json", record)
    return benchmarks


def environment_info() -> dict[str, Any]:
    """The machine, its driver and packages, the commit where git knows it, and the command."""
    return {"machine": get_env_info()._asdict(), "commit": git_commit() or "", "command": sys.argv}


def interleave(contenders: dict[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """The measurements of `repeats` turns. A turn calls all contenders, one after the other."""
    turns = [{name: measure() for name, measure in contenders.items()} for _ in range(repeats)]
    return {name: [turn[name] for turn in turns] for name in contenders}


def time_contenders(
    contenders: dict[str, Contender], device: torch.device, config: BenchmarkConfig
) -> dict[str, list[StepTiming]]:
    """Times `config.repeats` turns, each contender in a new process. Prints who lacks a package or
    memory."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes inherit it
    turns = {
        name: partial(start_processes, time_steps, 1, contender, device, config.steps)
        for name, contender in contenders.items()
    }
    measured = {}
    for name, timings in interleave(turns, config.repeats).items():
        if isinstance(timings[0], str):
            print(f"{name}: not measured ({timings[0]})", flush=True)
        else:
            measured[name] = timings
    return measured


class Enough(Exception):
    """All steps are timed."""


def time_steps(contender: Contender, device: torch.device, steps: int) -> StepTiming | str:
    """The timing of a contender's steps after `WARM_UP`; or the package or memory that it lacks."""
    number = count(1)
    times = []

    def done() -> None:
        if next(number) in (WARM_UP, WARM_UP + steps):
            times.append(spent(device))
        if len(times) == 2:
            raise Enough

    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as nanoGPT does, and we
    try:
        contender(done)
    except (ImportError, torch.OutOfMemoryError) as error:
        return str(error).splitlines()[0]
    except Enough:
        pass
    return StepTiming((times[1] - times[0]) / steps, peak_memory(device))


def spent(device: torch.device) -> float:
    """On a GPU, wall seconds once all its work is done; on a CPU, CPU seconds of this process with
    all threads."""
    return time.process_time() if device.type == "cpu" else read_clock(device)
