"""What launchers leave in the environment: numbers, nothing, or nonsense."""

import re
from types import SimpleNamespace

import psutil
import pytest
from commands import expect_error, run_script

from gpt2_ddp.distributed.environment import (
    EXIT_CODES,
    NUMBERS,
    check_launcher,
    elastic_nodes,
    exit_code,
    processes_here,
    world_size,
)
from gpt2_ddp.distributed.launch import processes_asked_for

NAMES = (
    "WORLD_SIZE LOCAL_WORLD_SIZE RANK LOCAL_RANK MASTER_PORT SLURM_STEP_NUM_TASKS "
    "OMPI_COMM_WORLD_SIZE PET_NNODES"
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in {*NAMES.split(), *NUMBERS, "MASTER_ADDR"}:
        monkeypatch.delenv(name, raising=False)


LEFT_OVER = [
    ("RANK=1", "RANK = 1", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ("RANK=0", "RANK = 0", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ("WORLD_SIZE=2", "WORLD_SIZE = 2", "RANK, MASTER_ADDR, MASTER_PORT"),
    ("LOCAL_RANK=0", "LOCAL_RANK = 0", "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ("LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE = 2", "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    (
        "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3",
        "WORLD_SIZE, MASTER_ADDR, MASTER_PORT = 3, 10.0.0.1, 29500",
        "RANK",
    ),
    (
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT=1",
        "RANK, WORLD_SIZE, MASTER_PORT = 1, 2, 1",
        "MASTER_ADDR",
    ),
    (
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0",
        "RANK, WORLD_SIZE, LOCAL_RANK = 0, 1, 0",
        "MASTER_ADDR, MASTER_PORT",
    ),
    ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK = 2", "WORLD_SIZE is 2"),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT = 65536", "is not a port"),
    ("RANK=0 WORLD_SIZE=2:3 MASTER_ADDR=a MASTER_PORT=1", "WORLD_SIZE = 2:3", "unset WORLD_SIZE"),
    ("PMI_SIZE=2", "PMI_SIZE = 2", "unset PMI_SIZE"),
    ("PMI_SIZE=two", "PMI_SIZE = two", "unset PMI_SIZE"),
    (
        "MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_RANK=1",
        "MV2_COMM_WORLD_SIZE = 4",
        "unset MV2_COMM_WORLD_SIZE",
    ),
    (
        "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
        "OMPI_COMM_WORLD_SIZE = 2",
        "unset OMPI_COMM_WORLD_SIZE",
    ),
    (
        "OMPI_COMM_WORLD_LOCAL_RANK=",
        "OMPI_COMM_WORLD_LOCAL_RANK = ",
        "unset OMPI_COMM_WORLD_LOCAL_RANK",
    ),
]
"""Variables in a shell; the error's field and value; what the hint names."""


def set_all(monkeypatch, variables):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))


@pytest.mark.parametrize(("variables", "start", "named"), LEFT_OVER)
def test_variables_that_do_not_describe_a_rank_are_named(monkeypatch, variables, start, named):
    set_all(monkeypatch, variables)
    expect_error(rf"^{re.escape(start)}: .*{named}", check_launcher)


@pytest.mark.parametrize(
    "variables",
    [
        "",
        "WORLD_SIZE=1",
        "RANK=0 WORLD_SIZE=1",
        "PMI_SIZE=1 PMI_RANK=0",
        "MASTER_ADDR=a MASTER_PORT=1",
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
        (
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1 "
            "PMI_SIZE=4"
        ),
    ],
)
def test_variables_of_platforms_and_launchers(monkeypatch, variables):
    set_all(monkeypatch, variables)
    check_launcher()


@pytest.mark.parametrize("script", ["train_gpt2", "evaluate", "status", "check_cluster"])
def test_every_command_refuses_a_rank_that_nobody_else_knows_of(monkeypatch, tmp_path, script):
    """Before any wait, and though the main process alone prints errors."""
    set_all(monkeypatch, "RANK=1")
    code, errors = run_script(script, [str(tmp_path)] * (script in ("evaluate", "status")))
    assert (code, errors.count("\n"), errors[:17]) == (2, 1, "error: RANK = 1: "), errors


def test_exit_codes_tell_how_a_run_ended(monkeypatch, tmp_path):
    outcomes = ("completed", "stopped", "diverged")
    assert [exit_code(outcome) for outcome in outcomes] == [0, 75, 3]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(EXIT_CODES, str(tmp_path / "codes"))
    assert [exit_code(outcome) for outcome in outcomes] == [0, 0, 3], (
        "a launcher would call 75 a crash"
    )
    assert (tmp_path / "codes").read_text() == "0\n75\n3\n", (
        "as without a launcher, for cloud/launch.sh"
    )


@pytest.mark.parametrize("name", NAMES.split())
def test_what_is_no_number_is_named(monkeypatch, name):
    for value in ("", " ", "-1", "two", "1.5", "$N"):
        monkeypatch.setenv(name, value)
        expect_error(
            rf"^{name} = {re.escape(value)}: ",
            lambda: (processes_asked_for(), world_size(), processes_here()),
        )


def test_a_rank_that_is_no_number_is_said_aloud(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    code, errors = run_script("check_cluster", [])
    assert (code, errors[:21]) == (2, "error: RANK = first: ")


ELASTIC = [
    ("torchrun --nnodes 1:4 --max_restarts 3 train.py", "", "3", "1:4"),
    ("torchrun --nnodes=2:4 train.py", "", "3", "2:4"),
    ("torchrun train.py", "1:4", "3", "1:4"),
    ("torchrun --nnodes 1:4 train.py", "", "0", ""),
    ("torchrun --nnodes 2 train.py", "1:4", "3", ""),
    ("torchrun --nnodes 2:2 train.py", "", "3", ""),
    ("torchrun train.py", "", "3", ""),
]
"""Command, PET_NNODES, restarts, and the nodes that it can have."""


@pytest.mark.parametrize(("command", "variable", "restarts", "nodes"), ELASTIC)
def test_an_elastic_launcher(monkeypatch, command, variable, restarts, nodes):
    launcher = SimpleNamespace(cmdline=command.split)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: launcher))
    monkeypatch.setenv("PET_NNODES", variable)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert elastic_nodes() == nodes
