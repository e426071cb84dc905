"""Tables of images: parquet files, what `save_to_disk` wrote, and data sets of the Hub."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import regular
from gpt2_ddp.tasks.images.decode import Stored

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels", "class")


class Table(Protocol):
    """Rows that can be read in any order; `features` are those of `datasets`, by column that all rows have."""

    features: Mapping[str, Any]

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]:
        """All of its values, by row. Raises: UserError where they cannot be read."""
        ...

    def cell(self, row: int, name: str) -> Any:
        """One of them. Raises: UserError where it cannot be read."""
        ...


class ParquetTable:
    """Parquet files, one after another. It reads a row group at a time and keeps the last one."""

    def __init__(self, files: Sequence[Path]):
        import datasets

        self.files = files
        opened = [pyarrow.parquet.ParquetFile(regular(file)) for file in files]
        sizes = [file.metadata.row_group(group).num_rows for file in opened for group in range(file.num_row_groups)]
        self.ends = list(accumulate(sizes))
        self.groups = [(number, group) for number, file in enumerate(opened) for group in range(file.num_row_groups)]
        features = datasets.Features.from_arrow_schema(opened[0].schema_arrow)
        columns = [file.schema_arrow.names for file in opened]
        self.features: Mapping[str, Any] = {
            name: of for name, of in features.items() if all(names.count(name) == 1 for names in columns)
        }
        self._last: tuple[int, str, pa.ChunkedArray] | None = None

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getstate__(self) -> dict[str, Any]:  # for a loader's workers
        return self.__dict__ | {"_last": None}

    def column(self, name: str) -> list[Any]:
        values: list[Any] = []
        for file in self.files:
            with _reading(str(file)):
                values += pyarrow.parquet.read_table(file, columns=[name])[name].to_pylist()
        return values

    def cell(self, row: int, name: str) -> Any:
        place = bisect_right(self.ends, row)
        if self._last is None or self._last[:2] != (place, name):
            file, group = self.groups[place]
            path = self.files[file]
            with _reading(str(path)), pyarrow.parquet.ParquetFile(path, memory_map=True) as opened:
                self._last = place, name, opened.read_row_group(group, columns=[name])[name]
        column = self._last[2]
        return column[row - self.ends[place] + len(column)].as_py()


class ArrowTable:
    """A split of `datasets`, which maps its files into memory."""

    def __init__(self, rows: Any):
        self.rows, self.features = rows.with_format(None), rows.features

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        return list(self.rows[name])

    def cell(self, row: int, name: str) -> Any:
        return self.rows[row][name]


class Cells(Sequence[Stored]):
    """The images of a table's column, each as it is stored."""

    def __init__(self, table: Table, column: str):
        import datasets

        if isinstance(table, ArrowTable):
            table = ArrowTable(table.rows.select_columns([column]).cast_column(column, datasets.Image(decode=False)))
        self.table, self.name = table, column

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: Any) -> Any:
        cell = self.table.cell(row, self.name)
        if isinstance(cell, Mapping):
            content, path = cell.get("bytes"), cell.get("path")
            cell = Path(path) if content is None and path else content
        return cell


def pick_columns(table: Table, config: ClassifierDataConfig, split: str) -> tuple[str, str]:
    """The columns of images and labels: those that are named, or by usual names, or the only one of its type.

    Raises:
        UserError: there are none.
    """
    import datasets

    images = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
    classes = [name for name, feature in table.features.items() if isinstance(feature, datasets.ClassLabel)]
    label_columns = {"cifar10": ("label",), "cifar100": ("fine_label", "label")}.get(config.name, LABEL_COLUMNS)
    image = _pick("image_column", config.image_column, IMAGE_COLUMNS, images, table, split)
    return image, _pick("label_column", config.label_column, label_columns, classes, table, split)


def _pick(field: str, given: str | None, usual: Sequence[str], typed: list[str], table: Table, split: str) -> str:
    usual = (given,) if given else usual
    found = [name for name in usual if name in table.features] or (typed if len(typed) == 1 and not given else [])
    if not found:
        there = ", ".join(table.features) or "none"
        hint = f"split {split} has no column {' or '.join(usual)}, but {there}, in all of its files; name it"
        raise UserError(f"data.{field}", given, hint)
    return found[0]


def class_names(table: Table, column: str) -> list[str] | None:
    """The names of classes by their numbers, where the table has them."""
    return getattr(table.features[column], "names", None)


def parquet_tables(source: str, files: Mapping[str, Sequence[Path]]) -> dict[str, Table]:
    """Raises: UserError where one cannot be read."""
    found: dict[str, Table] = {}
    for split, of_split in files.items():
        with _reading(source, f"split {split} "):
            found[split] = ParquetTable(of_split)
    return found


@contextmanager
def _reading(source: str, what: str = "") -> Iterator[None]:
    """Raises: UserError where parquet files cannot be read in it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise unreadable("data.path", source, what, error) from error


def saved_tables(folder: str) -> dict[str, Table]:
    """Of a folder that `save_to_disk` of `datasets` wrote. Raises: UserError where it cannot be read."""
    import datasets
    import datasets.exceptions

    wrong = OSError, ValueError, LookupError, TypeError, AttributeError  # what a file of JSON that holds others makes
    try:
        found = datasets.load_from_disk(folder)
    except (*wrong, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise unreadable("data.path", folder, "", error) from error
    return _arrow_tables(found if isinstance(found, datasets.DatasetDict) else {"train": found})


def hub_tables(name: str) -> dict[str, Table]:
    """Of a data set of the Hub, from there or from the cache. Raises: UserError where it cannot be had."""
    import datasets
    import datasets.config
    import datasets.exceptions
    import huggingface_hub.constants
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    source = name if "/" in name else f"uoft-cs/{name}"
    try:
        huggingface_hub.HfApi().dataset_info(source, timeout=10)
    except (OSError, HTTPError):  # load_dataset would retry for long; what is in the cache may do
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return _arrow_tables(datasets.load_dataset(source))
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        hint = (
            f"cannot be had from the Hub here ({type(error).__name__}); download the parquet files of "
            f"huggingface.co/datasets/{source} where there is a network and give their folder as --data.path"
        )
        raise UserError("data.name", name, hint) from error


def _arrow_tables(splits: Any) -> dict[str, Table]:
    return {str(split): ArrowTable(rows) for split, rows in splits.items()}


def unreadable(field: str, source: str, what: str, error: Exception) -> UserError:
    """What is told of a source that cannot be read."""
    return UserError(field, source, f"{what}cannot be read ({' '.join(str(error).split())[:200]}); give intact files")


def leading_word(name: str) -> str:
    """`train` of train-00000-of-00001.parquet."""
    found = re.match(r"[A-Za-z]+|t10k", name)
    return found[0].lower() if found else ""


def split_files(folder: str, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the word that their names begin with, or else their folders': train, test, val or validation; all are
    for training where no name says anything.

    Raises:
        UserError: names begin with several words, none of which is a split's.
    """
    known = ("train", "test", "validation", "val")
    found: dict[str, list[Path]] = {}
    for file in sorted(files, key=str):
        words = [leading_word(part) for part in reversed(file.relative_to(folder).parts)]
        found.setdefault(next((word for word in words if word in known), ""), []).append(file)
    if set(found) == {""}:
        words = sorted({leading_word(file.name) for file in files})
        if len(words) > 1:
            hint = f"has parquet files {', '.join(words)}, none of which is a split's; name them train and test"
            raise UserError("data.path", folder, hint)
        return {"train": found[""]}
    return found
