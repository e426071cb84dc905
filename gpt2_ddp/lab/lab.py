"""The DDP lab: common mistakes in DDP, wrong and right, measured on two CPU processes."""

import json
import multiprocessing
import os
import re
import textwrap
import traceback
from collections.abc import Generator
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from gpt2_ddp.config.tools import LabConfig, check_writable
from gpt2_ddp.distributed.environment import world_size
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.distributed.spawn import start_ranks
from gpt2_ddp.errors import UserError
from gpt2_ddp.lab import loop, ranks, wrapper
from gpt2_ddp.lab.experiment import Experiment, Numbers
from gpt2_ddp.output import markdown_table
from gpt2_ddp.project import PROJECT, command_for

TOPICS = wrapper, ranks, loop  # in the order of docs/ddp-lab.md
EXPERIMENTS = [value for topic in TOPICS for value in vars(topic).values() if isinstance(value, Experiment)]
DOCUMENTATION = PROJECT / "docs" / "ddp-lab.md"

PROCESSES = 2
START, BOUND = 300.0, 60.0  # most seconds for processes to start; then, for an experiment to end: all take a few
NOT_MEASURED = 4  # exit code: an experiment gave no numbers
Ranks = list[tuple[BaseProcess, Connection]]


class Row(NamedTuple):
    experiment: Experiment
    numbers: Numbers
    holds: bool | None  # None: not measured
    measured: str  # or the reason why it was not

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "FAILS", None: "not measured"}[self.holds]


def run_lab(config: LabConfig) -> int:
    """Runs experiments, prints each as it ends, and writes the table; or explains one. Returns 0 if all claims hold, 1
    if one fails, otherwise `NOT_MEASURED`. Raises: UserError before any work."""
    if config.explain:
        print(explain(choose((config.explain,), "explain")[0]))
        return 0
    if world_size() > 1:
        hint = f"the lab starts its own two processes: run `{command_for('ddp_lab')}` without a launcher"
        raise UserError("processes", world_size(), hint)
    if config.output:
        check_writable(config.output)
    rows = []
    with closing(run_experiments(choose(config.only), config.seed)) as measured:  # or its ranks outlive a failing print
        for row in measured:
            rows.append(row)
            print(f"{row.verdict}  {row.experiment.claim}\n       {row.measured}", flush=True)
    print(f"\n{as_markdown(rows)}")
    if config.output:
        found = {row.experiment.name: {"holds": row.holds, "measured": row.measured, **row.numbers} for row in rows}
        text = json.dumps(found, indent=1) if Path(config.output).suffix == ".json" else as_markdown(rows)
        Path(config.output).write_text(text + "\n", encoding="utf-8")
    print(f"Next: `{command_for('ddp_lab')} --explain {rows[-1].experiment.name}` has the code; docs/ddp-lab.md, all")
    found = [row.holds for row in rows]
    return 1 if False in found else NOT_MEASURED if None in found else 0


def choose(names: tuple[str, ...], field: str = "only") -> list[Experiment]:
    """The experiments of these names, or all for none. Raises: UserError, for `field`, for an unknown name."""
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise UserError(field, name, f"is not an experiment; choose from {', '.join(known)}")
    return [known[name] for name in names] or EXPERIMENTS


def explain(experiment: Experiment) -> str:
    """Text for a terminal: claim, lesson, both ways, and the code that measures them."""
    ways = f"wrong: {experiment.wrong}\nright: {experiment.right}"
    text = textwrap.fill(lesson(experiment), 100, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(part for part in (experiment.claim, text, ways, experiment.code.rstrip()) if part)


def lesson(experiment: Experiment) -> str:
    """The experiment's text in docs/ddp-lab.md; empty without docs/, as in an image."""
    text = DOCUMENTATION.read_text(encoding="utf-8") if DOCUMENTATION.exists() else ""
    found = re.search(rf"^### {experiment.name}\n\n(.*?)\n\n- \*\*wrong", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def as_markdown(rows: list[Row]) -> str:
    """The experiments as a table: claim, wrong way, right way, measurement."""
    lines = []
    for row in rows:
        measured = row.measured if row.holds else f"{row.measured} {row.verdict}"
        cells = row.experiment.claim, row.experiment.wrong, row.experiment.right, measured
        lines.append([" ".join(cell.split()) for cell in cells])
    return markdown_table(("claim", "wrong way", "right way", "measured"), lines, align=False)


def run_experiments(experiments: list[Experiment], seed: int) -> Generator[Row, None, None]:
    """Runs experiments one after the other in a world of two processes, after one without numbers in a new world."""
    ranks: Ranks = []
    try:
        for experiment in experiments:
            if not ranks:
                ranks = _start_ranks()
                if error := _receive(ranks, START, "start")[1]:
                    yield Row(experiment, {}, None, f"{error}; the lab ends here")
                    return
            for _, pipe in ranks:
                pipe.send((experiment.name, seed))
            numbers, error = _receive(ranks, BOUND, "end")
            if error:
                _end_ranks(ranks)
                ranks = []
                yield Row(experiment, {}, None, error)
                continue
            measured = experiment.measured.format_map(numbers)
            yield Row(experiment, numbers, experiment.holds(SimpleNamespace(**numbers)), measured)
    finally:
        _end_ranks(ranks)


def _receive(ranks: Ranks, seconds: float, event: str) -> tuple[Numbers, str]:
    """Rank 0's numbers, or the problem of the first rank without an answer."""
    answers = []
    for rank, (_, pipe) in enumerate(ranks):
        if not pipe.poll(seconds):
            return {}, f"rank {rank} did not {event} within {seconds:.0f} s"
        try:
            numbers, error = pipe.recv()
        except EOFError:
            return {}, f"rank {rank} died"
        if error:
            return {}, f"rank {rank} failed: {error}"
        answers.append(numbers)
    return answers[0], ""


def _start_ranks() -> Ranks:
    pipes = [multiprocessing.Pipe() for _ in range(PROCESSES)]
    ranks = start_ranks(_answer, [(theirs,) for _, theirs in pipes])
    started = [(rank, ours) for rank, (ours, _) in zip(ranks, pipes, strict=True)]
    for _, theirs in pipes:
        theirs.close()  # so that the end of a rank is the end of its pipe
    return started


def _end_ranks(ranks: Ranks) -> None:
    for process, pipe in ranks:
        pipe.close()
        process.kill()
        process.join()


def _answer(pipe: Connection) -> None:
    """One rank: answers when it has started, and measures each experiment whose name arrives, until its pipe closes."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    accelerator = build_accelerator("cpu", "no")
    torch.set_num_threads(1)
    pipe.send(({}, ""))
    with suppress(EOFError):
        while True:
            name, seed = pipe.recv()
            try:
                pipe.send((choose((name,))[0].run(accelerator, seed), ""))
            except Exception as error:  # any error goes to the table; the next experiment gets a new world
                traceback.print_exc()
                pipe.send(({}, f"{type(error).__name__}: {error}"))
