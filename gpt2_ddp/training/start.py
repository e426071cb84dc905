"""The phases of a run, each a value that holds the one before, is made whole, and is not changed
later:

    with open_run(config, make_task) as run:          OpenRun: connected, locked; the task
        with start(build(run)) as training:           Trainer: data, model, optimizer; it can step
            ...                                       Training: handlers, trackers, rows; it runs
            finish(training, "completed")

What changes from step to step is in the parts of a run: progress, feed, guard, optimizer, log and
task. A checkpoint has the state of each (`Trainer.state`).
"""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import os
import shlex
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Checkpoint, Snapshot, optimizer_state
from gpt2_ddp.checkpoint.loading import (
    load_model_state,
    load_optimizer_state,
    load_trained_weights,
)
from gpt2_ddp.checkpoint.store import SLOW_DISK, CheckpointStore
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.jobs import JobOptimConfig
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.saved import check_resumable, with_recorded
from gpt2_ddp.config.training import OptimConfig, TrainingConfig
from gpt2_ddp.distributed.environment import elastic_nodes, machines, spare_core
from gpt2_ddp.distributed.launch import make_accelerator, pick_precision, start_run
from gpt2_ddp.distributed.peers import PeerWatchdog
from gpt2_ddp.distributed.precision import settle_fast
from gpt2_ddp.distributed.ranks import check_ranks_agree, from_main, on_every_rank
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, TIMEOUT, Watchdog
from gpt2_ddp.errors import UserError, user_error_of
from gpt2_ddp.model.compiled import check_compiler, compiled, resolve_compile
from gpt2_ddp.model.fp8 import check_fp8
from gpt2_ddp.model.step_casts import StepCasts, dtype_of_casts
from gpt2_ddp.project import git_commit
from gpt2_ddp.records.metrics import Metrics, OnRow, Sample
from gpt2_ddp.records.rows import Outcome, Row
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.remote.mirror_process import open_mirror
from gpt2_ddp.state import LogEnd, OptimizerState, Progress, Scores, Setup, State
from gpt2_ddp.training.average import WeightAverage
from gpt2_ddp.training.branch import advise_branch, branch_off, find_parent
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.initial_weights import settle_model
from gpt2_ddp.training.optimizer import GuardedOptimizer, named_losses, set_values
from gpt2_ddp.training.replica_check import check_replicas, replicated_tensors
from gpt2_ddp.training.save_interval import SaveInterval
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.task import MakeTask, Poll, Task, check_numbers
from gpt2_ddp.training.throughput import (
    Throughput,
    describe_hardware,
    device_name,
    has_same_devices,
    versions,
)
from gpt2_ddp.training.trace import Trace

ConfigT = TypeVar("ConfigT", bound=RunConfig)


@dataclass(frozen=True)
class OpenRun:
    """A run whose folder is open. It is the same on every rank: its parts are there on all, and
    only the main process's touch the disk.

    Attributes:
        checkpoint: to start from, hashed; None for a new run. A new branch has its parent's.
        progress: steps taken and to take, scores, pending work.
        begun: `time.monotonic()` of the start.
    """

    folder: RunFolder
    log: RunLog
    store: CheckpointStore
    watchdog: Watchdog
    accelerator: Accelerator
    strategy: Replicated
    task: Task[RunConfig]
    checkpoint: Checkpoint | None
    progress: Progress
    begun: float

    @property
    def config(self) -> RunConfig:
        """The configuration; resolved once the task has loaded its data."""
        return self.task.config

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.progress.step

    @property
    def patience(self) -> int | None:
        """`eval.patience`, where there is one."""
        return self.config.patience

    @property
    def early_end(self) -> str:
        """Reason to end the run before its last step; empty without one."""
        return self.progress.early_end(self.patience)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are taken and no work is pending."""
        steps = self.progress.steps
        has_ended = bool(self.early_end) or (steps is not None and self.step >= steps)
        return has_ended and not self.progress.pending

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, if the newest is another; on the main process."""
        best = self.progress.best.step
        checkpoint = self.store.place(best)
        return checkpoint if best < self.step and checkpoint.is_dir() else None

    def record_end(self, outcome: Outcome, reason: str) -> None:
        """Records how training ended."""
        kept = self.store.listing()["kept"]
        self.log.append({"event": "end", "step": self.step, "outcome": outcome, "kept": kept})
        if self.log.is_main:
            self.log.sync()  # the status is durable, too, and must not be there without the row
        self.log.write_status(outcome, self.step, reason)


