"""Rows of .jsonl files: which of them hold, and how a file that was damaged or cut is read."""

import json
import math

import pytest
from golden_runs import GOLDEN
from runs import all_rows

from gpt2_ddp.records import rows as run_files
from gpt2_ddp.records.metrics import describe
from gpt2_ddp.records.rows import (
    EVENTS,
    FIELDS,
    chain_of,
    field_of,
    finite,
    head,
    read_events,
    read_lines,
    repaired,
    split_chain,
    valid_rows,
)
from gpt2_ddp.state import FIRST_CHAIN, next_chain

LINES = """{"step": 1}
{"step": 2}
{"event": "checkpoint", "step": 2}
{"step": 3}
{"event": "rollback", "step": 1}
{"step": 2}
{"event": "rollback", "step": 2}
{"step": 3}
{"step": 4}
{"step": "x"}
""".splitlines(keepends=True)


@pytest.mark.parametrize(("count", "steps"), [(4, [1, 2, 3]), (5, [1]), (9, [1, 2, 3, 4])])
def test_rows_that_a_rollback_undid_and_events_do_not_stand(count, steps):
    assert [row["step"] for row in valid_rows(map(json.loads, LINES[:count]))] == steps


def test_numbers_that_json_has_not_become_null():
    assert finite({"loss": math.nan, "lr": -math.inf, "unit": "tokens"}) == {
        "loss": None,
        "lr": None,
        "unit": "tokens",
    }


def test_a_torn_line_has_no_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert [*read_lines(file)] == []
    file.write_text('{"step": 1}\nx\n{"step": 3}')
    found = [(line.row, line.torn) for line in read_lines(file)]
    assert found == [({"step": 1}, False), ({}, False), ({}, True)]


def test_a_line_without_an_end_is_read_in_parts(tmp_path, monkeypatch):
    """None of them is a row. What follows is, and whoever verifies the chain stops at the first."""
    monkeypatch.setattr(run_files, "LONGEST_LINE", 25)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"step": 1}\n' + bytes(60) + b'\n{"event": 1, "step": 2}\n{"step": 3')
    found = [(len(line.text), line.row, line.torn) for line in read_lines(file)]
    parts = [(25, {}, False), (25, {}, False), (10, {}, False)]
    assert found == [
        (11, {"step": 1}, False),
        *parts,
        (23, {"event": 1, "step": 2}, False),
        (10, {}, True),
    ]
    assert read_events(file) == ([{"event": 1, "step": 2}], 0)
    assert [*head(file, 2**40)][1:3] == [bytes(25)] * 2
    assert chain_of(file, 2**40) == ""


@pytest.mark.parametrize(
    ("step", "kept"), [(1, [1, 5]), (2, [1, 2, 3, 5, 6, 7]), (3, [*range(1, 9)])]
)
def test_the_rows_of_a_damaged_file_are_kept_by_their_steps(tmp_path, step, kept):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(LINES))
    assert b"".join(repaired(file, step)).decode() == "".join(LINES[n - 1] for n in kept)


def test_rows_with_another_chain_have_none(tmp_path):
    file = tmp_path / "rows.jsonl"
    chain = FIRST_CHAIN
    lines = []
    for text in ('{"step": 1}', '{"step": 2}'):
        chain = next_chain(chain, text)
        lines.append(f'{text[:-1]}, "chain": "{chain}"}}\n')
    file.write_text("".join(lines))
    assert chain_of(file, file.stat().st_size) == chain
    first = split_chain(lines[0].rstrip())[1]
    file.write_text("".join(lines).replace(first, FIRST_CHAIN))
    assert chain_of(file, file.stat().st_size) == "", (
        "though the rows and the last chain are the same"
    )


def test_rows_that_are_gone_are_not_kept(tmp_path, capsys):
    """The warning of a resume says what is left of the rows."""
    file = tmp_path / "metrics.jsonl"
    assert [*repaired(file, 8)] == []
    assert "is missing; the rows up to step 8 are lost" in capsys.readouterr().err
    file.write_text('{"step": 4}\n{"step": 9}\n')
    assert len([*repaired(file, 8)]) == 1
    errors = capsys.readouterr().err
    assert "rows up to step 8 are kept; a copy is in metrics.jsonl.damaged" in errors


@pytest.mark.parametrize("run", ["trained", "trained_job", "gpt2_run", "regression_run"])
def test_every_field_that_the_core_writes_is_declared(run, request):
    """An undeclared one would be a task's own number, which no replay compares. These tasks have
    none."""
    folder = GOLDEN / run if (GOLDEN / run).is_dir() else request.getfixturevalue(run)
    for row in all_rows(folder):
        if "event" in row:
            known = {"event", "step", "chain", "samples_sha256", *EVENTS[row["event"]]}
            names = row.keys() - known
        else:
            names = {name for name in row if field_of(name).kind == "own"}
        assert not names, f"add {names} to FIELDS or EVENTS in gpt2_ddp/records/rows.py"


@pytest.mark.parametrize("name", FIELDS)
def test_a_declared_field_is_shown_as_declared(name):
    field = FIELDS[name]
    row = {"step": 1, name: 0.5}
    assert field_of(name) == field
    assert field.kind != "own", "a name that is not declared is a task's own number"
    if name.endswith("_per_second"):
        assert describe(row) == ["0 tokens/s"]
    else:
        assert describe(row) == ([field.text.format(0.5)] if field.text else [])
    # a report shows a panel's unit in its title
    assert not field.unit or field.unit in field.panel


def test_a_name_that_is_not_declared_is_a_tasks_own_number():
    assert field_of("val_loss/web") == FIELDS["val_loss/NAME"]
    assert field_of("images_per_second").kind == "measured"
    of_events = ("device", "minutes")
    for name in ("rhymes", "rhymes/web", "web/val_loss", "val_rhymes", "hellaswag_acc", *of_events):
        assert field_of(name).kind == "own", name
