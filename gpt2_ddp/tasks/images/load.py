"""Images as samples: decoded to pixels; kept if they fit into memory, otherwise decoded at each read."""

import hashlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import BatchSampler

from gpt2_ddp.config.jobs import CIFAR_CLASSES, ClassifierDataConfig
from gpt2_ddp.data.feed import make_loader, unwrap
from gpt2_ddp.data.order import Order
from gpt2_ddp.distributed.ranks import from_main, on_every_rank
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular
from gpt2_ddp.tasks.images.sources import Split, join_first, note, read_source
from gpt2_ddp.tasks.supervised import as_batches, hash_of

SCANNED = 64  # images that are decoded at a time before training


@dataclass(frozen=True)
class Images:
    """A training and a test split, inputs uint8 [N, 3, H, W] and targets int64 [N]; and the names of the classes."""

    train: "StoredImages"
    test: "StoredImages"
    classes: list[str]
    shape: tuple[int, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of them."""
        return {"classes": self.classes, "image_shape": [*self.shape]}


@dataclass
class StoredImages:
    """The images of a split. They are decoded whenever they are read, and take no memory; or all at once by `scan`."""

    split: Split
    targets: Tensor  # int64 [N]
    rows: np.ndarray  # int64 [N], of the split
    config: ClassifierDataConfig
    shape: tuple[int, ...]  # [3, H, W] of each
    workers: int
    inputs: Tensor | None = None  # uint8 [N, 3, H, W], once they are kept
    digest: str = ""  # of all samples
    field: str = "data.path"  # of messages

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, H, W] and int64 [b] of the samples int64 [b]. Raises: UserError where one cannot be decoded."""
        index, rows = torch.from_numpy(items), self.rows[items].tolist()
        if self.inputs is not None:
            return self.inputs[index], self.targets[index]
        (_, H, W), images = self.shape, []
        for row, stored in zip(rows, self.split.images[rows], strict=True):
            images.append(image := decode_image(stored, self.split.where(row), self.config.image_size, self.field))
            if image.shape[:2] != (H, W):
                hint = f"is {image.shape[1]} x {image.shape[0]} pixels, others are {W} x {H}; scale all images "
                hint += f"to one size, as a training with --data.image_size {min(H, W)} does"
                raise UserError(self.field, self.split.where(row), hint)
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), self.targets[index]

    def where(self, item: int) -> str:
        """The sample's name in messages."""
        return self.split.where(int(self.rows[item]))

    def sha256(self) -> str:
        assert self.digest, "load_images decodes all images once"
        return self.digest

    def scan(self, keep: bool) -> list[bytes]:
        """Decodes all images once, in order, and may keep them. Returns a digest of the pixels of each."""
        digests: list[bytes] = []
        inputs = torch.empty(len(self) if keep else 0, *self.shape, dtype=torch.uint8)
        self.workers = 0 if keep else self.workers
        loader = make_loader(as_batches(self), BatchSampler(range(len(self)), SCANNED, drop_last=False), self.workers)

        def batches() -> Iterator[Tensor]:
            for images, _, items in map(unwrap, loader):
                digests.extend(hashlib.blake2b(image.numpy().data, digest_size=16).digest() for image in images)
                if keep:
                    inputs[items] = images
                yield images

        self.digest = hash_of((torch.uint8, (len(self), *self.shape), batches()), self.targets)
        self.inputs = inputs if keep else None
        return digests


def unlabelled(files: Sequence[Path], config: ClassifierDataConfig, shape: Sequence[int], field: str) -> StoredImages:
    """The images of files, prepared as those of a run, with targets 0. `field`: of messages, where the user named them.
    Decodes all of them once. Raises: UserError if one is no image, or without `data.image_size` of another `shape`."""
    rows, split, targets = np.arange(len(files)), Split("", np.array(files, object), []), torch.zeros(len(files)).long()
    images = StoredImages(split, targets, rows, config, tuple(shape), workers=0, field=field)
    images.scan(keep=False)
    return images


def load_images(
    accelerator: Accelerator, config: ClassifierDataConfig, seed: int, facts: Mapping[str, Any] | None = None
) -> Images:
    """The images of a configuration, equal on every rank. One process per node reads them first, for the caches.
    `seed` decides which images are held out, where there is no test split. `facts`: of the checkpoint that uses them.
    Raises: UserError, on every rank, if they cannot be read or contradict the configuration."""
    first = accelerator.is_local_main_process
    read = partial(read_images, config, seed, facts, look=first)
    early = on_every_rank(lambda: read() if first else None)
    images = on_every_rank(lambda: early or read())
    for samples in (images.train, images.test):
        of_main = from_main(samples.digest)
        samples.digest = samples.digest or of_main  # a rank that did not decode all of them has none
    return images


