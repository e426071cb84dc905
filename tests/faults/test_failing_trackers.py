"""Trackers and samples that fail: one warning each, and the training is the same."""

import contextlib
import io

import pytest
from ranks import run_ranks
from runs import rows, train, training_config

from gpt2_ddp.config.training import TrainingConfig


def train_with_a_failing(config: TrainingConfig, names: tuple[str, ...]) -> tuple[str, str]:
    """Trains while methods of the tracker raise, or samples; the outcome and what it says on stderr."""
    from gpt2_ddp.checkpoint.trackers import TensorBoard
    from gpt2_ddp.tasks.pretraining import Pretraining

    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("the server\nis gone")

    for name in names:
        setattr(Pretraining if name == "sample" else TensorBoard, name, fail)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return train(config), said.getvalue()


@pytest.mark.parametrize("names", [("log", "finish", "sample"), ("__init__",)])
def test_what_fails_is_told_once(corpus, tmp_path, names):
    changes = {"tracking.log_with": "tensorboard", "train.steps": 6, "tracking.sample_every": 2, "eval.every": 3}
    config = training_config(corpus, tmp_path, changes)
    ((outcome, said),) = run_ranks(train_with_a_failing, 1, config, names)
    assert outcome == "completed"
    warnings = [line for line in said.splitlines() if line.startswith("warning:")]
    whats = {"sample" if name == "sample" else "tensorboard tracker" for name in names}
    assert len(warnings) == len(whats), said
    for what in whats:
        assert any(f"the {what} failed (ConnectionError: the server is gone)" in line for line in warnings)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(7))
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()
