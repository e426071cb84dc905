"""Work behind the training: at most one piece of it at a time, in a thread of its own.

A thread is enough, for hashing, writing and fsync let go of Python's lock; and unlike another process it sees the
memory that was copied, and ends with this one.
"""

import threading
import time
from collections.abc import Callable

import psutil
import torch

from gpt2_ddp.processes.cores import spare_core


def pays(wish: bool | str, size: int, device: str, workers: int) -> bool:
    """Whether checkpoints are written behind the training.

    Args:
        wish: `checkpoint.background`.
        size: bytes of the copy that they are written from.
        device: that is trained on: cpu, cuda or mps. workers: of the loader.
    """
    if not isinstance(wish, bool):
        return spare_core(device, torch.get_num_threads(), workers) and psutil.virtual_memory().available > 1.25 * size
    return wish


class Background:
    """Does what it is given beside the thread that gives it; what that raises is raised where it is waited for.

    Attributes:
        limit: seconds that the present work, or the last one, may take.
        failed: whether the work has raised something that nobody has been told yet.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun = self._ended = self.limit = 0.0
        self.failed = False

    def start(self, work: Callable[[], object], limit: float) -> None:
        """Begins the work, which is to take no longer than `limit` seconds; waits for what is being done still."""
        self.wait()
        self._begun, self._ended, self.limit = time.monotonic(), 0.0, limit
        self._thread = threading.Thread(target=self._do, args=(work,), name="background", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is, it is raised by `wait`
            self._error, self.failed = error, True
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """What the work takes, up to now, or took; 0 where there was none."""
        return (self._ended or time.monotonic()) - self._begun if self._begun else 0.0

    @property
    def is_working(self) -> bool:
        """Whether something is being done."""
        return bool(self._begun) and not self._ended

    @property
    def is_late(self) -> bool:
        """Whether that goes on for longer than it was to take."""
        return self.is_working and self.seconds > self.limit

    def join(self) -> None:
        """Waits until nothing is being done."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """The same. Raises: what the work raised, once."""
        self.join()
        error, self._error, self.failed = self._error, None, False
        if error:
            raise error
