"""The length of a pretraining in steps, and the settings that follow from it."""

import math
from collections.abc import Mapping
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import Parent


def total_steps(config: TrainingConfig, epoch_size: int | None) -> int | None:
    """Steps of the whole run; None where they are unknown, as for `train.epochs` without an epoch size."""
    train = config.train
    if train.epochs is None:
        return train.steps
    return epoch_size and math.ceil(train.epochs * epoch_size / config.global_batch_windows)


def with_length(config: TrainingConfig, length: Mapping[str, Any]) -> TrainingConfig:
    """The configuration with these steps or epochs."""
    return config.model_copy(update={"train": config.train.model_copy(update=length)})


def resolve(config: TrainingConfig, saved: Checkpoint | None, epoch_size: int) -> tuple[TrainingConfig, list[str]]:
    """The configuration with `eval.tokens: auto` and `optim.decay_steps: null` replaced, and notes."""
    known = None
    if saved:
        from gpt2_ddp.config.hints import complete

        known = complete(TrainingConfig, saved.config)
    evals = config.eval
    if evals.tokens == "auto":
        tokens = known["eval"]["tokens"] if known else config.auto_eval_tokens
        evals = evals.model_copy(update={"tokens": tokens})
    length, notes = resolve_decay_steps(config, known, saved.step if saved else 0, epoch_size)
    optim = config.optim.model_copy(update={"decay_steps": length})
    return config.model_copy(update={"eval": evals, "optim": optim}), notes


def resolve_decay_steps(
    config: TrainingConfig, known: dict[str, Any] | None, step: int, epoch_size: int
) -> tuple[int | None, list[str]]:
    """`optim.decay_steps`, and notes; null becomes the last step, or the first after a longer warm-up. A resumed run
    keeps the value of the saved configuration `known`, unless that was such a default and no step up to `step` depends
    on it."""

    def default(config: TrainingConfig) -> int | None:
        steps = total_steps(config, epoch_size)
        return steps and max(steps, config.optim.warmup_steps + 1)

    length = default(config)
    if config.optim.decay_steps is not None or length is None or not known:
        return config.optim.decay_steps or length, []
    kept = known["optim"]["decay_steps"]
    ends = config.optim.model_copy(update={"decay_steps": kept})
    if kept != default(with_length(config, known["train"])) or not ends.may_end_at(length, step):
        return kept or length, []
    changes = f"optim.decay_steps changes from {kept} to {length}; no step so far depends on it"
    return length, [changes] * (length != kept)


def check_branch(config: TrainingConfig, begins: Parent | None, steps: int | None) -> None:
    """Raises: UserError if a branch has no step after its parent's."""
    if begins and steps is not None and steps <= begins.step:
        field = "steps" if config.train.epochs is None else "epochs"
        hint = f"{begins.parent} is at step {begins.step}, which counts; choose a larger value"
        raise UserError(f"train.{field}", getattr(config.train, field), hint)
