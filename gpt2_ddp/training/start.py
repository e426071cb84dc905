"""A training run in three phases, each a value that is made whole: opened (`training.opening`),
built (`Trainer`), started (`Training`).

What changes from step to step is in the parts of a run: progress, feed, guard, optimizer, log and
task.
"""

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Checkpoint, Snapshot, optimizer_state
from gpt2_ddp.checkpoint.loading import load_model_state, load_optimizer_state
from gpt2_ddp.checkpoint.store import SLOW_DISK, CheckpointStore
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.saved import check_resumable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.environment import elastic_nodes, machines, spare_core
from gpt2_ddp.distributed.launch import make_accelerator, pick_precision, start_run
from gpt2_ddp.distributed.peers import PeerWatchdog
from gpt2_ddp.distributed.precision import settle_fast
from gpt2_ddp.distributed.ranks import check_ranks_agree, from_main, on_every_rank
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, TIMEOUT, Watchdog
from gpt2_ddp.errors import user_error_of
from gpt2_ddp.model.compiled import check_compiler, compiled, resolve_compile
from gpt2_ddp.project import git_commit
from gpt2_ddp.records.metrics import Metrics, Sample
from gpt2_ddp.records.rows import Outcome
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.remote.mirror_process import open_mirror
from gpt2_ddp.state import LogEnd, OptimizerState, Progress, Scores, Setup, State
from gpt2_ddp.training.branch import advise_branch, branch_off, find_parent
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.initial_weights import settle_model
from gpt2_ddp.training.optimizer import GuardedOptimizer, named_losses, set_values
from gpt2_ddp.training.replica_check import check_replicas
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.task import MakeTask, Poll, Task, check_numbers
from gpt2_ddp.training.throughput import (
    Throughput,
    describe_hardware,
    device_name,
    has_same_devices,
    versions,
)


@dataclass(frozen=True)
class Opened:
    """A run whose folder is open. It is the same on every rank: its parts are there on all, and
    only the main process's touch the disk.

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
        return (
            self.store.place(best) if best < self.step and self.store.place(best).is_dir() else None
        )

    def record_end(self, outcome: Outcome, reason: str) -> None:
        """Records how training ended."""
        kept = self.store.listing()["kept"]
        self.log.append({"event": "end", "step": self.step, "outcome": outcome, "kept": kept})
        self.log.write_status(outcome, self.step, reason)


@contextmanager
def open_run(config: RunConfig, make_task: MakeTask, lock: bool = True) -> Iterator[Opened]:
    """Connects the processes, locks the run folder (False: only checks it), and finds the
    checkpoint to start from.

    Performs only cheap checks, and leaves no new folder behind on failure. An exception inside is
    sent to the other ranks. At the end, waits for a background save, unlocks the folder and ends
    the watchdog. Collective. Raises: UserError, on every rank.
    """
    begun = time.monotonic()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from gpt2_ddp.training.fsdp import follow_accelerate  # noqa: PLC0415  FSDP: a second

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
            accelerator = make_accelerator(
                pick_precision(config.train.mixed_precision, device, "train.")
            )
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
                config.patience,
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
    return PeerWatchdog(processes.process_index, processes.num_processes, patience)


def _open_folder(
    config: RunConfig, lock: bool, watchdog: Watchdog, closing: ExitStack
) -> tuple[RunFolder, RunLog, CheckpointStore]:
    """The run's folder, records and checkpoints, until `closing`."""
    keep = config.checkpoint
    mirror_status = dict
    folder = RunFolder(config, lock)
    closing.callback(folder.release)
    folder.open()
    if lock and elastic_nodes():
        folder.check_is_shared()
    if keep.mirror and lock:
        mirror_status = open_mirror(keep.mirror, folder.path, watchdog, closing)
    log = RunLog(folder, mirror_status)
    store = CheckpointStore(
        folder, log, keep.keep_last, keep.background, config.train.patience_seconds or TIMEOUT
    )
    closing.callback(store.background.join)
    return folder, log, store


