"""Images as samples: of class folders, of the archives of CIFAR and MNIST, and of what `datasets`
reads.

The split of an image is never guessed: only the name of a split's own file or folder decides it.
All images are decoded once, and kept in memory.
"""

import glob
import io
import math
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, ImageOps
from torch import Tensor

from gpt2_ddp.config.jobs import CIFAR_CLASSES, ClassifierDataConfig
from gpt2_ddp.distributed.environment import free_memory
from gpt2_ddp.distributed.ranks import on_every_rank
from gpt2_ddp.errors import UserError, print_line, truncate
from gpt2_ddp.files import no_such_folder, regular
from gpt2_ddp.preparation.source_files import files_below
from gpt2_ddp.preparation.text_files import open_bytes
from gpt2_ddp.tasks.supervised import Samples

if TYPE_CHECKING:
    from datasets import Dataset

# splits that can be the one to test on; the first that is there is
TEST = ("test", "validation", "val")
COLUMNS = {"image": ("img", "image"), "label": ("label", "fine_label", "labels", "class")}
HINT = (
    "name a folder with train/CLASS/*.png and test/CLASS/*.png, all equally deep, "
    "with train and test parquet files, "
    "or of the unpacked archive of CIFAR or MNIST; without a network, download such files"
)
CIFAR = {
    "batches.meta": [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"],
    "meta": ["train", "test"],
}
"""Files of CIFAR-10's and CIFAR-100's archives, by the file that has the names of the classes."""
MNIST = {"train": "train", "test": "t10k"}
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Splits, and rows of a table: an image, as a file or its content, and its labels."""


class StoredImage(TypedDict):
    """An image as `datasets` keeps it: one of the two is known."""

    path: str | None
    bytes: bytes | None


class Images(NamedTuple):
    """A training and a test split, inputs uint8 [N, 3, H, W] and targets int64 [N]."""

    train: Samples
    test: Samples
    facts: dict[str, Any]  # what a checkpoint keeps of them


def decode(
    stored: Sequence[StoredImage],
    targets: Tensor,
    place: str,
    size: int | None,
    shape: tuple[int, ...],
    field: str = "data.path",
) -> Samples:
    """The images uint8 [N, 3, H, W] of rows of `datasets`; their names are the file, or the row of
    `place`. `shape`: [3, H, W] of each; (): of the first. Raises: UserError of `field` where one
    cannot be decoded, or memory does not suffice."""
    inputs = torch.empty(0)
    names: list[str] = []
    for row, image in enumerate(stored):
        name = f"{place}, row {row}"
        if image and image["path"] and not image["bytes"]:  # None for a missing one
            name = image["path"]
        names.append(name)
        try:
            pixels = decode_image(image, size)
            shape = shape or pixels.shape
            if shape != pixels.shape:
                size_of_others = f"{shape[2]} x {shape[1]}"
                raise ValueError(f"its size differs from {size_of_others}; set data.image_size")
        except Exception as error:  # Pillow raises any for a damaged file
            reason = str(error).partition(" <")[0]  # without an address in memory
            raise UserError(field, name, f"cannot be read as an image ({reason})") from error
        if not row:
            needed = len(stored) * pixels.size
            if needed > free_memory():
                hint = f"images need {needed / 1e9:.1f} GB of memory; set a smaller data.image_size"
                raise UserError(field, f"{len(stored):,}", hint)
            inputs = torch.empty(len(stored), *shape, dtype=torch.uint8)
        inputs.numpy()[row] = pixels
    return Samples(inputs, targets, names)


def unlabelled(names: Sequence[str], config: ClassifierDataConfig, shape: Sequence[int]) -> Samples:
    """The images of files and folders, `images` of the user, prepared as those of a run, with
    targets 0. Raises: UserError if one is no image, or without `data.image_size` of another
    `shape`."""
    files: list[Path] = []
    for name in names:
        files += _images_in(Path(name)) if os.path.isdir(name) else [Path(name)]
    if not files:
        raise UserError("images", " ".join(names), "has no images")
    stored = [StoredImage(path=str(file), bytes=None) for file in files]
    targets = torch.zeros(len(files)).long()
    return decode(stored, targets, "", config.image_size, tuple(shape), "images")


def load_images(
    accelerator: Accelerator,
    config: ClassifierDataConfig,
    seed: int,
    facts: Mapping[str, Any] | None = None,
) -> Images:
    """The images of a configuration, equal on every rank. One process per node reads them first,
    for the caches. `seed` decides which images are held out, where there is no test split. `facts`:
    of the checkpoint that uses them. Raises: UserError, on every rank, if they cannot be read or
    contradict the configuration."""
    first = accelerator.is_local_main_process
    early = on_every_rank(lambda: read_images(config, seed, facts) if first else None)
    return on_every_rank(lambda: early or read_images(config, seed, facts))


def read_images(
    config: ClassifierDataConfig, seed: int = 0, facts: Mapping[str, Any] | None = None
) -> Images:
    """As `load_images`, in one process."""
    facts = facts or {}
    tables, classes, numbers = read_source(config, seed, facts.get("classes"))
    shape = tuple(facts.get("image_shape", ()))
    splits = []
    for name, table in tables.items():
        place = f"{config.path or config.name}, split {name}"
        splits.append(decode(table["image"], numbers[name], place, config.image_size, shape))
        shape = tuple(splits[0].inputs.shape[1:])
    train, test = splits
    return Images(train, test, {"classes": classes, "image_shape": [*shape]})


def number_classes(
    tables: Mapping[str, Any], config: ClassifierDataConfig, known: Sequence[str] | None
) -> tuple[list[str], dict[str, Tensor]]:
    """The names of the classes of all splits, and the number of each image's class. `known`: those
    of a run, which allows no others; None: those of the data, sorted. Raises: any exception for
    other labels."""
    labels = {}
    for split, table in tables.items():
        kind = table.features["label"]
        column = table["label"][:]
        labels[split] = kind.int2str(column) if hasattr(kind, "int2str") else column
    found = [*map(str, sorted(set().union(*labels.values())))]
    if config.name in CIFAR_CLASSES and isinstance(labels["train"][0], int):
        known = known or [*map(str, range(CIFAR_CLASSES[config.name]))]
    number_of = {name: number for number, name in enumerate(known or found)}
    for label in found:
        if label not in number_of:
            raise ValueError(f"the label {label} is none of {', '.join(number_of)}")
    numbers = {
        split: torch.tensor([number_of[str(label)] for label in of]) for split, of in labels.items()
    }
    if len(number_of) < 2 or len(numbers["train"]) < 2:
        raise ValueError("less than two classes, or less than two images")
    return [*number_of], numbers


def decode_image(stored: StoredImage, size: int | None) -> np.ndarray:
    """uint8 [3, H, W] of the first frame of an image, upright by its EXIF orientation, without
    transparency. `size`: pixels each way, to which the largest centred square is scaled. Raises:
    any exception for a file that is no image."""
    content = stored["bytes"] or regular(Path(stored["path"] or "")).read_bytes()
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode[0] in "IF":
        raise ValueError(f"Pillow's mode {image.mode}; save it as 8-bit RGB")
    image = image.convert("RGB")
    if size and image.size != (size, size):
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        # cropped first: `ImageOps.fit` would mix in pixels outside the square
        square = image.crop((left, top, left + side, top + side))
        image = square.resize((size, size), Image.Resampling.BICUBIC)
    return np.moveaxis(np.asarray(image), -1, 0)


def read_source(
    config: ClassifierDataConfig, seed: int, known: Sequence[str] | None
) -> tuple[dict[str, Any], list[str], dict[str, Tensor]]:
    """The split `train`, and the first of `TEST` or a share of the training images: tables of
    `datasets` with the columns image and label, and the result of `number_classes`. Raises:
    UserError."""
    import datasets  # noqa: PLC0415  a second

    if config.path:
        problem = no_such_folder(config.path)
        if os.path.isdir(config.path) and not os.listdir(config.path):
            problem = "is an empty folder"
        if problem:
            raise UserError("data.path", config.path, f"{problem}; {HINT}")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the message below has the reason
    tables = {}
    try:
        hub = config.name if "/" in config.name else f"uoft-cs/{config.name}"
        splits = _open_folder(Path(config.path)) if config.path else datasets.load_dataset(hub)
        for name in ("train", *TEST):
            if name in splits and len(tables) < 2:
                table = _with_columns(config, splits[name])
                if table.unique("label") not in ([], [-1]):  # unlabelled
                    tables[name] = table
        if len(tables) == 1:
            count = len(tables["train"])
            if math.ceil(count * config.test_fraction) >= count:
                raise ValueError(f"{count:,} images are too few to draw test images from")
            tables = tables["train"].train_test_split(config.test_fraction, seed=seed)
            held_out = f"{len(tables['test']):,} images, drawn by the seed, are test images"
            print_line(f"note: no split {', '.join(TEST)}: {held_out}")
        return tables, *number_classes(tables, config, known)
    except Exception as error:  # datasets, pyarrow and pickle raise any
        cause = error.__cause__ or error
        reason = truncate(cause if type(cause) is ValueError else repr(cause), 150)
        field = "data.path" if config.path else "data.name"
        place = getattr(error, "filename", None) or config.path or config.name
        raise UserError(field, place, f"cannot be read ({reason}); {HINT}") from error


def _with_columns(config: ClassifierDataConfig, rows: "Dataset") -> "Dataset":
    """The table with its columns named image and label. Raises: LookupError where it has none."""
    import datasets  # noqa: PLC0415  a second

    names = {}
    for kind, usual in COLUMNS.items():
        given = getattr(config, f"{kind}_column")
        columns = [name for name in ([given] if given else usual) if name in rows.features]
        if not columns:
            raise LookupError(f"set data.{kind}_column to one of {', '.join(rows.features)}")
        names[columns[0]] = kind
    rows = rows.with_format(None).select_columns([*names]).rename_columns(names)
    return rows.cast_column("image", datasets.Image(decode=False))


def _open_folder(folder: Path) -> "dict[str, Dataset]":
    """The table of each split in a folder."""
    import datasets  # noqa: PLC0415  a second

    tables = defaultdict(list)
    for file in _files_in(folder):
        if file.suffix == ".parquet":
            word = re.split("[^a-z]", file.name.lower())[0]
            tables[word].append(glob.escape(str(file.absolute())))
    if tables:
        return {
            name: datasets.load_dataset("parquet", data_files=of, split="train")
            for name, of in tables.items()
        }
    for split, row in [*_cifar(folder), *_mnist(folder)] or _class_folders(folder):
        tables[split].append(row)
    return {split: datasets.Dataset.from_list(of) for split, of in tables.items()}


def _class_folders(folder: Path) -> Rows:
    """The images of SPLIT/CLASS/FILE; or those of CLASS/FILE, which are for training. Raises:
    ValueError for both."""
    images = _images_in(folder)
    depths = {len(image.relative_to(folder).parts) for image in images}
    if len(depths) != 1:
        raise ValueError("images in folders of different depth" if images else "no images")
    [depth] = depths
    for image in images:
        split = image.parts[-3].lower() if depth > 2 else "train"
        yield split, {"image": str(image), "label": image.parent.name}


def _files_in(folder: Path) -> list[Path]:
    """All files in a folder, in order. Raises: OSError."""
    return sorted(files_below(folder, set()), key=str)


def _images_in(folder: Path) -> list[Path]:
    """The images in a folder. A note counts files of other types."""
    files = _files_in(folder)
    images = [file for file in files if file.suffix.lower() in Image.registered_extensions()]
    if len(images) < len(files):
        others = f"{len(files) - len(images):,} files of other types not used"
        print_line(f"note: {others}; save images as .png or .jpg")
    return images


def _mnist(folder: Path) -> Rows:
    """Of two idx files for each split, plain or compressed by gzip; nothing for a folder of
    others."""
    for split, word in MNIST.items():
        if files := sorted(folder.glob(f"{word}-*ubyte*")):
            images, labels = (open_bytes(file).read() for file in files)
            _, n, height, width = np.frombuffer(images, ">u4", count=4).tolist()
            pixels = np.frombuffer(images, np.uint8, offset=16).reshape(n, height * width)
            for image, label in zip(pixels, labels[8:], strict=True):
                content = b"P5 %d %d 255\n" % (width, height) + image.tobytes()
                yield split, {"image": content, "label": label}


def _cifar(folder: Path) -> Rows:
    """Images of 32 x 32 and the names of their classes, fine ones of CIFAR-100; nothing for a
    folder of others."""
    for meta, files in CIFAR.items():
        if (folder / meta).is_file():
            names = _unpickle(folder / meta)
            kind = "label" if "label_names" in names else "fine_label"
            for name in files:
                batch = _unpickle(folder / name)
                split = "test" if name.startswith("test") else "train"
                images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                for pixels, label in zip(images, batch[f"{kind}s"], strict=True):
                    content = b"P6 32 32 255\n" + pixels.tobytes()
                    yield split, {"image": content, "label": names[f"{kind}_names"][label]}


class _Unpickler(pickle.Unpickler):
    """Reads pickles of arrays, and executes nothing else that a pickle may name."""

    NAMES = ("_reconstruct", "ndarray", "dtype", "encode")

    def find_class(self, module: str, name: str) -> object:
        """What the pickles of arrays call. Raises: UnpicklingError for all other names."""
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self.NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it loads {module}.{name}")


def _unpickle(path: Path) -> dict[str, Any]:
    return _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
