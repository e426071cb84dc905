"""Images of any kind and from anywhere: each in its split,
of its class, read the same way whatever holds them."""

import pickle
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from cifar import (
    pictures,
    png,
    write_archive,
    write_cifar,
    write_folders,
    write_idx,
    write_images,
    write_parquet,
)
from commands import expect_error, expect_field
from PIL import Image

from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.tasks import images
from gpt2_ddp.tasks.images import read_images

WORDS = (
    "train",
    "test",
    "val",
    "eval",
    "dev",
    "bullet_train",
    "test_tube",
    "validation",
    "training",
)
"""Names of classes by which others guess splits."""


def read(folder, name="images", seed=0, **fields):
    return read_images(ClassifierDataConfig(name=name, path=str(folder), **fields), seed)


def counts(samples):
    return torch.bincount(samples.targets, minlength=len(WORDS)).tolist()


def write_rows(folder, name, **columns):
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=7)


def write_two_files(folder, split, images, labels):
    """Columns of any name, one of which only the first file has."""
    files = [*map(png, images)]
    numbers = labels.tolist()
    write_rows(folder, f"{split}-0", photo=files[:4], kind=numbers[:4], only_here=[0] * 4)
    write_rows(folder, f"{split}-1", photo=files[4:], kind=numbers[4:])


def of_archive(kind):
    return lambda folder, *split: write_archive(folder, kind, *split)


def of_mnist(compressed):
    def write(folder, split, images, labels):
        write_idx(folder, split.replace("test", "t10k"), images[..., 0], labels, compressed)

    return write


SOURCES = {
    "class folders": (
        lambda folder, split, *of: write_folders(folder / split.replace("test", "Val"), *of),
        {},
    ),
    "parquet, as the Hub's": (write_parquet, {"name": "cifar100"}),
    "parquet, own columns": (write_two_files, {"image_column": "photo", "label_column": "kind"}),
    "CIFAR-10": (of_archive("cifar10"), {"name": "cifar10"}),
    "CIFAR-100": (of_archive("cifar100"), {"name": "cifar100"}),
    "MNIST": (of_mnist(False), {}),
    "MNIST, gz": (of_mnist(True), {}),
}
"""How a split is written, and fields of the configuration."""


