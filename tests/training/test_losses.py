"""The mean loss of several steps, and what follows from the best evaluation."""

import math
import random
from unittest.mock import patch

import torch
from commands import snapshot
from ranks import in_turn, run_ranks
from runs import (
    events,
    rows,
    said,
    saved_steps,
    state_of,
    status,
    train,
    train_with_faults,
    untimed,
)

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.records.rows import valid_rows
from gpt2_ddp.state import Best, Losses, LossSum, Unjudged
from gpt2_ddp.training.guard import Guard, StepTensors

# Sums


def numbers(skipped, norm, *losses):
    """What a guard takes of a step; the second loss is `other`."""
    skipped, norm, *sums = (torch.tensor(float(value)) for value in (skipped, norm, *losses))
    return StepTensors(skipped, skipped, norm, dict(zip(("loss", "other"), sums, strict=False)))


def test_a_sum_is_exact_in_any_order_and_wherever_it_was_saved():
    rng = random.Random(0)
    parts = [torch.tensor(rng.lognormvariate(5, 1.5)).item() for _ in range(1000)]
    found = set()
    for _ in range(5):
        rng.shuffle(parts)
        guard = Guard(GuardConfig())
        for number, part in enumerate(parts):
            guard.add(number, 3, numbers(False, 0.1, part))
            if number == rng.randrange(1000):
                guard.flush()
                losses = guard.losses.model_dump_json()
                guard = Guard(GuardConfig())
                guard.losses.load_state_dict(Losses.model_validate_json(losses, strict=True))
        guard.flush()
        assert guard.losses.epoch == guard.losses.since_row
        found.add(guard.losses.epoch.mean)
    assert found == {math.fsum(parts) / 3000}
    assert math.isnan(LossSum().mean)


def sums_of_a_rank():
    """Of three steps: the second is not finite on rank
    1, the third is skipped. What is known after each."""
    rank = build_accelerator("cpu", "no").process_index
    guard = Guard(GuardConfig())
    known = []
    for step, loss in enumerate((6.0, math.nan if rank else 4.0, 3.0), 1):
        guard.add(step, 2, numbers(step == 3, 0.1, loss, 1))
        known.append(guard.newest)
    known.append(guard.flush())
    return known, guard.losses, guard.state_dict().unjudged


def test_the_numbers_of_steps_over_all_ranks():
    known = run_ranks(sums_of_a_rank, 2)
    assert str(known[0]) == str(known[1])
    (none, later, first, last), losses, unjudged = known[0]
    assert (none, later) == (None, None), "two steps late"
    norm = torch.tensor(0.1).item()
    assert (first, last) == ((1, norm, 3, {"other": 2}), (3, norm, 1.5, {"other": 2}))
    assert losses == Losses(epoch=(16, 6, 12), since_row=(22, 10, 12), skipped=1)
    assert str(unjudged[1]) == str(Unjudged(2, math.nan, bad=False))
    assert unjudged[::2] == [(1, 3, False), (3, 1.5, True)]


def train_and_record(config):
    """Trains. Step 3 has a loss that is not finite on the last rank,
    step 4 a large one, and steps 10 to 12 bad gradients. Returns this
    rank's sum of losses of each step; the last one of a step stands."""
    from gpt2_ddp.tasks.pretraining import Pretraining
    from gpt2_ddp.training import loop

    step = loop.train_step
    loss_of = Pretraining.loss
    now = [0]
    shares = {}

    def loss(task, model, batch):
        on_last = math.nan if task.accelerator.process_index == 1 else 1.0
        return loss_of(task, model, batch) * {3: on_last, 4: 1e6}.get(now[0], 1.0)

    def train_step(trainer):
        now[0] = trainer.run.step + 1
        result = step(trainer)
        shares[trainer.run.step] = result.losses["loss"].item()
        return result

    loop.train_step = train_step
    Pretraining.loss = loss
    assert train_with_faults(config, (12 * 9, 12 * 12)) == "completed"
    return shares


