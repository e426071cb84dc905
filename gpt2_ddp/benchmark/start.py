"""From the command to the first step on data that are ready, by stage: of a fresh run, a resumed and a complete one."""

import json
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.project import PROJECT

ROOT = Path(__file__).parents[2]
BARE = "import torch, accelerate"
COMPUTING = ("evaluate", "forward/backward", "step")
"""Stages that a larger model makes longer."""
Marks = list[tuple[str, float, float]]
"""Each stage with its end, in seconds and in CPU seconds since the process was started."""


def measure(config: BenchmarkConfig) -> Table:
    """The table: CPU seconds of one thread, which other programs disturb less than what a clock says; that is in the
    JSON."""
    script, numbers = PROJECT / "scripts/train_gpt2.py", count()
    with TemporaryDirectory() as folder:
        data = Path(folder, "data")
        prepare(
            load(PrepareConfig, ["--source", str(ROOT / "gpt2_ddp"), "--output", str(data), "--vocab_size", "8192"])
        )
        flags = ["--config", "configs/gpt2_stdlib.yaml", "--data.path", data, "--output_dir", Path(folder, "runs")]
        flags += ["--tracking.sample_every", "0", "--train.device", config.device, "--train.steps"]

        def start(steps: int, name: str) -> Marks:
            file = Path(folder, "marks.json")
            words = [file, str(time.time()), script, *flags, str(steps), "--run_name", name]
            _run("-m", "gpt2_ddp.benchmark.marks", *map(str, words))
            return [(stage, wall, cpu) for stage, wall, cpu in json.loads(file.read_text())]

        for name in ("begun", "complete"):
            _run(str(script), *map(str, flags), "1", "--run_name", name)
        sides = {
            "fresh": lambda: start(1, f"fresh-{next(numbers)}"),
            "resumed": lambda: start(2, "begun"),
            "complete": lambda: start(1, "complete"),
        }
        readings = interleave({BARE: _import, **sides}, config.repeats)
    bare = readings.pop(BARE)
    cases = [case for name, marks in readings.items() for case in _cases(name, marks, bare)]
    note = f"over `{BARE}`, in CPU seconds, and the same without evaluation and step: "
    note += ", ".join(f"{name} {_over(marks, bare)}" for name, marks in readings.items())
    return Table("start", cases, config.model_dump(mode="json"), [note])


def _over(turns: list[Marks], bare: list[Marks]) -> str:
    whole = [_total(one)[1] - _total(two)[1] for one, two in zip(turns, bare, strict=True)]
    computing = [sum(_lengths(marks).get(stage, (0.0, 0.0))[1] for stage in COMPUTING) for marks in turns]
    return f"{median(whole):.2f} ({median(a - b for a, b in zip(whole, computing, strict=True)):.2f})"


def _run(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True
    ).stdout.decode()


def _import() -> Marks:
    begun = time.time()
    ended, cpu = _run("-c", f"{BARE}, time; print(time.time(), time.process_time())").split()
    return [(BARE, float(ended) - begun, float(cpu))]


def _total(marks: Marks) -> tuple[float, float]:
    return marks[-1][1:]


def _cases(name: str, turns: list[Marks], bare: list[Marks]) -> list[Case]:
    """To the first step, or to the end, against the imports alone; and each stage of ours."""
    whole = {OURS: [_total(marks)[1] for marks in turns], BARE: [_total(marks)[1] for marks in bare]}
    wall = {OURS: [_total(marks)[0] for marks in turns], BARE: [_total(marks)[0] for marks in bare]}
    cases = [Case(f"{name}: all", "CPU s", whole, more_is_better=False, about={"wall": wall})]
    stages = [_lengths(marks) for marks in turns]
    for stage in dict.fromkeys(stage for lengths in stages for stage in lengths):
        figures = {OURS: [lengths.get(stage, (0.0, 0.0))[1] for lengths in stages]}
        walls = [lengths.get(stage, (0.0, 0.0))[0] for lengths in stages]
        cases.append(Case(f"{name}: {stage}", "CPU s", figures, more_is_better=False, about={"wall": walls}))
    return cases


def _lengths(marks: Marks) -> dict[str, tuple[float, float]]:
    """Seconds and CPU seconds of each stage; one that comes several times is summed up."""
    lengths: dict[str, tuple[float, float]] = {}
    before = (0.0, 0.0)
    for stage, wall, cpu in marks:
        known = lengths.get(stage, (0.0, 0.0))
        lengths[stage] = known[0] + wall - before[0], known[1] + cpu - before[1]
        before = wall, cpu
    return lengths
