"""Images of any kind and from anywhere: each in its split, of its class, read the same way whatever holds them."""

import ctypes
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cifar
import numpy as np
import pytest
import torch
from cifar import pictures, png, write_archive, write_cifar, write_idx, write_images, write_parquet
from commands import expect_error
from PIL import Image
from ranks import run_ranks
from runs import job_config, run_small_job, same, weights

from gpt2_ddp.config.jobs import ClassifierConfig, ClassifierDataConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.tasks.images.load import StoredImages, decode_image, read_images
from gpt2_ddp.tasks.images.sources import image_files, split_files
from gpt2_ddp.tasks.supervised import Samples

WORDS = ("train", "test", "val", "eval", "dev", "bullet_train", "test_tube", "validation", "training")
"""Names of classes by which others guess splits."""


def read(folder: Path, name: str = "images", **fields) -> Any:
    return read_images(ClassifierDataConfig(name=name, path=str(folder), **fields))


def counts(samples: Samples) -> list[int]:
    return torch.bincount(samples.targets, minlength=len(WORDS)).tolist()


@pytest.mark.parametrize("test", ["test", "val", "validation", "Test"])
def test_classes_that_are_called_like_splits(tmp_path, test, capsys):
    trained = {name: 3 + number for number, name in enumerate(WORDS)}
    tested = {name: 1 + number for number, name in enumerate(WORDS[:-2])}
    write_images(tmp_path / "train", trained, 1)
    write_images(tmp_path / test, tested, 2)
    found = read(tmp_path)
    assert found.classes == sorted(WORDS)
    assert counts(found.train) == [trained[name] for name in sorted(WORDS)]
    assert counts(found.test) == [tested.get(name, 0) for name in sorted(WORDS)]
    assert capsys.readouterr().err == f"note: {tmp_path}: no test images of 2 of 9 classes: training, validation\n"


@pytest.mark.parametrize(("sizes", "fraction", "held_out"), [
    ((30, 50, 20), 0.1, [3, 5, 2]), ((7, 7, 7), 0.33, [3, 2, 2]), ((1, 1, 48), 0.1, [0, 0, 5]), ((2, 1), 0.9, [1, 1]),
])  # fmt: skip
def test_without_a_test_split_a_seeded_share_of_each_class_is_held_out(tmp_path, capsys, sizes, fraction, held_out):
    write_images(tmp_path, dict(zip(WORDS, sizes, strict=False)), 1, size=4)
    found = read(tmp_path, test_fraction=fraction)
    total = f"{sum(held_out)} of {sum(sizes)} images, drawn from each class (seed 0), are test images"
    assert f"validation: {total} (data.test_fraction)" in capsys.readouterr().err
    order = sorted(range(len(sizes)), key=WORDS.__getitem__)
    assert counts(found.test)[: len(sizes)] == [held_out[place] for place in order]
    assert counts(found.train)[: len(sizes)] == [sizes[place] - held_out[place] for place in order]
    own = ClassifierDataConfig(name="images", path=str(tmp_path), test_fraction=fraction)
    again, other = (read_images(own, seed) for seed in (0, 3))
    assert again.test.sha256() == found.test.sha256()
    assert sum(sizes) < 50 or other.test.sha256() != found.test.sha256()


@pytest.mark.parametrize(("files", "message"), [
    (["training_set/cat/1.png", "test_set/cat/1.png"],
     r"folders of folders \(test_set, training_set\), but none named"),
    (["train/cat/1.png", "dog/1.png"], r"dog/1.png: is not in a folder SPLIT/CLASS, but others are"),
    (["train/cat/1.png", "train/2.png"], r"train/2.png: is not in a folder SPLIT/CLASS"),
    (["cat/1.png", "2.png"], r"2.png: is not in a folder CLASS, but others are"),
    (["train/cat/1.png", "test/cat/1.png"], r"has 1 classes \(cat\), not at least 2"),
    (["test/cat/1.png", "cat/1.png"], r"folders of folders \(test\), but none named train"),
    (["notes.txt"], "has no images, but 1 .txt; name a folder with"),
    (["train/cat/1.heic", "train/dog/2.heic"], r"has no images, but 2 .heic; name a folder with"),
])  # fmt: skip
def test_folders_that_may_mean_two_things(tmp_path, files, message):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(png(np.zeros((8, 8, 3), np.uint8)))
    expect_error(message, read, tmp_path)


