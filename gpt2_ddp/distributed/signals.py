"""SIGTERM, SIGINT and SIGUSR1: requests to stop, from a script's start to its end. No torch.

A training installs its own handler (`install_handlers`). At any other time there is nothing to save and the signal ends
the process: by an exception, or by force if the main thread runs no Python, as in a collective that waits for a rank.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpt2_ddp.distributed.environment import has_other_ranks, stop_code

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
INTERRUPTED = 130  # exit code after a SIGINT that ends the process at once, as in a shell
PATIENCE_SECONDS = 2.0  # until a process with nothing to save is ended by force
QUICK_SECONDS = 0.2  # after which a process that still runs reports the signal
ECHO_SECONDS = 1.0  # in which a further signal is an echo of the first: launchers pass on what their ranks also receive

Handler = Callable[[int, FrameType | None], None]


class Stopped(BaseException):
    """A signal stopped the process while there was nothing to save; holds its name. No Exception, so nothing catches it
    as a failure."""


class SignalState:
    """The signals of this process."""

    listens = False  # inside `exit_on_signal`
    asked = ""  # name of the first signal
    asked_at = 0.0  # its time on the monotonic clock
    answer: Handler | None = None  # installed handler
    answered = False  # whether a handler was ever installed
    over = False  # whether everything is saved

    def ends(self) -> bool:
        """Whether a first signal ends the process."""
        return self.answer is None and not self.over


_state = SignalState()


@contextmanager
def exit_on_signal(say: Callable[[str], None]) -> Iterator[None]:
    """Ends the process, with one line, on a signal without an installed handler. For the main thread.

    Python's handlers wait until the main thread runs Python. A thread therefore reads Python's wake-up pipe: it reports
    the signal, and ends a process with nothing to save after `PATIENCE_SECONDS`.

    Args:
        say: prints a line for the user.

    Raises:
        SystemExit: with the exit code of a stopped command.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _state.asked, _state.answered, _state.over, _state.listens = "", False, False, True
    threading.Thread(target=_listen, args=(reader, say), name="signals", daemon=True).start()
    restore = _set_handlers()
    try:
        try:
            yield
        except RuntimeError:
            # a rank that stops first closes its connections; this rank's signal comes from the launcher a moment later
            if has_other_ranks() and not _state.answered:
                time.sleep(PATIENCE_SECONDS)
            raise
    except KeyboardInterrupt:
        say("ended at once by SIGINT")
        _exit(INTERRUPTED)
    except (Stopped, Exception) as error:
        # some libraries catch Stopped while they are imported, and then fail
        if not isinstance(error, Stopped) and (not _state.asked or _state.answered):
            raise
        say(_last_words(str(error) if isinstance(error, Stopped) else _state.asked))
        _exit(stop_code())
    finally:
        restore()
        signal.set_wakeup_fd(wakeup_before)
        os.close(writer)
        _state.listens = False
        atexit.register(_set_handlers, signal.SIG_IGN)  # an interpreter that shuts down has its exit code already


def install_handlers(answer: Handler, last: bool = True) -> Callable[[], None]:
    """Calls `answer` for every signal until the returned function is called. Only the main thread may install handlers;
    in others nothing changes.

    Args:
        last: whether the process is about to end afterwards. Signals are then ignored, except a second SIGINT, which
            raises KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    _state.asked = ""
    answer_before, _state.answer, _state.answered = _state.answer, answer, True
    restore = _set_handlers()

    def uninstall() -> None:
        _state.answer, _state.over = answer_before, last
        restore()

    return uninstall


def is_second_interrupt(number: int) -> bool:
    """Whether a signal is a SIGINT that follows another signal and is no echo of it."""
    return number == signal.SIGINT and time.monotonic() > _state.asked_at + ECHO_SECONDS


def _on_signal(number: int, frame: FrameType | None) -> None:
    first = not _state.asked
    if first:
        _state.asked, _state.asked_at = signal.Signals(number).name, time.monotonic()
    if _state.answer is not None:
        _state.answer(number, frame)
    elif first and _state.ends():
        raise Stopped(_state.asked)
    elif number == signal.SIGINT if first else is_second_interrupt(number):
        raise KeyboardInterrupt


def _set_handlers(handler: Any = _on_signal) -> Callable[[], None]:
    """Sets the handler of the three signals; returns the function that restores the handlers before."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}

    def restore() -> None:
        for number, one in before.items():
            signal.signal(number, one)

    return restore


def _listen(reader: int, say: Callable[[str], None]) -> None:
    received = False
    with open(reader, "rb", buffering=0) as pipe:
        while byte := pipe.read(1):
            if received or byte[0] not in SIGNALS:
                continue
            received, ends, name = True, _state.ends(), signal.Signals(byte[0]).name
            time.sleep(QUICK_SECONDS if ends else 0)
            if _state.listens:
                say(f"{name} heard: stopping")
            time.sleep(PATIENCE_SECONDS - QUICK_SECONDS if ends else 0)
            if ends and _state.ends() and _state.listens:
                say(_last_words(name))
                os._exit(stop_code())


def _last_words(name: str) -> str:
    return f"stopped by {name}: nothing was lost, the same command does it again"


def _exit(code: int) -> None:
    """Exits; at once if gloo's threads would abort a process that ends while other ranks are connected."""
    if has_other_ranks():
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


_forking = threading.local()  # signals that the forking thread had blocked


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork(child: bool = False) -> None:
    if child and _state.listens:  # its parent alone reads the wake-up pipe
        signal.set_wakeup_fd(-1)
        _set_handlers(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=lambda: _after_fork(child=True))
