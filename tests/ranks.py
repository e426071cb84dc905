"""Real processes for the tests: ranks of one world, forked from a server that has torch loaded
already. It is one for all of xdist's workers.

A fresh interpreter would take 4 s to import torch, and forking the test process deadlocks in its
thread pools.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

from gpt2_ddp.distributed.signals import SIGNALS
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.distributed.workers import block_signals, start_resource_tracker
from gpt2_ddp.errors import UserError

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = """
ranks torch torch._dynamo accelerate datasets scipy.ndimage tiktoken tiktoken_ext.openai_public
torch.distributed.algorithms.ddp_comm_hooks torch.profiler._cupti_monitor
gpt2_ddp.data.tokenizer_file gpt2_ddp.distributed.peers gpt2_ddp.model.generate gpt2_ddp.model.optim
gpt2_ddp.tasks.images gpt2_ddp.tasks.jobs gpt2_ddp.tasks.pretraining gpt2_ddp.tasks.trained_model
transformers.models.gpt2.modeling_gpt2 transformers.models.auto.modeling_auto
gpt2_ddp.export.imports gpt2_ddp.training.replica_check gpt2_ddp.training.fsdp commands runs warm
"""
CONTEXT.set_forkserver_preload(PRELOADED.split())  # what most ranks import
SERVER = forkserver._forkserver
SERVER.set_forkserver_preload = lambda modules: None  # of loader workers, which it forks as well


THREADS = int(os.environ.get("TEST_THREADS", "1"))
"""Threads of torch in tests and ranks; tests/kinds.py has others."""


def wait_until(condition, seconds=120, process=None):
    """When the condition came to hold, by `time.monotonic`. Raises: AssertionError if it does not
    within so many seconds, or if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process:
            if isinstance(process, subprocess.Popen):
                ended = process.poll() is not None
            else:
                ended = not process.is_alive()
            assert not ended, "the process has ended"
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic()


def start_ranks(function, world, *args):
    """Starts `function(*args)` on each rank; one process
    alone gets no rank, like a plain `python script.py`."""
    port = reserve_port()
    started = []
    for rank in range(world):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        # not the server's
        outputs = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        environment = {"OMP_NUM_THREADS": str(THREADS)} | (
            rank_environment(rank, world, port) if world > 1 else {}
        )
        process = CONTEXT.Process(
            target=_call, args=(environment, outputs, sender, function, args), name=f"rank {rank}"
        )
        start(process)
        sender.close()
        started.append((process, receiver))
    return started


def start(process):
    """Starts a process, maybe with the server, in which
    signals are blocked as in that of a training's workers."""
    with _as_server():
        process.start()


def start_server():
    """Starts the server, once, for other processes
    of the suite. Returns what `use_server` takes."""
    with _as_server():
        forkserver.ensure_running()
    return {
        name: getattr(SERVER, name, None) for name in ("_forkserver_address", "_forkserver_authkey")
    }


def use_server(started):
    """Has the ranks of this process forked by the server of another one, which it ends with."""
    vars(SERVER).update(started, _forkserver_alive_fd=os.open(os.devnull, os.O_RDONLY))
    keep_server()


def keep_server():
    """Has no server started by this process."""
    forkserver.ensure_running = SERVER.ensure_running = lambda: None


@contextmanager
def _as_server():
    """A server that is started inside finds the modules that this process does."""
    start_resource_tracker()
    with block_signals(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", str(THREADS))
        yield


def rank_environment(rank, world, port):
    """The variables that torchrun gives a rank."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in values.items()}


def forked_ranks(function, arguments):
    """Replaces `gpt2_ddp.distributed.spawn.start_ranks`:
    the ranks are forked, with torch loaded."""
    started = start_ranks(_own_arguments, len(arguments), function, arguments, OUTPUTS)
    RECEIVERS.extend(receiver for _, receiver in started)
    return [process for process, _ in started]


RECEIVERS = []
"""Pipes of forked ranks, whose results nobody reads:
a closed pipe would end a rank with an error."""


OUTPUTS = []
"""Files for stdout and stderr of this process and of what it forks; none: what they were."""


def write_to(files):
    """Has stdout and stderr written to the end of these files."""
    OUTPUTS.extend(files)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    if files:
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _own_arguments(function, arguments, outputs):
    write_to(outputs)
    function(*arguments[int(os.environ.get("RANK", "0"))])


def results(started, timeout=120):
    """What each rank returned; raises what the first failing rank raised, as text."""
    deadline = time.monotonic() + timeout
    values = []
    try:
        for rank, (_, receiver) in enumerate(started):
            if not receiver.poll(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            try:
                value, error = receiver.recv()
            except EOFError:
                value = None
                error = f"rank {rank} died"
            if error is not None:
                raise RankError(error)
            values.append(value)
    finally:
        for process, _ in started:
            process.join(0 if values != [] and len(values) < len(started) else 10)
            if process.is_alive():
                process.kill()
                process.join()
    return values


def run_ranks(function, world, *args, timeout=120):
    """Runs `function(*args)` on each rank of a world and returns what each returned."""
    return results(start_ranks(function, world, *args), timeout)


def run_until_killed(function, world, *args, timeout=120):
    """Runs `function(*args)` on each rank until the last
    rank dies of SIGKILL; then kills the other ranks."""
    started = start_ranks(function, world, *args)
    started[-1][0].join(timeout)
    exit_code = started[-1][0].exitcode
    for process, _ in started:
        process.kill()
        process.join()
    assert exit_code == -signal.SIGKILL, exit_code


def in_turn(*calls):
    """Calls one function after another in this process. Each call is a tuple of the function and
    its arguments.

    Returns:
        the value of each call, or the text of its UserError.
    """
    found = []
    for function, *args in calls:
        try:
            found.append(function(*args))
        except UserError as error:
            found.append(str(error))
    return found


def first_calls(function, *args):
    """The functions of the package that `function(*args)`
    calls in this thread, in the order of their first calls."""
    found = {}

    def note(frame, event, _):
        if event == "call":
            found[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"] = None

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return [name for name in found if name.startswith("gpt2_ddp.")]


class RankError(Exception):
    """A rank's traceback."""


def _call(environment, outputs, sender, function, args):
    import torch

    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
    gc.freeze()  # what was loaded stays shared with the server
    faulthandler.enable(2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # a rank that starts others, or loader workers, has them forked by the same server
    keep_server()
    for name in [
        name
        for name in os.environ
        if name.startswith(("ACCELERATE_", "TORCHELASTIC_", "PET_", "SLURM_"))
    ]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(THREADS)
    try:
        sender.send((function(*args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
