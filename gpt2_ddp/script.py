"""The body of every script: command line, exit code, signals, errors on one line."""

import faulthandler
import os
import select
import signal
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NoReturn

from gpt2_ddp.config.cli import C, Default, load
from gpt2_ddp.distributed.environment import record_exit, under_launcher
from gpt2_ddp.distributed.process import CHILD, end_with_parent
from gpt2_ddp.distributed.signals import exit_on_signal
from gpt2_ddp.errors import UserError, print_line


def run_command(command: type[C], main: Callable[[C], object] | str, default: Default = None) -> NoReturn:
    """The body of every script: parses `sys.argv`, calls `main` and exits.

    The exit code is that of `main`, or 0 if it returns no integer. It is 2 after a user error, 75 if a signal stopped
    it, and 141, as after SIGPIPE, if standard output is closed, as by `| head`.

    Args:
        command: class of the script's configuration.
        main: the work, or its name, `module:function`. It is imported after `--help`, which stays fast.
        default: preset without `--config`.
    """
    faulthandler.enable(2)  # a library that crashes is found by the calls on stderr
    with exit_on_signal(print_line):
        if under_launcher() or CHILD in os.environ:  # the parent may end without passing the signal on
            end_with_parent(signal.SIGTERM)
        try:
            config = load(command, sys.argv[1:], default)
            code = (resolve_name(main) if isinstance(main, str) else main)(config)
            print(end="", flush=True)
        except BrokenPipeError:
            stdout = sys.stdout.fileno()
            poll = select.poll()
            poll.register(stdout, 0)
            if not poll.poll(0):  # another pipe is broken
                raise
            code = 128 + signal.SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # for buffered output
        except UserError as error:
            for mistake in error.mistakes:
                print_line(f"error: {mistake}")
            code = record_exit(2)
        sys.exit(code if isinstance(code, int) else 0)