def find_start(config: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to start from, hashed: the run's newest, or the first one of a branch; None
    for a new run. Compares configurations before it hashes. Collective. Raises: UserError."""
    if newest := store.newest(weights=False):
        check_resumable(config, newest.kind, newest.config, newest.step)
    if newest := store.newest():
        return newest
    if isinstance(config, TrainingConfig) and config.train.branch_from:
        return branch_off(find_parent(config), config)
    return None


def _settle(
    config: RunConfig, checkpoint: Checkpoint | None, device: torch.device, watchdog: Watchdog
) -> RunConfig:
    """The configuration with the model of `train.init_from`, and a precision in place of `fast`."""
    if isinstance(config, TrainingConfig) and config.train.init_from:
        config = settle_model(config, checkpoint, watchdog)
    if config.train.mixed_precision == "fast":
        before = checkpoint.config["train"].get("mixed_precision") if checkpoint else ""
        config = settle_fast(config, device, before)
    return config


def _choose_strategy(config: RunConfig, accelerator: Accelerator, folder: RunFolder) -> Replicated:
    """What `launch.parallel` names."""
    if config.parallel != "fsdp":
        return Replicated(accelerator)
    from gpt2_ddp.training.fsdp import Sharded  # noqa: PLC0415  FSDP: a second

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
        return f"its learning rate has decayed to 0; {advise_branch(run.folder.path, optim)}"
    rate = run.task.schedule(run.step + 1)["lr"]
    return f"raise its steps or epochs to train further, at learning rate {rate:g}"


def finish_complete(run: Opened) -> None:
    """Compares the data of a run that is already complete, and prints a note. Records the end if
    the last process did not. Collective."""
    run.task.load(run.watchdog, is_complete=True)
    run.accelerator.print(
        f"{run.config.run_name} is complete at step {run.step}; {_how_to_train_on(run)}"
    )
    assert run.checkpoint, "a complete run has a checkpoint"
    if from_main(run.log.outcome()) != "completed":
        run.log.resume(run.checkpoint.state.log, run.progress)
        run.store.prune(run.step)
        listing = run.store.listing()
        run.log.append(
            {"event": "checkpoint", **(listing["checkpoint"] or {}), "kept": listing["kept"]}
        )
        run.record_end("completed", run.early_end)
    run.log.write_status("completed", run.step, run.early_end)
    run.accelerator.end_training()


@dataclass(frozen=True)
class Trainer(Opened):
    """A run with its data, model and optimizer.

    Attributes:
        model: prepared by Accelerate. `task.model` is the plain model.
        setup: devices, software and size of the data. config_yaml: the resolved configuration, for
            checkpoints.
        has_core: whether training leaves a core idle, for background saves.
    """

    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: GuardedOptimizer
    guard: Guard
    setup: Setup
    config_yaml: str
    has_core: bool

    def state(self) -> State:
        """The state after the current step. Collective; waits for the device."""
        self.guard.flush()
        scaler: Any = self.accelerator.scaler
        norms = self.guard.norms.state_dict() if self.guard.norms else (0, 0, 0)
        return State.of(
            self.config.kind,
            progress=self.progress.model_copy(deep=True),
            feed=self.task.feed.state,
            guard=self.guard.state_dict(),
            optimizer=OptimizerState(norms=norms, scaler=scaler and scaler.state_dict()),
            losses=self.guard.losses.model_copy(),
            log=self.log.end(),
            setup=self.setup,
            task=self.task.state_dict(),
        )

    def snapshot(self) -> Snapshot:
        """This rank's part of a checkpoint, of the run's own tensors. Collective."""
        strategy = self.strategy
        model = self.task.model
        weights = model.state_dict()
        moments = optimizer_state(model, self.optimizer.plain)
        held = strategy.held(weights), strategy.held(moments)
        return Snapshot(self.state(), self.config_yaml, *held, self.task.files, strategy.part)

    def load(self, start: Checkpoint) -> None:
        """Loads a checkpoint on all ranks, in place. Collective."""
        model = self.task.model
        state = start.state
        self.guard.flush()
        files = (MODEL, OPTIMIZER) if self.strategy.part.is_own else ()
        weights, moments = on_every_rank(lambda: [*map(start.tensors, files)]) or ({}, {})
        load_model_state(weights, model, self.strategy.fill)
        load_optimizer_state(moments, model, self.optimizer.plain, self.strategy.fill)
        self.progress.load_state_dict(state.progress)
        self.task.feed.seek(state.feed)
        self.guard.load_state_dict(state.guard)
        if self.guard.norms:
            self.guard.norms.load_state_dict(state.optimizer.norms)
        if state.optimizer.scaler and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state.optimizer.scaler)
        self.guard.losses.load_state_dict(state.losses)
        self.task.load_state_dict(state.task)

    def check_replicas(self) -> None:
        """Compares weights and optimizer state of all ranks. Collective. Raises: ReplicaMismatch,
        on every rank."""
        strategy = self.strategy
        if self.accelerator.num_processes > strategy.part.count:
            tensors = self.task.model, self.optimizer.plain
            check_replicas(self.accelerator, *tensors, self.step, strategy.local, strategy.replicas)

    def evaluate(self, poll: Poll) -> Scores:
        """The task's scores of the current weights. Collective. Raises: Interrupted, as `poll`
        does."""
        self.watchdog.heartbeat("evaluate")
        with self.strategy.evaluating(self.model) as model:
            model.eval()
            try:
                with torch.no_grad():
                    scores = self.task.evaluate(model, poll)
            finally:
                model.train()
        scores = check_numbers("evaluate", scores, self.progress.pending.row)
        self.progress.add_scores(scores)
        return scores

    def warm_up(self) -> None:
        """Lets the strategy prepare for the first step."""
        self.watchdog.heartbeat("settle")
        task = self.task

        def loss() -> Tensor:
            return reduce(
                add, named_losses(task.loss(self.model, task.feed.first_micro_batch())).values()
            )

        self.strategy.warm_up(self.model, self.optimizer.plain, loss)


def build(run: Opened, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Trainer:
    """Loads the data, builds model and optimizer, loads the checkpoint on all ranks, and records
    the start. `wrap` changes the plain model before Accelerate prepares it. Collective."""
    task = run.task
    task.load(run.watchdog)
    run.watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
    steps = task.total_steps(len(task.feed.order))
    how = _resolve_compile(run)
    model, prepared = run.strategy.prepare(compiled(wrap(task.model), how), task)
    optimizer = GuardedOptimizer(prepared, run.strategy)
    # checks their names
    on_every_rank(lambda: set_values(optimizer.plain.param_groups, task.schedule(run.step + 1)))
    device = run.accelerator.device
    threads = torch.get_num_threads()
    trainer = Trainer(
        **vars(replace(run, steps=steps)),
        model=model,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        guard=Guard(run.config.guard, run.progress.first_step, device),
        setup=Setup(
            epoch_size=len(task.feed.order),
            processes=run.accelerator.num_processes,
            device=device_name(device),
            threads=threads,
            compile=how,
            versions=versions(),
        ),
        config_yaml=dump(run.config),
        has_core=spare_core(device.type, threads),
    )
    if run.checkpoint:
        trainer.load(run.checkpoint)
    run.progress.run_id = run.progress.run_id or from_main(uuid.uuid4().hex[:8])
    _record_start(trainer)
    return trainer


def _resolve_compile(run: Opened) -> str:
    """`train.compile` with `auto` resolved: the checkpoint's value, if number and kind of devices
    are the same."""
    accelerator = run.accelerator
    how = run.config.train.compile
    before = run.checkpoint and run.checkpoint.state.setup
    if how == "auto":
        known = before.compile if before and has_same_devices(before, accelerator) else None
        how, missing = resolve_compile(known, run.task.model, accelerator)
        if missing:
            accelerator.print(f"note: torch.compile is off: it needs {missing} (train.compile)")
    if how == "model" and run.config.parallel == "fsdp":
        how = "blocks"
    if how != "off":
        run.watchdog.first_limit = FIRST_TIMEOUT
    return how


def _record_start(run: Trainer) -> None:
    config = run.config
    progress = run.progress
    run.store.prune(run.guard.last_good)  # keep_last may have been lowered since, for a full disk
    feed = run.task.feed.state
    task = run.task.state_dict()
    listing = run.store.listing()
    begins = State.of(config.kind, progress=progress, feed=feed, setup=run.setup, task=task)
    start = {"event": "start", **begins.identity, "steps": run.steps}
    start |= {"config": config.model_dump(mode="json"), "command": shlex.join(sys.argv)}
    start |= {"commit": git_commit(), "hardware": describe_hardware(), **listing}
    run.log.resume(run.checkpoint.state.log if run.checkpoint else LogEnd(), progress, start)
    run.log.write_config(config)
    if progress.branched_from and not listing["checkpoint"]:
        run.log.append(
            {"event": "branch", **progress.branched_from.model_dump(), **feed.model_dump()}
        )
        run.accelerator.print(f"note: branches off {progress.branched_from.parent}")


@dataclass(frozen=True)
class Training(Trainer):
    """A run that trains, with requests to stop, rows and speed."""

    stop: StopRequest
    metrics: Metrics
    throughput: Throughput

    def save(self) -> None:
        """Saves a checkpoint of the current step, after the replica check. Collective. A background
        save is on disk once `wait_for_save` returns, any other once this returns."""
        self.wait_for_save()
        self.check_replicas()
        snapshot = self.snapshot()
        is_complete = self.is_complete
        self.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK)
        # the last step gets no verdict
        good = self.step if is_complete and not self.guard.is_suspicious else self.guard.last_good
        self.store.save(snapshot, good, is_complete or self.stop.is_agreed, self.has_core)

    def wait_for_save(self) -> None:
        """Waits for the background save. Collective. Raises: UserError if writing failed, or the
        run folder is gone."""
        self.watchdog.heartbeat("save", timeout=self.store.background.timeout)
        self.store.wait()

    def sample(self) -> list[Sample] | None:
        """Samples of the main process; others may get None, as may all after a failure. Collective.
        Raises: Interrupted."""
        self.watchdog.heartbeat("sample")
        sample = partial(self.task.sample, self.stop.poll)
        return self.strategy.sample(self.task.model, self.stop, self.metrics, sample)


@contextmanager
def start(
    trainer: Trainer, on_row: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[Training]:
    """Installs the signal handlers, starts the trackers, and records that the run is running; an
    exception inside is recorded as its failure. The main process passes each row to `on_row`.
    Collective."""
    config = trainer.config
    accelerator = trainer.accelerator
    log = trainer.log
    throughput = Throughput(trainer.task, accelerator.device)
    metrics = Metrics(log, on_row)
    stop = StopRequest(trainer.begun, config.train.max_minutes, trainer.watchdog.progress)
    run = Training(**vars(trainer), stop=stop, metrics=metrics, throughput=throughput)
    try:
        metrics.start_trackers(config, run.progress.run_id)
        log.write_status("running", run.step)
        metrics.print(describe_start(run))
        yield run
    except BaseException as caught:
        error = user_error_of(caught)
        _record_failure(run, error)
        if error is caught:
            raise
        raise error from caught
    finally:
        stop.restore_handlers()
    metrics.close()
    accelerator.end_training()


def _record_failure(run: Opened, error: BaseException) -> None:
    """Reports an exception to the other ranks, which may be gone, to the user and in
    status.json."""
    run.watchdog.failed(error)  # ends this process if another rank is at fault
    if run.log.is_main:
        run.log.write_failure(run.step, f"{type(error).__name__}: {error}")


def finish(run: Training, outcome: Outcome, reason: str = "") -> None:
    """Waits for the last save and records how training ended. Collective."""
    run.wait_for_save()
    run.watchdog.heartbeat("ending", timeout=FIRST_TIMEOUT)  # a tracker may still send much data
    reason = run.stop.reason if outcome == "stopped" else reason or run.early_end
    run.record_end(outcome, reason)
    end = f"{run.config.run_name} {outcome} at step {run.step}" + f" ({reason})" * bool(reason)
    run.metrics.print(end + "; the same command resumes it" * (outcome == "stopped"))
    if best := run.best_checkpoint:
        run.metrics.print(f"lowest val_loss: {run.progress.best.val_loss:.4f}, in {best}")


def describe_start(run: Training) -> str:
    """What is about to be trained, and on what, for people."""
    accelerator = run.accelerator
    task = run.task
    parts, rows = run.task.feed.micro_batches
    begins = f"resumes from step {run.step}" if run.step else "starts"
    count = accelerator.num_processes
    kind = accelerator.device.type
    precision = describe_precision(accelerator.mixed_precision, accelerator.device)
    if run.config.parallel == "fsdp":
        kind += ", fsdp"
    kind += f", precision {precision}"
    what = f"{sum(map(Tensor.numel, run.parameters)):,} parameters, {count} x {kind}"
    what += f"; a step is {parts} x {rows * task.units_per_item:,} {task.unit} per process"
    return f"{run.config.run_name} {begins}: {what}"


def describe_precision(precision: str, device: torch.device) -> str:
    """The precision of a training as text, with a hint on GPUs that are faster in bf16."""
    if precision == "no" and pick_precision("fast", device) == "bf16":
        return "no, here slower than bf16; set --train.mixed_precision bf16"
    return precision
