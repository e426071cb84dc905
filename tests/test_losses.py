"""The mean loss of several steps, and what follows from the best evaluation: through stops, kills and rollbacks."""

import contextlib
import io
import json
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import RankError, run_ranks, start_ranks
from runs import rows as all_rows
from runs import training_config

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.run.checkpoint import list_checkpoints
from gpt2_ddp.run.losses import Best, LossSum
from gpt2_ddp.run.rows import standing

TIMINGS = ("tokens_per_second", "mfu", "data_share")
ALONE = SimpleNamespace(device=torch.device("cpu"), is_main_process=True, reduce=lambda tensor, reduction: tensor)


def rows(run: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in all_rows(run)]


def state(run: Path) -> dict:
    return json.loads((list_checkpoints(run / "checkpoints")[-1] / "state.json").read_text())


# Sums


def test_a_sum_is_exact_in_any_order_and_wherever_it_was_saved():
    rng = random.Random(0)
    losses = [torch.tensor(rng.lognormvariate(5, 1.5)) for _ in range(1000)]
    found = set()
    for _ in range(5):
        rng.shuffle(losses)
        sums = LossSum(ALONE)
        for number, loss in enumerate(losses):
            sums.add(loss, 3)
            if number == rng.randrange(1000):
                state, sums = sums.state(), LossSum(ALONE)
                sums.load_state(state)
        found.add(sums.take())
    assert found == {(math.fsum(loss.item() for loss in losses) / 3000, 0)}


def test_what_does_not_count_is_counted_and_not_summed():
    sums = LossSum(ALONE)
    for loss in (6.0, math.nan, math.inf, 3.0):
        sums.add(torch.tensor(loss), 2, torch.tensor(float(not math.isfinite(loss))))
    assert sums.take() == (9 / 4, 4)
    mean, left_out = sums.take()
    assert math.isnan(mean)
    assert left_out == 0


def train(config: TrainingConfig, folder: Path, dies_at: int = 0, sent: int = signal.SIGKILL) -> str:
    """Trains; step 6 has a loss that is not finite on the last rank, and step 7 a large one. Each rank writes down what
    its steps came to. On the last one, the `dies_at`-th step that this process takes begins with the signal `sent`."""
    from gpt2_ddp.run import loop
    from gpt2_ddp.tasks.pretraining import Pretraining

    step, loss_of, taken = loop.train_step, Pretraining.loss, []

    def loss(task, model, batch):
        value, number = loss_of(task, model, batch), taken[-1] if taken else 0
        is_last = task.accelerator.process_index == task.accelerator.num_processes - 1
        return value * {6: math.nan if is_last else 1.0, 7: 1e6}.get(number, 1.0)

    def train_step(run):
        rank, world = run.accelerator.process_index, run.accelerator.num_processes
        taken.append(run.step + 1)
        if rank == world - 1 and len(taken) == dies_at:
            os.kill(os.getpid(), sent)
        result = step(run)
        with (folder / f"{config.run_name}-{rank}.txt").open("a") as file:
            file.write(f"{run.step} {result.loss_sum.item()!r}\n")
        return result

    loop.train_step, Pretraining.loss = train_step, loss
    return loop.train(config, Pretraining).outcome


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.slow)])
def test_the_mean_loss_of_the_steps_since_the_last_row(corpus, tmp_path, world):
    """Rows come every 4 steps, checkpoints every 5: stopped and killed in between, the next row is the same."""
    changes = {"train.steps": 14, "tracking.log_every": 4, "optim.decay_steps": 20, "model.dropout": 0.1}
    whole, parts = (training_config(corpus, tmp_path, changes | {"run_name": name}) for name in ("whole", "parts"))
    assert run_ranks(train, world, whole, tmp_path) == ["completed"] * world

    assert run_ranks(train, world, parts, tmp_path, 3, signal.SIGTERM) == ["stopped"] * world
    started = start_ranks(train, world, parts, tmp_path, 5, signal.SIGKILL)
    started[-1][0].join(60)
    for process, _ in started:
        process.kill()
        process.join()
    assert run_ranks(train, world, parts, tmp_path) == ["completed"] * world
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")

    shares = {}  # of each rank and step
    for rank in range(world):
        for line in (tmp_path / f"whole-{rank}.txt").read_text().splitlines():
            shares[rank, int(line.split()[0])] = float(line.split()[1])
    own = 24 * 32 // world
    before, found = 0, {row["step"]: row for row in rows(tmp_path / "whole")[1:]}
    assert list(found) == [4, 8, 10, 12, 14]
    for number, row in found.items():
        since = [shares[rank, step] for rank in range(world) for step in range(before + 1, number + 1)]
        finite = [share for share in since if math.isfinite(share)]
        assert row["loss_mean"] == math.fsum(finite) / (own * len(finite))
        assert row.get("not_finite", 0) == own * (len(since) - len(finite)) == (own if number == 8 else 0)
        before = number
    assert found[8]["loss_mean"] > 1e5 * found[8]["loss"], "the spike between two rows leaves a trace"