def test_a_duplicate_between_splits_is_told(tmp_path, capsys):
    write_images(tmp_path / "train", {"a": 5, "b": 5}, 1)
    write_images(tmp_path / "test", {"a": 5, "b": 5}, 2)
    Image.open(tmp_path / "train/b/3.png").save(tmp_path / "test/a/2.bmp")
    (tmp_path / "test/a/2.png").unlink()
    for memory_gb in (4, 0):
        read(tmp_path, memory_gb=memory_gb)
        (line,) = capsys.readouterr().err.splitlines()
        pair = f"{tmp_path}/test/a/2.bmp = {tmp_path}/train/b/3.png"
        assert line == f"note: 1 of 10 test images are training images, too, such as {pair}"


def test_files_of_other_suffixes_and_folders_without_images_are_told(tmp_path, capsys):
    write_images(tmp_path / "train", {"a": 2, "b": 2}, 1)
    write_images(tmp_path / "test", {"a": 2, "b": 2}, 2)
    write_images(tmp_path / "val", {"a": 2}, 3)
    names = ["train/c/1.heic", "train/c/2.HEIC", "train/c/3.heic", "train/a/1.svg", "train/b/1", "val/a/1.jxl"]
    for name in [*names, "train/a/1.txt", "test/a/Thumbs.db", "test/b/.DS_Store"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "test/empty\n").mkdir()
    read(tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"note: {tmp_path}: not used: 2 .heic, ")
    assert {*re.findall(r"1 ([^,;]+)", told[0])} == {".HEIC", ".svg", "without a suffix", ".jxl", ".txt", ".db"}
    assert told[0].endswith("; save images as .png or .jpg")
    assert told[1:] == [f"note: {tmp_path}: val not used; train and test used"]


@pytest.mark.parametrize(("names", "splits"), [
    (["train-0.parquet", "test-0.parquet", "train-1.parquet"], {"train": 2, "test": 1}),
    (["default/train/0.parquet", "default/test/0.parquet"], {"train": 1, "test": 1}),
    (["data/train.parquet", "data/validation.parquet", "data/extra.parquet"], {"train": 1, "validation": 1, "": 1}),
    (["a/0.parquet", "a/1.parquet"], {"train": 2}), (["bullet_train.parquet"], {"train": 1}),
])  # fmt: skip
def test_parquet_files_say_their_split_first(names, splits):
    found = split_files("/data", [Path("/data") / name for name in names])
    assert {split: len(files) for split, files in found.items()} == splits


def test_parquet_files_whose_names_say_something_else():
    files = [Path("/data/training.parquet"), Path("/data/testing.parquet")]
    expect_error("parquet files testing, training; rename those", split_files, "/data", files)


def test_parquet_files_are_read_as_they_were_written(tmp_path):
    """CIFAR-100 as the Hub has it, and CIFAR-10, whose labels have a column of another name."""
    folder = write_cifar(tmp_path / "good", 30, 11)
    splits = read(folder, "cifar100")
    for split, n, seed in (("train", 30, 1), ("test", 11, 2)):
        images, labels = pictures(n, seed=seed)
        found = getattr(splits, split)
        assert found.inputs.dtype == torch.uint8
        assert np.array_equal(found.inputs.permute(0, 2, 3, 1).numpy(), images)
        assert found.targets.tolist() == labels.tolist()
    for split in ("train", "test"):
        write_parquet(tmp_path / "ten", split, *pictures(20, 10), names=("img", "label"))
    assert read(tmp_path / "ten", "cifar10").train.targets.tolist() == [*range(10)] * 2


def write_others(split: str, names: tuple[str, str] = ("img", "fine_label"), **changes) -> Callable[[Path], object]:
    """Puts other images, or labels, in the place of a split's."""
    images, labels = pictures(11, seed=2)
    values = {"images": images, "labels": labels} | changes
    return lambda folder: write_parquet(folder, split, values["images"], values["labels"], names)


LABELS = pictures(11, seed=2)[1]
TRAIN, TEST = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"