@contextmanager
def open_run(
    config: ConfigT, make_task: MakeTask[ConfigT], lock: bool = True
) -> Generator[OpenRun]:
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
            device = cast(torch.device, processes.device)  # set by its constructor
            on_every_rank(partial(_check_device, config, device))
            folder, log, store = _open_folder(config, lock, watchdog, closing)
            progress = Progress()
            if lock:
                _report_liveness(watchdog, log, progress)
            watchdog.heartbeat("hashing", timeout=FIRST_TIMEOUT)
            config = as_recorded(config, store)
            checkpoint = find_start(config, store)
            if checkpoint:
                progress.load_state_dict(checkpoint.state.progress)
            config = _settle(config, checkpoint, device, watchdog)
            precision = pick_precision(config.train.mixed_precision, device, "train.")
            accelerator = make_accelerator(precision)
            strategy = _choose_strategy(config, accelerator, folder)
            task = make_task(config, accelerator, checkpoint)
            _check_hooks(task)
            epoch_size = checkpoint.state.setup.epoch_size if checkpoint else None
            progress.steps = task.total_steps(epoch_size)
            yield OpenRun(
                folder=folder,
                log=log,
                store=store,
                watchdog=watchdog,
                accelerator=accelerator,
                strategy=strategy,
                task=task,
                checkpoint=checkpoint,
                progress=progress,
                begun=begun,
            )
        except BaseException as caught:
            error = user_error_of(caught)
            watchdog.failed(error)  # ends this process if another rank is at fault
            if error is caught:
                raise
            raise error from caught


def _check_device(config: RunConfig, device: torch.device) -> None:
    """Raises: UserError if the device lacks what the configuration requires."""
    check_compiler(config.train.compile, device)
    if isinstance(config, TrainingConfig) and config.train.fp8_head:
        check_fp8(device, pick_precision(config.train.mixed_precision, device, "train."))


def _report_liveness(watchdog: Watchdog, log: RunLog, progress: Progress) -> None:
    """Has the watchdog write its heartbeats, and a failure that it finds, into status.json."""

    def write_failure(reason: str, is_refused: bool) -> None:
        log.write_failure(progress.step, reason, is_refused)

    watchdog.report_to(log.write_heartbeat, write_failure)


def _check_hooks(task: Task[RunConfig]) -> None:
    """Raises: UserError for a task of a class that lacks what the loop calls on all tasks."""
    for name in ("row_fields", "after_step"):
        if not hasattr(task, name):
            hint = f"has no {name}(); extend gpt2_ddp.training.task.Task, which has a default"
            raise UserError("task", type(task).__name__, hint)


def _start_watchdog(processes: PartialState, patience: float | None) -> Watchdog:
    rank = cast(int, processes.process_index)
    world = cast(int, processes.num_processes)
    if world == 1:
        return Watchdog(patience)
    return PeerWatchdog(rank, world, patience)


def _open_folder(
    config: RunConfig, lock: bool, watchdog: Watchdog, closing: ExitStack
) -> tuple[RunFolder, RunLog, CheckpointStore]:
    """The run's folder, records and checkpoints, until `closing`."""
    keep = config.checkpoint
    mirror_status = dict[str, Any]  # without a mirror: an empty dict
    folder = RunFolder(config, lock)
    closing.callback(folder.release)
    folder.open()
    if lock and elastic_nodes():
        folder.check_is_shared()
    if keep.mirror and lock:
        mirror_status = open_mirror(keep.mirror, folder.path, watchdog, closing)
    log = RunLog(folder, mirror_status)
    store = CheckpointStore(folder, log, keep, config.train.patience_seconds or TIMEOUT)
    closing.callback(store.background.join)
    return folder, log, store


