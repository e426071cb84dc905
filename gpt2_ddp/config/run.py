"""Sections and fields that every training run has. The training loop reads them."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from gpt2_ddp.config.base import Command, Section, check_url, flat

MOST_ITEMS = 2**22
"""Most items of an optimizer step. Each process lists its micro-batches."""


MOST_PROFILED = 100
"""Most steps of a trace. Each takes memory and disk: a million events of some hundred bytes."""


class ClipConfig(Section):
    """The optimizer"""

    grad_clip: NonNegativeFloat = 0.0
    """limit of the global gradient norm; 0: no clipping"""


class LoopConfig(Section):
    """The training loop"""

    mixed_precision: Literal["auto", "fast", "no", "bf16", "fp16"] = "auto"
    """precision of autocast; auto: as `accelerate launch` says, else bf16 on GPUs that have it;
    fast: bf16 also on CPUs where it is measured to be faster; a resume keeps the choice; no: fp32;
    fp16 (CUDA) scales the loss"""
    compile: Literal["auto", "off", "blocks", "model"] = "auto"
    """torch.compile; model: the whole model; blocks: each transformer block, which keeps DDP's
    overlap; auto, with a compiler: model for a GPT on one GPU, blocks on several; on CPUs the same
    if `minutes` are at least 20; else off"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """device of the training; auto: the first available of cuda, mps, cpu"""
    deterministic: bool = False
    """use deterministic kernels on GPUs: resumed runs are then bitwise equal there, too; CPU runs
    always are"""
    max_minutes: PositiveFloat | None = None
    """time limit in minutes; the run saves a checkpoint and stops in time, and the same command
    resumes it"""
    patience_seconds: PositiveFloat | None = None
    """watchdog timeout in seconds: the run ends and names the process that made no progress for so
    long; null: 1800 the first time that a stage runs, then 120, or ten times the slowest stage so
    far if that is longer"""


class GuardConfig(Section):
    """Reaction to bad steps"""

    sigmas: PositiveFloat | None = None
    """limit of the gradient norm and of the loss, in standard deviations above their running means;
    a step with a norm above it, or one that is not finite, is skipped; null: no limit for finite
    numbers"""
    patience: PositiveInt = 20
    """number of bad steps in a row after which the run has diverged: a GPT returns to its newest
    good checkpoint, skips the data read since, and ends at its fourth divergence; a small job
    ends"""
    climb: PositiveFloat | None = 0.5
    """limit of a climb above the lowest loss so far, as a share of that loss, or of what training
    has gained if that is more; a training loss above it for 100 steps, or an evaluation with both
    losses above it, is a divergence; null: no limit"""


class KeepConfig(Section):
    """Checkpoints"""

    keep_last: PositiveInt = 3
    """newest intact checkpoints to keep; the one with the lowest validation loss is kept, too"""
    seconds: PositiveFloat | None = None
    """most seconds of training that a kill may cost, and a step: saves further checkpoints between
    those of `every`, as often as that needs (docs/reliability.md); null: no further ones"""
    overhead: float = Field(default=0.025, gt=0, lt=1)
    """most of the time that the checkpoints of `seconds` may take, as a fraction; where that is too
    little, a line says how many seconds may be lost"""
    background: bool | Literal["auto"] = "auto"
    """true: write checkpoints from a copy in host memory while the training continues; false: the
    training waits; auto: true if a core and enough memory are free, as on GPU machines"""
    mirror: str | None = None
    """URL of a folder for a copy of the run, such as s3://BUCKET/runs (any URL of fsspec); each
    checkpoint is copied in the background, and a machine without the run restores it from there
    (docs/cloud.md); null: no copy"""

    @field_validator("mirror")
    @classmethod
    def _has_no_credentials(cls, value: str | None) -> str | None:
        return value and check_url(value)


class TrackingConfig(Section):
    """Metrics"""

    log_every: PositiveInt = 10
    """steps between rows of metrics.jsonl"""
    log_with: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """trackers that get the rows of metrics.jsonl, too, one or several; wandb logs offline without
    a login"""
    profile_steps: tuple[PositiveInt, ...] = ()
    """first and last step to record with torch's profiler, such as 10 13, at most 100 steps: the
    run folder gets a trace for Perfetto and a table of the most expensive operations, on GPUs also
    a snapshot of the memory (docs/tracking.md); null: none"""

    @field_validator("profile_steps")
    @classmethod
    def _is_range(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value:
            return value
        if len(value) != 2 or value[0] > value[1]:
            raise ValueError("should be the first and the last step to record, such as 10 13")
        if value[1] - value[0] >= MOST_PROFILED:
            raise ValueError(f"are more than {MOST_PROFILED} steps, which no viewer opens")
        return value


NAME = "a name of letters, digits, _, - and ., which begins with none of - and ."
PER_MACHINE = ("output_dir", "data.path", "data.prepare", "train.init_from", "train.branch_from")
"""Paths that may differ between machines."""


class RunConfig(Command):
    """A training run of any kind"""

    kind: ClassVar[str] = ""
    """Kind of run, as written in checkpoints."""
    rollbacks: ClassVar[int] = 0
    """Most rollbacks of a diverged run."""
    kept: ClassVar[tuple[str, ...]] = ("seed", "model", "optim")
    """Sections and fields that must not change when a run is resumed."""

    output_dir: str = "runs"
    """folder that contains the run folders"""
    run_name: str = Field(default="gpt2", pattern=r"^\w[\w.-]*$", title=NAME)
    """name of the run, of letters, digits, _, - and .; its run folder is output_dir/run_name; the
    same command again resumes the run"""
    seed: NonNegativeInt = 1337
    """seed of initial weights, data order and dropout"""

    @property
    def shared(self) -> dict[str, Any]:
        """Fields that must agree on all ranks, by dotted names. For `PER_MACHINE` paths, only their
        presence counts."""
        fields = flat(self.model_dump(mode="json"))
        paths = [name for name in PER_MACHINE if name in fields]
        return fields | {name: "a path" if fields[name] else None for name in paths}

    # Fields of some kinds of runs, which override these properties. The other kinds have the value
    # that is returned here.

    @property
    def patience(self) -> int | None:
        """`eval.patience`: evaluations without a new lowest loss that end the run."""
        return None

    @property
    def average(self) -> float:
        """`optim.average`: mean age of the averaged weights, as a fraction of the steps so far; 0:
        none."""
        return 0.0

    @property
    def parallel(self) -> Literal["ddp", "fsdp"]:
        """`launch.parallel`: how processes share the model."""
        return "ddp"

    @property
    def checkpoint_format(self) -> int:
        """Format of the run's checkpoints. A release refuses those of formats that it does not
        know. So a field that no release may ignore needs another one than 1."""
        return 1

    @property
    def backend(self) -> Literal["auto", "nccl", "gloo"]:
        """`launch.backend`: that of the process group."""
        return "auto"

    @property
    def matrix(self) -> tuple[int, int]:
        """Inputs and outputs of a typical matrix of the model, for `train.mixed_precision:
        fast`."""
        return 512, 512

    if TYPE_CHECKING:  # each kind declares its own sections, in its own order
        optim: ClipConfig
        train: LoopConfig
        guard: GuardConfig
        checkpoint: KeepConfig
        tracking: TrackingConfig
