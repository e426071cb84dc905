"""`checkpoint.seconds`: saves as often as a bound on what a kill costs needs.

What counts is the age of the newest checkpoint that is complete on disk, by a clock on the wall. A
kill loses what was trained since its state was taken. A save protects only once it is on disk, so
the next one begins early enough to be there in time:

    state taken   on disk                      state taken   on disk
         |----------|-------------------------------|-----------|
         | written  |                               |  written  |
         |<--------- seconds (of an interval) ----->|           |
         |<--------- lost_seconds: a kill just before this ---->|

The main process measures. Its number, the step of the next save, reaches all ranks with the sum by
which they agree on stops, a step later: no rank waits for another one.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median_high
from typing import NamedTuple

from gpt2_ddp.checkpoint.store import Background
from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.distributed.ranks import from_main
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.state import Pending
from gpt2_ddp.training.stop import RECENT, StopRequest

NEWEST = 3
"""Newest saves that count: disks and machines change."""
CHANGE = 1.25
"""Ratio of a new interval to the recorded one, or of the seconds that it may lose, from which on it
is recorded, too."""


class SaveCost(NamedTuple):
    """What a checkpoint takes, in seconds; fields of the event `interval`.

    Attributes:
        save_seconds: that training waits for it, or is slowed down by it.
        written_seconds: from the state of the training to the complete checkpoint.
    """

    save_seconds: float
    written_seconds: float


class Interval(NamedTuple):
    """How often a run saves.

    Attributes:
        seconds: from save to save.
        least: the fewest that the cost of a save and the duration of a step allow.
    """

    seconds: float
    least: float
    cost: SaveCost
    step_seconds: float

    @property
    def lost_seconds(self) -> float:
        """The most that a kill costs, besides a step."""
        return self.seconds + self.cost.written_seconds

    @property
    def is_kept(self) -> bool:
        """Whether a kill costs no more than `checkpoint.seconds`."""
        return self.seconds > self.least

    @property
    def share(self) -> float:
        """Share of the time that saves take."""
        return self.cost.save_seconds / self.seconds

    @property
    def every(self) -> int:
        """Whole steps from save to save."""
        return max(int((self.seconds - self.cost.save_seconds) / self.step_seconds), 1)


def settle_interval(keep: KeepConfig, cost: SaveCost, step_seconds: float) -> Interval:
    """The longest interval in which a kill costs at most `checkpoint.seconds`, or the shortest one
    that is possible. Saves take at most `checkpoint.overhead` of the time. One begins once the one
    before is on disk, and no two follow the same step."""
    assert keep.seconds is not None
    least = max(cost.save_seconds / keep.overhead, cost.written_seconds, step_seconds)
    return Interval(
        seconds=max(keep.seconds - cost.written_seconds, least),
        least=least,
        cost=cost,
        step_seconds=step_seconds,
    )


class SaveInterval:
    """The saves of a run with `checkpoint.seconds`, on every rank; the main process measures.

    Args:
        background: writes checkpoints; what is not written by it is on disk once a save returns.
        show: prints a line.
    """

    def __init__(
        self,
        keep: KeepConfig,
        stop: StopRequest,
        background: Background,
        log: RunLog,
        show: Callable[[str], None],
    ):
        self._keep = keep
        self._stop = stop
        self._background = background
        self._log = log
        self._show = show
        self._costs = deque[SaveCost](maxlen=NEWEST)
        self._recorded: Interval | None = None
        self._alone = deque[float](maxlen=RECENT)  # durations of steps, no save beside them
        self._beside: list[float] = []  # of those that began beside the save that is measured
        self._began_beside = deque([False, False])  # the last step and this one
        self._taken = self._returned = time.monotonic()
        self._is_measuring = False

    def restart(self) -> None:
        """Begins at a state that is on disk: that of a checkpoint that was loaded."""
        self._taken = time.monotonic()
        self._is_measuring = False
        self._stop.next_save = 0

    def begin_save(self) -> None:
        """Notes that the state of the training is taken for a save."""
        self._taken = time.monotonic()

    def end_save(self, step: int) -> None:
        """Notes that the training goes on, and settles the step of the next save. The background
        may still write."""
        self._returned = time.monotonic()
        self._beside = []
        self._began_beside[-1] = self._background.is_working
        # before the first steps there is no optimizer state to write
        self._is_measuring = bool(self._alone)
        if is_main_process():
            self._settle(step)

    def forecast(self, step: int) -> None:
        """Tells the ranks, by their next sum, after which step they save. `step` was taken."""
        if not is_main_process():
            return
        began_beside = self._began_beside.popleft()
        self._began_beside.append(self._background.is_working)
        if newest := self._stop.typical("step", 1):  # of the step before this one
            durations = self._beside if began_beside else self._alone
            durations.append(newest)
        self._settle(step)

    def _settle(self, step: int) -> None:
        """Measures the newest save once it is on disk, and settles the step of the next one."""
        # the last step beside a save is timed one later
        if self._is_measuring and not any(self._began_beside):
            self._is_measuring = False
            self._measure()
            self._record(step)
        step_seconds = self._stop.typical("step")
        if step_seconds:
            left = self._taken + self._interval().seconds - time.monotonic()
            self._stop.next_save = step + max(int(left / step_seconds), 0)

    def is_due(self, step: int) -> bool:
        """Whether all ranks save after this step."""
        return 0 < self._stop.save_at <= step

    def must_precede(self, pending: Pending) -> bool:
        """Whether a save comes before the pending evaluation and sample, as it would be too late
        after them. Collective, if there are any."""
        if not (pending.evaluate or pending.sample):
            return False
        stop = self._stop
        evaluation = stop.typical("evaluation", NEWEST) or stop.typical("first evaluation")
        following = pending.evaluate * evaluation + pending.sample * stop.typical("sample", NEWEST)
        interval = self._interval()
        age = time.monotonic() - self._taken
        return from_main(age > interval.least and age + following > interval.seconds)

    def allows(self) -> bool:
        """Whether the costs allow a save now, although none is due yet. Collective."""
        return from_main(time.monotonic() - self._taken > self._interval().least)

    @property
    def every(self) -> int | None:
        """Steps from save to save, on the main process; None before the first save is measured."""
        return self._interval().every if self._costs else None

    def _interval(self) -> Interval:
        """The interval by the costs so far. Before the first one is known, half of the seconds are
        for it."""
        assert self._keep.seconds is not None
        cost = SaveCost(0.0, self._keep.seconds / 2)
        if self._costs:
            # one slow save changes no overhead, but the next slow one is in time, too
            cost = SaveCost(
                save_seconds=median_high(save.save_seconds for save in self._costs),
                written_seconds=max(save.written_seconds for save in self._costs),
            )
        return settle_interval(self._keep, cost, self._stop.typical("step"))

    def _measure(self) -> None:
        """Takes what the newest save cost."""
        # what the background did not write was on disk when the save returned
        on_disk = max(self._returned, self._background.ended)
        slower = sum(self._beside) - len(self._beside) * fmean(self._alone)
        waited = self._returned - self._taken
        self._costs.append(SaveCost(waited + max(slower, 0.0), on_disk - self._taken))

    def _record(self, step: int) -> None:
        """Records and prints the interval, if it is new or has changed."""
        interval = self._interval()
        if recorded := self._recorded:
            changes = (
                interval.seconds / recorded.seconds,
                interval.lost_seconds / recorded.lost_seconds,
            )
            if all(1 / CHANGE < change < CHANGE for change in changes):
                return
        self._recorded = interval
        event = {"event": "interval", "step": step, "every": interval.every}
        event |= {"every_seconds": interval.seconds, "lost_seconds": interval.lost_seconds}
        event |= {"share": interval.share, "step_seconds": interval.step_seconds}
        self._log.append(event | interval.cost._asdict())
        self._show(describe(self._keep, interval))


def describe(keep: KeepConfig, interval: Interval) -> str:
    """The interval for people; a warning with the reason if it loses more than is asked."""
    cost = interval.cost
    asked = f"checkpoint.seconds = {keep.seconds:g}"
    every = f"a checkpoint every {interval.every:,} steps ({interval.seconds:.3g} s)"
    if interval.is_kept:
        return f"{asked}: {every}, {interval.share:.1%} of the time"
    if interval.least == cost.save_seconds / keep.overhead:
        costs = f"a checkpoint costs {cost.save_seconds:.2g} s of training"
        reason = f"{costs}, and checkpoint.overhead is {keep.overhead:g}"
    elif interval.least == cost.written_seconds:
        reason = f"a checkpoint is on disk after {cost.written_seconds:.2g} s"
    else:
        reason = f"a step takes {interval.step_seconds:.2g} s"
    lost = f"up to {math.ceil(interval.lost_seconds):,} s may be lost"
    return f"warning: {asked} cannot be kept, {lost}: {reason}; {every}"
