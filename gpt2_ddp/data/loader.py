"""Accelerate's loader, as everything here uses it."""

from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.errors import UserError

T = TypeVar("T")


def prepare_loader(
    accelerator: Accelerator, dataset: Dataset, batch_sampler: Any, even_batches: bool, **options: Any
) -> Any:
    """The batches that `dataset.__getitems__` reads whole, number k for rank k mod W, on its device; or what `raised`
    raises, which each goes through.

    Args:
        batch_sampler: all ranks' batches.
        even_batches: fills up the last ones with items seen before, which `gather_for_metrics` drops.
        options: DataLoader's.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    if world > 1:
        batch_sampler = BatchSamplerShard(batch_sampler, world, rank, even_batches=even_batches)
    loader = DataLoader(
        Reading(dataset),
        batch_sampler=batch_sampler,
        collate_fn=as_read,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # or starting it would draw from the generator that dropout uses
        **options,
    )
    # not the accelerator's own method, which would hold every loader that a seek has left; and as if for one process,
    # since it imports `datasets` and pandas for several, to find out that these are not theirs: a second on each rank
    return prepare_data_loader(loader, accelerator.device, 1, 0, put_on_device=True, rng_types=[], non_blocking=True)


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
