"""Runs and data at a URL of fsspec, such as s3://BUCKET/runs/mine: their objects."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
from fsspec.callbacks import Callback

from gpt2_ddp.data.manifest import LARGEST_MANIFEST, parse_manifest
from gpt2_ddp.errors import UserError, without_credentials
from gpt2_ddp.files import (
    below,
    check_file_name,
    parse_json,
    refuse_links,
    regular,
    write_atomically,
)

MANIFEST = "manifest.json"
CHECKPOINT = re.compile(r"step-\d{8,18}")
"""Names of checkpoints."""
BLOCK = 2**22
"""Bytes that are read at a time."""


class Bucket:
    """The objects below a URL of fsspec, by their names.

    Attributes:
        on_progress: called whenever a part of an object was sent or read.
    """

    def __init__(self, url: str):
        self.on_progress: Callable[[], object] = lambda: None
        self.url = url.rstrip("/")
        self._is_disk = url.startswith(("file:", "local:"))  # where a kill may leave half an object
        self._writing = threading.Lock()
        options = {"auto_mkdir": True} if self._is_disk else {}
        self._files, self._root = fsspec.core.url_to_fs(self.url, **options)

    def names(self, folder: str = "") -> list[str]:
        """Names of the objects and of what looks like folders; empty if there is nothing."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            paths = self._files.ls(f"{self._root}/{folder}", detail=False)
            return [Path(path).name for path in paths]
        return []

    def checkpoints(self) -> dict[str, str]:
        """The SHA-256 of the manifest of each whole checkpoint, by name, the newest first."""
        names = sorted(filter(CHECKPOINT.fullmatch, self.names()), key=step_of, reverse=True)
        manifests = {name: self.read(f"{name}/{MANIFEST}", LARGEST_MANIFEST) for name in names}
        return {
            name: hashlib.sha256(manifest).hexdigest()
            for name, manifest in manifests.items()
            if manifest
        }

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """The content of a small object; None without it. Raises: OSError for more
        than `most` bytes."""
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError):
            if self._is_disk:
                regular(Path(path))
            if most is not None and (size := self._files.size(path) or 0) > most:
                raise OSError(f"{name} has {size:,} bytes, more than {most:,}")
            content = self._files.cat_file(path)
            self.on_progress()
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object, and compares it. One thread at a time. Raises: OSError
        if it differs."""
        with self._writing:
            with self._whole(name) as target:
                self._files.pipe_file(target, content)
            if self.read(name) != content:
                raise OSError(f"{name} is not what was written")

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """Where to write an object, which is then there as a whole."""
        target = f"{self._root}/{name}"
        if not self._is_disk:
            yield target
            return
        for written in (name, f"{name}.tmp"):
            self._refuse_links(written)
        yield f"{target}.tmp"
        self._files.mv(f"{target}.tmp", target)

    def _refuse_links(self, name: str) -> None:
        """Raises: UserError if an object, or a folder that it is in, is a link of a disk. Somebody
        else may have made the folder at the URL, and the link may lead out of it."""
        if self._is_disk:
            parts = Path(name).parts
            refuse_links(*(Path(self._root, *parts[:count]) for count in range(1, len(parts) + 1)))

    def put(self, file: Path, name: str, sha256: str) -> None:
        """Copies a file there, and compares its hash. Raises: OSError if it differs."""
        with self._whole(name) as target:
            self._files.put_file(str(file), target, callback=_Progress(self.on_progress))
        digest = hashlib.sha256()
        with self._files.open(f"{self._root}/{name}", "rb", block_size=BLOCK) as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                self.on_progress()
        if digest.hexdigest() != sha256:
            raise OSError(f"{name} is not what was written")

    def get(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Copies these objects below a name into a folder; leaves out what is not there. Raises:
        ValueError for a name that is no file of the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            target = below(folder, check_file_name(file))
            with suppress(FileNotFoundError):
                path = "/".join(filter(None, (self._root, name, file)))
                self._files.get_file(path, str(target))

    def get_checkpoint(self, name: str, folder: Path) -> None:
        """Copies the files that a checkpoint's manifest lists into a folder, and the manifest last.
        If the manifest cannot be read, it is copied alone: whoever verifies the copy names the
        damage. Raises: FileNotFoundError without a manifest."""
        manifest = self.read(f"{name}/{MANIFEST}" if name else MANIFEST, LARGEST_MANIFEST)
        if manifest is None:
            raise FileNotFoundError("there is nothing")
        files: Iterable[str] = ()
        with suppress(ValueError):
            files = listed_files(manifest)
        self.get(name, folder, files)
        write_atomically(folder / MANIFEST, [manifest], durable=False)

    def remove(self, name: str) -> None:
        """Deletes an object, if it is there."""
        self._refuse_links(str(Path(name).parent))
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def remove_all(self, name: str) -> None:
        """Deletes all objects below a name, a manifest first. One by one: not every server accepts
        a list of them."""
        for file in (MANIFEST, *self.names(name)):
            self.remove(f"{name}/{file}")
        if self._is_disk:
            with suppress(FileNotFoundError):
                self._files.rmdir(f"{self._root}/{name}")


def step_of(name: str) -> int:
    """The step in a checkpoint's name."""
    return int(name.removeprefix("step-"))


class _Progress(Callback):
    """Passes on that a part was sent."""

    def __init__(self, on_progress: Callable[[], object]):
        super().__init__()
        self._on_progress = on_progress

    def call(self, *_: object, **__: object) -> None:
        self._on_progress()


def listed_files(manifest: bytes) -> dict[str, str]:
    """The SHA-256 of each file that a checkpoint's manifest lists, by its name. Raises: ValueError
    if the manifest cannot be read, or lists a file outside of its folder."""
    try:
        return {
            check_file_name(name): entry["sha256"]
            for name, entry in parse_json(manifest)["files"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} lists no files ({error})") from error


def fetch_data(folder: Path, url: str) -> None:
    """Copies the files that the manifest at a URL lists into a folder, unless its manifest is the
    same. A training compares their hashes. Raises: UserError if the manifest is missing or damaged,
    or if one of its shards is missing."""
    with reading(url, "data.path") as bucket:
        content = bucket.read(MANIFEST, LARGEST_MANIFEST)
        if content is None:
            raise FileNotFoundError(f"it has no {MANIFEST}")
        copied = folder / MANIFEST
        if copied.exists() and copied.read_bytes() == content:
            return
        manifest = parse_manifest(content, f"{url}/{MANIFEST}")
        shards = [shard.file for split in manifest.splits.values() for shard in split]
        copied.unlink(missing_ok=True)  # the shards may be others
        # which may be an encoding's name instead of a file's
        bucket.get("", folder, [*shards, manifest.tokenizer])
        if missing := [shard for shard in shards if not (folder / shard).exists()]:
            hint = f"has no {missing[0]}, which its {MANIFEST} lists; copy the data there again"
            raise UserError("data.path", url, hint)
        write_atomically(copied, [content])


@contextmanager
def reading(url: str, field: str) -> Iterator[Bucket]:
    """The bucket at the URL in a field. Raises: UserError for any error inside, since each kind of
    storage has its own."""
    try:
        yield Bucket(url)
    except UserError:
        raise
    except Exception as error:
        hint = "check its name, the network, and the credentials in the environment"
        raise UserError(field, url, f"cannot be used ({describe(error)}); {hint}") from error


def describe(error: Exception) -> str:
    """The kind and text of an error of the storage, on one line."""
    return without_credentials(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
