"""What the ranks do once, what they do alike, and what they agree on."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from gpt2_ddp.errors import UserError

T = TypeVar("T")


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Calls `function` on the main process alone and returns its (picklable) result on every rank.

    Raises:
        UserError: on every rank, when the main process raised it.
    """
    outcome: list[tuple[T | None, UserError | None]] = [(None, None)]
    if accelerator.is_main_process:
        outcome = [_attempt(function)]
    broadcast_object_list(outcome)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def on_every_rank(accelerator: Accelerator, function: Callable[[], T], patience: timedelta | None = None) -> T:
    """Calls `function` on every rank and returns each its own result, once all have succeeded.

    Args:
        patience: how long ranks wait for the slowest, where that may exceed a collective's usual time-out.

    Raises:
        UserError: on every rank, the first rank's when any raised one.
    """
    result, error = _attempt(function)
    errors = [error]
    if accelerator.num_processes > 1:
        group = dist.new_group(backend="gloo", timeout=patience) if patience else None
        errors = [error] * accelerator.num_processes
        dist.all_gather_object(errors, error, group=group)
    for failure in errors:
        if failure is not None:
            raise failure
    return result  # pyright: ignore[reportReturnType]


def check_ranks_agree(configuration: str, field: str, data: str, data_hash: str) -> None:
    """Ranks that were started with another configuration or other data would train nonsense in silence.

    Args:
        configuration: as YAML.
        field: where the configuration names the data. data: their name. data_hash: what is in them.

    Raises:
        UserError: on every rank, when any two of them differ.
    """
    for rank, (other, other_hash) in enumerate(gather_object([(configuration, data_hash)])):
        if other_hash != data_hash:
            raise UserError(field, data, f"rank {rank} has other data; copy the same there")
        if other != configuration:
            raise UserError("configuration", "", f"rank {rank} has another one; start all ranks with the same command")


def _attempt(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return function(), None
    except UserError as error:
        return None, error


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch for one step: what it draws (dropout) depends on seed, step and rank alone, so no generator has to be
    kept in a checkpoint."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    value = (mixed ^ (mixed >> 32)) % 2**63
    torch.default_generator.manual_seed(value)
    # not torch.manual_seed: where CUDA is not in use it queues a call with a stack trace for it, every time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(value)
