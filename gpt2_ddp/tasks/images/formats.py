"""Files of pixels: MNIST's idx, and the pickles of CIFAR's own archives, of which nothing is run."""

import codecs
import gzip
import io
import math
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, regular

LARGEST = 2**31
"""Bytes of a file that is read whole."""
CIFAR_FILES = {
    "batches.meta": {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]},
    "meta": {"train": ["train"], "test": ["test"]},
}
"""CIFAR-10's and CIFAR-100's archives, by the file that has the names of the classes."""


def read_idx(path: Path) -> np.ndarray:
    """uint8 [N, ...] of an idx file, which may be compressed by gzip.

    Raises:
        UserError: it is none, or cut short.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(regular(path), "rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if (zeros, kind) != (0, 8) or not 1 <= dimensions <= 3:
                raise ValueError("not an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            if math.prod(shape) > LARGEST:
                raise ValueError(f"{' x '.join(map(str, shape))} bytes")
            content = file.read(math.prod(shape) + 1)
        if len(content) != math.prod(shape):
            raise ValueError(f"not the {' x '.join(map(str, shape))} bytes that it begins with")
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise UserError("data.path", path, f"cannot be read ({error}); give MNIST's own files") from error
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_cifar(folder: Path, names: str, split: str, labels: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Images uint8 [N, 32, 32, 3] and the names of their classes, from a folder of CIFAR's own archive.

    Args:
        names: the folder's key in CIFAR_FILES.
        labels: which of the archive's lists of labels, the first that there is.

    Raises:
        UserError: a file is missing or other than it.
    """
    known = _unpickle(folder / names)
    images: list[np.ndarray] = []
    found: list[str] = []
    for file in CIFAR_FILES[names][split]:
        content = _unpickle(folder / file)
        try:
            kind = next(kind for kind in labels if kind in content)
            images.append(content["data"].array().reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            classes = known["label_names" if kind == "labels" else f"{kind[:-1]}_names"]
            if len(content[kind]) != len(images[-1]) or min(content[kind], default=0) < 0:
                raise ValueError("labels that do not fit")
            found += [str(classes[label]) for label in content[kind]]
        except (StopIteration, LookupError, AttributeError, TypeError, ValueError) as error:
            hint = f"is not as CIFAR's archive has it ({error!r}); unpack the archive again"
            raise UserError("data.path", folder / file, hint) from error
    return np.concatenate(images), found


class _Array:
    """What stands in for an array of a pickle: its bytes and shape, of which numpy makes nothing meanwhile."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """uint8 [...]. Raises: ValueError, TypeError where it is anything else."""
        _, shape, dtype, by_columns, content = self.state
        if not isinstance(dtype, _Kind) or dtype.name not in ("u1", "uint8"):
            raise ValueError("not bytes")
        content = content.encode("latin1") if isinstance(content, str) else content
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


class _Kind:
    def __init__(self, name: Any = None, *_: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Nothing: bytes have no order."""


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"an encoding {encoding}")
    return codecs.encode(text, "latin1")


NAMES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}
"""What a pickle may ask for, each with what it gets."""


class _Unpickler(pickle.Unpickler):
    """Of arrays, lists, texts and numbers alone: every name that a pickle may ask for is one of ours."""

    def find_class(self, module: str, name: str) -> Any:
        """One of NAMES. Raises: UnpicklingError for any other, which a pickle could have run."""
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return NAMES[module, name]


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        found = _Unpickler(io.BytesIO(read_small(path, LARGEST)), encoding="latin1").load()
        if not isinstance(found, dict):
            raise ValueError("no dictionary")
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError) as error:
        hint = f"is not a file of CIFAR's archive ({error}); unpack the archive again"
        raise UserError("data.path", path, hint) from error
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
