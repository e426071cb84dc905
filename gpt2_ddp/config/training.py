"""The configuration of train_gpt2.py."""

# Sections are frozen, so a narrower type is sound.
# pyright: reportIncompatibleVariableOverride=false

import math
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from gpt2_ddp.config.base import Count, Fraction, Section, Size, Text, check_url
from gpt2_ddp.config.own_settings import OwnConfig
from gpt2_ddp.config.own_text import FEWEST_WARM_UP, TYPICAL_MACHINE, TYPICAL_TEXT, choose
from gpt2_ddp.config.run import (
    MOST_ITEMS,
    ClipConfig,
    GuardConfig,
    KeepConfig,
    LoopConfig,
    RunConfig,
    TrackingConfig,
)
from gpt2_ddp.files import local_copy

WINDOWS_PER_BLOCK = 1000
"""Windows per block of a mixture's order; each block holds every source in proportion
(`data.mixture`)."""


class Phase(Section):
    """New weights of a mixture, from a number of tokens on"""

    at_tokens: PositiveInt
    """start of the phase in training tokens; rounded up to a block of 1,000 windows"""
    weights: tuple[float, ...]
    """weights that replace data.weights from the start of the phase"""

    @model_validator(mode="before")
    @classmethod
    def _in_text(cls, value: object) -> object:
        """Parses `N:W:W:...` of the command line."""
        if not isinstance(value, str):
            return value
        at_tokens, *weights = value.split(":")
        return {"at_tokens": at_tokens, "weights": weights}


class DataConfig(Section):
    """The tokens to train on"""

    path: tuple[str, ...] = Field(default=("data/stdlib",), min_length=1)
    """folder of token shards with a manifest.json, written by prepare_data.py, or its URL, such as
    s3://BUCKET/data/web; or a mixture of several with the same tokenizer, like data/web
    data/code"""
    weights: tuple[float, ...] = ()
    """several folders: relative weight of each in the training data, like 7 2 1 (0: unused until a
    later phase); none: in proportion to their windows"""
    phases: tuple[Phase, ...] = ()
    """several folders: new weights from a number of tokens on, each as {at_tokens: N, weights:
    [...]}, or N:W:W:... on the command line; a phase may change until the run reaches it"""
    prepare: str | None = None
    """configuration of prepare_data.py to run first if shards are missing; its output is path, or a
    folder of path"""
    shift_windows: bool = False
    """cut the text into other windows in each epoch: the first one begins after 0 to block_size - 1
    tokens, by seed and epoch; for runs of several epochs. A run keeps it, and older releases refuse
    its checkpoints"""

    @field_validator("path")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_url, value))

    @property
    def paths(self) -> tuple[str, ...]:
        """The folder of each source, in order: of a URL that of its copy."""
        return tuple(self.urls.get(path, path) for path in self.path)

    @property
    def urls(self) -> dict[str, str]:
        """The folders of the copies of sources that are URLs."""
        return {path: local_copy(path) for path in self.path if "://" in path}

    @property
    def names(self) -> tuple[str, ...]:
        """Unique names of the sources, for rows: folder names, with the source's number after a
        repeated one."""
        names: list[str] = []
        for number, path in enumerate(self.paths):
            name = os.path.basename(os.path.abspath(path))
            while name in names:
                name += f"-{number}"
            names.append(name)
        return tuple(names)


LEARNED_POSITIONS = frozenset({"gpt2"})
"""Architectures with learned positions, and as many heads of keys and values as of queries. The
others rotate queries and keys."""


