"""evaluate.py on small jobs: predictions equal a plain
loop's; and which script takes a classifier's run."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cifar import png, write_images
from close import assert_close
from commands import expect_error, expect_field
from golden_runs import GOLDEN
from PIL import Image
from ranks import in_turn, run_ranks
from runs import job_config, train, weights

from gpt2_ddp.config.tools import EvaluateConfig, GenerateConfig
from gpt2_ddp.errors import truncate
from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint
from gpt2_ddp.tasks.jobs import LeNet, make_job
from gpt2_ddp.tasks.trained_model import generate_text

NAMES = ["cat", "dog", "owl"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`scaled/run`, of images scaled to 20 x 20; `kept/run`, of 16 x 16; of points `clusters/run`,
    `line/run`."""
    folder = tmp_path_factory.mktemp("predict")
    write_images(folder / "images/train", {"cat": 4, "dog": 3, "owl": 3}, 1)
    write_images(folder / "images/test", {"cat": 3, "owl": 2}, 2)
    own = {
        "data.name": "images",
        "data.path": str(folder / "images"),
        "train.epochs": 1,
        "train.global_batch_size": 4,
    }
    kinds = (
        ("scaled", "lenet", own | {"data.image_size": 20}),
        ("kept", "lenet", own),
        ("clusters", "mlp", {"train.epochs": 1, "train.mixed_precision": "no"}),
        ("line", "regression", {"train.epochs": 1}),
    )
    run_ranks(
        in_turn, 1, *((train, job_config(kind, folder / name, of)) for name, kind, of in kinds)
    )
    return folder


def evaluate(run, *images, **fields):
    fields |= {"images": [*map(str, images)], "device": "cpu", "mixed_precision": "no"}
    assert evaluate_checkpoint(EvaluateConfig(checkpoint=str(run), **fields)) == 0


def predictions_in(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_every_image_as_by_a_plain_loop(runs, tmp_path, capsys):
    """A grey photograph of another size, with a name of
    two lines, and a folder; the last batch is short."""
    photo = tmp_path / "a\nphoto.bmp"
    Image.linear_gradient("L").resize((40, 20)).save(photo)
    images = runs / "images/test"
    evaluate(runs / "scaled/run", photo, images, output=str(tmp_path), batch_size=4)
    lines = predictions_in(tmp_path)
    files = [photo, *sorted(images.rglob("*.png"), key=str)]
    model = LeNet(3, (20, 20))
    model.load_state_dict(weights(runs / "scaled/run"))
    _, *shown = capsys.readouterr().out.splitlines()
    for file, line, printed in zip(files, lines, shown, strict=True):
        assert "target" not in line, "it is not known"
        assert line["file"] == str(file)
        image = Image.open(file).convert("RGB")
        square = image.crop((10, 0, 30, 20)) if file == photo else image.resize((20, 20))
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)[None].float()
        right = model(pixels / 127.5 - 1).softmax(1)[0].tolist()
        assert_close(line["probability"], max(right), 1e-5, 1)
        likeliest = NAMES[int(np.argmax(right))]
        assert line["class"] == likeliest
        assert printed.startswith(f"{truncate(file, 4096)}: {likeliest} ")


@pytest.mark.parametrize(
    ("run", "image"),
    [
        ("kept/run", "wide.png"),
        ("scaled/run", "no.png"),
        ("scaled/run", "photos"),
        ("clusters/run", "wide.png"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(runs, tmp_path, run, image):
    (tmp_path / "wide.png").write_bytes(png(np.zeros((16, 30, 3), np.uint8)))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/1.heic").touch()
    expect_field("images", image, evaluate, runs / run, tmp_path / image)


def test_a_run_writes_the_predictions_of_its_test_samples(runs, tmp_path):
    """Images have file, target and the probability of the likeliest class; points have numbers."""
    run = runs / "kept/run"
    evaluate(run)
    evaluate(run, runs / "images/test", output=str(tmp_path / "images"))
    (folder,) = (run / "evaluations").glob("step-*")
    for line, other in zip(
        predictions_in(folder), predictions_in(tmp_path / "images"), strict=True
    ):
        assert (line["file"], line["target"]) == (other["file"], Path(other["file"]).parent.name)
        assert_close(line["probability"], other["probability"], 1e-5, 1)
    evaluate(runs / "clusters/run", output=str(tmp_path / "points"))
    points = predictions_in(tmp_path / "points")
    assert [line["target"] for line in points[:3]] == ["0", "1", "0"]
    assert all(line["class"] in ("0", "1") and line["probability"] >= 0.5 for line in points)
    evaluate(runs / "line/run")
    (folder,) = (runs / "line/run/evaluations").glob("step-*")
    line = weights(runs / "line/run")
    test = make_job(job_config("regression", tmp_path), Accelerator(cpu=True)).test
    found = (line["linear.weight"][0] * test.inputs + line["linear.bias"]).tolist()
    wanted = [[n, y, found[n]] for n, y in enumerate(test.targets.tolist())]
    names = ("sample", "target", "prediction")
    assert_close([[line[name] for name in names] for line in predictions_in(folder)], wanted, 1e-5)


def test_flags_that_do_not_fit_are_refused(runs, tmp_path):
    run = runs / "kept/run"
    image = Path("a.png")
    (tmp_path / "file").touch()
    expect_field("images", "a.png", evaluate, run, image, data=("x",))
    expect_field("split", "train", evaluate, run, image, split="train")
    expect_field("output", "file", evaluate, run, output=str(tmp_path / "file"))


def test_other_images_are_scored_by_the_classes_of_the_run(runs, tmp_path, capsys):
    for split, other in product(("train", "test"), ("owl", "yak")):
        write_images(tmp_path / other / split, {"dog": 2, other: 2}, 3)
    (tmp_path / "owl/test/notes.txt").touch()
    run = runs / "scaled/run"
    evaluate(run, data=(str(tmp_path / "owl"),))
    printed = capsys.readouterr().out
    evaluate(run, tmp_path / "owl/test")
    told = capsys.readouterr()
    assert "1 file" in told.err
    right = len(re.findall(r"/(\w+)/[^/]*: \1 ", told.out))
    assert f"accuracy {right / 4:.6f} over 4 test" in printed
    expect_error("yak", evaluate, run, data=(str(tmp_path / "yak"),))


def test_test_images_that_have_changed_are_not_scored(runs):
    image = runs / "images/test/cat/0.png"
    before = image.read_bytes()
    image.write_bytes((runs / "images/test/owl/3.png").read_bytes())
    try:
        expect_field("data", "images", evaluate, runs / "scaled/run")
    finally:
        image.write_bytes(before)


def test_generate_refuses():
    expect_field(
        "checkpoint",
        "",
        generate_text,
        GenerateConfig(checkpoint=str(GOLDEN / "regression_run"), device="cpu"),
    )
