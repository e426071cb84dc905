"""A training run: its lifecycle (open, build, start, finish, close), its state, its saves and its evaluations."""

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from gpt2_ddp.checkpoint import checkpoint
from gpt2_ddp.checkpoint.checkpoint import Checkpoint, Snapshot
from gpt2_ddp.checkpoint.metrics import LongStage, Metrics, Sample
from gpt2_ddp.checkpoint.run_files import Outcome
from gpt2_ddp.checkpoint.run_folder import RunFolder, RunLog
from gpt2_ddp.checkpoint.store import SLOW_DISK, CheckpointStore
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import elastic_nodes, machines, spare_core, torchrun_option
from gpt2_ddp.distributed.launch import make_accelerator, start_run
from gpt2_ddp.distributed.ranks import check_ranks_agree, from_main, on_every_rank
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, TIMEOUT, Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.compiled import check_compiler, compiled, resolve_compile
from gpt2_ddp.project import git_commit
from gpt2_ddp.state import LogEnd, Losses, Progress, Scores, Setup, State
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.meters import LossSum, Throughput, describe_hardware, device_name, versions
from gpt2_ddp.training.optimizer import GuardedOptimizer
from gpt2_ddp.training.own_numbers import check_scores
from gpt2_ddp.training.precision import describe_precision, settle_precision
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.strategy import Replicated
from gpt2_ddp.training.task import MakeTask, Poll, Task


