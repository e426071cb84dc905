"""Saving a run, and its recovery from bad steps: it goes back to before them, and on without their data."""

import time
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import Snapshot, set_aside, verify
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.training.run import SLOW_DISK, Run
from gpt2_ddp.training.session import Session
from gpt2_ddp.training.stop import StopRequest


def keep_start(run: Run) -> None:
    """Keeps what a run begins with on its disk, until there is a good checkpoint to go back to. Collective. Raises:
    UserError, on every rank, where the disk refuses it."""
    if run.config.rollbacks and run.step == run.first_step:
        snapshot = run.state_dict()

        def keep() -> None:
            if snapshot and run.folder:
                run.start = set_aside(snapshot, run.folder.checkpoints.folder)

        run.watchdog.heartbeat("save", timeout=snapshot.bytes / SLOW_DISK if snapshot else 0.0)
        on_main(run.accelerator, keep)


def save(run: Run, running: Session) -> None:
    """Saves a checkpoint of the present step. Collective; afterwards all know of a stop that came meanwhile."""
    begun = time.perf_counter()
    run.save(last=run.is_complete or running.stop.is_agreed)
    running.stop.record_duration("save", time.perf_counter() - begun)
    running.stop.sync()


def poll_background_save(run: Run, stop: StopRequest) -> None:
    """Looks, after each step, at the checkpoint that is being written behind the training: one that could not be ends
    the run, all ranks together, where they stop; one that is late is waited for, where the watch looks on."""
    background = run.background
    if background.is_late:
        run.watchdog.heartbeat("save")
        background.join()
    if background.failed:
        stop.request("a checkpoint could not be written")
    stop.record_duration("save", 2 * background.seconds)  # the last one may have to wait for it first


def recover(run: Run, running: Session) -> bool:
    """What is done about a bad step: a word about the first, and when the run has diverged, a step back. Collective.

    Returns:
        whether the run can go on.
    """
    guard, say = run.guard, running.metrics.print
    if guard.bad_steps == 1:
        left_out = "left out" if run.config.guard.skip else "trained on"
        say(f"warning: step {guard.judged} is bad: {guard.problem}; {left_out}, and no further one is mentioned here")
    if not guard.diverged:
        return True
    run.saved()
    count = f"{run.config.guard.patience} bad steps in a row up to step {guard.judged}: {guard.problem}"
    checkpoints = run.folder.checkpoints if run.folder else None
    if run.rollbacks < run.config.rollbacks and (event := _roll_back(run)):
        running.metrics.go_back(event)
        if checkpoints:  # those behind the step, once that is recorded
            checkpoints.remove_after(run.step)
        a, b = event["passed"]
        say(f"warning: {count}; went back to step {run.step}, and passes over the data at [{a}, {b})")
        running.throughput.restart()
        return True
    running.reason = count + (f", after {run.rollbacks} rollbacks" if run.rollbacks else "")
    if checkpoints and checkpoints.newest_until(guard.last_good):  # where there is no earlier one, the bad ones stay
        checkpoints.remove_after(guard.last_good)
    return False


def _roll_back(run: Run) -> dict[str, Any] | None:
    """Puts all ranks at the newest checkpoint from before the present stretch of bad steps, and passes over what was
    trained on since. Collective.

    Returns:
        what metrics.jsonl records of it; None where there is nothing good to go back to.
    """
    feed, begun, end, rollbacks = run.task.feed, run.step, run.task.feed.position, run.rollbacks + 1
    held: list[Snapshot] = []  # on the main process
    run.watchdog.heartbeat("restore", timeout=FIRST_TIMEOUT)

    def find() -> bool:
        checkpoint = run.folder.checkpoints.newest_until(run.guard.last_good) if run.folder else None
        held.extend([verify(checkpoint).read()] if checkpoint else [run.start] if run.start else [])
        return bool(held)

    if not on_main(run.accelerator, find):
        return None
    run.load_state_dict(held[0] if held else None)
    run.rollbacks, run.pending = rollbacks, None
    start = int(feed.positions_from(feed.position)[0])
    feed.skip_range(start, end)
    digest = feed.order_digest
    return {"event": "rollback", "step": run.step, "from": begun, "passed": [start, end], "order_digest": digest}