@pytest.mark.parametrize(("damage", "message"), [
    (write_others("test", ("img", "coarse")), r"has no column label or .*found: img, coarse"),
    (write_others("test", labels=np.where(LABELS == 3, 100, LABELS)), "row 3: has the label 100; labels are 0, 1, 2, "),
    (write_others("test", images=pictures(11, seed=2, size=28)[0]), "split test, row 0: is 28 x 28 pixels, others"),
    (lambda folder: (folder / TRAIN).unlink(), r"has no split train \(test\)"),
    (lambda folder: os.truncate(folder / TEST, 5000), "cannot be read"),
    (lambda folder: [file.unlink() for file in folder.iterdir()], "has no images"),
    (shutil.rmtree, "no such folder"),
], ids=range(7))  # fmt: skip
def test_wrong_data_is_named(tmp_path, damage, message):
    folder = write_cifar(tmp_path / "data", 30, 11)
    damage(folder)
    expect_error(f"^data\\..*{message}", read, folder, "cifar100")


def test_without_network_and_data_one_line_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expect_error(r"download the parquet files .* --data.path", read_images, ClassifierDataConfig(name="cifar100"))


LENET = {"model": {"name": "lenet"}}


@pytest.mark.parametrize(("values", "field"), [
    ({"data": {"name": "images"}} | LENET, "data.path = None: should be the folder of your images"),
    ({"data": {"name": "me/mine", "path": "x"}} | LENET, "data.path = x: conflicts with data.name me/mine"),
    ({"data": {"name": "mnist"}} | LENET, "should be clusters, cifar10, cifar100, images, or a data set"),
    ({"data": {"name": "cifar100"}}, "model.name = mlp"), (LENET, "model.name = lenet"),
    ({"model": {"sync_batchnorm": True}}, "model.sync_batchnorm = true"),
    ({"model": {"hidden": (5, 0)}}, "model.hidden = [5, 0]"),
])  # fmt: skip
def test_models_and_data_that_do_not_fit(values, field):
    expect_error(re.escape(field), ClassifierConfig.model_validate, values)


@pytest.fixture(scope="module")
def drawn():
    """60 images of 10 classes, with which every format is filled."""
    return pictures(60, 10, 1)


def held(images: Any, drawn) -> None:
    pixels, labels = drawn
    assert np.array_equal(torch.cat([images.train.inputs, images.test.inputs]).permute(0, 2, 3, 1), pixels)
    assert torch.cat([images.train.targets, images.test.targets]).tolist() == labels.tolist()


def test_cifar_10_archive(tmp_path, drawn):
    write_archive(tmp_path, "cifar10", *drawn)
    for name in ("images", "cifar10"):
        found = read(tmp_path, name)
        held(found, drawn)
        assert found.classes[3] == "class_3"


def test_cifar_100_archive(tmp_path):
    pixels, labels = pictures(600, 100, 1)
    write_archive(tmp_path, "cifar100", pixels, labels)
    found = read(tmp_path, "cifar100")
    assert sorted(found.classes) == sorted(f"f{i}" for i in range(100))
    assert [found.classes[target] for target in found.train.targets[:3]] == ["f0", "f1", "f2"]
    coarse = read(tmp_path, label_column="coarse_label")
    assert [coarse.classes[target] for target in coarse.test.targets] == [f"c{label // 5}" for label in labels[500:]]


class Boom:
    def __reduce__(self):
        return print, ("a pickle ran",)


@pytest.mark.parametrize(("kind", "file"), [("cifar10", "data_batch_2"), ("cifar100", "test")])
@pytest.mark.parametrize("content", [pickle.dumps({"data": Boom()}), b"\x80\x02garbage", pickle.dumps([1]), b"", None])
def test_a_damaged_or_missing_pickle_is_named_and_runs_nothing(tmp_path, drawn, kind, file, content, capsys):
    write_archive(tmp_path, kind, *drawn)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    expect_error(rf"data.path = \S+/{file}: is not a file of CIFAR's archive \(.*\); unpack", read, tmp_path)
    assert "a pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files(tmp_path, compressed):
    pixels, labels = pictures(40, 10, 1, size=28)
    for word, part in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        write_idx(tmp_path, word, pixels[part, :, :, 0], labels[part], compressed)
    found = read(tmp_path)
    assert found.classes == [*map(str, range(10))]
    held(found, (pixels[..., :1].repeat(3, 3), labels))


def test_an_archive_without_images(tmp_path):
    write_idx(tmp_path, "train", np.empty((0, 28, 28)), np.empty(0), compressed=False)
    expect_error("split train is empty", read, tmp_path)


