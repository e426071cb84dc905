"""Sections and fields of every training run; the training loop reads these."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, field_validator

from gpt2_ddp.config.base import Command, Section, complete, differences, flat
from gpt2_ddp.errors import UserError


def only(kinds: Any, hint: str) -> BeforeValidator:
    """A check that a value is one of several kinds, with one error."""

    def check(value: object) -> object:
        with suppress(ValidationError):
            TypeAdapter(kinds).validate_python(value)
            return value
        raise ValueError(f"should be {hint}")

    return BeforeValidator(check)


class ClipConfig(Section):
    """The optimizer"""

    grad_clip: float = Field(default=0.0, ge=0)
    """largest global gradient norm; 0 turns clipping off"""


class LoopConfig(Section):
    """The training loop"""

    mixed_precision: Literal["auto", "fast", "no", "bf16", "fp16"] = "auto"
    """precision of autocast; auto: as `accelerate config` says, else bf16 on GPUs that have it; fast: bf16 on CPUs that
    have it, too; no: fp32; fp16 (CUDA) scales the loss"""
    compile: Literal["auto", "off", "blocks", "model"] = Field(default="auto", json_schema_extra={"alone": "model"})
    """torch.compile; model: the whole model; blocks: each transformer block, which keeps DDP's overlap; auto, with a
    compiler: model for a GPT on one GPU, blocks on several, model on CPUs for long bf16 runs, else off"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """device of the training; auto: cuda, then mps, then cpu"""
    deterministic: bool = False
    """deterministic kernels on GPU, so that resumed runs are bitwise equal there too (CPU runs always are)"""
    max_minutes: float | None = Field(default=None, gt=0)
    """time limit in minutes, by which a checkpoint is saved and the run stops; the same command resumes it"""
    patience_seconds: float | None = Field(default=None, gt=0)
    """seconds without progress of a process after which the run ends and reports that process; null: 120, or ten times
    the slowest stage so far if that is more, and 1800 for the first occurrence of a stage"""
    profile_steps: int = Field(default=0, ge=0)
    """record a torch profiler trace of this many steps, after three warm-up steps, into the run folder"""

    @field_validator("compile", mode="before")
    @classmethod
    def _yes_or_no(cls, value: object) -> object:
        with suppress(ValidationError):  # YAML 1.1 reads `off` as false
            return "model" if TypeAdapter(bool).validate_python(value) else "off"
        return value


class GuardConfig(Section):
    """Reaction to bad steps"""

    skip: bool = True
    """skip the update of a step with a bad gradient: not finite, or a norm above the limit of norm_sigmas"""
    norm_sigmas: float | None = Field(default=None, gt=0)
    """limit of the gradient norm, in standard deviations above its running mean; null: no limit for finite norms"""
    loss_sigmas: float | None = Field(default=None, gt=0)
    """limit of the loss, in standard deviations above its running mean; null: no limit for finite losses"""
    patience: int = Field(default=20, ge=1)
    """number of bad steps in a row after which the run has diverged"""
    check_every: int | None = Field(default=None, ge=1)
    """steps between replica checks, which compare the weights and optimizer state of all ranks; null: only before each
    checkpoint"""


class KeepConfig(Section):
    """Checkpoints"""

    keep_last: int = Field(default=3, ge=1)
    """number of newest intact checkpoints to keep, besides the one with the lowest validation loss"""
    background: Annotated[Literal["auto"] | bool, only(Literal["auto"] | bool, "auto, true or false")] = "auto"
    """write checkpoints from a copy in host memory while training continues; false: training waits; auto: if a core and
    the memory are free, as on GPUs"""


class TrackingConfig(Section):
    """Metrics"""

    log_every: int = Field(default=10, ge=1)
    """steps between rows of metrics.jsonl"""
    log_with: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """trackers besides metrics.jsonl, one or several; wandb logs offline when nobody is logged in"""
    project: str = Field(default="gpt2_ddp", pattern=r"^\w[^/\\#?%:]*$")
    """project name in the trackers"""
    entity: str | None = None
    """wandb: user or team of the project; null: your own"""
    group: str | None = None
    """wandb and trackio: name of the group of runs"""
    tags: tuple[str, ...] = ()
    """wandb: words to find the run by"""
    peak_flops: float | None = Field(default=None, gt=0)
    """peak of one device in dense bf16 FLOP/s, for the MFU; null: the value of its data sheet, for known devices"""

    @field_validator("log_with", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        names = value if isinstance(value, list | tuple) else [value]
        return [name for name in dict.fromkeys(map(str, names)) if name not in ("none", "null", "None", "")]


PER_MACHINE = ("output_dir", "data.path", "data.prepare", "train.init_from", "train.branch_from")
"""Paths that may differ between machines."""


class RunConfig(Command):
    """A training run of any kind"""

    kind: ClassVar[str] = ""
    """kind of run, as checkpoints name it"""
    kept: ClassVar[tuple[str, ...]] = ("seed", "model", "optim")
    """sections and fields that a resumed run must keep"""

    output_dir: str = "runs"
    """folder of run folders"""
    run_name: str = Field(default="gpt2", min_length=1, pattern=r"^\w[\w.-]*$")
    """the run's folder is output_dir/run_name; the same command again resumes the run"""
    seed: int = Field(default=1337, ge=0, lt=2**63)
    """seed of initial weights, data order and dropout"""
    fresh: bool = Field(default=False, exclude=True)
    """require a new run: the run folder must be empty or absent, since nothing is overwritten"""

    @property
    def shared(self) -> dict[str, Any]:
        """Fields that must agree on all ranks, by dotted names. Of `PER_MACHINE` paths, only their presence must."""
        found = flat(self.model_dump(mode="json"))
        return found | {name: "a path" if found[name] else None for name in PER_MACHINE if name in found}

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

    def check_resumable(self, kind: str, saved: dict[str, Any], step: int) -> list[str]:
        """Checks that this continues the training of a checkpoint with the configuration `saved`: the fields in `kept`
        must be equal. A newer field has its default there; null means the saved value. Returns the fields of `saved`
        that are unknown now. Raises: UserError, which names every field that differs."""
        if kind != self.kind:
            hint = f"is a run of another kind, {kind}; choose another run_name"
            raise UserError("run_name", self.run_name, hint)
        mistakes = []
        for name, now, before in differences(self, saved, self.kept):
            if now is not None and not self.may_change(name, before, step):
                own = Path(self.output_dir, self.run_name, "config.yaml")
                hint = f"the run was started with {before}; give that back (--config {own}), or choose another run_name"
                if name.startswith("optim.") and hasattr(self.train, "branch_from"):
                    way, what = ("init_from", "weights") if name == "optim.name" else ("branch_from", "training")
                    hint += f" (train.{way} takes this one's {what} along)"
                mistakes += UserError(name, now, hint).mistakes
        if mistakes:
            raise UserError.join(mistakes)
        return complete(type(self), saved)[1]

    if TYPE_CHECKING:  # each kind has its own sections, in its own order
        optim: ClipConfig
        train: LoopConfig
        guard: GuardConfig
        checkpoint: KeepConfig
        tracking: TrackingConfig
