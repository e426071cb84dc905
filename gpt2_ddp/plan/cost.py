"""How long a training takes, and what it leaves on disks."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from gpt2_ddp.config.training import TrainingConfig

DISK = 5e8
"""Bytes per second that a checkpoint is assumed to be copied, hashed and written with, where that is not measured."""
START = 60.0
"""Seconds assumed from the command to the first step."""


@dataclass(frozen=True)
class Rate:
    """How fast a training is.

    Args:
        tokens_per_second: of the steps, over all processes.
        source: where it is from: given, measured, or by the MFU.
        evaluation, save, sample: seconds for each.
        start: seconds until the first step; end: after the last one, for the report.
    """

    tokens_per_second: float
    source: str
    evaluation: float
    save: float
    sample: float = 0.0
    start: float = START
    end: float = 0.0


@dataclass(frozen=True)
class Count:
    """How often something happens in the steps that are left."""

    steps: int
    evaluations: int
    saves: int
    samples: int


def count(config: TrainingConfig, step: int, steps: int, validates: bool) -> Count:
    """Of a run at `step` that ends at `steps`; the first and the last step are evaluated, the last is saved."""

    def times(every: int) -> int:
        return steps // every - step // every + (steps % every > 0) if every and steps > step else 0

    evaluations = times(config.eval.every) + (step == 0) if validates else 0
    return Count(steps - step, evaluations, times(config.checkpoint.every), times(config.tracking.sample_every))


def seconds(count: Count, rate: Rate, step_tokens: int) -> dict[str, float]:
    """Wall time of the whole training, by what it is spent on."""
    return {
        "start": rate.start,
        "steps": count.steps * step_tokens / rate.tokens_per_second,
        "evaluations": count.evaluations * rate.evaluation,
        "checkpoints": count.saves * rate.save,
        "samples": count.samples * rate.sample,
        "end": rate.end,
    }


@dataclass(frozen=True)
class Disk:
    """Bytes: of a checkpoint, of all that are there at a time, and what the disk has free."""

    checkpoint: int
    checkpoints: int
    free: int


def disk(config: TrainingConfig, size: int, validates: bool) -> Disk:
    """Checkpoints of this size: `keep_last` of them, the best, and the one that is being written."""
    place = Path(config.output_dir).absolute()
    while not place.is_dir():
        place = place.parent
    old = Path(config.output_dir, config.run_name).glob("checkpoints/step-*/*")  # new ones take their place
    free = shutil.disk_usage(place).free + sum(file.stat().st_size for file in old)
    return Disk(size, size * (config.checkpoint.keep_last + validates + 1), free)