class Run:
    """A training of one task, which resumes from the newest checkpoint in its folder. It is the same on every rank: its
    parts are there on all, and only the main process's touch the disk.

    Opening a run connects the processes, locks the folder (False: only checks it), finds the checkpoint to start from
    and performs only cheap checks. It leaves no new folder behind on failure. Then `build` does the long work, `start`
    begins training and `finish` ends it. An exception inside `with` is recorded as a failure. Raises: UserError, on
    every rank.

    Attributes:
        progress: steps taken, scores, pending work. steps: of the whole run; None until known.
        model: prepared by Accelerate. `task.model` is the plain model.
        skipped: number of steps that changed nothing, fp32 scalar on the device.
        epoch: losses since the last epoch ended, without skipped steps. since_row: losses since the last row.
    """

    model: nn.Module
    optimizer: GuardedOptimizer
    stop: StopRequest
    metrics: Metrics
    throughput: Throughput

    def __init__(self, config: RunConfig, make_task: MakeTask, lock: bool = True):
        self.begun, self._is_started, self._closing = time.monotonic(), False, ExitStack()
        self.progress = Progress()  # until the start is found
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            from gpt2_ddp.training.sharded import follow_accelerate

            config = follow_accelerate(config)
        processes = start_run(config)
        self.watchdog = Watchdog(processes.process_index, processes.num_processes, config.train.patience_seconds)
        self._closing.callback(self.watchdog.close)  # may wait for the other ranks
        try:
            self._open(config, make_task, processes, lock)
        except BaseException as error:
            self.__exit__(None, error)
            raise

    def _open(self, config: RunConfig, make_task: MakeTask, processes: PartialState, lock: bool) -> None:
        check_ranks_agree(config.shared)
        device: Any = processes.device
        on_every_rank(partial(check_compiler, config.train.compile, device))
        self.folder = RunFolder(config, lock)
        self._closing.callback(self.folder.release)
        if lock and elastic_nodes():
            self.folder.check_is_shared()
        keep, patience = config.checkpoint, config.train.patience_seconds or TIMEOUT
        self.log = RunLog(self.folder)
        self.store = CheckpointStore(self.folder, self.log, keep.keep_last, keep.background, patience)
        self._closing.callback(self.store.close)
        if lock:
            self.watchdog.report_to(self._report(), lambda reason: self.log.write_failure(self.step, reason))
        self.watchdog.heartbeat("hashing", timeout=FIRST_TIMEOUT)
        self._start, self._parent = find_start(config, self.store, processes.print)
        before = self._start.config["train"].get("mixed_precision", "") if self._start else ""
        config, precision, self.speeds = settle_precision(config, device, before)
        self.accelerator: Accelerator = make_accelerator(precision)
        self.strategy = Replicated(self.accelerator)
        if config.parallel == "fsdp":
            from gpt2_ddp.training.sharded import Sharded

            self.strategy = on_every_rank(partial(Sharded, self.accelerator, config))
        self.task: Task = make_task(config, self.accelerator, self._start)
        if self._start:  # for a run that is complete: `load` does it for all others
            self.progress = self._start.state.progress.model_copy(deep=True)
        self.steps = self.task.total_steps(self._start.state.setup.epoch_size if self._start else None)

    def _report(self) -> Callable[[dict[str, Any]], None]:
        long_stage = LongStage()

        def report(status: dict[str, Any]) -> None:
            if not self.log.write_heartbeat(status) and self._is_started:
                self.stop.request("the run folder or its rows are gone")  # the next save or end raises it
            long_stage.report(status)

        return report

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            if error:
                self._record_failure(error)
            if self._is_started:
                self.stop.restore_handlers()
                self.metrics.close(failed=error is not None)
                if not error:
                    self.accelerator.end_training()
        finally:  # a signal may come
            self.close()

    def close(self) -> None:
        """Waits for a background save, unlocks the folder and ends the watchdog."""
        self._closing.close()

    def _record_failure(self, error: BaseException) -> None:
        """Reports an exception to the other ranks, which may be gone, to the user and in status.json."""
        self.watchdog.failed(error)  # ends this process if another rank is at fault
        if self._is_started and self.log.is_main:
            with suppress(UserError):  # of a full disk: the first error matters
                self.log.write_status("failed", self.step, f"{type(error).__name__}: {error}")
        elif self._is_started and isinstance(error, UserError) and not error.on_every_rank:  # only this rank has it
            print(f"error: rank {self.accelerator.process_index}: {error}", file=sys.stderr)

    @property
    def config(self) -> Any:
        """The resolved configuration."""
        return self.task.config

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.progress.step

    @property
    def early_end(self) -> str:
        """Reason to end the run before its last step; empty without one."""
        return self.progress.early_end(self.config.eval_patience)

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

    def build(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """Loads the data, builds model and optimizer, and loads the checkpoint on all ranks. Collective. If the run is
        complete, only compares its data. `wrap` changes the plain model before Accelerate prepares it."""
        accelerator, task = self.accelerator, self.task
        task.load(self.watchdog, self.is_complete)
        if self.is_complete:
            return
        config = self.config  # resolved
        self.watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
        self.steps = task.total_steps(len(task.feed.order))
        self.compile = self._resolve_compile()
        model = compiled(wrap(task.model), self.compile)
        self.model, prepared = self.strategy.prepare(model, task.build_optimizer)
        self.optimizer = GuardedOptimizer(prepared, self.strategy, config.guard.norm_sigmas)
        self.guard = Guard(config.guard, accelerator, self.progress.first_step)
        self.parameters = list(self.model.parameters())
        self.skipped = torch.zeros((), device=accelerator.device)
        self.epoch, self.since_row = LossSum(accelerator), LossSum(accelerator)
        if self._start:
            self.load(self._start)
        self.progress.run_id = self.progress.run_id or from_main(uuid.uuid4().hex[:8])
        self._record_start()

    def _resolve_compile(self) -> str:
        """`train.compile` with `auto` resolved: the checkpoint's value, if number and kind of devices are the same."""
        accelerator, task, before = self.accelerator, self.task, self._start.state.setup if self._start else None
        here = (accelerator.num_processes, device_name(accelerator.device))
        known = before.compile if before and (before.processes, before.device) == here else None
        left = (self.steps or 0) - self.step
        flops = task.flops_per_unit * task.units_per_item * task.feed.step_size * left / accelerator.num_processes
        how, missing = resolve_compile(self.config.train.compile, known, task.model, accelerator, flops)
        if how == "model" and self.config.parallel == "fsdp":
            how = "blocks"
        if missing:
            accelerator.print(f"note: torch.compile is off: it needs {missing} (train.compile)")
        self.watchdog.expect_compilation(how != "off")
        return how

    @property
    def setup(self) -> Setup:
        """Devices, software and size of the data."""
        return Setup(
            epoch_size=len(self.task.feed.order),
            processes=self.accelerator.num_processes,
            device=device_name(self.accelerator.device),
            threads=torch.get_num_threads(),
            compile=self.compile,
            versions=versions(),
        )

    def _record_start(self) -> None:
        config, parent, progress = self.config, self._parent, self.progress
        self.store.prune(self.guard.last_good)  # keep_last may have been lowered since, for a full disk
        feed, task = self.task.feed.state_dict(), self.task.state_dict()
        begins = State.of(config.kind, progress=progress, feed=feed, setup=self.setup, task=task)
        start = {"event": "start", **begins.identity, "steps": self.steps}
        start |= {"config": config.model_dump(mode="json"), "command": shlex.join(sys.argv)}
        start |= {"commit": git_commit(), "hardware": describe_hardware(), **self.store.listing()}
        if self.speeds:
            start["gflops"] = self.speeds
        self.log.resume(self._start.state.log if self._start else LogEnd(), progress, start)
        self.log.write_config(config)
        if parent and progress.branched_from:
            from gpt2_ddp.training.branch import describe_overrides, register_branch

            state = self.task.feed.state_dict().model_dump()
            self.log.append({"event": "branch", **progress.branched_from.model_dump(), **state})
            if self.log.is_main:
                register_branch(parent, self.folder.path, progress.run_id)
            self.accelerator.print(f"note: branches off {parent.path}: {describe_overrides(config, parent)}")

    def start(self) -> None:
        """Installs the signal handlers, starts the trackers and records that the run is running. Collective."""
        config = self.config
        self.throughput = Throughput(self.task, self.accelerator.device, config.tracking.peak_flops)
        self.metrics = Metrics(self.log, self.step, self.steps or 0)
        by_machine = bool(elastic_nodes()) and machines() > 1
        self.stop = StopRequest(
            self.accelerator, self.begun, config.train.max_minutes, self.watchdog.progress, by_machine
        )
        self._is_started = True
        self.metrics.start_trackers(config, self.progress.run_id)
        self.log.write_status("running", self.step)
        for line in describe_start(self):
            self.metrics.print(line)

    def finish(self, outcome: Outcome, reason: str = "") -> None:
        """Waits for the last save and records how training ended. Collective."""
        self.wait_for_save()
        self.watchdog.heartbeat("ending", timeout=FIRST_TIMEOUT)  # a tracker may still send much data
        reason = self.stop.reason if outcome == "stopped" else reason or self.early_end
        self._record_end(outcome, reason)
        end = f"{self.config.run_name} {outcome} at step {self.step}" + f" ({reason})" * bool(reason)
        self.metrics.print(end + "; the same command resumes it" * (outcome == "stopped"))
        if best := self.best_checkpoint:
            self.metrics.print(f"lowest val_loss: {self.progress.best.val_loss:.4f}, in {best}")

    def _record_end(self, outcome: Outcome, reason: str) -> None:
        kept = self.store.listing()["kept"]
        self.log.append({"event": "end", "step": self.step, "outcome": outcome, "kept": kept})
        self.log.write_status(outcome, self.step, reason)

    def record_completed(self) -> None:
        """Prints a note for a run that is already complete. Records the end if the last process did not."""
        more = f"{self.early_end}; raise it" if self.early_end else "raise its steps or epochs"
        self.accelerator.print(f"{self.config.run_name} is complete at step {self.step}; {more} to train further")
        assert self._start, "a complete run has a checkpoint"
        if from_main(self.log.last_row().get("outcome")) != "completed":
            self.log.resume(self._start.state.log, self.progress)
            self.store.prune(self.step)
            listing = self.store.listing()
            self.log.append({"event": "checkpoint", **(listing["checkpoint"] or {}), "kept": listing["kept"]})
            self._record_end("completed", self.early_end)
        self.log.write_status("completed", self.step, self.early_end)
        self.accelerator.end_training()

    def state(self) -> State:
        """The state after the current step. Collective; waits for the device."""
        skipped = round(self.skipped.item())
        return State.of(
            self.config.kind,
            progress=self.progress.model_copy(deep=True),
            feed=self.task.feed.state_dict(),
            guard=self.guard.state_dict(),
            optimizer=self.optimizer.state_dict(),
            losses=Losses(epoch=self.epoch.state_dict(), since_row=self.since_row.state_dict(), skipped=skipped),
            log=self.log.end(),
            setup=self.setup,
            task=self.task.state_dict(),
        )

    def snapshot(self) -> Snapshot:
        """Content of a checkpoint, of the run's own tensors. Collective."""
        model = self.task.model
        optimizer_state = checkpoint.optimizer_state(model, self.optimizer.plain)
        return Snapshot(self.state(), dump(self.config), model.state_dict(), optimizer_state, self.task.files)

    def load(self, start: Checkpoint) -> None:
        """Loads a checkpoint on all ranks, in place. Collective."""
        model, content = self.task.model, self.store.read(start)
        state = start.state
        checkpoint.load_model_state(content.model, model, self.strategy.fill)
        checkpoint.load_optimizer_state(content.optimizer, model, self.optimizer.plain, self.strategy.fill)
        self.progress = state.progress.model_copy(deep=True)
        self.task.feed.load_state_dict(state.feed)
        self.guard.load_state_dict(state.guard)
        self.optimizer.load_state_dict(state.optimizer)
        self.epoch.load_state_dict(state.losses.epoch)
        self.since_row.load_state_dict(state.losses.since_row)
        self.skipped.fill_(state.losses.skipped)
        self.task.load_state_dict(state.task)

    def save(self) -> None:
        """Saves a checkpoint of the current step, after the replica check. Collective; ranks agree on stop requests
        afterwards. A background save is on disk once `wait_for_save` returns, any other once this returns."""
        with self.stop.timed("save"):
            self.wait_for_save()
            self.check_replicas()
            snapshot = self.snapshot()
            self.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK)
            # the last step gets no verdict
            good = self.step if self.is_complete and not self.guard.first_bad else self.guard.last_good
            wait = self.is_complete or self.stop.is_agreed
            has_core = spare_core(self.accelerator.device.type, torch.get_num_threads(), self.task.feed.workers)
            self.store.save(self.strategy.whole(snapshot), good, wait, has_core)
        self.stop.sync()

    def wait_for_save(self) -> None:
        """Waits for the background save. Collective. Raises: UserError if writing failed, or the run folder is gone."""
        self.watchdog.heartbeat("save", timeout=self.store.background.timeout)
        self.store.wait()

    def poll_save(self) -> None:
        """Checks the background save after a step: if it failed, asks all ranks to stop; if it is overdue, waits."""
        background = self.store.background
        if background.is_overdue:
            self.watchdog.heartbeat("save")
            background.join()
        if background.error:
            self.stop.request("a checkpoint could not be written")
        self.stop.record_duration("write", background.seconds)

    def check_replicas(self) -> None:
        """Compares weights and optimizer state of all ranks. Collective. Raises: ReplicaMismatch, on every rank."""
        self.strategy.check_replicas(self.task.model, self.optimizer.plain, self.step)

    def record_step(self, loss_sum: Tensor, n_valid: int, skipped: Tensor) -> None:
        """Records the next step. `loss_sum`: over this rank's `n_valid` units; `skipped`: 1 if it changed nothing."""
        self.progress.step += 1
        self.skipped += skipped
        if self.task.feed.skipped_end:  # no step ended that epoch
            self.epoch.load_state_dict((0, 0, 0))
        self.epoch.add(loss_sum, n_valid, skipped)
        self.since_row.add(loss_sum, n_valid)

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
        scores = check_scores(scores, self.progress.pending.row)
        self.progress.add_scores(scores)
        return scores

    def sample(self) -> list[Sample] | None:
        """Samples of the main process; others may get None, as may all after a failure. Collective. Raises:
        Interrupted."""
        self.watchdog.heartbeat("sample")
        sample = partial(self.task.sample, self.stop.poll)
        return self.strategy.sample(self.task.model, self.stop, self.metrics, sample)

    def warm_up(self) -> None:
        """Lets the strategy prepare for the first step."""
        self.watchdog.heartbeat("settle")
        loss = lambda: self.task.loss(self.model, self.task.feed.first_micro_batch())  # noqa: E731
        self.strategy.warm_up(self.model, self.optimizer.plain, loss)


