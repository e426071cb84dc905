"""Processes from Python: results and mistakes come back, signals go out, nobody is left behind.

Each process imports this module. It imports no torch: that would take them seconds.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from commands import ROOT, environment
from ranks import rank_environment, wait_until

from gpt2_ddp import script
from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.distributed import process
from gpt2_ddp.distributed.signals import Stopped
from gpt2_ddp.distributed.spawn import reserve_port, run_processes, start_processes
from gpt2_ddp.errors import UserError


def test_a_reserved_port():
    """No other program is given it, and one that asks for it can listen there."""
    port = reserve_port()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    with socket.create_server(("", port)), socket.create_connection(("127.0.0.1", port)):
        pass


def who_am_i(word):
    return [
        word,
        *[os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
    ]


def fail(rank, how, other):
    if os.environ["RANK"] == rank:
        if how == "stop":
            wait_until(other.exists)
            os.kill(os.getpid(), signal.SIGUSR1)
        if how == "mistake":
            raise UserError("field", "value", "hint")
        if how == "crash":
            raise RuntimeError("a bug")
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "mistake":
        try:
            other.touch()
            time.sleep(600)
        finally:
            if how == "stop":
                time.sleep(1)
                print("saved", file=sys.stderr)
    return "done"


def test_the_main_ranks_result_comes_back_and_without_processes_it_is_a_call(monkeypatch):
    before = dict(os.environ)
    assert run_processes(who_am_i, 2, "hello") == ["hello", "0", "0", "2", "2"]
    assert dict(os.environ) == before
    assert run_processes(os.getpid, None) == os.getpid()
    monkeypatch.setenv("RANK", "0")
    assert run_processes(os.getpid, 2) == os.getpid()


def start_from_a_fresh_process():
    """Its pid and rank; and the pid of what it forks,
    which stays, like a process that is stuck in a disk."""
    if child := os.fork():
        return os.getpid(), os.environ.get("RANK"), child
    time.sleep(30)
    os._exit(0)


def test_one_fresh_process_has_no_rank_and_is_alone_waited_for():
    process, rank, child = start_processes(start_from_a_fresh_process, 1)
    assert process != os.getpid()
    assert rank is None
    left = psutil.Process(child)
    assert left.status() != psutil.STATUS_ZOMBIE
    left.kill()


@pytest.mark.parametrize(
    ("rank", "how", "error", "text"),
    [
        ("0", "mistake", UserError, "field = value: hint"),
        ("1", "mistake", SystemExit, "2"),
        ("0", "crash", SystemExit, "1"),
        ("1", "kill", SystemExit, "1"),
        ("1", "stop", Stopped, "a signal to a rank"),
    ],
)
def test_the_end_of_one_ends_all(monkeypatch, capfd, tmp_path, rank, how, error, text):
    """The other rank would sleep for ten minutes. After
    a stop it is signalled, and has time to save."""
    monkeypatch.setattr("gpt2_ddp.distributed.spawn.GRACE_SECONDS", 0.5)
    with pytest.raises(error, match=text):
        run_processes(fail, 2, rank, how, tmp_path / "other")
    errors = capfd.readouterr().err
    assert ("a process crashed (exit codes rank 0: " in errors) == (error is SystemExit)
    assert ("a bug" in errors) == (how == "crash")
    assert ("saved" in errors) == (how == "stop")
    assert all("rank" not in str(child.cmdline()) for child in psutil.Process().children())


LAUNCHED = """
    import os, sys, time
    from gpt2_ddp import script
    from gpt2_ddp.config.tools import StatusConfig
    from gpt2_ddp.errors import UserError

    def main(config):
        rank = int(os.environ["RANK"])
        time.sleep(DELAYS[rank])
        if rank in FAILING:
            raise UserError("field", "value", "hint")
        time.sleep(600)

    script.REPORT_SECONDS = 1.0
    script.run_command(StatusConfig, main)
"""
"""A rank, which imports no torch."""


def test_a_command_of_one_process_runs_once_under_a_launcher(monkeypatch, capsys):
    """Also as the child of any rank."""
    names = {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
    }
    monkeypatch.setattr(sys, "argv", ["status"])
    monkeypatch.setattr(script, "end_with_parent", lambda number: None)
    for name, value in (names | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    for rank, child, said in (("0", "", "it ran\n"), ("1", "", ""), ("1", "child", "it ran\n")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        if child:
            monkeypatch.setenv(process.CHILD, child)
        with pytest.raises(SystemExit) as end:
            script.run_command(StatusConfig, lambda config: print("it ran"))
        output, errors = capsys.readouterr()
        assert (end.value.code, output) == (0, said), rank
        assert errors.count("note: this command runs in one process") == (rank == "0")


@pytest.mark.parametrize(
    ("delays", "failing", "told"),
    [
        ((0.6, 0, 0), {0, 1, 2}, "error: field = value: hint\n"),
        ((0, 0.6, 0), {0, 1, 2}, "error: field = value: hint\n"),
        ((0, 0, 0.6), {1, 2}, "error: rank 1: field = value: hint\n"),
    ],
    ids=["late main process", "late other", "only others fail"],
)
def test_a_launcher_that_ends_all_ranks_at_the_first_exit_loses_no_error(
    tmp_path, delays, failing, told
):
    """As torchrun and Accelerate do."""
    code = textwrap.dedent(LAUNCHED)
    code = code.replace("DELAYS", repr(delays)).replace("FAILING", repr(failing))
    port = reserve_port()
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stderr=file,
                env=environment(**rank_environment(rank, len(delays), port)),
            )
            for rank in range(len(delays))
        ]
    wait_until(lambda: any(rank.poll() is not None for rank in started))
    ended = [rank.returncode for rank in started if rank.returncode is not None]
    for rank in started:
        rank.terminate()
    for rank in started:
        rank.wait(60)
    assert ended[0] == 2
    assert [line for line in errors.read_text().splitlines(True) if "error" in line] == [told]


def wait_to_be_stopped(folder):
    file = Path(folder, os.environ["RANK"])
    file.touch()
    try:
        time.sleep(600)
    except Stopped:
        file.write_text("stopped")


def test_kill_9_of_the_parent_stops_the_ranks(tmp_path):
    """A stop of all of them by one signal to the parent is in faults/test_stops.py."""
    code = (
        "import test_spawn; test_spawn.run_processes(test_spawn.wait_to_be_stopped, 2, "
        f"{str(tmp_path)!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT}/tests"),
        cwd=Path(__file__).parent,
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, process=process)
    ranks = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert [file.read_text() for file in tmp_path.iterdir()] == ["stopped"] * 2