@pytest.mark.parametrize("how", ["short", "long", "other", "labels"])
def test_idx_files_that_are_wrong(tmp_path, how):
    pixels, labels = pictures(40, 10, 1, size=28)
    write_idx(tmp_path, "train", pixels[..., 0], labels[:39] if how == "labels" else labels, compressed=False)
    file = tmp_path / "train-images-idx3-ubyte"
    content = {"short": file.read_bytes()[:-1], "long": file.read_bytes() + b"0", "other": struct.pack(">I", 0x0D03)}
    file.write_bytes(content.get(how, file.read_bytes()))
    expect_error(r"train-images-idx3-ubyte: (cannot be read|has)", read, tmp_path)


@pytest.fixture
def saved(tmp_path, drawn):
    """What `save_to_disk` writes."""
    import datasets

    images, labels = drawn
    features = datasets.Features({"image": datasets.Image(), "kind": datasets.ClassLabel(names=list("jihgfedcba"))})
    rows = {"image": [Image.fromarray(image) for image in images], "kind": labels}
    whole = datasets.Dataset.from_dict(rows, features=features)
    splits = datasets.DatasetDict({"train": whole.select(range(50)), "validation": whole.select(range(50, 60))})
    splits.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_save_to_disk(saved, drawn):
    found = read(saved)
    held(found, drawn)
    assert found.classes == list("jihgfedcba"), "in the order of their numbers"


@pytest.mark.parametrize(("file", "content"), [
    ("train/data-00000-of-00001.arrow", 5000), ("train/state.json", b"{}"), ("train/dataset_info.json", None),
    ("train/dataset_info.json", b'{"features": 3}'), ("dataset_dict.json", b"\xff{"), ("dataset_dict.json", b"[1]"),
])  # fmt: skip
def test_what_was_saved_and_is_damaged(saved, file, content):
    place = saved / file
    before = place.read_bytes()
    place.unlink() if content is None else place.write_bytes(before[:content] if isinstance(content, int) else content)
    expect_error(r"data.path = .*saved: cannot be read \(.*\); replace damaged files", read, saved)


def test_columns_and_labels_of_any_name(tmp_path, drawn):
    import pyarrow as pa
    import pyarrow.parquet

    pixels, labels = drawn
    table = pa.table({"photo": [png(image) for image in pixels], "id": labels, "kind": labels * 3 + 5})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=7)
    expect_error(r"data.image_column = None: split train has no column img or image \(found: photo", read, tmp_path)
    found = read(tmp_path, image_column="photo", label_column="kind")
    assert found.classes == [str(label * 3 + 5) for label in range(10)]
    assert len(found.train) == 54


IMAGE = png(np.zeros((4, 4, 3), np.uint8))


