"""What a task says of itself, so that one loop can train it: a GPT, a line, a classifier of images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.checkpoint.metrics import Sample
from gpt2_ddp.data.feed import Feed, MicroBatch
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.training.progress import Scores

Poll = Callable[[], None]
"""Called now and then by what takes long: a sign of life. Raises `training.stop.Interrupted` where a stop was asked
for."""


class Due(NamedTuple):
    """What happens after a step, besides training."""

    log: bool
    evaluate: bool = False
    save: bool = False
    sample: bool = False


class Task(Protocol):
    """What one kind of training has of its own; everything else is the run's (`run.Run`) and the loop's.

    A `MakeTask` makes it before any long work, and raises the UserErrors that can be found by small files. `load` does
    the long work: what is named below the line is there after it.

    Args:
        config: what the run folder records; what was left open is settled after `load`.
        unit: what losses are means over and what is counted, in the plural: tokens, samples.
        units_per_item: of the feed's items.
        flops_per_unit: training FLOPs, for the MFU; 0 where nobody asks.
        ---
        feed: which items each step trains on.
        files: what a checkpoint has to carry along, such as a tokenizer.
        model: plain, fp32; on the CPU. What the main process's holds counts.
    """

    config: Any
    unit: str
    units_per_item: int
    flops_per_unit: int
    feed: Feed
    files: tuple[Path, ...]

    @property
    def model(self) -> nn.Module: ...

    def load(self, watchdog: Watchdog) -> None:
        """Reads the data and makes `feed` and `model`; tells the watch what takes long. Raises: UserError, on every
        rank alike."""

    def total_steps(self, epoch_size: int | None) -> int | None:
        """Optimizer steps of the whole run; None where that depends on the items of an epoch and they are not known."""

    def build_optimizer(self) -> Optimizer:
        """The optimizer over the plain model, which is on its device."""
        ...

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, the first being 1; a pure function, so nothing has to be restored."""
        ...

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Sum of the losses over the units of the micro-batch's own rows, by the prepared model: fp32 scalar."""
        ...

    def due(self, step: int, last: bool) -> Due:
        """What follows a step; equal on every rank. The feed knows whether an epoch ended. The last step saves."""
        ...

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        """Scores of the model (without DDP; compiled, if the run compiles), equal on every rank; collective. Empty
        where there is nothing to score. Every rank calls `poll` equally often, about once a batch."""
        ...

    def sample(self, poll: Poll) -> list[Sample] | None:
        """Texts to show, on the main process alone; None for a task that writes none. Calls `poll` for every token."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values that checkpoints keep besides the run's own: what the data are, the task's own fields."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes its fields back from a checkpoint's state.json; one that is missing there takes its default."""


MakeTask = Callable[[Any, Accelerator, Checkpoint | None], Task]
"""(a RunConfig, the accelerator, the run's newest checkpoint, None for a new run) -> the task."""