@pytest.mark.slow
def test_a_rollback_takes_the_sums_back(corpus, tmp_path):
    """Steps 10 to 12 are bad: the run goes back to step 5, between two rows."""
    changes = {"guard": {"patience": 3}, "train.steps": 16, "tracking.log_every": 4, "eval.every": 99}
    run_ranks(roll_back_at_12, 1, training_config(corpus, tmp_path, changes))
    found = rows(tmp_path / "run")
    (event,) = [row for row in found if "event" in row]
    assert event["step"] == 5
    losses = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    back = max(index for index, (step, _) in enumerate(losses) if step == 6)
    stood = [(step, loss) for step, loss in losses[:back] if step <= 5] + losses[back:]
    assert [step for step, _ in stood] == list(range(1, 17))
    for row in standing(found)[1:]:
        since = [loss for step, loss in stood if row["step"] - 4 < step <= row["step"]]
        assert row["loss_mean"] == math.fsum(since) / (4 * 24 * 32)


def roll_back_at_12(config: TrainingConfig) -> None:
    from gpt2_ddp.run import loop
    from gpt2_ddp.tasks.pretraining import Pretraining

    step = loop.train_step

    def train_step(run):
        bad = 24 * 9 <= run.task.feed.position < 24 * 12
        handle = next(run.task.model.parameters()).register_hook(lambda g: g * (math.nan if bad else 1.0))
        result = step(run)
        handle.remove()
        with (Path(config.output_dir) / "losses").open("a") as file:
            file.write(json.dumps([run.step, result.loss_sum.item()]) + "\n")
        return result

    loop.train_step = train_step
    loop.train(config, Pretraining)


# The best evaluation


NONE = Best()


def best_after(*losses: float, tokens: int = 100, best: Best = NONE) -> Best:
    for step, loss in enumerate(losses, best.step + best.since + 1):
        best = best.after(step, {"val_loss": loss, "val_tokens": tokens})
    return best


def test_the_best_evaluation():
    assert best_after(3.0, 2.0, 2.0, 2.5) == Best(2, 2.0, 100, since=2)
    assert best_after(3.0, math.nan, math.inf) == Best(1, 3.0, 100, since=2)
    assert best_after(math.nan, 3.0) == Best(2, 3.0, 100)
    assert best_after(math.nan) == NONE
    assert NONE.after(1, {}) == NONE
    assert NONE.after(1, {"val_loss": 1.5, "val_accuracy": 0.5}) == Best(1, 1.5)
    assert best_after(9.0, tokens=50, best=best_after(1.0, 1.1)) == Best(3, 9.0, 50), "others do not compare"


SCRIPT = {0: 4.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 2.75, 12: 1.5}
"""Step -> val_loss."""
PATIENCE = {
    "train.steps": 14,
    "optim.decay_steps": 14,
    "eval": {"every": 2, "patience": 2},
    "checkpoint": {"every": 5, "keep_last": 1},
    "tracking": {"log_every": 1, "sample_every": 99},
}


