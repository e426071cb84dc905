"""Configurations of plan.py, sweep.py and ladder.py: a training, and what to do with it."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from gpt2_ddp.config.base import Section, shown
from gpt2_ddp.config.training import TrainingConfig

Shape = Annotated[
    str, Field(pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,5}$", title="LAYERSxWIDTH, like 4x192")
]
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


class LadderConfig(TrainingConfig):
    """ladder.py: small runs of several sizes and lengths on a text, and what they tell of larger
    and longer ones; flags of train_gpt2.py hold for all of them"""

    first = (
        "run_name",
        "data.path",
        "minutes",
        "shapes",
        "lengths",
        "repeats",
        "for_minutes",
        "at_once",
        "dry_run",
    )

    minutes: PositiveFloat = Field(default=30, exclude=True)
    """time of all runs together, by the speed of this machine; the lengths of the runs follow"""
    shapes: tuple[Shape, ...] = Field(default=(), exclude=True)
    """sizes to train, as layers and width, like 2x128 3x160 4x192; none: four by the time, or
    three or two in a short one"""
    lengths: tuple[PositiveFloat, ...] = Field(default=(), exclude=True)
    """tokens to train each size on, like 500000 1000000 2000000, instead of minutes; none: two to
    four lengths of each size, by the time"""
    repeats: PositiveInt = Field(default=3, exclude=True)
    """seeds of one of the runs, which tell how far apart equal runs are"""
    for_minutes: tuple[PositiveFloat, ...] = Field(default=(30, 120), exclude=True)
    """times of a later run on this machine to answer for: its best size, its tokens, and the bits
    per byte to expect"""
    at_once: PositiveInt | None = Field(default=None, exclude=True)
    """runs at a time, as in sweep.py"""
    dry_run: bool = Field(default=False, exclude=True)
    """only print the runs, their time, and the commands"""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """Also fields that the ladder sets itself."""
        if not self.own_text:  # the rule has completed it
            yield from super().mistakes()
            return
        if len({*self.shapes}) == 1:
            yield (
                "shapes",
                " ".join(self.shapes),
                "should be two sizes or more, like 2x128 3x160 4x192",
            )
        if len({*self.lengths}) == 1:
            yield "lengths", shown(self.lengths), "should be two numbers of tokens or more"
        given = {f"{section}.{name}" for section, name in _given(self)}
        for name in sorted(given & BY_LADDER.keys()):
            section, _, field = name.partition(".")
            value = getattr(getattr(self, section), field)
            if value is not None:
                yield name, value, f"{BY_LADDER[name]}; remove it"
        if self.task:
            yield "task", self.task, "a ladder is of the trainer's own class; remove it"
        if len(self.data.path) > 1:
            hint = "should be one folder, whose runs the ladder foretells"
            yield "data.path", " ".join(self.data.path), hint
        yield from super().mistakes()


BY_LADDER = {
    "model.n_layer": "shapes sets it",
    "model.n_embd": "shapes sets it",
    "model.n_head": "shapes sets it",
    "train.steps": "lengths or minutes sets it",
    "train.epochs": "lengths or minutes sets it",
    "train.minutes": "lengths or minutes sets it",
    "train.global_batch_tokens": "the length of a run sets it",
    "train.branch_from": "runs of a ladder begin with random weights",
    "train.init_from": "runs of a ladder begin with random weights",
    "optim.decay_steps": "the length of a run sets it",
    "eval.every": "the ladder sets it",
    "eval.tokens": "the ladder sets it",
    "eval.patience": "runs of a ladder end when their rate is 0",
}
"""Fields that a ladder sets, and by what."""


def _given(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Section and field of each that a file or a flag gives."""
    for name, section in config:
        if isinstance(section, Section):
            yield from ((name, field) for field in section.model_fields_set)
