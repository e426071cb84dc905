"""Images of any kind and from anywhere: each in its split, of its class, read the same way whatever holds them."""

import ctypes
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cifar
import numpy as np
import pytest
import torch
from cifar import pictures, png, write_archive, write_cifar, write_idx, write_images, write_parquet
from commands import expect_field, expect_mistake
from PIL import Image
from ranks import run_ranks
from runs import job_config, run_small_job, same, weights

from gpt2_ddp.config.jobs import ClassifierConfig, ClassifierDataConfig
from gpt2_ddp.tasks.images import StoredImages, read_images, unlabelled

WORDS = ("train", "test", "val", "eval", "dev", "bullet_train", "test_tube", "validation", "training")
"""Names of classes by which others guess splits."""


def read(folder: Path, name: str = "images", seed: int = 0, **fields) -> Any:
    return read_images(ClassifierDataConfig(name=name, path=str(folder), **fields), seed)


def counts(samples: StoredImages) -> list[int]:
    return torch.bincount(samples.targets, minlength=len(WORDS)).tolist()


@pytest.mark.parametrize("test", ["test", "val", "validation", "Test"])
def test_classes_that_are_called_like_splits(tmp_path, test):
    trained = {name: 3 + number for number, name in enumerate(WORDS)}
    tested = {name: 1 + number for number, name in enumerate(WORDS[:-2])}
    write_images(tmp_path / "train", trained, 1)
    write_images(tmp_path / test, tested, 2)
    found = read(tmp_path)
    assert found.facts["classes"] == sorted(WORDS)
    assert counts(found.train) == [trained[name] for name in sorted(WORDS)]
    assert counts(found.test) == [tested.get(name, 0) for name in sorted(WORDS)]


@pytest.mark.parametrize(("sizes", "fraction", "held_out"), [
    ((30, 50, 20), 0.1, [3, 5, 2]), ((7, 7, 7), 0.33, [3, 2, 2]), ((1, 1, 48), 0.1, [0, 0, 5]), ((2, 1), 0.9, [1, 1]),
])  # fmt: skip
def test_without_a_test_split_a_seeded_share_of_each_class_is_held_out(tmp_path, capsys, sizes, fraction, held_out):
    write_images(tmp_path, dict(zip(WORDS, sizes, strict=False)), 1, size=4)
    found, again, other = (read(tmp_path, seed=seed, test_fraction=fraction) for seed in (0, 0, 3))
    assert f"{sum(held_out)} of {sum(sizes)} images" in capsys.readouterr().err
    order = sorted(range(len(sizes)), key=WORDS.__getitem__)
    assert counts(found.test)[: len(sizes)] == [held_out[place] for place in order]
    assert counts(found.train)[: len(sizes)] == [sizes[place] - held_out[place] for place in order]
    assert again.test.sha256() == found.test.sha256()
    assert sum(sizes) < 50 or other.test.sha256() != found.test.sha256()


def test_other_files_are_counted(tmp_path, capsys):
    for seed, split in enumerate(("train", "test")):
        write_images(tmp_path / split, {"a": 5, "b": 5}, seed)
    (tmp_path / "train/a/1.heic").touch()
    (tmp_path / "test/b/.DS_Store").touch()
    found = read(tmp_path)
    assert (len(found.train), len(found.test)) == (10, 10)
    assert "1 files of other types" in capsys.readouterr().err


def test_parquet_files_are_read_as_they_were_written(tmp_path):
    """CIFAR-100 as the Hub has it, and CIFAR-10, whose labels have a column of another name."""
    folder = write_cifar(tmp_path / "good", 30, 11)
    splits = read(folder, "cifar100")
    for split, n, seed in (("train", 30, 1), ("test", 11, 2)):
        images, labels = pictures(n, seed=seed)
        found = getattr(splits, split)
        assert np.array_equal(found.inputs.permute(0, 2, 3, 1).numpy(), images)
        assert found.targets.tolist() == labels.tolist()
    for split in ("train", "test"):
        write_parquet(tmp_path / "ten", split, *pictures(20, 10), names=("img", "label"))
    assert read(tmp_path / "ten", "cifar10").train.targets.tolist() == [*range(10)] * 2