def train_by_script(
    config: TrainingConfig, dies_after: int = -1, scores: Callable[[int], float] = SCRIPT.__getitem__
) -> tuple[str, str]:
    """Trains with the evaluations of a script; outcome, and what is said. Dies of SIGKILL after the save of step
    `dies_after`."""
    from gpt2_ddp.run import loop
    from gpt2_ddp.run.run import Run
    from gpt2_ddp.tasks.pretraining import Pretraining

    save, build = Run.save, Run.build

    def score(task, model, poll):
        return {"val_loss": scores(task.now.step), "val_tokens": 512, "val_bits_per_byte": 1.0}

    def dying_save(run, last):
        save(run, last)
        run.saved()
        if run.step == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def build_and_tell(run):
        run.task.now = run
        build(run)

    Pretraining.evaluate, Run.save, Run.build = score, dying_save, build_and_tell
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        outcome = loop.train(config, Pretraining).outcome
    return outcome, said.getvalue()


def test_patience_ends_a_run_early_and_keeps_the_best(corpus, tmp_path):
    config = training_config(corpus, tmp_path, PATIENCE)
    ((outcome, said),) = run_ranks(train_by_script, 1, config)
    assert outcome == "completed"
    reason = "eval.patience = 2: since step 4, no val_loss was below its 2.0000"
    assert f"run completed at step 8 ({reason})\n" in said
    assert f"its lowest val_loss, 2.0000, is that of {tmp_path / 'run/checkpoints/step-00000004'}\n" in said
    assert json.loads((tmp_path / "run/status.json").read_text()) == {"state": "completed", "step": 8, "reason": reason}
    assert [int(place.name[5:]) for place in list_checkpoints(tmp_path / "run/checkpoints")] == [4, 5, 8], (
        "5 to go back to"
    )
    assert state(tmp_path / "run")["best_evaluation"] == [4, 2.0, 512, 2]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(9))
    assert [row["step"] for row in all_rows(tmp_path / "run", "samples.jsonl")] == [8], "of the end"

    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*") if file.is_file()}
    ((outcome, said),) = run_ranks(train_by_script, 1, config)
    assert said == f"run is complete at step 8; {reason}; raise that to go on\n"
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*") if file.is_file()} == before

    more = training_config(corpus, tmp_path, PATIENCE | {"eval": {"every": 2, "patience": 3}})
    assert run_ranks(train_by_script, 1, more)[0][0] == "completed"
    assert rows(tmp_path / "run")[-1]["step"] == 10
    endless = training_config(corpus, tmp_path, PATIENCE | {"eval": {"every": 2, "patience": None}})
    ((outcome, said),) = run_ranks(train_by_script, 1, endless, -1, {**SCRIPT, 14: 1.75}.__getitem__)
    assert "run completed at step 14\n" in said
    assert "its lowest val_loss" not in said, "step 12 has no checkpoint"


@pytest.mark.parametrize("dies_after", [0, *[pytest.param(step, marks=pytest.mark.slow) for step in (4, 5)]])
def test_killed_it_ends_at_the_same_step(corpus, tmp_path, dies_after):
    config = training_config(corpus, tmp_path, PATIENCE)
    with pytest.raises(RankError, match="died"):
        run_ranks(train_by_script, 1, config, dies_after)
    ((outcome, _),) = run_ranks(train_by_script, 1, config)
    assert outcome == "completed"
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(9)), "that of step 0 once"
    assert state(tmp_path / "run")["best_evaluation"] == [4, 2.0, 512, 2]


def test_patience_needs_a_validation_split(corpus, tmp_path):
    from shutil import copytree

    from runs import edit_manifest

    copytree(corpus, tmp_path / "data")
    splits = json.loads((corpus / "manifest.json").read_text())["splits"]
    edit_manifest(tmp_path / "data", splits={"train": splits["train"]})
    with pytest.raises(RankError, match=r"eval.patience = 2: .*data has no validation split; set it to null"):
        run_ranks(train_by_script, 1, training_config(tmp_path / "data", tmp_path / "runs", PATIENCE))
    assert list((tmp_path / "runs").iterdir()) == []
