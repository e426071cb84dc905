"""A run while it runs: its metrics, its stop request, and the status that others read in its folder."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from accelerate import Accelerator

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.run.folder import RunFolder
from gpt2_ddp.run.stop import StopRequest
from gpt2_ddp.run.tracking import Metrics, start_tracker

Outcome = Literal["completed", "stopped"]
"""How a run ended that did not fail; `stopped` is early, on request, with a checkpoint saved."""


class Progress(Protocol):
    """How far a run has come, and its tracker's id."""

    step: int
    run_id: str


@dataclass
class Session:
    """What a loop needs while it runs; it sets `outcome` before it ends."""

    metrics: Metrics
    stop: StopRequest
    outcome: Outcome = "completed"


@contextmanager
def session(
    accelerator: Accelerator, config: TrainingConfig | JobConfig, run: RunFolder | None, progress: Progress, steps: int
) -> Iterator[Session]:
    """Takes signals and starts the tracker; records in status.json that the run runs, and how it ended.

    Args:
        run: on the main process alone.
        progress: the run's state, which the loop keeps up to date.
        steps: of the whole run.
    """
    start_tracker(accelerator, config, run, progress.run_id)
    running = Session(Metrics(accelerator, run, progress.step, steps), StopRequest(accelerator))
    try:
        if run:
            run.write_status("running", progress.step)
        yield running
        if run:
            reason = running.stop.reason if running.outcome == "stopped" else ""
            run.write_status(running.outcome, progress.step, reason)
            again = f" ({reason}); the same command goes on from there" if reason else ""
            running.metrics.say(f"{config.run_name} {running.outcome} at step {progress.step}{again}")
    except BaseException as error:
        if isinstance(error, UserError) and not run:  # of this rank alone: the main process does not know it
            print(f"error: rank {accelerator.process_index}: {error}", file=sys.stderr)
        if run:  # and nothing else: the other ranks may be gone, and the newest checkpoint is good
            run.write_status("failed", progress.step, f"{type(error).__name__}: {error}")
        raise
    finally:
        running.stop.restore_handlers()
        running.metrics.close()
    accelerator.end_training()
