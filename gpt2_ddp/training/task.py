"""The base class of a task: what one kind of training (a GPT, a regression, a classifier) adds to
the common loop. And checks of the numbers that a task adds to rows, by `evaluate` or by
`row_fields`."""

# accelerate has no type stubs
# pyright: reportMissingTypeStubs=false

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.data.feed import Feed, MicroBatch
from gpt2_ddp.distributed.ranks import check_ranks_agree, from_main, on_every_rank
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.metrics import Sample
from gpt2_ddp.records.rows import finite, is_own
from gpt2_ddp.state import Scores, TaskState

Poll = Callable[[], None]
"""Heartbeat of long work. Raises `training.stop.Interrupted` if a stop was requested."""

Loss = Tensor | tuple[Tensor, dict[str, Tensor]]
"""A sum of losses, fp32 scalar; or such a sum and further ones by name, already weighted. Gradients
are of all of them. Rows have the mean of the first as `loss`, and the others' means under their
names."""


class Due(NamedTuple):
    """The work that follows a step."""

    log: bool
    evaluate: bool = False
    save: bool = False
    sample: bool = False

    @property
    def row(self) -> bool:
        """Whether the step has a row; an evaluation's scores join it."""
        return self.log or self.evaluate


# covariant: only the task itself replaces its configuration, by one of the same class
ConfigT = TypeVar("ConfigT", bound=RunConfig, covariant=True)


class Task(ABC, Generic[ConfigT]):
    """One kind of training: data, model, loss, optimizer, evaluation. Run and loop are the same for
    all. A `MakeTask` constructs it, and raises the user errors found in small files. `feed` and
    `model` exist after `load`.

    Attributes:
        config: the configuration; complete after `load`, except for an unknown number of steps.
        unit: of the mean loss, in the plural: tokens, samples.
        units_per_item: units in an item of the feed.
        flops_per_unit: FLOPs of training a unit, for the MFU; 0: rows have no MFU.
        feed: the items of each step.
        files: more content of each checkpoint, by name, such as a tokenizer.
        start_fields: more content of the start row, by name.
        model: the plain model, fp32, on the CPU. Other ranks receive the main process's weights.
            With fsdp, it is on the meta device.
        initial: with fsdp, names and values of a new run's weights, on the main process.
    """

    config: ConfigT
    unit: str = "samples"
    units_per_item: int = 1
    flops_per_unit: int = 0
    feed: Feed
    files: Mapping[str, bytes] = MappingProxyType({})
    start_fields: Mapping[str, Any] = MappingProxyType({})
    model: nn.Module
    initial: Iterator[tuple[str, Tensor]] = iter(())

    @abstractmethod
    def load(self, watchdog: Watchdog, is_complete: bool = False) -> None:
        """Compares the data with the run's and, unless it `is_complete`, makes `feed` and `model`.
        Raises: UserError, on every rank alike."""

    @abstractmethod
    def total_steps(self, epoch_size: int | None) -> int | None:
        """Optimizer steps of the whole run; None if they depend on an unknown `epoch_size`, in
        items, or are known later (`set_steps`)."""

    def set_steps(self, steps: int, step: int) -> None:
        """Makes the run one of so many steps, after step `step`, and changes `config` accordingly.
        Called during the training of a task whose `total_steps` is None after `load`
        (`train.minutes`). No setting of a step up to `step` may change."""
        raise NotImplementedError

    @abstractmethod
    def build_optimizer(self) -> Optimizer:
        """The optimizer of the plain model, which is on its device."""

    @abstractmethod
    def schedule(self, step: int) -> dict[str, float]:
        """The optimizer's settings in step `step`, the first being 1; `lr` is one of them
        (`optimizer.set_values`). A pure function, so no state has to be saved. Rows have all of
        them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        """Sum of the losses over the micro-batch's valid rows, by the prepared model."""

    def row_fields(self, step: int) -> dict[str, float] | None:
        """Numbers for the row of a step, by name, equal on all ranks; None for a task without any.

        Called in steps with a row, before clipping. `.grad` is of the step's mean loss, all-reduced
        (fsdp: this rank's part), without fp16's loss scale."""

    def after_step(self, step: int) -> None:
        """Changes the model after each step, also a skipped one. The change must follow from the
        weights and from buffers of the model, which checkpoints hold, and be equal on all ranks."""

    def less_memory(self) -> str:
        """What to do with `train.micro_batch_size` if a step needs more than the GPU's memory, for
        the line of an error."""
        return "halve it"

    @abstractmethod
    def due(self, step: int, last: bool) -> Due:
        """The work that follows step `step`, equal on every rank. The last step saves."""

    @abstractmethod
    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        """Scores of the model (without DDP, in evaluation mode, under `no_grad`), equal on every
        rank; empty for none. Collective. Every rank calls `poll` equally often, about once a
        batch."""

    def sample(self, poll: Poll) -> list[Sample] | None:
        """Samples, on the main process; None for a task without any. Calls `poll` for every
        token."""

    @abstractmethod
    def state_dict(self) -> TaskState | dict[str, Any]:
        """The task's section of a checkpoint's state, in plain JSON values."""

    @abstractmethod
    def load_state_dict(self, state: TaskState) -> None:
        """Loads what `state_dict` returned."""


MakeTask = Callable[[ConfigT, Accelerator, Checkpoint | None], Task[ConfigT]]
"""(configuration, accelerator, the run's newest checkpoint or None) -> task."""


def check_numbers(method: str, numbers: Mapping[str, object], taken: Container[str]) -> Scores:
    """The numbers that a method returned on the main process, checked; None in place of those that
    are not finite. Collective. Raises: UserError, on every rank, for the first number that is
    wrong, or for all that differ between ranks. `taken`: names of other fields."""
    fields = {name: f'{method}()["{name}"]' for name in numbers}

    def check() -> None:
        for name, value in numbers.items():
            if type(value) not in (int, float):
                hint = f"should be a Python number, not {type(value).__name__}; use float(...)"
                raise UserError(fields[name], value, hint)
            is_score = method == "evaluate" and name.startswith("val_")
            if name in taken or not (is_own(name) or is_score):
                hint = "rows have another field of this name; choose another name"
                raise UserError(fields[name], value, hint)

    on_every_rank(check)
    checked = finite({**numbers})
    check_ranks_agree({fields[name]: value for name, value in checked.items()}, _is_close)
    return from_main(checked)


def _is_close(ours: object, theirs: object) -> bool:
    """Whether two ranks' numbers are equal, up to the rounding of different processors."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs or math.isclose(ours, theirs)
    return ours == theirs
