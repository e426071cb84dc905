"""The state: what a file has, lacks or has wrong; and what is derived from it."""

import json
import math
from copy import deepcopy

import pytest
from golden_runs import GOLDEN
from runs import state_after, state_of

from gpt2_ddp.checkpoint.verify import parse_state
from gpt2_ddp.state import (
    FIRST_CHAIN,
    Best,
    FeedState,
    GPTState,
    GuardState,
    JobData,
    JobState,
    OptimizerState,
    Pending,
    Progress,
    State,
)

GPT = state_of(GOLDEN / "gpt2_run")
OWN = {
    "kind": "mine",
    "progress": {},
    "feed": {},
    "setup": {"epoch_size": 9},
    "task": {"letters": ["a"]},
}
MISSING = object()
ODD = (
    None,
    True,
    -1,
    1.5,
    2**62,
    10**30,
    1e300,
    math.inf,
    math.nan,
    "x\n",
    [],
    [[5]],
    {},
    {"a": 1},
)


def changed(state, name, value):
    """The text of a state with another value of the field of this dotted name, or without it."""
    place = state = deepcopy(state)
    *sections, last = name.split(".")
    for section in sections:
        place = place[section]
    place[last] = value
    if value is MISSING:
        del place[last]
    return json.dumps(state)


@pytest.mark.parametrize("run", ["gpt2_run", "regression_run"])
def test_a_file_of_a_run_comes_back_as_it_was(run):
    written = state_of(GOLDEN / run)
    state = parse_state(json.dumps(written))
    assert isinstance(state, GPTState if run == "gpt2_run" else JobState)
    again = json.loads(state.to_json())
    # fields that are newer than the file
    lacks = dict.fromkeys(again["task"].keys() - written["task"].keys())
    del written["guard"]["numbers"], again["guard"]["unjudged"], again["guard"]["climb"]
    del written["log"]["samples_sha256"], written["log"]["samples_bytes"]
    assert again == written | {"task": written["task"] | lacks}
    assert parse_state(state.to_json()) == state


def test_a_kind_of_its_own_keeps_its_task_and_what_lacks_takes_its_default():
    state = parse_state(json.dumps(OWN | {"old": 3}))
    assert state.task.model_dump() == {"letters": ["a"]}
    assert (state.step, state.feed.position, state.guard.first_bad, state.setup.processes) == (
        0,
        0,
        None,
        1,
    )
    assert (state.log.chain, state.log.bytes) == (FIRST_CHAIN, 0)
    assert State.of(**OWN) == state
    job = JobData(global_batch_size=4, lr=0.5, data_hash="")
    read = parse_state(state.model_copy(update={"task": job}).to_json())
    # a job of a new kind has fields that State does not know
    assert read.task.model_dump() == job.model_dump()


WRONG = [
    ("kind", MISSING, ""),
    ("progress", MISSING, ""),
    ("setup.epoch_size", MISSING, ""),
    ("task.vocab_size", MISSING, ""),
    ("task.tokenizer", "../x", ""),
    ("task.micro_batch", 0, ""),
    ("progress.step", -60, ""),
    ("progress.step", "5", ""),
    ("progress.step", True, ""),
    ("progress.step", 9223372036854775808, ""),
    ("feed.skipped_ranges", 5, ""),
    ("feed.skipped_ranges", [[3]], ".0.1"),
    ("log.bytes", -1, ""),
    ("progress.pending", None, ""),
    ("guard.losses", ["x", 0, 0], ".0"),
    ("feed", {"position": "yyyyyyyyyyyyyyyy"}, ".position"),
    ("task", {}, ".tokenizer"),
]
"""A field, its value, and what follows its name in the message."""


@pytest.mark.parametrize(("name", "value", "inner"), WRONG)
def test_the_first_wrong_or_missing_field_is_named(name, value, inner):
    with pytest.raises(ValueError, match=rf"^{name}{inner}: "):
        parse_state(changed(GPT, name, value))


def places(value):
    """Each container within a JSON value, with each of its keys."""
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(part, dict | list):
            yield from places(part)


@pytest.mark.parametrize("run", ["gpt2_run", "regression_run"])
def test_an_odd_value_is_a_wrong_field_or_a_state_that_can_be_saved(run):
    fields = state_of(GOLDEN / run)
    wrong = []
    for part, key in places(fields):
        right = part[key]
        for part[key] in ODD:
            try:
                text = parse_state(json.dumps(fields)).to_json()
            except ValueError as error:
                wrong.append(str(error))
            else:
                assert parse_state(text).to_json() == text
        part[key] = right
    assert len(wrong) > 500
    assert all(": " in line and len(line) < 150 and line.isprintable() for line in wrong)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", "[" * 9999, b"\xff", '{"kind": "gpt2", "kind']
)
def test_what_is_no_state_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"^(?!.*Traceback)."):
        parse_state(text)


def test_infinity_comes_back_where_json_has_null():
    text = state_after(3, math.nan).to_json()
    assert json.loads(text)["progress"]["best"]["val_loss"] is None
    read = parse_state(text).progress
    assert (read.best, read.best.val_loss, read.val_loss) == (Best(), math.inf, None)


def test_what_is_derived_from_the_state():
    """Pending work is kept but for the save that keeps
    it; items of skipped ranges are not consumed."""
    state = state_after(3, pending=Pending(row={"step": 3}, sample=True, save=True))
    assert parse_state(state.to_json()).progress.pending == Pending(row={"step": 3}, sample=True)
    assert not any((Pending(), Pending(save=True)))
    assert all((Pending(evaluate=True), Pending(sample=True), Pending(row={"step": 3})))
    assert FeedState(position=50, skipped_ranges=[(10, 20), (45, 70), (80, 90)]).consumed == 35


def test_the_record_has_what_rows_have():
    record = state_after(3, 2.5, rollbacks=1).record
    assert json.loads(json.dumps(record)) == record
    wanted = {
        "kind": "regression",
        "step": 3,
        "val_loss": 2.5,
        "rollbacks": 1,
        "position": 0,
        "lr": 0.1,
    }
    assert wanted.items() < record.items()
    assert "classes" not in record


def test_numbers_come_back_as_they_were():
    """A loss scaler's interval is an integer: torch takes no other."""
    guard = GuardState(losses=(8, 0.1, 1e-9), unjudged=[(1, math.inf, False), (2, 2.5, True)])
    optimizer = OptimizerState(scaler={"scale": 65536.0, "growth_interval": 2000})
    state = parse_state(json.dumps(GPT)).model_copy(update={"guard": guard, "optimizer": optimizer})
    again = parse_state(state.to_json())
    assert again == state
    assert type(again.optimizer.scaler["growth_interval"]) is int


def test_a_run_without_scores_has_evaluated_before_its_first_step_once():
    """Without a validation split, evaluations have no scores."""
    assert Progress().is_new
    assert not Progress(scored_at=0).is_new


def test_the_length_of_a_run_stays_when_a_checkpoint_is_loaded():
    """It follows from the configuration, so no checkpoint has it."""
    progress = Progress(step=8, steps=20)
    assert "steps" not in progress.model_dump()
    progress.load_state_dict(Progress(step=4, steps=16))
    assert (progress.step, progress.steps) == (4, 20)
