"""Where images come from: each split's as they are stored, and their classes. Which split an image is of, is never
guessed: what a folder is named that is not the split's own has no say in it."""

import itertools
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.preparation.find import find_files
from gpt2_ddp.tasks.images.decode import Stored
from gpt2_ddp.tasks.images.formats import CIFAR_FILES, read_cifar, read_idx
from gpt2_ddp.tasks.images.tables import (
    Cells,
    Table,
    class_names,
    hub_tables,
    parquet_tables,
    pick_columns,
    saved_tables,
    split_files,
)

TEST = ("test", "validation", "val")
"""Splits that can be the one to test on; the first that is there is."""
IDX = {"train": ("train",), "test": ("t10k", "test")}
IDX_NAMES = ("{}-images-idx3-ubyte", "{}-images.idx3-ubyte", "{}-labels-idx1-ubyte", "{}-labels.idx1-ubyte")
SUFFIXES = {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tga", ".tif", ".tiff", ".webp", ".avif"}
SUFFIXES |= {".pbm", ".pgm", ".pnm", ".ppm"}
BESIDE = {".csv", ".db", ".html", ".ini", ".json", ".jsonl", ".md", ".txt", ".xml", ".yaml", ".yml"}
"""Suffixes of what lies beside images, and is left out without a word."""
HINT = (
    "give one with train/CLASS/*.png and test/CLASS/*.png, with train and test parquet files, of save_to_disk, or the "
    "unpacked archive of CIFAR or MNIST"
)


@dataclass(frozen=True)
class Split:
    """Images as they are stored, and each one's class by name or number.

    Args:
        place: what a message calls it.
        names: of the classes, by number, where the source has them.
        left_out: a line on what is there and not taken, if anything.
    """

    place: str
    images: Sequence[Stored]
    labels: list[Any]
    names: list[str] | None = None
    left_out: str = ""

    def where(self, row: int) -> str:
        """What a message calls an image."""
        stored = self.images[row] if isinstance(self.images, list) else None
        return str(stored) if isinstance(stored, Path) else f"{self.place}, row {row}"


def read_source(config: ClassifierDataConfig) -> tuple[dict[str, Split], list[str]]:
    """The splits `train` and, where there is one, `test`; and what there is to be told of them.

    Raises:
        UserError: they cannot be had.
    """
    source = config.path or config.name
    splits = _read_folder(config, config.path) if config.path else _of_tables(hub_tables(config.name), config)
    if "train" not in splits:
        field = "data.path" if config.path else "data.name"
        hint = f"has no split train, but {', '.join(sorted(splits)) or 'none'}; name files or folders train and test"
        raise UserError(field, source, hint)
    test = next((name for name in TEST if name in splits and not _unlabelled(splits[name])), None)
    used = {"train": "train"} | ({"test": test} if test else {})
    rest = sorted(name or "files of no split" for name in splits if name not in used.values())
    notes = [f"{source}: {', '.join(rest)} left out; {' and '.join(used.values())} used"] if rest else []
    notes += [splits[name].left_out for name in used.values() if splits[name].left_out]
    return {split: splits[name] for split, name in used.items()}, notes


def _unlabelled(split: Split) -> bool:
    return bool(split.labels) and all(label == -1 for label in split.labels)


def _read_folder(config: ClassifierDataConfig, folder: str) -> dict[str, Split]:
    if not os.path.isdir(folder):
        raise UserError("data.path", folder, f"there is no such folder; {HINT}")
    place, files = Path(folder), _files_below(folder, "data.path")
    if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
        return _of_tables(saved_tables(folder), config)
    for names, splits in CIFAR_FILES.items():
        if all((place / file).is_file() for files in ([names], *splits.values()) for file in files):
            kinds = [f"{config.label_column.rstrip('s')}s"] if config.label_column else ["labels", "fine_labels"]
            found = {split: read_cifar(place, names, split, kinds) for split in splits}
            return {split: Split(_place(folder, split), [*images], labels) for split, (images, labels) in found.items()}
    if idx := dict(_idx_splits(place)):
        return idx
    if tables := [file for file in files if file.suffix == ".parquet"]:
        return _of_tables(parquet_tables(folder, split_files(folder, tables)), config)
    return _class_folders(folder, files)


def _idx_splits(folder: Path) -> Iterator[tuple[str, Split]]:
    for split, words in IDX.items():
        for word in words:
            names = [folder / (name.format(word) + end) for name in IDX_NAMES for end in ("", ".gz")]
            there = [name for name in names if name.is_file()]
            images, labels = ([name for name in there if f"-{what}" in name.name] for what in ("images", "labels"))
            if images and labels:
                found, numbers = read_idx(images[0]), read_idx(labels[0])
                if found.ndim != 3 or numbers.shape != found.shape[:1]:
                    hint = f"holds {found.shape} pixels for {numbers.shape} labels; give the files of one set"
                    raise UserError("data.path", images[0], hint)
                yield split, Split(str(images[0]), [*found], numbers.tolist())


def _of_tables(tables: Mapping[str, Table], config: ClassifierDataConfig) -> dict[str, Split]:
    found: dict[str, Split] = {}
    for name, table in tables.items():
        place = _place(config.path or config.name, name)
        found[name] = Split(place, [], [])
        if name in ("train", *TEST):
            image, label = pick_columns(table, config, name)
            found[name] = Split(place, Cells(table, image), table.column(label), class_names(table, label))
    return found


def _place(source: str, split: str) -> str:
    return f"{source}, split {split}"


def image_files(names: Sequence[str], field: str) -> Iterator[Path]:
    """Files that are named, and the images in folders that are, in order. Raises: UserError where there are none."""
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
    """The files in a folder and the folders in it, in order. Raises: UserError where one of these cannot be listed."""
    try:
        found = sorted(find_files(folder), key=str)
    except UserError:
        return []
    for file in found:
        if _is_denied(file):
            raise UserError(field, file, "cannot be listed; it takes the rights r and x to all of its folders")
    return found


def _is_denied(file: Path) -> bool:
    """Whether it is a folder that could not be listed, or lies in one that may only be listed."""
    try:
        return stat.S_ISDIR(file.stat().st_mode)
    except OSError as error:  # or a link to nothing, of which reading tells
        return isinstance(error, PermissionError)


def _others(files: Iterable[Path]) -> str:
    """How many files of which suffixes are none of images, but may be meant as some; the most first."""
    counts = Counter(
        truncate(file.suffix or "without a suffix", 20) for file in files if not _is_image(file)
    ).most_common()
    return join_first([f"{count:,} {suffix}" for suffix, count in counts if suffix.lower() not in BESIDE])


def _class_folders(folder: str, files: Sequence[Path]) -> dict[str, Split]:
    """`train/CLASS/1.png`, and as much for the other splits; or `CLASS/1.png`, of no split, where there is no folder
    `train` of folders. What is below a class's folder is of the class."""
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
    found: dict[str, Split] = {}
    depth = "SPLIT/CLASS" if of_splits else "CLASS"
    for file, names in images.items():
        if len(names) < depth.count("/") + 2:
            raise UserError("data.path", file, f"is not in a folder {depth}, as others are; {HINT}")
        split, label = (names[0].lower(), names[1]) if of_splits else ("train", names[0])
        own = found.setdefault(split, Split(_place(folder, split), [], []))
        if split in ("train", *TEST):
            cast(list[Stored], own.images).append(file)
            own.labels.append(label)
    tops = {names[0].lower(): Path(folder, names[0]) for names in images.values()} if of_splits else {}
    for split, of in found.items():
        here = [file for file, names in parts.items() if not of_splits or names[0].lower() == split]
        found[split] = replace(of, left_out=_left_out(tops.get(split, Path(folder)), here, {*of.labels}))
    return found


def _left_out(folder: Path, files: Iterable[Path], classes: Set[str]) -> str:
    """A line on the files in a split's folder that are not taken, and the folders that give no class, if any."""
    empty = [entry.name for entry in os.scandir(folder) if os.path.isdir(entry) and entry.name[0] != "."]
    empty = sorted({*empty} - classes)
    others = _others(files)
    notes = [f"{others} left out; save as .png or .jpg what is to be taken"] if others else []
    notes += [f"there are no images in {join_first(empty)}"] if empty else []
    return f"{folder}: {'; '.join(notes)}" if notes else ""


def number_classes(
    splits: Mapping[str, Split], source: str, known: Sequence[str] | None, count: int | None
) -> tuple[list[str], dict[str, list[int]]]:
    """The names of the classes, those of all splits, and each image's number among them.

    Args:
        known: the classes of a run, which there can be no others than; None: those that there are.
        count: how many there have to be numbers for, as CIFAR has them; None: as many as there are.

    Raises:
        UserError: a label is none of these, or there are less than two.
    """
    given = next((of.names for of in splits.values() if of.names), None)
    named = {split: [_name(of.names or given, label) for label in of.labels] for split, of in splits.items()}
    numbers = not given and all(isinstance(label, int) for of in splits.values() for label in of.labels)
    there = {name for names in named.values() for name in names if name is not None}
    if known is None:
        known = given or sorted(there, key=int if numbers else str)
        known = [] if numbers and count else known
        spare = (name for name in map(str, itertools.count(len(known))) if name not in known)
        known = [*known, *itertools.islice(spare, max((count or 0) - len(known), 0))]
    place = {name: number for number, name in enumerate(known)}
    for split, names in named.items():
        wrong = next((row for row, name in enumerate(names) if name not in place), None)
        if wrong is not None:
            label = splits[split].labels[wrong]
            hint = f"has the label {truncate(label)}; labels are {_told(known)}"
            raise UserError("data.path", splits[split].where(wrong), hint)
    if len(known) < 2 or len(known) > (count or len(known)):
        wanted = f"{count} at most" if count else "2 at least"
        hint = f"has {len(known)} classes ({_told(known)}), where there should be {wanted}; data.name images takes any"
        raise UserError("data.path", source, hint)
    return [*known], {split: [place[str(name)] for name in names] for split, names in named.items()}


def _name(names: Sequence[str] | None, label: Any) -> str | None:
    """The class that a label means; None where it means none."""
    if isinstance(label, bool) or not isinstance(label, int | str):
        return None
    if isinstance(label, str):
        return label
    if names:
        return names[label] if 0 <= label < len(names) else None
    return str(label) if label >= 0 else None


def _told(names: Sequence[str]) -> str:
    if not names:
        return "whole numbers from 0, or texts"
    return f"0 to {len(names) - 1}" if [*names] == [*map(str, range(len(names)))] else join_first(names)


def join_first(names: Sequence[str]) -> str:
    """The first eight, and whether there are more."""
    return ", ".join([*map(str, names[:8]), *(["..."] if len(names) > 8 else [])])
