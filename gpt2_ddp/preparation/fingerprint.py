"""What a source was when its tokens were made, so that a change is noticed later.

Beside the shards, `.source.jsonl` has a line for each file: [name, bytes, time in ns, SHA-256]. A file of the same size
and time is taken for the same, and read only where these differ. The digest of all names and hashes is in the recipe of
the manifest: without the record a comparison reads all files, and cannot name what has changed. Of a dataset on the Hub
its commit is kept.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular, sha256_file, write_atomically
from gpt2_ddp.preparation.find import find_files
from gpt2_ddp.preparation.sources import describe

RECORD = ".source.jsonl"
EXAMPLES = 2
"""Names that are told of each kind of change."""


class Entry(NamedTuple):
    """A file of the source; one that cannot be read has no hash."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str


def record_source(folder: Path, config: PrepareConfig) -> dict[str, Any]:
    """Writes the record, durably, and returns what the recipe keeps: {} of a dataset whose commit nobody knows."""
    if config.source.startswith("hub:"):
        commit = _commit(config)
        return {"commit": commit} if commit else {}
    entries = list(_entries(config, {}))
    write_atomically(folder / RECORD, "".join(f"{json.dumps(entry)}\n" for entry in entries))
    return {"files": len(entries), "bytes": sum(entry.bytes for entry in entries), "sha256": _digest(entries)}


def check_unchanged(folder: Path, config: PrepareConfig, was: dict[str, Any], then: str | None = None) -> None:
    """Compares the source with what it was. What cannot be known passes: nothing was recorded by older releases, the
    files are gone, the Hub does not answer.

    Args:
        was: what `record_source` returned.
        then: the source in words, when its tokens were made; None: they are being made.

    Raises:
        UserError: it has changed; says how.
    """
    changes = ""
    if "commit" in was:
        commit = _commit(config) or was["commit"]
        changes = f"commit {was['commit'][:12]} then, {commit[:12]} now" if commit != was["commit"] else ""
    elif "sha256" in was:
        before = _read(folder, was["sha256"])
        try:
            now = {entry.name: entry for entry in _entries(config, before)}
        except UserError:
            if then is None:
                raise
            print(f"note: {config.source} is not there any more, and was not compared with what it was")
            return
        if _digest(now.values()) != was["sha256"]:
            size = sum(entry.bytes for entry in now.values())
            sizes = f"{was['bytes']:,} bytes in {was['files']:,} files then, {size:,} in {len(now):,} now"
            changes = _difference(before, now) if before else sizes
            if then and then != describe(config):  # of another Python
                changes += f"; {then} then, {describe(config)} now"
    if changes:
        hint = f"has changed since its tokens were made ({changes}); choose another output, or delete that folder"
        if then is None:
            hint = f"has changed while it was read ({changes}); give the command again once nobody writes there"
        raise UserError("source", config.source, hint)


def _entries(config: PrepareConfig, known: dict[str, Entry]) -> Iterator[Entry]:
    root = _root(config.source)
    for path in tqdm(find_files(config.source, config.output), desc="looking at files", unit=" files", disable=None):
        name, size, mtime_ns, sha256 = os.path.relpath(path, root), 0, 0, ""
        with suppress(OSError):
            found = regular(path).stat()
            size, mtime_ns, was = found.st_size, found.st_mtime_ns, known.get(name)
            same = was is not None and (was.bytes, was.mtime_ns) == (size, mtime_ns)
            sha256 = was.sha256 if was and same else sha256_file(path)
        yield Entry(name, size, mtime_ns, sha256)


def _root(source: str) -> Path:
    """The folder that names are relative to, so that a source may be copied to another place."""
    if source == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    path = Path(os.path.expanduser(source))
    if os.path.exists(path):
        return path if os.path.isdir(path) else path.parent
    return Path(*takewhile(lambda part: not set(part) & set("*?["), path.parts))


def _digest(entries: Iterable[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps([entry.name, entry.sha256]).encode())
    return digest.hexdigest()


def _read(folder: Path, digest: str) -> dict[str, Entry]:
    """The record; empty if it is not the one with this digest."""
    with suppress(OSError, ValueError, TypeError), (folder / RECORD).open() as file:
        found = [Entry(*json.loads(line)) for line in file]
        if _digest(found) == digest:
            return {entry.name: entry for entry in found}
    return {}


def _difference(then: dict[str, Entry], now: dict[str, Entry]) -> str:
    kinds = {
        "added": [name for name in now if name not in then],
        "edited": [name for name in now if name in then and now[name].sha256 != then[name].sha256],
        "removed": [name for name in then if name not in now],
    }
    return "; ".join(f"{len(names):,} {kind}{_first(names)}" for kind, names in kinds.items())


def _first(names: list[str]) -> str:
    first = [truncate(name, 30) for name in names[:EXAMPLES]] + ["..."] * (len(names) > EXAMPLES)
    return f": {', '.join(first)}" if first else ""


def _commit(config: PrepareConfig) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    with suppress(OSError, ValueError, HTTPError):
        return HfApi().dataset_info(config.source.removeprefix("hub:"), revision=config.revision, timeout=10).sha
    return None
