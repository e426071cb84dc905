"""Images as samples: decoded to pixels; kept if they fit into memory, otherwise decoded at each read."""

import hashlib
import io
import math
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import BatchSampler

from gpt2_ddp.config.jobs import CIFAR_CLASSES, ClassifierDataConfig
from gpt2_ddp.data.feed import make_loader, unwrap
from gpt2_ddp.data.order import Order
from gpt2_ddp.distributed.ranks import PREPARATION, on_every_rank
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular
from gpt2_ddp.tasks.images.sources import Split, join_first, read_source
from gpt2_ddp.tasks.supervised import Samples, SampleSet, as_batches, hash_of

Stored = bytes | Path | np.ndarray | dict[str, Any]
"""A file's content, a file, pixels uint8 [H, W] or [H, W, 3], or a row of `datasets` with the keys bytes and path."""
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
PLAIN = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes of 8 bits that have no transparency, or say it elsewhere."""
NOTE = 600  # characters of a note
SCANNED = 64  # images that are decoded at a time before training


@dataclass(frozen=True)
class Images:
    """A training and a test split, inputs uint8 [N, 3, H, W] and targets int64 [N]; and the names of the classes."""

    train: SampleSet
    test: SampleSet
    classes: list[str]
    shape: tuple[int, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of them."""
        return {"classes": self.classes, "image_shape": [*self.shape]}


@dataclass
class StoredImages:
    """Images that are decoded whenever they are read, and take no memory."""

    split: Split
    targets: Tensor  # int64 [N]
    rows: np.ndarray  # int64 [N], of the split
    config: ClassifierDataConfig
    shape: tuple[int, ...]  # [3, H, W] of each
    workers: int
    digest: str | None = None  # of all of it, as `Samples.sha256`; None until it is known
    field: str = "data.path"  # of messages

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, H, W] and int64 [b] of the samples int64 [b]. Raises: UserError where one cannot be decoded."""
        decoded = list(_decode(self.split, self.rows[items].tolist(), self.config, self.field))
        _, H, W = self.shape
        for item, image in zip(items, decoded, strict=True):
            if image.shape[:2] != (H, W):
                hint = f"is {image.shape[1]} x {image.shape[0]} pixels, others are {W} x {H}; scale all images "
                hint += f"to one size, as a training with --data.image_size {min(H, W)} does"
                raise UserError(self.field, self.where(item), hint)
        images = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).contiguous()
        return images, self.targets[torch.from_numpy(items)]

    def sha256(self) -> str:
        assert self.digest is not None, "load_images decodes all images once"
        return self.digest

    def where(self, item: int) -> str:
        """The sample's name in messages."""
        return self.split.where(int(self.rows[item]))

    def scan(self, keep: bool) -> tuple[SampleSet, list[bytes]]:
        """Decodes all images once, in order: the samples, `Samples` if `keep`; and a digest of the pixels of each."""
        digests: list[bytes] = []
        inputs = torch.empty(len(self) if keep else 0, *self.shape, dtype=torch.uint8)
        sampler = BatchSampler(range(len(self)), SCANNED, drop_last=False)
        loader = make_loader(as_batches(self), sampler, 0 if keep else self.workers)

        def batches() -> Iterator[Tensor]:
            for images, _, items in map(unwrap, loader):
                digests.extend(hashlib.blake2b(image.numpy().data, digest_size=16).digest() for image in images)
                if keep:
                    inputs[items] = images
                yield images

        if keep:
            deque(batches(), 0)
            return Samples(inputs, self.targets), digests
        self.digest = hash_of((torch.uint8, (len(self), *self.shape), batches()), self.targets)
        return self, digests


def _decode(
    split: Split, rows: list[int], config: ClassifierDataConfig, field: str = "data.path"
) -> Iterator[np.ndarray]:
    """uint8 [H, W, 3] of each row."""
    for row, stored in zip(rows, split.images[rows], strict=True):
        yield decode_image(stored, split.where(row), config.image_size, field)


def unlabelled(files: Sequence[Path], config: ClassifierDataConfig, shape: Sequence[int], field: str) -> StoredImages:
    """The images of files, prepared as those of a run, with targets 0. `field`: of messages, where the user named them.
    Decodes all of them once. Raises: UserError if one is no image, or without `data.image_size` of another `shape`."""
    rows, split = np.arange(len(files)), Split("", np.array(files, object), [])
    images = StoredImages(split, torch.zeros(len(rows), dtype=torch.long), rows, config, tuple(shape), 0, field=field)
    images.scan(keep=False)
    return images


