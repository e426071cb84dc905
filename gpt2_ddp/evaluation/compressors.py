"""Bits per byte that compressors need for a validation text: what a model's loss is worth, in words
that many people know.

A compressor has no training, but it learns from what it has read. So its figure is the size of the
training and validation text together, less that of the training text alone, per byte of validation
text. A model's bits per byte measure the same: the validation text after training.
"""

import lzma
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer

Compressor = Callable[[bytes], int]
"""The size in bytes of a text, compressed."""
PPMD_MEMORY = 2**28
"""Bytes of PPMd's model, as 7-Zip's `mem=256m`. Enough for texts of tens of MB."""
BEST_ORDER = 16
"""Order of PPMd, bytes of context, that is best on most prose."""


def xz_size(text: bytes) -> int:
    """The size of a text after `xz -9e`."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def ppmd_size(order: int, text: bytes) -> int:
    """The size of a text after 7-Zip's PPMd (variant H) of this order. Needs pyppmd."""
    from pyppmd import Ppmd7Encoder  # noqa: PLC0415  optional: the extra `ppmd`

    encoder = Ppmd7Encoder(order, PPMD_MEMORY)
    return len(encoder.encode(text)) + len(encoder.flush())


def compressors(orders: tuple[int, ...] = (BEST_ORDER,)) -> dict[str, Compressor]:
    """The compressors of this machine, by name: xz, and PPMd of these orders if pyppmd is
    installed."""
    found: dict[str, Compressor] = {"xz -9e": xz_size}
    if find_spec("pyppmd"):
        found |= {f"PPMd of order {order}": partial(ppmd_size, order) for order in orders}
    return found


def bits_per_byte(compressor: Compressor, training: bytes, validation: bytes) -> float:
    """Bits of a compressor per byte of the validation text, after the training text."""
    with ThreadPoolExecutor(2) as threads:  # both compressors run without Python's lock
        whole, before = threads.map(compressor, (training + validation, training))
    return 8 * (whole - before) / len(validation)


def split_text(folder: Path, manifest: Manifest, tokenizer: Tokenizer, split: str) -> bytes:
    """The text of a split, in UTF-8: its tokens without end-of-text, so its documents without a
    gap. Raises: UserError if a shard is damaged."""
    stream = TokenStream(folder, manifest, split)
    (ids,) = stream.read(np.zeros(1, np.int64), len(stream))
    return tokenizer.decode_bytes(ids[ids != manifest.eot])
