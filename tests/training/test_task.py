"""The design, tried: a kind of training that nobody thought
of is one short class, and has all that the others have."""

import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from close import assert_close
from runs import complete, untimed
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.run import (
    ClipConfig,
    GuardConfig,
    KeepConfig,
    LoopConfig,
    RunConfig,
    TrackingConfig,
)
from gpt2_ddp.data.feed import Feed, GlobalBatch, MicroBatch
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import Scores, TaskState
from gpt2_ddp.tasks.supervised import contiguous
from gpt2_ddp.training.loop import train
from gpt2_ddp.training.task import Due, Poll, Task

# ---- A new kind of training, from scratch


class LettersConfig(RunConfig):
    """Which letter follows which: a character-level bigram with dropout"""

    kind = "letters"
    task: ClassVar[Any]
    steps: int = 30
    optim: ClipConfig = ClipConfig(grad_clip=1.0)
    train: LoopConfig = LoopConfig(device="cpu")
    guard: GuardConfig = GuardConfig()
    checkpoint: KeepConfig = KeepConfig()
    tracking: TrackingConfig = TrackingConfig(log_every=1)


class Pairs:
    letters = torch.tensor(
        list(b"to be or not to be that is the question whether tis nobler in the mind " * 3)
    )

    def __len__(self) -> int:
        return len(self.letters) - 1

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(items)
        return self.letters[index], self.letters[index + 1]


class Letters(Task[LettersConfig]):
    unit = "letters"

    def __init__(self, config: LettersConfig, accelerator: Accelerator, saved: Checkpoint | None):
        self.config = config
        self.accelerator = accelerator
        self.best = math.inf

    def load(self, watch: Any, is_complete: bool = False) -> None:
        torch.manual_seed(self.config.seed)
        self.model = nn.Sequential(nn.Embedding(128, 16), nn.Dropout(0.1), nn.Linear(16, 128))
        pairs = Pairs()
        shares = partial(contiguous, self.accelerator.num_processes, 8)
        batch = GlobalBatch(50, shares, by_epoch=True)
        self.feed = Feed(Permutation(self.config.seed, len(pairs)), batch, pairs, self.accelerator)

    def total_steps(self, epoch_size: int | None) -> int:
        return self.config.steps

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), fused=True)

    def schedule(self, step: int) -> dict[str, float]:
        return {"lr": 0.03 / math.sqrt(step)}

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        letters, following = (row[: batch.n_valid] for row in batch.rows)
        return nn.functional.cross_entropy(model(letters), following, reduction="sum")

    def due(self, step: int, last: bool) -> Due:
        log = step % self.config.tracking.log_every == 0
        return Due(log=log, evaluate=self.feed.ended_epoch, save=last or step % 7 == 0)

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        for _ in range(4):
            poll()
        letters = Pairs.letters
        loss = nn.functional.cross_entropy(model(letters[:-1]), letters[1:]).item()
        self.best = min(self.best, loss)
        return {"val_loss": loss, "val_best": self.best}

    def state_dict(self) -> TaskState:
        return TaskState.model_validate({"best": self.best})

    def load_state_dict(self, state: TaskState) -> None:
        self.best = state.model_dump()["best"]


LettersConfig.task = Letters


# ---- What it is given


def test_a_bad_gradient_is_skipped(tmp_path):
    """212 pairs in steps of 50: the last step of an epoch has 12."""
    complete(LettersConfig(output_dir=str(tmp_path), run_name="run", steps=7), 2, (100, 150))
    found = untimed(tmp_path / "run")[1:]
    assert [row["letters"] for row in found] == [50, 100, 150, 200, 212, 262, 312]
    assert [row["step"] for row in found if "train_loss" in row] == [5]
    assert [row["skipped"] for row in found] == [0, 0, 1, 1, 1, 1, 1]
    assert found[2]["grad_norm"] is None
    losses = [row["loss"] * size for row, size in zip(found, (50, 50, 0, 50, 12), strict=False)]
    assert_close(found[4]["train_loss"], sum(losses) / 162, 1e-6)
    checkpoint = find_checkpoint(tmp_path / "run")
    assert (checkpoint.kind, checkpoint.step) == ("letters", 7)
    assert checkpoint.state.task.model_dump()["best"] < 5


def test_an_evaluation_writes_its_row_where_no_row_is_due(tmp_path):
    """Its means are of all steps since the row before."""
    rare = TrackingConfig(log_every=99)
    complete(LettersConfig(output_dir=str(tmp_path), run_name="run", steps=12, tracking=rare))
    found = untimed(tmp_path / "run")
    assert [(row["step"], row["letters"], "val_loss" in row) for row in found] == [
        *((0, 0, True), (5, 212, True), (10, 424, True))
    ]
    assert all(row["loss_mean"] > 0 for row in found[1:])


class Bare:
    """A task that does not extend `Task`."""

    def __init__(self, config: LettersConfig, *_: object):
        self.config = config


def test_a_class_that_does_not_extend_task_is_a_user_error(tmp_path):
    config = LettersConfig(output_dir=str(tmp_path), run_name="run")
    message = r"task = Bare: has no row_fields\(\); extend gpt2_ddp\.training\.task\.Task"
    with pytest.raises(UserError, match=message):
        train(config, Bare)
    assert not (tmp_path / "run").exists()
