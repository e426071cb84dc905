"""A run while it runs: its metrics, its stop request, and the status that others read in its folder."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from gpt2_ddp.checkpoint.metrics import Metrics
from gpt2_ddp.distributed.launch import describe_precision
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.errors import UserError
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.throughput import Throughput

Outcome = Literal["completed", "stopped", "diverged"]
"""How a run ended that did not fail; `stopped` is early, on request, with a checkpoint saved; `diverged` is of no use
since its newest checkpoint."""


@dataclass
class Session:
    """What a loop needs while it runs; before it ends it sets `outcome`, and where that is `diverged`, why."""

    metrics: Metrics
    stop: StopRequest
    throughput: Throughput
    outcome: Outcome = "completed"
    reason: str = ""


@contextmanager
def session(run: Run) -> Iterator[Session]:
    """Takes signals and starts the trackers; records in status.json that the run runs, and how it ended."""
    accelerator, config, folder = run.accelerator, run.config, run.folder
    stop = StopRequest(accelerator, run.begun, config.train.max_minutes, run.watchdog.progress)
    throughput = Throughput(run.task, accelerator.device, config.tracking.peak_flops)
    running = Session(Metrics(folder, run.step, run.steps or 0), stop, throughput)
    try:
        if folder:
            running.metrics.start_trackers(config, run.run_id)
            folder.write_status("running", run.step)
        running.metrics.print(_opening_words(run))
        if said := throughput.why_no_mfu():
            running.metrics.print(said)
        yield running
        run.saved()
        run.watchdog.heartbeat("ending", timeout=FIRST_TIMEOUT)  # a tracker may have much to send yet
        if folder:
            reason = stop.reason if running.outcome == "stopped" else running.reason or run.early_end
            folder.record_end(running.outcome, run.step, reason)
            after = f" ({reason})" if reason else ""
            after += "; the same command goes on from there" if running.outcome == "stopped" else ""
            running.metrics.print(f"{config.run_name} {running.outcome} at step {run.step}{after}")
            if best := run.best_checkpoint:
                running.metrics.print(f"its lowest val_loss, {run.best.val_loss:.4f}, is that of {best}")
    except BaseException as error:
        run.watchdog.failed(error)  # where another rank is to blame, it is named instead, and this does not return
        if isinstance(error, UserError) and not folder and not error.on_every_rank:  # the main process does not know it
            print(f"error: rank {accelerator.process_index}: {error}", file=sys.stderr)
        if folder:  # and nothing else: the other ranks may be gone, and the newest checkpoint is good
            with suppress(UserError):  # of a disk that is full: the error to tell is the first one
                folder.write_status("failed", run.step, f"{type(error).__name__}: {error}")
        raise
    finally:
        stop.restore_handlers()
        running.metrics.close()
    running.metrics.finish()
    accelerator.end_training()


def _opening_words(run: Run) -> str:
    accelerator, task = run.accelerator, run.task
    begins = f"goes on from step {run.step}" if run.step else "starts"
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    shares = task.feed.share(task.feed.step_size)
    units = max(len(ranks[accelerator.process_index]) for ranks in shares) * task.units_per_item
    return (
        f"{run.config.run_name} {begins}: {parameters:,} parameters, {accelerator.num_processes} x "
        f"{accelerator.device.type}, precision {describe_precision(accelerator)}; a step is {len(shares)} x {units:,} "
        f"{task.unit} per process"
    )
