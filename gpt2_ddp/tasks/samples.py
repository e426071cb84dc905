"""Samples, and the scores of all of them, each once."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset

from gpt2_ddp.data.feed import Source, prepare_loader, unwrap
from gpt2_ddp.distributed.workers import worker_context


class SampleSet(Source, Protocol):
    """Samples that a job trains on, or is scored on: `read` gives inputs and targets."""

    @property
    def workers(self) -> int:
        """Loader processes that read them; 0: the training reads them itself."""
        ...

    def sha256(self) -> str:
        """Hash of everything in it."""
        ...


@dataclass(frozen=True)
class Samples:
    """A data set as two CPU tensors with one row per sample."""

    inputs: Tensor
    targets: Tensor

    @property
    def workers(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples int64 [b]."""
        index = torch.from_numpy(items)
        return self.inputs[index], self.targets[index]

    def sha256(self) -> str:
        """Hash of everything in it."""
        return hash_of((self.inputs.dtype, tuple(self.inputs.shape), [self.inputs]), self.targets)


def hash_of(inputs: tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]], targets: Tensor) -> str:
    """SHA-256 of samples, whose inputs may come in several parts, one after another."""
    digest = hashlib.sha256()
    for dtype, shape, parts in (inputs, (targets.dtype, tuple(targets.shape), [targets])):
        digest.update(f"{dtype} {shape}".encode())
        for part in parts:
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


class IndexedSamples(Dataset):
    """Map-style: indices -> (inputs, targets, indices int64)."""

    def __init__(self, samples: SampleSet):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = np.array(indices)
        inputs, targets = self.samples.read(index)
        return inputs, targets, torch.from_numpy(index)


@torch.no_grad()
def score_each(
    accelerator: Accelerator,
    model: nn.Module,
    samples: SampleSet,
    score: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]],
    batch_size: int,
    poll: Callable[[], None] = lambda: None,
) -> tuple[list[str], Tensor]:
    """Names of the scores, and those fp64 [N, scores] of all samples, in their order; equal on every rank.

    Accelerate fills up the last batches with samples seen before, and `gather_for_metrics` drops them; that each sample
    was then scored once is checked by its index.

    Args:
        model: plain or prepared, on the accelerator's device; in evaluation mode meanwhile.
        score: (model, inputs, targets) -> named scores [batch].
        batch_size: samples per forward pass and rank.
        poll: called before each batch, by all ranks equally often; what it raises ends the scoring.
    """
    loader = prepare_loader(
        accelerator,
        IndexedSamples(samples),
        BatchSampler(range(len(samples)), batch_size, drop_last=False),
        even_batches=True,
        num_workers=samples.workers,
        multiprocessing_context=worker_context() if samples.workers else None,
    )
    rows: list[Tensor] = []
    indices: list[Tensor] = []
    names: list[str] = []
    was_training = model.training
    model.eval()
    try:
        for inputs, targets, index in map(unwrap, loader):
            poll()
            with accelerator.autocast():
                scores = score(model, inputs, targets)
            names = list(scores)
            row = torch.stack([scores[name].float() for name in names])  # [scores, batch]
            index, row = accelerator.gather_for_metrics((index, row.T.contiguous()))
            indices.append(index)
            rows.append(row)
    finally:
        model.train(was_training)
    index = torch.cat(indices).cpu()
    if not torch.equal(index.sort().values, torch.arange(len(samples))):
        raise RuntimeError(f"{len(index)} scores for {len(samples)} samples: not each of them once")
    return names, torch.cat(rows).cpu()[index.argsort()].double()
