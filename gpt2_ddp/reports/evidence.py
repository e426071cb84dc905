"""What was found in two runs, and which cause suffices for which parting.

A cause suffices if it may change what parted, and acts no later than the parting. An update of step
N changes the losses of step N + 1 on; all else acts in its own first step. Rounding alone suffices
up to `LIMITS`.
"""

from typing import NamedTuple

from gpt2_ddp.reports.conditions import Cause, Effect, Record, precision_of
from gpt2_ddp.reports.partings import Apart, Parting, What

TRAINING: frozenset[Effect] = frozenset({"data", "order", "model", "rate", "updates"})
SCORED: frozenset[Effect] = frozenset({*TRAINING, "scores"})
SUFFICIENT: dict[What, frozenset[Effect]] = {
    "order": frozenset({"order"}),
    "counts": TRAINING,
    "learning rate": frozenset({"rate"}),
    "loss": TRAINING,
    "gradient norm": TRAINING,
    "scores": SCORED,
    "tensors": SCORED,
}
"""The effects that suffice for a parting, however large it is."""
BEFORE_UPDATES: tuple[What, ...] = ("loss", "gradient norm", "counts")
"""Numbers of a step that its update does not change."""
ROUNDED: tuple[What, ...] = ("loss", "gradient norm", "scores", "tensors")
"""Partings that rounding explains, up to a limit."""
MASKS = ("model.dropout", "model.attention_dropout")
"""Conditions of training alone: no evaluation drops anything."""
LIMITS = {
    "fp32": ((40, 3e-5), (100, 3e-4), (200, 3e-3), (400, 1e-2)),
    "bf16": ((40, 5e-3), (100, 1e-2), (200, 2e-2), (400, 4e-2)),
}
"""Largest difference of a loss that rounding explains, as a share of the loss, up to a number of
steps. Up to 40 steps it is about ten times what was measured with AdamW (docs/explain.md). Later
ones are estimates, as roundings grow at another rate in each model; so are all of Muon. The last
one holds for all later steps."""
MEASURED = 40
"""Steps up to which the limits follow from measurements."""


class Evidence(NamedTuple):
    """What was found in two runs, before the verdict."""

    first: Record
    second: Record
    causes: list[Cause]
    partings: list[Parting]

    @property
    def precision(self) -> str:
        """The lower precision of the two, `fp32` or `bf16`."""
        stretches = (*self.first.stretches, *self.second.stretches)
        used = {precision_of(stretch.conditions) for stretch in stretches}
        return "fp32" if used == {"fp32"} else "bf16"

    @property
    def has_muon(self) -> bool:
        """Whether one of them trains by Muon, whose limits are estimates."""
        stretches = (*self.first.stretches, *self.second.stretches)
        return any(stretch.conditions.get("optim.name") == "muon" for stretch in stretches)

    def sufficient(self, parting: Parting) -> list[Cause]:
        """The causes that suffice for a parting. Those that began to act after the last equal
        number are the only ones, if there are any: the others have acted before, and parted
        nothing."""
        causes = [cause for cause in self.causes if self._suffices(cause, parting)]
        until = parting.equal_until
        if until is None:
            return causes
        return [cause for cause in causes if first_step(cause, parting.what) > until] or causes

    def _suffices(self, cause: Cause, parting: Parting) -> bool:
        if first_step(cause, parting.what) > parting.step:
            return False
        if SUFFICIENT[parting.what] & {*cause.effects}:
            return True
        may_round = "rounding" in cause.effects and parting.what in ROUNDED
        return may_round and not self.beyond_rounding(parting, cause)

    def beyond_rounding(self, parting: Parting, cause: Cause) -> Apart | None:
        """The first row that is farther apart than rounding since this cause explains; None for no
        such row. Norms and tensors are judged by the losses."""
        judged = parting
        if parting.what in ("gradient norm", "tensors"):
            judged = next((each for each in self.partings if each.what == "loss"), parting)
        if judged.what not in ("loss", "scores"):
            return None
        for apart in judged.apart:
            if apart.share > limit(self.precision, apart.step - cause.step + 1):
                return apart
        return None

    def is_certain(self, cause: Cause, parting: Parting) -> bool:
        """Whether a cause explains a parting of any size, not that of rounding alone."""
        return bool(SUFFICIENT[parting.what] & {*cause.effects})


def first_step(cause: Cause, what: What) -> int:
    """The first step whose number of this kind may differ by a cause. Scores of the untrained model
    are of step 0, if the cause is there from the first step on. Dropout changes scores by the
    updates alone."""
    effects = {*cause.effects}
    is_late = not effects & {"data", "order", "model", "rounding"}
    if what in BEFORE_UPDATES and is_late:
        return cause.step + 1
    is_scored = bool(effects & {"data", "model", "rounding", "scores"})
    is_untrained = what == "scores" and is_scored and cause.name not in MASKS
    return 0 if is_untrained and cause.step == 1 else cause.step


def limit(precision: str, steps: int) -> float:
    """The largest difference of a loss, as a share of it, that rounding explains after so many
    steps in `fp32` or `bf16`."""
    for until, share in LIMITS[precision]:
        if steps <= until:
            return share
    return LIMITS[precision][-1][1]
