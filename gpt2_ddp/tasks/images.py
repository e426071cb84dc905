"""CIFAR images as tensors: read once, kept as uint8, normalised and augmented a batch at a time on the device."""

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.processes.ranks import on_every_rank
from gpt2_ddp.tasks.samples import Samples

CLASSES = {"cifar10": 10, "cifar100": 100}
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = {"cifar10": ("label",), "cifar100": ("fine_label", "label")}
SHAPE = (32, 32, 3)
PADDING = 4


def load_images(accelerator: Accelerator, config: ClassifierDataConfig) -> tuple[Samples, Samples]:
    """Training and test split: images uint8 [N, 3, 32, 32], labels int64 [N].

    One process per node fetches them, while the others wait to read what it fetched.

    Raises:
        UserError: on every rank, when they cannot be had, or are not 32 x 32 colour images with labels of the classes.
    """
    splits: dict[str, Samples] = {}
    for reads in (accelerator.is_local_main_process, not accelerator.is_local_main_process):
        on_every_rank(accelerator, lambda reads=reads: splits.update(read_images(config) if reads else {}))
    return splits["train"], splits["test"]


def read_images(config: ClassifierDataConfig) -> dict[str, Samples]:
    """The splits `train` and `test`, decoded; from the folder `path`, or from the Hub (or its cache).

    Raises:
        UserError: as `load_images` does.
    """
    rows = _local_rows(config.path) if config.path else _hub_rows(config.name)
    missing = {"train", "test"} - set(rows)
    if missing:
        cure = f"has no split {' and '.join(sorted(missing))}, but {', '.join(sorted(map(str, rows)))}"
        raise UserError("data.path", config.path, f"{cure}; name files or folders train and test")
    return {split: _decode(config, split, rows[split]) for split in ("train", "test")}


def _local_rows(folder: str) -> Mapping[Any, Any]:
    import datasets
    import datasets.exceptions

    if not os.path.isdir(folder):
        cure = "there is no such folder; give one with train and test parquet files, or with train/CLASS/*.png"
        raise UserError("data.path", folder, cure)
    try:  # streaming: nothing is copied into a cache
        return cast(Mapping[Any, Any], datasets.load_dataset(folder, streaming=True))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        cure = f"cannot be read ({reason}); give a folder with train and test parquet files, or with train/CLASS/*.png"
        raise UserError("data.path", folder, cure) from error


def _hub_rows(name: str) -> Mapping[Any, Any]:
    import datasets
    import datasets.config
    import datasets.exceptions
    import huggingface_hub.constants
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    source = f"uoft-cs/{name}"
    try:
        huggingface_hub.HfApi().dataset_info(source, timeout=10)
    except (OSError, HTTPError):  # load_dataset would retry for long; what is in the cache may do
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return cast(Mapping[Any, Any], datasets.load_dataset(source))
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        cure = (
            f"cannot be had from the Hub here ({type(error).__name__}); download the parquet files of "
            f"huggingface.co/datasets/{source} where there is a network and give their folder as --data.path"
        )
        raise UserError("data.name", name, cure) from error


def _decode(config: ClassifierDataConfig, split: str, rows: Any) -> Samples:
    """Decodes a split of a `datasets` data set, row by row, into memory."""
    import datasets
    import datasets.exceptions

    source = config.path or f"uoft-cs/{config.name}"
    features = rows.features or {}
    image = _column(features, IMAGE_COLUMNS, source, split)
    label = _column(features, LABEL_COLUMNS[config.name], source, split)
    rows = rows.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    images, labels = [], []
    try:
        for number, row in enumerate(cast(Iterable[dict[str, Any]], rows)):
            images.append(_pixels(row[image], f"{source}, split {split}, row {number}"))
            labels.append(_label(row[label], CLASSES[config.name], f"{source}, split {split}, row {number}"))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            "data.path", source, f"split {split} cannot be read after row {len(images)}: {reason}"
        ) from error
    if not images:
        raise UserError("data.path", source, f"split {split} is empty")
    inputs = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()  # uint8 [N, 3, 32, 32]
    return Samples(inputs, torch.tensor(labels))


def _column(features: Mapping[str, Any], wanted: tuple[str, ...], source: str, split: str) -> str:
    for name in wanted:
        if name in features:
            return name
    cure = f"split {split} has no column {' or '.join(wanted)}, but {', '.join(features) or 'none'}; rename it"
    raise UserError("data.path", source, cure)


def _pixels(stored: Any, where: str) -> np.ndarray:
    """An encoded image as uint8 [32, 32, 3]."""
    from PIL import Image, UnidentifiedImageError

    try:
        content = stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()
        pixels = np.asarray(Image.open(io.BytesIO(content)))
    except (OSError, TypeError, KeyError, UnidentifiedImageError) as error:
        raise UserError("data.path", where, f"is not an image ({error})") from error
    if pixels.shape != SHAPE or pixels.dtype != np.uint8:
        shape = " x ".join(map(str, pixels.shape))
        cure = f"is an image of {shape} {pixels.dtype}; the models take 32 x 32 x 3 uint8: resize, convert to RGB"
        raise UserError("data.path", where, cure)
    return pixels


def _label(value: Any, classes: int, where: str) -> int:
    if not isinstance(value, int) or not 0 <= value < classes:
        raise UserError("data.path", where, f"has the label {value}; labels are 0 to {classes - 1}")
    return value


def normalise(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] -> fp32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def crop_and_flip(images: Tensor) -> Tensor:
    """Each image moved by up to 4 pixels each way, zeros coming in, and mirrored with probability 1/2.

    Args:
        images: uint8 [B, 3, H, W]; torch's default generator of its device decides.
    """
    B, channels, H, W = images.shape
    device = images.device
    top, left = torch.randint(2 * PADDING + 1, (2, B, 1), device=device)
    flipped = torch.rand(B, 1, device=device) < 0.5
    columns = torch.arange(W, device=device).expand(B, W)
    columns = torch.where(flipped, W - 1 - columns, columns) + left  # [B, W]
    rows = torch.arange(H, device=device) + top  # [B, H]
    padded = F.pad(images, (PADDING,) * 4)
    sample = torch.arange(B, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
