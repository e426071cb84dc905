"""What can be configured in train_gpt2.py, and what other training runs share with it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from gpt2_ddp.config.base import Command, Section


class ClipConfig(Section):
    """The optimizer"""

    grad_clip: float = Field(default=0.0, ge=0)
    """largest global gradient norm; 0 turns clipping off"""


class LoopConfig(Section):
    """The training loop"""

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """autocast; auto follows `accelerate config`; fp16 (CUDA) scales the loss"""
    compile: bool = False
    """torch.compile the model"""
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


class TrackingConfig(Section):
    """Metrics"""

    log_every: int = Field(default=10, ge=1)
    """steps between rows of metrics.jsonl"""
    log_with: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """a tracker besides metrics.jsonl; wandb logs offline when nobody is logged in"""
    project: str = "gpt2_ddp"
    """project name in the tracker"""


class RunConfig(Command):
    """A training run: what the loop asks for, whatever is trained"""

    kind: ClassVar[str] = ""
    """what is trained; a checkpoint says so"""
    kept: ClassVar[tuple[str, ...]] = ("seed", "model", "optim")
    """sections and fields that have to stay when a run goes on"""

    output_dir: str = "runs"
    """folder of run folders"""
    run_name: str = Field(default="gpt2", min_length=1, pattern=r"^\w[\w.-]*$")
    """the run's folder is output_dir/run_name; the same command given twice goes on with it"""
    seed: int = Field(default=1337, ge=0, lt=2**63)
    """fixes initial weights, data order and dropout"""
    fresh: bool = Field(default=False, exclude=True)
    """start over; the run folder must be empty or absent, since nothing is overwritten"""

    @property
    def backend(self) -> str:
        """Of the process group: auto, nccl or gloo."""
        return "auto"

    @property
    def rollbacks(self) -> int:
        """How often a run that has diverged goes back and passes over what it was trained on."""
        return 0

    if TYPE_CHECKING:  # sections of every run; each kind has its own, in its own order
        optim: ClipConfig
        train: LoopConfig
        guard: GuardConfig
        checkpoint: KeepConfig
        tracking: TrackingConfig


class DataConfig(Section):
    """The tokens to train on"""

    path: str = "data/stdlib"
    """folder of token shards with a manifest.json, as prepare_data.py writes it"""
    prepare: str | None = None
    """recipe (a config of prepare_data.py whose output is `path`) that is followed first when there are no shards"""
    verify_hashes: Literal["always", "changed", "never"] = "changed"
    """check the shards' SHA-256 before the first step (about a second per GB, shared among a node's processes): of all
    of them always; of those that have changed since they were last found right, by size, times and inode, which are
    kept in path/.verified.jsonl (bits that decay on the disk change none of these); or never"""
    workers: int = Field(default=0, ge=0, le=64)
    """loader processes per rank; 0 reads in the training process, which costs about 0.1 ms a batch"""

    @field_validator("verify_hashes", mode="before")
    @classmethod
    def _yes_or_no(cls, value: object) -> object:
        with suppress(ValidationError):  # of the first releases: true, or any other word for it
            return "changed" if TypeAdapter(bool).validate_python(value) else "never"
        return value


class ModelConfig(Section):
    """The GPT; the defaults are GPT-2 (124M)"""

    n_layer: int = Field(default=12, ge=1)
    """number of transformer blocks"""
    n_head: int = Field(default=12, ge=1)
    """attention heads per block"""
    n_embd: int = Field(default=768, ge=1)
    """width of the residual stream; a multiple of n_head"""
    block_size: int = Field(default=1024, ge=1)
    """context length T in tokens: the longest sequence the model sees, and the length of a training window"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout probability in embeddings, attention and residual branches"""
    bias: bool = True
    """biases in linear layers and LayerNorms, as GPT-2 has them"""


