"""SIGTERM, SIGINT and SIGUSR1, each a request to stop, from a script's first moment to its last. No torch.

While a run trains, whoever called `install_handlers` answers. At any other time there is nothing to save, and the
request ends the process: by an exception, or by force where Python does not come to run, as in a collective that waits
for a rank.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

from gpt2_ddp.distributed.environment import has_other_ranks, stop_code

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
INTERRUPTED = 130
"""Exit code after a SIGINT that was not to wait for anything, as a shell gives it."""
PATIENCE_SECONDS = 2.0
"""How long a process may take to end that has nothing to save."""
QUICK_SECONDS = 0.2
"""One that ends within this time need not say that it has heard."""
ECHO_SECONDS = 1.0
"""A signal that comes so soon after the first is the same request: one to every process of a job reaches a rank
directly, and once more through the launcher."""

Handler = Callable[[int, FrameType | None], None]
"""A handler, as the `signal` module has them."""


class Stopped(BaseException):
    """The process was asked to stop when there was nothing to save; holds the signal's name. It is no Exception: nobody
    is to take it for a failure."""


class SignalState:
    """What this process has heard: one per process, as are its handlers."""

    listens = False
    asked = ""  # the first signal's name
    asked_at = 0.0  # on the monotonic clock
    answer: Handler | None = None  # instead of ending
    answered = False  # now or before
    over = False  # what there was to save is saved

    def ends(self) -> bool:
        """Whether a first signal ends the process."""
        return self.answer is None and not self.over


_state = SignalState()


@contextmanager
def exit_on_signal(say: Callable[[str], None]) -> Iterator[None]:
    """Ends the process, with one line, when it is asked to stop while nobody answers. In the main thread.

    A thread hears too, of Python's own wake-up pipe, since handlers wait until the main thread runs Python. It says at
    once what was heard; and after `PATIENCE_SECONDS` it ends a process that has nothing to save and is still there.

    Args:
        say: tells the user.

    Raises:
        SystemExit: with the code of a run that was stopped.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _state.asked, _state.answered, _state.over, _state.listens = "", False, False, True
    threading.Thread(target=_listen, args=(reader, say), name="signals", daemon=True).start()
    handlers_before = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        try:
            yield
        except RuntimeError:
            # a rank that is stopped first takes its connections with it; then our launcher stops us as well
            if has_other_ranks() and not _state.answered:
                time.sleep(PATIENCE_SECONDS)
            raise
    except Stopped as stopped:
        say(_last_words(str(stopped)))
        _exit(stop_code())
    except KeyboardInterrupt:
        say("ended at once by SIGINT")
        _exit(INTERRUPTED)
    except Exception:
        if not _state.asked or _state.answered:
            raise
        # a library has swallowed Stopped, as some do while they are imported, and failed over what it left half done
        say(_last_words(_state.asked))
        _exit(stop_code())
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(writer)
        _state.listens = False
        atexit.register(_ignore_all)


def install_handlers(answer: Handler, last: bool = True) -> Callable[[], None]:
    """Has `answer` called for every signal from now on, until the function that this returns is called.

    Args:
        last: after that the process is about to end: signals change nothing then, but for a SIGINT that is no echo,
            which raises KeyboardInterrupt.

    Outside of the main thread, which is the one that has signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    _state.asked = ""
    answer_before, _state.answer, _state.answered = _state.answer, answer, True
    handlers_before = {number: signal.signal(number, _on_signal) for number in SIGNALS}

    def give_back() -> None:
        _state.answer = answer_before
        _state.over = last
        for number, handler in handlers_before.items():
            signal.signal(number, handler)

    return give_back


def is_second_interrupt(number: int) -> bool:
    """Whether whoever sent this one does not want to wait any longer: a SIGINT after another signal, not its echo."""
    return number == signal.SIGINT and time.monotonic() > _state.asked_at + ECHO_SECONDS


@contextmanager
def block_signals() -> Iterator[None]:
    """Processes that are started inside are born with all three signals blocked; `unblock_signals` unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_resource_tracker() -> None:
    """Starts multiprocessing's helper of spawned processes before `block_signals`: starting it lets signals in, and
    started otherwise it would die of a SIGUSR1 to the group."""
    with block_signals():
        resource_tracker.ensure_running()


def unblock_signals() -> None:
    """Lets signals through that were held back since this process was started, and those to come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


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


def _listen(reader: int, say: Callable[[str], None]) -> None:
    heard = False
    with open(reader, "rb", buffering=0) as pipe:
        while byte := pipe.read(1):
            if heard or byte[0] not in SIGNALS:
                continue
            heard, ends, name = True, _state.ends(), signal.Signals(byte[0]).name
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
    """At once where gloo's threads would abort a process that ends while other ranks are connected to it."""
    if has_other_ranks():
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _ignore_all() -> None:
    """An interpreter that shuts down has its exit code already."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_forking = threading.local()
"""What a thread that forks had blocked before."""


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _forget() -> None:
    """A forked process does not hear for its parent, not even for a moment: it would end it."""
    if _state.listens:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget)
