"""Accelerate's loader, as everything here uses it."""

from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.errors import UserError

T = TypeVar("T")


def prepare_loader(accelerator: Accelerator, dataset: Dataset, even_batches: bool, **options: Any) -> Any:
    """The batches that `dataset.__getitems__` reads whole, number k for rank k mod W, on its device; or what `raised`
    raises, which each goes through.

    Args:
        even_batches: fills up the last ones with items seen before, which `gather_for_metrics` drops.
        options: DataLoader's.
    """
    loader = DataLoader(
        Reading(dataset),
        collate_fn=as_read,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # or starting it would draw from the generator that dropout uses
        **options,
    )
    # not the accelerator's own method, which would hold every loader that a seek has left
    return prepare_data_loader(
        loader,
        accelerator.device,
        accelerator.num_processes,
        accelerator.process_index,
        put_on_device=True,
        rng_types=[],
        even_batches=even_batches,
        non_blocking=True,
    )


class Reading(Dataset):
    """The same, but that a user's mistake is read like a batch: a loader's worker could raise its text alone."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, items: Any) -> Any:
        try:
            return self.dataset.__getitems__(items)
        except UserError as error:
            return error


def raised(read: T | UserError) -> T:
    """What was read. Raises: UserError where that was one."""
    if isinstance(read, UserError):
        raise read
    return read


def as_read(batch: Any) -> Any:
    """For a loader whose data set reads whole batches."""
    return batch