def write_rows(folder: Path, name: str, *columns: tuple[str, list[Any]]) -> None:
    """`folder/<name>.parquet`, of columns that may be called alike."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table([pa.array(values) for _, values in columns], names=[column for column, _ in columns])
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet")


@pytest.mark.parametrize(("images", "labels", "message"), [
    ([IMAGE, None], [0, 1], r"row 1: cannot be read as an image \(found None\)"),
    ([{"bytes": IMAGE, "path": None}, {"bytes": None, "path": None}], [0, 1], r"row 1: .* \(found None\)"),
    (["a.png", "b.png"], [0, 1], r"row 0: cannot be read as an image \(found a.png\)"),
    ([3, 4], [0, 1], r"row 0: cannot be read as an image \(found 3\)"),
    ([b"", IMAGE], [0, 1], r"row 0: cannot be read as an image \(Pillow does not know the format\)"),
    ([IMAGE, IMAGE], [[0], [1]], r"row 0: has the label \[0\]; labels are whole numbers from 0, or text"),
    ([IMAGE, IMAGE], [0, None], r"row 1: has the label None; labels are 0"),
    ([IMAGE, IMAGE], [0.0, 1.0], r"row 0: has the label 0.0; labels are whole numbers from 0, or text"),
])  # fmt: skip
def test_cells_that_hold_something_else_are_named(tmp_path, images, labels, message):
    for split in ("train", "test"):
        write_rows(tmp_path, split, ("image", images), ("label", labels))
    expect_error(f"split train, {message}", read, tmp_path)


@pytest.mark.parametrize("second", [
    [("image", [IMAGE]), ("kind", [0])], [("photo", [IMAGE]), ("label", [0])],
    [("image", [IMAGE]), ("label", [0]), ("label", [1])],
])  # fmt: skip
def test_a_column_has_to_be_in_all_files_once(tmp_path, second):
    write_rows(tmp_path, "train-0", ("image", [IMAGE]), ("label", [0]))
    write_rows(tmp_path, "train-1", *second)
    expect_error("split train cannot be read", read, tmp_path)


def test_parquet_files_in_folders_of_any_name(tmp_path):
    """`datasets` takes names of files for patterns."""
    folder = tmp_path / "a [1] {b,c} *"
    folder.mkdir()
    write_rows(folder, "train-0", ("image", [IMAGE, IMAGE]), ("label", [0, 1]), ("only here", [0, 0]))
    write_rows(folder, "train-1", ("image", [IMAGE]), ("label", [1]))
    write_rows(folder, "test", ("image", [IMAGE]), ("label", [1]))
    found = read(folder)
    assert (found.train.targets.tolist(), found.test.targets.tolist()) == ([0, 1, 1], [1])


def one_image(folder: Path, image: Image.Image, suffix: str = "png", **options) -> Path:
    """Class folders of which the first image is this one."""
    write_images(folder / "train", {"a": 1, "b": 1}, 1, size=8)
    write_images(folder / "test", {"a": 1, "b": 1}, 2, size=8)
    (folder / "train/a/0.png").unlink()
    image.save(folder / f"train/a/0.{suffix}", **options)
    return folder


GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
GREY_IMAGE = Image.fromarray(GREY)
MODES = {"L": GREY_IMAGE, "1": GREY_IMAGE.convert("1"), "P": GREY_IMAGE.convert("RGB").quantize(256)}
MODES |= {"I;16": Image.fromarray(GREY.astype(np.uint16) * 256 + 200)}
MODES |= {"LA": Image.merge("LA", [GREY_IMAGE, Image.new("L", (8, 8), 255)])}


@pytest.mark.parametrize("mode", MODES)
def test_modes_become_rgb(tmp_path, mode):
    found = read(one_image(tmp_path, MODES[mode])).train.inputs[0].permute(1, 2, 0).numpy()
    grey = np.asarray(MODES[mode], np.uint8) * 255 if mode == "1" else GREY  # which is dithered
    assert np.array_equal(found, np.broadcast_to(grey[:, :, None], (8, 8, 3)))


def test_what_is_transparent_is_white(tmp_path):
    image = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    found = read(one_image(tmp_path, image)).train.inputs[0]
    assert found[:, 0, :2].T.tolist() == [[255, 255, 255], [10, 20, 30]]


def test_photographs_are_turned_upright(tmp_path):
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: its top is on the right
    found = read(one_image(tmp_path, image, "png", exif=exif)).train.inputs[0]
    assert found[0, 0].tolist() == [0] * 4 + [255] * 4


@pytest.mark.parametrize(("image", "suffix", "message"), [
    (Image.fromarray(GREY.astype(np.float32)), "tif", r"0.tif: has Pillow's mode F; save it as 8-bit RGB"),
    (Image.fromarray(GREY.astype(np.int32) * 2**16), "tif", r"0.tif: has Pillow's mode I; save it as 8-bit RGB"),
    (Image.fromarray(GREY[:6]), "png", r"a/0.png: is 8 x 6 pixels|b/0.png: is 8 x 8 pixels, others are 8 x 6"),
])  # fmt: skip
def test_what_cannot_be_taken_is_named(tmp_path, image, suffix, message):
    expect_error(message, read, one_image(tmp_path, image, suffix))


@pytest.mark.parametrize("memory_gb", [4, 0])
def test_a_broken_file_is_named(tmp_path, memory_gb):
    folder = one_image(tmp_path, GREY_IMAGE)
    os.truncate(folder / "test/b/0.png", 60)
    expect_error(r"test/b/0.png: cannot be read as an image", read, folder, memory_gb=memory_gb)


@contextmanager
def denied(place: Path, mode: int) -> Iterator[None]:
    """What is there has these rights, for root as well, whom all is allowed otherwise (capabilities(7))."""
    libc = ctypes.CDLL(None)
    version, granted = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(version, granted)
    fewer = (ctypes.c_uint32 * 6)(*granted)
    fewer[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of those in effect
    before = place.stat().st_mode
    place.chmod(mode)
    libc.capset(version, fewer)
    try:
        yield
    finally:
        libc.capset(version, granted)
        place.chmod(before)


@pytest.mark.parametrize(("place", "mode", "message"), [
    ("train/a/0.png", 0, r"train/a/0.png: cannot be read as an image \(Permission denied\)"),
    ("train/a", 0, r"train/a: cannot be listed; allow reading it"),
    ("train/a", 0o444, r"train/a/0.png: cannot be listed; allow reading it"),
    ("test", 0, r"test: cannot be listed"), (".", 0, r": cannot be listed"), (".", 0o444, r"test: cannot be listed"),
])  # fmt: skip
def test_what_may_not_be_read_is_named(tmp_path, place, mode, message):
    folder = one_image(tmp_path / "images", GREY_IMAGE)
    with denied(folder / place, mode):
        expect_error(f"data.path = .*{message}", read, folder)
        with pytest.raises(UserError, match=f"images = .*{message}"):
            [decode_image(file, str(file), None, field="images") for file in image_files([str(folder)], "images")]


def test_scaled_to_one_size(tmp_path):
    image = Image.new("RGB", (20, 10), "red")
    image.paste("blue", (5, 0, 15, 10))
    folder = one_image(tmp_path, image)
    found = read(folder, image_size=6)
    assert found.shape == (3, 6, 6)
    assert found.train.inputs[0].flatten(1).unique(dim=1).flatten().tolist() == [0, 0, 255]
    with Image.open(folder / "test/b/0.png") as other:
        assert np.array_equal(read(folder, image_size=8).test.inputs[1].permute(1, 2, 0), np.asarray(other))


@pytest.mark.parametrize("kind", ["folders", "parquet"])
def test_what_does_not_fit_is_read_alike(tmp_path, kind):
    drawn = pictures(50, 10, 1)
    for split, part in (("train", slice(0, 40)), ("test", slice(40, 50))):
        write = cifar.write_class_folders if kind == "folders" else write_parquet
        write(tmp_path, split, drawn[0][part], drawn[1][part])
    drawn_before = torch.get_rng_state()
    kept, stored = (read(tmp_path, memory_gb=gigabytes) for gigabytes in (4, 0))
    assert torch.equal(torch.get_rng_state(), drawn_before), "or initial weights would differ"
    assert isinstance(stored.train, StoredImages)
    assert len(pickle.dumps(stored.train)) < kept.train.inputs.numel() / 10, "it holds pixels"
    again = pickle.loads(pickle.dumps(stored.train))
    for split, other in ((kept.train, again), (kept.test, stored.test)):
        items = np.random.default_rng(0).permutation(len(split))
        for one, two in zip(split.read(items), other.read(items), strict=True):
            assert torch.equal(one, two)
    assert [stored.train.sha256(), stored.test.sha256()] == [kept.train.sha256(), kept.test.sha256()]


@pytest.mark.slow
def test_training_on_what_does_not_fit_is_the_same(tmp_path):
    write_parquet(tmp_path, "train", *pictures(50, 10, 1))
    write_parquet(tmp_path, "test", *pictures(11, 10, 2))
    own = {"data.name": "images", "data.path": str(tmp_path), "train.epochs": 2}
    stored = own | {"data.memory_gb": 0, "data.workers": 1}
    run_ranks(run_small_job, 1, job_config("lenet", tmp_path / "kept", own))
    run_ranks(run_small_job, 1, job_config("lenet", tmp_path / "changed", own | {"train.epochs": 1}))
    run_ranks(run_small_job, 1, job_config("lenet", tmp_path / "changed", stored))
    assert same(weights(tmp_path / "kept/run"), weights(tmp_path / "changed/run"))


def test_a_run_keeps_its_classes(tmp_path):
    """One that resumes on a folder with other classes."""
    write_images(tmp_path / "train", {"cat": 6, "owl": 6}, 1)
    facts = {"classes": ["cat", "dog"], "image_shape": [3, 16, 16]}
    config = ClassifierDataConfig(name="images", path=str(tmp_path))
    expect_error("has the label owl; labels are cat, dog", read_images, config, 0, facts)
    assert read_images(config, 0, facts | {"classes": ["cat", "dog", "owl"]}).train.targets.unique().tolist() == [0, 2]
