"""Configurations of plan.py and sweep.py: a training, and what to do with it."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from gpt2_ddp.config.training import TrainingConfig

GPT2_IDS = 50_257
"""Vocabulary size of GPT-2's tokenizer, assumed for missing data without a recipe that sets one."""


class PlanConfig(TrainingConfig):
    """plan.py: memory, time, disk and price of a training by train_gpt2.py, and its user errors,
    without starting it"""

    gpu: str | None = Field(default=None, exclude=True)
    """GPU to plan for: its name in nvidia-smi, with or without NVIDIA and GeForce, or a clear part
    of it; null: this machine"""
    gpus: PositiveInt | None = Field(default=None, exclude=True)
    """processes on all machines, one per GPU; null: as many as the launcher started, or 1"""
    gpu_memory: PositiveFloat | None = Field(default=None, exclude=True)
    """memory per process in GB (1e9 bytes); null: the GPU's, or this machine's free memory"""
    tokens_per_second: PositiveFloat | None = Field(default=None, exclude=True)
    """tokens per second of all processes, without evaluations and checkpoints; null: by an MFU of
    40 % in bf16, for model.n_embd of 768 and more"""
    price: NonNegativeFloat | None = Field(default=None, exclude=True)
    """price of one GPU per hour, in any currency; null: no price is printed"""

    @property
    def training(self) -> TrainingConfig:
        """The configuration that train_gpt2.py would have."""
        return TrainingConfig.model_validate(
            {name: getattr(self, name) for name in TrainingConfig.model_fields}
        )


class SweepConfig(TrainingConfig):
    """sweep.py: variants and seeds of a training by train_gpt2.py, whose flags it takes, too"""

    first = ("seeds", "vary", "at_once", "dry_run")

    seeds: tuple[int, ...] = Field(default=(), exclude=True)
    """seeds to train each variant with; none: that of the configuration"""
    vary: tuple[str, ...] = Field(default=(), exclude=True)
    """fields and their values, like optim.lr=3e-4,6e-4; each combination is a variant"""
    at_once: PositiveInt | None = Field(default=None, exclude=True)
    """runs at a time, each on one GPU or an equal share of the cores; null: the number of GPUs, or
    1"""
    dry_run: bool = Field(default=False, exclude=True)
    """only print the commands"""
