"""The user's cache: where copies of what is at URLs lie."""

import os
from pathlib import Path


def local_copy(url: str) -> str:
    """The folder for a copy of what is at a URL or path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return str(cache / "gpt2_ddp" / url.replace("://", "/").lstrip("/"))