def find_start(config: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to start from, hashed: the run's newest, or the first one of a branch; None
    for a new run. Compares configurations before it hashes. Collective. Raises: UserError."""
    newest = store.newest(weights=False)
    if newest:
        check_resumable(config, newest.kind, newest.config, newest.step)
    newest = store.newest()
    if newest:
        return newest
    if isinstance(config, TrainingConfig) and config.train.branch_from:
        return branch_off(find_parent(config), config)
    return None


def as_recorded(config: ConfigT, store: CheckpointStore) -> ConfigT:
    """The configuration of a run of one's own text, completed by the run that it resumes, or by the
    parent of a branch. Raises: UserError, as
    `find_checkpoint`."""
    if not isinstance(config, TrainingConfig) or not config.own_text:
        return config
    checkpoint = store.newest(weights=False)
    parent = config.train.branch_from
    if not checkpoint and parent:
        checkpoint = find_checkpoint(Path(parent), "train.branch_from", weights=False)
    return with_recorded(config, checkpoint.config) if checkpoint else config


def _settle(
    config: ConfigT, checkpoint: Checkpoint | None, device: torch.device, watchdog: Watchdog
) -> ConfigT:
    """The configuration with the model of `train.init_from`, and a precision in place of `fast`."""
    if isinstance(config, TrainingConfig) and config.train.init_from:
        config = settle_model(config, checkpoint, watchdog)
    if config.train.mixed_precision == "fast":
        before = checkpoint.config["train"].get("mixed_precision") if checkpoint else ""
        config = settle_fast(config, device, before)
    return config


def _choose_strategy(config: RunConfig, accelerator: Accelerator, folder: RunFolder) -> Replicated:
    """What `launch.parallel` names."""
    if not isinstance(config, TrainingConfig) or config.parallel != "fsdp":
        return Replicated(accelerator)
    from gpt2_ddp.training.fsdp import Sharded  # noqa: PLC0415  FSDP: a second

    strategy = on_every_rank(partial(Sharded, accelerator, config))
    if folder.wants_lock and machines() > 1:
        folder.check_is_shared(strategy.part.is_own)
    return strategy


def _how_to_train_on(run: OpenRun) -> str:
    """What trains a complete run further, as a text for people."""
    optim = run.config.optim
    if run.early_end:
        return f"{run.early_end}; raise it to train further"
    if isinstance(optim, JobOptimConfig) and optim.schedule == "cosine":
        advice = "choose another run_name to train for more epochs"
        return f"its learning rate has decayed to 0; {advice}"
    if not isinstance(optim, OptimConfig):  # of a small job, or of a task of one's own
        return "raise its steps or epochs to train further"
    if optim.is_over(run.step):
        return f"its learning rate has decayed to 0; {advise_branch(run.folder.path, optim)}"
    rate = run.task.schedule(run.step + 1)["lr"]
    return f"raise its steps or epochs to train further, at learning rate {rate:g}"


def finish_complete(run: OpenRun) -> None:
    """Compares the data of a run that is already complete, and prints a note. Records the end if
    the last process did not. Collective."""
    run.task.load(run.watchdog, is_complete=True)
    advice = _how_to_train_on(run)
    run.accelerator.print(f"{run.config.run_name} is complete at step {run.step}; {advice}")
    assert run.checkpoint, "a complete run has a checkpoint"
    if from_main(run.log.outcome()) != "completed":
        run.log.resume(run.checkpoint.state.log, run.progress)
        run.store.prune(run.step)
        listing = run.store.listing()
        checkpoint: dict[str, Any] = listing["checkpoint"] or {}
        run.log.append({"event": "checkpoint", **checkpoint, "kept": listing["kept"]})
        run.record_end("completed", run.early_end)
    run.log.write_status("completed", run.step, run.early_end)
    run.accelerator.end_training()


@dataclass(frozen=True)
class Trainer:
    """A run with its data, model and optimizer. It can take steps.

    Attributes:
        model: prepared by Accelerate. `run.task.model` is the plain model.
        casts: copies of the weights in half precision, for the micro-batches of a step.
        average: of the weights; evaluations, samples and checkpoints have it as the model.
        setup: devices, software and size of the data.
        has_core: whether training leaves a core idle, for background saves.
    """

    run: OpenRun
    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: GuardedOptimizer
    casts: StepCasts
    average: WeightAverage
    guard: Guard
    setup: Setup
    has_core: bool

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        """Loss scaler of fp16."""
        return cast(torch.amp.GradScaler | None, self.run.accelerator.scaler)

    def state(self) -> State:
        """The state after the current step. Collective; waits for the device."""
        run = self.run
        self.guard.flush()
        scaler = self._scaler
        norms = self.guard.norms.state_dict() if self.guard.norms else (0, 0, 0)
        return State.of(
            run.config.kind,
            progress=run.progress.model_copy(deep=True),
            feed=run.task.feed.state,
            guard=self.guard.state_dict(),
            optimizer=OptimizerState(norms=norms, scaler=scaler and scaler.state_dict()),
            losses=self.guard.losses.model_copy(),
            log=run.log.end(),
            setup=self.setup,
            task=run.task.state_dict(),
        )

    def snapshot(self) -> Snapshot:
        """This rank's part of a checkpoint, of the run's own tensors. Collective."""
        run = self.run
        weights = self.average.model_state(run.task.model)
        moments = optimizer_state(run.task.model, self.optimizer.plain)
        moments |= self.average.trained_weights()
        return Snapshot(
            state=self.state(),
            config=dump(run.config),
            model=run.strategy.held(weights),
            optimizer=run.strategy.held(moments),
            files=run.task.files,
            part=run.strategy.part,
            format=run.config.checkpoint_format,
        )

    def load(self, start: Checkpoint) -> None:
        """Loads a checkpoint on all ranks, in place. Collective."""
        run = self.run
        model = run.task.model
        strategy = run.strategy
        state = start.state
        self.guard.flush()
        weights, moments = on_every_rank(partial(_open_tensors, start, strategy.part.is_own))
        load_model_state(weights, model, strategy.fill)
        self.average.restart()  # the checkpoint's model is the average, if it has one
        load_trained_weights(moments, model, strategy.fill)
        load_optimizer_state(moments, model, self.optimizer.plain, strategy.fill)
        run.progress.load_state_dict(state.progress)
        run.task.feed.seek(state.feed)
        self.guard.load_state_dict(state.guard)
        if self.guard.norms:
            self.guard.norms.load_state_dict(state.optimizer.norms)
        scaler = self._scaler
        if state.optimizer.scaler and scaler:
            scaler.load_state_dict(state.optimizer.scaler)
        self.guard.losses.load_state_dict(state.losses)
        run.task.load_state_dict(state.task)

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Compares weights, average and optimizer state of all ranks. Collective. Raises:
        ReplicaMismatch, on every rank."""
        run = self.run
        strategy = run.strategy
        if run.accelerator.num_processes > strategy.part.count:
            tensors = replicated_tensors(run.task.model, self.optimizer.plain)
            tensors |= {f"average.{name}": value for name, value in self.average.values.items()}
            held = {name: strategy.local(tensor) for name, tensor in tensors.items()}
            check_replicas(run.accelerator, held, run.step, strategy.replicas)

    def evaluate(self, poll: Poll) -> Scores:
        """The task's scores of the current weights, or of their average. Collective. Raises:
        Interrupted, as `poll` does."""
        run = self.run
        run.watchdog.heartbeat("evaluate")
        with self.average.in_use(), run.strategy.evaluating(self.model) as model:
            model.eval()
            try:
                with torch.no_grad():
                    scores = run.task.evaluate(model, poll)
            finally:
                model.train()
        scores = check_numbers("evaluate", scores, run.progress.pending.row)
        run.progress.add_scores(scores)
        return scores

    def warm_up(self) -> None:
        """Lets the strategy prepare for the first step."""
        task = self.run.task
        self.run.watchdog.heartbeat("settle")

        def loss() -> Tensor:
            losses = named_losses(task.loss(self.model, task.feed.first_micro_batch()))
            return reduce(add, losses.values())

        self.run.strategy.warm_up(self.model, self.optimizer.plain, loss)


def _open_tensors(
    checkpoint: Checkpoint, is_read: bool
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Weights and optimizer state of a checkpoint, on the ranks that read them."""
    if not is_read:
        return {}, {}
    return checkpoint.tensors(MODEL), checkpoint.tensors(OPTIMIZER)


def build(run: OpenRun, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Trainer:
    """Loads the data, builds model and optimizer, loads the checkpoint on all ranks, and records
    the start. `wrap` changes the plain model before Accelerate prepares it. Collective."""
    task = run.task
    task.load(run.watchdog)
    run.watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
    epoch_size = len(task.feed.order)
    run.progress.steps = task.total_steps(epoch_size)
    compilation = _resolve_compile(run)
    model, prepared = run.strategy.prepare(compiled(wrap(task.model), compilation), task)
    optimizer = GuardedOptimizer(prepared, run.strategy)
    first_settings = partial(set_values, optimizer.plain.param_groups)
    on_every_rank(lambda: first_settings(task.schedule(run.step + 1)))  # checks their names
    device = run.accelerator.device
    threads = torch.get_num_threads()
    trainer = Trainer(
        run=run,
        model=model,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        casts=StepCasts(task.model, _cast_once(run)),
        average=WeightAverage(task.model, run.config.average, run.strategy.local),
        guard=Guard(run.config.guard, run.progress.first_step, device),
        setup=Setup(
            epoch_size=epoch_size,
            processes=run.accelerator.num_processes,
            device=device_name(device),
            threads=threads,
            compile=compilation,
            versions=versions(),
        ),
        has_core=spare_core(device.type, threads),
    )
    if run.checkpoint:
        trainer.load(run.checkpoint)
    run.progress.run_id = run.progress.run_id or from_main(uuid.uuid4().hex[:8])
    _record_start(trainer)
    return trainer


def _cast_once(run: OpenRun) -> torch.dtype | None:
    """The dtype to which the weights are cast once a step; None if autocast casts them, or if a
    step has one micro-batch. Shards are cast as they are gathered."""
    micro_batches, _ = run.task.feed.micro_batches
    if micro_batches == 1 or run.config.parallel == "fsdp":
        return None
    return dtype_of_casts(run.accelerator.device.type, run.accelerator.mixed_precision)


def _resolve_compile(run: OpenRun) -> str:
    """`train.compile` with `auto` resolved: the checkpoint's value, if number and kind of devices
    are the same."""
    accelerator = run.accelerator
    config = run.config
    compilation: str = config.train.compile
    if compilation == "auto":
        before = run.checkpoint.state.setup if run.checkpoint else None
        kept = before.compile if before and has_same_devices(before, accelerator) else None
        minutes = (config.train.minutes or 0) if isinstance(config, TrainingConfig) else 0
        compilation, missing = resolve_compile(kept, run.task.model, accelerator, minutes)
        if missing:
            accelerator.print(f"note: torch.compile is off: it needs {missing} (train.compile)")
    if compilation == "model" and config.parallel == "fsdp":
        compilation = "blocks"
    if compilation != "off":
        run.watchdog.first_limit = FIRST_TIMEOUT
    return compilation


def _record_start(trainer: Trainer) -> None:
    run = trainer.run
    config = run.config
    progress = run.progress
    # keep_last may have been lowered since, for a full disk
    run.store.prune(trainer.guard.last_good)
    feed = run.task.feed.state
    task = run.task.state_dict()
    listing = run.store.listing()
    begins = State.of(config.kind, progress=progress, feed=feed, setup=trainer.setup, task=task)
    start = {"event": "start", **begins.identity, "steps": progress.steps}
    start |= {"config": config.model_dump(mode="json"), "command": shlex.join(sys.argv)}
    start |= {"commit": git_commit(), "hardware": describe_hardware(), **listing}
    start |= run.task.start_fields
    run.log.resume(run.checkpoint.state.log if run.checkpoint else LogEnd(), progress, start)
    run.log.write_config(config)
    branch = progress.branched_from
    if branch and not listing["checkpoint"]:
        run.log.append({"event": "branch", **branch.model_dump(), **feed.model_dump()})
        run.accelerator.print(f"note: branches off {branch.parent}")


class StartedRow(NamedTuple):
    """What is known of a row as soon as its step is in the device's queue.

    Attributes:
        position: its first fields.
        settings: of the schedule.
        order_digest: of all items up to it.
        ends_epoch: whether the step ended an epoch.
        units: of the step, of all ranks.
        fields: the task's `row_fields`, if there are any.
    """

    step: int
    position: Row
    settings: dict[str, float]
    order_digest: str
    ends_epoch: bool
    units: int
    fields: dict[str, float] | None


@dataclass(frozen=True)
class Training:
    """A run that trains, with requests to stop, rows and speed; with `checkpoint.seconds`, an
    interval of its saves.

    Attributes:
        late_rows: rows that are written once their numbers are known.
    """

    trainer: Trainer
    stop: StopRequest
    metrics: Metrics
    throughput: Throughput
    trace: Trace
    interval: SaveInterval | None
    late_rows: deque[StartedRow] = field(default_factory=deque[StartedRow])

    @property
    def run(self) -> OpenRun:
        """The run that is trained."""
        return self.trainer.run

    def save(self) -> None:
        """Saves a checkpoint of the current step, after the replica check. Collective. A background
        save is on disk once `wait_for_save` returns, any other once this returns."""
        run = self.run
        guard = self.trainer.guard
        if self.interval:
            self.interval.begin_save()
        self.wait_for_save()
        self.trainer.check_replicas()
        snapshot = self.trainer.snapshot()
        is_complete = run.is_complete
        run.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK)
        # the last step gets no verdict
        good = run.step if is_complete and not guard.is_suspicious else guard.last_good
        must_wait = is_complete or self.stop.is_agreed
        run.store.save(snapshot, good, must_wait, self.trainer.has_core)
        if self.interval:
            self.interval.end_save(run.step)

    def wait_for_save(self) -> None:
        """Waits for the background save. Collective. Raises: UserError if writing failed, or the
        run folder is gone."""
        store = self.run.store
        self.run.watchdog.heartbeat("save", timeout=store.background.timeout)
        store.wait()

    def sample(self) -> list[Sample] | None:
        """Samples of the main process; others may get None, as may all after a failure. Collective.
        Raises: Interrupted."""
        run = self.run
        run.watchdog.heartbeat("sample")
        sample = partial(run.task.sample, self.stop.poll)
        with self.trainer.average.in_use():
            return run.strategy.sample(run.task.model, self.stop, self.metrics, sample)


@contextmanager
def start(trainer: Trainer, on_row: OnRow | None = None) -> Generator[Training]:
    """Installs the signal handlers, starts the trackers, and records that the run is running; an
    exception inside is recorded as its failure. The main process passes each row to `on_row`.
    Collective."""
    run = trainer.run
    config = run.config
    throughput = Throughput(run.task, run.accelerator.device)
    metrics = Metrics(run.log, on_row)
    stop = StopRequest(run.begun, config.train.max_minutes, run.watchdog.progress)
    trace = Trace(config.tracking.profile_steps, run.folder.path, run.watchdog, metrics)
    try:
        metrics.start_trackers(config, run.progress.run_id)
        run.log.write_status("running", run.step)
        metrics.print(describe_start(trainer))
        interval = None
        if config.checkpoint.seconds is not None:
            background = run.store.background
            interval = SaveInterval(config.checkpoint, stop, background, run.log, metrics.print)
        trace.announce(run.step + 1, run.progress.steps)
        yield Training(trainer, stop, metrics, throughput, trace, interval)
    except BaseException as caught:
        error = user_error_of(caught)
        _record_failure(run, error)
        if error is caught:
            raise
        raise error from caught
    finally:
        trace.discard()
        stop.restore_handlers()
    metrics.close()
    run.accelerator.end_training()


def _record_failure(run: OpenRun, error: BaseException) -> None:
    """Reports an exception to the other ranks, which may be gone, to the user and in
    status.json."""
    run.watchdog.failed(error)  # ends this process if another rank is at fault
    if run.log.is_main:
        run.log.write_failure(run.step, f"{type(error).__name__}: {error}")


def finish(training: Training, outcome: Outcome, reason: str = "") -> None:
    """Writes a trace that is not yet complete, waits for the last save, and records how training
    ended. Collective."""
    run = training.run
    training.trace.write(training.throughput)
    training.wait_for_save()
    run.watchdog.heartbeat("ending", timeout=FIRST_TIMEOUT)  # a tracker may still send much data
    reason = training.stop.reason if outcome == "stopped" else reason or run.early_end
    run.record_end(outcome, reason)
    text = f"{run.config.run_name} {outcome} at step {run.step}"
    if reason:
        text += f" ({reason})"
    if outcome == "stopped":
        text += "; the same command resumes it"
    training.metrics.print(text)
    if best := run.best_checkpoint:
        lowest = run.progress.best.val_loss
        training.metrics.print(f"lowest val_loss: {lowest:.4f}, in {best}")


def describe_start(trainer: Trainer) -> str:
    """What is about to be trained, and on what, for people."""
    run = trainer.run
    task = run.task
    device = run.accelerator.device
    parts, rows = task.feed.micro_batches
    begins = f"resumes from step {run.step}" if run.step else "starts"
    kind = f"{device.type}, fsdp" if run.config.parallel == "fsdp" else device.type
    devices = f"{run.accelerator.num_processes} x {kind}"
    precision = describe_precision(run.accelerator.mixed_precision, device)
    parameters = sum(map(Tensor.numel, trainer.parameters))
    units = f"{parts} x {rows * task.units_per_item:,} {task.unit}"
    what = f"{parameters:,} parameters, {devices}, precision {precision}"
    return f"{run.config.run_name} {begins}: {what}; a step is {units} per process"


def describe_precision(precision: str, device: torch.device) -> str:
    """The precision of a training as text, with a hint on GPUs that are faster in bf16."""
    if precision == "no" and pick_precision("fast", device) == "bf16":
        return "no, here slower than bf16; set --train.mixed_precision bf16"
    return precision
