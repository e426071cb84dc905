"""The user's cache: where copies of what is at URLs lie."""

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import below, user_folder


def local_copy(url: str) -> str:
    """The folder for a copy of what is at a URL or path. Raises: ValueError if it leads out of the cache, by a `..`;
    UserError if this user has no home."""
    try:
        cache = user_folder("XDG_CACHE_HOME", ".cache")
    except OSError as error:
        raise UserError("HOME", "''", f"{error}; set HOME or XDG_CACHE_HOME to a folder for copies of {url}") from error
    return str(below(cache / "gpt2_ddp", url.replace("://", "/").lstrip("/")))
