"""The state of a run without its tensors: one typed value, the content of a checkpoint's
state.json. No torch.

Each part of a run has its section of it, or returns it (`state_dict`) and loads it
(`load_state_dict`). Types, defaults and the JSON form stand here alone. What a file lacks takes its
default; fields that are unknown here are ignored.
"""

import hashlib
import math
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SerializeAsAny

from gpt2_ddp.files import check_file_name

MOST = 2**62  # far above all numbers of training; their sums fit 64 bits
Count = Annotated[int, Field(ge=0, lt=MOST)]
Positive = Annotated[int, Field(ge=1, lt=MOST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# JSON lacks infinity
Loss = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
Units = Annotated[Finite, Field(ge=0, lt=MOST)]
Sums = tuple[Finite, Finite, Finite]
RunId = Annotated[str, Field(pattern=r"^[\w-]*$")]
"""Trackers make names of files of it."""
FIRST_DIGEST = FIRST_CHAIN = "0" * 64
"""The order digest before the first step, and the chain before the first row."""


def next_chain(chain: str, text: str) -> str:
    """Chain of a row: SHA-256 of the chain before it, as 32 bytes, followed by the row's JSON text
    without a chain."""
    return hashlib.sha256(bytes.fromhex(chain) + text.encode()).hexdigest()


Scores = dict[str, int | float | None]
"""Results of an evaluation, by their names in metrics.jsonl. The lowest `val_loss` decides which
checkpoint is best."""


class Section(BaseModel, ser_json_inf_nan="null"):
    """A part of the state."""

    def load_state_dict(self, state: Self) -> None:
        """Takes the values of another one, except those that no checkpoint has."""
        for name, value in state.model_copy(deep=True):
            if not type(self).model_fields[name].exclude:
                setattr(self, name, value)


class Pending(Section):
    """The work that follows a step. If a stop interrupts it, the checkpoint keeps it, and a resumed
    run finishes it.

    Attributes:
        row: empty once it is written.
        evaluate: whether the model is to be evaluated; the scores join the row.
        sample: whether a sample is to be generated.
        save: whether a checkpoint is to be saved. Not kept: the loop sets it on resume.
    """

    row: dict[str, Any] = {}
    evaluate: bool = False
    sample: bool = False
    save: bool = Field(default=False, exclude=True)

    def __bool__(self) -> bool:
        return bool(self.row) or self.evaluate or self.sample


class Best(Section):
    """The evaluation with the lowest val_loss.

    Attributes:
        tokens: that were scored. Another number starts a new comparison: losses over other tokens
            differ.
        since: number of evaluations after it.
    """

    step: Count = 0
    val_loss: Loss = math.inf
    tokens: float | None = None
    since: Count = 0

    def after(self, step: int, scores: Scores) -> "Best":
        """The best evaluation once `scores` are known. Scores without a val_loss change nothing."""
        loss = scores.get("val_loss")
        if loss is None:
            loss = math.nan
        tokens = scores.get("val_tokens")
        if math.isfinite(loss) and (loss < self.val_loss or tokens != self.tokens):
            return Best(step=step, val_loss=loss, tokens=tokens)
        counts = "val_loss" in scores and math.isfinite(self.val_loss)
        return self.model_copy(update={"since": self.since + 1}) if counts else self


class Parent(Section):
    """The checkpoint that a branch started from (`train.branch_from`).

    Attributes:
        parent: path of the checkpoint.
        checkpoint_sha256: of its manifest.
    """

    parent: str
    run_id: RunId
    step: Count
    checkpoint_sha256: str


class Progress(Section):
    """Steps taken, scores, and pending work.

    Attributes:
        step: number of steps taken.
        steps: of the whole run; None while that is unknown. Not saved: it follows from the
            configuration.
        scores: the newest value of each name.
        scored_at: step of the newest evaluation.
        best: the best evaluation.
    """

    run_id: RunId = ""
    step: Count = 0
    steps: Count | None = Field(default=None, exclude=True)
    rollbacks: Count = 0
    pending: Pending = Pending()
    scores: Scores = {}
    scored_at: Count | None = None
    best: Best = Best()
    branched_from: Parent | None = None

    @property
    def first_step(self) -> int:
        """The step that the run starts after: 0, or the step where it branched off."""
        return self.branched_from.step if self.branched_from else 0

    @property
    def is_new(self) -> bool:
        """Whether the run still lacks the evaluation before its first step."""
        return self.step == self.first_step and not self.pending and self.scored_at is None

    @property
    def val_loss(self) -> float | None:
        """Validation loss of the weights of this step; None if they were not evaluated."""
        return self.scores.get("val_loss") if self.scored_at == self.step else None

    @property
    def is_best(self) -> bool:
        """Whether this step has the best evaluation."""
        return self.scored_at == self.best.step == self.step

    def early_end(self, patience: int | None) -> str:
        """Reason to end the run before its last step; empty without one. `patience`: evaluations in
        a row without a new lowest val_loss that end it; None: no limit."""
        if patience is None or self.best.since < patience:
            return ""
        best = f"{self.best.val_loss:.4f} since step {self.best.step}"
        return f"eval.patience = {patience}: no val_loss below {best}"

    def add_scores(self, scores: Scores) -> None:
        """Records an evaluation of the current step."""
        self.scores |= scores
        self.best = self.best.after(self.step, scores)
        self.scored_at = self.step


class FeedState(Section):
    """Where the data stand.

    Attributes:
        position: the first position of the order that no step has taken.
        skipped_ranges: [start, stop) of positions that no step takes.
        order_digest: of all items so far.
    """

    position: Count = 0
    skipped_ranges: list[tuple[Count, Count]] = []
    order_digest: Digest = FIRST_DIGEST

    @property
    def consumed(self) -> int:
        """Items trained on, over all ranks."""
        return self.position - sum(
            max(min(stop, self.position) - start, 0) for start, stop in self.skipped_ranges
        )


class Unjudged(NamedTuple):
    """A step without a verdict: its mean loss, and whether its gradient was bad."""

    step: Count
    loss: Loss
    bad: bool


class ClimbState(Section):
    """The lowest training loss so far, and how long the losses have been far above it. The guard
    judges by them.

    Attributes:
        phase: of the data; another one starts a new comparison.
        start: mean loss of the first block.
        best: lowest mean loss of a block; infinity before the first one has ended.
        noise: standard deviation of the losses in that block.
        block: the block that has not ended: number of losses, sum, sum of squares.
        low: the last step whose loss was near the best.
        above: first step of the losses above the limit in a row; None after one below.
    """

    phase: Count = 0
    start: Finite = 0
    best: Loss = math.inf
    noise: Finite = 0
    block: Sums = (0, 0, 0)
    low: Count = 0
    above: Count | None = None


class GuardState(Section):
    """What the guard remembers.

    Attributes:
        judged: the last step with a verdict.
        first_bad: first of the bad steps in a row; None after a good one.
        losses: running statistics of the good steps' losses.
        unjudged: the steps without a verdict.
    """

    judged: Count = 0
    first_bad: Count | None = None
    losses: Sums = (0, 0, 0)
    climb: ClimbState = ClimbState()
    unjudged: list[Unjudged] = []


class OptimizerState(Section):
    """What the optimizer remembers beside its tensors.

    Attributes:
        norms: running statistics of the good gradients' norms.
        scaler: the loss scaler's, under fp16.
    """

    norms: Sums = (0, 0, 0)
    scaler: dict[str, int | Finite] | None = None


class LossSum(NamedTuple):
    """Sum of losses. In fp64 it is exact below 2^29 times the smallest loss, so a resumed run gets
    the same bits.

    Attributes:
        loss: sum of the losses that are finite.
        valid: number of their units (tokens, samples).
        units: number of all units.
    """

    loss: Finite = 0
    valid: Units = 0
    units: Units = 0

    @property
    def mean(self) -> float:
        """Mean loss of the valid units; NaN for none."""
        return self.loss / self.valid if self.valid else math.nan


class Losses(Section):
    """Losses, without steps that changed nothing.

    Attributes:
        epoch: since the last epoch ended.
        since_row: since the last row.
        skipped: number of steps that changed nothing.
    """

    epoch: LossSum = LossSum()
    since_row: LossSum = LossSum()
    skipped: Count = 0


class LogEnd(Section):
    """The rows before the checkpoint.

    Attributes:
        chain: that of the last row.
        bytes: length of the file up to its end.
    """

    chain: Digest = FIRST_CHAIN
    bytes: Count = 0


class Setup(Section):
    """What the run trains on and with: items of an epoch, processes, device, threads, compilation
    and software."""

    epoch_size: Count
    processes: Positive = 1
    device: str = ""
    threads: Positive | None = None
    compile: str = "off"
    versions: dict[str, str] = {}


class Mixture(Section):
    """The data of several folders: hashes of their manifests, and their weights from a position
    on."""

    manifests: list[str]
    phases: list[tuple[Count, list[str]]]


class TaskState(Section, extra="allow"):
    """What the task of the run adds."""


CODE = "task.py"
"""In a checkpoint: the source of a task class of one's own."""


class OwnCode(Section):
    """A task class of one's own: its name, FILE.py:CLASS, and the hash of its source."""

    name: str
    sha256: Digest


class GPTData(TaskState):
    """Identity of a GPT's data, and the micro-batch.

    Attributes:
        data_manifest: hash of the manifest of the first folder.
        tasks: SHA-256 of the items of each of `eval.tasks`.
        mixture: of several folders; None for one.
        code: the task class of one's own; None without one.
    """

    tokenizer: Annotated[str, AfterValidator(check_file_name)]
    tokenizer_sha256: str
    vocab_size: Count
    data_manifest: str
    micro_batch: Positive
    tasks: dict[str, str] = {}
    mixture: Mixture | None = None
    code: OwnCode | None = None


class JobData(TaskState):
    """Batch and learning rate of all processes of a small job, and identity of its data."""

    global_batch_size: Positive
    lr: Finite
    data_hash: str
    classes: list[str] | None = None
    image_shape: tuple[Positive, Positive, Positive] | None = None


class State(Section):
    """The state of a run after a step."""

    kind: str
    progress: Progress
    feed: FeedState
    guard: GuardState = GuardState()
    optimizer: OptimizerState = OptimizerState()
    losses: Losses = Losses()
    log: LogEnd = LogEnd()
    setup: Setup
    task: SerializeAsAny[TaskState]

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def identity(self) -> dict[str, Any]:
        """Run, step, setup and task, in plain JSON values: the first fields of start rows."""
        task = self.task.model_dump(mode="json", exclude_defaults=True)
        return {
            "kind": self.kind,
            "run_id": self.progress.run_id,
            "step": self.step,
            **self.setup.model_dump(),
            **task,
        }

    @property
    def record(self) -> dict[str, Any]:
        """The fields that rows have too, in plain JSON values."""
        return {
            **self.identity,
            "rollbacks": self.progress.rollbacks,
            "skipped": self.losses.skipped,
            "val_loss": self.progress.val_loss,
            **self.feed.model_dump(mode="json"),
        }

    @staticmethod
    def of(kind: str, **sections: object) -> "State":
        """The state of a run of this kind. `sections`: those of the class, or their values."""
        return KINDS.get(kind, State).model_validate({"kind": kind, **sections})

    def to_json(self) -> str:
        """The text of state.json. Numbers that are not finite become null."""
        return self.model_dump_json(indent=1)


class GPTState(State):
    task: GPTData


class JobState(State):
    task: JobData


JOBS = ("regression", "classifier", "transformer")
KINDS: dict[str, type[State]] = {"gpt2": GPTState, **dict.fromkeys(JOBS, JobState)}
"""The class of each kind of run; `State` for others."""
