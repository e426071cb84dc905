"""Generated images, on disk in every way in which they
come: as the Hub has them, class folders, archives."""

import gzip
import io
import pickle
import struct

import numpy as np


def pictures(n, classes=100, seed=0, size=32):
    """(images uint8 [n, size, size, 3], labels int64
    [n]); a class is a pattern of its own under noise."""
    patterns = np.random.default_rng(0).integers(0, 2, (classes, 4, 4, 3)) * 128
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    coarse = patterns[labels].repeat(size // 4, axis=1).repeat(size // 4, axis=2)
    return (coarse + rng.integers(0, 128, coarse.shape)).astype(np.uint8), labels


def png(image):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def write_parquet(folder, split, images, labels, names=("img", "fine_label")):
    """`folder/<split>-00000-of-00001.parquet` with the
    columns and the metadata of uoft-cs/cifar100."""
    import datasets

    features = datasets.Features({names[0]: datasets.Image(), names[1]: datasets.Value("int64")})
    rows = {names[0]: [{"bytes": png(image), "path": None} for image in images], names[1]: labels}
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features).to_parquet(
        folder / f"{split}-00000-of-00001.parquet"
    )


def write_folders(folder, images, names):
    """`folder/<name of its class>/<number of the image>.png`."""
    for number, (image, name) in enumerate(zip(images, names, strict=True)):
        (folder / str(name)).mkdir(parents=True, exist_ok=True)
        (folder / str(name) / f"{number}.png").write_bytes(png(image))


def write_cifar(folder, n_train, n_test, classes=100):
    """Both splits as parquet files."""
    write_parquet(folder, "train", *pictures(n_train, classes, seed=1))
    write_parquet(folder, "test", *pictures(n_test, classes, seed=2))
    return folder


def write_images(folder, classes, seed, size=16):
    """Class folders with so many images of each class, no two alike."""
    names = [name for name, count in classes.items() for _ in range(count)]
    write_folders(
        folder,
        np.random.default_rng(seed).integers(0, 256, (len(names), size, size, 3), np.uint8),
        names,
    )


def write_idx(folder, split, images, labels, compressed):
    """`train-images-idx3-ubyte` and its labels, of images
    uint8 [N, H, W], as MNIST's archive has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        content = header + values.astype(np.uint8).tobytes()
        file = folder / f"{split}-{name}-ubyte{'.gz' * compressed}"
        file.write_bytes(gzip.compress(content) if compressed else content)


def write_archive(folder, kind, split, images, labels):
    """A split of cifar-10-batches-py or cifar-100-python, and the names of the classes."""
    names = [f"class {number}" for number in range(100)]
    files = [split]
    contents = {"meta": {"fine_label_names": names, "coarse_label_names": names[:20]}}
    if kind == "cifar10":
        files = ["test_batch"]
        if split == "train":
            files = [f"data_batch_{number}" for number in range(1, 6)]
        contents = {"batches.meta": {"label_names": names[:10]}}
    for name, part in zip(files, np.array_split(np.arange(len(labels)), len(files)), strict=True):
        rows = images[part].transpose(0, 3, 1, 2).reshape(len(part), -1)
        fine = labels[part]
        columns = {"fine_labels": fine.tolist(), "coarse_labels": (fine // 5).tolist()}
        columns = {"labels": fine.tolist()} if kind == "cifar10" else columns
        contents[name] = {"data": rows, **columns}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def write_sets_of_images(folder):
    for split, digits, n in (("train", "train", 41), ("val", "t10k", 13)):
        images, labels = pictures(n, 10, n, size=28)
        write_idx(folder / "digits", digits, images[..., 0], labels, compressed=True)
        write_folders(folder / "photos" / split, *pictures(n, 3, n, size=64))
        write_parquet(folder / "tables", split, images, labels, ("photo", "kind"))
