"""Images as samples: kept decoded where they fit into memory, otherwise decoded whenever they are read."""

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.config.jobs import CIFAR_CLASSES, ClassifierDataConfig
from gpt2_ddp.data.feed import ErrorsAsItems, as_read, unwrap
from gpt2_ddp.data.order import Order
from gpt2_ddp.distributed.ranks import PREPARATION, on_every_rank
from gpt2_ddp.distributed.workers import worker_context
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.tasks.images.decode import decode_image
from gpt2_ddp.tasks.images.sources import Split, join_first, number_classes, read_source
from gpt2_ddp.tasks.samples import Samples, SampleSet, hash_of

Shape = tuple[int, ...]
NOTE = 600
"""Characters of a line that tells something."""
SCANNED = 64
"""Images that are decoded at a time before training."""


@dataclass(frozen=True)
class Images:
    """A training and a test split, inputs uint8 [N, 3, H, W] and targets int64 [N]; and the names of the classes."""

    train: SampleSet
    test: SampleSet
    classes: list[str]
    shape: Shape

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of them."""
        return {"classes": self.classes, "image_shape": [*self.shape]}


class StoredImages:
    """Images that are decoded whenever they are read: `Samples` that take no memory.

    Args:
        targets: int64 [N].
        rows: int64 [N], which of the split's images they are.
        shape: [3, H, W] of each.

    Attributes:
        digest: of all of it, as `Samples.sha256` has it; None until it is known.
        workers: loader processes that read them.
    """

    def __init__(self, split: Split, targets: Tensor, rows: np.ndarray, config: ClassifierDataConfig, shape: Shape):
        self.split, self.targets, self.rows, self.config, self.shape = split, targets, rows, config, shape
        self.workers = config.workers
        self.digest: str | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, H, W] and int64 [b] of the samples int64 [b]. Raises: UserError where one cannot be decoded."""
        decoded = torch.from_numpy(np.stack([self._decode(int(item)) for item in items]))
        return decoded.permute(0, 3, 1, 2).contiguous(), self.targets[torch.from_numpy(items)]

    def sha256(self) -> str:
        assert self.digest is not None, "load_images has all of it read"
        return self.digest

    def where(self, item: int) -> str:
        """What a message calls a sample."""
        return self.split.where(int(self.rows[item]))

    def _decode(self, item: int) -> np.ndarray:
        where = self.where(item)
        found = decode_image(
            self.split.images[int(self.rows[item])], where, self.config.image_size, as_stored(self.config)
        )
        if found.shape[:2] != self.shape[1:]:
            H, W = self.shape[1:]
            hint = (
                f"is {found.shape[1]} x {found.shape[0]} pixels, others are {W} x {H}; have all of them scaled to one "
            )
            raise UserError("data.path", where, f"{hint}size, like --data.image_size {min(H, W)}")
        return found


def as_stored(config: ClassifierDataConfig) -> bool:
    """Whether images are taken as CIFAR has them, or not at all."""
    return config.name in CIFAR_CLASSES and config.image_size is None


def load_images(
    accelerator: Accelerator, config: ClassifierDataConfig, seed: int, facts: Mapping[str, Any] | None = None
) -> Images:
    """The images of a configuration, equal on every rank.

    One process per node fetches and looks at them, while the others wait to read what it fetched.

    Args:
        seed: of which images are held out to test on, where there is no test split.
        facts: of the checkpoint that they are for; None: they are for none.

    Raises:
        UserError: on every rank, when they cannot be had, or are not as the configuration says.
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
            of_ranks = gather_object([split.digest])  # collective: of those that looked at them
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
        look: whether to decode also those that are not kept, which finds broken ones. tell: whether to print notes.
    """
    facts = facts or {}
    splits, notes = read_source(config)
    source = config.path or config.name
    for split, of in splits.items():
        if not len(of.images):
            raise UserError("data.path" if config.path else "data.name", source, f"split {split} is empty")
    classes, numbers = number_classes(splits, source, facts.get("classes"), CIFAR_CLASSES.get(config.name))
    first = splits["train"]
    H, W = decode_image(first.images[0], first.where(0), config.image_size, as_stored(config)).shape[:2]
    shape: Shape = tuple(facts.get("image_shape") or (3, H, W))
    rows = {split: np.arange(len(of.images)) for split, of in splits.items()}
    if "test" not in splits:
        splits["test"], numbers["test"] = first, numbers["train"]
        rows, note = _hold_out(len(first.images), source, config, seed)
        notes.append(note)
    stored = {
        split: StoredImages(of, torch.tensor(numbers[split])[rows[split]], rows[split], config, shape)
        for split, of in splits.items()
    }
    fits = sum(map(len, stored.values())) * math.prod(shape) <= config.memory_gb * 1e9
    found: dict[str, SampleSet] = {}
    digests: dict[str, list[bytes]] = {}
    for split, images in stored.items():
        found[split], digests[split] = _keep(images) if fits else (images, _look_at(images) if look else [])
    if tell:
        notes += [*_without_images(source, classes, stored), *_duplicates(stored, digests)]
        for note in notes:
            print(f"note: {truncate(note, NOTE)}", file=sys.stderr)
    return Images(found["train"], found["test"], classes, shape)


