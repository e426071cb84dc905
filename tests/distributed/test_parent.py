"""Processes end with their parent, by the signal that
they chose, and not with the thread that started them."""

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from itertools import product

import psutil
import pytest
from commands import ROOT
from ranks import results, run_ranks, start_ranks, wait_until

from gpt2_ddp.distributed import process as parent
from gpt2_ddp.distributed.process import end_with_parent
from gpt2_ddp.distributed.signals import Stopped, exit_on_signal
from gpt2_ddp.distributed.workers import worker_pool
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically


def live(folder, waits):
    """Ends with its parent: as a command does, or as a worker that `waits`, since it may be
    importing still when its parent is killed."""

    def stop(number, frame):
        (folder / "ended").write_text(signal.Signals(number).name)
        os._exit(0)

    if not waits:
        multiprocessing.process._parent_process = None  # pyright: ignore
    parent = os.getppid()
    write_atomically(folder / "pid", str(os.getpid()))
    wait_until(lambda: not waits or os.getppid() != parent)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    end_with_parent(signal.SIGUSR1)
    (folder / "begun").touch()
    time.sleep(60)


def start_from_a_thread(folder, waits, machines):
    os.environ["GROUP_WORLD_SIZE"] = machines

    def start():
        multiprocessing.get_context("spawn").Process(target=live, args=(folder, waits)).start()
        wait_until((folder / ("pid" if waits else "begun")).exists)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(60)


@pytest.mark.parametrize(
    ("waits", "machines", "ended"),
    [
        (False, "1", ["SIGUSR1"]),
        (True, "1", ["SIGUSR1"]),
        (False, "2", []),  # of several machines: it must not ask the others to stop
    ],
)
def test_it_ends_with_its_parent_not_with_the_thread_that_started_it(
    tmp_path, waits, machines, ended
):
    ((process, _),) = start_ranks(start_from_a_thread, 1, tmp_path, waits, machines)
    wait_until((tmp_path / ("pid" if waits else "begun")).exists, process=process)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    time.sleep(0.3)
    # though the thread has ended, of which prctl would signal at once
    assert not (tmp_path / "ended").exists()
    process.kill()
    process.join()
    child.wait(60)
    assert [file.read_text() for file in tmp_path.glob("ended")] == ended


def test_an_orphan_that_was_signalled_before_saves(monkeypatch):
    sent = []
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(parent, "has_signal", lambda: True)
    monkeypatch.setattr(parent.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(parent.os, "getppid", iter((1, 2)).__next__)
    parent.end_with_parent(signal.SIGTERM)
    wait_until(lambda: sent)
    assert sent == [signal.SIGTERM]


def help():
    time.sleep(600)  # stuck: it asks nobody whether it may end


def have_helpers(folder, end):
    """Starts two helpers of a pool and signals them at
    once; leaves the pool once the file `end` is there."""
    with pytest.raises(ValueError, match="left"), worker_pool(2) as pool:  # noqa: PT012
        for _ in range(2):
            pool.submit(help)
        helpers = list(pool._processes)
        for helper, number in product(helpers, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)):
            os.kill(helper, number)
        write_atomically(folder / "pids", " ".join(map(str, helpers)))
        wait_until((folder / "end").exists)
        raise ValueError("left")


@pytest.mark.parametrize("end", ["left", "kill"])
def test_signals_do_not_end_a_helper_but_its_parent_does(tmp_path, end):
    ((parent, _),) = started = start_ranks(have_helpers, 1, tmp_path, end)
    wait_until((tmp_path / "pids").exists, process=parent)
    helpers = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    time.sleep(0.1)
    assert len(helpers) == 2
    assert all(
        helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE for helper in helpers
    )
    if end == "kill":
        parent.kill()
        parent.join()
    else:
        (tmp_path / "end").touch()
        results(started)
    assert not psutil.wait_procs(helpers, timeout=60)[1]


def send_half_a_result(mark):
    queue = sys._getframe(1).f_locals["result_queue"]  # of the pool's worker
    os.write(queue._writer.fileno(), struct.pack("!i", 1000) + bytes(10))
    mark.touch()
    time.sleep(60)


def leave_pool(mark):
    with pytest.raises(ValueError, match="left"), worker_pool(1) as pool:  # noqa: PT012
        pool.submit(send_half_a_result, mark)
        wait_until(mark.exists)
        raise ValueError("left")


def test_a_pool_is_left_though_a_result_was_half_sent(tmp_path):
    run_ranks(leave_pool, 1, tmp_path / "mark")


def test_a_script_of_the_project_runs_without_a_rank_and_its_mistakes_are_ours(
    monkeypatch, tmp_path, capfd
):
    """What it prints on stderr arrives, but for its
    `error:` lines; its exit codes are exceptions."""
    file = tmp_path / "other.py"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def run(text):
        file.write_text(f"import os, sys\n{text}")
        parent.run_module("other", "word")
        return "".join(capfd.readouterr())

    code = "print(sys.argv[1:], os.environ.get('RANK'), os.environ.get('WORLD_SIZE'))"
    assert run(code) == "['word'] None None\n"
    assert run("print('note: odd', file=sys.stderr)") == "note: odd\n"
    for code, error in ((2, UserError), (75, Stopped), (1, subprocess.CalledProcessError)):
        with pytest.raises(error, match="source = x: is not there" if code == 2 else "other"):
            run(f"print('error: source = x: is not there', file=sys.stderr); sys.exit({code})")


LASTS = """
import os, pathlib, time
from gpt2_ddp.config.base import Command
from gpt2_ddp.files import write_atomically
from gpt2_ddp.script import run_command

def main(config):
    write_atomically(pathlib.Path(FILE), str(os.getpid()))
    time.sleep(600)

run_command(Command, main)
"""


def prepare_for_long(folder):
    """Runs a script that writes its process id and sleeps."""
    (folder / "other.py").write_text(LASTS.replace("FILE", repr(str(folder / "pid"))))
    os.environ["PYTHONPATH"] = f"{folder}:{ROOT}"
    with exit_on_signal(lambda line: None):
        parent.run_module("other")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_of_the_project_ends_with_who_runs_it(tmp_path, number):
    ((process, _),) = start_ranks(prepare_for_long, 1, tmp_path)
    try:
        wait_until((tmp_path / "pid").exists)
        script = psutil.Process(int((tmp_path / "pid").read_text()))
        os.kill(process.pid, number)
        process.join()
        script.wait(60)
    finally:
        process.kill()
