"""The first lines of a report: what a person wants to know of a run, and what to do next."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from gpt2_ddp.files import regular
from gpt2_ddp.project import command_for
from gpt2_ddp.records.rows import time_left
from gpt2_ddp.reports.expected import expected_text, standing, total_steps
from gpt2_ddp.reports.runs import RunRecord, is_finite
from gpt2_ddp.reports.status import RESUMABLE
from gpt2_ddp.reports.values import count_text, duration_text, number_text

ALIVE = ("starting", "running", "stalled")
"""States of a run that has not ended."""


class Fact(NamedTuple):
    """A value, and what it is."""

    value: str
    label: str


def facts(run: RunRecord) -> Iterator[Fact]:
    """What a person wants to know first; what is unknown is left out."""
    total = total_steps(run)
    step = run.rows[-1]["step"]
    yield Fact(f"{step:,} of {total:,}" if total else f"{step:,}", "steps")
    parameters = count_parameters(run.folder)
    if parameters:
        yield Fact(count_text(parameters), "parameters")
    units = run.last("tokens").get(run.unit)
    if is_finite(units):
        yield Fact(count_text(units), run.unit)
    seconds = training_seconds(run)
    if seconds:
        yield Fact(duration_text(seconds), "of training")
        _, passed = run.series("tokens")
        yield Fact(count_text((passed[-1] - passed[0]) / seconds), f"{run.unit}/s")
    left = _left(run, total)
    if left is not None and run.state == "running":
        yield Fact(duration_text(left), "left")
    _, memory = run.series("memory")
    memory = memory[np.isfinite(memory)]
    if len(memory):
        yield Fact(f"{memory.max() / 1e9:.3g} GB", "memory")
    yield from _scores(run)


def _scores(run: RunRecord) -> Iterator[Fact]:
    """The validation loss, and the best one in bits per byte beside compressors."""
    loss = run.last("val_loss").get("val_loss")
    best = run.best()
    if is_finite(loss) and best:
        where = f"best {number_text(best['val_loss'])} at step {best['step']:,}"
        if best["val_loss"] == loss:
            where = f"the best, at step {best['step']:,}"
        yield Fact(number_text(loss), f"validation loss ({where})")
    bits = best.get("val_bits_per_byte")
    if is_finite(bits):
        others = [f"{name} {score:.3f}" for name, score in run.compressors.items()]
        expected = expected_text(run)
        if expected:
            others.insert(0, expected)
        yield Fact(f"{bits:.3f}", f"bits per byte ({', '.join(['best step', *others])})")
    compared = standing(run)
    if compared:
        yield Fact(*compared)
    loss = run.last("loss_mean").get("loss_mean")
    if not best and is_finite(loss):
        yield Fact(number_text(loss), "training loss")


def _left(run: RunRecord, total: int | None) -> float | None:
    """Seconds that are left, at the speed of the newest row."""
    with suppress(TypeError, KeyError, ArithmeticError, ValueError):  # rows of another program
        return time_left(run.rows[-1], total) if total else None
    return None


def training_seconds(run: RunRecord) -> float:
    """Seconds of training by the speed in the rows, without evaluations, samples and saves; 0 if
    the speed is unknown."""
    steps, speeds = run.series("tokens_per_second")
    known, units = run.series("tokens")
    if not len(steps) or not len(known) or not np.isfinite(units).all():
        return 0.0
    passed = np.diff(np.interp(steps, known, units), prepend=units[0])
    is_known = np.isfinite(speeds) & (speeds > 0) & (passed > 0)
    seconds = float((passed[is_known] / speeds[is_known]).sum())
    return seconds if seconds < 1e12 else 0.0


def count_parameters(folder: Path) -> int:
    """Numbers in the weights of the newest checkpoint of a run folder; 0 without a readable
    one."""
    for checkpoint in sorted(folder.glob("checkpoints/step-*"), reverse=True):
        pattern = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
        files = [file for file in checkpoint.glob("model*") if pattern.fullmatch(file.name)]
        with suppress(OSError, SafetensorError, ValueError):
            if files:
                return sum(_numbers(file) for file in files)
    return 0


def _numbers(file: Path) -> int:
    with safe_open(regular(file), framework="numpy") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)


def next_step(run: RunRecord) -> tuple[str, str]:
    """What to do next: a sentence, and a command, which may be empty."""
    folder = shlex.quote(shown_path(run.folder))
    script = "generate" if run.start.get("kind", "gpt2") == "gpt2" else "evaluate"
    ends = {
        "completed": ("Try the model:", f"{command_for(script)} {folder}"),
        "diverged": (
            "It did not recover. Look at the curves, then start a new run with a lower rate:"
            " the rows say what the guard saw.",
            f"{command_for('verify_run')} {folder}",
        ),
    }
    if run.state in ends:
        return ends[run.state]
    if run.state in ALIVE:
        text = "It is not at its end. To redraw this page until it is:"
        return text, f"{command_for('report')} {folder} --every 30"
    if run.state in RESUMABLE:
        command = run.start.get("command")
        text = "The same command resumes it from its newest checkpoint"
        if isinstance(command, str):
            return f"{text}:", f"python {command}"
        return f"{text}.", ""
    return "Its state is unknown:", f"{command_for('status')} {folder}"


def shown_path(folder: Path) -> str:
    """The folder as a person here names it: below the current folder by its relative path."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative
