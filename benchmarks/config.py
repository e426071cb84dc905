"""Configuration of `python -m benchmarks`."""

from typing import Literal

from pydantic import Field

from gpt2_ddp.config.base import Command

Benchmark = Literal["step", "checkpoint"]


class BenchmarkConfig(Command):
    """python -m benchmarks: the speed of a step and of a checkpoint, next to baselines"""

    positional = "only"

    only: tuple[Benchmark, ...] = ("step", "checkpoint")
    """benchmarks to run: step, checkpoint"""
    repeats: int = Field(default=5, ge=1)
    """number of timed rounds; each round times all contenders, one after the other"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to measure; auto: cuda if available, else cpu"""
    preset: str = "configs/gpt2_124m.yaml"
    """configuration to measure, on random tokens"""
    block_size: int | None = Field(default=None, ge=2)
    """step: tokens per window; null: the preset's on a GPU, 256 on a CPU"""
    micro_batch: tuple[int, ...] = ()
    """step: windows per step, one or several; none: 16, 32 and 64 on a GPU, 2 on a CPU"""
    precision: tuple[Literal["no", "bf16"], ...] = ()
    """step: no is fp32; none: fp32, and bf16 on a GPU"""
    compile: tuple[Literal["off", "blocks", "model"], ...] = ("off",)
    """step: train.compile of gpt2_ddp; the baselines compile the whole model, or nothing for off"""
    nanogpt: str | None = None
    """step: folder of a nanoGPT checkout, one more baseline of a GPT-2; null: none"""
    steps: int = Field(default=5, ge=1)
    """step: steps per timed round"""
    output: str = "runs/benchmarks"
    """folder for one JSON file per benchmark"""
