"""The state: what it holds comes back from its file, and no text of a forger does more than name a field."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from golden_runs import GOLDEN
from runs import newest_checkpoint

from gpt2_ddp.state import GuardState, Losses, OptimizerState, State

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    2**62,
    10**30,
    1e300,
    float("inf"),
    float("nan"),
    "x\n",
    [],
    [[5]],
    {},
    {"a": 1},
)


def golden(run: str) -> State:
    return State.parse((newest_checkpoint(GOLDEN / run) / "state.json").read_bytes())


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within a JSON value, with each of its keys."""
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(part, dict | list):
            yield from places(part)


@pytest.mark.parametrize("run", ["gpt2_run", "regression_run"])
def test_an_odd_value_is_a_wrong_field_or_a_state_that_can_be_saved(run):
    fields, wrong = json.loads(golden(run).to_json()), []
    for part, key in places(fields):
        right = part[key]
        for part[key] in ODD:
            try:
                text = State.parse(json.dumps(fields)).to_json()
            except ValueError as error:
                wrong.append(str(error))
            else:
                assert State.parse(text).to_json() == text
        part[key] = right
    assert len(wrong) > 500
    assert all(line.startswith("has ") and len(line) < 150 and line.isprintable() for line in wrong)


@pytest.mark.parametrize(("text", "message"), [
    ("[1]", r"has state = \[1\]"), ('{"kind": "gpt2"}', "has no progress"), ("{", r"cannot be read \(Expecting"),
    ("[" * 10**5, r"cannot be read \(maximum recursion"), (b"\xff\xff", "cannot be read"),
    ('{"kind": ' + "[" * 500 + "]" * 500 + "}", "has "),
])  # fmt: skip
def test_text_that_is_no_state(text, message):
    with pytest.raises(ValueError, match=message):
        State.parse(text)


def test_a_state_comes_back_from_its_text():
    """A loss scaler's interval is an integer: torch takes no other."""
    scaler = {"scale": 65536.0, "growth_interval": 2000}
    guard = GuardState(judged=9, first_bad=8, losses=(8, 0.1, 1e-9), numbers=((1, -(2**40), 0, 1), (2, 2**52, 1, 0)))
    parts = {"guard": guard, "optimizer": OptimizerState(norms=(1, 0.3, 0.7), scaler=scaler)}
    state = golden("gpt2_run").model_copy(update=parts | {"losses": Losses(epoch=(0.1, 7, 8), skipped=3)})
    again = State.parse(state.to_json())
    assert again == state
    assert again.optimizer.scaler
    assert list(map(type, again.optimizer.scaler.values())) == [float, int]
