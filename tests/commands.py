"""Commands for the tests: a script in this process, and launchers as people type them."""

import contextlib
import fcntl
import hashlib
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from unittest import mock

import pytest
from ranks import CONTEXT, forked_ranks, keep_server, rank_environment, start, write_to

from gpt2_ddp.distributed import process
from gpt2_ddp.distributed.signals import SIGNALS
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.errors import UserError

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
WITH_FLAGS = [file for file in sorted(SCRIPTS.glob("*.py")) if not file.stem.startswith("hello_")]
"""The scripts that are commands: the `hello_` programs are for reading."""
NO_REPORT = f"{ROOT}:{ROOT}/tests/no_report"
"""PYTHONPATH of a fresh Python whose training draws no report."""
BIN = Path(sys.executable).parent
ACCELERATE = [str(BIN / "accelerate"), "launch"]
TORCHRUN = [str(BIN / "torchrun")]


def environment(**more):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE", "OMP_", "PET_"))
    }
    return kept | {"HF_HOME": str(Path(tempfile.gettempdir()) / "no_accelerate_config"), **more}


def launch(command, folder=ROOT, **env):
    """Runs a command in a folder, with the package of this tree."""
    env = {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=300, cwd=folder
    )


def stopped_and_killed(command, pause):
    """Runs a command that trains several runs three times: it is sent SIGTERM `pause()` seconds
    after it has started the first of them, then SIGKILL, and at last it runs to its end. The output
    of that."""
    options = {
        "cwd": ROOT,
        "env": environment(PYTHONPATH=NO_REPORT),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    codes = {signal.SIGTERM: 75, signal.SIGKILL: -signal.SIGKILL}
    for number, code in codes.items():
        with subprocess.Popen(command, **options) as process:
            begun = [*takewhile(lambda line: " starts; " not in line, process.stdout)]
            time.sleep(pause())
            process.send_signal(number)
            output, _ = process.communicate(timeout=300)
        assert process.returncode == code, (begun, output)
    done = subprocess.run(command, **options, timeout=600)
    assert done.returncode == 0, done.stdout
    return done.stdout


def without_report(*words, start=process.run_module, **options):
    """Replaces `process.run_module`, by which a training's script draws its report and runs
    compressors: a fresh process imports matplotlib for seconds. tests/training/test_start.py has a
    report."""
    if not {"report", "gpt2_ddp.tasks.comparison"} & {*words}:
        start(*words, **options)


def run_and_read(name, arguments):
    """Runs a script as `python scripts/name.py arguments`; returns its exit code and what it wrote
    to stdout and to stderr."""
    sys.argv = [f"{name}.py", *arguments]
    out = io.StringIO()
    errors = io.StringIO()
    outputs = contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out)
    with outputs[0], outputs[1], mock.patch.object(process, "run_module", without_report):
        try:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), errors.getvalue()


def run_script(name, arguments):
    """Runs a script as `run_and_read`; returns its exit code and what it wrote to stderr."""
    code, _, errors = run_and_read(name, arguments)
    return code, errors


def last_of_each(words):
    """A command line without the flags that come again later: a command takes each flag but
    `--config` once."""
    groups = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    names = [group[0].partition("=")[0] if group else "" for group in groups]
    kept = (
        group
        for at, group in enumerate(groups)
        if names[at] == "--config" or names[at] not in names[at + 1 :]
    )
    return [word for group in kept for word in group]


def forked(words, folder, world=1, **env):
    """Runs `python words` in a folder, on each rank of a world; exit code, outputs and errors of
    them all.

    The processes are forked with torch loaded, and so are those that they start: a fresh one would
    import it for seconds. Of several ranks the first exit code that is not 0 counts.
    """
    port = reserve_port()
    started = []
    with tempfile.TemporaryDirectory() as outputs:
        for rank in range(world):
            own = environment(**env) | (rank_environment(rank, world, port) if world > 1 else {})
            args = (words, folder, own, [f"{outputs}/{rank}-out", f"{outputs}/{rank}-err"])
            started.append(CONTEXT.Process(target=_as_command, args=args))
            start(started[-1])
        for process in started:
            process.join(300)
            process.kill()
            process.join()
        files = (
            [Path(f"{outputs}/{rank}-{end}") for rank in range(world)] for end in ("out", "err")
        )
        out, err = ("".join(file.read_text() for file in of) for of in files)
    code = next((process.exitcode for process in started if process.exitcode), 0)
    return subprocess.CompletedProcess(words, code, out, err)


def _as_command(words, folder, env, outputs):
    import torch

    from gpt2_ddp.distributed import spawn
    from gpt2_ddp.export import check

    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    write_to(outputs)
    os.environ.clear()
    os.environ.update(env, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    keep_server()
    spawn.start_ranks = forked_ranks
    process.run_module = without_report
    check.MODULES = 2  # of Python, that an export encodes
    os.chdir(folder)
    sys.argv = words[words[0] == "-m" :]
    sys.path.insert(0, str(folder) if words[0] in ("-c", "-m") else str(Path(words[0]).parent))
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def snapshot(folder):
    not_counted = (".lock", ".verified.jsonl")
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in not_counted)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def expect_error(message, function, *args, **options):
    """The call ends with a UserError that matches `message`."""
    with pytest.raises(UserError, match=message):
        function(*args, **options)


def expect_field(field, value, function, *args, **options):
    """The call ends with one error of this field, whose value ends with `value`."""
    with pytest.raises(UserError) as caught:
        function(*args, **options)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"{field} = ")
    assert f"{value}: " in mistake


@contextlib.contextmanager
def held(lock):
    """This process holds the lock meanwhile, of which it knows nothing itself."""
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