class OptimConfig(ClipConfig):
    """The optimizer and its schedule"""

    name: Literal["adamw"] = "adamw"
    """optimizer: AdamW, fused"""
    lr: float = Field(default=6e-4, gt=0)
    """peak learning rate"""
    min_lr: float = Field(default=6e-5, ge=0)
    """learning rate at the end of the decay and after it"""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """after the warm-up: cosine decay, warmup-stable-decay, or constant"""
    warmup_steps: int = Field(default=700, ge=0)
    """steps of linear warm-up to lr"""
    decay_steps: int | None = Field(default=None, ge=1)
    """step at which the decay reaches min_lr; null: the number of steps the run was first started with"""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """wsd: the last part of decay_steps in which the rate falls linearly"""
    weight_decay: float = Field(default=0.1, ge=0)
    """decoupled weight decay of matrices and embeddings; biases and LayerNorms have none"""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment"""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon"""
    grad_clip: float = Field(default=1.0, ge=0)
    """largest global gradient norm; 0 turns clipping off"""

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both should be at least 0 and less than 1")
        return betas


class TrainConfig(LoopConfig):
    """The training loop"""

    steps: int | None = Field(default=None, ge=1)
    """optimizer steps of the whole run"""
    epochs: float | None = Field(default=None, gt=0)
    """passes over the training split; takes the place of steps when set"""
    global_batch_tokens: int = Field(default=524_288, ge=1)
    """tokens per optimizer step over all processes; a multiple of block_size times the number of processes"""
    micro_batch_size: int = Field(default=16, ge=1)
    """windows per forward pass and process, at most: the largest divisor of the rank's share is taken"""
    activation_checkpointing: bool = False
    """recompute each block's activations in the backward pass: less memory, about a third more arithmetic"""
    init_from: str | None = None
    """run folder or checkpoint whose weights start a new run"""


class EvalConfig(Section):
    """Validation during training"""

    every: int = Field(default=250, ge=1)
    """steps between evaluations; the first and the last step are always evaluated"""
    tokens: int | None = Field(default=None, ge=1)
    """validation tokens per evaluation, evenly spread over the split; null: all of them"""
    batch_size: int = Field(default=16, ge=1)
    """windows per forward pass and process"""


class CheckpointConfig(KeepConfig):
    """Checkpoints"""

    every: int = Field(default=1000, ge=1)
    """steps between checkpoints; a stop and the last step always save one"""


class RollbackConfig(GuardConfig):
    """What is done about steps that go wrong"""

    rollbacks: int = Field(default=3, ge=0)
    """how often a run that has diverged goes back to the newest good checkpoint, to pass over the data that it was
    trained on since; after that it stops, with exit code 1"""


class TextTrackingConfig(TrackingConfig):
    """Metrics, and samples of text"""

    sample_every: int = Field(default=0, ge=0)
    """steps between samples of generated text, printed and added to samples.jsonl; 0: none"""
    sample_prompt: str = ""
    """what samples begin with; empty: the start of a document"""


class TrainingConfig(RunConfig):
    """train_gpt2.py: pretrain a GPT on token shards"""

    kind = "gpt2"
    kept = ("seed", "model", "optim", "train.global_batch_tokens")

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    guard: RollbackConfig = RollbackConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TextTrackingConfig = TextTrackingConfig()

    @property
    def rollbacks(self) -> int:
        """`guard.rollbacks`."""
        return self.guard.rollbacks

    @property
    def global_batch_windows(self) -> int:
        """G: windows of block_size tokens per optimizer step, over all processes."""
        return self.train.global_batch_tokens // self.model.block_size

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        model, optim, train = self.model, self.optim, self.train
        if model.n_embd % model.n_head:
            lower = max(model.n_embd // model.n_head, 1) * model.n_head
            yield "model.n_embd", model.n_embd, f"should be a multiple of model.n_head ({model.n_head}), like {lower}"
        if train.global_batch_tokens % model.block_size:
            near = max(round(train.global_batch_tokens / model.block_size), 1) * model.block_size
            cure = f"should be a multiple of model.block_size ({model.block_size}), like {near}"
            yield "train.global_batch_tokens", train.global_batch_tokens, cure
        if train.steps is None and train.epochs is None:
            yield "train.steps", None, "set train.steps or train.epochs"
        if optim.min_lr > optim.lr:
            yield "optim.min_lr", optim.min_lr, f"should be at most optim.lr ({optim.lr})"
        end = optim.decay_steps
        if end is not None and optim.warmup_steps >= end:
            cure = f"should be less than the steps of the schedule ({end}, optim.decay_steps)"
            yield "optim.warmup_steps", optim.warmup_steps, cure