def read_images(
    config: ClassifierDataConfig, seed: int = 0, facts: Mapping[str, Any] | None = None, look: bool = True
) -> Images:
    """As `load_images`, in one process. `look`: also decode images that are not kept, which finds broken ones."""
    facts, source, splits = facts or {}, config.path or config.name, read_source(config)
    classes, numbers = number_classes(splits, source, facts.get("classes"), CIFAR_CLASSES.get(config.name))
    whole = splits["train"]
    first = decode_image(whole.images[0], whole.where(0), config.image_size)
    shape = tuple(facts.get("image_shape") or (3, *first.shape[:2]))
    rows = {name: np.arange(len(labels)) for name, labels in numbers.items()}
    if "test" not in splits:
        splits["test"], numbers["test"] = whole, numbers["train"]
        rows = _hold_out(numbers["train"], source, config, seed)
    train, test = (
        StoredImages(splits[name], torch.from_numpy(numbers[name][of]), of, config, shape, config.workers)
        for name, of in rows.items()
    )
    fits = (len(train) + len(test)) * math.prod(shape) <= config.memory_gb * 1e9
    trained, tested = (samples.scan(keep=fits) if fits or look else [] for samples in (train, test))
    for name, samples in (("train", train), ("test", test)):
        counts = torch.bincount(samples.targets, minlength=len(classes)).tolist()
        if missing := [of for of, count in zip(classes, counts, strict=True) if not count]:
            note(f"{source}: no {name} images of {len(missing):,} of {len(classes):,} classes: {join_first(missing)}")
    item_of = {digest: item for item, digest in enumerate(trained)}
    if twice := [item for item, digest in enumerate(tested) if digest in item_of]:
        pair = f"{test.where(twice[0])} = {train.where(item_of[tested[twice[0]]])}"
        note(f"{len(twice):,} of {len(test):,} test images are training images, too, such as {pair}")
    return Images(train, test, classes, shape)


def _hold_out(labels: np.ndarray, source: str, config: ClassifierDataConfig, seed: int) -> dict[str, np.ndarray]:
    """The rows of images that are for training and for testing, in order. `labels`: int64 [n]. The shares of each class
    differ by less than an image."""
    n = len(labels)
    held = min(max(round(n * config.test_fraction), 1), n - 1)
    if held < 1:
        raise UserError("data.path", source, "has one image; training and testing need at least one each")
    # places at equal distances in the images sorted by class, in random order within each
    order = Order(seed, n).items_at(np.arange(n)).astype(np.int64)
    order, chosen = order[np.argsort(labels[order], kind="stable")], (2 * np.arange(held) + 1) * n // (2 * held)
    what = f"{held:,} of {n:,} images, drawn from each class (seed {seed}), are test images"
    note(f"{source} has no split named test, val or validation: {what} (data.test_fraction)")
    return {"train": np.sort(np.delete(order, chosen)), "test": np.sort(order[chosen])}


def number_classes(
    splits: Mapping[str, Split], source: str, known: Sequence[str] | None, count: int | None
) -> tuple[list[str], dict[str, np.ndarray]]:
    """The names of the classes of all splits, and the number of each image's class. `known`: those of a run, which
    allows no others; None: those of the data. `count`: how many a data set has, if they are numbers.
    Raises: UserError if a label is none of these, or there are less than two."""
    given = next((of.names for of in splits.values() if of.names), None)
    named = {split: [_name(of.names or given, label) for label in of.labels] for split, of in splits.items()}
    if known is None and not given:
        numbers = all(isinstance(label, int) for of in splits.values() for label in of.labels)
        there = {name for names in named.values() for name in names if name is not None}
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
    return classes, {split: np.array([number_of[str(name)] for name in names]) for split, names in named.items()}


def _name(names: Sequence[str] | None, label: Any) -> str | None:
    """The class of a label; None for an invalid label."""
    if isinstance(label, str):
        return label
    if type(label) is not int or not 0 <= label < (len(names) if names else math.inf):
        return None
    return names[label] if names else str(label)


def decode_image(stored: Any, where: str, size: int | None, field: str = "data.path") -> np.ndarray:
    """uint8 [H, W, 3] of the first frame of an image, upright by its EXIF orientation. Transparency becomes white; of
    16 bits of grey the upper 8 count.

    `stored`: a file, its content, pixels uint8 [H, W] or [H, W, 3], or a row of `datasets`. `where`, `field`: its name
    and the user's field, for messages. `size`: pixels each way, to which the largest centred square is scaled.
    Raises: UserError if it is no image, or one of 32 bits per channel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, of a size that is allowed yet
            return np.asarray(_upright_rgb(_open(stored), where, size, field))
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)  # whose text names the file again, or an object in memory
        reason = "Pillow does not know the format" if unknown else getattr(error, "strerror", None) or error
        raise UserError(field, where, f"cannot be read as an image ({reason})") from error


def _open(stored: Any) -> Image.Image:
    if isinstance(stored, dict):  # a row of `datasets`
        content, path = stored.get("bytes"), stored.get("path")
        stored = Path(path) if content is None and path else content
    if isinstance(stored, np.ndarray):
        return Image.fromarray(stored)
    if not isinstance(stored, bytes | Path):  # a table's cell may hold anything
        raise TypeError(f"found {truncate(stored, 40)}")
    return Image.open(io.BytesIO(stored if isinstance(stored, bytes) else regular(stored).read_bytes()))


def _upright_rgb(image: Image.Image, where: str, size: int | None, field: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode in ("I", "F"):
        raise UserError(field, where, f"has Pillow's mode {image.mode}; save it as 8-bit RGB")
    image = image.convert("RGB")
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        # cropped first: `ImageOps.fit` would mix in pixels outside the square
        image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    return image
