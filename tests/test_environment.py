"""What launchers leave in the environment: numbers, nothing, or nonsense."""

import re
from types import SimpleNamespace

import psutil
import pytest
from commands import expect_error, run_script

from gpt2_ddp.distributed.environment import (
    EXIT_CODES,
    elastic_nodes,
    exit_code,
    processes_here,
    world_size,
)
from gpt2_ddp.distributed.launch import processes_asked_for

NAMES = "WORLD_SIZE LOCAL_WORLD_SIZE RANK LOCAL_RANK MASTER_PORT SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE PET_NNODES"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in NAMES.split():
        monkeypatch.delenv(name, raising=False)


def test_exit_codes_tell_how_a_run_ended(monkeypatch, tmp_path):
    outcomes = ("completed", "stopped", "diverged")
    assert [exit_code(outcome) for outcome in outcomes] == [0, 75, 3]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(EXIT_CODES, str(tmp_path / "codes"))
    assert [exit_code(outcome) for outcome in outcomes] == [0, 0, 3], "a launcher would call 75 a crash"
    assert (tmp_path / "codes").read_text() == "0\n75\n3\n", "as without a launcher, for cloud/launch.sh"


@pytest.mark.parametrize("name", NAMES.split())
def test_what_is_no_number_is_named(monkeypatch, name):
    for value in ("", " ", "-1", "two", "1.5", "$N"):
        monkeypatch.setenv(name, value)
        expect_error(
            rf"^{name} = {re.escape(value)}: ", lambda: (processes_asked_for(), world_size(), processes_here())
        )


def test_a_rank_that_is_no_number_is_said_aloud(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    code, errors = run_script("check_cluster", [])
    assert (code, errors[:21]) == (2, "error: RANK = first: ")


ELASTIC = """
torchrun --nnodes 1:4 --max_restarts 3 train.py||3|1:4
torchrun --nnodes=2:4 train.py||3|2:4
torchrun train.py|1:4|3|1:4
torchrun --nnodes 1:4 train.py||0|
torchrun --nnodes 2 train.py|1:4|3|
torchrun --nnodes 2:2 train.py||3|
torchrun train.py||3|
"""
"""Command, PET_NNODES, restarts, and the nodes that it can have."""


@pytest.mark.parametrize("line", ELASTIC.strip().splitlines())
def test_an_elastic_launcher(monkeypatch, line):
    command, variable, restarts, nodes = line.split("|")
    launcher = SimpleNamespace(cmdline=command.split)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: launcher))
    monkeypatch.setenv("PET_NNODES", variable)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert elastic_nodes() == nodes
