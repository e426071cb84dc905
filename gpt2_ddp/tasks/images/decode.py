"""An image as it is stored -> uint8 RGB pixels, of the size that the models take."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular

Stored = bytes | Path | np.ndarray | dict[str, Any]
"""A file's content, a file, pixels uint8 [H, W] or [H, W, 3], or a row of `datasets` with the keys bytes and path."""
CIFAR = (32, 32, 3)
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
PLAIN = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes of 8 bits that have no transparency, or say it elsewhere."""


def decode_image(
    stored: Stored, where: str, size: int | None, as_stored: bool = False, field: str = "data.path"
) -> np.ndarray:
    """uint8 [H, W, 3] of an image of any mode; the first frame where there are several.

    It is turned upright as its EXIF orientation says; what is transparent is laid on white, and of 16 bits of grey the
    upper 8 count.

    Args:
        where: the file or row, for messages.
        size: the largest centred square is scaled to so many pixels each way (bicubic); None leaves the size.
        as_stored: take 32 x 32 x 3 alone, as CIFAR has it.
        field: where the user named it, for messages.

    Raises:
        UserError: it is no image, or one of 32 bits per channel.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, of a size that is allowed yet
            image = _open(stored)
            found = np.asarray(image) if as_stored else np.asarray(_upright_rgb(image, where, size, field))
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        # by its own words, the file would be named again, or an object in memory
        told = "of no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
        strerror = getattr(error, "strerror", None)  # where the system refused
        hint = f"cannot be read ({strerror})" if strerror else f"is not an image ({told})"
        raise UserError(field, where, hint) from error
    if as_stored and (found.shape != CIFAR or found.dtype != np.uint8):
        shape = " x ".join(map(str, found.shape))
        hint = f"is an image of {shape} {found.dtype}; CIFAR's are 32 x 32 x 3 uint8: for others set data.name images"
        raise UserError("data.path", where, hint)
    return found


def _open(stored: Stored) -> Image.Image:
    if isinstance(stored, np.ndarray):
        return Image.fromarray(stored)
    if isinstance(stored, dict):
        content, path = stored.get("bytes"), stored.get("path")
        return _open(Path(path) if content is None and path else content)  # pyright: ignore[reportArgumentType]
    if not isinstance(stored, bytes | Path):  # a table's cell may hold anything
        raise TypeError(f"there is {truncate(stored, 40)} instead")
    return Image.open(io.BytesIO(stored if isinstance(stored, bytes) else regular(stored).read_bytes()))


def _upright_rgb(image: Image.Image, where: str, size: int | None, field: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "I":  # how Pillow opens some files of 16 bits, and those of 32
        values = np.asarray(image)
        if values.min() < 0 or values.max() >= 2**16:
            raise UserError(field, where, "is an image of 32 bits per pixel; save it with 8 or 16")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode not in PLAIN:
        raise UserError(field, where, f"is an image of Pillow's mode {image.mode}; save it as 8-bit RGB")
    image = image.convert("RGB")
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        # cropped first: `ImageOps.fit` would mix in what is beside the square
        image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    return image
