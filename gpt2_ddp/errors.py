"""User errors, which the main process prints. All other errors are bugs and end with a
traceback."""

import errno
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress

# maximum characters of the three parts of a message
FIELD = 100
VALUE = 160
HINT = 320
CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
"""User and password in a URL. A secret may have slashes."""
QUERY = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]+")
"""A URL with parameters, such as the signature that gives access to an object."""


class UserError(Exception):
    """One or several errors in the user's input; a command prints each on an `error:` line and
    exits with 2.

    Args:
        field: the input as the user wrote it (`optim.lr`, a file, a folder).
        value: its value.
        hint: the problem and a solution.

    Attributes:
        on_every_rank: whether all ranks raise it, so the main process alone prints it.
        is_printed: whether this rank has printed it, as one that alone has it does.
    """

    on_every_rank = False
    is_printed = False

    def __init__(self, field: str, value: object, hint: str):
        text = truncate(" ".join(hint.split()), HINT)
        self.mistakes = [f"{truncate(field, FIELD)} = {truncate(value, VALUE)}: {text}"]
        super().__init__(self.mistakes[0])

    @classmethod
    def join(cls, mistakes: list[str]) -> "UserError":
        """One error of several messages."""
        error = cls.__new__(cls)
        Exception.__init__(error, "\n".join(mistakes))
        error.mistakes = mistakes
        return error

    def __reduce__(self) -> tuple[Callable[[list[str]], "UserError"], tuple[list[str]]]:
        return UserError.join, (self.mistakes,)  # ranks send errors to each other


def without_credentials(text: str) -> str:
    """The text without users, passwords and parameters of URLs."""
    return QUERY.sub(r"\1***", CREDENTIALS.sub("***@", text))


def user_error_of(error: BaseException) -> BaseException:
    """The UserError of an exception for too little memory of this machine, which torch, numpy,
    Python and Linux raise by different classes; else the exception itself."""
    is_of_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    is_of_linux = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (is_of_torch or is_of_linux or isinstance(error, MemoryError)):
        return error
    size = re.search(r"tried to allocate (\d+) bytes", str(error))
    asked = f"{int(size[1]) / 1e9:,.1f} GB more" if size else "more"
    hint = (
        "does not fit into this machine's memory; end other programs, or choose a smaller model,"
        " fewer processes or a smaller --train.micro_batch_size"
    )
    return UserError("memory", asked, hint)


def print_own(error: UserError) -> None:
    """Prints a user error of this rank, which others may not have. Once."""
    if not error.is_printed:
        error.is_printed = True
        for mistake in error.mistakes:
            print(f"error: rank {os.environ.get('RANK')}: {mistake}", file=sys.stderr, flush=True)


def truncate(what: object, most: int = VALUE) -> str:
    """One line of at most `most` characters: escapes unprintable ones, omits the middle of longer
    text, and the credentials of URLs."""
    text = without_credentials(str(what))
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    half = (most - 5) // 2
    return line if len(line) <= most else f"{line[:half]} ... {line[-half:]}"


def is_main_process() -> bool:
    """Whether this is rank 0, or no rank: variables that a launcher would set are missing or
    wrong."""
    rank, world, *address = (
        os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    is_rank = rank.isdecimal() and world.isdecimal() and all(address)
    return not is_rank or not 0 < int(rank) < int(world)


def print_line(line: str) -> None:
    """Prints an error or a note to stderr, on the main process. Does nothing if stderr is
    closed."""
    if is_main_process():
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)
