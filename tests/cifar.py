"""Generated images, on disk in every way in which they come: as the Hub has them, class folders, archives."""

import gzip
import io
import pickle
import struct
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


def write_images(folder: Path, classes: dict[str, int], seed: int, size: int = 16) -> None:
    """`folder/<class>/<number>.png`, so many of each class, no two alike."""
    rng = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.png").write_bytes(png(rng.integers(0, 256, (size, size, 3), np.uint8)))


def write_idx(folder: Path, split: str, images: np.ndarray, labels: np.ndarray, compressed: bool) -> None:
    """`train-images-idx3-ubyte` and its labels, of images uint8 [N, H, W], as MNIST's archive has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", labels)):
        content = (
            struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()
        )
        (folder / f"{name}{'.gz' * compressed}").write_bytes(gzip.compress(content) if compressed else content)


def write_archive(folder: Path, kind: str, images: np.ndarray, labels: np.ndarray) -> None:
    """cifar-10-batches-py or cifar-100-python, whose first five sixths are for training."""
    folder.mkdir(parents=True, exist_ok=True)
    n = len(labels) // 6
    parts = [slice(number * n, (number + 1) * n) for number in range(6)]
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)

    def dump(name: str, content: dict) -> None:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))

    if kind == "cifar10":
        for number, part in enumerate(parts, 1):
            name = f"data_batch_{number}" if number < 6 else "test_batch"
            dump(name, {"data": rows[part], "labels": labels[part].tolist()})
        dump("batches.meta", {"label_names": [f"class_{number}" for number in range(10)]})
    else:
        for name, part in (("train", slice(0, 5 * n)), ("test", parts[5])):
            coarse = (labels[part] // 5).tolist()
            content = {"data": rows[part], "fine_labels": labels[part].tolist(), "coarse_labels": coarse}
            dump(name, content)
        names = {"fine_label_names": [f"f{i}" for i in range(100)], "coarse_label_names": [f"c{i}" for i in range(20)]}
        dump("meta", names)


def write_sets_of_images(folder: Path) -> None:
    pixels, labels = pictures(83, 10, 1, size=28)
    write_idx(folder / "digits", "train", pixels[:60, :, :, 0], labels[:60], compressed=True)
    write_idx(folder / "digits", "t10k", pixels[60:, :, :, 0], labels[60:], compressed=True)
    for split, n in (("train", 41), ("val", 13)):
        write_class_folders(folder / "photos", split, *pictures(n, 3, n, size=64))
        write_parquet(folder / "tables", split, *pictures(n, 7, n, size=24), names=("photo", "kind"))
