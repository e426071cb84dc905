"""The standard streams of commands and of the processes that they start. No torch."""

import errno
import io
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

from gpt2_ddp.distributed.environment import record_exit
from gpt2_ddp.errors import UserError, print_line

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer  # exists for type checkers only

CLOSED = 128 + signal.SIGPIPE
"""Exit code of a command whose standard output was closed, as after SIGPIPE."""


class OutputLost(BaseException):
    """The standard output cannot be written: its pipe is closed, or the disk of its file is full.
    The cause is its OSError. A BaseException: it is no failure of the files that a command reads or
    writes."""


@contextmanager
def standard_streams() -> Generator[None]:
    """Replaces the standard streams meanwhile. Closed ones (`>&-`) are /dev/null. Characters that
    the terminal's encoding lacks become `?`. Errors of stderr are ignored, and those of a closed
    terminal. Raises SystemExit if stdout cannot be written otherwise: 141 for a closed pipe; else
    2, with an `error:` line."""
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    sys.stdout = _replaced(sys.stdout, is_output=True)
    sys.stderr = _replaced(sys.stderr)
    try:
        try:
            yield
        except SystemExit as end:
            if end.code in (None, 0):
                sys.stdout.flush()
            raise
        sys.stdout.flush()
    except OutputLost as lost:
        raise SystemExit(_exit_code(lost)) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OutputLost as lost:
                _exit_code(lost)
            except (AttributeError, ValueError):  # none; closed
                pass
        sys.stdout, sys.stderr = before


def _open_closed_streams() -> None:
    """Opens /dev/null in place of each standard stream that the shell closed. Otherwise its number
    would be that of the next file that is opened, such as a checkpoint, and output of libraries
    would be written into that file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python found it closed
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (as Python does it)


def _exit_code(lost: OutputLost) -> int:
    """The exit code of a command that lost its output. What is still buffered goes nowhere."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    if isinstance(lost.__cause__, BrokenPipeError):
        return CLOSED
    hint = f"cannot be written ({lost}); send it elsewhere"
    print_line(f"error: {UserError('standard output', 'this one', hint)}")
    return record_exit(2)


def _replaced(stream: TextIO, is_output: bool = False) -> TextIO:
    """A stream of the same descriptor and encoding. A stream without a descriptor stays, as in
    notebooks."""
    try:
        number = stream.fileno()
        stream.flush()
    except (AttributeError, OSError, ValueError):  # no stream; one in memory; a closed one
        return stream
    is_unbuffered = getattr(stream, "write_through", False)
    descriptor = _Descriptor(number, is_output)
    return io.TextIOWrapper(
        cast(BinaryIO, descriptor) if is_unbuffered else io.BufferedWriter(descriptor),
        encoding=stream.encoding,
        errors="replace" if is_output else "backslashreplace",
        line_buffering=bool(stream.line_buffering),
        write_through=is_unbuffered,
    )


class _Descriptor(io.FileIO):
    """The open file of a standard stream."""

    def __init__(self, number: int, is_output: bool):
        super().__init__(number, "w", closefd=False)
        self._is_output = is_output

    def write(self, data: "ReadableBuffer") -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            # EIO: the terminal is gone, and SIGHUP follows
            if self._is_output and error.errno != errno.EIO:
                raise OutputLost(error.strerror) from error
            return memoryview(data).nbytes