def _hold_out(n: int, source: str, config: ClassifierDataConfig, seed: int) -> tuple[dict[str, np.ndarray], str]:
    """Which of n images are to train and to test on, in their order; and a line that says so."""
    held = min(max(round(n * config.test_fraction), 1), n - 1)
    if held < 1:
        raise UserError("data.path", source, "has one image; give some to train on and some to test on")
    order = Order(seed, n).items_at(np.arange(n)).astype(np.int64)
    told = f"{held:,} of {n:,} images, drawn by seed {seed}, are held out (data.test_fraction)"
    rows = {"test": np.sort(order[:held]), "train": np.sort(order[held:])}
    return rows, f"{source} has no split test, val or validation: {told}"


def _keep(images: StoredImages) -> tuple[Samples, list[bytes]]:
    """All of them in memory, and each one's digest."""
    inputs = torch.empty(len(images), *images.shape, dtype=torch.uint8)
    digests: list[bytes] = []
    for start in range(0, len(images), SCANNED):
        items = np.arange(start, min(start + SCANNED, len(images)))
        inputs[start : start + SCANNED] = images.read(items)[0]
        digests += map(_digest, inputs[start : start + SCANNED])
    return Samples(inputs, images.targets), digests


def _look_at(images: StoredImages) -> list[bytes]:
    """Decodes all of them once, in order: their digest, and each one's own."""
    digests: list[bytes] = []

    def batches() -> Iterator[Tensor]:
        context = worker_context() if images.workers else None
        scan = DataLoader(
            ErrorsAsItems(_Scanned(images)),
            SCANNED,
            num_workers=images.workers,
            collate_fn=as_read,
            multiprocessing_context=context,
            generator=torch.Generator(),  # or starting it would draw from the one that makes the initial weights
        )
        for read in map(unwrap, scan):
            digests.extend(map(_digest, read))
            yield read

    images.digest = hash_of((torch.uint8, (len(images), *images.shape), batches()), images.targets)
    return digests


class _Scanned(Dataset):
    """Map-style: items -> their images."""

    def __init__(self, images: StoredImages):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, items: list[int]) -> Tensor:
        return self.images.read(np.array(items))[0]


def _digest(image: Tensor) -> bytes:
    return hashlib.blake2b(image.numpy().data, digest_size=16).digest()


def _without_images(source: str, classes: list[str], stored: Mapping[str, StoredImages]) -> Iterator[str]:
    """A line for each split that has no image of some classes: nothing trains, or nothing scores them."""
    for split, images in stored.items():
        counts = torch.bincount(images.targets, minlength=len(classes)).tolist()
        if missing := [name for name, count in zip(classes, counts, strict=True) if not count]:
            names = join_first(missing)
            yield f"{source}: no {split} image of {len(missing):,} of the {len(classes):,} classes: {names}"


def _duplicates(stored: Mapping[str, StoredImages], digests: Mapping[str, list[bytes]]) -> Iterator[str]:
    """A line, where test images are also training images, by their pixels."""
    trained = {digest: item for item, digest in enumerate(digests["train"])}
    twice = [item for item, digest in enumerate(digests["test"]) if digest in trained]
    if twice:
        names = {"test": twice[0], "train": trained[digests["test"][twice[0]]]}
        one, other = (stored[name].where(item) for name, item in names.items())
        yield f"{len(twice):,} of {len(stored['test']):,} test images are training images, too, such as {one} = {other}"