class ModelConfig(Section):
    """The model"""

    architecture: Literal["gpt2", "llama", "qwen3", "nanochat", "speedrun"] = "gpt2"
    """architecture, as transformers' class of that name has it; speedrun, which no other tool
    reads, adds embeddings of token pairs and of values to nanochat's (model/architecture.py has a
    table)"""
    n_layer: Size = 12
    """number of transformer blocks"""
    n_head: PositiveInt = 12
    """attention heads per block"""
    n_kv_head: PositiveInt | None = None
    """heads of keys and values, a divisor of n_head; null: n_head"""
    n_embd: Count = 768
    """width of the residual stream; a multiple of n_head"""
    block_size: int = Field(default=1024, ge=1, le=10**8)
    """context length T in tokens: length of a training window, and of the model's longest input"""
    dropout: Fraction = 0.0
    """dropout probability in embeddings, attention and residual branches"""
    attention_dropout: Fraction | None = None
    """dropout probability of attention weights alone, which takes a CPU half as long again for a
    step; null: as dropout"""
    n_inner: int | None = Field(default=None, ge=1, le=10**7)
    """width of the MLP; null: 4 n_embd, or with SwiGLU 8/3 n_embd, rounded up to a multiple of
    64"""
    tie_word_embeddings: bool | None = None
    """whether the head has the weights of the embedding; null: of gpt2 yes, of the others no"""
    rope_theta: PositiveFloat = 10_000.0
    """rotary positions: base of the wavelengths"""
    document_mask: bool = False
    """restrict attention to the token's own document; positions begin at 0 in each document"""

    @property
    def weights_dropout(self) -> float:
        """Dropout probability of attention weights."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_head or self.n_head


WEIGHT_FIELDS = ModelConfig.model_fields.keys() - {
    "dropout",
    "attention_dropout",
    "document_mask",
}
"""Fields of the model section that belong to the weights."""


class EarlierEnd(Section):
    """An end of the decay that held until a step, where the rest got a new end"""

    at_step: PositiveInt
    """last step with this end"""
    decay_steps: PositiveInt
    """optim.decay_steps until then"""

    @model_validator(mode="before")
    @classmethod
    def _in_text(cls, value: object) -> object:
        """Parses `N:END` of the command line."""
        if not isinstance(value, str):
            return value
        at_step, _, end = value.partition(":")
        return {"at_step": at_step, "decay_steps": end}


class OptimConfig(ClipConfig):
    """The optimizer and its schedule"""

    only_for: ClassVar[Mapping[str, str]] = {"muon_lr": "muon"}
    """Fields that one optimizer alone reads, and its name."""

    name: Literal["adamw", "muon"] = "adamw"
    """optimizer: AdamW, fused; or Muon for hidden matrices, and AdamW for everything else
    (docs/optimizers.md)"""
    lr: PositiveFloat = 6e-4
    """peak learning rate"""
    min_lr: NonNegativeFloat = 6e-5
    """learning rate at the end of the decay and after it"""
    embedding_lr: PositiveFloat | None = None
    """peak learning rate of embeddings that no matrix product reads, on the same schedule; null:
    lr"""
    muon_lr: PositiveFloat = 0.01
    """muon: peak learning rate of the matrices; the schedule is the same: always muon_lr / lr times
    AdamW's rate"""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """learning rate after the warm-up: cosine decay, wsd (warmup-stable-decay) or constant"""
    warmup_steps: NonNegativeInt = 700
    """steps of linear warm-up to lr"""
    decay_steps: PositiveInt | None = None
    """step at which the decay reaches min_lr; null: the run's last step, fixed when the decay
    begins"""
    earlier_ends: tuple[EarlierEnd, ...] = ()
    """values that decay_steps had before, each as {at_step: N, decay_steps: END}, or N:END on the
    command line: after step N, the rest of the decay was spread up to the next end; train.minutes
    writes them"""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """wsd: fraction of decay_steps, at the end, with a linear decay"""
    weight_decay: NonNegativeFloat = 0.1
    """decoupled weight decay of matrices and embeddings; biases and LayerNorms have none"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW: decay rates of the first and second moment"""
    grad_clip: NonNegativeFloat = 1.0
    """limit of the global gradient norm; 0: no clipping"""
    average: Fraction = 0.0
    """average the weights over the steps, and evaluate, sample, keep and export the average
    (docs/optimizers.md); the mean age of what is averaged, as a fraction of the steps so far, such
    as 0.05; 0: no average"""

    @property
    def decay_begins(self) -> float:
        """Last step whose learning rate does not depend on `decay_steps`; infinity for a constant
        schedule."""
        if self.schedule == "constant":
            return math.inf
        return min([self._decay_start, *(earlier.at_step for earlier in self.earlier_ends)])

    @property
    def _decay_start(self) -> int:
        """Last step before the decay to the first end."""
        if self.schedule == "cosine":
            return self.warmup_steps
        _, first_end = self._ends[0]
        stable = round((first_end or 0) * (1 - self.decay_fraction))
        return max(self.warmup_steps, stable)

    @property
    def _ends(self) -> list[tuple[float, int | None]]:
        """Each end of the decay, and the last step with it."""
        earlier = [(end.at_step, end.decay_steps) for end in self.earlier_ends]
        return [*earlier, (math.inf, self.decay_steps)]

    def end_at(self, step: int) -> int | None:
        """The end of the decay that holds in a step."""
        return next(end for until, end in self._ends if step <= until)

    def decayed(self, step: int) -> float:
        """The share of the decay that is over at a step, from 0 to 1: the clock of the schedule. It
        is linear in the step. After each of `earlier_ends`, the rest is spread evenly up to the
        next end, so it never jumps."""
        over = 0.0
        begin: float = self._decay_start
        for until, end in self._ends:
            assert end is not None, "decay_steps is resolved when a run starts"
            share = (min(step, until) - begin) / max(end - begin, 1)
            over += (1 - over) * min(max(share, 0.0), 1.0)
            if step <= until:
                break
            begin = until
        return over

    def ending_at(self, end: int, step: int) -> Self:
        """The schedule with a new end after a step, and the same learning rates up to it. If one of
        them depends on its end, what is left of the decay is spread up to the new end."""
        earlier = [earlier for earlier in self.earlier_ends if earlier.at_step < step]
        before = self.end_at(step)
        if before and before != end and not self.may_end_at(end, step):
            earlier.append(EarlierEnd(at_step=step, decay_steps=before))
        return self.model_copy(update={"decay_steps": end, "earlier_ends": tuple(earlier)})

    def is_over(self, step: int) -> bool:
        """Whether all steps after this one have the learning rate 0."""
        decays_to_zero = self.schedule != "constant" and self.min_lr == 0
        return decays_to_zero and self.decay_steps is not None and step + 1 >= self.decay_steps

    def may_end_at(self, end: int | None, step: int) -> bool:
        """Whether `decay_steps` may become `end` at this step: no earlier learning rate would
        differ."""
        changed = self.model_copy(update={"decay_steps": end, "earlier_ends": ()})
        return step <= min(self.decay_begins, changed.decay_begins)


