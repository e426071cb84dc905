"""The original archives of MNIST (idx files) and CIFAR (pickles). Reading them runs nothing that a pickle asks for."""

import gzip
import io
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, regular

LARGEST = 2**31
"""Bytes of a file that is read whole."""
ERRORS = OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError, zlib.error
MNIST = ("train", "train"), ("test", "test"), ("test", "t10k")
"""Splits, and the first word of their files' names; later ones take precedence."""
CIFAR = {
    "batches.meta": {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]},
    "meta": {"train": ["train"], "test": ["test"]},
}
"""Files of CIFAR-10's and CIFAR-100's archives, by the file that has the names of the classes."""


def read_archive(folder: Path, label_column: str | None) -> dict[str, tuple[Sequence[np.ndarray], list[Any]]]:
    """Images uint8 [H, W] or [32, 32, 3] of each split, and their labels; {} for a folder of other files.

    Raises:
        UserError: a file is damaged.
    """
    for names, splits in CIFAR.items():
        if all((folder / file).is_file() for files in ([names], *splits.values()) for file in files):
            kinds = [f"{label_column.rstrip('s')}s"] if label_column else ["labels", "fine_labels"]
            return {split: _read_cifar(folder, names, files, kinds) for split, files in splits.items()}
    found = {}
    for split, word in MNIST:
        images, labels = (sorted(folder.glob(f"{word}-{kind}?idx?-ubyte*")) for kind in ("images", "labels"))
        if images and labels:
            pixels, numbers = _read_idx(images[0]), _read_idx(labels[0])
            if pixels.ndim != 3 or numbers.shape != pixels.shape[:1]:
                hint = f"holds {pixels.shape} pixels for {numbers.shape} labels; give the files of one set"
                raise UserError("data.path", images[0], hint)
            found[split] = [*pixels], numbers.tolist()
    return found


def _read_idx(path: Path) -> np.ndarray:
    """uint8 [N, ...] of an idx file, plain or compressed by gzip."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(regular(path), "rb") as file:
            content = file.read(LARGEST)
        if content[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape)
    except ERRORS as error:
        raise UserError("data.path", path, f"cannot be read ({error}); give MNIST's own files") from error


def _read_cifar(folder: Path, names: str, files: list[str], kinds: list[str]) -> tuple[list[np.ndarray], list[str]]:
    """Images and the names of their classes; `kinds` are lists of labels, of which the first that is there counts."""
    images, labels, path = [], [], folder / names
    try:
        known = _unpickle(path)
        for path in (folder / file for file in files):
            batch = _unpickle(path)
            kind = next((kind for kind in kinds if kind in batch), kinds[0])
            classes = known["label_names" if kind == "labels" else f"{kind[:-1]}_names"]
            _, shape, dtype, by_columns, content = batch["data"].state
            if dtype.arguments[0] not in ("u1", "uint8") or min(batch[kind], default=0) < 0:
                raise ValueError("not pixels and labels")
            content = content.encode("latin1") if isinstance(content, str) else content
            pixels = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")
            images += [*pixels.reshape(len(batch[kind]), 3, 32, 32).transpose(0, 2, 3, 1)]
            labels += [str(classes[label]) for label in batch[kind]]
    except ERRORS as error:
        hint = f"is not a file of CIFAR's archive ({error}); unpack the archive again"
        raise UserError("data.path", path, hint) from error
    return images, labels


class _Stub:
    """Stands for numpy's arrays and types in a pickle: keeps what numpy would be given."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for the names in pickled arrays. Raises: UnpicklingError for all other names."""
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Stub
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickle(path: Path) -> dict[str, Any]:
    found = _Unpickler(io.BytesIO(read_small(path, LARGEST)), encoding="latin1").load()
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