def load_images(
    accelerator: Accelerator, config: ClassifierDataConfig, seed: int, facts: Mapping[str, Any] | None = None
) -> Images:
    """The images of a configuration, equal on every rank. One process per node reads them first, for the caches.
    `seed` decides which images are held out, where there is no test split. `facts`: of the checkpoint that uses them.
    Raises: UserError, on every rank, if they cannot be read or contradict the configuration."""
    first = accelerator.is_local_main_process

    def read() -> Images:
        return read_images(config, seed, facts, look=first, tell=accelerator.is_main_process)

    early = on_every_rank(lambda: read() if first else None, patience=PREPARATION)
    images = on_every_rank(lambda: early or read(), patience=PREPARATION)
    for split in (images.train, images.test):
        if isinstance(split, StoredImages):
            of_ranks = gather_object([split.digest])  # collective: only local main processes have it
            split.digest = split.digest or of_ranks[0]
    return images


def read_images(
    config: ClassifierDataConfig,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    look: bool = True,
    tell: bool = False,
) -> Images:
    """As `load_images`, in one process. `look`: also decode images that are not kept, which finds broken ones. `tell`:
    print notes."""
    facts = facts or {}
    splits, notes = read_source(config)
    source = config.path or config.name
    for name, split in splits.items():
        if not len(split.images):
            raise UserError("data.path" if config.path else "data.name", source, f"split {name} is empty")
    classes, numbers = number_classes(splits, source, facts.get("classes"), CIFAR_CLASSES.get(config.name))
    train = splits["train"]
    shape = tuple(facts.get("image_shape") or (3, *next(_decode(train, [0], config)).shape[:2]))
    rows = {name: np.arange(len(split.images)) for name, split in splits.items()}
    if "test" not in splits:
        splits["test"], numbers["test"] = train, numbers["train"]
        rows, note = _hold_out(np.array(numbers["train"]), source, config, seed)
        notes.append(note)
    stored = {
        name: StoredImages(split, torch.tensor(numbers[name])[rows[name]], rows[name], config, shape, config.workers)
        for name, split in splits.items()
    }
    fits = sum(map(len, stored.values())) * math.prod(shape) <= config.memory_gb * 1e9
    scanned = {name: images.scan(keep=fits) if fits or look else (images, []) for name, images in stored.items()}
    if tell:
        notes += _notes(source, classes, stored, {name: digests for name, (_, digests) in scanned.items()})
        for note in notes:
            print(f"note: {truncate(note, NOTE)}", file=sys.stderr)
    test = scanned["test"][0]
    if isinstance(test, Samples):
        test.where = stored["test"].where
    return Images(scanned["train"][0], test, classes, shape)


def _hold_out(
    labels: np.ndarray, source: str, config: ClassifierDataConfig, seed: int
) -> tuple[dict[str, np.ndarray], str]:
    """The rows of images that are for training and for testing, in order; and a note. `labels`: int64 [n]. The
    shares of each class differ by less than an image."""
    n = len(labels)
    held = min(max(round(n * config.test_fraction), 1), n - 1)
    if held < 1:
        raise UserError("data.path", source, "has one image; training and testing need at least one each")
    # places at equal distances in the images sorted by class, in random order within each
    order = Order(seed, n).items_at(np.arange(n)).astype(np.int64)
    order, chosen = order[np.argsort(labels[order], kind="stable")], (2 * np.arange(held) + 1) * n // (2 * held)
    rows = {"test": np.sort(order[chosen]), "train": np.sort(np.delete(order, chosen))}
    what = f"{held:,} of {n:,} images, drawn from each class (seed {seed}), are test images"
    return rows, f"{source} has no split named test, val or validation: {what} (data.test_fraction)"


