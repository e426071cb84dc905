"""Requests to stop, from the first moment to the last: one
line and the documented code, wherever Python stands."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest
from commands import environment

from gpt2_ddp.distributed import signals
from gpt2_ddp.distributed.signals import SIGNALS, Stopped, exit_on_signal

SCRIPT = """
    import ctypes, os, signal, sys, threading, time
    from gpt2_ddp.distributed import signals

    signals.PATIENCE_SECONDS = 0.5
    signals.ECHO_SECONDS = float(os.environ.get("ECHO", signals.ECHO_SECONDS))

    def ready():
        print("ready", flush=True)

    def run():
    {body}

    with signals.exit_on_signal(lambda line: print(line, file=sys.stderr, flush=True)):
        run()
    print("done", flush=True)
"""
WAITS_IN_PYTHON = """
    try:
        ready()
        time.sleep(60)
    finally:
        print("cleared", flush=True)
"""
WAITS_OUTSIDE = """
    for name in sys.argv[1:]:
        signal.siginterrupt(signal.Signals[name], False)  # as gloo, which goes on waiting
    read, _ = os.pipe()
    threading.Timer(0.3, ready).start()  # once this thread waits
    ctypes.CDLL(None).read(read, ctypes.create_string_buffer(1), 1)
"""
DOES_NOT_LISTEN = """
    try:
        ready()
        time.sleep(60)
    except BaseException:
        time.sleep(60)
"""
FAILS_OVER_IT = """
    try:
        ready()
        time.sleep(60)
    except BaseException:
        pass
    raise ValueError("half imported")
"""
TRAINS = """
    heard = []
    def hear(number, frame):
        heard.append(signal.Signals(number).name)
    give_back = signals.install_handlers(hear)
    ready()
    while len(heard) < 2:
        time.sleep(0.01)
    give_back()
    print(*heard, flush=True)
    sys.stdin.readline()  # a signal comes here as well
"""
ENDS = """
    signals.install_handlers(lambda number, frame: None)()
    ready()
    sys.stdin.readline()
"""
FORKS = """
    for takes_it in (False, True):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            if takes_it:
                signal.signal(signal.SIGTERM, lambda number, frame: os._exit(3))
                os.write(write, b"x")
            for _ in range(600):  # a handler waits for a sleep that begins as its signal comes
                time.sleep(0.1)
            os._exit(0)
        if takes_it:
            os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    time.sleep(0.3)
"""
LOSES_A_PEER = """
    signals.PATIENCE_SECONDS = float(sys.argv[1])
    ready()
    sys.stdin.readline()
    raise RuntimeError("Connection closed by peer")
"""


def start(folder, body, *arguments, **env):
    """A process that has come to `ready`, if its body says so."""
    return run(folder, textwrap.dedent(SCRIPT).replace("{body}", body), *arguments, **env)


def run(folder, code, *arguments, **env):
    """A process with this code."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment(**env), text=True, **pipes)


def signalled(process, number):
    """(exit code, output, errors) after the process came to `ready` and got the signal."""
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def heard(process, name):
    """The process, after it came to `ready`, got the signal and said so."""
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[name])
    assert process.stderr.readline() == f"{name} received: stopping\n"
    return process


def last_words(name):
    return f"stopped by {name}; nothing was lost: run the same command again\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_it_ends_with_75_and_one_line(tmp_path, number):
    assert signalled(start(tmp_path, WAITS_IN_PYTHON), number) == (
        75,
        "cleared\n",
        last_words(number.name),
    )


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored(tmp_path):
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + textwrap.dedent(SCRIPT)
    process = run(tmp_path, code.replace("{body}", TRAINS))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    for name in ("SIGTERM", "SIGUSR1"):
        process.send_signal(signal.Signals[name])
    assert sorted(process.stdout.readline().split()) == ["SIGTERM", "SIGUSR1"]
    assert process.communicate("\n", timeout=60)[0] == "done\n"
    assert process.returncode == 0


CLOSED_TERMINAL = """
    import os, sys, time
    from gpt2_ddp.distributed.signals import install_handlers
    from gpt2_ddp.script import run_command
    from gpt2_ddp.config.tools import ReportConfig

    def main(config):
        heard = []
        install_handlers(lambda number, frame: heard.append(number))
        print("ready", flush=True)
        while not heard:
            time.sleep(0.01)
        for _ in range(3):
            print("a step", flush=True)
            print("a warning", file=sys.stderr, flush=True)
        open("saved", "w").close()

    run_command(ReportConfig, main)
"""


def test_a_terminal_that_closes_stops_a_training_which_saves(tmp_path):
    """It cannot print any more, either."""
    terminal, end = os.openpty()
    command = [sys.executable, "-c", textwrap.dedent(CLOSED_TERMINAL)]
    login = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
    process = subprocess.Popen(
        [sys.executable, "-c", login, *command],
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
        **streams,
    )
    os.close(end)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(60) == 0
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("body", [WAITS_OUTSIDE, DOES_NOT_LISTEN], ids=["in C", "swallowed"])
def test_it_ends_though_python_does_not_come_to_run(tmp_path, body):
    said = "SIGTERM received: stopping\n" + last_words("SIGTERM")
    assert signalled(start(tmp_path, body, "SIGTERM"), signal.SIGTERM) == (75, "", said)


