"""A training run in three phases, each a value that is made whole: opened (`training.opening`), built (`Trainer`),
started (`Training`).

What changes from step to step is in the parts of a run: progress, feed, guard, optimizer, log and task.
"""

import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Checkpoint, Snapshot, optimizer_state
from gpt2_ddp.checkpoint.store import SLOW_DISK
from gpt2_ddp.config.cli import dump
from gpt2_ddp.distributed.environment import spare_core
from gpt2_ddp.distributed.launch import pick_precision
from gpt2_ddp.distributed.ranks import from_main, on_every_rank
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.errors import user_error_of
from gpt2_ddp.model.compiled import compiled, resolve_compile
from gpt2_ddp.project import git_commit
from gpt2_ddp.records.metrics import Metrics, Sample
from gpt2_ddp.records.rows import Outcome
from gpt2_ddp.state import LogEnd, OptimizerState, Scores, Setup, State
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.opening import Opened
from gpt2_ddp.training.optimizer import GuardedOptimizer, named_losses, set_values
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.task import Poll, check_numbers
from gpt2_ddp.training.throughput import Throughput, describe_hardware, device_name, has_same_devices, versions


@dataclass(frozen=True)
class Trainer(Opened):
    """A run with its data, model and optimizer.

    Attributes:
        model: prepared by Accelerate. `task.model` is the plain model.
        setup: devices, software and size of the data. config_yaml: the resolved configuration, for checkpoints.
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
        strategy, model = self.strategy, self.task.model
        weights, moments = model.state_dict(), optimizer_state(model, self.optimizer.plain)
        held = strategy.held(weights), strategy.held(moments)
        return Snapshot(self.state(), self.config_yaml, *held, self.task.files, strategy.part)

    def load(self, start: Checkpoint) -> None:
        """Loads a checkpoint on all ranks, in place. Collective."""
        from gpt2_ddp.checkpoint.loading import load_model_state, load_optimizer_state

        model, state = self.task.model, start.state
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
        """Compares weights and optimizer state of all ranks. Collective. Raises: ReplicaMismatch, on every rank."""
        strategy = self.strategy
        if self.accelerator.num_processes > strategy.part.count:
            from gpt2_ddp.training.replica_check import check_replicas

            tensors = self.task.model, self.optimizer.plain
            check_replicas(self.accelerator, *tensors, self.step, strategy.local, strategy.replicas)

    def evaluate(self, poll: Poll) -> Scores:
        """The task's scores of the current weights. Collective. Raises: Interrupted, as `poll` does."""
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
            return reduce(add, named_losses(task.loss(self.model, task.feed.first_micro_batch())).values())

        self.strategy.warm_up(self.model, self.optimizer.plain, loss)


