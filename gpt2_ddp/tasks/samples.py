"""Samples in memory: which of them each rank computes in each step, and the scores of all of them, each once."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.data.loader import Order


class Samples(NamedTuple):
    """A data set as two CPU tensors with one row per sample."""

    inputs: Tensor
    targets: Tensor

    def sha256(self) -> str:
        """Hash of everything in it."""
        digest = hashlib.sha256()
        for tensor in self:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Plan:
    """Which samples make up each step, and each rank's share of them.

    An epoch is a permutation of the samples; a step takes the next `global_batch_size` of it, the last step of an epoch
    what is left. The samples of a step depend on the seed, the batch size and the step alone.

    Args:
        order: the permutations.
        global_batch_size: samples per step, over all ranks.
        processes: W.
        micro_batch_size: samples per forward pass and rank, at most.
    """

    order: Order
    global_batch_size: int
    processes: int
    micro_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample was used once."""
        return math.ceil(self.order.n_windows / self.global_batch_size)

    def positions(self, step: int) -> range:
        """Positions in the order of the samples of step `step`; the first is 1."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        n = self.order.n_windows
        first = number * self.global_batch_size
        return range(epoch * n + first, epoch * n + min(first + self.global_batch_size, n))

    def shares(self, positions: range) -> list[list[range]]:
        """The positions that rank r computes in micro-batch m, as [m][r]; together each of `positions` once.

        Shares differ by at most one sample, and a rank's micro-batches too. In a short step a share may be empty.
        """
        n, W = len(positions), self.processes
        ranks = [positions[n * r // W : n * (r + 1) // W] for r in range(W)]
        parts = math.ceil(math.ceil(n / W) / self.micro_batch_size)
        return [[own[len(own) * m // parts : len(own) * (m + 1) // parts] for own in ranks] for m in range(parts)]


class OrderedSamples(Dataset):
    """Map-style: positions in the order -> (inputs, targets, indices int64) of their samples."""

    def __init__(self, samples: Samples, order: Order):
        self.samples = samples
        self.order = order

    def __len__(self) -> int:
        return len(self.samples.targets)

    def __getitems__(self, positions: range) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.from_numpy(self.order.windows(positions.start, positions.stop).astype("int64"))
        return self.samples.inputs[index], self.samples.targets[index], index


class ShareSampler:
    """Endless micro-batches from step `step` on. Accelerate gives number k to rank k mod W."""

    drop_last = True

    def __init__(self, plan: Plan, step: int):
        self.plan = plan
        self.step = step

    def __iter__(self) -> Iterator[range]:
        for step in count(self.step):
            positions = self.plan.positions(step)
            for micro_batch in self.plan.shares(positions):
                for share in micro_batch:
                    yield share or positions[:1]  # a rank without samples computes one, which then counts nothing


def train_batches(
    accelerator: Accelerator, samples: Samples, plan: Plan, step: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's endless micro-batches (inputs, targets, indices) from step `step` on, on its device."""
    loader = DataLoader(
        OrderedSamples(samples, plan.order),
        batch_sampler=ShareSampler(plan, step),  # pyright: ignore[reportArgumentType]
        collate_fn=_as_read,  # pyright: ignore[reportArgumentType]
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # or starting it would draw from the generator that dropout uses
    )
    return iter(accelerator.prepare_data_loader(loader))


class IndexedSamples(Dataset):
    """Map-style: indices -> (inputs, targets, indices int64)."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples.targets)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.tensor(indices)
        return self.samples.inputs[index], self.samples.targets[index], index


@torch.no_grad()
def score_samples(
    accelerator: Accelerator,
    model: nn.Module,
    samples: Samples,
    score: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]],
    batch_size: int,
) -> dict[str, float]:
    """Mean of each score over all samples, equal on every rank.

    Accelerate fills up the last batches with samples seen before, and `gather_for_metrics` drops them; that each sample
    was then scored once is checked by its index.

    Args:
        model: plain or prepared, on the accelerator's device; in evaluation mode meanwhile.
        score: (model, inputs, targets) -> named scores [batch].
        batch_size: samples per forward pass and rank.
    """
    loader = prepare_data_loader(
        DataLoader(
            IndexedSamples(samples),
            batch_size,
            collate_fn=_as_read,  # pyright: ignore[reportArgumentType]
            pin_memory=accelerator.device.type == "cuda",
            generator=torch.Generator(),
        ),
        accelerator.device,
        accelerator.num_processes,
        accelerator.process_index,
        put_on_device=True,
        rng_types=[],
        even_batches=True,
        non_blocking=True,
    )
    rows: list[Tensor] = []
    indices: list[Tensor] = []
    names: list[str] = []
    was_training = model.training
    model.eval()
    for inputs, targets, index in loader:
        with accelerator.autocast():
            scores = score(model, inputs, targets)
        names = list(scores)
        row = torch.stack([scores[name].float() for name in names])  # [scores, batch]
        index, row = accelerator.gather_for_metrics((index, row.T.contiguous()))
        indices.append(index)
        rows.append(row)
    model.train(was_training)
    index = torch.cat(indices).cpu()
    if not torch.equal(index.sort().values, torch.arange(len(samples.targets))):
        raise RuntimeError(f"{len(index)} scores for {len(samples.targets)} samples: not each of them once")
    means = torch.cat(rows).cpu()[index.argsort()].double().mean(0)
    return dict(zip(names, means.tolist(), strict=True))


def _as_read(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch  # __getitems__ returns whole batches
