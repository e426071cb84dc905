"""The first phase of a run: the processes are connected, the folder is locked, its checkpoint is known."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import elastic_nodes, machines
from gpt2_ddp.distributed.launch import make_accelerator, pick_precision, start_run
from gpt2_ddp.distributed.ranks import check_ranks_agree, from_main, on_every_rank
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, TIMEOUT, Watchdog
from gpt2_ddp.errors import user_error_of
from gpt2_ddp.model.compiled import check_compiler
from gpt2_ddp.records.rows import Outcome
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.state import Progress
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.task import MakeTask, Task


@dataclass(frozen=True)
class Opened:
    """A run whose folder is open. It is the same on every rank: its parts are there on all, and only the main process's
    touch the disk.

    Attributes:
        checkpoint: to start from, hashed; None for a new run. A new branch has its parent's.
        progress: steps taken, scores, pending work.
        steps: of the whole run; None while that is unknown.
        begun: `time.monotonic()` of the start. patience: `eval.patience`, where there is one.
    """

    folder: RunFolder
    log: RunLog
    store: CheckpointStore
    watchdog: Watchdog
    accelerator: Accelerator
    strategy: Replicated
    task: Task
    checkpoint: Checkpoint | None
    progress: Progress
    steps: int | None
    begun: float
    patience: int | None

    @property
    def config(self) -> Any:
        """The configuration; resolved once the task has loaded its data."""
        return self.task.config

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.progress.step

    @property
    def early_end(self) -> str:
        """Reason to end the run before its last step; empty without one."""
        return self.progress.early_end(self.patience)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are taken and no work is pending."""
        done = self.steps is not None and self.step >= self.steps
        return (done or bool(self.early_end)) and not self.progress.pending

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, if the newest is another; on the main process."""
        best = self.progress.best.step
        return self.store.place(best) if best < self.step and self.store.place(best).is_dir() else None

    def record_end(self, outcome: Outcome, reason: str) -> None:
        """Records how training ended."""
        kept = self.store.listing()["kept"]
        self.log.append({"event": "end", "step": self.step, "outcome": outcome, "kept": kept})
        self.log.write_status(outcome, self.step, reason)


@contextmanager
def open_run(config: RunConfig, make_task: MakeTask, lock: bool = True) -> Iterator[Opened]:
    """Connects the processes, locks the run folder (False: only checks it), and finds the checkpoint to start from.

    Performs only cheap checks, and leaves no new folder behind on failure. An exception inside is sent to the other
    ranks. At the end, waits for a background save, unlocks the folder and ends the watchdog. Collective. Raises:
    UserError, on every rank.
    """
    begun = time.monotonic()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from gpt2_ddp.training.fsdp import follow_accelerate

        config = follow_accelerate(config)
    processes = start_run(config)
    watchdog = _start_watchdog(processes, config.train.patience_seconds)
    with ExitStack() as closing:
        closing.callback(watchdog.close)  # may wait for the other ranks
        try:
            check_ranks_agree(config.shared)
            device: Any = processes.device
            on_every_rank(partial(check_compiler, config.train.compile, device))
            folder, log, store = _open_folder(config, lock, watchdog, closing)
            progress = Progress()
            if lock:
                watchdog.report_to(
                    log.write_heartbeat,
                    lambda reason, is_refused: log.write_failure(progress.step, reason, is_refused),
                )
            watchdog.heartbeat("hashing", timeout=FIRST_TIMEOUT)
            checkpoint = find_start(config, store)
            if checkpoint:
                progress.load_state_dict(checkpoint.state.progress)
            config = _settle(config, checkpoint, device, watchdog)
            accelerator = make_accelerator(pick_precision(config.train.mixed_precision, device, "train."))
            strategy = _choose_strategy(config, accelerator, folder)
            task = make_task(config, accelerator, checkpoint)
            yield Opened(
                folder,
                log,
                store,
                watchdog,
                accelerator,
                strategy,
                task,
                checkpoint,
                progress,
                task.total_steps(checkpoint.state.setup.epoch_size if checkpoint else None),
                begun,
                config.get("eval.patience"),
            )
        except BaseException as caught:
            error = user_error_of(caught)
            watchdog.failed(error)  # ends this process if another rank is at fault
            if error is caught:
                raise
            raise error from caught


def _start_watchdog(processes: PartialState, patience: float | None) -> Watchdog:
    if processes.num_processes == 1:
        return Watchdog(patience)
    from gpt2_ddp.distributed.peers import PeerWatchdog

    return PeerWatchdog(processes.process_index, processes.num_processes, patience)


def _open_folder(
    config: RunConfig, lock: bool, watchdog: Watchdog, closing: ExitStack
) -> tuple[RunFolder, RunLog, CheckpointStore]:
    """The run's folder, records and checkpoints, until `closing`."""
    keep, mirror_status = config.checkpoint, dict
    folder = RunFolder(config, lock)
    closing.callback(folder.release)
    folder.open()
    if lock and elastic_nodes():
        folder.check_is_shared()
    if keep.mirror and lock:
        from gpt2_ddp.remote.mirror_process import open_mirror

        mirror_status = open_mirror(keep.mirror, folder.path, watchdog, closing)
    log = RunLog(folder, mirror_status)
    store = CheckpointStore(folder, log, keep.keep_last, keep.background, config.train.patience_seconds or TIMEOUT)
    closing.callback(store.background.join)
    return folder, log, store


