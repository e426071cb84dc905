"""The progress of a run, in plain values: its step, its scores and best evaluation, and what is pending."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from gpt2_ddp.checkpoint.run_files import finite

Scores = dict[str, float | int]
"""Results of an evaluation, by their names in metrics.jsonl. The lowest `val_loss` decides which checkpoint is best."""

Outcome = Literal["completed", "stopped", "diverged"]
"""How a run ended: `stopped` on request, with a checkpoint; `diverged` by too many bad steps, or useless weights."""


@dataclass
class Pending:
    """The work that follows a step. If a stop interrupts it, the checkpoint keeps it, and a resumed run finishes it."""

    row: dict[str, Any] = field(default_factory=dict)  # empty once it is written
    evaluate: bool = False  # the scores join the row
    sample: bool = False

    def __bool__(self) -> bool:
        return bool(self.row) or self.evaluate or self.sample


class Best(NamedTuple):
    """The evaluation with the lowest val_loss."""

    step: int = 0
    val_loss: float = math.inf
    tokens: float | None = None  # scored; another number starts a new comparison: losses over other tokens differ
    since: int = 0  # number of evaluations after it

    def after(self, step: int, scores: Scores) -> "Best":
        """The best evaluation once `scores` are known. Scores without a val_loss change nothing."""
        loss, tokens = scores.get("val_loss", math.nan), scores.get("val_tokens")
        if math.isfinite(loss) and (loss < self.val_loss or tokens != self.tokens):
            return Best(step, loss, tokens)
        return self._replace(since=self.since + 1) if "val_loss" in scores and math.isfinite(self.val_loss) else self


class Progress:
    """State of a run: steps taken, scores, pending work, completion. `patience`: evaluations in a row without a new
    lowest val_loss that end the run; None: no limit.

    Attributes:
        steps: number of steps of the whole run; None until known. step: number of steps taken.
        branched_from: reference to the parent run's checkpoint (`training.branch`); None without a parent.
        metrics_chain: chain of the last row before the newest loaded checkpoint.
        scores: the newest value of each name. best: the best evaluation.
    """

    steps: int | None = None

    def __init__(self, patience: int | None):
        self.patience = patience
        Progress.load_state_dict(self, {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned. A missing field takes its default."""
        self.step: int = state.get("step", 0)
        self.pending = Pending(**(state.get("owed") or {}))
        self.rollbacks: int = state.get("rollbacks", 0)
        self.run_id: str = state.get("run_id", "")
        self.branched_from: dict[str, Any] | None = state.get("branched_from")
        self.metrics_chain: str | None = state.get("metrics_chain")
        self.scores: Scores = dict(state.get("metrics", {}))
        self.best = Best(*(state.get("best_evaluation") or ()))
        self._scored_at = self.step if state.get("val_loss") is not None else -1

    def state_dict(self) -> dict[str, Any]:
        """The fields of a checkpoint's state.json that `load_state_dict` reads, without `metrics_chain`."""
        return {
            "step": self.step,
            "owed": asdict(self.pending) if self.pending else None,
            "rollbacks": self.rollbacks,
            "run_id": self.run_id,
            "branched_from": self.branched_from,
            "metrics": finite(self.scores),
            "best_evaluation": self.best if math.isfinite(self.best.val_loss) else None,
            "val_loss": self.scores.get("val_loss") if self._scored_at == self.step else None,
        }

    @property
    def first_step(self) -> int:
        """The step that the run starts after: 0, or the step where it branched off."""
        return self.branched_from["step"] if self.branched_from else 0

    @property
    def is_new(self) -> bool:
        """Whether the run still lacks the evaluation before its first step."""
        return self.step == self.first_step and not self.pending and not self.scores

    @property
    def is_complete(self) -> bool:
        """Whether all steps are taken and nothing is pending."""
        done = self.steps is not None and self.step >= self.steps
        return (done or bool(self.early_end)) and not self.pending

    @property
    def early_end(self) -> str:
        """Reason to end the run before its last step; empty without one."""
        patience, best = self.patience, self.best
        if patience is None or best.since < patience:
            return ""
        return f"eval.patience = {patience}: no val_loss below {best.val_loss:.4f} since step {best.step}"

    @property
    def is_new_best(self) -> bool:
        """Whether the current step has the best evaluation and `eval.patience` requires its checkpoint."""
        return self.patience is not None and self._scored_at == self.best.step == self.step

    def add_scores(self, scores: Scores) -> None:
        """Records an evaluation of the current step."""
        self.scores |= scores
        self.best = self.best.after(self.step, scores)
        self._scored_at = self.step
