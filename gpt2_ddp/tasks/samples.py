"""Samples in memory, and the scores of all of them, each once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from gpt2_ddp.data.loader import prepare_loader


@dataclass(frozen=True)
class Samples:
    """A data set as two CPU tensors with one row per sample."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples int64 [b]."""
        index = torch.from_numpy(items)
        return self.inputs[index], self.targets[index]

    def sha256(self) -> str:
        """Hash of everything in it."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


class IndexedSamples(Dataset):
    """Map-style: indices -> (inputs, targets, indices int64)."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = np.array(indices)
        return *self.samples.read(index), torch.from_numpy(index)


@torch.no_grad()
def score_samples(
    accelerator: Accelerator,
    model: nn.Module,
    samples: Samples,
    score: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]],
    batch_size: int,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Mean of each score over all samples, equal on every rank.

    Accelerate fills up the last batches with samples seen before, and `gather_for_metrics` drops them; that each sample
    was then scored once is checked by its index.

    Args:
        model: plain or prepared, on the accelerator's device; in evaluation mode meanwhile.
        score: (model, inputs, targets) -> named scores [batch].
        batch_size: samples per forward pass and rank.
        poll: called before each batch, by all ranks equally often; what it raises ends the scoring.
    """
    loader = prepare_loader(accelerator, IndexedSamples(samples), even_batches=True, batch_size=batch_size)
    rows: list[Tensor] = []
    indices: list[Tensor] = []
    names: list[str] = []
    was_training = model.training
    model.eval()
    try:
        for inputs, targets, index in loader:
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
    means = torch.cat(rows).cpu()[index.argsort()].double().mean(0)
    return dict(zip(names, means.tolist(), strict=True))
