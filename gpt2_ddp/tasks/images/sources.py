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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_small, regular
from gpt2_ddp.preparation.source_files import find_files

TEST = ("test", "validation", "val")  # splits that can be the one to test on; the first that is there is
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels", "class")
SUFFIXES = {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tga", ".tif", ".tiff", ".webp", ".avif"}
SUFFIXES |= {".pbm", ".pgm", ".pnm", ".ppm"}
HINT = (
    "name a folder with train/CLASS/*.png and test/CLASS/*.png, with train and test parquet files, of save_to_disk, or "
    "of the unpacked archive of CIFAR or MNIST"
)
LARGEST = 2**31  # bytes of a file that is read whole
ERRORS = OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError
ERRORS = *ERRORS, pickle.UnpicklingError, zlib.error
"""Errors of reading a damaged pickle, gzip, JSON or parquet file."""
MNIST = {"train": "train", "test": "t10k"}
"""Splits of idx files, and the first word of their names."""
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
    images: Any  # `Stored` ones, indexed by lists of rows: an array, or a column of `datasets`
    labels: list[Any]
    names: list[str] | None = None  # of the classes, by number, where the source has them

    def where(self, row: int) -> str:
        """The image's name in messages."""
        stored = self.images[row] if isinstance(self.images, np.ndarray) else None
        return str(stored) if isinstance(stored, Path) else f"{self.place}, row {row}"


Splits = dict[str, Callable[[], Split]]  # a function for each split that reads it


def read_source(config: ClassifierDataConfig) -> tuple[dict[str, Split], list[str]]:
    """The splits `train` and, where there is one, `test`; and notes for the user. Raises: UserError."""
    field, source = ("data.path", config.path) if config.path else ("data.name", config.name)
    notes: list[str] = []
    splits = _open_folder(config, config.path, notes) if config.path else _open_hub(config)
    if "train" not in splits:
        hint = f"has no split train ({', '.join(sorted(splits)) or 'none'}); name files or folders train and test"
        raise UserError(field, source, hint)
    found, used = {"train": splits["train"]()}, ["train"]
    for name in [name for name in TEST if name in splits]:
        split = splits[name]()
        if not split.labels or any(label != -1 for label in split.labels):  # -1: unlabelled
            found["test"] = split
            used.append(name)
            break
    rest = sorted(name or "files without a split" for name in splits if name not in used)
    return found, notes + [f"{source}: {', '.join(rest)} not used; {' and '.join(used)} used"] * bool(rest)


def _open_folder(config: ClassifierDataConfig, folder: str, notes: list[str]) -> Splits:
    if not os.path.isdir(folder):
        raise UserError("data.path", folder, f"no such folder; {HINT}")
    files = _files_below(folder, "data.path")
    if any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json")):
        return _open_saved(config, folder)
    if archive := _open_archive(Path(folder), config.label_column):
        return archive
    if tables := [file for file in files if file.suffix == ".parquet"]:
        by_split = split_files(folder, tables)
        return {split: partial(_read_parquet, config, split, of_split) for split, of_split in by_split.items()}
    return _open_class_folders(folder, files, notes)


@contextmanager
def _reading(field: str, source: str, hint: str) -> Iterator[None]:
    """Turns an error of `datasets` into a UserError; `hint` has a place for the reason."""
    import datasets
    import datasets.exceptions
    import pyarrow as pa
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the message below has the reason
    try:
        yield
    except (*ERRORS, pa.ArrowException, HTTPError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = " ".join(str(cause or error).split())[:200]
        raise UserError(field, source, hint.format(reason=reason, kind=type(error).__name__)) from error


UNREADABLE = "cannot be read ({reason}); replace damaged files"


def _open_saved(config: ClassifierDataConfig, folder: str) -> Splits:
    """The splits of a folder that `save_to_disk` wrote."""
    import datasets

    with _reading("data.path", folder, UNREADABLE):
        found = datasets.load_from_disk(folder)
    return _splits_of(config, found if isinstance(found, datasets.DatasetDict) else {"train": found})


def _splits_of(config: ClassifierDataConfig, found: Mapping[Any, Any]) -> Splits:
    return {str(split): partial(_read_rows, config, str(split), rows) for split, rows in found.items()}


def _open_hub(config: ClassifierDataConfig) -> Splits:
    """The splits of a dataset on the Hub, or of its copy in the cache."""
    import datasets
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
    with _reading("data.name", config.name, hint):
        found: Any = datasets.load_dataset(source)
    return _splits_of(config, found)


def _read_parquet(config: ClassifierDataConfig, split: str, files: Sequence[Path]) -> Split:
    """The rows of parquet files. `datasets` keeps a copy in its cache."""
    import datasets

    hint = f"split {split} {UNREADABLE}, and check the free space for HF_DATASETS_CACHE"
    with _reading("data.path", str(config.path), hint):
        names = {split: [glob.escape(str(file.absolute())) for file in files]}
        rows = datasets.load_dataset("parquet", data_files=names, split=split)
    return _read_rows(config, split, rows)


def _read_rows(config: ClassifierDataConfig, split: str, rows: Any) -> Split:
    import datasets

    image, label = _pick_columns(rows.features, config, split)
    labels = rows.select_columns([label]).with_format("arrow")[:][label].to_pylist()
    images = rows.with_format(None).select_columns([image])
    if isinstance(rows.features[image], datasets.Image):
        images = images.cast_column(image, datasets.Image(decode=False))
    names = getattr(rows.features[label], "names", None)
    return Split(f"{config.path or config.name}, split {split}", images[image], labels, names)


def _pick_columns(features: Mapping[str, Any], config: ClassifierDataConfig, split: str) -> list[str]:
    """The columns of images and labels: the ones in the configuration, or of usual names, or the only one of its type.
    Raises: UserError where there are none."""
    import datasets

    wanted = ("image", IMAGE_COLUMNS, datasets.Image), ("label", LABEL_COLUMNS, datasets.ClassLabel)
    found = []
    for field, usual, kind in wanted:
        given = getattr(config, f"{field}_column")
        typed = [name for name, feature in features.items() if isinstance(feature, kind)]
        names = [name for name in ((given,) if given else usual) if name in features]
        if not names and (given or len(typed) != 1):
            hint = f"split {split} has no column {given or ' or '.join(usual)}"
            raise UserError(f"data.{field}_column", given, f"{hint} (found: {', '.join(features) or 'none'}); name it")
        found.append([*names, *typed][0])
    return found


def split_files(folder: str, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the word at the beginning of their names, or of their folders': train, test, val or validation. If no
    name has such a word, all files are for training. Raises: UserError if names then begin with several words."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(files, key=str):
        words = map(_first_word, reversed(file.relative_to(folder).parts))
        found[next((word for word in words if word in ("train", *TEST)), "")].append(file)
    if {*found} != {""}:
        return dict(found)
    if len(words := sorted({_first_word(file.name) for file in files})) > 1:
        hint = f"has parquet files {', '.join(words)}; rename those of each split to train and test"
        raise UserError("data.path", folder, hint)
    return {"train": found[""]}


def _first_word(name: str) -> str:
    return re.split("[^a-z]", name.lower())[0]


def image_files(names: Sequence[str], field: str) -> Iterator[Path]:
    """The named files, and the images in the named folders, in order. Raises: UserError for a folder without images."""
    for name in names:
        if not os.path.isdir(name):
            yield Path(name)
            continue
        files = _files_below(name, field)
        found = [file for file in files if _is_image(file)]
        if not found:
            raise UserError(field, name, f"{_no_images(files)}; name others")
        if others := _others(files):
            print(f"note: {truncate(name)}: not used: {others}", file=sys.stderr)
        yield from found


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


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


def _no_images(files: Iterable[Path]) -> str:
    others = _others(files)
    return f"has no images{others and f', but {others}'}"


def _others(files: Iterable[Path]) -> str:
    """Numbers of files by suffix, without images; the most frequent first."""
    counts = Counter(truncate(file.suffix or "without a suffix", 20) for file in files if not _is_image(file))
    return join_first([f"{n:,} {suffix}" for suffix, n in counts.most_common()])


def _open_class_folders(folder: str, files: Sequence[Path], notes: list[str]) -> Splits:
    """The splits of `train/CLASS/1.png`; or `train` alone of `CLASS/1.png`, if there is no folder `train` of folders.
    `notes` get a line on other files.

    Files in folders below a class's folder belong to the class, which the `imagefolder` of `datasets` does otherwise.
    """
    images = {file: file.relative_to(folder).parts for file in files if _is_image(file)}
    if not images:
        raise UserError("data.path", folder, f"{_no_images(files)}; {HINT}")
    of_splits = any(names[0].lower() == "train" and len(names) > 2 for names in images.values())
    nested, flat = ({names[0] for names in images.values() if (len(names) > 2) == deep} for deep in (True, False))
    if nested - flat and not of_splits:
        hint = f"has folders of folders ({', '.join(sorted(nested - flat)[:4])}), but none named train; name the splits"
        raise UserError("data.path", folder, f"{hint} train and test, or put each class's images into one folder")
    if wrong := [file for file, names in images.items() if len(names) < 2 + of_splits]:
        depth = "SPLIT/CLASS" if of_splits else "CLASS"
        raise UserError("data.path", wrong[0], f"is not in a folder {depth}, but others are; {HINT}")
    if others := _others(files):
        notes.append(f"{folder}: not used: {others}; save images as .png or .jpg")
    splits: Splits = {}
    for split in sorted({names[0].lower() if of_splits else "train" for names in images.values()}):
        chosen = [file for file, names in images.items() if not of_splits or names[0].lower() == split]
        labels = [images[file][of_splits] for file in chosen]
        splits[split] = partial(Split, f"{folder}, split {split}", np.array(chosen, object), labels)
    return splits


def join_first(names: Sequence[str]) -> str:
    """The first eight names, and an ellipsis for more."""
    return ", ".join([*map(str, names[:8]), *(["..."] if len(names) > 8 else [])])


def _open_archive(folder: Path, label_column: str | None) -> Splits:
    """The splits of CIFAR's archive, which may be the folder or in it, or of idx files; {} for a folder of other files.
    Raises: UserError for several archives."""
    places = [(place, names) for place in (folder, *sorted(folder.glob("cifar-*"))) for names in CIFAR]
    archives = [(place, names) for place, names in places if (place / names).is_file()]
    if len(archives) > 1:
        known = join_first([place.name for place, _ in archives])
        raise UserError("data.path", folder, f"has several archives; name one of {known}")
    splits: Splits = {}
    for place, names in archives:
        label, files = CIFAR[names]
        for split, of_split in files.items():
            rows = partial(_cifar_rows, place / names, [place / file for file in of_split], label_column or label)
            splits[split] = partial(_gather, f"{folder}, split {split}", rows)
    for split, word in MNIST.items():
        files = [sorted(folder.glob(f"{word}-{kind}?idx?-ubyte*")) for kind in ("images", "labels")]
        if all(files):
            splits[split] = partial(_gather, f"{folder}, split {split}", partial(_idx_rows, files[0][0], files[1][0]))
    return splits


def _gather(place: str, read: Callable[[], Iterable[tuple[np.ndarray, Any]]]) -> Split:
    """The rows that `read` yields: uint8 [H, W] or [H, W, 3] each, and a label."""
    images, labels = zip(*read(), strict=True)
    return Split(place, np.stack(images), [*labels])


def _idx_rows(images: Path, labels: Path) -> Iterator[tuple[np.ndarray, int]]:
    pixels, numbers = _read_idx(images), _read_idx(labels)
    if pixels.ndim != 3 or numbers.shape != pixels.shape[:1]:
        hint = f"has {pixels.shape} pixels for {numbers.shape} labels; use files of one set"
        raise UserError("data.path", images, hint)
    yield from zip(pixels, numbers.tolist(), strict=True)


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
        raise UserError("data.path", path, f"cannot be read ({error}); use MNIST's original files") from error


def _cifar_rows(names: Path, files: Iterable[Path], label: str) -> Iterator[tuple[np.ndarray, str]]:
    """Images and the names of their classes. `names`: the file of those; `label`: label, fine_label or coarse_label."""
    path = names
    try:
        classes = _unpickle(names)[f"{label}_names"]
        for path in files:
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
