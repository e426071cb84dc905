"""Where a run goes on, and what it gets back from its checkpoint. The main process reads; the others are sent it."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from gpt2_ddp.model.optim import broadcast_optimizer_state
from gpt2_ddp.processes.ranks import on_main
from gpt2_ddp.run.checkpoint import CONFIG, CheckpointFolder, load_optimizer, load_weights


class Progress(NamedTuple):
    """A run's newest intact checkpoint, what its state.json holds, and the configuration that it was made with."""

    checkpoint: Path
    state: dict[str, Any]
    config: dict[str, Any]


def find_progress(checkpoints: CheckpointFolder) -> Progress | None:
    """The progress of a run, on the main process; None for a new one. Removes what a killed process left half made.

    Raises:
        UserError: when checkpoints exist, but none is intact.
    """
    checkpoints.clean()
    found = checkpoints.newest_intact()
    if found is None:
        return None
    checkpoint, state = found
    return Progress(checkpoint, state, yaml.safe_load((checkpoint / CONFIG).read_text(encoding="utf-8")))


def restore_weights(accelerator: Accelerator, progress: Progress, model: nn.Module) -> None:
    """Weights of the plain model, on the main process, before it is prepared: DDP gives them to the others."""
    on_main(accelerator, lambda: load_weights(progress.checkpoint, model))


def restore_optimizer(accelerator: Accelerator, progress: Progress, model: nn.Module, optimizer: Optimizer) -> None:
    """The raw optimizer's state and the fp16 loss scaler's, on every rank, after they are prepared."""
    on_main(accelerator, lambda: load_optimizer(progress.checkpoint, model, optimizer))
    broadcast_optimizer_state(accelerator, model, optimizer)
    if progress.state["scaler"] and accelerator.scaler:
        accelerator.scaler.load_state_dict(progress.state["scaler"])
