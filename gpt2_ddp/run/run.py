"""A run: opened by cheap checks, built by long work, and at any step captured and restored on all ranks together."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from gpt2_ddp.config.cli import complete, dump
from gpt2_ddp.config.training import RunConfig
from gpt2_ddp.data.order import FIRST_DIGEST
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.optim import StepGuard
from gpt2_ddp.processes.ddp import settle_buckets
from gpt2_ddp.processes.launch import start_run
from gpt2_ddp.processes.ranks import check_ranks_agree, on_main
from gpt2_ddp.processes.watch import FIRST_TIME, Watch
from gpt2_ddp.run.checkpoint import Checkpoint, verify
from gpt2_ddp.run.folder import RunFolder, finite
from gpt2_ddp.run.guard import Guard
from gpt2_ddp.run.sentinel import check_replicas
from gpt2_ddp.run.snapshot import Snapshot, copy_moments, copy_weights, put_moments, put_weights
from gpt2_ddp.run.stop import GivenUp, StopRequest
from gpt2_ddp.run.task import MakeTask, Poll, Scores, Task
from gpt2_ddp.run.tracking import new_run_id

SLOW_DISK = 20e6
"""Bytes per second that a checkpoint's disk is to take at least, before the watch loses patience with it."""


class Run:
    """A training of one task, from wherever its folder's newest checkpoint stands.

    Making one connects the processes, takes the folder's lock and refuses what can be refused by small files: nothing
    long has happened yet, and a folder that was not there is not left behind. `build` does the rest, `close` gives the
    folder back.

    Attributes:
        folder: on the main process alone.
        watch: is told where this rank is.
        steps: of the whole run; None where that is not known before `build`.
        step: optimizer steps taken. skipped: those that changed nothing, fp32 on the device.
        epoch_loss, epoch_units: sum of the losses (this rank's) and number of units (all ranks') since an epoch ended,
            without skipped steps; on the device.
        scores: the newest of each.
        owed: what the present step is still to be followed by, as a stop came first; None for nothing. Its `row` awaits
            an evaluation; `sample` is one that was not shown.
        rollbacks: how often the run went back to an earlier step.
        guard: which steps were good. step_guard: leaves bad ones out.
        model, optimizer: as Accelerate prepared them; the plain model is the task's.

    Raises:
        UserError: for whatever the user has to mend, on every rank alike.
    """

    model: nn.Module
    optimizer: AcceleratedOptimizer
    step_guard: StepGuard
    folder: RunFolder | None
    step: int

    def __init__(self, config: RunConfig, make_task: MakeTask):
        self.begun = time.monotonic()
        self.accelerator: Accelerator = start_run(config)
        rank, world, train = self.accelerator.process_index, self.accelerator.num_processes, config.train
        self.watch = Watch(rank, world, train.patience_seconds, train.compile)
        self.folder, self.step = None, 0
        self._start: Snapshot | None = None  # to go back to, until there is a good checkpoint; on the main process
        try:
            check_ranks_agree("configuration", config.run_name, dump(config))
            opened: list[RunFolder] = []  # it holds a lock, so it stays on the main process
            on_main(self.accelerator, lambda: opened.append(RunFolder(config)))
            if opened:
                self.folder = opened[0]
                record = lambda reason: opened[0].write_failure(self.step, reason)  # noqa: E731
                self.watch.report_to(self.folder.write_heartbeat, record)
            saved = on_main(self.accelerator, lambda: self.folder.checkpoints.peek() if self.folder else None)
            for field in check_resumable(config, saved) if saved else ():
                self.accelerator.print(f"note: {field} of the run's configuration is not known any more, and ignored")
            self.task: Task = make_task(config, self.accelerator, saved)
            self.steps = self.task.total_steps(saved.state.get("epoch_size") if saved else None)
            self._stand_at(saved.state if saved else {})
            if self.is_complete:  # what is complete is whole, too
                newest = self._newest()
                self._stand_at(newest.state if newest else {})
        except BaseException as error:
            self.__exit__(None, error)
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error:
            self.watch.failed(error)
        self.close()

    @property
    def config(self) -> Any:
        """The resolved configuration."""
        return self.task.config

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done, with what follows them."""
        return self.steps is not None and self.step >= self.steps and not self.owed

    def build(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """The long work: data, model and optimizer, and all ranks at the newest checkpoint. A run that turns out to be
        complete is not built.

        Args:
            wrap: puts something around the plain model, on its device, before Accelerate prepares it.
        """
        accelerator, task = self.accelerator, self.task
        task.load(self.watch)
        self.watch.at("building", allowance=FIRST_TIME)
        self.steps = task.total_steps(len(task.feed.order))
        newest = self._newest()
        self._stand_at(newest.state if newest else {})
        if self.is_complete:
            return
        plain = wrap(task.model.to(accelerator.device))
        module = torch.compile(plain, dynamic=False) if self.config.train.compile else plain
        plain_optimizer = task.build_optimizer()
        self.step_guard = StepGuard(plain_optimizer, self.config.guard.skip, self.config.guard.norm_sigmas)
        self.guard = Guard(self.config.guard, accelerator)
        self.model, self.optimizer = accelerator.prepare(module, plain_optimizer)
        exact = torch.float64 if accelerator.device.type != "mps" else torch.float32  # mps has no fp64
        self.skipped = torch.zeros((), device=accelerator.device)
        self.epoch_loss, self.epoch_units = torch.zeros(2, dtype=exact, device=accelerator.device)
        if newest:
            self.restore(newest.read() if self.folder else None)
        self.run_id = self.run_id or on_main(accelerator, new_run_id)
        on_main(accelerator, lambda: self._record_start(newest is not None))

    def capture(self) -> Snapshot | None:
        """Everything a checkpoint of the present step holds, as a copy; on the main process. Collective."""
        task, feed, scaler = self.task, self.task.feed, self.accelerator.scaler
        epoch_loss, epoch_units = self.sum_over_ranks(self.epoch_loss).item(), round(self.epoch_units.item())
        skipped, guard, own = round(self.skipped.item()), self.guard.state(), task.state()
        if self.folder is None:
            return None
        state = {
            "kind": self.config.kind,
            "step": self.step,
            "position": feed.position,
            "passed": list(feed.passed),
            "order_digest": feed.order_digest,
            task.unit: feed.consumed * task.units_per_item,
            "epoch_size": len(feed.order),
            "epoch_loss": epoch_loss,
            "epoch_units": epoch_units,
            "skipped": skipped,
            "guard": guard,
            "rollbacks": self.rollbacks,
            "owed": self.owed,
            "run_id": self.run_id,
            "val_loss": self.scores.get("val_loss") if self._scored == self.step else None,
            "metrics": finite(self.scores),
            "scaler": scaler.state_dict() if scaler else None,
            **own,
            "processes": self.accelerator.num_processes,
            "versions": {"torch": torch.__version__},
        }
        moments = copy_moments(task.model, self.optimizer.optimizer)
        return Snapshot(finite(state), dump(self.config), copy_weights(task.model), moments, task.files)

    def restore(self, snapshot: Snapshot | None) -> None:
        """Puts all ranks at the step of a snapshot that the main process holds (None on the others). Collective; at any
        step, and in place, so that nothing is compiled or connected anew. What an older release did not write takes its
        default."""
        task, main, held = self.task, self.accelerator.is_main_process, snapshot or Snapshot({}, "", {}, {})
        state = on_main(self.accelerator, lambda: held.state)
        put_weights(self.accelerator, held.model, task.model)
        put_moments(self.accelerator, held.optimizer, task.model, self.optimizer.optimizer)
        if state.get("scaler") and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self._stand_at(state)
        self.guard.load_state(state.get("guard", {}))
        position = state["position"] if "position" in state else state.get("samples", 0)  # of the first small jobs
        task.feed.seek(position, state.get("order_digest", FIRST_DIGEST), state.get("passed", []))
        self.skipped.fill_(state.get("skipped", 0))
        in_epoch = position % len(task.feed.order) * task.units_per_item
        summed = state.get("epoch_loss")  # the first releases did not sum a GPT's: this epoch's mean will be null
        summed = summed if summed is not None else math.nan if in_epoch else 0.0
        self.epoch_loss.fill_(summed if main else 0.0)  # what was summed before counts once
        self.epoch_units.fill_(state.get("epoch_units", in_epoch))
        task.load_state(state)

    def check_replicas(self) -> None:
        """Raises: Corrupted, on every rank, where they do not all hold the same parameters and moments. Collective."""
        check_replicas(self.accelerator, self.task.model, self.optimizer.optimizer, self.step)

    def save(self) -> None:
        """Saves a checkpoint of the present step, if all ranks hold the same. Collective."""
        self.watch.at("save")
        self.check_replicas()
        snapshot = self.capture()
        self.watch.at("save", allowance=snapshot.bytes / SLOW_DISK if snapshot else 0.0)
        on_main(self.accelerator, lambda: self._write(snapshot))

    def _write(self, snapshot: Snapshot | None) -> None:
        if self.folder is None or snapshot is None:
            return
        if self._start and self.guard.first_bad and not self.folder.checkpoints.newest_until(self.guard.good):
            self.folder.save(self._start)  # or a resumed run would have nothing good to go back to
        self.folder.save(snapshot, self.guard.good)
        if self.folder.checkpoints.newest_until(self.guard.good):
            self._start = None

    def keep_start(self) -> None:
        """Keeps what a run begins with, until there is a good checkpoint to go back to. Collective."""
        if self.config.rollbacks and self.step == 0:
            self._start = self.capture()

    def roll_back(self) -> dict[str, Any] | None:
        """Puts all ranks at the newest checkpoint from before the present stretch of bad steps, and passes over what
        was trained on since. Collective.

        Returns:
            what metrics.jsonl records of it; None where there is nothing good to go back to.
        """
        begun, end, rollbacks = self.step, self.task.feed.position, self.rollbacks + 1
        held: list[Snapshot] = []  # on the main process
        self.watch.at("restore", allowance=FIRST_TIME)

        def find() -> bool:
            checkpoint = self.folder.checkpoints.newest_until(self.guard.good) if self.folder else None
            held.extend([verify(checkpoint).read()] if checkpoint else [self._start] if self._start else [])
            return bool(held)

        if not on_main(self.accelerator, find):
            return None
        self.restore(held[0] if held else None)
        self.rollbacks, self.owed = rollbacks, None
        on_main(self.accelerator, lambda: self.folder.checkpoints.remove_after(self.step) if self.folder else None)
        start = int(self.task.feed.take(self.task.feed.position)[0])
        self.task.feed.pass_over(start, end)
        digest = self.task.feed.order_digest
        return {"event": "rollback", "step": self.step, "from": begun, "passed": [start, end], "order_digest": digest}

    def drop_bad(self) -> None:
        """Removes the checkpoints from the present stretch of bad steps, if there is an earlier one."""
        if self.folder and self.folder.checkpoints.newest_until(self.guard.good):
            self.folder.checkpoints.remove_after(self.guard.good)

    def is_ruined(self) -> bool:
        """Whether what was trained is of no use: the parameters or the newest validation loss are not finite, or no
        step has changed anything. Collective."""
        parameters = torch.stack([parameter.isfinite().all() for parameter in self.task.model.parameters()])
        none = self.step > 0 and round(self.skipped.item()) == self.step
        loss = self.scores.get("val_loss")
        return not parameters.all().item() or none or (loss is not None and not math.isfinite(loss))

    def evaluate(self, poll: Poll) -> Scores:
        """The task's scores of the present parameters. Collective.

        Raises:
            GivenUp: as `poll` does, which is called now and then.
        """
        self.watch.at("evaluate")

        def polled() -> None:
            self.watch.progress()
            poll()

        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=True)
        scores = self.task.evaluate(model, polled)
        self.scores |= scores
        self._scored = self.step
        return scores

    def sample(self, write: Callable[[Poll], str | None], stop: StopRequest) -> tuple[bool, str | None]:
        """Has the main process write a sample. Collective; whether it was not given up, and there the sample."""
        self.watch.at("sample")

        def polled() -> None:
            self.watch.progress()
            stop.poll()

        done, text = False, None
        with suppress(GivenUp):
            text = stop.follow_main(lambda: write(polled), self.watch.progress)
            done = True
        return on_main(self.accelerator, lambda: done), text

    def settle(self) -> None:
        """Has DDP settle its gradient buckets before the first step, on a micro-batch laid out like all others."""
        self.watch.at("settle")
        loss = lambda: self.task.loss(self.model, self.task.feed.first_micro_batch())  # noqa: E731
        settle_buckets(self.model, self.optimizer, loss)

    def end_epoch(self) -> float:
        """Mean loss of the units since an epoch ended before, each as it was when it was trained on; NaN where that is
        not known. Collective."""
        mean = (self.sum_over_ranks(self.epoch_loss) / self.epoch_units).item()
        self.epoch_loss.zero_()
        self.epoch_units.zero_()
        self.scores["train_loss"] = mean
        return mean

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on all of them; collective."""
        total = self.accelerator.reduce(value.clone(), reduction="sum")
        assert isinstance(total, Tensor)
        return total

    def _newest(self) -> Checkpoint | None:
        return on_main(self.accelerator, lambda: self.folder.checkpoints.newest() if self.folder else None)

    def _record_start(self, resumed: bool) -> None:
        if self.folder:
            # keep_last may have been lowered for a disk that is full
            self.folder.checkpoints.prune(self.guard.good if self.guard.first_bad else None)
            self.folder.write_config(self.config)
            self.folder.cut_metrics(self.step if resumed else -1, self.rollbacks)

    def _stand_at(self, state: dict[str, Any]) -> None:
        self.step = state.get("step", 0)
        self.owed: dict[str, Any] | None = state.get("owed")
        self.rollbacks: int = state.get("rollbacks", 0)
        self.run_id: str = state.get("run_id", "")
        self.scores: Scores = dict(state.get("metrics", {}))
        self._scored = self.step if state.get("val_loss") is not None else -1

    def close(self) -> None:
        """Lets other trainers into the folder, and ends the watch, which may have to wait for the other ranks."""
        if self.folder:
            self.folder.release()
        self.watch.close()


def check_resumable(config: RunConfig, saved: Checkpoint) -> list[str]:
    """Checks that going on with a run continues the same training: what its configuration has to keep (`kept`) is what
    the run was started with. A field that has come since has its default there; null means the run's own value.

    Returns:
        Fields that are gone since, so that nothing is known about them.

    Raises:
        UserError: naming every field that differs.
    """
    if saved.kind != config.kind:
        cure = f"is a run of another kind, {saved.kind}; choose another run_name"
        raise UserError("run_name", config.run_name, cure)
    started, gone = complete(type(config), saved.config)
    before, now = _flat(started), _flat(config.model_dump(mode="json"))
    mistakes = []
    for name in now:
        kept = any(name == part or name.startswith(f"{part}.") for part in config.kept)
        if kept and name != "data.path" and now[name] is not None and now[name] != before[name]:  # data have a hash
            cure = f"the run was started with {before[name]}; give that back, or choose another run_name for a new run"
            mistakes += UserError(name, now[name], cure).mistakes
    if mistakes:
        raise UserError.join(mistakes)
    return gone


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
