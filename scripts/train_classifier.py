"""Train a classifier: an MLP, LeNet or ResNet-18, on two clusters, CIFAR or your own images.

    python scripts/train_classifier.py                                        # the MLP, one process
    python scripts/train_classifier.py --config configs/jobs/cifar100_lenet.yaml --launch.processes 2
    python scripts/train_classifier.py --data.path FOLDER --data.image_size 64    # LeNet, images of your own
    torchrun --nproc_per_node 2 scripts/train_classifier.py --config configs/jobs/cifar100_lenet.yaml
    accelerate launch scripts/train_classifier.py --config configs/jobs/cifar100_resnet18.yaml --model.sync_batchnorm

The same command again resumes the run.
"""

from functools import partial
from typing import Any

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.jobs import ClassifierConfig, classifier_default
from gpt2_ddp.tasks.command import start_job


def summary(result: Any) -> str:
    metrics = result.metrics
    scores = [f"{name[4:]} {metrics[name]:.2%}" for name in metrics if name in ("val_accuracy", "val_top5")]
    return f"{', '.join(scores)} of {metrics['val_samples']:,} test samples"


if __name__ == "__main__":
    run_command(ClassifierConfig, partial(start_job, summary=summary), default=classifier_default)
