"""How far a run is, in plain values: what a checkpoint's state says of it besides data, model and guard."""

import math
from typing import Any

from gpt2_ddp.checkpoint.run_files import finite
from gpt2_ddp.training.losses import Best
from gpt2_ddp.training.task import Scores


class Progress:
    """How far a run is, and whether it goes on.

    Attributes:
        steps: of the whole run; None where that is not known before it is built.
        patience: after how many evaluations in a row without a new lowest val_loss it ends; None: after none.
        step: optimizer steps taken.
        scores: the newest of each. best: the best evaluation.
        owed: what the present step is still to be followed by, as a stop came first; None for nothing. Its `row` awaits
            an evaluation; `sample` is one that was not shown.
        rollbacks: how often the run went back to an earlier step.
        branched_from: checkpoint of another run that this one began with (`lineage.branch_off`), or None.
        metrics_chain: of the last row that there was when the checkpoint was taken that the run stood at last.
    """

    steps: int | None = None

    def __init__(self, patience: int | None):
        self.patience = patience
        self.load_progress({})

    def load_progress(self, state: dict[str, Any]) -> None:
        """Takes over what a checkpoint's state says; what an older release did not write takes its default."""
        self.step: int = state.get("step", 0)
        self.pending: dict[str, Any] | None = state.get("owed")
        self.rollbacks: int = state.get("rollbacks", 0)
        self.run_id: str = state.get("run_id", "")
        self.branched_from: dict[str, Any] | None = state.get("branched_from")
        self.metrics_chain: str | None = state.get("metrics_chain")
        self.scores: Scores = dict(state.get("metrics", {}))
        self.best = Best(*(state.get("best_evaluation") or ()))
        self._scored = self.step if state.get("val_loss") is not None else -1

    def progress_dict(self) -> dict[str, Any]:
        """What `load_progress` takes over, but for `metrics_chain`, which the folder knows."""
        return {
            "step": self.step,
            "owed": self.pending,
            "rollbacks": self.rollbacks,
            "run_id": self.run_id,
            "branched_from": self.branched_from,
            "metrics": finite(self.scores),
            "best_evaluation": self.best if math.isfinite(self.best.val_loss) else None,
            "val_loss": self.scores.get("val_loss") if self._scored == self.step else None,
        }

    @property
    def first_step(self) -> int:
        """The step that the run begins after: 0, or where it branched off."""
        return self.branched_from["step"] if self.branched_from else 0

    @property
    def is_at_start(self) -> bool:
        """Whether it has not got any further than to begin, so that none of its rows stands."""
        return self.step == self.first_step and not (self.metrics_chain or self.scores)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done, with what follows them."""
        done = self.steps is not None and self.step >= self.steps
        return (done or bool(self.early_end)) and not self.pending

    @property
    def early_end(self) -> str:
        """Why no further step is taken although some may be left, in words; empty where they are."""
        patience, best = self.patience, self.best
        if patience is None or best.since < patience:
            return ""
        return f"eval.patience = {patience}: since step {best.step}, no val_loss was below its {best.val_loss:.4f}"

    @property
    def keeps_best(self) -> bool:
        """Whether the present step is the best, and is to be saved for that."""
        return self.patience is not None and self._scored == self.best.step == self.step

    def scored(self, scores: Scores) -> None:
        """Takes over an evaluation of the present step."""
        self.scores |= scores
        self.best = self.best.after(self.step, scores)
        self._scored = self.step
