"""A training run: its lifecycle (open, build, start, finish, close), its state, its saves and its evaluations."""

import shlex
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpt2_ddp.checkpoint import checkpoint
from gpt2_ddp.checkpoint.checkpoint import Checkpoint, Snapshot, find_checkpoint
from gpt2_ddp.checkpoint.checkpointer import SLOW_DISK, Checkpointer
from gpt2_ddp.checkpoint.metrics import LongStage, Metrics, Sample
from gpt2_ddp.checkpoint.run_files import METRICS, finite
from gpt2_ddp.checkpoint.run_folder import RunFolder
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import elastic_nodes, machines, spare_core, torchrun_option
from gpt2_ddp.distributed.launch import describe_precision, start_run
from gpt2_ddp.distributed.ranks import check_ranks_agree, on_every_rank, on_main, warm_up_ddp
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, TIMEOUT, Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.compiled import check_compiler, compiled, resolve_compile
from gpt2_ddp.project import git_commit
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.meters import LossSum, Throughput, describe_hardware, device_name, versions
from gpt2_ddp.training.optimizer import GuardedOptimizer
from gpt2_ddp.training.progress import Outcome, Progress, Scores
from gpt2_ddp.training.stop import Interrupted, StopRequest
from gpt2_ddp.training.task import MakeTask, Poll, Task


