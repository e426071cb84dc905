"""Images as samples: of class folders, of the archives of CIFAR and MNIST, and of what `datasets` reads.

The split of an image is never guessed: only the name of a split's own file or folder decides it.
Pixels are kept if they fit into memory, otherwise decoded at each read.
"""

import glob
import io
import math
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, ImageOps
from torch import Tensor

from gpt2_ddp.config.jobs import CIFAR_CLASSES, ClassifierDataConfig
from gpt2_ddp.data.feed import Reading, make_loader, unwrap
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.distributed.ranks import from_main, on_every_rank
from gpt2_ddp.errors import UserError, print_line, truncate
from gpt2_ddp.files import load_from_hub, regular
from gpt2_ddp.preparation.source_files import files_below, open_bytes
from gpt2_ddp.tasks.supervised import hash_of

SCANNED = 64  # images that are decoded at a time before training
TEST = ("test", "validation", "val")  # splits that can be the one to test on; the first that is there is
COLUMNS = {"image": ("img", "image"), "label": ("label", "fine_label", "labels", "class")}
HINT = (
    "name a folder with train/CLASS/*.png and test/CLASS/*.png, all equally deep, with train and test parquet files, "
    "of save_to_disk, or of the unpacked archive of CIFAR or MNIST; without a network, download such files"
)
CIFAR = {"batches.meta": [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], "meta": ["train", "test"]}
"""Files of CIFAR-10's and CIFAR-100's archives, by the file that has the names of the classes."""
MNIST = {"train": "train", "test": "t10k"}
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Splits, and rows of a table: an image, as a file or its content, and its labels."""


class Images(NamedTuple):
    """A training and a test split, inputs uint8 [N, 3, H, W] and targets int64 [N]."""

    train: "StoredImages"
    test: "StoredImages"
    facts: dict[str, Any]  # what a checkpoint keeps of them


@dataclass
class StoredImages:
    """The images of a split. They are decoded whenever they are read, and take no memory; or all at once by `scan`."""

    place: str  # the split's name in messages
    table: Any  # of `datasets`, with the column image
    rows: np.ndarray  # int64 [N], of the table
    targets: Tensor  # int64 [N]
    config: ClassifierDataConfig
    shape: tuple[int, ...]  # [3, H, W] of each; (): of the first that is read
    workers: int = 0
    field: str = "data.path"  # of messages
    inputs: Tensor | None = None  # uint8 [N, 3, H, W], once they are kept
    digest: str = ""  # of all samples

    def __len__(self) -> int:
        return len(self.targets)

    def where(self, item: int) -> str:
        """The sample's name in messages."""
        row = int(self.rows[item])
        stored = self.table[row]["image"]
        if stored and stored["path"] and not stored["bytes"]:
            return stored["path"]
        return f"{self.place}, row {row}"

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, H, W] and int64 [b] of the samples int64 [b]. Raises: UserError where one cannot be decoded."""
        targets = self.targets[items]
        if self.inputs is not None:
            return self.inputs[items], targets
        images = []
        for item, stored in zip(items, self.table[self.rows[items]]["image"], strict=True):
            try:
                image = decode_image(stored, self.config.image_size)
                self.shape = self.shape or image.shape
                if self.shape != image.shape:
                    raise ValueError(f"its size differs from {self.shape[2]} x {self.shape[1]}; set data.image_size")
            except Exception as error:  # Pillow raises any for a damaged file
                reason = str(error).partition(" <")[0]  # without an address in memory
                raise UserError(self.field, self.where(item), f"cannot be read as an image ({reason})") from error
            images.append(image)
        return torch.from_numpy(np.stack(images)), targets

    def sha256(self) -> str:
        assert self.digest, "load_images decodes all images once"
        return self.digest

    def scan(self, keep: bool) -> None:
        """Decodes all images once, in order, and may keep them."""
        inputs = torch.empty(len(self) if keep else 0, *self.shape, dtype=torch.uint8)
        self.workers = 0 if keep else self.workers
        parts = np.split(np.arange(len(self)), range(SCANNED, len(self), SCANNED))
        loader = make_loader(Reading(self.read, parts), self.workers)

        def batches() -> Iterator[Tensor]:
            for items, (images, _) in zip(parts, map(unwrap, loader), strict=True):
                if keep:
                    inputs[items] = images
                yield images

        self.digest = hash_of(f"{torch.uint8} {(len(self), *self.shape)}", batches(), self.targets)
        self.inputs = inputs if keep else None


def unlabelled(names: Sequence[str], config: ClassifierDataConfig, shape: Sequence[int]) -> StoredImages:
    """The images of files and folders, `images` of the user, prepared as those of a run, with targets 0. Decodes all of
    them once. Raises: UserError if one is no image, or without `data.image_size` of another `shape`."""
    from datasets import Dataset

    files = []
    for name in names:
        files += _images_in(Path(name)) if os.path.isdir(name) else [Path(name)]
    n = len(files)
    if not n:
        raise UserError("images", " ".join(names), "has no images")
    table = Dataset.from_list([{"image": {"path": str(file), "bytes": None}} for file in files])
    images = StoredImages("", table, np.arange(n), torch.zeros(n).long(), config, tuple(shape), field="images")
    images.scan(keep=False)
    return images


def load_images(
    accelerator: Accelerator, config: ClassifierDataConfig, seed: int, facts: Mapping[str, Any] | None = None
) -> Images:
    """The images of a configuration, equal on every rank. One process per node reads them first, for the caches.
    `seed` decides which images are held out, where there is no test split. `facts`: of the checkpoint that uses them.
    Raises: UserError, on every rank, if they cannot be read or contradict the configuration."""
    first = accelerator.is_local_main_process
    early = on_every_rank(lambda: read_images(config, seed, facts) if first else None)
    images = on_every_rank(lambda: early or read_images(config, seed, facts, look=False))
    for samples in (images.train, images.test):
        of_main = from_main(samples.digest)
        samples.digest = samples.digest or of_main  # a rank that did not decode all of them has none
    return images


def read_images(
    config: ClassifierDataConfig, seed: int = 0, facts: Mapping[str, Any] | None = None, look: bool = True
) -> Images:
    """As `load_images`, in one process. `look`: also decode images that are not kept, which finds broken ones."""
    facts = facts or {}
    tables, classes, numbers = read_source(config, facts.get("classes"))
    parts = [(name, np.arange(len(of_split))) for name, of_split in numbers.items()]
    if len(parts) == 1:
        parts = [("train", rows) for rows in _hold_out(numbers["train"], config, seed)]
    shape = tuple(facts.get("image_shape", ()))
    splits = []
    for name, rows in parts:
        targets = torch.from_numpy(numbers[name][rows])
        images = StoredImages(
            f"{config.path or config.name}, split {name}", tables[name], rows, targets, config, shape, config.workers
        )
        images.read(np.zeros(1, int))
        shape = images.shape
        splits.append(images)
    keep = sum(map(len, splits)) * math.prod(shape) <= config.memory_gb * 1e9
    for images in splits:
        if keep or look:
            images.scan(keep)
    train, test = splits
    return Images(train, test, {"classes": classes, "image_shape": [*shape]})


def _hold_out(labels: np.ndarray, config: ClassifierDataConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of images that are for training and for testing, in order. `labels`: int64 [n]. The shares of each class
    differ by less than an image."""
    n = len(labels)
    held = min(max(round(n * config.test_fraction), 1), n - 1)
    # places at equal distances in the images sorted by class, in random order within each
    order = Permutation(seed, n).items_at(np.arange(n)).astype(np.int64)
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = (2 * np.arange(held) + 1) * n // (2 * held)
    drawn = f"{held:,} of {n:,} images are test images, drawn from each class by the seed"
    print_line(f"note: no split {', '.join(TEST)}: {drawn}")
    return np.sort(np.delete(order, chosen)), np.sort(order[chosen])


