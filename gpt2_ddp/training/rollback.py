"""The rollback of a diverged run to its newest good checkpoint."""

from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT
from gpt2_ddp.state import Pending
from gpt2_ddp.training.start import Training


def roll_back(run: Training) -> str:
    """Loads the newest checkpoint from before the divergence, and skips the data read since. Collective. Returns why it
    cannot, if no rollback or no good checkpoint is left; else an empty text."""
    guard, store, feed = run.guard, run.store, run.task.feed
    diverged_at, end, rollbacks = run.step, feed.state.position, run.progress.rollbacks
    problem = guard.divergence
    run.wait_for_save()
    run.watchdog.heartbeat("restore", timeout=FIRST_TIMEOUT)
    good = store.newest(guard.last_good)
    if rollbacks >= run.config.rollbacks or not good:
        if good:  # otherwise only bad ones exist
            store.remove_after(guard.last_good)
        return problem + (f", after {rollbacks} rollbacks" if rollbacks else "")
    run.load(good)
    run.progress.rollbacks, run.progress.pending = rollbacks + 1, Pending()
    start = feed.next_position
    feed.skip_range(start, end)
    event = {"event": "rollback", "step": run.step, "from": diverged_at, "skipped_range": [start, end]}
    run.log.append(event | {"order_digest": feed.state.order_digest})
    store.remove_after(run.step)  # once the rollback is recorded
    run.metrics.print(f"warning: {problem}; rolled back to step {run.step}; skips data positions [{start}, {end})")
    run.throughput.restart()
    return ""
