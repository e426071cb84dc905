"""CIFAR from local files: parquet as the Hub has it, or class folders; and every way in which they can be wrong."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar import pictures, write_cifar, write_parquet
from commands import expect_error

from gpt2_ddp.config.jobs import ClassifierConfig, ClassifierDataConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.tasks.images.load import read_images
from gpt2_ddp.tasks.jobs import crop_and_flip, normalise, random_numbers


def read(folder, name: str = "cifar100") -> Any:
    return read_images(ClassifierDataConfig(name=name, path=str(folder)))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_cifar(tmp_path_factory.mktemp("images") / "good", 30, 11)


def test_parquet_files_are_read_as_they_were_written(good):
    splits = read(good)
    for split, n, seed in (("train", 30, 1), ("test", 11, 2)):
        images, labels = pictures(n, seed=seed)
        found = getattr(splits, split)
        assert found.inputs.dtype == torch.uint8
        assert np.array_equal(found.inputs.permute(0, 2, 3, 1).numpy(), images)
        assert found.targets.tolist() == labels.tolist()


def test_cifar10_has_its_own_column(tmp_path):
    for split, seed in (("train", 1), ("test", 2)):
        write_parquet(tmp_path, split, *pictures(20, 10, seed), names=("img", "label"))
    assert read(tmp_path, "cifar10").train.targets.tolist() == [*range(10)] * 2


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
def test_wrong_data_is_named(good, tmp_path, damage, message):
    damage(shutil.copytree(good, tmp_path / "data"))
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path / "data")
    assert str(error.value).startswith("data.")


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


def test_normalised_to_one():
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalise(images).flatten().tolist() == pytest.approx([-1, 1, -0.6], abs=1e-6)


def test_crops_and_flips_are_those_of_the_padded_image():
    image = torch.randint(1, 256, (3, 32, 32), dtype=torch.uint8)
    numbers = random_numbers(0, np.arange(400))
    assert np.array_equal(random_numbers(0, np.arange(100, 105)), numbers[100:105]), "by position"
    assert len({*numbers, *random_numbers(1, np.arange(400))}) == 800
    found = crop_and_flip(image.expand(400, 3, 32, 32), numbers)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    crops = {(t, left): padded[:, t : t + 32, left : left + 32] for t in range(9) for left in range(9)}
    allowed = {crop.numpy().tobytes(): (*place, False) for place, crop in crops.items()}
    allowed |= {crop.flip(2).numpy().tobytes(): (*place, True) for place, crop in crops.items()}
    kinds = [allowed[result.contiguous().numpy().tobytes()] for result in found]
    assert {top for top, _, _ in kinds} == {left for _, left, _ in kinds} == set(range(9))
    assert 150 < sum(flipped for _, _, flipped in kinds) < 250
