"""The small jobs as the README gives them, at their full size: what they have to reach."""

import pytest
from cifar import write_cifar
from commands import ROOT, forked
from runs import rows

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.jobs import ClassifierConfig, RegressionConfig, TransformerConfig

PRESETS = {
    "regression": RegressionConfig,
    "mlp_clusters": ClassifierConfig,
    "cifar100_lenet": ClassifierConfig,
    "cifar100_resnet18": ClassifierConfig,
    "images": ClassifierConfig,
    "transformer": TransformerConfig,
}


@pytest.mark.parametrize(("name", "command"), PRESETS.items())
def test_presets_load_and_are_taken_back(tmp_path, name, command):
    config = load(
        command, ["--data.path", "photos"] if name == "images" else [], f"configs/jobs/{name}.yaml"
    )
    assert config.run_name == name
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(command, ["--config", str(tmp_path / "config.yaml")]) == config


def run_script(name, flags):
    found = forked([str(ROOT / "scripts" / name), *flags.split(), "--train.device", "cpu"], ROOT)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_the_transformer_learns_to_repeat(tmp_path):
    run_script("train_transformer.py", f"--output_dir {tmp_path}")
    found = rows(tmp_path / "transformer")
    assert 4.4 <= found[0]["val_loss"] <= 5
    assert found[-1]["train_loss"] <= 0.1


@pytest.mark.slow
def test_lenet_learns(tmp_path):
    """100 classes: 5 times chance is 5 %. Every one of the 1,003 test images is scored."""
    data = write_cifar(tmp_path / "cifar", 2000, 1003)
    flags = (
        f"--config configs/jobs/cifar100_lenet.yaml --data.augment true --data.path {data}"
        f" --output_dir {tmp_path}"
    )
    run_script("train_classifier.py", flags + " --launch.processes 2")
    found = rows(tmp_path / "cifar100_lenet")
    assert found[-1]["val_samples"] == 1003
    assert found[-1]["val_accuracy"] > 0.05


@pytest.mark.slow
def test_the_mlp_tells_the_clusters_apart(tmp_path):
    flags = f"--output_dir {tmp_path} --data.points 1000 --data.test_points 1000"
    run_script("train_classifier.py", flags)
    assert rows(tmp_path / "mlp_clusters")[-1]["val_accuracy"] >= 0.999
