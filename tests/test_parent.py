"""Processes end with their parent, by the signal that they chose, and not with the thread that started them."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from test_launch import environment

CHILD = """
    import os, signal, sys, time
    from gpt2_ddp.processes.parent import end_with_parent

    def stop(number, frame):
        open(sys.argv[1], "w").write(signal.Signals(number).name)
        os._exit(0)

    def live(file):
        sys.argv = ["", file]
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, stop)
        end_with_parent(signal.SIGUSR1)
        open("begun", "w").close()
        print(os.getpid(), flush=True)
        time.sleep(60)

    def live_later(file):
        parent = os.getppid()
        print(os.getpid(), flush=True)
        while os.getppid() == parent:
            time.sleep(0.01)
        live(file)

    if __name__ == "__main__":
        live(sys.argv[1])
"""
STARTED = {
    "as a command": "subprocess.Popen([sys.executable, 'child.py', sys.argv[1]])",
    "by multiprocessing": "multiprocessing.get_context('spawn').Process(target=child.live, args=sys.argv[1:]).start()",
}
PARENT = """
    import multiprocessing, os, subprocess, sys, threading, time
    import child

    def start():
        {start}
        while not os.path.exists("begun"):
            time.sleep(0.01)

    if __name__ == "__main__":
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        time.sleep(60)
"""


def family(folder: Path, start: str) -> tuple[subprocess.Popen, psutil.Process]:
    """A parent and the child that it started from a thread."""
    (folder / "child.py").write_text(textwrap.dedent(CHILD))
    (folder / "parent.py").write_text(textwrap.dedent(PARENT).replace("{start}", start))
    command = [sys.executable, "parent.py", "ended"]
    parent = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize("way", STARTED)
def test_it_ends_with_its_parent_not_with_the_thread_that_started_it(tmp_path, way):
    parent, child = family(tmp_path, STARTED[way])
    time.sleep(1)
    assert not (tmp_path / "ended").exists()  # though the thread has ended, of which prctl would signal at once
    parent.kill()
    parent.wait()
    child.wait(30)
    assert (tmp_path / "ended").read_text() == "SIGUSR1"


def test_a_parent_that_is_gone_already_counts(tmp_path):
    """A worker may be importing still when its parent is killed."""
    parent, child = family(tmp_path, STARTED["by multiprocessing"].replace("live", "live_later"))
    parent.kill()
    parent.wait()
    child.wait(30)
    assert (tmp_path / "ended").read_text() == "SIGUSR1"
