"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP: handlers of stop requests, from a script's start to its end.
No torch.

    signal ─▶ _on_signal   in the main thread, once that runs Python again:
          │                the training's handler, or else Stopped is raised
          └─▶ _listen      in a thread, at once, by Python's wake-up pipe:
                           reports the signal; after 2 s ends a process without a handler

A training installs its own handler (`install_handlers`). At any other time there is nothing to
save, so the signal ends the process by an exception. If the main thread runs no Python, as in a
collective that waits for a rank, it ends by force.

SIGHUP, of a terminal that closes, stays ignored where it is ignored at the start, as under nohup.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from gpt2_ddp.distributed.environment import stop_code, world_size

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 130  # exit code after a SIGINT that ends the process at once, as in a shell
PATIENCE_SECONDS = 2.0  # until a process with nothing to save is ended by force
QUICK_SECONDS = 0.2  # after which a process that still runs reports the signal
# a further signal within this time is an echo: launchers forward signals that ranks also receive
ECHO_SECONDS = 1.0

Handler = Callable[[int, FrameType | None], None]


class Stopped(BaseException):
    """A signal, whose name is the message, stopped the process with nothing to save. A
    BaseException: no failure."""


def _do_nothing() -> None:
    pass


@dataclass
class SignalState:
    """What handlers, threads and exit handlers of this process share."""

    active: bool = False  # inside `exit_on_signal`
    first: str = ""  # name of the first signal
    first_at: float = 0.0  # its time on the monotonic clock
    handler: Handler | None = None  # installed handler; None: a first signal ends the process
    had_handler: bool = False  # whether a handler was ever installed
    exit_code: int = 1  # of a rank
    announce: Callable[[], object] = _do_nothing  # called before a forced end


_state = SignalState()


@contextmanager
def exit_on_signal(print_line: Callable[[str], None]) -> Generator[None]:
    """Ends the process, with one line by `print_line`, on a signal without an installed handler.
    For the main thread.

    Python's handlers wait until the main thread runs Python. A thread therefore reads Python's
    wake-up pipe: it reports the signal, and ends a process with nothing to save after
    `PATIENCE_SECONDS`. Raises SystemExit with the exit code of a stopped command.

    A rank ends as soon as its exit handlers have run. Threads of gloo and of the watchdog may wait
    for Python's lock. One that gets it while the interpreter shuts down aborts the process:
    "terminate called without an active exception".
    """
    atexit.register(_end_rank)  # before all others, so that it is called last
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _state.first = ""
    _state.had_handler = False
    _state.handler = None
    _state.active = True
    _state.exit_code = 1
    threading.Thread(target=_listen, args=(reader, print_line), name="signals", daemon=True).start()
    restore = _set_handlers()
    try:
        try:
            yield
            _state.exit_code = 0
        except SystemExit as end:
            # as Python's own: a text, which it prints, is a failure
            _state.exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except RuntimeError:
            # a rank that stops first closes its connections; this rank's signal comes from the
            # launcher a moment later
            if world_size() > 1 and not _state.had_handler:
                time.sleep(PATIENCE_SECONDS)
            raise
    except KeyboardInterrupt:
        print_line("ended at once by SIGINT")
        _exit(INTERRUPTED)
    except (Stopped, Exception) as error:
        # some libraries catch Stopped while they are imported, and then fail
        if not isinstance(error, Stopped) and (not _state.first or _state.had_handler):
            raise
        print_line(_stop_message(_state.first or str(error)))
        _exit(stop_code())
    finally:
        restore()
        signal.set_wakeup_fd(wakeup_before)
        os.close(writer)
        _state.active = False
        # an interpreter that shuts down has its exit code already
        atexit.register(_set_handlers, signal.SIG_IGN)


def install_handlers(handler: Handler, last: bool = True) -> Callable[[], None]:
    """Calls `handler` for every signal, until the returned function is called. Does nothing outside
    the main thread. If `last`, signals are ignored afterwards. A SIGINT that follows another
    signal, and is no echo of it, raises KeyboardInterrupt at any time."""
    if threading.current_thread() is not threading.main_thread():
        return _do_nothing  # Python allows it in the main thread only
    _state.first = ""
    handler_before = _state.handler
    _state.handler = handler
    _state.had_handler = True
    restore = _set_handlers()

    def uninstall() -> None:
        _state.handler = _ignore if last else handler_before
        restore()

    return uninstall


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handles a signal after which the process ends anyway."""


def before_forced_end(announce: Callable[[], object]) -> None:
    """Has a thread call `announce` before a signal ends the process while its main thread runs no
    Python."""
    _state.announce = announce


def has_signal() -> bool:
    """Whether this process has received one of the signals, since the newest handler was
    installed."""
    return bool(_state.first)


def _on_signal(number: int, frame: FrameType | None) -> None:
    is_first = not _state.first
    if is_first:
        _state.first = signal.Signals(number).name
        _state.first_at = time.monotonic()
    if _state.handler is not None:
        _state.handler(number, frame)
    elif is_first:
        raise Stopped(_state.first)
    is_echo = time.monotonic() <= _state.first_at + ECHO_SECONDS
    if number == signal.SIGINT and not (is_echo or is_first):
        raise KeyboardInterrupt


def _set_handlers(handler: Handler | signal.Handlers = _on_signal) -> Callable[[], None]:
    """Sets the handler of the signals; returns the function that restores the handlers before."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if not (number == signal.SIGHUP and is_ignored)]
    before = {number: signal.signal(number, handler) for number in handled}

    def restore() -> None:
        for number, previous in before.items():
            signal.signal(number, previous)

    return restore


def _listen(reader: int, print_line: Callable[[str], None]) -> None:
    reported = False
    with open(reader, "rb", buffering=0) as pipe:
        while byte := pipe.read(1):
            if reported or byte[0] not in SIGNALS:
                continue
            reported = True
            name = signal.Signals(byte[0]).name
            ends = _state.handler is None
            if ends:  # most processes end by the exception meanwhile, which prints its own line
                time.sleep(QUICK_SECONDS)
            if _state.active:
                print_line(f"{name} received: stopping")
            if ends:
                time.sleep(PATIENCE_SECONDS - QUICK_SECONDS)
            if ends and _state.handler is None and _state.active:
                print_line(_stop_message(name))
                _state.announce()
                os._exit(stop_code())


def _stop_message(name: str) -> str:
    return f"stopped by {name}; nothing was lost: run the same command again"


def _exit(code: int) -> None:
    _state.exit_code = code
    _end_rank()  # at once: an exit handler may wait for a rank
    raise SystemExit(code)


def _end_rank() -> None:
    if os.environ.get("WORLD_SIZE"):  # one rank alone has a process group, too
        with suppress(OSError, ValueError):  # closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_state.exit_code)


_forking = threading.local()  # signals that the forking thread had blocked


# A signal between a fork and the child's own handlers would be written into the wake-up pipe of the
# parent, which would then stop instead of its child. So signals wait while a process forks.


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    if _state.active:  # only its parent reads the wake-up pipe
        signal.set_wakeup_fd(-1)
        _set_handlers(signal.SIG_DFL)
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
