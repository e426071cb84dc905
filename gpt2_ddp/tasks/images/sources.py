"""Where images come from: class folders, archives of CIFAR and MNIST, and what `datasets` reads.

The split of an image is never guessed: only the name of a split's own file or folder decides it.
"""

import glob
import gzip
import io
import os
import pickle
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.distributed.ranks import is_main
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_small, regular
from gpt2_ddp.preparation.source_files import find_files

TEST = ("test", "validation", "val")  # splits that can be the one to test on; the first that is there is
COLUMNS = {"image": ("img", "image"), "label": ("label", "fine_label", "labels", "class")}
SUFFIXES = {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tga", ".tif", ".tiff", ".webp", ".avif"}
SUFFIXES |= {".pbm", ".pgm", ".pnm", ".ppm"}
HINT = "name a folder with train/CLASS/*.png and test/CLASS/*.png, with train and test parquet files, of save_to_disk, "
HINT += "or of the unpacked archive of CIFAR or MNIST"
UNREADABLE = "cannot be read ({reason}); replace damaged files"
LARGEST = 2**31  # bytes of a file that is read whole
ERRORS = OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError
ERRORS = *ERRORS, pickle.UnpicklingError, zlib.error
"""Errors of reading a damaged pickle, gzip, JSON or parquet file."""
CIFAR = {
    "batches.meta": ("label", {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}),
    "meta": ("fine_label", {"train": ["train"], "test": ["test"]}),
}
"""Labels and files of CIFAR-10's and CIFAR-100's archives, by the file that has the names of the classes."""
PICKLED = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
PICKLED |= {"encode": lambda text, encoding: text.encode("latin1")}
"""What the pickle of an array calls, by name."""


@dataclass(frozen=True)
class Split:
    """Images as they are stored, and the class of each by name or number."""

    place: str  # the split's name in messages
    images: Any  # as `decode_image` takes them, indexed by lists of rows: an array, or a column of `datasets`
    labels: list[Any]
    names: list[str] | None = None  # of the classes, by number, where the source has them

    def where(self, row: int) -> str:
        """The image's name in messages."""
        stored = self.images[row] if isinstance(self.images, np.ndarray) else None
        return str(stored) if isinstance(stored, Path) else f"{self.place}, row {row}"


Splits = Mapping[str, Callable[[], Split]]
"""A function for each split that reads it."""
Rows = Mapping[str, Iterable[tuple[Any, Any]]]
"""The images of each split, with their labels."""


def read_source(config: ClassifierDataConfig) -> dict[str, Split]:
    """The splits `train` and, where there is one, `test`. Raises: UserError."""
    field, source = _source(config)
    splits = _open_folder(config, config.path) if config.path else _open_hub(config)
    if "train" not in splits:
        hint = f"has no split train ({', '.join(sorted(splits)) or 'none'}); name files or folders train and test"
        raise UserError(field, source, hint)
    found, used = {"train": splits["train"]()}, ["train"]
    for name in [name for name in TEST if name in splits]:
        split = splits[name]()
        if not split.labels or any(label != -1 for label in split.labels):  # -1: unlabelled
            found["test"], used = split, ["train", name]
            break
    if rest := sorted(name or "files without a split" for name in splits if name not in used):
        note(f"{source}: {', '.join(rest)} not used; {' and '.join(used)} used")
    for name, split in found.items():
        if not split.labels:
            raise UserError(field, source, f"split {name} is empty")
    return found


def note(text: str) -> None:
    """Prints a line for the user, on the main process."""
    if is_main():
        print(f"note: {truncate(text, 600)}", file=sys.stderr)


def join_first(names: Sequence[str]) -> str:
    """The first eight names, and an ellipsis for more."""
    return ", ".join([*map(str, names[:8]), *(["..."] if len(names) > 8 else [])])


def _source(config: ClassifierDataConfig) -> tuple[str, str]:
    """The field that names the images, and its value."""
    return ("data.path", config.path) if config.path else ("data.name", config.name)


def _open_folder(config: ClassifierDataConfig, folder: str) -> Splits:
    if not os.path.isdir(folder):
        raise UserError("data.path", folder, f"no such folder; {HINT}")
    files = _files_below(folder, "data.path")
    if any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json")):
        return _open_rows(config, UNREADABLE, lambda datasets: datasets.load_from_disk(folder))
    rows: Rows = _archive_rows(Path(folder), config.label_column)
    tables = [file for file in files if file.suffix == ".parquet"]
    if tables and not rows:
        by_split = split_files(folder, tables)
        return {split: partial(_read_parquet, config, split, of_split) for split, of_split in by_split.items()}
    rows = rows or _class_folder_rows(folder, files)
    return {split: partial(_gather, f"{folder}, split {split}", of_split) for split, of_split in rows.items()}


def _gather(place: str, rows: Iterable[tuple[Any, Any]]) -> Split:
    rows = [*rows]
    return Split(place, np.fromiter((image for image, _ in rows), object, len(rows)), [label for _, label in rows])


def _open_rows(config: ClassifierDataConfig, hint: str, load: Callable[[Any], Any]) -> Splits:
    """The splits that `load` reads with the module `datasets`. `hint`: of its error, with a place for the reason."""
    import datasets.exceptions
    import pyarrow as pa
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the message below has the reason
    try:
        found = load(datasets)
    except (*ERRORS, pa.ArrowException, HTTPError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = " ".join(str(cause or error).split())[:200]
        raise UserError(*_source(config), hint.format(reason=reason, kind=type(error).__name__)) from error
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {str(split): partial(_read_rows, config, str(split), rows) for split, rows in splits.items()}


def _open_hub(config: ClassifierDataConfig) -> Splits:
    """The splits of a dataset on the Hub, or of its copy in the cache."""
    import datasets.config
    import huggingface_hub.constants
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    source = config.name if "/" in config.name else f"uoft-cs/{config.name}"
    try:
        huggingface_hub.HfApi().dataset_info(source, timeout=10)
    except (OSError, HTTPError):  # load_dataset would retry for long; the cache may have it
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    hint = "cannot be downloaded from the Hub here ({kind}); download the parquet files of "
    hint += f"huggingface.co/datasets/{source} on a machine with a network, and name their folder in --data.path"
    return _open_rows(config, hint, lambda datasets: datasets.load_dataset(source))


def _read_parquet(config: ClassifierDataConfig, split: str, files: Sequence[Path]) -> Split:
    """The rows of parquet files. `datasets` keeps a copy in its cache."""
    hint = f"split {split} {UNREADABLE}, and check the free space for HF_DATASETS_CACHE"
    names = {split: [glob.escape(str(file.absolute())) for file in files]}
    return _open_rows(config, hint, lambda datasets: datasets.load_dataset("parquet", data_files=names))[split]()


def _read_rows(config: ClassifierDataConfig, split: str, rows: Any) -> Split:
    """The split of a table. Its columns are the ones in the configuration, or of usual names, or the only one of their
    type. Raises: UserError where there are none."""
    import datasets

    found = []
    for field, kind in (("image", datasets.Image), ("label", datasets.ClassLabel)):
        given, usual = getattr(config, f"{field}_column"), COLUMNS[field]
        typed = [name for name, feature in rows.features.items() if isinstance(feature, kind)]
        names = [name for name in ((given,) if given else usual) if name in rows.features]
        if not names and (given or len(typed) != 1):
            hint = f"split {split} has no column {given or ' or '.join(usual)}"
            hint += f" (found: {', '.join(rows.features) or 'none'}); name it"
            raise UserError(f"data.{field}_column", given, hint)
        found.append([*names, *typed][0])
    image, label = found
    labels = rows.select_columns([label]).with_format("arrow")[:][label].to_pylist()
    images = rows.with_format(None).select_columns([image])
    if isinstance(rows.features[image], datasets.Image):
        images = images.cast_column(image, datasets.Image(decode=False))
    names = getattr(rows.features[label], "names", None)
    return Split(f"{_source(config)[1]}, split {split}", images[image], labels, names)


def split_files(folder: str, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the word at the beginning of their names, or of their folders': train, test, val or validation. If no
    name has such a word, all files are for training. Raises: UserError if names then begin with several words."""
    found: dict[str, list[Path]] = defaultdict(list)
    first: set[str] = set()
    for file in files:
        words = [re.split("[^a-z]", part.lower())[0] for part in reversed(file.relative_to(folder).parts)]
        found[next((word for word in words if word in ("train", *TEST)), "")].append(file)
        first.add(words[0])
    if {*found} != {""}:
        return found
    if len(first) > 1:
        hint = f"has parquet files {', '.join(sorted(first))}; rename those of each split to train and test"
        raise UserError("data.path", folder, hint)
    return {"train": found[""]}


def image_files(names: Sequence[str], field: str) -> list[Path]:
    """The named files, and the images in the named folders, in order. Raises: UserError for a folder without images."""
    found = []
    for name in names:
        is_folder = os.path.isdir(name)
        found += _images_of(name, _files_below(name, field), field, "name others") if is_folder else [Path(name)]
    return found


def _files_below(folder: str, field: str) -> list[Path]:
    """All files in a folder, in order. Raises: UserError for a folder that cannot be listed."""
    try:
        found = sorted(find_files(folder), key=str)
    except UserError:
        return []
    for file in found:
        if os.path.isdir(file) or not os.access(file.parent, os.X_OK, effective_ids=True):
            raise UserError(field, file, "cannot be listed; allow reading it (permissions r and x of all folders)")
    return found


def _images_of(folder: str, files: Sequence[Path], field: str, hint: str) -> list[Path]:
    """The images among the files of a folder; a note counts the others, the most frequent suffix first.
    Raises: UserError for no images."""
    images = [file for file in files if file.suffix.lower() in SUFFIXES]
    suffixes = (file.suffix or "without a suffix" for file in files if file.suffix.lower() not in SUFFIXES)
    counts = Counter(truncate(suffix, 20) for suffix in suffixes).most_common()
    others = join_first([f"{n:,} {suffix}" for suffix, n in counts])
    if not images:
        raise UserError(field, folder, f"has no images{others and f', but {others}'}; {hint}")
    if others:
        note(f"{truncate(folder)}: not used: {others}; save images as .png or .jpg")
    return images


def _class_folder_rows(folder: str, files: Sequence[Path]) -> Rows:
    """The rows of `train/CLASS/1.png`; or `train` alone of `CLASS/1.png`, if there is no folder `train` of folders.

    Files in folders below a class's folder belong to the class, which the `imagefolder` of `datasets` does otherwise.
    """
    images = {file: file.relative_to(folder).parts for file in _images_of(folder, files, "data.path", HINT)}
    of_splits = any(names[0].lower() == "train" and len(names) > 2 for names in images.values())
    nested, flat = ({names[0] for names in images.values() if (len(names) > 2) == deep} for deep in (True, False))
    if nested - flat and not of_splits:
        hint = f"has folders of folders ({', '.join(sorted(nested - flat)[:4])}), but none named train; name the splits"
        raise UserError("data.path", folder, f"{hint} train and test, or put each class's images into one folder")
    if wrong := [file for file, names in images.items() if len(names) < 2 + of_splits]:
        depth = "SPLIT/CLASS" if of_splits else "CLASS"
        raise UserError("data.path", wrong[0], f"is not in a folder {depth}, but others are; {HINT}")
    rows: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for file, names in images.items():
        rows[names[0].lower() if of_splits else "train"].append((file, names[of_splits]))
    return rows


def _archive_rows(folder: Path, label_column: str | None) -> Rows:
    """The rows of CIFAR's archive, or of idx files; {} for a folder of other files."""
    rows: dict[str, Iterable[tuple[Any, Any]]] = {}
    for name, (label, files) in CIFAR.items():
        if (names := folder / name).is_file():
            rows |= {split: _cifar_rows(names, of_split, label_column or label) for split, of_split in files.items()}
    for split, word in (("train", "train"), ("test", "t10k")):
        images, labels = (sorted(folder.glob(f"{word}-{kind}?idx?-ubyte*")) for kind in ("images", "labels"))
        if images and labels:
            rows[split] = _idx_rows(images[0], labels[0])
    return rows


def _idx_rows(*files: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Images uint8 [H, W] and their numbers, of two idx files, plain or compressed by gzip."""
    arrays = []
    for path in files:
        try:
            with (gzip.open if path.suffix == ".gz" else open)(regular(path), "rb") as file:
                content = file.read(LARGEST)
            if content[:3] != b"\0\0\x08":
                raise ValueError("not an idx file of bytes")
            shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
            arrays.append(np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape))
        except ERRORS as error:
            raise UserError("data.path", path, f"cannot be read ({error}); use MNIST's original files") from error
    pixels, numbers = arrays
    if pixels.ndim != 3 or numbers.shape != pixels.shape[:1]:
        hint = f"has {pixels.shape} pixels for {numbers.shape} labels; use files of one set"
        raise UserError("data.path", files[0], hint)
    yield from zip(pixels, numbers.tolist(), strict=True)


def _cifar_rows(names: Path, files: Iterable[str], label: str) -> Iterator[tuple[np.ndarray, str]]:
    """Images uint8 [32, 32, 3] and the names of their classes. `names`: the file of those, beside the others. `label`:
    label, fine_label or coarse_label."""
    path = names
    try:
        classes = _unpickle(names)[f"{label}_names"]
        for path in map(names.with_name, files):
            batch = _unpickle(path)
            pixels, numbers = batch["data"], batch[f"{label}s"]
            if pixels.dtype != np.uint8 or min(numbers, default=0) < 0:
                raise ValueError("not pixels and labels")
            images = pixels.reshape(len(numbers), 3, 32, 32).transpose(0, 2, 3, 1)
            yield from zip(images, [str(classes[number]) for number in numbers], strict=True)
    except ERRORS as error:
        hint = f"is not a file of CIFAR's archive ({error}); unpack the archive again"
        raise UserError("data.path", path, hint) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What the pickles of arrays call. Raises: UnpicklingError for all other names, so that nothing else runs."""
        if module.partition(".")[0] in ("numpy", "_codecs") and name in PICKLED:
            return PICKLED[name]
        raise pickle.UnpicklingError(f"it loads {module}.{name}")


def _unpickle(path: Path) -> dict[str, Any]:
    return _Unpickler(io.BytesIO(read_small(path, LARGEST)), encoding="latin1").load()