def find_start(
    config: RunConfig, store: CheckpointStore, note: Callable[[str], None]
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The checkpoint to start from, hashed: the run's newest, or the first one of a branch; None for a new run. And a
    new branch's parent. Compares configurations before it hashes. Collective. Raises: UserError."""
    if newest := store.peek():
        for field in config.check_resumable(newest.kind, newest.config, newest.step):
            note(f"note: {field} in the run's configuration is unknown now, and ignored")
        if config.branch_from and config.branch_from != newest.config["train"].get("branch_from"):
            note("note: train.branch_from is ignored: this run has checkpoints already")
    if (newest := store.newest()) or not config.branch_from:
        return newest, None
    from gpt2_ddp.training.branch import branch_off, find_parent

    parent = find_parent(config)
    return branch_off(parent, config), parent


def describe_start(run: Run) -> list[str]:
    """What is about to be trained, and on what, as lines for people."""
    accelerator, task, shares = run.accelerator, run.task, run.task.feed.share(run.task.feed.step_size)
    rows = [max(len(part), task.feed.rows) for ranks in shares for part in ranks]
    padding = sum(rows) / task.feed.step_size - 1
    begins = f"resumes from step {run.step}" if run.step else "starts"
    count, kind = accelerator.num_processes, accelerator.device.type
    precision = describe_precision(accelerator.mixed_precision, accelerator.device, run.speeds)
    kind += ", fsdp" * (run.config.parallel == "fsdp")
    what = f"{sum(map(Tensor.numel, run.parameters)):,} parameters, {count} x {kind}, precision {precision}"
    what += f"; a step is {len(shares)} x {max(rows) * task.units_per_item:,} {task.unit} per process"
    lines = [f"{run.config.run_name} {begins}: {what}" + f", {padding:.1%} of them padding" * (padding > 0)]
    if nodes := elastic_nodes():
        resumes = f"the run resumes on any {nodes} machines, from the newest checkpoint"
        store = torchrun_option("rdzv_endpoint")
        lines.append(f"note: elastic: {resumes}; only the rendezvous machine, {store}, must stay up")
    return [*lines, *filter(None, [run.throughput.why_no_mfu()])]
