"""The body of every script: command line, exit code, signals, errors on one line."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import NoReturn

from gpt2_ddp.config.base import Section
from gpt2_ddp.config.cli import C, Default, load
from gpt2_ddp.distributed.environment import (
    DIVERGED,
    check_launcher,
    processes_here,
    record_exit,
    under_launcher,
)
from gpt2_ddp.distributed.process import CHILD, end_with_parent, main_process_here, wait_for_end
from gpt2_ddp.distributed.signals import exit_on_signal
from gpt2_ddp.distributed.streams import standard_streams
from gpt2_ddp.errors import UserError, is_main_process, print_line, print_own, user_error_of

REPORT_SECONDS = 10.0
"""How long a rank with a user error waits for the main process, which reports the same one."""
RECORD_SECONDS = 600.0
"""How long the ranks of a run that diverged wait for the main process, which records it and copies
the run."""


def run_command(
    command: type[C],
    main: Callable[[C], object] | str,
    default: Default = None,
    settings_of: str = "",
) -> NoReturn:
    """The body of every script: parses `sys.argv`, calls `main` and exits.

    The exit code is that of `main`, or 0 if it returns no integer. It is 2 after a user error, 75
    if a signal stopped it, and 141, as after SIGPIPE, if standard output is closed, as by `| head`.

    Args:
        command: class of the script's configuration.
        main: the work, or its name, `module:function`. It is imported after `--help`, which stays
            fast.
        default: preset without `--config`.
        settings_of: name of the function that returns the settings of the class in `--task`, for
            `--help` and `--print_config`.
    """
    faulthandler.enable(2)  # a library that crashes is found by the calls on stderr
    with exit_on_signal(print_line), standard_streams():
        # the parent may end without passing the signal on
        if under_launcher() or CHILD in os.environ:
            end_with_parent(signal.SIGTERM)
        try:
            find_settings = partial(_call, settings_of) if settings_of else None
            config = load(command, sys.argv[1:], default, find_settings)
            check_launcher()
            if command.in_one_process and is_one_of_several():
                if os.environ["LOCAL_RANK"] != "0":
                    sys.exit(0)
                note = "this command runs in one process; the launcher's others have ended"
                print_line(f"note: {note}")
            work = resolve_name(main) if isinstance(main, str) else main
            code = work(config)
        except (UserError, MemoryError, RuntimeError, OSError) as error:
            mistake = user_error_of(error)
            if not isinstance(mistake, UserError):
                raise
            report(mistake)
            code = record_exit(2)
        if code == DIVERGED:
            main_process = main_process_here()
            if main_process:
                wait_for_end(main_process, RECORD_SECONDS)
        sys.exit(code if isinstance(code, int) else 0)


def _call(function: str, task: str, is_flag: bool) -> type[Section]:
    """The result of `function`, `module:function`, which is imported now."""
    return resolve_name(function)(task, is_flag)


def is_one_of_several() -> bool:
    """Whether a launcher started this process as one of several on this machine; not for the child
    of such a rank."""
    return (
        under_launcher()
        and processes_here() > 1
        and "LOCAL_RANK" in os.environ
        and CHILD not in os.environ
    )


def report(error: UserError) -> None:
    """Prints the `error:` lines of a user error, once for all ranks of this machine, before this
    process may end. (A launcher ends all ranks as soon as one has ended.) The main process prints
    them. Other ranks wait for its end. If it continues, the first of them prints."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if is_main_process():
        for mistake in [] if error.is_printed else error.mistakes:
            print_line(f"error: {mistake}")
    elif main_process := main_process_here():
        # each rank waits longer than the rank below it, so that only one prints
        if not wait_for_end(main_process, REPORT_SECONDS + 2 * rank):
            print_own(error)
    elif rank == 0 and not error.on_every_rank:  # the main process is on another machine
        print_own(error)
