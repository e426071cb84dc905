"""Generated images of CIFAR's schema, on disk as the Hub has them or as class folders."""

import io
from pathlib import Path

import numpy as np


def pictures(n: int, classes: int = 100, seed: int = 0, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, size, size, 3], labels int64 [n]); a class is a pattern of its own under noise."""
    patterns = np.random.default_rng(0).integers(0, 2, (classes, 4, 4, 3)) * 128
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    coarse = patterns[labels].repeat(size // 4, axis=1).repeat(size // 4, axis=2)
    return (coarse + rng.integers(0, 128, coarse.shape)).astype(np.uint8), labels


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def write_parquet(
    folder: Path, split: str, images: np.ndarray, labels: np.ndarray, names: tuple[str, str] = ("img", "fine_label")
) -> None:
    """`folder/<split>-00000-of-00001.parquet` with the columns and the metadata of uoft-cs/cifar100."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    features = datasets.Features({names[0]: datasets.Image(), names[1]: datasets.Value("int64")})
    stored = pa.array([{"bytes": png(image), "path": None} for image in images], features.arrow_schema.field(0).type)
    table = pa.table({names[0]: stored, names[1]: pa.array(labels, pa.int64())})
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        table.replace_schema_metadata(features.arrow_schema.metadata), folder / f"{split}-00000-of-00001.parquet"
    )


def write_class_folders(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """`folder/<split>/class_07/3.png`."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / split / f"class_{label:02d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(png(image))


def write_cifar(folder: Path, n_train: int, n_test: int, classes: int = 100) -> Path:
    """Both splits as parquet files."""
    write_parquet(folder, "train", *pictures(n_train, classes, seed=1))
    write_parquet(folder, "test", *pictures(n_test, classes, seed=2))
    return folder
