"""What was found in two runs, and which cause suffices for which parting.

A cause suffices if it begins no later than the parting, and may change what parted. Rounding alone
suffices up to `LIMITS`.
"""

from typing import NamedTuple

from gpt2_ddp.reports.conditions import Cause, Effect, Record, precision_of
from gpt2_ddp.reports.partings import Apart, Parting, What

TRAINING: frozenset[Effect] = frozenset({"data", "order", "model", "updates"})
SCORED: frozenset[Effect] = frozenset({*TRAINING, "scores"})
SUFFICIENT: dict[What, frozenset[Effect]] = {
    "order": frozenset({"order"}),
    "learning rate": frozenset({"updates"}),
    "loss": TRAINING,
    "gradient norm": TRAINING,
    "scores": SCORED,
    "tensors": SCORED,
}
"""The effects that suffice for a parting, however large it is."""
ROUNDED: tuple[What, ...] = ("loss", "gradient norm", "scores", "tensors")
"""Partings that rounding explains, up to a limit."""
LIMITS = {
    "fp32": ((40, 3e-5), (100, 3e-4), (200, 3e-3), (400, 1e-2)),
    "bf16": ((40, 5e-3), (100, 1e-2), (200, 2e-2), (400, 4e-2)),
}
"""Largest difference of a loss that rounding explains, as a share of the loss, up to a number of
steps. Up to 40 steps, about ten times what was measured (docs/explain.md); later ones are
estimates, as roundings grow at another rate in each model. The last one holds for all later
steps."""


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

    def sufficient(self, parting: Parting) -> list[Cause]:
        """The causes that suffice for a parting."""
        begun = [cause for cause in self.causes if cause.step <= max(parting.step, 1)]
        return [cause for cause in begun if self._suffices(cause, parting)]

    def _suffices(self, cause: Cause, parting: Parting) -> bool:
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


def limit(precision: str, steps: int) -> float:
    """The largest difference of a loss, as a share of it, that rounding explains after so many
    steps in `fp32` or `bf16`."""
    for until, share in LIMITS[precision]:
        if steps <= until:
            return share
    return LIMITS[precision][-1][1]
