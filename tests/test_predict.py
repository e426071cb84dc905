"""evaluate.py on small jobs: predictions equal a plain loop's; and which script takes a classifier's run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cifar import png, write_images
from close import assert_close
from commands import expect_error, expect_field
from PIL import Image
from ranks import in_turn, run_ranks
from runs import job_config, train, weights

from gpt2_ddp.checkpoint.checkpoint import find_checkpoint
from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.errors import truncate
from gpt2_ddp.tasks.checkpoints import (
    confusion,
    evaluate_checkpoint,
    format_confusion,
    save_classes,
    worst_mistakes,
)
from gpt2_ddp.tasks.jobs import LeNet, make_job
from gpt2_ddp.tasks.supervised import Samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scaled/run`, of images scaled to 20 x 20; `kept/run`, of 16 x 16; of points `clusters/run`, `line/run`."""
    folder = tmp_path_factory.mktemp("predict")
    write_images(folder / "images/train", {"cat": 4, "dog": 3, "owl": 3}, 1)
    write_images(folder / "images/test", {"cat": 3, "owl": 2}, 2)
    own = {"data.name": "images", "data.path": str(folder / "images"), "train.epochs": 1, "train.global_batch_size": 4}
    scaled = job_config("lenet", folder / "scaled", own | {"data.image_size": 20})
    clusters = job_config("mlp", folder / "clusters", {"train.epochs": 1, "train.mixed_precision": "no"})
    line = job_config("regression", folder / "line", {"train.epochs": 1})
    configs = (scaled, job_config("lenet", folder / "kept", own), clusters, line)
    run_ranks(in_turn, 1, *((train, config) for config in configs))
    return folder


def evaluate(run: Path, *images: Path, **fields) -> None:
    fields |= {"images": [*map(str, images)], "device": "cpu", "mixed_precision": "no"}
    assert evaluate_checkpoint(EvaluateConfig(checkpoint=str(run), **fields)) == 0


def predictions_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_every_image_as_by_a_plain_loop(runs, tmp_path, capsys):
    """A grey photograph of another size, with a name of two lines, and a folder; the last batch is short."""
    photo = tmp_path / "a\nphoto.bmp"
    Image.fromarray(np.arange(40 * 20, dtype=np.uint16).reshape(20, 40).astype(np.uint8)).save(photo)
    images = runs / "images/test"
    evaluate(runs / "scaled/run", photo, images, output=str(tmp_path), batch_size=4)
    lines = predictions_in(tmp_path)
    files = [photo, *sorted(images.rglob("*.png"), key=str)]
    assert [line["file"] for line in lines] == [*map(str, files)]
    model = LeNet(3, (20, 20))
    model.load_state_dict(weights(runs / "scaled/run"))
    first, *shown = capsys.readouterr().out.splitlines()
    assert first.endswith(": 6 images")
    for file, line, printed in zip(files, lines, shown, strict=True):
        assert "target" not in line, "it is not known"
        with Image.open(file) as image:
            square = image.convert("RGB").crop((10, 0, 30, 20)) if image.width == 40 else image.resize((20, 20))
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)[None].float()
        right = model(pixels / 127.5 - 1).softmax(1)[0].tolist()
        assert_close([line["probabilities"][name] for name in ("cat", "dog", "owl")], right, 1e-5, 1)
        likeliest = max(line["probabilities"], key=line["probabilities"].get)
        assert line["class"] == likeliest
        assert printed.startswith(f"{truncate(file, 4096)}: {likeliest} {max(right):.2%}, ")


@pytest.mark.parametrize(("run", "image", "value"), [
    ("kept/run", "wide.png", "wide.png"), ("scaled/run", "no.png", "no.png"), ("scaled/run", "text.png", "text.png"),
    ("scaled/run", "empty", "empty"), ("scaled/run", "photos", "photos"), ("clusters/run", "wide.png", "wide.png"),
])  # fmt: skip
def test_what_cannot_be_predicted_is_one_line(runs, tmp_path, run, image, value):
    (tmp_path / "wide.png").write_bytes(png(np.zeros((16, 30, 3), np.uint8)))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/1.heic").touch()
    expect_field("images", value, evaluate, runs / run, tmp_path / image)
    expect_field("checkpoint", "images", evaluate, runs / "images", tmp_path / image)


def test_a_run_writes_the_predictions_of_its_test_samples(runs, tmp_path):
    """Images have file, target and the probabilities of a classification; points have numbers."""
    run = runs / "kept/run"
    evaluate(run)
    evaluate(run, runs / "images/test", output=str(tmp_path / "images"))
    (folder,) = (run / "evaluations").glob("step-*")
    lines, others = predictions_in(folder), predictions_in(tmp_path / "images")
    assert [line.pop("target") for line in lines] == [Path(line["file"]).parent.name for line in others]
    assert [line["file"] for line in lines] == [line["file"] for line in others]
    for line, other in zip(lines, others, strict=True):
        assert_close(line["probabilities"], other["probabilities"], 1e-5, 1)
    evaluate(runs / "clusters/run", output=str(tmp_path / "points"))
    points = predictions_in(tmp_path / "points")
    assert [line["target"] for line in points[:3]] == ["0", "1", "0"]
    assert all(line["probabilities"].keys() == {"0", "1"} for line in points)
    evaluate(runs / "line/run")
    (folder,) = (runs / "line/run/evaluations").glob("step-*")
    line = weights(runs / "line/run")
    job = make_job(job_config("regression", tmp_path), Accelerator(cpu=True))
    wanted = [{"sample": n, "target": y, "prediction": (line["linear.weight"] * x + line["linear.bias"]).item()}
              for n, (x, y) in enumerate(zip(job.test.inputs, job.test.targets.tolist(), strict=True))]  # fmt: skip
    assert_close(predictions_in(folder), wanted, 1e-5)


