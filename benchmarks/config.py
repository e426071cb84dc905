"""Configuration of `python -m benchmarks`."""

from typing import Literal

from pydantic import Field

from gpt2_ddp.config.base import Command

Benchmark = Literal["step", "prepare", "checkpoint", "roofline"]


class BenchmarkConfig(Command):
    """python -m benchmarks: the speed of each part, next to baselines"""

    positional = "only"

    only: tuple[Benchmark, ...] = ()
    """benchmarks to run: step, prepare, checkpoint, roofline; none: list them"""
    repeats: int = Field(default=5, ge=1)
    """number of timed rounds; each round times all contenders, one after the other"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to measure; auto: cuda if available, else cpu"""
    threads: int = Field(default=1, ge=1)
    """on CPUs, which are measured in CPU time: threads per process"""
    preset: str | None = None
    """step, checkpoint, roofline: configuration to measure, on random tokens; null: configs/gpt2_124m.yaml"""
    block_size: int | None = Field(default=None, ge=2)
    """step, roofline: tokens per window; null: the preset's on a GPU, 256 on a CPU"""
    micro_batch: tuple[int, ...] = ()
    """step, roofline: windows per step, one or several; none: 16, 32 and 64 on a GPU, 2 on a CPU"""
    precision: tuple[Literal["no", "bf16"], ...] = ()
    """step, roofline: no is fp32; none: fp32, and bf16 if the device has instructions for it"""
    compile: tuple[Literal["off", "blocks", "model"], ...] = ("off",)
    """step: train.compile of gpt2_ddp; the baselines compile the whole model, or nothing for off"""
    nanogpt: str | None = None
    """step: folder of a nanoGPT checkout, one more baseline; null: none"""
    seconds: float = Field(default=1, gt=0)
    """step, roofline: approximate seconds per timed round; a round has at least one step"""
    text: str | None = None
    """prepare: jsonl file with a column `text`; null: 40 MB of the standard library's source"""
    output: str = "runs/benchmarks"
    """folder for one JSON file per benchmark"""
