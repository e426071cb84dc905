"""The benchmark harness: contenders in fresh processes, timed in turns; tables with the ratios of each turn."""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.collect_env import get_env_info

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.cluster import read_clock
from gpt2_ddp.compare import peak_memory
from gpt2_ddp.distributed.spawn import start_ranks
from gpt2_ddp.files import write_json
from gpt2_ddp.output import make_output_folder, markdown_table
from gpt2_ddp.project import git_commit

T = TypeVar("T")

OURS = "ours"
HEADER = ["what", "unit", "contender", "figure", "ours is better by"]
Done = Callable[[], object]  # a contender calls it after each of its steps, which never end
Contender = tuple[Callable[..., None], Sequence[Any]]  # a module's function; its arguments after a `Done`


class StepTiming(NamedTuple):
    """One turn."""

    seconds: float  # per step
    memory: int  # peak of the process so far, in bytes (`peak_memory`)


class Case(NamedTuple):
    """One measured quantity: `figures` of each contender, one per turn; more is better for rates only."""

    what: str
    unit: str
    figures: dict[str, list[float]]
    more_is_better: bool = True

    def ratios(self, baseline: str) -> list[float]:
        """How many times better ours was than the baseline in each turn; empty where ours was not measured."""
        pairs = zip(self.figures.get(OURS, []), self.figures[baseline], strict=False)
        return [ours / other if self.more_is_better else other / ours for ours, other in pairs if ours and other]

    def lines(self) -> Iterator[list[str]]:
        """Rows of the table below `HEADER`, one per contender."""
        for name, figures in self.figures.items():
            ratios = self.ratios(name) if name != OURS else []
            spread = f"{median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})" if ratios else ""
            yield [self.what, self.unit, name, f"{median(figures):,.4g}", spread]


def run_benchmarks(config: BenchmarkConfig) -> list[list[Case]]:
    """The command: the cases of each benchmark, which is a module with `measure(config)`. Raises: UserError."""
    output = make_output_folder(config.output)
    found = []
    for name in config.only:
        cases = [*import_module(f"benchmarks.{name}").measure(config)]
        found.append(cases)
        table = markdown_table(HEADER, [line for case in cases for line in case.lines()])
        print(f"{name}\n\n{table}\n", flush=True)
        record = {"benchmark": name, **environment_info(), "settings": config.model_dump(mode="json")}
        record["cases"] = [case._asdict() for case in cases]
        write_json(output / f"{name}.json", record)
    return found


def environment_info() -> dict[str, Any]:
    """The machine, its driver and packages, the commit where git knows it, and the command."""
    return {"machine": get_env_info()._asdict(), "commit": git_commit() or "", "command": sys.argv}


def make_case(
    what: str, unit: str, found: dict[str, list[T]], figure: Callable[[T], float], more_is_better: bool = True
) -> Case:
    """The case of one figure of each measurement."""
    return Case(what, unit, {name: [figure(one) for one in of] for name, of in found.items()}, more_is_better)


def interleave(contenders: dict[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """The measurements of `repeats` turns. A turn calls all contenders, one after the other."""
    turns = [{name: measure() for name, measure in contenders.items()} for _ in range(repeats)]
    return {name: [turn[name] for turn in turns] for name in contenders}


def time_contenders(
    contenders: dict[str, Contender], device: torch.device, config: BenchmarkConfig
) -> dict[str, list[StepTiming]]:
    """Starts a process for each contender and times `config.repeats` turns. Prints who lacks a package or memory."""
    os.environ["OMP_NUM_THREADS"] = str(config.threads)  # the processes inherit it
    turns = {}
    with ExitStack() as stack:
        for name, contender in contenders.items():
            pipe, remote = Pipe()
            (process,) = start_ranks(_run_contender, [(remote, contender, device, config)])
            stack.callback(process.join)  # it ends when its pipe is closed, which comes before
            stack.enter_context(pipe)
            remote.close()
            if reason := pipe.recv():
                print(f"{name}: not measured ({reason})", flush=True)
            else:
                turns[name] = partial(_take_turn, pipe)
        return interleave(turns, config.repeats)


def _take_turn(pipe: Connection) -> Any:
    pipe.send(True)
    return pipe.recv()


def _run_contender(pipe: Connection, contender: Contender, device: torch.device, config: BenchmarkConfig) -> None:
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as nanoGPT does, and we
    function, arguments = contender
    try:
        function(partial(next, step_timer(pipe, device, config.steps)), *arguments)
    except (ImportError, torch.OutOfMemoryError) as error:
        pipe.send(str(error).splitlines()[0])


def step_timer(pipe: Connection, device: torch.device, steps: int) -> Generator[None, None, None]:
    """A generator that a contender advances after each of its steps. Sends "" after the first step,
    which loads libraries and compiles graphs. A turn begins with a message from the pipe, and ends with a `StepTiming`.
    The process exits when the other end is closed."""
    yield
    pipe.send("")
    with suppress(EOFError):
        while pipe.recv():
            if device.type == "cuda":
                yield  # this step allocates the memory anew
            begun = spent(device)
            for _ in range(steps):
                yield
            pipe.send(StepTiming((spent(device) - begun) / steps, peak_memory(device)))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # for the other contenders
    raise SystemExit(0)


def spent(device: torch.device) -> float:
    """On a GPU, wall seconds once all its work is done; on a CPU, CPU seconds of this process with all threads."""
    return time.process_time() if device.type == "cpu" else read_clock(device)
