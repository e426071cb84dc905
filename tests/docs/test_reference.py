"""The reference pages: configuration.md and commands.md
equal what the code gives; files.md names every key."""

import re
import signal
from dataclasses import fields
from typing import get_args

import pytest
from commands import ROOT, WITH_FLAGS
from golden_runs import GOLDEN
from pages import load_docs
from runs import all_rows

from gpt2_ddp.config.base import leaves
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, Shard
from gpt2_ddp.data.shards import MAGIC_AND_VERSION
from gpt2_ddp.distributed.environment import DIVERGED, STOPPED
from gpt2_ddp.distributed.process import Process
from gpt2_ddp.distributed.signals import INTERRUPTED
from gpt2_ddp.evaluation.items import METRICS
from gpt2_ddp.records.metrics import Sample
from gpt2_ddp.records.rows import EVENTS, FIELDS
from gpt2_ddp.state import GPTData, JobData, Section, State

FILES = (ROOT / "docs/files.md").read_text()


REFERENCE = load_docs("reference")


@pytest.mark.parametrize("page", REFERENCE.PAGES)
def test_a_generated_page_is_what_the_code_gives(page):
    written = (ROOT / "docs" / page).read_text()
    assert written == REFERENCE.whole(page), "run `python docs/reference.py`, and commit the page"


def test_every_script_is_in_commands_and_in_its_first_table():
    headings = re.findall(r"^### (\w+)$", REFERENCE.commands(), re.MULTILINE)
    linked = re.findall(r"\[(\w+)\]\(#", REFERENCE.by_hand("commands.md"))
    assert sorted(headings) == sorted(linked) == [file.stem for file in WITH_FLAGS]


def test_the_part_written_by_hand_names_fields_that_exist_and_those_that_help_lists():
    named = {*re.findall(r"--([\w.]+)", REFERENCE.by_hand("configuration.md"))} - {
        "config",
        "print_config",
        "help",
    }
    assert {*TrainingConfig.first} <= named <= {*dict(leaves(TrainingConfig))}


def section(heading):
    """The text of files.md below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", FILES, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def first_column(text):
    """The keys in the first column of the tables of a text."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def keys_of(section):
    """The keys that a section of the state has in a file,
    with those of the sections in it; none for other types."""
    if not (isinstance(section, type) and issubclass(section, Section)):
        return set()
    kept = {
        name: field.annotation for name, field in section.model_fields.items() if not field.exclude
    }
    return {*kept}.union(
        *(keys_of(kind) for one in kept.values() for kind in (one, *get_args(one)))
    )


ROWS = [row for run in ("gpt2_run", "regression_run") for row in all_rows(GOLDEN / run)]


def test_files_names_the_keys_of_recorded_rows_and_of_the_terminal():
    named = first_column(section("Rows of steps"))
    recorded = {key for row in ROWS if "event" not in row for key in row}
    tasks = {f"TASK_{metric}" for metric in METRICS}
    of_steps = FIELDS.keys() - {"event"}
    assert recorded | tasks | of_steps <= named


def test_files_names_the_events_and_their_keys():
    text = section("Events")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    events = {
        line.split("`")[1]: {*re.findall(r"`(\w+)`", line)}
        for line in lines
        if line.count("|") == 4
    }
    task_keys = {*re.findall(r"`(\w+)`", text.partition("Keys of the task")[2])}
    assert events.keys() == EVENTS.keys()
    for event, names in EVENTS.items():
        assert {*names} - {"step"} <= events[event] | task_keys, event
    for row in ROWS:
        if "event" in row:
            assert row.keys() <= events[row["event"]] | task_keys | {
                "event",
                "step",
                "samples_sha256",
            }, row["event"]
    assert task_keys - {"start"} == keys_of(GPTData) | keys_of(JobData)
    assert EVENTS["sample"] == Sample._fields


def test_files_names_every_key_of_state_json_and_no_other():
    lines = section("Checkpoints").partition("Keys of `state.json`")[2].splitlines()
    named = {keys[0]: {*keys} for line in lines if (keys := re.findall(r"`(\w+)`", line))}
    assert named.keys() == State.model_fields.keys()
    elsewhere = {"gpt2", "null", "false", "train_loss", "loss_mean"}
    for name, field in State.model_fields.items():
        # a TaskState has no keys of its own: those of tasks are in `Events`
        own = keys_of(field.annotation) | {name}
        assert named[name] - elsewhere | {name} == own, name


def test_files_names_the_keys_of_the_other_files():
    assert {"state", "step", "reason", *Process._fields} <= first_column(section("status.json"))
    manifest = section("Prepared data").partition("Keys of `manifest.json`")[2]
    assert {field.name for field in fields(Manifest)} | {"sha256"} <= first_column(manifest)
    assert {f"`{field.name}`" for field in fields(Shard)} <= {*re.findall(r"`\w+`", manifest)}
    for magic, version in MAGIC_AND_VERSION.values():
        assert re.search(rf"\| {magic} \| {version}\b", manifest)


def test_files_names_the_exit_codes():
    codes = {DIVERGED, STOPPED, INTERRUPTED, 128 + signal.SIGPIPE, 0, 1, 2}
    assert {
        int(code) for code in re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)
    } == codes