def find_start(config: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to start from, hashed: the run's newest, or the first one of a branch; None for a new run.
    Compares configurations before it hashes. Collective. Raises: UserError."""
    if newest := store.newest(weights=False):
        from gpt2_ddp.config.help import check_resumable

        check_resumable(config, newest.kind, newest.config, newest.step)
    if (newest := store.newest()) or not config.get("train.branch_from"):
        return newest
    from gpt2_ddp.training.branch import branch_off, find_parent

    return branch_off(find_parent(config), config)


def _settle(config: Any, checkpoint: Checkpoint | None, device: torch.device, watchdog: Watchdog) -> Any:
    """The configuration with the model of `train.init_from`, and a precision in place of `fast`."""
    if config.get("train.init_from"):
        from gpt2_ddp.training.initial_weights import settle_model

        config = settle_model(config, checkpoint, watchdog)
    if config.train.mixed_precision == "fast":
        from gpt2_ddp.distributed.precision import settle_fast

        config = settle_fast(config, device, checkpoint.config["train"].get("mixed_precision") if checkpoint else "")
    return config


def _choose_strategy(config: RunConfig, accelerator: Accelerator, folder: RunFolder) -> Replicated:
    """What `launch.parallel` names."""
    if config.get("launch.parallel") != "fsdp":
        return Replicated(accelerator)
    from gpt2_ddp.training.fsdp import Sharded

    strategy = on_every_rank(partial(Sharded, accelerator, config))
    if folder.wants_lock and machines() > 1:
        folder.check_is_shared(strategy.part.is_own)
    return strategy


def _how_to_train_on(run: Opened) -> str:
    """What trains a complete run further, as a text for people."""
    config = run.config
    optim: Any = config.optim
    if run.early_end:
        return f"{run.early_end}; raise it to train further"
    if not hasattr(optim, "decay_steps"):  # of a small job, or of a task of one's own
        if getattr(optim, "schedule", "") == "cosine":
            return "its learning rate has decayed to 0; choose another run_name to train for more epochs"
        return "raise its steps or epochs to train further"
    if optim.is_over(run.step):
        from gpt2_ddp.training.branch import advise_branch

        return f"its learning rate has decayed to 0; {advise_branch(run.folder.path, optim)}"
    rate = run.task.schedule(run.step + 1)["lr"]
    return f"raise its steps or epochs to train further, at learning rate {rate:g}"


def finish_complete(run: Opened) -> None:
    """Compares the data of a run that is already complete, and prints a note. Records the end if the last process did
    not. Collective."""
    run.task.load(run.watchdog, is_complete=True)
    run.accelerator.print(f"{run.config.run_name} is complete at step {run.step}; {_how_to_train_on(run)}")
    assert run.checkpoint, "a complete run has a checkpoint"
    if from_main(run.log.outcome()) != "completed":
        run.log.resume(run.checkpoint.state.log, run.progress)
        run.store.prune(run.step)
        listing = run.store.listing()
        run.log.append({"event": "checkpoint", **(listing["checkpoint"] or {}), "kept": listing["kept"]})
        run.record_end("completed", run.early_end)
    run.log.write_status("completed", run.step, run.early_end)
    run.accelerator.end_training()
