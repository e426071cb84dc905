"""A run: opened by cheap checks, built by long work, and at any step captured and restored on all ranks together."""

import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpt2_ddp.checkpoint.checkpoint import (
    Checkpoint,
    Snapshot,
    find_checkpoint,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    reset_optimizer_state,
)
from gpt2_ddp.checkpoint.checkpointer import Background, should_save_async
from gpt2_ddp.checkpoint.metrics import LongStage
from gpt2_ddp.checkpoint.run_files import METRICS, finite
from gpt2_ddp.checkpoint.run_folder import RunFolder
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.data.order import FIRST_DIGEST
from gpt2_ddp.distributed.launch import start_run
from gpt2_ddp.distributed.ranks import check_ranks_agree, on_every_rank, on_main, warm_up_ddp
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, TIMEOUT, Watchdog
from gpt2_ddp.model.compiled import check_compiler, compiled, resolve_compile
from gpt2_ddp.model.optim import UpdateSkipper
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.lineage import describe_overrides, register_branch, resolve_start
from gpt2_ddp.training.losses import LossSum
from gpt2_ddp.training.peaks import device_name
from gpt2_ddp.training.progress import Progress
from gpt2_ddp.training.replica_check import check_replicas
from gpt2_ddp.training.stop import Interrupted, StopRequest
from gpt2_ddp.training.task import MakeTask, Poll, Sample, Scores, Task

SLOW_DISK = 20e6
"""Bytes per second that a checkpoint's disk is to take at least, before the watch loses patience with it."""


