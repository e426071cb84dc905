"""The first step in which a setting of the schedule changes the learning rate.

A schedule is a function of the step. So each setting that differs is put into the other run's
schedule, alone.
"""

from functools import cache
from typing import NamedTuple

from gpt2_ddp.config.training import OptimConfig, TrainingConfig
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.conditions import FOLLOWS, SETTLED, Cause, Record
from gpt2_ddp.training.optimizer import lr_at

MOST = 100_000
"""Most steps that are looked at, a second of work (estimate)."""
SECTION = "optim."
END = "optim.decay_steps"


class Pair(NamedTuple):
    """A schedule, and the same with the other run's setting."""

    schedule: OptimConfig
    changed: OptimConfig

    def differs_at(self, step: int) -> bool:
        return lr_at(step, self.schedule) != lr_at(step, self.changed)


def with_first_rate(cause: Cause, one: Record, other: Record) -> Cause:
    """The cause from the first common step with another learning rate on; without the effect on it
    if the common steps have none. Unchanged if it is no setting of a schedule, for a class of one's
    own, and for small jobs."""
    is_setting = cause.name.startswith(SECTION) or cause.name in FOLLOWS[END]
    has_schedule = one.kind == TrainingConfig.kind and "rate" in cause.effects and is_setting
    has_class = any(
        stretch.conditions.get("code") for stretch in (*one.stretches, *other.stretches)
    )
    last = min(one.last, other.last)
    if not has_schedule or has_class or last > MOST:
        return cause
    names = {cause.name} if cause.name.startswith(SECTION) else {*SETTLED}

    @cache
    def pairs(of_one: int, of_other: int) -> tuple[Pair, Pair]:
        """Those of the two runs in their stretches of these numbers."""
        before = one.stretches[of_one].conditions
        after = other.stretches[of_other].conditions
        return _pair(before, after, names), _pair(after, before, names)

    try:
        for step in range(cause.step, last + 1):
            both = pairs(one.stretch_at(step), other.stretch_at(step))
            if any(pair.differs_at(step) for pair in both):
                return cause._replace(step=step)
    except ValueError:  # of a damaged file, or of two releases that do not fit together
        return cause
    kept = tuple(effect for effect in cause.effects if effect != "rate")
    return cause._replace(effects=kept or ("none",))


def _pair(conditions: Row, others: Row, names: set[str]) -> Pair:
    """The schedule of conditions, and the same with others' values of `names`. Raises:
    ValueError."""
    changed = {name: others.get(name) for name in names}
    return Pair(_section(conditions), _section(conditions | changed))


def _section(conditions: Row) -> OptimConfig:
    """The section `optim` of conditions. Raises: ValueError."""
    fields = OptimConfig.model_fields
    values = {
        name: conditions[f"{SECTION}{name}"] for name in fields if f"{SECTION}{name}" in conditions
    }
    return OptimConfig.model_validate(values)