def number_classes(
    tables: Mapping[str, Any], config: ClassifierDataConfig, known: Sequence[str] | None
) -> tuple[list[str], dict[str, np.ndarray]]:
    """The names of the classes of all splits, and the number of each image's class. `known`: those of a run, which
    allows no others; None: those of the data, sorted. Raises: any exception for other labels."""
    labels = {}
    for split, table in tables.items():
        kind, column = table.features["label"], table["label"][:]
        labels[split] = kind.int2str(column) if hasattr(kind, "int2str") else column
    found = [*map(str, sorted(set().union(*labels.values())))]
    if config.name in CIFAR_CLASSES and isinstance(labels["train"][0], int):
        known = known or [*map(str, range(CIFAR_CLASSES[config.name]))]
    number_of = {name: number for number, name in enumerate(known or found)}
    for label in found:
        if label not in number_of:
            raise ValueError(f"the label {label} is none of {', '.join(number_of)}")
    numbers = {split: np.array([number_of[str(label)] for label in of_split]) for split, of_split in labels.items()}
    if len(number_of) < 2 or len(numbers["train"]) < 2:
        raise ValueError("less than two classes, or less than two images")
    return [*number_of], numbers


def decode_image(stored: Any, size: int | None) -> np.ndarray:
    """uint8 [3, H, W] of the first frame of an image, upright by its EXIF orientation, without transparency.

    `stored`: a row of `datasets`. `size`: pixels each way, to which the largest centred square is scaled.
    Raises: any exception for others."""
    content = stored["bytes"] or regular(Path(stored["path"])).read_bytes()
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode[0] in "IF":
        raise ValueError(f"Pillow's mode {image.mode}; save it as 8-bit RGB")
    image = image.convert("RGB")
    if size and image.size != (size, size):
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        # cropped first: `ImageOps.fit` would mix in pixels outside the square
        image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    return np.moveaxis(np.asarray(image), -1, 0)


