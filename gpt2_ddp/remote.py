"""Runs and data at a URL of fsspec, such as s3://BUCKET/runs/mine: their objects."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from gpt2_ddp.errors import UserError

MANIFEST = "manifest.json"
BLOCK = 2**22
"""Bytes that are read at a time."""


class Bucket:
    """The objects below a URL of fsspec, by their names."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._is_disk = url.startswith("file:")  # where a kill may leave half an object
        self._writing = threading.Lock()
        options = {"auto_mkdir": True} if self._is_disk else {}
        self._files, self._root = fsspec.core.url_to_fs(self.url, **options)

    def names(self, folder: str = "") -> list[str]:
        """Names of the objects and of what looks like folders; empty if there is nothing."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            return [Path(path).name for path in self._files.ls(f"{self._root}/{folder}", detail=False)]
        return []

    def checkpoints(self) -> dict[str, str]:
        """The SHA-256 of the manifest of each whole checkpoint, by name, the newest first."""
        steps = sorted((name for name in self.names() if name.startswith("step-")), reverse=True)
        manifests = {name: self.read(f"{name}/{MANIFEST}") for name in steps}
        return {name: hashlib.sha256(found).hexdigest() for name, found in manifests.items() if found}

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None without it."""
        with suppress(FileNotFoundError):
            return self._files.cat_file(f"{self._root}/{name}")
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object, and compares it. One thread at a time. Raises: OSError if it differs."""
        with self._writing:
            with self._whole(name) as target:
                self._files.pipe_file(target, content)
            if self.read(name) != content:
                raise OSError(f"{name} is not what was written")

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """Where to write an object, which is then there as a whole."""
        target = f"{self._root}/{name}"
        yield f"{target}.tmp" if self._is_disk else target
        if self._is_disk:
            self._files.mv(f"{target}.tmp", target)

    def put(self, file: Path, name: str, sha256: str) -> None:
        """Copies a file there, and compares its hash. Raises: OSError if it differs."""
        with self._whole(name) as target:
            self._files.put_file(str(file), target)
        with self._files.open(f"{self._root}/{name}", "rb", block_size=BLOCK) as stream:
            digest = hashlib.file_digest(stream, "sha256")
        if digest.hexdigest() != sha256:
            raise OSError(f"{name} is not what was written")

    def get(self, name: str, folder: Path) -> None:
        """Copies all objects below a name into a folder, a manifest last. Names of objects have a dot, unlike those of
        folders. Raises: FileNotFoundError if there are none."""
        files = [file for file in self.names(name) if "." in file]
        if not files:
            raise FileNotFoundError("there is nothing")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(files, key=MANIFEST.__eq__):
            self._files.get_file("/".join(filter(None, (self._root, name, file))), str(folder / file))

    def remove(self, name: str) -> None:
        """Deletes an object, if it is there."""
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def remove_all(self, name: str) -> None:
        """Deletes all objects below a name, a manifest first. One by one: not every server accepts a list of them."""
        for file in (MANIFEST, *self.names(name)):
            self.remove(f"{name}/{file}")
        if self._is_disk:
            with suppress(FileNotFoundError):
                self._files.rmdir(f"{self._root}/{name}")


def fetch_data(folder: Path, url: str) -> None:
    """Copies the shards at a URL, and all else there, into a folder, unless its manifest is the same. A training
    compares their hashes. Raises: UserError if there is no manifest."""
    with reading(url, "data.path") as bucket:
        manifest = bucket.read(MANIFEST)
        if manifest is None:
            raise FileNotFoundError(f"it has no {MANIFEST}")
        if not (folder / MANIFEST).exists() or (folder / MANIFEST).read_bytes() != manifest:
            bucket.get("", folder)


@contextmanager
def reading(url: str, field: str) -> Iterator[Bucket]:
    """The bucket at the URL in a field. Raises: UserError for any error inside, since each kind of storage has its
    own."""
    try:
        yield Bucket(url)
    except UserError:
        raise
    except Exception as error:
        hint = "check its name, the network, and the credentials in the environment"
        raise UserError(field, url, f"cannot be used ({describe(error)}); {hint}") from error


def describe(error: Exception) -> str:
    """The kind and text of an error of the storage, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