FP8_MULTIPLE = 16
"""Sizes of matrices in fp8 are multiples of it."""


class TrainConfig(LoopConfig):
    """The training loop"""

    steps: PositiveInt | None = None
    """optimizer steps of the whole run; the parent's steps count in a branch (branch_from); null:
    epochs or minutes"""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """passes over the training split, instead of steps"""
    minutes: PositiveFloat | None = None
    """time from the first step to the end, instead of steps: a new run times steps of its warm-up,
    and then has as many steps as fit, fewer or more once its speed changes (docs/optimizers.md); a
    resume keeps their number"""
    global_batch_tokens: PositiveInt = 524_288
    """tokens per optimizer step over all processes; a multiple of block_size"""
    micro_batch_size: PositiveInt | Literal["auto"] = 16
    """most windows per forward pass and process; a step uses the largest divisor of the rank's
    windows; auto: as many as fit 90% of the free memory by the estimate of plan.py, on a CPU at
    most 16,384 tokens; config.yaml has the number, which a resume keeps while it fits"""
    activation_checkpointing: bool = False
    """recompute each block's activations in the backward pass: less memory, about a third more
    arithmetic"""
    fp8_head: bool = False
    """multiply in fp8 in the head, forward and backward, on GPUs of compute capability 8.9 or more,
    in bf16 training; evaluations stay in bf16. It changes the numbers, so a run keeps it; no GPU
    has measured it yet (docs/benchmarks.md)"""
    init_from: str | None = None
    """source of a new run's weights: a run folder or checkpoint; or, by transformers (extra
    `export`), a folder with config.json and safetensors, or `hub:OWNER/NAME[@REVISION]`; the data
    needs its tokenizer; fields of the model section that neither a file nor a flag gives are the
    source's; null: random"""
    branch_from: str | None = None
    """run folder or checkpoint to branch a new run from, with its step, weights, optimizer state
    and data position; learning rate, schedule and the optimizer's settings may differ; null:
    none"""


class EvalConfig(Section):
    """Validation during training"""

    every: PositiveInt = 250
    """steps between evaluations; the first and the last step are always evaluated"""
    tokens: PositiveInt | Literal["auto"] | None = "auto"
    """validation tokens per evaluation, evenly spread, always the same, shared equally by several
    folders; auto: 6% of the training tokens between two evaluations, at least 16 windows; null:
    all"""
    patience: PositiveInt | None = None
    """early stopping: the run ends after so many evaluations in a row without a new lowest
    val_loss; each new lowest saves a checkpoint; null: train all steps"""
    tasks: tuple[str, ...] = ()
    """tasks scored at each evaluation, on the same 500 items each, evenly spread: `hellaswag` or
    `lambada` (from the Hub), or jsonl files of items (docs/evaluation.md); `TASK:5` puts five
    examples before each item"""