class Run(Progress):
    """A training of one task. It resumes from the newest checkpoint in its folder.

    Opening a run connects the processes, locks the folder (False: only checks it) and performs only cheap checks. It
    leaves no new folder behind on failure. Then `build` does the long work, `start` begins training and `finish` ends
    it. An exception inside `with` is recorded as a failure. Raises: UserError, on every rank.

    Attributes:
        folder, checkpoints: on the main process; None on the others.
        model, optimizer: prepared by Accelerate. `task.model` is the plain model.
        skipped: number of steps that changed nothing, fp32 scalar on the device.
        epoch: losses since the last epoch ended, without skipped steps. since_row: losses since the last row.
    """

    model: nn.Module
    optimizer: GuardedOptimizer
    folder: RunFolder | None = None
    stop: StopRequest
    metrics: Metrics
    throughput: Throughput

    def __init__(self, config: RunConfig, make_task: MakeTask, lock: bool = True):
        super().__init__(config.eval_patience)
        self.begun, self.reason, self._is_started = time.monotonic(), "", False
        self.is_elastic = bool(elastic_nodes())
        self.accelerator: Accelerator = start_run(config)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.watchdog = Watchdog(rank, world, config.train.patience_seconds)
        try:
            self._open(config, make_task, lock)
        except BaseException as error:
            self.__exit__(None, error)
            raise

    def _open(self, config: RunConfig, make_task: MakeTask, lock: bool) -> None:
        check_ranks_agree(config.shared)
        on_every_rank(self.accelerator, lambda: check_compiler(config.train.compile, self.accelerator.device))
        opened: list[RunFolder] = []  # a lock cannot be broadcast
        on_main(self.accelerator, lambda: opened.append(RunFolder(config, lock)))
        self.folder = folder = opened[0] if opened else None
        if lock and self.is_elastic:
            self._check_shared_folder(config)
        if folder and lock:
            long_stage = LongStage()

            def report(status: dict[str, Any]) -> None:
                if not folder.write_heartbeat(status) and self._is_started:
                    self.stop.request("the run folder is gone")  # `check_folder` raises it then
                long_stage.report(status)

            self.watchdog.report_to(report, lambda reason: folder.write_failure(self.step, reason))
        own = on_main(self.accelerator, lambda: folder.checkpoints.latest_metadata() if folder else None)
        self._parent, self._branch = self._resolve_start(config, own)
        saved = own or self._branch
        self._resumes = saved is not None
        self.task: Task = make_task(config, self.accelerator, saved)
        self.steps = self.task.total_steps(saved.state.get("epoch_size") if saved else None)
        super().load_state_dict(saved.state if saved else {})
        if self.is_complete:  # only an intact checkpoint counts
            newest = self.newest()
            super().load_state_dict(newest.state if newest else {})

    def _resolve_start(self, config: RunConfig, own: Checkpoint | None) -> tuple[Checkpoint | None, Checkpoint | None]:
        """Checks that the run may resume from `own`. For a new branch, the parent's checkpoint, and its first one."""
        if own:
            for field in config.check_resumable(own.kind, own.config, own.state["step"]):
                self.accelerator.print(f"note: {field} in the run's configuration is unknown now, and ignored")
            if config.branch_from and config.branch_from != own.config["train"].get("branch_from"):
                self.accelerator.print("note: train.branch_from is ignored: this run has checkpoints already")
        if not config.branch_from or own:
            return None, None
        from gpt2_ddp.training.branch import find_parent

        return on_main(self.accelerator, lambda: find_parent(config))

    def _check_shared_folder(self, config: RunConfig) -> None:
        """Raises UserError if an elastic launcher may move rank 0 to a machine without the run folder."""
        lock = Path(config.output_dir, config.run_name, ".lock")
        there = on_main(self.accelerator, lambda: lock.stat().st_ino)

        def compare() -> None:
            if not lock.exists() or lock.stat().st_ino != there:
                hint = f"is another folder on {socket.gethostname()} than on rank 0's machine; use a shared disk"
                raise UserError("output_dir", config.output_dir, hint)

        on_every_rank(self.accelerator, compare)

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
        if self.checkpoints:
            self.checkpoints.background.join()
        if self.folder:
            self.folder.release()
        self.watchdog.close()  # may wait for the other ranks

    def _record_failure(self, error: BaseException) -> None:
        """Reports an exception to the other ranks, which may be gone, to the user and in status.json."""
        self.watchdog.failed(error)  # ends this process if another rank is at fault
        if self._is_started and self.folder:
            with suppress(UserError):  # of a full disk: the first error matters
                self.folder.write_status("failed", self.step, f"{type(error).__name__}: {error}")
        elif self._is_started and isinstance(error, UserError) and not error.on_every_rank:  # only this rank has it
            print(f"error: rank {self.accelerator.process_index}: {error}", file=sys.stderr)

    @property
    def config(self) -> Any:
        """The resolved configuration."""
        return self.task.config

    @property
    def checkpoints(self) -> Checkpointer | None:
        """The run's checkpoints, on the main process."""
        return self.folder.checkpoints if self.folder else None

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, if the newest is another; on the main process."""
        place = self.checkpoints.place(self.best.step) if self.checkpoints else None
        return place if place and self.best.step < self.step and place.is_dir() else None

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint, hashed; None for a new run. Collective. Raises: UserError if none is intact."""
        return on_main(self.accelerator, lambda: self.checkpoints.newest() if self.checkpoints else None)

    def build(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """Loads the data, builds model and optimizer, and loads the newest checkpoint on all ranks. Collective. If the
        run is complete, only compares its data. `wrap` changes the plain model before Accelerate prepares it."""
        accelerator, task = self.accelerator, self.task
        task.load(self.watchdog, self.is_complete)
        if self.is_complete:
            return
        config = self.config  # resolved
        self.watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
        self.steps = task.total_steps(len(task.feed.order))
        if parent := self._parent:  # the parent run may have deleted it meanwhile
            on_main(accelerator, lambda: find_checkpoint(parent.path, "train.branch_from"))
        newest = self.newest() or self._branch
        assert newest or not self._resumes, "the checkpoints were removed while the run was opened"
        super().load_state_dict(newest.state if newest else {})
        if self.is_complete:
            return
        plain = wrap(task.model.to(accelerator.device))
        self.compile = self._resolve_compile(newest)
        # both are on their device already; placing them would import torch.distributed.tensor and sympy, 0.5 s
        self.model, prepared = accelerator.prepare(
            compiled(plain, self.compile), task.build_optimizer(), device_placement=[False, False]
        )
        self.optimizer = GuardedOptimizer(prepared, accelerator, config.guard.skip, config.guard.norm_sigmas)
        self.guard = Guard(config.guard, accelerator)
        self.parameters = list(self.model.parameters())
        self.skipped = torch.zeros((), device=accelerator.device)
        self.epoch, self.since_row = LossSum(accelerator), LossSum(accelerator)
        if newest:
            self.load(newest.read() if self.folder else None)
        if checkpoints := self.checkpoints:
            checkpoints.first_step, checkpoints.wish = self.first_step, config.checkpoint.background
            checkpoints.spare_core = spare_core(accelerator.device.type, torch.get_num_threads(), task.feed.workers)
            checkpoints.patience = config.train.patience_seconds or TIMEOUT
        self.run_id = self.run_id or on_main(accelerator, lambda: uuid.uuid4().hex[:8])
        on_main(accelerator, self._record_start)
        if parent:
            from gpt2_ddp.training.branch import describe_overrides

            accelerator.print(f"note: branches off {parent.path}: {describe_overrides(config, parent)}")

    def _resolve_compile(self, newest: Checkpoint | None) -> str:
        """`train.compile` with `auto` resolved: the checkpoint's value, if number and kind of devices are the same."""
        accelerator, task, state = self.accelerator, self.task, newest.state if newest else {}
        same = all(state.get(name) == value for name, value in self._devices.items())
        before, left = state.get("compile") if same else None, (self.steps or 0) - self.step
        flops = task.flops_per_unit * task.units_per_item * task.feed.step_size * left / accelerator.num_processes
        how, missing = resolve_compile(self.config.train.compile, before, task.model, accelerator, flops)
        if missing:
            accelerator.print(f"note: torch.compile is off: it needs {missing} (train.compile)")
        self.watchdog.expect_compilation(how != "off")
        return how

    @property
    def _devices(self) -> dict[str, Any]:
        return {"processes": self.accelerator.num_processes, "device": device_name(self.accelerator.device)}

    def _facts(self) -> dict[str, Any]:
        """Identity of run, task, devices and software: fields of checkpoints and of start rows."""
        return {
            "kind": self.config.kind,
            "run_id": self.run_id,
            "epoch_size": len(self.task.feed.order),
            **self.task.state_dict(),
            **self._devices,
            "threads": torch.get_num_threads(),
            "compile": self.compile,
            "versions": versions(),
        }

    def _record_start(self) -> None:
        if not self.folder:
            return
        self.folder.check_lock()
        # keep_last may have been lowered since, for a full disk
        self.folder.checkpoints.prune(self.guard.last_good)
        facts = {**self._facts(), "steps": self.steps, "config": self.config.model_dump(mode="json")}
        facts |= {"command": shlex.join(sys.argv), "commit": git_commit(), "hardware": describe_hardware()}
        facts |= {"step": self.step}
        self.folder.record_start(facts, self.rollbacks, self.metrics_chain, bool(self.pending.row))
        self.folder.write_config(self.config)
        if self._parent and self.branched_from:
            from gpt2_ddp.training.branch import register_branch

            self.folder.append(METRICS, {"event": "branch", **self.branched_from, **self.task.feed.state_dict()})
            register_branch(self._parent, self.folder.path, self.run_id)

    def start(self) -> None:
        """Installs the signal handlers, starts the trackers and records that the run is running. Collective."""
        config, folder = self.config, self.folder
        self.metrics = Metrics(folder, self.step, self.steps or 0)
        self.stop = StopRequest(self.accelerator, self.begun, config.train.max_minutes, self.watchdog.progress)
        self.stop.is_elastic = self.is_elastic and machines() > 1
        self.throughput = Throughput(self.task, self.accelerator.device, config.tracking.peak_flops)
        self._is_started = True
        if folder:
            self.metrics.start_trackers(config, self.run_id)
            folder.write_status("running", self.step)
        self.metrics.print(self._describe_start())
        if self.is_elastic:
            store = torchrun_option("rdzv_endpoint")
            what = f"the run resumes on any {elastic_nodes()} machines, from the newest checkpoint"
            self.metrics.print(f"note: elastic: {what}; only the rendezvous machine, {store}, must stay up")
        if note := self.throughput.why_no_mfu():
            self.metrics.print(note)

    def _describe_start(self) -> str:
        accelerator, task, shares = self.accelerator, self.task, self.task.feed.share(self.task.feed.step_size)
        rows = [max(len(part), task.feed.rows) for ranks in shares for part in ranks]
        padding = sum(rows) / task.feed.step_size - 1
        begins = f"resumes from step {self.step}" if self.step else "starts"
        count, kind, precision = accelerator.num_processes, accelerator.device.type, describe_precision(accelerator)
        what = f"{sum(map(Tensor.numel, self.parameters)):,} parameters, {count} x {kind}, precision {precision}"
        what += f"; a step is {len(shares)} x {max(rows) * task.units_per_item:,} {task.unit} per process"
        return f"{self.config.run_name} {begins}: {what}" + f", {padding:.1%} of them padding" * (padding > 0)

    def finish(self, outcome: Outcome) -> None:
        """Waits for the last save and records how training ended. Collective."""
        self.wait_for_save()
        self.watchdog.heartbeat("ending", timeout=FIRST_TIMEOUT)  # a tracker may still send much data
        reason = self.stop.reason if outcome == "stopped" else self.reason or self.early_end
        if self.folder:
            self.folder.record_end(outcome, self.step, reason)
        end = f"{self.config.run_name} {outcome} at step {self.step}" + f" ({reason})" * bool(reason)
        self.metrics.print(end + "; the same command resumes it" * (outcome == "stopped"))
        if best := self.best_checkpoint:
            self.metrics.print(f"lowest val_loss: {self.best.val_loss:.4f}, in {best}")

    def record_completed(self) -> None:
        """Prints a note for a run that is already complete. Records the end if the last process did not."""
        more = f"{self.early_end}; raise it" if self.early_end else "raise its steps or epochs"
        self.accelerator.print(f"{self.config.run_name} is complete at step {self.step}; {more} to train further")
        if self.folder:
            self.folder.record_completed(self.step, self.rollbacks, self.metrics_chain, self.early_end)
        self.accelerator.end_training()

    def state_dict(self) -> dict[str, Any]:
        """The state without tensors, in plain JSON values, on the main process. Collective; waits for the device."""
        epoch_loss, epoch_units, _ = self.epoch.state_dict()
        scaler, task = self.accelerator.scaler, self.task
        return {
            **super().state_dict(),
            **task.feed.state_dict(),
            task.unit: task.feed.consumed * task.units_per_item,
            "epoch_loss": epoch_loss,
            "epoch_units": epoch_units,
            "since_row": self.since_row.state_dict(),
            "skipped": round(self.skipped.item()),
            "guard": {**self.guard.state_dict(), "norms": self.optimizer.norms.state_dict()},
            "metrics_chain": self.folder.chain if self.folder else None,
            "scaler": scaler.state_dict() if scaler else None,
            **self._facts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, on all ranks. Collective."""
        super().load_state_dict(state)
        guard, units = state.get("guard", {}), state.get("epoch_units", 0)
        self.guard.load_state_dict(guard, self.first_step)
        self.optimizer.norms.load_state_dict(guard.get("norms"))
        self.task.feed.load_state_dict(state)
        self.skipped.fill_(state.get("skipped", 0))
        self.epoch.load_state_dict((state.get("epoch_loss", 0.0), units, units))
        self.since_row.load_state_dict(state.get("since_row", (0, 0, 0)))
        if state.get("scaler") and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.task.load_state_dict(state)

    def snapshot(self) -> Snapshot | None:
        """Content of a checkpoint, of the run's own tensors, on the main process; None on the others. Collective."""
        state, model = finite(self.state_dict()), self.task.model
        if self.folder is None:
            return None
        optimizer_state = checkpoint.optimizer_state(model, self.optimizer.plain)
        if optimizer_state and not self.config.saves_optimizer:
            state, optimizer_state = {**state, "moments": False}, {}
        return Snapshot(state, dump(self.config), model.state_dict(), optimizer_state, self.task.files)

    def load(self, snapshot: Snapshot | None) -> None:
        """Loads a snapshot of the main process (None on the others) on all ranks, in place. Collective."""
        loaded = snapshot or Snapshot({}, "", {}, {})
        state = on_main(self.accelerator, lambda: loaded.state)
        checkpoint.load_model_state(self.accelerator, loaded.model, self.task.model)
        if state.get("moments", True):
            checkpoint.load_optimizer_state(self.accelerator, loaded.optimizer, self.task.model, self.optimizer.plain)
        else:
            checkpoint.reset_optimizer_state(self.optimizer.plain)
            what = f"the checkpoint of step {state['step']} has no optimizer state (checkpoint.save_optimizer)"
            self.accelerator.print(f"note: {what}: it starts at zero")
        self.load_state_dict(state)

    def save(self) -> None:
        """Saves a checkpoint of the current step, after the replica check. Collective; ranks agree on stop requests
        afterwards. A background save is on disk once `wait_for_save` returns, any other once this returns."""
        with self.stop.timed("save"):
            self.wait_for_save()
            self.check_replicas()
            snapshot, folder = self.snapshot(), self.folder
            self.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK if snapshot else 0.0)
            # the last step gets no verdict
            good = self.step if self.is_complete and not self.guard.first_bad else self.guard.last_good
            wait = self.is_complete or self.stop.is_agreed
            save = lambda: folder.checkpoints.save(snapshot, good, wait) if folder and snapshot else None  # noqa: E731
            on_main(self.accelerator, save)
        self.stop.sync()

    def check_folder(self) -> None:
        """Raises: UserError, on every rank, if the run folder was removed or another trainer has it. Collective."""
        on_main(self.accelerator, lambda: self.folder.check_lock() if self.folder else None)

    def wait_for_save(self) -> None:
        """Waits for the background save. Collective. Raises: UserError if writing failed, or as `check_folder`."""
        self.check_folder()
        checkpoints = self.checkpoints
        self.watchdog.heartbeat("save", timeout=checkpoints.background.timeout if checkpoints else 0.0)
        on_main(self.accelerator, lambda: checkpoints.background.wait() if checkpoints else None)

    def poll_save(self) -> None:
        """Checks the background save after a step: if it failed, asks all ranks to stop; if it is overdue, waits."""
        if checkpoints := self.checkpoints:
            background = checkpoints.background
            if background.is_overdue:
                self.watchdog.heartbeat("save")
                background.join()
            if background.error:
                self.stop.request("a checkpoint could not be written")
            self.stop.record_duration("write", background.seconds)

    def check_replicas(self) -> None:
        """Compares weights and optimizer state of all ranks. Collective. Raises: ReplicaMismatch, on every rank."""
        if self.accelerator.num_processes > 1:
            from gpt2_ddp.training.replica_check import check_replicas

            check_replicas(self.accelerator, self.task.model, self.optimizer.plain, self.step)

    def record_step(self, step: int, loss_sum: Tensor, n_valid: int, skipped: Tensor) -> None:
        """Records a step. `loss_sum`: over this rank's `n_valid` units; `skipped`: 1 if it changed nothing."""
        self.step = step
        self.skipped += skipped
        self.epoch.add(loss_sum, n_valid, skipped)
        self.since_row.add(loss_sum, n_valid)

    def evaluate(self, poll: Poll) -> Scores:
        """The task's scores of the current weights. Collective. Raises: Interrupted, as `poll` does."""
        self.watchdog.heartbeat("evaluate")
        # Accelerate's unwrap_model would import Dynamo, 1 s
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        scores = self.task.evaluate(model, poll)
        self.add_scores(scores)
        return scores

    def sample(self) -> list[Sample] | None:
        """Samples of the main process; None on the others, and after a failure. Collective. Raises: Interrupted."""
        stop, metrics = self.stop, self.metrics
        self.watchdog.heartbeat("sample")
        done, samples = False, None
        with suppress(Interrupted):
            samples = stop.run_on_main(lambda: metrics.attempt("sample", lambda: self.task.sample(stop.poll)))
            done = True
        if not on_main(self.accelerator, lambda: done):
            raise Interrupted
        return samples

    def warm_up(self) -> None:
        """Lets DDP build its gradient buckets before the first step."""
        self.watchdog.heartbeat("settle")
        loss = lambda: self.task.loss(self.model, self.task.feed.first_micro_batch())  # noqa: E731
        warm_up_ddp(self.model, self.optimizer.plain, loss)
