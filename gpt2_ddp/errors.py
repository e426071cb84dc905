"""User errors, which the main process prints. All other errors are bugs and end with a traceback."""

import os
import re
import sys

FIELD, VALUE, HINT = 100, 160, 320  # maximum characters of the three parts of a message
CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
"""User and password in a URL. A secret may have slashes."""


class UserError(Exception):
    """One or several errors in the user's input; a command prints each on an `error:` line and exits with 2.

    Args:
        field: the input as the user wrote it (`optim.lr`, a file, a folder).
        value: its value.
        hint: the problem and a solution.

    Attributes:
        on_every_rank: whether all ranks raise it, so the main process alone prints it.
    """

    on_every_rank = False

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

    def __reduce__(self):  # ranks send errors to each other
        return UserError.join, (self.mistakes,)


def without_credentials(text: str) -> str:
    """The text without users and passwords of URLs."""
    return CREDENTIALS.sub("***@", text)


def truncate(what: object, most: int = VALUE) -> str:
    """One line of at most `most` characters: escapes unprintable ones, omits the middle of longer text, and the
    credentials of URLs."""
    text = without_credentials(str(what))
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    half = (most - 5) // 2
    return line if len(line) <= most else f"{line[:half]} ... {line[-half:]}"


def is_main_process() -> bool:
    """Whether this is rank 0 or has no valid RANK."""
    rank = os.environ.get("RANK", "")
    return not rank.isdigit() or int(rank) == 0


def print_line(line: str) -> None:
    """Prints an error or a note to stderr, on the main process."""
    if is_main_process():
        print(line, file=sys.stderr, flush=True)
