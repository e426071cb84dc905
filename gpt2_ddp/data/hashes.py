"""The hashes of shards, and a record of those that were found right: terabytes need not be read at every start.

A line of `.verified.jsonl`, beside the shards, is a fact: the file of this name, size, times and inode had this hash.
Lines are only ever added, each by a write of its own, so that any number of processes may do so at once; one that is
damaged says nothing of any file that is there, and counts for nothing.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from gpt2_ddp.data.manifest import AGAIN, Manifest, Shard, token_dtype
from gpt2_ddp.data.shards import check_shard
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, sha256_file

RECORD = ".verified.jsonl"
LARGEST = 2**26
"""Bytes of a record, which then begins anew: 300,000 shards; or where inodes change at every start, many of these."""


def verify_shards(
    folder: Path, manifest: Manifest, part: int = 0, parts: int = 1, remember: bool = False, record: bool = True
) -> None:
    """Checks headers, sizes and SHA-256 of every `parts`-th shard from `part` on: a node's processes share the work.

    Args:
        remember: trust the record where it says that this very file was right.
        record: add to it what is found right, if the folder can be written.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    folder = Path(folder)
    known = _read(folder)
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    for shard in shards[part::parts]:
        check_shard(folder, shard, token_dtype(manifest.vocab_size))
        path = folder / shard.file
        fact = _fact(path, shard)  # of the file before it is read: one that changes meanwhile is another
        if remember and fact in known:
            continue
        if sha256_file(path) != shard.sha256:
            raise UserError("shard", path, f"is not the file that was prepared: its SHA-256 differs; {AGAIN}")
        if record and fact not in known:
            _add(folder, fact)


def _fact(path: Path, shard: Shard) -> str:
    found = path.stat()  # ctime, too: `cp -p` over a file sets the time of the copy, which may be the one before
    return json.dumps([shard.file, shard.sha256, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino])


def _read(folder: Path) -> set[str]:
    with suppress(OSError):
        if (folder / RECORD).stat().st_size > LARGEST:
            (folder / RECORD).unlink()
        return set(read_small(folder / RECORD, LARGEST).decode(errors="replace").splitlines())
    return set()


def _add(folder: Path, fact: str) -> None:
    with suppress(OSError):  # a folder that cannot be written: these shards are hashed at every start
        mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # the last: a pipe would wait for a reader
        descriptor = os.open(folder / RECORD, mode, 0o666)
        try:
            os.write(descriptor, f"{fact}\n".encode())
        finally:
            os.close(descriptor)