def build(run: Opened, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Trainer:
    """Loads the data, builds model and optimizer, loads the checkpoint on all ranks, and records the start. `wrap`
    changes the plain model before Accelerate prepares it. Collective."""
    task = run.task
    task.load(run.watchdog)
    run.watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
    steps = task.total_steps(len(task.feed.order))
    how = _resolve_compile(run)
    model, prepared = run.strategy.prepare(compiled(wrap(task.model), how), task)
    optimizer = GuardedOptimizer(prepared, run.strategy)
    on_every_rank(lambda: set_values(optimizer.plain.param_groups, task.schedule(run.step + 1)))  # checks their names
    device, threads = run.accelerator.device, torch.get_num_threads()
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
    """`train.compile` with `auto` resolved: the checkpoint's value, if number and kind of devices are the same."""
    accelerator, how, before = run.accelerator, run.config.train.compile, run.checkpoint and run.checkpoint.state.setup
    if how == "auto":
        known = before.compile if before and has_same_devices(before, accelerator) else None
        how, missing = resolve_compile(known, run.task.model, accelerator)
        if missing:
            accelerator.print(f"note: torch.compile is off: it needs {missing} (train.compile)")
    if how == "model" and run.config.get("launch.parallel") == "fsdp":
        how = "blocks"
    if how != "off":
        run.watchdog.first_limit = FIRST_TIMEOUT
    return how


def _record_start(run: Trainer) -> None:
    config, progress = run.config, run.progress
    run.store.prune(run.guard.last_good)  # keep_last may have been lowered since, for a full disk
    feed, task = run.task.feed.state, run.task.state_dict()
    listing = run.store.listing()
    begins = State.of(config.kind, progress=progress, feed=feed, setup=run.setup, task=task)
    start = {"event": "start", **begins.identity, "steps": run.steps}
    start |= {"config": config.model_dump(mode="json"), "command": shlex.join(sys.argv)}
    start |= {"commit": git_commit(), "hardware": describe_hardware(), **listing}
    run.log.resume(run.checkpoint.state.log if run.checkpoint else LogEnd(), progress, start)
    run.log.write_config(config)
    if progress.branched_from and not listing["checkpoint"]:
        run.log.append({"event": "branch", **progress.branched_from.model_dump(), **feed.model_dump()})
        run.accelerator.print(f"note: branches off {progress.branched_from.parent}")


@dataclass(frozen=True)
class Training(Trainer):
    """A run that trains, with requests to stop, rows and speed."""

    stop: StopRequest
    metrics: Metrics
    throughput: Throughput

    def save(self) -> None:
        """Saves a checkpoint of the current step, after the replica check. Collective. A background save is on disk
        once `wait_for_save` returns, any other once this returns."""
        self.wait_for_save()
        self.check_replicas()
        snapshot, is_complete = self.snapshot(), self.is_complete
        self.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK)
        # the last step gets no verdict
        good = self.step if is_complete and not self.guard.is_suspicious else self.guard.last_good
        self.store.save(snapshot, good, is_complete or self.stop.is_agreed, self.has_core)

    def wait_for_save(self) -> None:
        """Waits for the background save. Collective. Raises: UserError if writing failed, or the run folder is gone."""
        self.watchdog.heartbeat("save", timeout=self.store.background.timeout)
        self.store.wait()

    def sample(self) -> list[Sample] | None:
        """Samples of the main process; others may get None, as may all after a failure. Collective. Raises:
        Interrupted."""
        self.watchdog.heartbeat("sample")
        sample = partial(self.task.sample, self.stop.poll)
        return self.strategy.sample(self.task.model, self.stop, self.metrics, sample)


@contextmanager
def start(trainer: Trainer, on_row: Callable[[dict[str, Any]], object] | None = None) -> Iterator[Training]:
    """Installs the signal handlers, starts the trackers, and records that the run is running; an exception inside is
    recorded as its failure. The main process passes each row to `on_row`. Collective."""
    config, accelerator, log = trainer.config, trainer.accelerator, trainer.log
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
    """Reports an exception to the other ranks, which may be gone, to the user and in status.json."""
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
    accelerator, task, (parts, rows) = run.accelerator, run.task, run.task.feed.micro_batches
    begins = f"resumes from step {run.step}" if run.step else "starts"
    count, kind = accelerator.num_processes, accelerator.device.type
    precision = describe_precision(accelerator.mixed_precision, accelerator.device)
    kind += ", fsdp" * (run.config.get("launch.parallel") == "fsdp") + f", precision {precision}"
    what = f"{sum(map(Tensor.numel, run.parameters)):,} parameters, {count} x {kind}"
    what += f"; a step is {parts} x {rows * task.units_per_item:,} {task.unit} per process"
    return f"{run.config.run_name} {begins}: {what}"


def describe_precision(precision: str, device: torch.device) -> str:
    """The precision of a training as text, with a hint on GPUs that are faster in bf16."""
    if precision == "no" and pick_precision("fast", device) == "bf16":
        return "no, here slower than bf16; set --train.mixed_precision bf16"
    return precision
