"""What can be configured in benchmark.py."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from gpt2_ddp.config.base import Command, Tasks

BENCHMARKS = ("step", "data", "prepare", "checkpoint", "scaling", "start", "ceiling")


class BenchmarkConfig(Command):
    """benchmark.py: how fast each part is, side by side with its peers"""

    positional = "only"

    only: Tasks = ()
    """step, data, prepare, checkpoint, scaling, start, ceiling; none: all that can be measured here. And gpu:
    what a GPU should run first, each part once"""
    repeats: int = Field(default=5, ge=1)
    """timed turns; in each, every side has its own, one after the other"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to measure; auto: cuda, then cpu"""
    threads: int = Field(default=1, ge=1)
    """of each process on the CPU, where CPU time is what is measured"""
    preset: str | None = None
    """step, scaling, ceiling: the configuration that is measured, on random tokens; none: configs/gpt2_124m.yaml, and
    configs/gpt2_30m.yaml for scaling"""
    block_size: int | None = Field(default=None, ge=2)
    """step, ceiling: tokens of a window; none: the preset's on a GPU, 256 on a CPU"""
    micro_batch: tuple[int, ...] = ()
    """step, ceiling: windows of a step, one after the other; none: 16, 32 and 64 on a GPU, 2 on a CPU"""
    precision: tuple[Literal["no", "bf16"], ...] = ()
    """step, ceiling: one after the other; no is fp32; none: fp32, and bf16 where the device has instructions for it"""
    compile: tuple[Literal["off", "blocks", "model"], ...] = ("off",)
    """step: train.compile of ours, one after the other; the others compile the whole model, but for off"""
    nanogpt: str | None = None
    """step: a checkout of nanoGPT, whose model is measured as well"""
    build_nanogpt: str | None = None
    """step: a checkout of build-nanogpt, the same"""
    seconds: float = Field(default=1, gt=0)
    """step, ceiling: about how long a turn lasts, of at least one step"""
    within: float | None = Field(default=None, ge=30)
    """gpu: seconds of this call, which leaves what does not fit to the next one; none: all parts"""
    text: str | None = None
    """prepare: a jsonl file with a column `text`; none: 40 MB of the standard library's source"""
    output: str = "runs/benchmarks"
    """folder for a JSON file of each benchmark"""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        for name in self.only:
            if name not in (*BENCHMARKS, "gpu"):
                yield (
                    "only",
                    name,
                    f"is no benchmark; choose from {', '.join(BENCHMARKS)}, or gpu for all that a GPU runs",
                )
