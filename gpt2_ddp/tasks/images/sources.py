"""Where images come from: class folders, archives of CIFAR and MNIST, and what `datasets` reads.

The split of an image is never guessed: only the name of a split's own file or folder decides it.
"""

import glob
import itertools
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.preparation.source_files import find_files
from gpt2_ddp.tasks.images.archives import read_archive
from gpt2_ddp.tasks.images.decode import Stored

TEST = ("test", "validation", "val")
"""Splits that can be the one to test on; the first that is there is."""
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels", "class")
SUFFIXES = {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tga", ".tif", ".tiff", ".webp", ".avif"}
SUFFIXES |= {".pbm", ".pgm", ".pnm", ".ppm"}
BESIDE = {".csv", ".db", ".html", ".ini", ".json", ".jsonl", ".md", ".txt", ".xml", ".yaml", ".yml"}
"""Suffixes of files that often lie beside images; no note mentions them."""
HINT = (
    "give one with train/CLASS/*.png and test/CLASS/*.png, with train and test parquet files, of save_to_disk, or the "
    "unpacked archive of CIFAR or MNIST"
)


@dataclass(frozen=True)
class Split:
    """Images as they are stored, and the class of each by name or number.

    Args:
        place: the split's name in messages.
        images: a list, or a column of `datasets`.
        names: of the classes, by number, where the source has them.
        left_out: a line on files of the split that are not used; empty if there are none.
    """

    place: str
    images: Any
    labels: list[Any]
    names: list[str] | None = None
    left_out: str = ""

    def read(self, rows: list[int]) -> Sequence[Stored]:
        """The images of the rows. A column of `datasets` reads many at once several times faster."""
        return [self.images[row] for row in rows] if isinstance(self.images, list) else self.images[rows]

    def where(self, row: int) -> str:
        """The image's name in messages."""
        stored = self.images[row] if isinstance(self.images, list) else None
        return str(stored) if isinstance(stored, Path) else f"{self.place}, row {row}"


Splits = dict[str, Callable[[], Split]]
"""A function for each split that reads it."""


def read_source(config: ClassifierDataConfig) -> tuple[dict[str, Split], list[str]]:
    """The splits `train` and, where there is one, `test`; and notes for the user.

    Raises:
        UserError: the source cannot be read.
    """
    field, source = ("data.path", config.path) if config.path else ("data.name", config.name)
    splits = _open_folder(config, config.path) if config.path else _open_hub(config)
    if "train" not in splits:
        hint = f"has no split train, but {', '.join(sorted(splits)) or 'none'}; name files or folders train and test"
        raise UserError(field, source, hint)
    found, used = {"train": splits["train"]()}, ["train"]
    for name in TEST:
        split = splits[name]() if name in splits and len(used) == 1 else None
        if split and not (split.labels and all(label == -1 for label in split.labels)):  # -1: unlabelled
            found["test"] = split
            used.append(name)
    rest = sorted(name or "files of no split" for name in splits if name not in used)
    notes = [f"{source}: {', '.join(rest)} left out; {' and '.join(used)} used"] if rest else []
    return found, notes + [split.left_out for split in found.values() if split.left_out]


def _open_folder(config: ClassifierDataConfig, folder: str) -> Splits:
    if not os.path.isdir(folder):
        raise UserError("data.path", folder, f"there is no such folder; {HINT}")
    files = _files_below(folder, "data.path")
    if any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json")):
        return _open_saved(config, folder)
    if archive := read_archive(Path(folder), config.label_column):
        return {split: partial(Split, f"{folder}, split {split}", *content) for split, content in archive.items()}
    if tables := [file for file in files if file.suffix == ".parquet"]:
        by_split = split_files(folder, tables)
        return {split: partial(_read_parquet, config, split, of_split) for split, of_split in by_split.items()}
    return _open_class_folders(folder, files)


@contextmanager
def _reading(field: str, source: str, hint: str) -> Iterator[None]:
    """Turns an error of `datasets` into a UserError; `hint` has a place for the reason."""
    import datasets
    import datasets.exceptions
    import pyarrow as pa
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    wrong = OSError, ValueError, LookupError, TypeError, AttributeError  # for JSON files of other contents
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the message below has the reason
    try:
        yield
    except (*wrong, pa.ArrowException, HTTPError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = " ".join(str(cause or error).split())[:200]
        raise UserError(field, source, hint.format(reason=reason, kind=type(error).__name__)) from error


UNREADABLE = "cannot be read ({reason}); give intact files"


def _open_saved(config: ClassifierDataConfig, folder: str) -> Splits:
    """The splits of a folder that `save_to_disk` wrote."""
    import datasets

    with _reading("data.path", folder, UNREADABLE):
        found = datasets.load_from_disk(folder)
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {str(split): partial(_read_rows, config, str(split), rows) for split, rows in splits.items()}


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
    hint = "cannot be had from the Hub here ({kind}); download the parquet files of "
    hint += f"huggingface.co/datasets/{source} where there is a network and give their folder as --data.path"
    with _reading("data.name", config.name, hint):
        splits: Any = datasets.load_dataset(source)
    return {str(split): partial(_read_rows, config, str(split), rows) for split, rows in splits.items()}


def _read_parquet(config: ClassifierDataConfig, split: str, files: Sequence[Path]) -> Split:
    """The rows of parquet files. `datasets` keeps a copy of the two columns in its cache."""
    import datasets
    import pyarrow.parquet

    with _reading("data.path", str(config.path), f"split {split} {UNREADABLE}"):
        schemas = [pyarrow.parquet.read_schema(file) for file in files]
        features = datasets.Features.from_arrow_schema(schemas[0])
        everywhere = [name for name in features if all(schema.names.count(name) == 1 for schema in schemas)]
    columns = pick_columns({name: features[name] for name in everywhere}, config, split)
    hint = f"split {split} {UNREADABLE}, and room in the cache of datasets (HF_DATASETS_CACHE)"
    with _reading("data.path", str(config.path), hint):
        names = {split: [glob.escape(str(file.absolute())) for file in files]}
        rows = datasets.load_dataset("parquet", data_files=names, split=split, columns=list(columns))
    return _read_rows(config, split, rows)


def _read_rows(config: ClassifierDataConfig, split: str, rows: Any) -> Split:
    import datasets

    image, label = pick_columns(rows.features, config, split)
    labels = rows.select_columns([label]).with_format("arrow")[:][label].to_pylist()
    names = getattr(rows.features[label], "names", None)
    images = rows.with_format(None).select_columns([image])
    if isinstance(rows.features[image], datasets.Image):
        images = images.cast_column(image, datasets.Image(decode=False))
    return Split(f"{config.path or config.name}, split {split}", images[image], labels, names)


def pick_columns(features: Mapping[str, Any], config: ClassifierDataConfig, split: str) -> tuple[str, str]:
    """The columns of images and labels: the ones in the configuration, or of usual names, or the only one of its type.

    Raises:
        UserError: there are none.
    """
    import datasets

    labels = {"cifar10": ("label",), "cifar100": ("fine_label", "label")}.get(config.name, LABEL_COLUMNS)
    found = []
    for field, usual, kind in (("image", IMAGE_COLUMNS, datasets.Image), ("label", labels, datasets.ClassLabel)):
        given = getattr(config, f"{field}_column")
        typed = [] if given else [name for name, feature in features.items() if isinstance(feature, kind)]
        names = [name for name in ((given,) if given else usual) if name in features]
        names = names or (typed if len(typed) == 1 else [])
        if not names:
            there = ", ".join(features) or "none"
            wanted = given or " or ".join(usual)
            hint = f"split {split} has no column {wanted}, but {there}, in all of its files; name it"
            raise UserError(f"data.{field}_column", given, hint)
        found.append(names[0])
    return found[0], found[1]


def split_files(folder: str, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the word at the beginning of their names, or of their folders': train, test, val or validation. If no
    name has such a word, all files are for training.

    Raises:
        UserError: names begin with several words, none of which is a split's.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(files, key=str):
        words = [re.split("[^a-z]", part.lower())[0] for part in reversed(file.relative_to(folder).parts)]
        found[next((word for word in words if word in ("train", *TEST)), "")].append(file)
    words = sorted({re.split("[^a-z]", file.name.lower())[0] for file in files})
    if set(found) == {""} and len(words) > 1:
        hint = f"has parquet files {', '.join(words)}, none of which is a split's; name them train and test"
        raise UserError("data.path", folder, hint)
    return {"train": found[""]} if set(found) == {""} else dict(found)


def image_files(names: Sequence[str], field: str) -> Iterator[Path]:
    """The named files, and the images in the named folders, in order. Raises: UserError for a folder without images."""
    for name in names:
        if not os.path.isdir(name):
            yield Path(name)
            continue
        files = _files_below(name, field)
        found, others = [file for file in files if _is_image(file)], _others(files)
        if not found:
            raise UserError(field, name, f"has no images in it{others and f', but {others}'}; name others")
        if others:
            print(f"note: {truncate(name)}: {others} left out", file=sys.stderr)
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
            raise UserError(field, file, "cannot be listed; it takes the rights r and x to all of its folders")
    return found


def _others(files: Iterable[Path]) -> str:
    """Numbers of files by suffix, without images and the suffixes BESIDE; the most frequent first."""
    counts = Counter(truncate(file.suffix or "without a suffix", 20) for file in files if not _is_image(file))
    return join_first([f"{n:,} {suffix}" for suffix, n in counts.most_common() if suffix.lower() not in BESIDE])


def _open_class_folders(folder: str, files: Sequence[Path]) -> Splits:
    """The splits of `train/CLASS/1.png`; or `train` alone of `CLASS/1.png`, if there is no folder `train` of folders.

    Files in folders below a class's folder belong to the class, which the `imagefolder` of `datasets` does otherwise.
    """
    parts = {file: file.relative_to(folder).parts for file in files}
    images = {file: names for file, names in parts.items() if _is_image(file)}
    if not images:
        others = _others(files)
        raise UserError("data.path", folder, f"has no images in it{others and f', but {others}'}; {HINT}")
    of_splits = any(names[0].lower() == "train" and len(names) > 2 for names in images.values())
    nested = {names[0] for names in images.values() if len(names) > 2}
    nested -= {names[0] for names in images.values() if len(names) == 2}
    if nested and not of_splits:
        hint = f"has folders of folders ({', '.join(sorted(nested)[:4])}), but none named train; name the splits "
        raise UserError("data.path", folder, f"{hint}train and test, or put each class's images into its own folder")
    found: dict[str, dict[Path, str]] = defaultdict(dict)
    for file, names in images.items():
        if len(names) < 2 + of_splits:
            depth = "SPLIT/CLASS" if of_splits else "CLASS"
            raise UserError("data.path", file, f"is not in a folder {depth}, as others are; {HINT}")
        found[names[0].lower() if of_splits else "train"][file] = names[of_splits]

    splits: Splits = {}
    for split, labels in found.items():
        top = Path(folder, parts[next(iter(labels))][0]) if of_splits else Path(folder)
        here = [file for file, names in parts.items() if not of_splits or names[0].lower() == split]
        left_out = _left_out(top, here, {*labels.values()})
        splits[split] = partial(Split, f"{folder}, split {split}", [*labels], [*labels.values()], None, left_out)
    return splits


def _left_out(folder: Path, files: Iterable[Path], classes: Set[str]) -> str:
    """A line on the files in a split's folder that are not used, and the folders without images; empty if none."""
    folders = {entry.name for entry in os.scandir(folder) if os.path.isdir(entry) and entry.name[0] != "."}
    notes = [f"{others} left out; save as .png or .jpg what is to be taken"] if (others := _others(files)) else []
    if empty := sorted(folders - classes):
        notes.append(f"there are no images in {join_first(empty)}")
    return f"{folder}: {'; '.join(notes)}" if notes else ""


def number_classes(
    splits: Mapping[str, Split], source: str, known: Sequence[str] | None, count: int | None
) -> tuple[list[str], dict[str, list[int]]]:
    """The names of the classes of all splits, and the number of each image's class.

    Args:
        known: the classes of a run, which allows no others; None: those of the data.
        count: how many classes there have to be, for CIFAR; None: as many as there are.

    Raises:
        UserError: a label is none of these, or there are less than two.
    """
    given = next((of.names for of in splits.values() if of.names), None)
    named = {split: [_name(of.names or given, label) for label in of.labels] for split, of in splits.items()}
    numbers = not given and all(isinstance(label, int) for of in splits.values() for label in of.labels)
    if known is None:
        there = {name for names in named.values() for name in names if name is not None}
        known = given or ([] if numbers and count else sorted(there, key=int if numbers else str))
        spare = (name for name in map(str, itertools.count(len(known))) if name not in known)
        known = [*known, *itertools.islice(spare, max((count or 0) - len(known), 0))]
    number_of = {name: number for number, name in enumerate(known)}
    told = join_first(known) or "whole numbers from 0, or texts"
    told = f"0 to {len(known) - 1}" if known and [*known] == [*map(str, range(len(known)))] else told
    for split, names in named.items():
        wrong = next((row for row, name in enumerate(names) if name not in number_of), None)
        if wrong is not None:
            hint = f"has the label {truncate(splits[split].labels[wrong])}; labels are {told}"
            raise UserError("data.path", splits[split].where(wrong), hint)
    if not 2 <= len(known) <= (count or len(known)):
        wanted = f"{count} at most" if count else "2 at least"
        hint = f"has {len(known)} classes ({told}), where there should be {wanted}; data.name images takes any"
        raise UserError("data.path", source, hint)
    return [*known], {split: [number_of[str(name)] for name in names] for split, names in named.items()}


def _name(names: Sequence[str] | None, label: Any) -> str | None:
    """The class of a label; None for an invalid label."""
    if isinstance(label, str):
        return label
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        return None
    if names:
        return names[label] if label < len(names) else None
    return str(label)


def join_first(names: Sequence[str]) -> str:
    """The first eight names, and an ellipsis for more."""
    return ", ".join([*map(str, names[:8]), *(["..."] if len(names) > 8 else [])])
