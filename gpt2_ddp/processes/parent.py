"""Processes that end with the one that started them, however it ends. No torch."""

import multiprocessing
import os
import threading
import time

LOOK_SECONDS = 0.5


def end_with_parent(number: int) -> None:
    """Sends this process signal `number` once its parent process is gone, be it by `kill -9`.

    Not for a process that a shell started: `nohup python ... &` is to outlive it. A thread waits, rather than the
    kernel's PR_SET_PDEATHSIG: that fires when the *thread* ends that started this process, and on Linux alone.
    """
    parent, launcher = multiprocessing.parent_process(), os.getppid()

    def wait() -> None:
        if parent is not None:
            parent.join()  # knows of an end before this began
        else:
            while os.getppid() == launcher:
                time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
