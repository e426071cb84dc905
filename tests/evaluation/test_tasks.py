"""Evaluation tasks in evaluate.py and during a training."""

import json
import re
import shutil

import numpy as np
import pytest
from close import assert_close
from golden_runs import CORPUS, GOLDEN
from hellaswag import items_file, made_items, write
from ranks import in_turn, run_ranks
from runs import rows, said, train, training_config

from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.tools import EvaluateConfig, VerifyConfig
from gpt2_ddp.evaluation.items import read_items
from gpt2_ddp.files import read_json
from gpt2_ddp.reports.verify import verify_run

SETTINGS = {"device": "cpu", "mixed_precision": "no", "data": [str(CORPUS)]}


def evaluate(configs):
    """What evaluate.py says on this rank, on stderr, or its refusal."""
    from gpt2_ddp.errors import UserError
    from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint

    found = []
    for config in configs:
        try:
            code, _, errors = said(evaluate_checkpoint, EvaluateConfig(**config))
            assert code == 0
        except UserError as error:
            errors = str(error)
        found.append(errors)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A recorded run folder."""
    return shutil.copytree(GOLDEN / "gpt2_run", tmp_path_factory.mktemp("runs") / "gpt2_run")


def test_evaluate_scores_tasks_keeps_the_items_and_refuses(run, tmp_path):
    """At first on two ranks; the run's model sees 16 tokens."""
    short = [
        {"context": row["ctx"], "choices": ["a", "b c", "d"], "label": 2} for row in made_items(7)
    ]
    items = write(tmp_path / "my items.jsonl", short)
    other = items_file(tmp_path)
    broken = write(tmp_path / "broken.jsonl", [*short, {**short[0], "label": 3}])
    longer = write(tmp_path / "longer.jsonl", made_items(9))
    base = SETTINGS | {"checkpoint": str(run)}
    configs = [
        base | {"tasks": [other, str(items)]},
        base | {"tasks": str(items), "task_items": 3, "output": str(tmp_path / "other")},
        base | {"tasks": [other, str(broken)]},
        base | {"tasks": str(longer)},
        base | {"tasks": other, "output": str(items)},
        {**SETTINGS, "data": [], "checkpoint": str(GOLDEN / "regression_run"), "tasks": other},
    ]
    found_by_two, elsewhere = run_ranks(evaluate, 2, configs[:1])
    assert elsewhere == [""]
    results = found_by_two + run_ranks(evaluate, 1, configs[1:])[0]
    found = run / "evaluations/step-00000010"
    told = {name: read_json(found / f"{name}.json") for name in ("items", "my_items")}
    for name, summary in told.items():
        kept = read_items(found / f"{name}.jsonl")
        scores = [json.loads(line) for line in (found / f"{name}.jsonl").read_text().splitlines()]
        assert len(kept) == summary["items"]
        assert all(len(row["log_likelihoods"]) == len(row["choices"]) for row in scores)
        assert_close(
            summary["acc"],
            np.mean([np.argmax(row["log_likelihoods"]) == row["label"] for row in scores]),
        )
        assert summary["step"] == 10
    assert_close([told[name]["chance"] for name in told], [1 / 2, 1 / 3])
    assert sorted(file.name for file in (tmp_path / "other").iterdir()) == [
        "my_items-3.json",
        "my_items-3.jsonl",
    ]
    assert read_items(tmp_path / "other/my_items-3.jsonl") == read_items(items)[:6:2]
    assert not (found / "broken.json").exists()
    expected = ("broken.jsonl: line 8", "longer.jsonl: choice", f"output = {items}", "tasks = ")
    for refusal, words in zip(results[2:], expected, strict=True):
        assert words in refusal


def test_tasks_are_scored_where_the_loss_is(corpus, tmp_path):
    """The last row's scores are those that evaluate.py gives
    the last checkpoint; a file that changed is told of."""
    items = tmp_path / "other.jsonl"
    write(
        items,
        [
            {"context": f"def {word}", "choices": ["(self):", "import"], "label": 0}
            for word in "abcde"
        ],
    )
    both = [items_file(tmp_path), str(items)]
    tasks = {"eval.tasks": both, "train.micro_batch_size": 5}
    run = tmp_path / "run"
    told = tmp_path / "run/evaluations/step-00000010"
    own = {"checkpoint": str(run), "tasks": both, "batch_size": 5}
    configs = [
        training_config(corpus, tmp_path, tasks | {"train.steps": steps}) for steps in (10, 11, 12)
    ]
    calls = [
        (train, configs[0]),
        (evaluate, [SETTINGS | own | {"data": []}]),
        (items.write_text, items.read_text().replace("def a", "class a")),
        (said, train, configs[1]),
        (items.write_text, "{"),
        (train, configs[2]),
        (said, verify_run, VerifyConfig(run=str(run), replay="10:11")),
    ]
    (_, _, _, (_, _, others), _, refused, (code, verdict, _)) = run_ranks(in_turn, 1, *calls)[0]
    scored = {row["step"]: row for row in rows(run) if "val_loss" in row}
    names = {f"{name}_{metric}" for name in ("items", "other") for metric in ("acc", "acc_norm")}
    assert {step: names & {*row} for step, row in scored.items()} == {
        0: names,
        10: names,
        11: names,
    }
    state = find_checkpoint(run / "checkpoints/step-00000010").state
    for name in ("items", "other"):
        own = read_json(told / f"{name}.json")
        assert [scored[10][f"{name}_{metric}"] for metric in ("acc", "acc_norm")] == [
            own["acc"],
            own["acc_norm"],
        ]
        assert state.task.tasks[name] == own["items_sha256"]
    assert "the items of other" in others
    assert "the items of items" not in others
    assert re.match("eval.tasks = .*other.jsonl: line 1: ", refused)
    assert max(row["step"] for row in rows(run)) == 11
    assert code == 0, "training does not depend on the items"
    assert "bit for bit" in verdict
