"""Images as samples: kept decoded where they fit into memory, otherwise decoded whenever they are read."""

import hashlib
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader

from gpt2_ddp.config.jobs import CIFAR_CLASSES, ClassifierDataConfig
from gpt2_ddp.data.feed import ErrorsAsItems, as_read, unwrap
from gpt2_ddp.data.order import Order
from gpt2_ddp.distributed.ranks import PREPARATION, on_every_rank
from gpt2_ddp.distributed.workers import worker_context
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.tasks.images.decode import decode_image
from gpt2_ddp.tasks.images.sources import Split, join_first, number_classes, read_source
from gpt2_ddp.tasks.supervised import IndexedSamples, Samples, SampleSet, hash_of

NOTE = 600
"""Characters of a note."""
SCANNED = 64
"""Images that are decoded at a time before training."""


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


class StoredImages:
    """Images that are decoded whenever they are read: `Samples` that take no memory.

    Args:
        targets: int64 [N].
        rows: int64 [N], the rows of the split.
        shape: [3, H, W] of each.

    Attributes:
        digest: hash of all of it, as `Samples.sha256`; None until it is known.
        workers: loader processes that read them.
    """

    def __init__(
        self, split: Split, targets: Tensor, rows: np.ndarray, config: ClassifierDataConfig, shape: tuple[int, ...]
    ):
        self.split, self.targets, self.rows, self.config, self.shape = split, targets, rows, config, shape
        self.workers = config.workers
        self.digest: str | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, H, W] and int64 [b] of the samples int64 [b]. Raises: UserError where one cannot be decoded."""
        decoded = list(_decode(self.split, self.rows[items].tolist(), self.config))
        (H, W) = self.shape[1:]
        for item, image in zip(items, decoded, strict=True):
            if image.shape[:2] != (H, W):
                hint = f"is {image.shape[1]} x {image.shape[0]} pixels, others are {W} x {H}; have all of them scaled "
                raise UserError("data.path", self.where(item), f"{hint}to one size, like --data.image_size {min(H, W)}")
        images = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).contiguous()
        return images, self.targets[torch.from_numpy(items)]

    def sha256(self) -> str:
        assert self.digest is not None, "load_images decodes all images once"
        return self.digest

    def where(self, item: int) -> str:
        """The sample's name in messages."""
        return self.split.where(int(self.rows[item]))

    def scan(self, keep: bool) -> tuple[SampleSet, list[bytes]]:
        """Decodes all images once, in order; returns the samples, and a digest of the pixels of each.

        Args:
            keep: keep the pixels, and return `Samples`.
        """
        digests: list[bytes] = []
        inputs = torch.empty(len(self) if keep else 0, *self.shape, dtype=torch.uint8)
        workers = 0 if keep else self.workers
        loader = DataLoader(
            ErrorsAsItems(IndexedSamples(self)),
            SCANNED,
            num_workers=workers,
            collate_fn=as_read,
            multiprocessing_context=worker_context() if workers else None,
            generator=torch.Generator(),  # the default would draw from the generator of the initial weights
        )

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


def _decode(split: Split, rows: list[int], config: ClassifierDataConfig) -> Iterator[np.ndarray]:
    """uint8 [H, W, 3] of each row."""
    as_stored = config.name in CIFAR_CLASSES and config.image_size is None
    for row, stored in zip(rows, split.read(rows), strict=True):
        yield decode_image(stored, split.where(row), config.image_size, as_stored)


def load_images(
    accelerator: Accelerator, config: ClassifierDataConfig, seed: int, facts: Mapping[str, Any] | None = None
) -> Images:
    """The images of a configuration, equal on every rank. One process per node reads them first, for the caches.

    Args:
        seed: decides which images are held out to test on, where there is no test split.
        facts: of the checkpoint that uses them; None: of none.

    Raises:
        UserError: on every rank, when they cannot be read, or contradict the configuration.
    """
    found: list[Images] = []
    first = accelerator.is_local_main_process

    def read(reads: bool) -> None:
        if reads:
            found.append(read_images(config, seed, facts, look=first, tell=accelerator.is_main_process))

    for reads in (first, not first):
        on_every_rank(accelerator, lambda reads=reads: read(reads), patience=PREPARATION)
    for split in (found[0].train, found[0].test):
        if isinstance(split, StoredImages):
            of_ranks = gather_object([split.digest])  # collective: only local main processes have it
            split.digest = split.digest or of_ranks[0]
    return found[0]


def read_images(
    config: ClassifierDataConfig,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    look: bool = True,
    tell: bool = False,
) -> Images:
    """As `load_images`, in one process.

    Args:
        look: decode also images that are not kept, which finds broken ones.
        tell: print notes.
    """
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
        rows, note = _hold_out(len(train.images), source, config, seed)
        notes.append(note)
    stored = {
        name: StoredImages(split, torch.tensor(numbers[name])[rows[name]], rows[name], config, shape)
        for name, split in splits.items()
    }
    fits = sum(map(len, stored.values())) * math.prod(shape) <= config.memory_gb * 1e9
    scanned = {name: images.scan(keep=fits) if fits or look else (images, []) for name, images in stored.items()}
    if tell:
        notes += _notes(source, classes, stored, {name: digests for name, (_, digests) in scanned.items()})
        for note in notes:
            print(f"note: {truncate(note, NOTE)}", file=sys.stderr)
    return Images(scanned["train"][0], scanned["test"][0], classes, shape)


def _hold_out(n: int, source: str, config: ClassifierDataConfig, seed: int) -> tuple[dict[str, np.ndarray], str]:
    """The rows of n images that are for training and for testing, in order; and a note."""
    held = min(max(round(n * config.test_fraction), 1), n - 1)
    if held < 1:
        raise UserError("data.path", source, "has one image; give some to train on and some to test on")
    order = Order(seed, n).items_at(np.arange(n)).astype(np.int64)
    told = f"{held:,} of {n:,} images, drawn by seed {seed}, are held out (data.test_fraction)"
    rows = {"test": np.sort(order[:held]), "train": np.sort(order[held:])}
    return rows, f"{source} has no split test, val or validation: {told}"


def _notes(
    source: str, classes: list[str], stored: Mapping[str, StoredImages], digests: Mapping[str, list[bytes]]
) -> Iterator[str]:
    """A line for each split without images of some classes, and one for test images with a training image's pixels."""
    for name, images in stored.items():
        counts = torch.bincount(images.targets, minlength=len(classes)).tolist()
        if missing := [of for of, count in zip(classes, counts, strict=True) if not count]:
            missing_names = join_first(missing)
            yield f"{source}: no {name} image of {len(missing):,} of the {len(classes):,} classes: {missing_names}"
    trained = {digest: item for item, digest in enumerate(digests["train"])}
    twice = [item for item, digest in enumerate(digests["test"]) if digest in trained]
    if twice:
        one, other = stored["test"].where(twice[0]), stored["train"].where(trained[digests["test"][twice[0]]])
        yield f"{len(twice):,} of {len(stored['test']):,} test images are training images, too, such as {one} = {other}"
