"""The user's cache: where copies of what is at URLs lie."""

import os
from pathlib import Path

from gpt2_ddp.files import below


def local_copy(url: str) -> str:
    """The folder for a copy of what is at a URL or path. Raises: ValueError if it leads out of the cache, by a `..`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return str(below(cache / "gpt2_ddp", url.replace("://", "/").lstrip("/")))