def test_what_fails_over_a_swallowed_stop_is_the_stop(tmp_path):
    """As numpy's lazy submodules do, where the stop comes between their import and their name."""
    assert signalled(start(tmp_path, FAILS_OVER_IT), signal.SIGTERM) == (
        75,
        "",
        last_words("SIGTERM"),
    )


def test_one_of_several_ranks_fails_for_its_launcher(tmp_path):
    env = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert signalled(start(tmp_path, WAITS_IN_PYTHON, **env), signal.SIGTERM)[0] == 75
    assert signalled(start(tmp_path, WAITS_OUTSIDE, "SIGTERM", **env), signal.SIGTERM)[0] == 75
    process = start(tmp_path, WAITS_IN_PYTHON, TORCHELASTIC_RUN_ID="x")
    assert signalled(process, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(("third", "echo"), [("SIGTERM", "0"), ("SIGINT", "0"), ("SIGINT", "600")])
def test_a_training_answers_itself_and_what_comes_after_it_changes_nothing(tmp_path, third, echo):
    process = heard(start(tmp_path, TRAINS, ECHO=echo), "SIGUSR1")
    process.send_signal(signal.SIGTERM)
    # a thread says at once what it heard; Python's handlers, which may come later, are called by
    # the signals' numbers
    assert sorted(process.stdout.readline().split()) == ["SIGTERM", "SIGUSR1"]
    process.send_signal(signal.Signals[third])
    output, errors = process.communicate("\n", timeout=60)
    ends_it = third == "SIGINT" and echo == "0"
    expected = (130, "", "ended at once by SIGINT\n") if ends_it else (0, "done\n", "")
    assert (process.returncode, output, errors) == expected


def test_when_a_training_is_over_there_is_nothing_to_stop(tmp_path):
    process = heard(start(tmp_path, ENDS), "SIGTERM")
    output, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, output, errors) == (0, "done\n", "")


def test_a_forked_process_does_not_hear_for_its_parent(tmp_path):
    # Python 3.12 warns: we have a thread
    process = start(tmp_path, FORKS, PYTHONWARNINGS="ignore::DeprecationWarning")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, f"{-signal.SIGTERM}\n3\ndone\n", "")


def test_a_rank_that_lost_a_stopped_one_is_stopped_too(tmp_path):
    """The stopped rank takes its connections with it,
    a moment before the launcher tells the others."""
    for env, told in (({"WORLD_SIZE": "2"}, True), ({"WORLD_SIZE": "2"}, False), ({}, False)):
        process = start(tmp_path, LOSES_A_PEER, "30" if told else "0.1", **env)
        process.stdin.write("\n")
        process.stdin.flush()
        if told:
            assert signalled(process, signal.SIGTERM) == (75, "", last_words("SIGTERM"))
        else:
            assert "Connection closed by peer" in process.communicate(timeout=60)[1]
            assert process.returncode == 1


@pytest.mark.parametrize(
    ("world", "end", "code"),
    [
        ("2", SystemExit(3), 3),
        ("2", None, 0),
        ("2", ValueError(), 1),
        ("2", Stopped("SIGTERM"), 75),
        ("1", SystemExit("note"), 1),
        ("", SystemExit(3), None),
    ],
)
def test_a_rank_ends_before_its_interpreter_shuts_down(monkeypatch, world, end, code):
    """Or a thread of gloo that wants Python's lock then
    would abort it. All exit handlers are called before."""
    handlers = []
    codes = []
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr(signals.atexit, "register", lambda *call: handlers.insert(0, call))
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    with suppress(SystemExit, ValueError), signals.exit_on_signal(lambda line: None):
        if end:
            raise end
    function, *arguments = handlers[-1]
    function(*arguments)
    assert codes[-1:] == [code] * (code is not None)


def test_it_leaves_the_process_as_it_was():
    before = [*map(signal.getsignal, SIGNALS)]
    with exit_on_signal(print):
        assert [*map(signal.getsignal, SIGNALS)] != before
    assert [*map(signal.getsignal, SIGNALS)] == before
    assert signal.set_wakeup_fd(-1) == -1


COMMAND = """
    from gpt2_ddp.script import run_command
    from gpt2_ddp.config.tools import ReportConfig

    def main(config):
        import time
        print("ready", flush=True)
        time.sleep(60)

    run_command(ReportConfig, main)
"""


def test_a_script_that_is_interrupted(tmp_path):
    """Of all scripts alike: the library is imported inside, after signals are taken."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    main, other, crashes = (run(tmp_path, COMMAND, RANK=rank, **world) for rank in "011")
    assert signalled(main, signal.SIGINT) == (75, "", last_words("SIGINT"))
    assert signalled(other, signal.SIGINT) == (75, "", "")  # the main process says it
    code, _, calls = signalled(crashes, signal.SIGSEGV)
    assert code == -signal.SIGSEGV
    assert " in main\n" in calls
