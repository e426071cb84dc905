"""Accelerate's loader, as everything here uses it."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset


def prepare_loader(accelerator: Accelerator, dataset: Dataset, even_batches: bool, **options: Any) -> Any:
    """The batches that `dataset.__getitems__` reads whole, number k for rank k mod W, on its device.

    Args:
        even_batches: fills up the last ones with items seen before, which `gather_for_metrics` drops.
        options: DataLoader's.
    """
    loader = DataLoader(
        dataset,
        collate_fn=_as_read,
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


def _as_read(batch: Any) -> Any:
    return batch
