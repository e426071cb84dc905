"""The protocol of a task: what one kind of training (a GPT, a regression, a classifier) adds to the
common loop; and checks of the numbers that a task adds to rows, by `evaluate` or by
`row_fields`."""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Protocol

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.format import Checkpoint
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


class Task(Protocol):
    """One kind of training: data, model, loss, optimizer, evaluation. Run and loop are the same for
    all. A `MakeTask` constructs it, and raises the user errors found in small files. `feed`,
    `files` and `model` exist after `load`.

    Optional methods:
        row_fields(step): own numbers by name, equal on all ranks. Called in steps with a row,
            before clipping. `.grad` is of the step's mean loss, all-reduced (fsdp: this rank's
            part), without fp16's loss scale.
        after_step(step): work on the model after each step, also a skipped one. What it changes
            must follow from the weights and from buffers of the model, which checkpoints hold, and
            be equal on all ranks.
    """

    config: Any  # resolved, complete after `load`
    unit: str  # of the mean loss, in the plural: tokens, samples
    units_per_item: int  # in an item of the feed
    flops_per_unit: int  # of training, for the MFU; 0 for none
    feed: Feed  # the items of each step
    files: Mapping[str, bytes]  # that each checkpoint contains, by name, such as a tokenizer

    @property
    def model(self) -> nn.Module:
        """Plain, fp32, on the CPU. Other ranks receive the main process's weights. With fsdp, it is
        on the meta device, and the main process's attribute `initial` of the task yields names and
        values of a new run's weights."""
        ...

    def load(self, watchdog: Watchdog, is_complete: bool = False) -> None:
        """Compares the data with the run's and, unless it `is_complete`, makes `feed` and `model`.
        Raises: UserError, on every rank alike."""

    def total_steps(self, epoch_size: int | None) -> int | None:
        """Optimizer steps of the whole run; None if they depend on an unknown `epoch_size`, in
        items."""

    def build_optimizer(self) -> Optimizer:
        """The optimizer of the plain model, which is on its device."""
        ...

    def schedule(self, step: int) -> dict[str, float]:
        """The optimizer's settings in step `step`, the first being 1; `lr` is one of them
        (`optimizer.set_values`). A pure function, so no state has to be saved. Rows have all of
        them."""
        ...

    def loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        """Sum of the losses over the micro-batch's valid rows, by the prepared model."""
        ...

    def due(self, step: int, last: bool) -> Due:
        """The work that follows step `step`, equal on every rank. The last step saves."""
        ...

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        """Scores of the model (without DDP, in evaluation mode, under `no_grad`), equal on every
        rank; empty for none. Collective. Every rank calls `poll` equally often, about once a
        batch."""
        ...

    def sample(self, poll: Poll) -> list[Sample] | None:
        """Samples, on the main process; None for a task without any. Calls `poll` for every
        token."""

    def state_dict(self) -> TaskState | dict[str, Any]:
        """The task's section of a checkpoint's state, in plain JSON values."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Loads what `state_dict` returned, a `TaskState`."""


MakeTask = Callable[[Any, Accelerator, Checkpoint | None], Task]
"""(RunConfig, accelerator, the run's newest checkpoint or None) -> task."""


def check_numbers(method: str, numbers: dict[str, Any], taken: Container[str]) -> Scores:
    """The numbers that a method returned on the main process, checked; None in place of those that
    are not finite. Collective. Raises: UserError, on every rank, for the first number that is
    wrong, or for all that differ between ranks. `taken`: names of other fields."""
    fields = {name: f'{method}()["{name}"]' for name in numbers}

    def check() -> None:
        for name, value in numbers.items():
            if type(value) not in (int, float):
                hint = f"should be a Python number, not {type(value).__name__}; use float(...)"
                raise UserError(fields[name], value, hint)
            if name in taken or not (
                is_own(name) or (method == "evaluate" and name.startswith("val_"))
            ):
                raise UserError(
                    fields[name], value, "rows have another field of this name; choose another name"
                )

    on_every_rank(check)
    found = finite(numbers)
    check_ranks_agree({fields[name]: value for name, value in found.items()}, _is_close)
    return from_main(found)


def _is_close(one: Any, other: Any) -> bool:
    """Whether two ranks' numbers are equal, up to the rounding of different processors."""
    return one == other or (
        isinstance(one, float) and isinstance(other, float) and math.isclose(one, other)
    )
