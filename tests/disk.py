"""A disk for the tests: stands between Python and its files, tells every operation that changes
them, may refuse it."""

import builtins
import errno
import io
import os
import threading

FULL = errno.ENOSPC
NAMED = ("mkdir", "rename", "replace", "unlink", "rmdir")


class File:
    """A file open for writing, whose writes are told."""

    def __init__(self, file, name, tell):
        self._file = file
        self._name = name
        self._tell = tell

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, content):
        self._tell("write", self._name)
        return self._file.write(content)


def interpose(folder, tell):
    """From now on, and in this process, `tell(operation, name)` is called before whatever changes a
    file in `folder`: what it raises is raised in the place of the operation. `name` is the path
    inside `folder`, or the file's own name where a tree is removed. Only this thread's operations
    count, and those of the work behind the training."""
    thread = threading.get_ident()

    def note(operation, path, inside=False):
        path = (
            os.fspath(path) if not isinstance(path, int) else os.readlink(f"/proc/self/fd/{path}")
        )
        own = threading.get_ident() == thread or threading.current_thread().name == "background"
        inside = (inside or str(path).startswith(str(folder))) and own
        name = str(path).removeprefix(f"{folder}/")
        if inside:
            tell(operation, name)
        return name if inside else None

    def named(operation):
        original = getattr(os, operation)

        def interposed(path, *args, **kwargs):
            note(operation, path, inside=kwargs.get("dir_fd") is not None)
            return original(path, *args, **kwargs)

        return interposed

    for operation in NAMED:
        setattr(os, operation, named(operation))

    fsync = os.fsync
    sendfile = os.sendfile
    opening = io.open

    def interposed_open(file, mode="r", *args, **kwargs):
        name = note("open", file) if mode[0] in "wax" and not isinstance(file, int) else None
        opened = opening(file, mode, *args, **kwargs)
        return File(opened, name, tell) if name else opened

    def interposed_fsync(descriptor):
        note("fsync", descriptor)
        fsync(descriptor)

    def interposed_sendfile(out, *args, **kwargs):
        note("write", out)
        return sendfile(out, *args, **kwargs)

    os.fsync = interposed_fsync
    os.sendfile = interposed_sendfile
    io.open = builtins.open = interposed_open


def refuse(number=FULL):
    """What a disk answers."""
    raise OSError(number, os.strerror(number))
