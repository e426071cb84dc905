"""An experiment of the DDP lab, and helpers for experiments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

Numbers = Mapping[str, float | str]
Measure = Callable[[Accelerator], Iterator[Numbers]]


@dataclass(frozen=True)
class Experiment:
    """A claim about DDP, and how to measure both the wrong way and the right one."""

    # runs on both ranks, given the Accelerator, and yields numbers; rank 0's count
    measure: Measure
    claim: str  # cells of the table
    wrong: str
    right: str
    measured: str  # with the measured numbers' names in braces
    holds: Callable[[SimpleNamespace], bool]  # whether the claim follows from the numbers

    def run(self, accelerator: Accelerator) -> Numbers:
        return {name: value for part in self.measure(accelerator) for name, value in part.items()}


def experiment(
    *, claim: str, wrong: str, right: str, measured: str, holds: Callable[[SimpleNamespace], bool]
) -> Callable[[Measure], Experiment]:
    """Makes an Experiment of a measuring function."""

    def make(measure: Measure) -> Experiment:
        return Experiment(measure, claim, wrong, right, measured, holds)

    return make


def make_model(seed: int = 0) -> nn.Sequential:
    """A perceptron from 8 numbers to 1, with a hidden layer of 16; 161 parameters, fp32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make_rows(count: int) -> tuple[Tensor, Tensor]:
    """Inputs fp32 [count, 8] and targets fp32 [count, 1]; later rows lie further from zero, as
    sorted data do."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator) + torch.linspace(0, 2, count)[:, None]
    return inputs, inputs.sin().sum(1, keepdim=True)


def share(rows: Sequence[Tensor], accelerator: Accelerator) -> list[Tensor]:
    """This rank's rows of each tensor, in order: the first half is rank 0's."""
    return [part.chunk(accelerator.num_processes)[accelerator.process_index] for part in rows]


def mse(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def train(model: nn.Module, rows: Sequence[Tensor], steps: int, lr: float) -> None:
    """Steps of SGD on the same rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model, *rows).backward()
        optimizer.step()


def gradient(model: nn.Module, rows: Sequence[Tensor], weight: float | Tensor = 1.0) -> Tensor:
    """All gradients as one vector, after those of the weighted loss of these rows were added."""
    (mse(model, *rows) * weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    return ((a - b).norm() / b.norm()).item()


def largest(value: float) -> float:
    """The largest of the ranks' numbers, on all of them."""
    return max(gather_object([value]))