class CheckpointConfig(KeepConfig):
    """Checkpoints"""

    every: PositiveInt = 1000
    """steps between checkpoints; a stop and the last step always save one"""


class TextTrackingConfig(TrackingConfig):
    """Metrics, and samples of text"""

    sample_every: NonNegativeInt = 0
    """steps between samples of generated text, printed and added to metrics.jsonl; 0: none"""
    sample_prompt: tuple[Text, ...] = Field(default=("",), min_length=1)
    """prompts of the samples, one or several; empty: the start of a document"""


class ParallelConfig(Section):
    """How processes share the model"""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each process has the whole model; fsdp: each has a part of the weights, gradients and
    optimizer state (docs/sharded.md), which `accelerate config` may select, too"""
    replicas: PositiveInt = 1
    """fsdp: groups of processes; each group has the model once, in parts; a divisor of the number
    of processes"""


TaskName = Annotated[
    str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$", title="FILE.py:CLASS, MODULE:CLASS")
]


class TrainingConfig(RunConfig):
    """train_gpt2.py: pretrain a GPT on token shards"""

    kind = "gpt2"
    rollbacks = 3
    kept = (
        "seed",
        "model",
        "optim",
        "train.global_batch_tokens",
        "train.fp8_head",
        "data.shift_windows",
    )
    alternatives = (
        ("train.steps", "train.epochs", "train.minutes"),
        ("optim.decay_steps", "optim.earlier_ends"),
    )
    first = (
        "run_name",
        "data.path",
        "model.architecture",
        "model.n_layer",
        "model.n_head",
        "model.n_embd",
        "model.block_size",
        "optim.lr",
        "train.steps",
        "train.global_batch_tokens",
        "train.micro_batch_size",
        "train.mixed_precision",
        "train.max_minutes",
        "eval.every",
        "checkpoint.every",
    )

    own_text: bool = False
    """a text of one's own: fields of model, optimizer, step and length that neither a file nor a
    flag gives follow from the size of the text, the speed of this machine and the time
    (docs/own-text.md); the run's config.yaml has their values"""
    task: TaskName | None = None
    """FILE.py:CLASS or MODULE:CLASS, a subclass of `Pretraining` (docs/extend.md); checkpoints
    record its file, and a resume takes it from there; its settings are flags --own.NAME, which
    `--help --task FILE.py:CLASS` lists; null: Pretraining, or the class that the run recorded"""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TextTrackingConfig = TextTrackingConfig()
    launch: ParallelConfig = ParallelConfig()
    own: OwnConfig = OwnConfig()

    @property
    def inherited(self) -> set[str]:
        """Fields of the model section that come from the model of `train.init_from`, since none of
        them is given."""
        return WEIGHT_FIELDS - self.model.model_fields_set if self.train.init_from else set()

    def with_model(self, other: ModelConfig) -> Self:
        """The configuration with the inherited fields of another model section. Raises: UserError,
        as `load`."""
        inherited = other.model_dump(include=self.inherited)
        if self.own_text:  # the rule completes and checks it later
            return self.model_copy(update={"model": self.model.model_copy(update=inherited)})
        model = self.model.model_dump() | inherited
        return self.model_validate(self.model_dump() | {"model": model})

    @property
    def patience(self) -> int | None:
        return self.eval.patience

    @property
    def average(self) -> float:
        return self.optim.average

    @property
    def parallel(self) -> Literal["ddp", "fsdp"]:
        return self.launch.parallel

    def may_change(self, name: str, before: object, step: int) -> bool:
        """Allows inherited fields, null for the saved end of the schedule, and new ends that no
        step so far depends on."""
        if name.removeprefix("model.") in self.inherited:
            return True
        optim = self.optim
        if name == "optim.decay_steps":
            end = cast(int | None, before)
            is_same = optim.end_at(step) == end
            return optim.decay_steps is None or is_same or optim.may_end_at(end, step)
        if name == "optim.earlier_ends":
            ends = [earlier.model_dump() for earlier in optim.earlier_ends]
            kept = cast(list[dict[str, int]], before)
            is_longer = ends[: len(kept)] == kept
            later = optim.earlier_ends[len(kept) :]
            return optim.decay_steps is None or (
                is_longer and all(step <= end.at_step for end in later)
            )
        return False

    def with_steps(self, steps: int, step: int) -> Self:
        """The configuration with so many steps in place of `train.minutes`, or of another number,
        from a step on. The decay ends with them, or after a longer warm-up."""
        end = max(steps, self.optim.warmup_steps + 1)
        train = self.train.model_copy(update={"steps": steps, "minutes": None})
        optim = self.optim.ending_at(end, step)
        return self.model_copy(update={"train": train, "optim": optim})

    @property
    def checkpoint_format(self) -> int:
        return 2 if self.data.shift_windows else 1

    @property
    def shifts(self) -> int:
        """Number of tokens at which an epoch's first window may begin: 0 alone, or with
        `data.shift_windows` all below block_size."""
        return self.model.block_size if self.data.shift_windows else 1

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of a mixture's order."""
        return WINDOWS_PER_BLOCK * self.model.block_size

    @property
    def phase_begins(self) -> list[int]:
        """Start of each phase in `data.phases`, as a position in the order, in windows."""
        return [
            -(-phase.at_tokens // self.block_tokens) * WINDOWS_PER_BLOCK
            for phase in self.data.phases
        ]

    @property
    def matrix(self) -> tuple[int, int]:
        return self.model.n_embd, self.model.n_inner or 4 * self.model.n_embd

    @property
    def global_batch_windows(self) -> int:
        """Windows of block_size tokens per optimizer step, over all processes."""
        return self.train.global_batch_tokens // self.model.block_size

    def total_steps(self, epoch_size: int | None) -> int | None:
        """Steps of the whole run; None where they are unknown: with `train.minutes`, or with
        `train.epochs` of an unknown `epoch_size`, in windows."""
        if self.train.epochs is None:
            return self.train.steps
        return epoch_size and math.ceil(self.train.epochs * epoch_size / self.global_batch_windows)

    @property
    def auto_eval_tokens(self) -> int:
        """Tokens of `eval.tokens: auto`: 6% of the training tokens between two evaluations, at
        least 16 windows."""
        windows = round(0.06 * self.eval.every * self.global_batch_windows)
        return max(windows, 16) * self.model.block_size

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        optim = self.optim
        train = self.train
        if self.own_text:  # the given fields must fit what the rule makes of them
            choose(self, TYPICAL_TEXT, TYPICAL_MACHINE)
            return
        if not self.inherited:
            yield from self._model_mistakes()
        yield from self._length_mistakes()
        if train.branch_from is not None and train.init_from is not None:
            hint = "excludes train.init_from; remove one of the two"
            yield "train.branch_from", train.branch_from, hint
        if optim.min_lr > optim.lr:
            yield "optim.min_lr", optim.min_lr, f"should be at most optim.lr ({optim.lr})"
        defaults = OptimConfig()
        for field, name in optim.only_for.items():
            value = getattr(optim, field)
            if name != optim.name and value != getattr(defaults, field):
                hint = f"is for --optim.name {name} only; add that flag, or remove this one"
                yield f"optim.{field}", value, hint
        by_accelerate = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if self.launch.replicas > 1 and self.parallel != "fsdp" and not by_accelerate:
            hint = "is for --launch.parallel fsdp only; add that flag, or remove this one"
            yield "launch.replicas", self.launch.replicas, hint
        if len(self.data.paths) > 1 or self.data.weights or self.data.phases:
            yield from mixture_mistakes(self)
        if optim.decay_steps is not None and optim.warmup_steps >= optim.decay_steps:
            hint = f"should be less than optim.decay_steps ({optim.decay_steps})"
            yield "optim.warmup_steps", optim.warmup_steps, hint
        yield from self._decay_mistakes()

    def _decay_mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors of the ends that the decay had."""
        optim = self.optim
        earlier = optim.earlier_ends
        next_ends = [*(end.decay_steps for end in earlier[1:]), optim.decay_steps or 0]
        after = 0
        for end, next_end in zip(earlier, next_ends[: len(earlier)], strict=True):
            if not after < end.at_step < min(end.decay_steps, next_end):
                given = f"{end.at_step}:{end.decay_steps}"
                hint = f"the step should be above {after} and below both ends, this and the next"
                yield "optim.earlier_ends", given, f"{hint} ({next_end}, see optim.decay_steps)"
                return
            after = end.at_step

    def _length_mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors of the run's length, and of a schedule that does not fit `train.minutes`."""
        optim = self.optim
        train = self.train
        lengths = {
            "train.steps": train.steps,
            "train.epochs": train.epochs,
            "train.minutes": train.minutes,
        }
        given = [name for name, length in lengths.items() if length is not None]
        if not given:
            yield "train.steps", None, "set train.steps, train.epochs or train.minutes"
        elif len(given) > 1:
            yield given[1], lengths[given[1]], f"{given[0]} is set, too; remove one of the two"
        if train.minutes is None:
            return
        if train.branch_from is not None:
            hint = "a branch has its parent's steps; set train.steps"
            yield "train.branch_from", train.branch_from, hint
        if optim.decay_steps is not None:
            hint = "the decay ends with train.minutes; remove this field"
            yield "optim.decay_steps", optim.decay_steps, hint
        elif optim.decay_begins < FEWEST_WARM_UP:
            hint = f"should be at least {FEWEST_WARM_UP}: train.minutes times steps of the warm-up"
            yield "optim.warmup_steps", optim.warmup_steps, hint

    def _model_mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors of the shape, and of a step's tokens, which depend on it."""
        width = self.model.n_embd
        heads = self.model.n_head
        keys = self.model.key_heads
        is_rotary = self.model.architecture not in LEARNED_POSITIONS
        unit = 2 * heads if is_rotary else heads  # rotary positions rotate pairs
        if width % unit:
            yield "model.n_embd", width, f"should be a multiple of {unit}, for model.n_head {heads}"
        if heads % keys or not (is_rotary or keys == heads):
            names = " and ".join(sorted(LEARNED_POSITIONS))
            hint = f"should divide model.n_head ({heads}), or be null for {names}"
            yield "model.n_kv_head", keys, hint
        tokens = self.train.global_batch_tokens
        size = self.model.block_size
        if tokens % size or tokens > MOST_ITEMS * size:
            hint = f"should be a multiple of model.block_size ({size})"
            most = f"up to {MOST_ITEMS:,} times as much"
            yield "train.global_batch_tokens", tokens, f"{hint}, {most}"
        if self.train.fp8_head:
            yield from self._fp8_mistakes()

    def _fp8_mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors of a head in fp8; the device is checked when the run starts."""
        precision = self.train.mixed_precision
        if precision in ("no", "fp16"):
            hint = f"needs train.mixed_precision bf16, which is {precision}"
            yield "train.fp8_head", True, hint
        sizes = {"model.n_embd": self.model.n_embd, "model.block_size": self.model.block_size}
        for name, size in sizes.items():
            if size % FP8_MULTIPLE:
                yield name, size, f"should be a multiple of {FP8_MULTIPLE}, for train.fp8_head"


BUILT_IN = "configs/gpt2_stdlib.yaml"
OWN_TEXT = "configs/own_text.yaml"


def training_default(flags: Mapping[str, Any]) -> str:
    """The preset without `--config`, for the built-in corpus or other data. `flags` are values of
    the command line, by dotted names."""
    (built_in,) = DataConfig().path
    data = os.path.normpath(str(flags.get("data.path", built_in)))
    return BUILT_IN if data == built_in else OWN_TEXT


MOST_SOURCES = 32
"""Most sources of a mixture: with more, the largest source could get less than its share of a
block."""


def mixture_mistakes(config: TrainingConfig) -> Iterator[tuple[str, object, str]]:
    """User errors between the fields of several folders, as `Command.mistakes`."""
    data = config.data
    paths = config.data.paths
    if len({os.path.normpath(path) for path in paths}) < len(paths):
        hint = "contains a folder twice; name it once and set data.weights"
        yield "data.path", " ".join(paths), hint
    if len(paths) > MOST_SOURCES:
        hint = f"should be at most {MOST_SOURCES}; prepare several as one"
        yield "data.path", f"{len(paths)} folders", hint
    given = {"data.weights": data.weights} if data.weights else {}
    given |= {
        f"data.phases, number {number}": phase.weights
        for number, phase in enumerate(data.phases, 1)
    }
    for field, weights in given.items():
        if len(weights) != len(paths) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            hint = f"should be {len(paths)} numbers, one for each folder of data.path"
            yield field, " ".join(map(str, weights)), f"{hint}, each at least 0, not all 0"
    begins = config.phase_begins
    for phase, (before, begin) in zip(data.phases, pairwise([0, *begins]), strict=True):
        if begin <= before:
            block = config.block_tokens
            hint = f"should begin a block of {block} tokens or more after the last phase"
            yield "data.phases", phase.at_tokens, hint
