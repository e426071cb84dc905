"""Configuration of benchmark.py."""

from typing import Literal

from pydantic import Field

from gpt2_ddp.config.base import Command

Benchmark = Literal["step", "data", "prepare", "checkpoint", "roofline"]


class BenchmarkConfig(Command):
    """benchmark.py: how fast each part is, side by side with baselines"""

    positional = "only"

    only: tuple[Benchmark, ...] = ()
    """step, data, prepare, checkpoint, roofline; none: all of them"""
    repeats: int = Field(default=5, ge=1)
    """timed turns; in each turn, all contenders are timed one after the other"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to measure; auto: cuda, then cpu"""
    threads: int = Field(default=1, ge=1)
    """threads of each process on the CPU, where CPU time is measured"""
    preset: str | None = None
    """step, checkpoint, roofline: configuration to measure, on random tokens; none: configs/gpt2_124m.yaml"""
    block_size: int | None = Field(default=None, ge=2)
    """step, roofline: tokens of a window; none: the preset's on a GPU, 256 on a CPU"""
    micro_batch: tuple[int, ...] = ()
    """step, roofline: windows of a step; several are measured in turn; none: 16, 32 and 64 on a GPU, 2 on a CPU"""
    precision: tuple[Literal["no", "bf16"], ...] = ()
    """step, roofline: no is fp32; none: fp32, and bf16 where the device has instructions for it"""
    compile: tuple[Literal["off", "blocks", "model"], ...] = ("off",)
    """step: train.compile of ours; the baselines compile the whole model, unless off"""
    nanogpt: str | None = None
    """step: a checkout of nanoGPT, as one more baseline"""
    seconds: float = Field(default=1, gt=0)
    """step, data, roofline: approximate length of a turn; a turn has at least one step"""
    text: str | None = None
    """prepare: a jsonl file with a column `text`; none: 40 MB of the standard library's source"""
    output: str = "runs/benchmarks"
    """folder for one JSON file per benchmark"""
