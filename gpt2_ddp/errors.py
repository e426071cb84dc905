"""The user's mistakes. Everything else that goes wrong is ours and crashes with its traceback."""

FIELD, VALUE, HINT = 100, 160, 320
"""Characters that a message gives its parts at most: a name may have 5,000, and a file's content any number."""


class UserError(Exception):
    """One or several mistakes in the user's input; a command prints each on an `error:` line and exits with 2.

    Args:
        field: what is wrong, as the user wrote it (`optim.lr`, a file, a folder).
        value: the value it had.
        hint: what is wrong with it and what to do.

    Attributes:
        on_every_rank: whether all ranks raise it, so that the main process tells it and the others need not.
    """

    on_every_rank = False

    def __init__(self, field: str, value: object, hint: str):
        self.mistakes = [
            f"{truncate(field, FIELD)} = {truncate(value, VALUE)}: {truncate(' '.join(hint.split()), HINT)}"
        ]
        super().__init__(self.mistakes[0])

    @classmethod
    def join(cls, mistakes: list[str]) -> "UserError":
        """One error that reports all of `mistakes`, already worded."""
        error = cls.__new__(cls)
        Exception.__init__(error, "\n".join(mistakes))
        error.mistakes = mistakes
        return error

    def __reduce__(self):  # ranks send their mistakes to each other
        return UserError.join, (self.mistakes,)


def truncate(what: object, most: int = VALUE) -> str:
    """One line of at most `most` characters: what cannot be seen is escaped, the middle of more is left out."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(what))
    line = "".join(escaped)
    half = (most - 5) // 2
    return line if len(line) <= most else f"{line[:half]} ... {line[-half:]}"
