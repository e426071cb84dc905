"""A training with an Inf in the gradient of its tenth micro-batch: `python -m gpt2_ddp.benchmark.planted SCRIPT`."""

import math
import runpy
import sys
from itertools import count

from torch import Tensor, nn

from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.task import MicroBatch

AT = 10


def main(command: list[str]) -> None:
    """The rest of the words are the script and its flags."""
    calls, loss_of = count(1), Pretraining.loss

    def loss(task: Pretraining, model: nn.Module, batch: MicroBatch) -> Tensor:
        found = loss_of(task, model, batch)
        if next(calls) == AT:
            found.register_hook(lambda gradient: gradient * math.inf)
        return found

    Pretraining.loss = loss  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