def test_flags_that_do_not_fit_are_refused(runs, tmp_path):
    hint = "are not scored, unlike data; remove one of the two"
    expect_error(f"images = a.png: {hint}", evaluate, runs / "kept/run", Path("a.png"), data=("x",))
    expect_error("split = train: is for GPT-2 runs", evaluate, runs / "kept/run", Path("a.png"), split="train")
    (tmp_path / "file").touch()
    expect_error("output = .*/file: cannot be written", evaluate, runs / "kept/run", output=str(tmp_path / "file"))


def test_what_is_taken_for_what(runs, capsys):
    run, names = runs / "scaled/run", ["cat", "dog", "owl"]
    evaluate(run, runs / "images/test")
    counts = np.zeros((3, 3), int)
    for line in capsys.readouterr().out.splitlines()[1:]:
        file, _, taken = line.partition(": ")
        counts[names.index(Path(file).parent.name), names.index(taken.split()[0])] += 1
    evaluate(run, batch_size=2)
    _, *lines = capsys.readouterr().out.splitlines()
    wrong = {name: row for name, row in zip(names, counts, strict=True) if row.sum() > row[names.index(name)]}
    assert {line.split(":")[0].strip() for line in lines} == set(wrong)
    (found,) = (run / "evaluations").glob("step-*")
    wanted = [{str(other): count for other, count in enumerate(row) if count} for row in counts.tolist()]
    assert json.loads((found / "classes.json").read_text())["confusion"] == wanted
    with Image.open(found / "wrong.png") as picture:
        seen = {color for _, color in picture.convert("RGB").getcolors(maxcolors=2**24) or ()}
    assert sum(len({*color}) > 1 for color in seen) > 1000, "letters are grey, images are not"
    evaluated = np.array([[0, 1, 2], [0, 1, 2], [1, 1, 1]])
    save_classes(found, 3, evaluated, confusion(evaluated, 3), names, Samples(torch.zeros(3), torch.zeros(3)))
    assert {file.name for file in found.iterdir()} == {"classes.json", "predictions.jsonl"}, "all are right"


def test_a_confusion_takes_no_more_than_its_images():
    found = np.stack([np.arange(5000), np.arange(5000), np.ones(5000)])
    found[1, 4500:] = found[1, 9] = 7
    counts = confusion(found, 10_000)
    assert sum(map(len, counts)) == 5000
    first, *_, last = format_confusion(counts, [f"class {number}" for number in range(10_000)])
    assert first == "  class 9: 0 of 1 right, 0.00%; mostly taken for class 7 (1)"
    assert last == "  and 491 more classes with errors"


def test_wrong_images_are_those_of_the_worst_classes(monkeypatch):
    labels = np.repeat([0, 1, 2, 3], [100, 10, 10, 10])
    taken = labels.copy()
    taken[:40], taken[100:109], taken[110:113] = 1, 0, 3
    probability = np.random.default_rng(0).random(len(labels))
    found, right = np.stack([labels, taken, probability]), np.stack([labels, labels, probability])
    chosen = worst_mistakes(found, confusion(found, 4)).tolist()
    wrong = [range(100, 109), range(40), range(110, 113)]  # of 90, 40 and 30 %
    assert chosen == [item for of in wrong for item in sorted(of, key=lambda item: -probability[item])[:6]]
    monkeypatch.setattr("gpt2_ddp.tasks.checkpoints.PICTURES", 7)
    assert worst_mistakes(found, confusion(found, 4)).tolist() == chosen[:7]
    assert not len(worst_mistakes(right, confusion(right, 4)))


def test_other_images_are_scored_by_the_classes_of_the_run(runs, tmp_path, capsys):
    for split in ("train", "test"):
        write_images(tmp_path / "some" / split, {"dog": 2, "owl": 2}, 3)
        write_images(tmp_path / "others" / split, {"dog": 2, "yak": 2}, 3)
    (tmp_path / "some/test/notes.txt").touch()
    run = runs / "scaled/run"
    evaluate(run, data=(str(tmp_path / "some"),))
    printed = capsys.readouterr().out
    evaluate(run, tmp_path / "some/test")
    told = capsys.readouterr()
    assert "1 file" in told.err
    pairs = (line.split(": ") for line in told.out.splitlines()[1:])
    right = sum(f"/{likeliest.split()[0]}/" in file for file, likeliest in pairs)
    assert f"accuracy {right / 4:.6f} over 4 test" in printed
    expect_error("yak", evaluate, run, data=(str(tmp_path / "others"),))


def test_test_images_that_have_changed_are_not_scored(runs):
    image = runs / "images/test/cat/0.png"
    before = image.read_bytes()
    image.write_bytes((runs / "images/test/owl/0.png").read_bytes())
    try:
        expect_error("images: has other test samples", evaluate, runs / "scaled/run")
    finally:
        image.write_bytes(before)


def test_scripts_that_take_a_gpt_refuse(runs):
    expect_error("is of a classifier run", find_checkpoint, runs / "scaled/run", kind="gpt2")
