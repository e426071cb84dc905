"""Pretraining that measures the gradient noise scale (McCandlish et al., 2018, appendix A.1) in
ordinary steps.

    python scripts/train_gpt2.py --task docs/noise_scale.py:NoiseScale

docs/tracking.md explains the numbers.
"""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import MicroBatch
from gpt2_ddp.distributed.ranks import on_every_rank, sum_over_ranks
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import GPTData
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.task import Loss

DECAY = 0.9
"""Weight of the earlier logged steps in the averages."""


class NoiseScale(Pretraining):
    """Pretraining whose rows have the noise scale: noise (trace of the covariance of a token's
    gradient) divided by signal (squared norm of the mean gradient).

    At the second micro-batch of a step, `.grad` is the gradient of this rank's first one: a small
    batch. That of the whole step is the gradient of a large batch. Their squared norms give
    unbiased estimates of noise and signal.

    Attributes:
        averages: of signal and noise, over the logged steps. They lack the same bias correction,
            which cancels.
    """

    def __init__(
        self,
        config: TrainingConfig,
        accelerator: Accelerator | None = None,
        saved: Checkpoint | None = None,
    ):
        super().__init__(config, accelerator, saved)
        self.averages = (0.0, 0.0)
        self._position = -1
        self._count = 0
        self._square: Tensor | None = None

    def build_feed(self) -> None:
        """As `Pretraining`. Raises: UserError, on every rank, if a step has one micro-batch, or
        with fsdp."""
        super().build_feed()
        on_every_rank(self._check_measurable)

    def _check_measurable(self) -> None:
        shares = self.feed.batch.share(self.feed.step_size)
        if self.config.launch.parallel == "fsdp":
            hint = "the noise scale cannot be measured; use ddp"
            raise UserError("launch.parallel", "fsdp", hint)
        if len(shares) < 2:
            hint = "the noise scale needs two micro-batches per step on each process"
            size = self.config.train.micro_batch_size
            raise UserError("train.micro_batch_size", size, f"{hint}; choose a smaller one")
        self._batch = len(shares[0][0])  # the first micro-batch of each rank is full

    def loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        """As `Pretraining`. Before, measures the gradient of a step's first micro-batch if the row
        will be written."""
        feed = self.feed
        if feed.state.position != self._position:  # the first micro-batch of a step
            self._position = feed.state.position
            self._count = 0
            self._square = None
        self._count += 1
        if self._count == 2:
            step = feed.state.consumed // feed.step_size
            due = self.due(step, step == self.total_steps(self.epoch_size))
            self._square = self._squared_norm() if due.log or due.evaluate else None
        return super().loss(model, batch)

    def row_fields(self, step: int) -> dict[str, float]:
        """`noise_scale` in tokens, which is absent while the average signal is not positive."""
        if self._square is None:  # a replay, whose rows are fewer
            return {}
        accelerator = self.accelerator
        step_size = self.feed.step_size
        units = self.units_per_item
        world = accelerator.num_processes
        squares: Tensor = sum_over_ranks(
            accelerator, torch.stack([self._square, self._squared_norm()])
        )
        small, big = (value / world for value in squares.tolist())
        # the loop's sum over a rank's tokens is scaled by world / all tokens, and by the loss scale
        loss_scale = accelerator.scaler.get_scale() if accelerator.scaler else 1
        small *= (step_size / self._batch / world / loss_scale) ** 2
        new = estimate(small, big, self._batch * units, step_size * units)
        if all(map(math.isfinite, new)):
            signal, noise = (
                DECAY * before + (1 - DECAY) * now
                for before, now in zip(self.averages, new, strict=True)
            )
            self.averages = signal, noise
        signal, noise = self.averages
        if signal <= 0 or not math.isfinite(noise / signal):
            return {}
        return {"noise_scale": noise / signal}

    def state_dict(self) -> GPTData:
        """The task's state, with the averages."""
        return super().state_dict().model_copy(update={"noise_scale": self.averages})

    def load_state_dict(self, state: Any) -> None:
        """Loads what `state_dict` returned."""
        signal, noise = getattr(state, "noise_scale", (0.0, 0.0))
        self.averages = signal, noise

    def _squared_norm(self) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients) ** 2


def estimate(small: float, big: float, small_batch: int, big_batch: int) -> tuple[float, float]:
    """Signal and noise, from the squared norms of gradients of two batch sizes."""
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return signal, (small - big) / (1 / small_batch - 1 / big_batch)
