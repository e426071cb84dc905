"""Rollback of a diverged run: loads a good checkpoint and skips the data of the steps after it."""

from gpt2_ddp.checkpoint.checkpoint import Snapshot, verify
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.training.guard import Verdict
from gpt2_ddp.training.progress import Pending
from gpt2_ddp.training.run import Run


def warn_of_bad_step(run: Run, verdict: Verdict) -> None:
    """Prints a warning at the first bad step of this process."""
    if verdict is not Verdict.OK and run.guard.bad_steps == 1:
        done = "left out" if run.config.guard.skip else "trained on"
        what = f"step {run.guard.judged} is bad: {run.guard.problem}; {done}, and no further one is mentioned here"
        run.metrics.print(f"warning: {what}")


def roll_back(run: Run) -> bool:
    """Loads the newest checkpoint from before the bad steps, and skips the data since then. Collective.

    Returns:
        False if no rollback or no good checkpoint is left; sets `run.reason`.
    """
    guard, checkpoints = run.guard, run.checkpoints
    run.wait_for_save()
    problem = f"{run.config.guard.patience} bad steps in a row up to step {guard.judged}: {guard.problem}"
    if run.rollbacks < run.config.rollbacks and _load_good_checkpoint(run):
        if checkpoints:  # once the rollback is recorded
            checkpoints.remove_after(run.step)
        a, b = run.task.feed.skipped_ranges[-1]
        run.metrics.print(f"warning: {problem}; went back to step {run.step}, and passes over the data at [{a}, {b})")
        run.throughput.restart()
        return True
    run.reason = problem + (f", after {run.rollbacks} rollbacks" if run.rollbacks else "")
    if checkpoints and checkpoints.newest_until(guard.last_good):  # otherwise only bad ones exist
        checkpoints.remove_after(guard.last_good)
    return False


def _load_good_checkpoint(run: Run) -> bool:
    feed, checkpoints = run.task.feed, run.checkpoints
    diverged_at, end, rollbacks = run.step, feed.position, run.rollbacks + 1
    found: list[Snapshot] = []  # on the main process
    run.watchdog.heartbeat("restore", timeout=FIRST_TIMEOUT)

    def find() -> bool:
        place = checkpoints.newest_until(run.guard.last_good) if checkpoints else None
        found.extend([verify(place).read()] if place else [])
        return bool(found)

    if not on_main(run.accelerator, find):
        return False
    run.load(found[0] if found else None)
    run.rollbacks, run.pending = rollbacks, Pending()
    start = int(feed.positions_from(feed.position)[0])
    feed.skip_range(start, end)
    event = {"event": "rollback", "step": run.step, "from": diverged_at, "passed": [start, end]}
    run.metrics.go_back(event | {"order_digest": feed.order_digest})
    return True