def content(samples, classes):
    images, targets = samples.read(np.random.default_rng(0).permutation(len(samples)))
    numbers = [int(re.sub("[^0-9]", "", classes[target])) for target in targets]
    return Counter(
        zip((image.numpy().tobytes() for image in images.permute(0, 2, 3, 1)), numbers, strict=True)
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_has_the_same_images(tmp_path, kind):
    """In a folder whose name `datasets` would take for a pattern."""
    (folder := tmp_path / "a [1] {b,c} * test").mkdir()
    write, fields = SOURCES[kind]
    images, labels = pictures(60, 10, 1)
    images = images[..., :1].repeat(3, axis=3) if kind.startswith("MNIST") else images
    parts = {"train": slice(0, 50), "test": slice(50, 60)}
    for split, part in parts.items():
        write(folder, split, images[part], labels[part])
    drawn_before = torch.get_rng_state()
    found = read(folder, **fields)
    assert torch.equal(torch.get_rng_state(), drawn_before), "or initial weights would differ"
    for split, part in parts.items():
        wanted = Counter(
            zip(map(np.ndarray.tobytes, images[part]), labels[part].tolist(), strict=True)
        )
        assert content(getattr(found, split), found.facts["classes"]) == wanted


def test_classes_that_are_called_like_splits_and_files_that_are_no_images(tmp_path, capsys):
    trained = {name: 3 + number for number, name in enumerate(WORDS)}
    tested = {name: 1 + number for number, name in enumerate(WORDS[:-2])}
    for seed, (split, classes) in enumerate({"train": trained, "test": tested}.items()):
        write_images(tmp_path / split, classes, seed)
        (tmp_path / split / "val/1.heic").touch()
    found = read(tmp_path)
    assert found.facts["classes"] == sorted(WORDS)
    assert counts(found.train) == [trained[name] for name in sorted(WORDS)]
    assert counts(found.test) == [tested.get(name, 0) for name in sorted(WORDS)]
    assert "2 files of other types" in capsys.readouterr().err


def test_without_a_test_split_a_seeded_share_is_held_out(tmp_path):
    write_images(tmp_path, {"a": 30, "b": 50, "c": 20}, 1, size=4)
    found, again, other = (read(tmp_path, seed=seed, test_fraction=0.2) for seed in (0, 0, 3))
    assert (len(found.train), len(found.test)) == (80, 20)
    assert len({*found.train.names, *found.test.names}) == 100
    assert again.test.sha256() == found.test.sha256() != other.test.sha256()


def test_more_images_than_memory_are_one_line(tmp_path, monkeypatch):
    write_images(tmp_path, {"a": 3, "b": 3}, 1)
    monkeypatch.setattr(images, "free_memory", lambda: 1000)
    expect_field("data.path", "5", read, tmp_path)


def test_without_network_and_data_one_line_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expect_field("data.name", "cifar100", read_images, ClassifierDataConfig(name="cifar100"))


def one_image(folder, image, **options):
    """Class folders of which the first image is this one."""
    for seed, split in enumerate(("train", "test")):
        write_images(folder / split, {"a": 1, "b": 1}, seed, size=8)
    image.save(folder / "train/a/0.png", **options)
    return folder


GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
GREY_IMAGE = Image.fromarray(GREY)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # the camera was turned: the image's top is on its right
WIDE = np.pad(GREY, ((0, 0), (5, 7)))
UPRIGHT = {
    "grey": (GREY_IMAGE, {}, GREY),
    "palette": (GREY_IMAGE.convert("RGB").quantize(256), {}, GREY),
    "transparent": (Image.merge("LA", [GREY_IMAGE, Image.new("L", (8, 8), 255)]), {}, GREY),
    "turned": (GREY_IMAGE, {"exif": TURNED}, np.rot90(GREY, -1)),
    "cropped": (Image.fromarray(WIDE), {}, WIDE[:, 6:14]),
}


@pytest.mark.parametrize("kind", UPRIGHT)
def test_images_become_rgb_upright_and_square(tmp_path, kind):
    image, options, wanted = UPRIGHT[kind]
    found = read(one_image(tmp_path, image, **options), image_size=8).train.inputs[0]
    assert np.array_equal(found, np.broadcast_to(wanted, (3, 8, 8)))


def test_images_are_scaled_to_one_size(tmp_path):
    image = Image.new("RGB", (20, 10), "red")
    image.paste("blue", (5, 0, 15, 10))
    found = read(one_image(tmp_path, image), image_size=6).train.inputs[0]
    assert found.tolist() == [[[value] * 6] * 6 for value in (0, 0, 255)], (
        "no pixel outside the square"
    )


class Boom:
    def __reduce__(self):
        return print, ("a pickle ran",)


IMAGE = png(np.zeros((4, 4, 3), np.uint8))


def layout(*files):
    def build(folder):
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(IMAGE)

    return build


def source(kind, file, content=None):
    """One of SOURCES; a file of it with other content, cut off, or missing."""

    def build(folder):
        for split, n in (("train", 30), ("test", 11)):
            SOURCES[kind][0](folder, split, *pictures(n, 10))
        before = (folder / file).read_bytes()
        (folder / file).unlink()
        if content is not None:
            (folder / file).write_bytes(before[:content] if isinstance(content, int) else content)

    return build


def parquet(**columns):
    return lambda folder: write_rows(folder, "train", **columns)


def other_test_images(size, label):
    def build(folder):
        write_cifar(folder, 30, 11)
        write_parquet(folder, "test", pictures(11, size=size)[0], np.full(11, label))

    return build


def first(values):
    return lambda folder: one_image(folder, Image.fromarray(values))


MISTAKES = [
    (layout("training_set/cat/1.png", "test_set/cat/1.png"), ""),
    (layout("train/cat/1.png", "dog/1.png"), ""),
    (layout("train/cat/1.png", "test/cat/1.png"), ""),
    (layout("bullet_train.parquet"), ""),
    (shutil.rmtree, ""),
    (other_test_images(32, 100), ""),
    (other_test_images(28, 1), ", split test, row 0"),
    (parquet(image=[None] * 4, label=[0, 1, 0, 1]), ", split train, row 0"),
    (parquet(image=[IMAGE, IMAGE], label=[0, None]), ""),
    (parquet(photo=[IMAGE, IMAGE], kind=[0, 1]), ""),
    (source("CIFAR-10", "data_batch_2"), "/data_batch_2"),
    (source("CIFAR-100", "test", pickle.dumps({"data": Boom()})), ""),
    (source("MNIST", "train-images-idx3-ubyte", -1), ""),
    (source("MNIST", "train-labels-idx1-ubyte", -1), ""),
    (first(GREY.astype(np.uint16) * 256), "/train/a/0.png"),
    (first(GREY[:6]), "/train/b/1.png"),
    (source("class folders", "Val/3/3.png", 60), "/Val/3/3.png"),
]


@pytest.mark.parametrize(("build", "place"), MISTAKES, ids=range(len(MISTAKES)))
def test_what_cannot_be_read_is_named(tmp_path, capsys, build, place):
    build(tmp_path)
    expect_field("data.path", f"{tmp_path}{place}", read, tmp_path, "cifar100")
    assert "a pickle ran" not in capsys.readouterr().out


def test_one_image_is_no_training_and_no_test_split(tmp_path):
    layout("train/cat/1.png")(tmp_path)
    expect_error(
        "data.path = .*: cannot be read .1 images are too few to draw test images from.;",
        read,
        tmp_path,
        "cifar100",
    )


def test_a_run_keeps_its_classes(tmp_path):
    """One that resumes on a folder with other classes."""
    write_images(tmp_path / "train", {"cat": 6, "owl": 6}, 1)
    config = ClassifierDataConfig(name="images", path=str(tmp_path))
    expect_field("data.path", str(tmp_path), read_images, config, 0, {"classes": ["cat", "dog"]})
    found = read_images(config, 0, {"classes": ["cat", "dog", "owl"]})
    assert found.train.targets.unique().tolist() == [0, 2]
