"""The steps of a recorded run and the positions of the order that each has taken, both ways.

A step takes the next G positions that no rollback has skipped. So the steps that count have all
positions in order, but for the skipped ranges. Position and step follow from each other, on any
number of ranks and after any number of resumes. A branch begins with the ranges of its parents.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_ddp.errors import UserError
from gpt2_ddp.records.rows import METRICS, Row, read_events

CHECK = "python scripts/verify_run.py names the first row that is wrong"
Ranges = tuple[tuple[int, int], ...]
"""[start, stop) of positions, ascending; none touch each other."""


class Layout(NamedTuple):
    """How the steps after one were divided: among so many processes, in micro-batches of so many
    windows."""

    after: int
    processes: int
    micro_batch: int


class History(NamedTuple):
    """What a run has trained on up to a step.

    Attributes:
        size: windows of a step.
        step: the last one.
        skipped: what rollbacks have skipped.
        layouts: by rising step.
    """

    size: int
    step: int = 0
    skipped: Ranges = ()
    layouts: tuple[Layout, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last one that was taken."""
        return self.end_of(self.step)

    def end_of(self, step: int) -> int:
        """The position after the last one of a step."""
        return int(self.positions(step)[-1]) + 1 if step else 0

    def positions(self, step: int) -> np.ndarray:
        """Positions int64 [G] of a step."""
        positions = np.arange((step - 1) * self.size, step * self.size)
        for start, stop in self.skipped:
            positions[positions >= start] += stop - start
        return positions

    def is_skipped(self, positions: np.ndarray) -> np.ndarray:
        """Whether each of the positions [n] was skipped: bool [n]."""
        skipped = np.zeros(len(positions), bool)
        for start, stop in self.skipped:
            skipped |= (positions >= start) & (positions < stop)
        return skipped

    def steps_of(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The steps, int64 [n], that took positions which are not skipped, and the places in the
        step, from 0 on."""
        before = sum((positions - a).clip(0, b - a) for a, b in self.skipped)
        steps, places = np.divmod(positions - before, self.size)
        return steps + 1, places

    def layout(self, step: int) -> Layout | None:
        """How a step was divided; None if no row tells."""
        return next((layout for layout in reversed(self.layouts) if layout.after < step), None)

    def after(self, row: Row) -> "History":
        """The history after a row. Raises: UserError for a row that does not follow."""
        step = row["step"]
        now = self._replace(step=step)
        match row:
            case {"event": "start", "processes": int(processes), "micro_batch": int(micro_batch)}:
                kept = [layout for layout in self.layouts if layout.after < step]
                layouts = (*kept, Layout(step, processes, micro_batch))
                return now._replace(layouts=layouts)
            case {
                "event": "rollback",
                "from": int(undone),
                "skipped_range": [int(start), int(stop)],
            }:
                return self._rolled_back(step, undone, (start, stop))
            case {"event": "branch", "skipped_ranges": list(ranges), "position": int(position)}:
                branch = now._replace(skipped=joined(ranges))
                if branch.end != position:
                    raise damaged(f"the branch at step {step} begins at another position")
                return branch._replace(layouts=(*_parent_layouts(row, self), *self.layouts))
            case {"event": "rollback" | "branch"}:
                raise damaged(f"the {row['event']} to step {step} has no positions")
            case _:
                return now

    def _rolled_back(self, step: int, undone: int, skipped: tuple[int, int]) -> "History":
        start, stop = skipped
        # the checkpoint may have been saved after an earlier rollback to it
        follows = self.end_of(step) <= start <= self.positions(step + 1)[0]
        if not follows or start >= stop or self.end_of(undone) != stop:
            raise damaged(f"the rollback to step {step} does not match its positions")
        layouts = self.layouts
        if layouts:
            kept = [layout for layout in layouts if layout.after < step]
            layouts = (*kept, layouts[-1]._replace(after=min(step, layouts[-1].after)))
        return self._replace(step=step, skipped=joined([*self.skipped, skipped]), layouts=layouts)


def joined(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Ranges without overlaps. A rollback to a checkpoint again has a longer range than before."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def damaged(problem: str) -> UserError:
    """The user error of rows that contradict each other."""
    return UserError("rows", METRICS, f"{problem}; {CHECK}")


def _parent_layouts(branch: Row, history: History) -> tuple[Layout, ...]:
    """How the steps before a branch were divided, by the rows of its parent; none if these are
    gone."""
    rows = Path(str(branch.get("parent"))).parent.parent / METRICS
    events, _ = read_events(rows) if rows.is_file() else ([], 0)
    parent = History(history.size)
    for event in events:
        try:
            parent = parent.after(event)
        except UserError:  # of a run that is not asked about
            return ()
        if event.get("sha256") == branch.get("checkpoint_sha256"):
            return parent.layouts
    return ()
