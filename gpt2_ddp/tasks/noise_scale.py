"""The gradient noise scale (McCandlish et al., 2018, appendix A.1), from the micro-batches of ordinary steps."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_ddp.data.feed import MicroBatch
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import GPTData
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.task import RowFields

DECAY = 0.9
"""Weight of the earlier logged steps in the averages."""


class NoiseScale:
    """The noise scale of a task: noise (trace of the covariance of a token's gradient) divided by signal (squared norm
    of the mean gradient). Wraps methods of the task: its loss, its row fields, and its state.

    At the second micro-batch of a step, `.grad` is the gradient of this rank's first one: a small batch. That of the
    whole step is the gradient of a large batch. Their squared norms give unbiased estimates of noise and signal.

    Attributes:
        averages: of signal and noise, over the logged steps. They lack the same bias correction, which cancels.
    """

    def __init__(self, task: Pretraining):
        shares = task.feed.share(task.feed.step_size)
        if task.config.parallel == "fsdp":
            raise UserError("tracking.noise_scale", True, "is not supported with launch.parallel fsdp; set it to false")
        if len(shares) < 2:
            hint = "needs two micro-batches per step on each process; choose a smaller train.micro_batch_size"
            raise UserError("tracking.noise_scale", True, hint)
        self.averages = (0.0, 0.0)
        self._task, self._batch = task, len(shares[0][0])  # the first micro-batch of each rank is full
        self._position, self._count = -1, 0
        self._square: Tensor | None = None
        self._loss, self._state_dict, self._load = task.loss, task.state_dict, task.load_state_dict
        self._row_fields: RowFields = getattr(task, "row_fields", lambda step: {})
        vars(task).update(loss=self.loss, row_fields=self.row_fields)
        vars(task).update(state_dict=self.state_dict, load_state_dict=self.load_state_dict)

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """The task's loss. Before, measures the gradient of a step's first micro-batch if the row will be written."""
        task, feed = self._task, self._task.feed
        if feed.position != self._position:  # the first micro-batch of a step
            self._position, self._count, self._square = feed.position, 0, None
        self._count += 1
        if self._count == 2:
            step = feed.consumed // feed.step_size
            due = task.due(step, step == task.total_steps(task.epoch_size))
            self._square = self._squared_norm() if due.log or due.evaluate else None
        return self._loss(model, batch)

    def row_fields(self, step: int) -> dict[str, float]:
        """The task's fields and `noise_scale` in tokens, which is absent while the average signal is not positive."""
        fields = self._row_fields(step)
        if self._square is None:  # a replay, whose rows are fewer
            return fields
        task, accelerator = self._task, self._task.accelerator
        world, step_size, units = accelerator.num_processes, task.feed.step_size, task.units_per_item
        squares: Tensor = sum_over_ranks(accelerator, torch.stack([self._square, self._squared_norm()]))
        small, big = (value / world for value in squares.tolist())
        # the loop's sum over a rank's tokens is scaled by world / all tokens, and by the loss scale
        small *= (step_size / self._batch / world / (accelerator.scaler.get_scale() if accelerator.scaler else 1)) ** 2
        new = estimate(small, big, self._batch * units, step_size * units)
        if all(map(math.isfinite, new)):
            signal, noise = (DECAY * before + (1 - DECAY) * now for before, now in zip(self.averages, new, strict=True))
            self.averages = signal, noise
        signal, noise = self.averages
        return fields | ({"noise_scale": noise / signal} if signal > 0 and math.isfinite(noise / signal) else {})

    def state_dict(self) -> GPTData:
        """The task's state, with the averages."""
        return self._state_dict().model_copy(update={"noise_scale": self.averages})

    def load_state_dict(self, state: Any) -> None:
        """Loads what `state_dict` returned."""
        self._load(state)
        self.averages = state.noise_scale or (0.0, 0.0)

    def _squared_norm(self) -> Tensor:
        gradients = [p.grad for p in self._task.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients) ** 2


def estimate(small: float, big: float, small_batch: int, big_batch: int) -> tuple[float, float]:
    """Signal and noise, from the squared norms of gradients of two batch sizes."""
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return signal, (small - big) / (1 / small_batch - 1 / big_batch)
