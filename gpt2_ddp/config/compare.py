"""What can be configured of the comparison of ways to train."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from gpt2_ddp.config.base import Command


class CompareConfig(Command):
    """compare_parallel.py: the same training by one process, nn.DataParallel and DDP, timed"""

    jobs: tuple[str, ...] = ("regression", "classifier", "gpt2")
    """what to train: regression, classifier, transformer or gpt2; a configuration of that script may follow a colon,
    like classifier:configs/jobs/cifar100_lenet.yaml"""
    processes: tuple[int, ...] = (2,)
    """DDP's process counts, one row of the table each"""
    weak: bool = False
    """weak scaling: each process has the job's global batch for itself; otherwise all processes share it"""
    repeats: int = Field(default=3, ge=1)
    """runs of each way, each in fresh processes; the ways take turns"""
    seconds: float = Field(default=10, gt=0)
    """about how long one process is timed; it decides how many steps are timed, the same for every way"""
    steps: int | None = Field(default=None, ge=1)
    """time this many steps, whatever they take"""
    epochs: int | None = Field(default=None, ge=1)
    """train each way for so many passes over the training samples, whatever they take; not together with steps"""
    data_path: str | None = None
    """folder with the data of the one job that reads any: images of a classifier, or tokens of gpt2"""
    threads: int = Field(default=1, ge=1)
    """threads per process, the same for every way, or one process would have the cores of all"""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """of every job; only without (fp32) do the ways end with the same parameters"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: cuda, then cpu"""
    busy_ok: bool = False
    """measure though other programs keep the machine busy; a note below the table says so"""
    output: str = "runs/compare"
    """folder for compare.md, compare.json and compare.png"""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        if self.steps and self.epochs:
            yield "epochs", self.epochs, "says how long to train, and so does steps; give one of them"

    @field_validator("processes")
    @classmethod
    def _several_processes(cls, processes: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 2 <= n <= 64 for n in processes) or len(set(processes)) < len(processes):
            raise ValueError("should be different numbers from 2 to 64; one process is always timed")
        return processes