def _notes(
    source: str, classes: list[str], stored: Mapping[str, StoredImages], digests: Mapping[str, list[bytes]]
) -> Iterator[str]:
    """A line for each split without images of some classes, and one for test images with a training image's pixels."""
    for name, images in stored.items():
        counts = torch.bincount(images.targets, minlength=len(classes)).tolist()
        if missing := [of for of, count in zip(classes, counts, strict=True) if not count]:
            missing_names = join_first(missing)
            yield f"{source}: no {name} images of {len(missing):,} of {len(classes):,} classes: {missing_names}"
    trained = {digest: item for item, digest in enumerate(digests["train"])}
    twice = [item for item, digest in enumerate(digests["test"]) if digest in trained]
    if twice:
        one, other = stored["test"].where(twice[0]), stored["train"].where(trained[digests["test"][twice[0]]])
        yield f"{len(twice):,} of {len(stored['test']):,} test images are training images, too, such as {one} = {other}"


def number_classes(
    splits: Mapping[str, Split], source: str, known: Sequence[str] | None, count: int | None
) -> tuple[list[str], dict[str, list[int]]]:
    """The names of the classes of all splits, and the number of each image's class. `known`: those of a run, which
    allows no others; None: those of the data. `count`: how many a data set has, if they are numbers.
    Raises: UserError if a label is none of these, or there are less than two."""
    given = next((of.names for of in splits.values() if of.names), None)
    named = {split: [_name(of.names or given, label) for label in of.labels] for split, of in splits.items()}
    if known is None and not given:
        there = {name for names in named.values() for name in names if name is not None}
        numbers = all(isinstance(label, int) for of in splits.values() for label in of.labels)
        known = [*map(str, range(count))] if numbers and count else sorted(there, key=int if numbers else str)
    classes = [*(known or given or ())]
    number_of = {name: number for number, name in enumerate(classes)}
    allowed = join_first(classes) or "whole numbers from 0, or text"
    for split, names in named.items():
        wrong = next((row for row, name in enumerate(names) if name not in number_of), None)
        if wrong is not None:
            hint = f"has the label {truncate(splits[split].labels[wrong])}; labels are {allowed}"
            raise UserError("data.path", splits[split].where(wrong), hint)
    if len(classes) < 2:
        raise UserError("data.path", source, f"has {len(classes)} classes ({allowed}), not at least 2")
    return classes, {split: [number_of[str(name)] for name in names] for split, names in named.items()}


def _name(names: Sequence[str] | None, label: Any) -> str | None:
    """The class of a label; None for an invalid label."""
    if isinstance(label, str):
        return label
    if type(label) is not int or not 0 <= label < (len(names) if names else math.inf):
        return None
    return names[label] if names else str(label)


def decode_image(stored: Stored, where: str, size: int | None, field: str = "data.path") -> np.ndarray:
    """uint8 [H, W, 3] of an image of any mode, the first frame where there are several. It is turned upright by
    its EXIF orientation; what is transparent is laid on white, and of 16 bits of grey the upper 8 count.

    `where` and `field`: the file or row, and where the user named it, for messages. `size`: the largest centred square
    is scaled to so many pixels each way (bicubic).
    Raises: UserError if it is no image, or one of 32 bits per channel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, of a size that is allowed yet
            return np.asarray(_upright_rgb(_open(stored), where, size, field))
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        # by its own words, the file would be named again, or an object in memory
        reason = "Pillow does not know the format" if isinstance(error, UnidentifiedImageError) else error
        strerror = getattr(error, "strerror", None)  # where the system refused
        hint = f"cannot be read ({strerror})" if strerror else f"is not an image ({reason})"
        raise UserError(field, where, hint) from error


def _open(stored: Stored) -> Image.Image:
    if isinstance(stored, np.ndarray):
        return Image.fromarray(stored)
    if isinstance(stored, dict):
        content, path = stored.get("bytes"), stored.get("path")
        return _open(Path(path) if content is None and path else content)  # pyright: ignore[reportArgumentType]
    if not isinstance(stored, bytes | Path):  # a table's cell may hold anything
        raise TypeError(f"found {truncate(stored, 40)}")
    return Image.open(io.BytesIO(stored if isinstance(stored, bytes) else regular(stored).read_bytes()))


def _upright_rgb(image: Image.Image, where: str, size: int | None, field: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode not in PLAIN:
        raise UserError(field, where, f"has Pillow's mode {image.mode}; save it as 8-bit RGB")
    image = image.convert("RGB")
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        # cropped first: `ImageOps.fit` would mix in pixels outside the square
        image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    return image
