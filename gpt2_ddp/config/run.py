"""Sections and fields of every training run; the training loop reads these."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from gpt2_ddp.config.base import Command, Section, flat


class ClipConfig(Section):
    """The optimizer"""

    grad_clip: float = Field(default=0.0, ge=0)
    """largest global gradient norm; 0 turns clipping off"""


class LoopConfig(Section):
    """The training loop"""

    mixed_precision: Literal["auto", "fast", "no", "bf16", "fp16"] = "auto"
    """autocast; auto follows `accelerate config`; fast: bf16 where the device has instructions for it; fp16 (CUDA)
    scales the loss"""
    compile: Literal["auto", "off", "blocks", "model"] = Field(default="auto", json_schema_extra={"alone": "model"})
    """torch.compile the model as a whole, or each transformer block by itself, which leaves DDP its overlap; auto: a
    GPT as a whole on one GPU, by blocks on several, on CPUs where it pays (docs/step.md), and if there is a compiler"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train; auto: cuda, then mps, then cpu"""
    deterministic: bool = False
    """deterministic kernels on GPU, so that resumed runs are bitwise equal there too (CPU runs always are)"""
    max_minutes: float | None = Field(default=None, gt=0)
    """stop with a checkpoint, which is saved by then, after this many minutes; the same command goes on"""
    patience_seconds: float | None = Field(default=None, gt=0)
    """end the run, naming the process, when one makes no progress for so long; null: two minutes, or ten times the
    longest that this run was seen to need (half an hour where something is done for the first time)"""
    profile_steps: int = Field(default=0, ge=0)
    """record a torch profiler trace of this many steps, after three warm-up steps, into the run folder"""

    @field_validator("compile", mode="before")
    @classmethod
    def _yes_or_no(cls, value: object) -> object:
        with suppress(ValidationError):  # YAML 1.1 reads `off` as false
            return "model" if TypeAdapter(bool).validate_python(value) else "off"
        return value


class GuardConfig(Section):
    """What is done about steps that go wrong"""

    skip: bool = True
    """whether a step with a bad gradient changes nothing: one that is not finite, or beyond norm_sigmas"""
    norm_sigmas: float | None = Field(default=None, gt=0)
    """a gradient norm is bad that exceeds its running mean by so many standard deviations; null: none that is finite"""
    loss_sigmas: float | None = Field(default=None, gt=0)
    """a loss is bad that exceeds its running mean by so many standard deviations; null: none that is finite"""
    patience: int = Field(default=20, ge=1)
    """after so many bad steps in a row the run has diverged"""
    check_every: int | None = Field(default=None, ge=1)
    """steps between comparisons of all ranks' parameters and optimizer state; null: before each checkpoint alone"""


class KeepConfig(Section):
    """Checkpoints"""

    keep_last: int = Field(default=3, ge=1)
    """newest verified checkpoints to keep, besides the one with the lowest validation loss"""
    background: Literal["auto"] | bool = "auto"
    """whether they are written from a copy in the host's memory while training goes on; auto: where that leaves a core
    and the memory free, as on GPUs; otherwise training stands still meanwhile"""


class TrackingConfig(Section):
    """Metrics"""

    log_every: int = Field(default=10, ge=1)
    """steps between rows of metrics.jsonl"""
    log_with: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """trackers besides metrics.jsonl, one or several; wandb logs offline when nobody is logged in"""
    project: str = Field(default="gpt2_ddp", pattern=r"^\w[^/\\#?%:]*$")
    """project name in the trackers"""
    entity: str | None = None
    """wandb: the user or team that the project is of; null: yours"""
    group: str | None = None
    """wandb and trackio: runs of the same group are shown together"""
    tags: tuple[str, ...] = ()
    """wandb: words to find the run by"""
    peak_flops: float | None = Field(default=None, gt=0)
    """what one device can do, in dense bf16 FLOP/s, for the MFU; null: what its data sheet says, if it is known here"""

    @field_validator("log_with", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        names = value if isinstance(value, list | tuple) else [value]
        return [name for name in dict.fromkeys(map(str, names)) if name not in ("none", "null", "None", "")]


class RunConfig(Command):
    """A training run of any kind"""

    kind: ClassVar[str] = ""
    """kind of run, as checkpoints name it"""
    kept: ClassVar[tuple[str, ...]] = ("seed", "model", "optim")
    """sections and fields that a resumed run must keep"""
    per_machine: ClassVar[tuple[str, ...]] = (
        "output_dir",
        "data.path",
        "data.prepare",
        "train.init_from",
        "train.branch_from",
    )
    """paths that may differ between machines"""

    output_dir: str = "runs"
    """folder of run folders"""
    run_name: str = Field(default="gpt2", min_length=1, pattern=r"^\w[\w.-]*$")
    """the run's folder is output_dir/run_name; the same command given twice goes on with it"""
    seed: int = Field(default=1337, ge=0, lt=2**63)
    """fixes initial weights, data order and dropout"""
    fresh: bool = Field(default=False, exclude=True)
    """start over; the run folder must be empty or absent, since nothing is overwritten"""

    @property
    def shared(self) -> dict[str, Any]:
        """Fields that must agree on all ranks, by dotted names. Of `per_machine` paths, only their presence must."""
        found = flat(self.model_dump(mode="json"))
        return found | {name: "a path" if found[name] else None for name in self.per_machine if name in found}

    @property
    def backend(self) -> str:
        """Backend of the process group: auto, nccl or gloo."""
        return "auto"

    # fields that some kinds lack
    @property
    def rollbacks(self) -> int:
        """Most rollbacks of a diverged run: `guard.rollbacks`."""
        return getattr(self.guard, "rollbacks", 0)

    @property
    def saves_optimizer(self) -> bool:
        """Whether checkpoints hold the optimizer state: `checkpoint.save_optimizer`."""
        return getattr(self.checkpoint, "save_optimizer", True)

    @property
    def eval_patience(self) -> int | None:
        """Evaluations without a new lowest val_loss after which the run ends: `eval.patience`."""
        return getattr(getattr(self, "eval", None), "patience", None)

    @property
    def branch_from(self) -> str | None:
        """Run folder or checkpoint that a new run branches off: `train.branch_from`."""
        return getattr(self.train, "branch_from", None)

    def may_change(self, name: str, before: Any, step: int) -> bool:
        """Whether a kept field may differ from `before`, since no step up to `step` depends on it."""
        return False

    if TYPE_CHECKING:  # each kind has its own sections, in its own order
        optim: ClipConfig
        train: LoopConfig
        guard: GuardConfig
        checkpoint: KeepConfig
        tracking: TrackingConfig