def test_the_mean_loss_of_the_steps_since_the_last_row(tiny_config, tmp_path):
    """Rows come every 4 steps and at evaluations; a rollback
    to step 5, between two rows, takes the sums back."""
    changes = {
        "guard": {"patience": 3},
        "train.steps": 16,
        "tracking.log_every": 4,
        "eval.every": 7,
    }
    config = tiny_config(changes)
    ranks = run_ranks(train_and_record, 2, config)
    (event,) = events(tmp_path / "runs/run", "rollback")
    assert event["step"] == 5
    own = 12 * 32 // 2
    before = 0
    found = valid_rows(untimed(tmp_path / "runs/run"))[1:]
    assert [row["step"] for row in found] == [4, 7, 8, 12, 14, 16]
    for row in found:
        since = [shares[step] for shares in ranks for step in range(before + 1, row["step"] + 1)]
        finite = [share for share in since if math.isfinite(share)]
        assert row["loss_mean"] == math.fsum(finite) / (own * len(finite))
        lost = own * (len(since) - len(finite))
        assert row.get("not_finite", 0) == lost == (own if row["step"] == 4 else 0)
        before = row["step"]
    # the spike between two rows leaves a trace
    assert found[0]["loss_mean"] > 1e4 * found[1]["loss_mean"]


# The best evaluation


NONE = Best()


def best_after(*losses, tokens=100, best=NONE):
    for step, loss in enumerate(losses, best.step + best.since + 1):
        best = best.after(step, {"val_loss": loss, "val_tokens": tokens})
    return best


def test_the_best_evaluation():
    assert best_after(3.0, 2.0, 2.0, 2.5) == Best(step=2, val_loss=2.0, tokens=100, since=2)
    assert best_after(3.0, math.nan, math.inf) == Best(step=1, val_loss=3.0, tokens=100, since=2)
    assert best_after(math.nan, 3.0) == Best(step=2, val_loss=3.0, tokens=100)
    assert best_after(math.nan) == NONE
    assert NONE.after(1, {}) == NONE
    assert NONE.after(1, {"val_loss": 1.5, "val_accuracy": 0.5}) == Best(step=1, val_loss=1.5)
    others = best_after(9.0, tokens=50, best=best_after(1.0, 1.1))
    assert others == Best(step=3, val_loss=9.0, tokens=50)  # others do not compare


SCRIPT = {0: 4.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 2.75, 12: 1.5}
"""Step -> val_loss."""
PATIENCE = {
    "eval.every": 2,
    "checkpoint.keep_last": 1,
    "train.steps": 14,
    "tracking.sample_every": 99,
}


def train_by_script(config, scores=SCRIPT):
    """Trains with the evaluations of a script; the outcome."""
    from gpt2_ddp.training.start import Trainer

    evaluate = Trainer.evaluate

    def score(trainer, poll):
        run = trainer.run
        run.task.evaluate = lambda *_: {
            "val_loss": scores[run.step],
            "val_tokens": 512,
            "val_bits_per_byte": 1.0,
        }
        return evaluate(trainer, poll)

    with patch.object(Trainer, "evaluate", score):
        return train(config)


def test_patience_ends_a_run_early_and_keeps_the_best(tiny_config, tmp_path):
    config, more, endless = (tiny_config(PATIENCE | {"eval.patience": n}) for n in (2, 3, None))
    run = tmp_path / "runs/run"
    ((outcome, *words),) = run_ranks(said, 1, train_by_script, config)
    assert outcome == "completed"
    assert f"lowest val_loss: 2.0000, in {run / 'checkpoints/step-00000004'}\n" in "".join(words)
    reason = "eval.patience = 2: no val_loss below 2.0000 since step 4"
    assert status(run) == {"state": "completed", "step": 8, "reason": reason}
    assert saved_steps(run) == [4, 8]  # the best and the newest
    assert state_of(run)["progress"]["best"] == {
        "step": 4,
        "val_loss": 2.0,
        "tokens": 512,
        "since": 2,
    }
    assert [row["step"] for row in rows(run)] == list(range(9))
    assert [row["step"] for row in events(run, "sample")] == [8]  # of the end

    calls = [(snapshot, run), (train_by_script, config), (snapshot, run), (train_by_script, more)]
    calls += [(rows, run), (said, train_by_script, endless, {**SCRIPT, 14: 1.75})]
    before, _, after, again, further, (_, *words) = run_ranks(in_turn, 1, *calls)[0]
    assert before == after
    assert (again, further[-1]["step"], rows(run)[-1]["step"]) == ("completed", 10, 14)
    assert "lowest val_loss" not in "".join(words)  # step 12 has no checkpoint
