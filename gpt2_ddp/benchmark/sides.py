"""The sides of a comparison, each in a fresh process of its own, which takes its turns when it is told to."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from gpt2_ddp.compare.run import peak_memory
from gpt2_ddp.distributed.spawn import start_ranks

WARM_UP = 2
"""Steps before the first turn: libraries are loaded and graphs compiled, then one tells how many a turn has."""
MOST = 1000
"""Steps of a turn, at most."""


class Unavailable(Exception):
    """What cannot be measured on this machine; the message goes on after "it"."""


class StepTiming(NamedTuple):
    """One turn of a side: seconds per step, and the most memory of its process so far, in bytes (`peak_memory`)."""

    seconds: float
    memory: int


class StepTimer:
    """Told of every step that a side has done, it times those of a turn, and waits between turns.

    On a GPU, seconds are those between two CUDA events; the memory is given back between turns, and each begins with a
    step that does not count. Elsewhere they are CPU seconds of this process, with all of its threads.

    Args:
        pipe: to the process that says whose turn it is.
        seconds: that a turn is to last, about.
    """

    def __init__(self, pipe: Connection, device: torch.device, seconds: float):
        self._pipe, self._device, self._seconds = pipe, device, seconds
        self._cuda, self._steps, self._left = device.type == "cuda", 0, WARM_UP
        self._mark()

    def done(self) -> None:
        """A step is done. Waits for the next turn at the end of one; ends the process when there will be none."""
        self._left -= 1
        if self._left == self._steps > 0 or (not self._steps and self._left == 1):
            self._mark()
        if self._left:
            return
        seconds = self._since_mark()
        if self._steps:
            self._pipe.send(StepTiming(seconds / self._steps, peak_memory(self._device)))
        else:
            self._steps = min(max(round(self._seconds / max(time.perf_counter() - self._begun, 1e-9)), 1), MOST)
            self._pipe.send(None)
        if self._cuda:
            torch.cuda.empty_cache()
        try:
            self._pipe.recv()
        except EOFError:
            raise SystemExit(0) from None
        self._left = self._steps + self._cuda
        self._mark()

    def _mark(self) -> None:
        self._begun, self._begun_cpu = time.perf_counter(), time.process_time()
        if self._cuda:
            torch.cuda.synchronize(self._device)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def _since_mark(self) -> float:
        if not self._cuda:
            return time.process_time() - self._begun_cpu
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return self._event.elapsed_time(end) / 1000


Side = tuple[Callable[..., object], Sequence[Any]]
"""A module's function, which is given `StepTimer` and these arguments, and takes steps for ever."""


@contextmanager
def started(
    sides: dict[str, Side], device: torch.device, threads: int, seconds: float
) -> Iterator[tuple[dict[str, Callable[[], StepTiming]], list[str]]]:
    """Starts each side, one after the other, with so many threads; they end with the block.

    Yields:
        For each side that could be started a function that has it take a turn; and a sentence for each that could not,
        as it raised `Unavailable`, or had too little memory on the GPU.
    """
    turns: dict[str, Callable[[], StepTiming]] = {}
    reasons, pipes, processes = [], [], []
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the processes inherit it
    try:
        for name, side in sides.items():
            pipe, theirs = Pipe()
            processes += start_ranks(_take_turns, [(theirs, side, device, threads, seconds)])
            theirs.close()
            pipes.append(pipe)
            reason = _answer(pipe, name)
            if isinstance(reason, str):
                reasons.append(f"{name}: {reason}")
            else:
                turns[name] = _Turn(pipe, name)
        yield turns, reasons
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()
        os.environ.pop("OMP_NUM_THREADS")
        os.environ |= {"OMP_NUM_THREADS": before} if before else {}


class _Turn(NamedTuple):
    pipe: Connection
    name: str

    def __call__(self) -> StepTiming:
        self.pipe.send(None)
        return _answer(self.pipe, self.name)


def _answer(pipe: Connection, name: str) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"error: {name} crashed; its traceback is above") from None


def _take_turns(pipe: Connection, side: Side, device: torch.device, threads: int, seconds: float) -> None:
    torch.set_num_threads(threads)
    function, arguments = side
    try:
        function(StepTimer(pipe, device, seconds), *arguments)
    except Unavailable as error:
        pipe.send(str(error))
    except torch.OutOfMemoryError:
        pipe.send("out of memory")