class Run(Progress):
    """A training of one task, from wherever its folder's newest checkpoint stands.

    Making one connects the processes, takes the folder's lock and refuses what can be refused by small files: nothing
    long has happened yet, and a folder that was not there is not left behind. `build` does the rest, `close` gives the
    folder back.

    Args:
        hold: False is for who only asks what would be refused: the folder is looked at (`RunFolder`), not taken.

    Attributes:
        folder: on the main process alone.
        watch: is told where this rank is.
        skipped: steps that changed nothing, fp32 on the device.
        epoch: losses since an epoch ended, without skipped steps. since_row: since the last row, as far as finite.
        start: what the run began with, to go back to until there is a good checkpoint; on the main process's disk.
        background: writes checkpoints there, while training goes on.
        guard: which steps were good. step_guard: leaves bad ones out.
        model, optimizer: as Accelerate prepared them; the plain model is the task's.
        parameters: the model's, as asking it walks through all of its modules.

    Raises:
        UserError: for whatever the user has to mend, on every rank alike.
    """

    model: nn.Module
    optimizer: AcceleratedOptimizer
    step_guard: UpdateSkipper
    folder: RunFolder | None = None
    start: Snapshot | None = None

    def __init__(self, config: RunConfig, make_task: MakeTask, hold: bool = True):
        super().__init__(config.eval_patience)
        self.background = Background()
        self._memory: dict[str, Tensor] = {}  # of the copies that it writes from
        self.begun = time.monotonic()
        self.accelerator: Accelerator = start_run(config)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.watchdog = Watchdog(rank, world, config.train.patience_seconds)
        try:
            check_ranks_agree(config.shared)
            on_every_rank(self.accelerator, lambda: check_compiler(config.train.compile, self.accelerator.device))
            opened: list[RunFolder] = []  # it holds a lock, so it stays on the main process
            on_main(self.accelerator, lambda: opened.append(RunFolder(config, hold)))
            if opened:
                self.folder = opened[0]
            if self.folder and hold:
                folder, long_stage = self.folder, LongStage()
                report = lambda facts: (folder.write_heartbeat(facts), long_stage.report(facts))  # noqa: E731
                self.watchdog.report_to(report, lambda reason: folder.write_failure(self.step, reason))
            own = on_main(self.accelerator, lambda: self.folder.checkpoints.latest_metadata() if self.folder else None)
            self._parent, self._branch = resolve_start(config, own, self.accelerator)
            saved = own or self._branch
            self._goes_on = saved is not None
            self.task: Task = make_task(config, self.accelerator, saved)
            self.steps = self.task.total_steps(saved.state.get("epoch_size") if saved else None)
            self.load_progress(saved.state if saved else {})
            if self.is_complete:  # what is complete is whole, too
                newest = self.newest()
                self.load_progress(newest.state if newest else {})
        except BaseException as error:
            self.__exit__(None, error)
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error:
            self.watchdog.failed(error)
        self.close()

    @property
    def config(self) -> Any:
        """The resolved configuration."""
        return self.task.config

    @property
    def best_checkpoint(self) -> Path | None:
        """The one of the best evaluation, where that is not the newest; on the main process."""
        place = self.folder.checkpoints.place(self.best.step) if self.folder else None
        return place if place and self.best.step < self.step and place.is_dir() else None

    def build(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """The long work: data, model and optimizer, and all ranks at the newest checkpoint. A run that turns out to be
        complete is not built.

        Args:
            wrap: puts something around the plain model, on its device, before Accelerate prepares it.
        """
        accelerator, task = self.accelerator, self.task
        task.load(self.watchdog)
        self.watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
        self.steps = task.total_steps(len(task.feed.order))
        if parent := self._parent:  # is it whole still? Its run may have removed it meanwhile
            on_main(accelerator, lambda: find_checkpoint(parent.path, "train.branch_from"))
        newest = self.newest() or self._branch
        assert newest or not self._goes_on, "its checkpoints were removed meanwhile, and the weights are those of none"
        self.load_progress(newest.state if newest else {})
        if self.is_complete:
            return
        plain = wrap(task.model.to(accelerator.device))
        self.compile = self._resolve_compile(newest)
        module = compiled(plain, self.compile)
        plain_optimizer = task.build_optimizer()
        self.step_guard = UpdateSkipper(plain_optimizer, self.config.guard.skip, self.config.guard.norm_sigmas)
        self.guard = Guard(self.config.guard, accelerator)
        # both are on their device; looking would import torch.distributed.tensor and sympy, for half a second
        self.model, self.optimizer = accelerator.prepare(module, plain_optimizer, device_placement=[False, False])
        self.parameters = list(self.model.parameters())
        self.skipped = torch.zeros((), device=accelerator.device)
        self.epoch, self.since_row = LossSum(accelerator), LossSum(accelerator)
        if newest:
            self.load_state_dict(newest.read() if self.folder else None)
        self.run_id = self.run_id or on_main(accelerator, lambda: uuid.uuid4().hex[:8])
        on_main(accelerator, self._record_start)
        if parent:
            accelerator.print(f"note: branches off {parent.path}, with {describe_overrides(self.config, parent)}")

    def _resolve_compile(self, newest: Checkpoint | None) -> str:
        """What `train.compile` comes to; auto stays what it was, on as many devices of the same kind."""
        accelerator, task, state = self.accelerator, self.task, newest.state if newest else {}
        same = all(state.get(name) == value for name, value in self._place.items())
        before, left = state.get("compile") if same else None, (self.steps or 0) - self.step
        flops = task.flops_per_unit * task.units_per_item * task.feed.step_size * left / accelerator.num_processes
        how, missing = resolve_compile(self.config.train.compile, before, task.model, accelerator, flops)
        if missing:
            accelerator.print(f"note: trains without torch.compile, which needs {missing} (train.compile)")
        self.watchdog.compiles = how != "off"
        return how

    @property
    def _place(self) -> dict[str, Any]:
        """What this run trains on."""
        return {"processes": self.accelerator.num_processes, "device": device_name(self.accelerator.device)}

    def state_dict(self) -> Snapshot | None:
        """Everything a checkpoint of the present step holds; on the main process. Its tensors are the run's own, which
        the next step changes: `Snapshot.copied` keeps them. Collective."""
        task, feed, scaler = self.task, self.task.feed, self.accelerator.scaler
        (epoch_loss, epoch_units, _), since_row = self.epoch.state_dict(), self.since_row.state_dict()
        skipped, guard, facts = round(self.skipped.item()), self.guard.state_dict(), self._facts()
        if self.folder is None:
            return None
        state = {
            **self.progress_dict(),
            "position": feed.position,
            "passed": list(feed.skipped_ranges),
            "order_digest": feed.order_digest,
            task.unit: feed.consumed * task.units_per_item,
            "epoch_loss": epoch_loss,
            "epoch_units": epoch_units,
            "since_row": since_row,
            "skipped": skipped,
            "guard": guard,
            "metrics_chain": self.folder.chain,
            "scaler": scaler.state_dict() if scaler else None,
            **facts,
        }
        weights, moments = model_state(task.model), optimizer_state(task.model, self.optimizer.optimizer)
        whole = Snapshot(finite(state), dump(self.config), weights, moments, task.files)
        return whole if self.config.saves_optimizer else whole.without_optimizer()

    def _facts(self) -> dict[str, Any]:
        """What this process trains, and with what: in its checkpoints, and in the row of its start."""
        return {
            "kind": self.config.kind,
            "run_id": self.run_id,
            "epoch_size": len(self.task.feed.order),
            **self.task.state_dict(),
            **self._place,
            "threads": torch.get_num_threads(),
            "compile": self.compile,
            "versions": {"torch": torch.__version__},
        }

    def load_state_dict(self, snapshot: Snapshot | None) -> None:
        """Puts all ranks at the step of a snapshot that the main process holds (None on the others). Collective; at any
        step, and in place, so that nothing is compiled or connected anew. What an older release did not write takes its
        default."""
        task, held = self.task, snapshot or Snapshot({}, "", {}, {})
        state = on_main(self.accelerator, lambda: held.state)
        load_model_state(self.accelerator, held.model, task.model)
        if state.get("moments", True):
            load_optimizer_state(self.accelerator, held.optimizer, task.model, self.optimizer.optimizer)
        else:
            reset_optimizer_state(self.optimizer.optimizer)
            self.accelerator.print(
                f"note: the checkpoint of step {state['step']} has no moments of the optimizer "
                "(checkpoint.save_optimizer): they begin at zero again"
            )
        if state.get("scaler") and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.load_progress(state)
        self.guard.load_state_dict(state.get("guard", {}), self.first_step)
        position = state["position"] if "position" in state else state.get("samples", 0)  # of the first small jobs
        task.feed.seek(position, state.get("order_digest", FIRST_DIGEST), state.get("passed", []))
        self.skipped.fill_(state.get("skipped", 0))
        in_epoch = position % len(task.feed.order) * task.units_per_item
        summed = state.get("epoch_loss")  # the first releases did not sum a GPT's: this epoch's mean will be null
        summed = summed if summed is not None else math.nan if in_epoch else 0.0
        units = state.get("epoch_units", in_epoch)
        self.epoch.load_state_dict((summed, units, units))
        self.since_row.load_state_dict(state.get("since_row", (0, 0, 0)))
        task.load_state_dict(state)

    def check_replicas(self) -> None:
        """Raises: Corrupted, on every rank, where they do not all hold the same parameters and moments. Collective."""
        check_replicas(self.accelerator, self.task.model, self.optimizer.optimizer, self.step)

    def save(self, last: bool = False) -> None:
        """Saves a checkpoint of the present step, if all ranks hold the same. It is on disk when this returns, or,
        unless it is the `last` one, when `saved` has. Collective."""
        self.saved()
        self.check_replicas()
        snapshot = self.state_dict()
        self.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK if snapshot else 0.0)
        on_main(self.accelerator, lambda: self._save(snapshot, last) if snapshot else None)

    def saved(self) -> None:
        """Waits until the checkpoints are on disk. Collective. Raises: UserError, on every rank, where the disk refused
        what was written behind the training."""
        self.watchdog.heartbeat("save", timeout=self.background.limit)
        on_main(self.accelerator, self.background.wait)

    def _save(self, snapshot: Snapshot, last: bool) -> None:
        good, bad = self.guard.last_good, self.guard.first_bad is not None
        size = 0 if self._memory else snapshot.bytes
        wish, workers = self.config.checkpoint.background, self.config.loader_workers
        if last or not should_save_async(wish, size, self.accelerator.device.type, workers):
            self._write(snapshot, good, bad)
        else:
            copy = snapshot.copied(self._memory)
            limit = (self.config.train.patience_seconds or TIMEOUT) + snapshot.bytes / SLOW_DISK
            self.background.start(lambda: self._write(copy, good, bad), limit)

    def _write(self, snapshot: Snapshot, good: int, bad: bool) -> None:
        """Writes a checkpoint; `good` and `bad` are what the guard says at its step: the last good one, and whether
        there are bad ones behind it."""
        assert self.folder, "it is on the main process"
        checkpoints = self.folder.checkpoints
        if self.start and bad and not checkpoints.newest_until(good):
            self.folder.save(self.start)  # or a resumed run would have nothing good to go back to
        self.folder.save(snapshot, good)
        if checkpoints.newest_until(good):
            self.start = None

    def evaluate(self, poll: Poll) -> Scores:
        """The task's scores of the present parameters. Collective.

        Raises:
            Interrupted: as `poll` does, which is called now and then.
        """
        self.watchdog.heartbeat("evaluate")
        # not Accelerate's unwrap_model, which imports Dynamo, for a second
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        scores = self.task.evaluate(model, poll)
        self.scored(scores)
        return scores

    def sample(self, write: Callable[[], list[Sample] | None], stop: StopRequest) -> tuple[bool, list[Sample] | None]:
        """Has the main process write samples. Collective; whether that was not given up, and there the samples."""
        self.watchdog.heartbeat("sample")
        done, samples = False, None
        with suppress(Interrupted):
            samples = stop.run_on_main(write)
            done = True
        return on_main(self.accelerator, lambda: done), samples

    def warm_up(self) -> None:
        """Has DDP settle its gradient buckets before the first step, on a micro-batch laid out like all others."""
        self.watchdog.heartbeat("settle")
        loss = lambda: self.task.loss(self.model, self.task.feed.first_micro_batch())  # noqa: E731
        warm_up_ddp(self.model, self.optimizer, loss)

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint of its own, all files hashed; None for a new run. Collective. Raises: UserError
        where there are some and none is intact."""
        return on_main(self.accelerator, lambda: self.folder.checkpoints.newest() if self.folder else None)

    def _record_start(self) -> None:
        if self.folder:
            # keep_last may have been lowered for a disk that is full
            self.folder.checkpoints.prune(self.guard.last_good if self.guard.first_bad else None)
            config = self.config.model_dump(mode="json")
            self.folder.record_start(self, {**self._facts(), "steps": self.steps, "config": config})
            self.folder.write_config(self.config)
            if self.branched_from and self.is_at_start:
                feed = self.task.feed
                stands = {"position": feed.position, "passed": feed.skipped_ranges, "order_digest": feed.order_digest}
                self.folder.append(METRICS, {"event": "branch", **self.branched_from, **stands})
            if self._parent:
                register_branch(self._parent, self.folder.path, self.run_id)

    def close(self) -> None:
        """Lets other trainers into the folder, once nothing is written to it any more, and ends the watch, which may
        have to wait for the other ranks."""
        self.background.join()
        self.start = None
        if self.folder:
            self.folder.release()
        self.watchdog.close()