def read_source(
    config: ClassifierDataConfig, known: Sequence[str] | None
) -> tuple[dict[str, Any], list[str], dict[str, np.ndarray]]:
    """The split `train` and, if there is one, the first of `TEST`: tables of `datasets` with the columns image and
    label, and the result of `number_classes`. Raises: UserError."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the message below has the reason
    found = {}
    try:
        hub = config.name if "/" in config.name else f"uoft-cs/{config.name}"
        splits = _open_folder(Path(config.path)) if config.path else load_from_hub(hub)
        for name in ("train", *TEST):
            if name in splits and len(found) < 2:
                table = _with_columns(config, splits[name])
                if table.unique("label") not in ([], [-1]):  # unlabelled
                    found[name] = table
        return found, *number_classes(found, config, known)
    except Exception as error:  # datasets, pyarrow and pickle raise any
        reason = truncate(repr(error.__cause__ or error), 150)
        field = "data.path" if config.path else "data.name"
        place = getattr(error, "filename", None) or config.path or config.name
        raise UserError(field, place, f"cannot be read ({reason}); {HINT}") from error


def _with_columns(config: ClassifierDataConfig, rows: Any) -> Any:
    """The table with its columns named image and label. Raises: LookupError where it has none."""
    import datasets

    names = {}
    for kind, usual in COLUMNS.items():
        given = getattr(config, f"{kind}_column")
        found = [name for name in ([given] if given else usual) if name in rows.features]
        if not found:
            raise LookupError(f"set data.{kind}_column to one of {', '.join(rows.features)}")
        names[found[0]] = kind
    rows = rows.with_format(None).select_columns([*names]).rename_columns(names)
    return rows.cast_column("image", datasets.Image(decode=False))


def _open_folder(folder: Path) -> Any:
    import datasets

    if {"dataset_dict.json", "state.json"} & {*os.listdir(folder)}:
        saved = datasets.load_from_disk(str(folder))
        return saved if isinstance(saved, dict) else {"train": saved}
    tables = defaultdict(list)
    for file in _files_in(folder):
        if file.suffix == ".parquet":
            word = re.split("[^a-z]", file.name.lower())[0]
            tables[word].append(glob.escape(str(file.absolute())))
    if tables:
        return {name: datasets.load_dataset("parquet", data_files=of, split="train") for name, of in tables.items()}
    for split, row in [*_cifar(folder), *_mnist(folder)] or _class_folders(folder):
        tables[split].append(row)
    return {split: datasets.Dataset.from_list(of) for split, of in tables.items()}


def _class_folders(folder: Path) -> Rows:
    """The images of SPLIT/CLASS/FILE; or those of CLASS/FILE, which are for training. Raises: ValueError for both."""
    images = _images_in(folder)
    [depth] = {len(image.relative_to(folder).parts) for image in images}
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
        print_line(f"note: {len(files) - len(images):,} files of other types not used; save images as .png or .jpg")
    return images


def _mnist(folder: Path) -> Rows:
    """Of two idx files for each split, plain or compressed by gzip; nothing for a folder of others."""
    for split, word in MNIST.items():
        if files := sorted(folder.glob(f"{word}-*ubyte*")):
            images, labels = (open_bytes(file).read() for file in files)
            _, n, height, width = np.frombuffer(images, ">u4", count=4).tolist()
            pixels = np.frombuffer(images, np.uint8, offset=16).reshape(n, height * width)
            for image, label in zip(pixels, labels[8:], strict=True):
                yield split, {"image": b"P5 %d %d 255\n" % (width, height) + image.tobytes(), "label": label}


def _cifar(folder: Path) -> Rows:
    """Images of 32 x 32 and the names of their classes: label, or fine_label and coarse_label. Or nothing."""
    for meta, files in CIFAR.items():
        if (folder / meta).is_file():
            names = _unpickle(folder / meta)
            for name in files:
                batch = _unpickle(folder / name)
                kinds = [kind for kind in ("label", "fine_label", "coarse_label") if f"{kind}s" in batch]
                for row, pixels in enumerate(batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)):
                    labels = {kind: names[f"{kind}_names"][batch[f"{kind}s"][row]] for kind in kinds}
                    split = "test" if name.startswith("test") else "train"
                    yield split, {"image": b"P6 32 32 255\n" + pixels.tobytes(), **labels}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What the pickles of arrays call. Raises: UnpicklingError for all other names, so that nothing else runs."""
        if module.partition(".")[0] in ("numpy", "_codecs") and name in ("_reconstruct", "ndarray", "dtype", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it loads {module}.{name}")


def _unpickle(path: Path) -> dict[str, Any]:
    return _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
