"""What can be configured in plan.py: a training, and what it is planned for."""

import warnings
from collections.abc import Iterator

from pydantic import Field

from gpt2_ddp.config.training import TrainingConfig

warnings.filterwarnings("ignore", message='Field name "json"')  # pydantic's own of that name is deprecated

GPT2_IDS = 50_257
"""Of GPT-2's tokenizer, taken for data that are not there and whose recipe does not say."""


class PlanConfig(TrainingConfig):
    """plan.py: what a training by train_gpt2.py takes, and what would be refused, without starting it"""

    gpu: str | None = Field(default=None, exclude=True)
    """plan for such GPUs, by the name that nvidia-smi prints, like "H100 80GB HBM3"; null: for this machine"""
    gpus: int | None = Field(default=None, ge=1, exclude=True)
    """processes per node, one per GPU; null: as many as were started here, or 1"""
    nodes: int = Field(default=1, ge=1, exclude=True)
    """machines"""
    gpu_memory: float | None = Field(default=None, gt=0, exclude=True)
    """memory of a process in GB (1e9 bytes); null: the GPU's, or what is free on this machine"""
    mfu: float = Field(default=0.4, gt=0, le=1, exclude=True)
    """share of the GPUs' peak that is reached, where no rate is given or measured"""
    tokens_per_second: float | None = Field(default=None, gt=0, exclude=True)
    """rate of the whole training, evaluations and checkpoints apart; null: measured, or by the MFU"""
    price: float | None = Field(default=None, ge=0, exclude=True)
    """of a GPU for an hour"""
    measure: bool = Field(default=False, exclude=True)
    """train 25 steps here first, in a temporary folder, for the time that steps, evaluations and checkpoints take"""
    json: bool = Field(default=False, exclude=True)  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    """print JSON in place of text"""

    @property
    def training(self) -> TrainingConfig:
        """The configuration that train_gpt2.py would have."""
        return TrainingConfig.model_validate({name: getattr(self, name) for name in TrainingConfig.model_fields})

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        yield from super().mistakes()
        if self.measure and (self.gpu or self.gpus or self.nodes > 1):
            hint = "measures this machine, with the processes that a launcher starts; leave gpu, gpus and nodes away"
            yield "measure", "true", hint
        if self.gpu and self.train.device not in ("auto", "cuda"):
            yield "train.device", self.train.device, f"the plan is for {self.gpu}; leave one of the two away"
