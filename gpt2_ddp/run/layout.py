"""What lies in a run's folder, for those who only look at it. No torch: status.py answers at once."""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS, SAMPLES, STATUS, CONFIG = "metrics.jsonl", "samples.jsonl", "status.json", "config.yaml"
SAVED = ".saved"
"""There once a checkpoint was: without any, the run is not at its beginning, but has lost them."""


def read_status(folder: Path) -> dict[str, Any]:
    """What the run folder's status.json says; nothing where it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / STATUS).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def is_held(folder: Path) -> bool:
    """Whether a trainer holds the run folder. Not for the trainer itself, which would let go of it thereby."""
    try:
        lock = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
