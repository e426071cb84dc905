"""Crash-safe writing (temporary file, fsync, rename), disk errors as user errors, and checked
reading."""

import difflib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from gpt2_ddp.errors import UserError, truncate

T = TypeVar("T")

# bytes hashed and written at a time, so that the second of the two reads the CPU's cache
PIECE = 2**20
LARGEST_JSON = 2**24  # bytes of a file with one JSON object
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of a file that git-LFS puts in the place of a large one."""
LFS_HINT = "is a pointer of git-LFS, not the file itself; fetch the file with `git lfs pull`"
DEEPEST = 50  # levels of lists and objects in JSON and YAML
NO_NAME = re.compile(r"[\\\x00-\x1f\x7f-\x9f]")  # characters that no name from outside may have


def below(folder: Path, name: str) -> Path:
    """The path of `name` below a folder. For each name from outside: in a URL, in a manifest, in a
    state, of an object. Raises: ValueError for a name that leads out of the folder, and for the
    folder itself."""
    parts = {*name.split("/")}
    if name.startswith("/") or ".." in parts or parts <= {"", "."} or NO_NAME.search(name):
        raise ValueError(f"{truncate(name, 100)} leads out of its folder, or is no name")
    return folder / name


def check_file_name(name: str) -> str:
    """The name of a file, from outside. Raises: ValueError unless a folder can have a file of this
    name."""
    below(Path(), name)
    if "/" in name:
        raise ValueError(f"{truncate(name, 100)} is in another folder")
    return name


def refuse_links(*paths: Path) -> None:
    """Raises: UserError if a path is a link. Whoever made its folder chose what a write through it
    would change."""
    for path in paths:
        if path.is_symlink():
            problem = "is a link, and nothing is written through links in a run folder"
            raise UserError("run folder", path, f"{problem}; put what it links to in its place")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turns an OSError while `path` is written, renamed or removed into a UserError with a hint."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        hint = "free space on that disk, or check its rights and limits"
        message = f"{problem}; {hint}, then run the same command again"
        raise UserError("file", path, message) from error


def write_atomically(path: Path, content: str | Iterable[bytes], durable: bool = True) -> None:
    """Replaces `path` with `content`. Readers find the whole old or the whole new file, after a
    crash, too. If not `durable`, a crash of the machine may leave any content. Raises: UserError as
    `writing`; the old file remains."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # of a crash
            # a link of that name is not followed: a received folder may have one
            with temporary.open("xb") as file:
                file.writelines([content.encode()] if isinstance(content, str) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            fsync_path(path.parent)


def write_hashed(path: Path, buffers: Iterable[Any]) -> tuple[int, str]:
    """Writes buffers of bytes to a file, and waits until they are on disk. Returns their number,
    and their SHA-256 in hex, computed from memory: comparing it with the file finds disk errors.
    Raises: OSError."""
    sha256 = hashlib.sha256()
    # one core hashes a piece while another writes it
    with path.open("wb") as file, ThreadPoolExecutor(1) as helper:
        for view in map(memoryview, buffers):
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                hashed = helper.submit(sha256.update, piece)
                file.write(piece)
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), sha256.hexdigest()


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, and waits until their names are on disk. Raises:
    OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Waits until a file's data, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is git-LFS's pointer to another; False if there is no such file."""
    try:
        with regular(path).open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def user_folder(variable: str, below_home: str) -> Path:
    """The folder that an environment variable names, or the one below the user's home. Raises:
    OSError for a user without a home. A container has such a user if it runs with an unknown user
    number."""
    if folder := os.environ.get(variable):
        return Path(folder).expanduser()
    try:
        return Path.home() / below_home
    except RuntimeError as error:
        raise FileNotFoundError(f"user {os.getuid()} has no home") from error


def size_of(path: Path) -> int:
    """Bytes of a regular file; 0 for none."""
    return path.stat().st_size if path.is_file() else 0


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex; about a second per GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular(path: Path) -> Path:
    """`path`, if it is a regular file: opening a pipe would block, and reading a device may never
    end. Raises: OSError for others."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "No file can have such a name") from error
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not an ordinary file, but a pipe or a device, or a folder")
    return path


def read_small(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError for other files."""
    with regular(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"More than {most:,} bytes")
    return content


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file that anybody may have written. Raises: OSError; ValueError, as
    `parse_json`."""
    value = parse_json(read_small(file, LARGEST_JSON))
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401  any JSON value
    """The value of JSON text that anybody may have written; numbers may be NaN or infinite. Raises:
    ValueError, also as `check_limits`."""
    try:
        return check_limits(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"is nested more than {DEEPEST} levels deep") from error


def check_limits(value: T, levels: int = DEEPEST) -> T:
    """The value of JSON or YAML. Raises: ValueError for more than so many levels, and integers
    above 64 bits."""
    if not levels:
        raise ValueError(f"is nested more than {DEEPEST} levels deep")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("has an integer of more than 64 bits")
    if isinstance(value, dict):
        items = [*cast(dict[str, object], value).values()]
    elif isinstance(value, list | tuple):
        items = [*cast(Sequence[object], value)]
    else:
        items = []
    for item in items:
        check_limits(item, levels - 1)
    return value


def local_copy(url: str) -> str:
    """The folder for a copy of what is at a URL or path. Raises: ValueError if it leads out of the
    cache, by a `..`; UserError if this user has no home."""
    try:
        copies = _copies()
    except OSError as error:
        hint = f"{error}; set HOME or XDG_CACHE_HOME to a folder for copies of {url}"
        raise UserError("HOME", "''", hint) from error
    return str(below(copies, url.replace("://", "/").lstrip("/")))


def url_of_copy(folder: str | os.PathLike[str]) -> str:
    """The URL whose `local_copy` is this folder, for messages; of any other folder its path."""
    with suppress(OSError, ValueError):
        scheme, *names = Path(folder).relative_to(_copies()).parts
        if names and ":" not in scheme:  # hub:OWNER/NAME is no URL
            root = "/" if scheme in ("file", "local") else ""
            return f"{scheme}://{root}{'/'.join(names)}"
    return str(folder)


def _copies() -> Path:
    """The folder of all copies. Raises: OSError if this user has no home."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "gpt2_ddp"


def no_such_folder(path: str | os.PathLike[str]) -> str:
    """The hint for a path where nothing is, with the nearest name beside it; empty if something is
    there."""
    if os.path.lexists(path):
        return ""
    folder, name = os.path.split(os.path.normpath(path))
    near: list[str] = []
    with suppress(OSError, ValueError):
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    if not near:
        return "there is no such folder"
    return f"there is no such folder; did you mean {os.path.join(folder, near[0])}?"


def free_name(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    free = path
    number = 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