def test_a_command_prints_one_line(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.png").write_text("no image")
    flags = ["--data.path", str(tmp_path), "--output_dir", str(tmp_path / "runs")]
    expect_mistake(tmp_path, "train_classifier", flags, "data.path")


def test_without_network_and_data_one_line_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expect_field("data.name", "cifar100", read_images, ClassifierDataConfig(name="cifar100"))


LENET = {"model": {"name": "lenet"}}


@pytest.mark.parametrize(("values", "field", "value"), [
    ({"data": {"name": "images"}} | LENET, "data.path", "None"),
    ({"data": {"name": "me/mine", "path": "x"}} | LENET, "data.path", "x"),
    ({"data": {"name": "cifar100"}}, "model.name", "mlp"), (LENET, "model.name", "lenet"),
    ({"model": {"sync_batchnorm": True}}, "model.sync_batchnorm", "true"),
    ({"model": {"hidden": (5, 0)}}, "model.hidden", "[5, 0]"),
])  # fmt: skip
def test_models_and_data_that_do_not_fit(values, field, value):
    expect_field(field, value, ClassifierConfig.model_validate, values)


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
        assert found.facts["classes"][3] == "class_3"


def test_cifar_100_archive(tmp_path):
    pixels, labels = pictures(600, 100, 1)
    write_archive(tmp_path, "cifar100", pixels, labels)
    found = read(tmp_path, "cifar100")
    assert sorted(found.facts["classes"]) == sorted(f"f{i}" for i in range(100))
    assert [found.facts["classes"][target] for target in found.train.targets[:3]] == ["f0", "f1", "f2"]
    coarse = read(tmp_path, label_column="coarse_label")
    assert [coarse.facts["classes"][target] for target in coarse.test.targets] == [f"c{n // 5}" for n in labels[500:]]


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files(tmp_path, compressed):
    pixels, labels = pictures(40, 10, 1, size=28)
    for word, part in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        write_idx(tmp_path, word, pixels[part, :, :, 0], labels[part], compressed)
    found = read(tmp_path)
    assert found.facts["classes"] == [*map(str, range(10))]
    held(found, (pixels[..., :1].repeat(3, 3), labels))


def write_saved(folder: Path) -> None:
    """What `save_to_disk` writes. Each split numbers its classes in its own way; those of `test` are not known."""
    import datasets

    images, labels = pictures(60, 10, 1)
    splits = datasets.DatasetDict()
    for split, part, names, numbers in (
        ("train", slice(0, 50), "jihgfedcba", labels), ("validation", slice(50, 60), "abcdefghij", 9 - labels),
        ("test", slice(0, 9), "abcdefghij", labels * 0 - 1),
    ):  # fmt: skip
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
        rows = {"image": [Image.fromarray(image) for image in images[part]], "label": numbers[part]}
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    splits.save_to_disk(folder)


def test_save_to_disk(tmp_path, drawn):
    write_saved(tmp_path)
    found = read(tmp_path)
    held(found, drawn)
    assert found.facts["classes"] == list("jihgfedcba"), "in the order of their numbers"


IMAGE = png(np.zeros((4, 4, 3), np.uint8))


def write_rows(folder: Path, name: str, *columns: tuple[str, list[Any]]) -> None:
    """`folder/<name>.parquet`, of columns that may be called alike."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table([pa.array(values) for _, values in columns], names=[column for column, _ in columns])
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=7)


def test_columns_and_labels_of_any_name(tmp_path, drawn):
    pixels, labels = drawn
    write_rows(tmp_path, "train", ("photo", [png(image) for image in pixels]), ("kind", (labels * 3 + 5).tolist()))
    for columns in ({"label_column": "kind"}, {"image_column": "photo", "label_column": "no"}):
        expect_field("data.path", str(tmp_path), read, tmp_path, **columns)
    found = read(tmp_path, image_column="photo", label_column="kind")
    assert found.facts["classes"] == [str(label * 3 + 5) for label in range(10)]
    assert len(found.train) == 54


def test_parquet_files_in_folders_of_any_name(tmp_path):
    """`datasets` takes names of files for patterns."""
    folder = tmp_path / "a [1] {b,c} * test"
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
MODES |= {"LA": Image.merge("LA", [GREY_IMAGE, Image.new("L", (8, 8), 255)])}


@pytest.mark.parametrize("mode", MODES)
def test_modes_become_rgb(tmp_path, mode):
    found = read(one_image(tmp_path, MODES[mode])).train.inputs[0].permute(1, 2, 0).numpy()
    grey = np.asarray(MODES[mode], np.uint8) * 255 if mode == "1" else GREY  # which is dithered
    assert np.array_equal(found, np.broadcast_to(grey[:, :, None], (8, 8, 3)))


def test_photographs_are_turned_upright(tmp_path):
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: its top is on the right
    found = read(one_image(tmp_path, image, "png", exif=exif)).train.inputs[0]
    assert found[0, 0].tolist() == [0] * 4 + [255] * 4


class Boom:
    def __reduce__(self):
        return print, ("a pickle ran",)


def layout(*files: str) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(IMAGE)

    return build


def hub(size: int = 32, label: int = 1) -> Callable[[Path], object]:
    """Training images as the Hub has them, and others for the test."""

    def build(folder: Path) -> None:
        write_cifar(folder, 30, 11)
        write_parquet(folder, "test", pictures(11, size=size)[0], np.full(11, label))

    return build


def cells(images: list[Any], labels: list[Any], *others: tuple[str, list[Any]]) -> Callable[[Path], object]:
    """A table, and perhaps a second one of the same split."""

    def build(folder: Path) -> None:
        write_rows(folder, "train-0", ("image", images), ("label", labels))
        if others:
            write_rows(folder, "train-1", *others)

    return build


def digits(n_labels: int = 40, n: int = 40, cut: int | None = None, more: bytes = b"") -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        pixels, labels = pictures(40, 10, 1, size=28)
        write_idx(folder, "train", pixels[:n, :, :, 0], labels[:n_labels], compressed=False)
        file = folder / "train-images-idx3-ubyte"
        file.write_bytes(file.read_bytes()[:cut] + more)

    return build


def broken(build: Callable[[Path], object], file: str, content: bytes | int | None) -> Callable[[Path], object]:
    """What `build` writes, one file of it with other content, cut off, or missing."""

    def build_and_break(folder: Path) -> None:
        build(folder)
        place = folder / file
        before = place.read_bytes()
        place.unlink()
        if content is not None:
            place.write_bytes(before[:content] if isinstance(content, int) else content)

    return build_and_break


def archive(kind: str) -> Callable[[Path], object]:
    return lambda folder: write_archive(folder, kind, *pictures(60, 10, 1))


def first(image: Image.Image, suffix: str) -> Callable[[Path], object]:
    return lambda folder: one_image(folder, image, suffix)


PARQUET = "test-00000-of-00001.parquet"
EMPTY = {"bytes": None, "path": None}
PICKLES = [pickle.dumps({"data": Boom()}), b"\x80\x02garbage", pickle.dumps([1]), b"", None]
SAVED = {"train/data-00000-of-00001.arrow": 5000, "train/state.json": b"{}", "train/dataset_info.json": None}
SAVED |= {"test/dataset_info.json": b'{"features": 3}', "dataset_dict.json": b"[1]"}
LAYOUTS = [
    layout("training_set/cat/1.png", "test_set/cat/1.png"), layout("train/cat/1.png", "dog/1.png"),
    layout("train/cat/1.png", "train/2.png"), layout("cat/1.png", "2.png"), layout("1.png", "2.png"),
    layout("train/cat/2026/1.png"), layout("train/cat/1.png", "test/cat/1.png"), layout("train/cat/1.heic"),
    layout("notes.txt"), layout("bullet_train.parquet"), lambda folder: None, shutil.rmtree,
]  # fmt: skip
MISTAKES = [
    *((build, "") for build in LAYOUTS),
    (broken(hub(), PARQUET, 5000), ""),
    (broken(hub(), "train-00000-of-00001.parquet", None), ""),
    (hub(label=100), ""),
    (hub(size=28), ", split test, row 0"),
    (cells([IMAGE, None], [0, 1]), ", split train, row 1"),
    (cells([b"", IMAGE], [0, 1]), ", split train, row 0"),
    (cells([{"bytes": IMAGE, "path": None}, EMPTY], [0, 1]), ", split train, row 1"),
    (cells([3, 4], [0, 1]), ""),
    (cells([IMAGE, IMAGE], [[0], [1]]), ""),
    (cells([IMAGE, IMAGE], [0, None]), ""),
    (cells([IMAGE, IMAGE], [0, -1]), ""),
    (cells([IMAGE], [0], ("image", [IMAGE]), ("kind", [0])), ""),
    (cells([IMAGE], [0], ("image", [IMAGE]), ("label", [0]), ("label", [1])), ""),
    *(
        (broken(archive("cifar10"), "data_batch_2", content), "/data_batch_2" * (content is None))
        for content in PICKLES
    ),
    *((broken(archive("cifar100"), "test", content), "/test" * (content is None)) for content in PICKLES),
    *((broken(write_saved, file, content), "") for file, content in SAVED.items()),
    (digits(cut=-1), ""),
    (digits(more=b"0"), ""),
    (digits(n_labels=39), ""),
    (digits(0, 0), ""),
    (first(Image.fromarray(GREY.astype(np.float32)), "tif"), "/train/a/0.tif"),
    (first(Image.fromarray(GREY.astype(np.int32) * 2**16), "tif"), "/train/a/0.tif"),
    (first(Image.fromarray(GREY.astype(np.uint16) * 256), "png"), "/train/a/0.png"),
    (first(Image.fromarray(GREY[:6]), "png"), "/test/a/0.png"),
    (broken(first(GREY_IMAGE, "png"), "test/b/0.png", 60), "/test/b/0.png"),
]


@pytest.mark.parametrize(("build", "place"), MISTAKES, ids=range(len(MISTAKES)))
def test_what_cannot_be_read_is_named(tmp_path, capsys, build, place):
    build(tmp_path)
    expect_field("data.path", f"{tmp_path}{place}", read, tmp_path, "cifar100", memory_gb=0)
    assert "a pickle ran" not in capsys.readouterr().out


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


@pytest.mark.parametrize(("place", "mode", "named"), [
    ("train/a/0.png", 0, "train/a/0.png"), ("train/a", 0, "train/a"), ("train/a", 0o444, "train/a/0.png"),
    ("test", 0, "test"), (".", 0, "images"), (".", 0o444, "images/test"),
])  # fmt: skip
def test_what_may_not_be_read_is_named(tmp_path, place, mode, named):
    folder = one_image(tmp_path / "images", GREY_IMAGE)
    with denied(folder / place, mode):
        expect_field("data.path", named, read, folder)
        expect_field("images", named, unlabelled, [str(folder)], ClassifierDataConfig(), (3, 8, 8), "images")


def test_scaled_to_one_size(tmp_path):
    image = Image.new("RGB", (20, 10), "red")
    image.paste("blue", (5, 0, 15, 10))
    folder = one_image(tmp_path, image)
    found = read(folder, image_size=6)
    assert found.train.shape == (3, 6, 6)
    assert found.train.inputs[0].flatten(1).unique(dim=1).flatten().tolist() == [0, 0, 255]
    with Image.open(folder / "test/b/0.png") as other:
        assert np.array_equal(read(folder, image_size=8).test.inputs[1].permute(1, 2, 0), np.asarray(other))


@pytest.mark.parametrize("kind", ["folders", "parquet", "archive"])
def test_what_does_not_fit_is_read_alike(tmp_path, kind):
    pixels, labels = pictures(60, 10, 1)
    for split, part in (("train", slice(0, 40)), ("test", slice(40, 60))):
        write = cifar.write_class_folders if kind == "folders" else write_parquet
        write(tmp_path, split, pixels[part], labels[part])
    if kind == "archive":
        write_archive(tmp_path, "cifar10", pixels, labels)
    drawn_before = torch.get_rng_state()
    kept, stored = (read(tmp_path, memory_gb=gigabytes) for gigabytes in (4, 0))
    assert torch.equal(torch.get_rng_state(), drawn_before), "or initial weights would differ"
    again = pickle.loads(pickle.dumps(stored.train))
    for split, other in ((kept.train, again), (kept.test, stored.test)):
        assert other.inputs is None
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
    expect_field("data.path", str(tmp_path), read_images, config, 0, facts)
    assert read_images(config, 0, facts | {"classes": ["cat", "dog", "owl"]}).train.targets.unique().tolist() == [0, 2]
