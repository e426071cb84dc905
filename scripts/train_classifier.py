"""Train a classifier: an MLP, LeNet or ResNet-18, on two clusters, CIFAR or your own images.

    python scripts/train_classifier.py  # the MLP, one process
    python scripts/train_classifier.py --config configs/jobs/cifar100_lenet.yaml \\
        --launch.processes 2
    python scripts/train_classifier.py --data.path FOLDER --data.image_size 64  # LeNet, own images
    torchrun --nproc_per_node 2 scripts/train_classifier.py \\
        --config configs/jobs/cifar100_lenet.yaml
    accelerate launch scripts/train_classifier.py \\
        --config configs/jobs/cifar100_resnet18.yaml --model.sync_batchnorm

The same command again resumes the run.
"""

from gpt2_ddp.config.jobs import ClassifierConfig, classifier_default
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(ClassifierConfig, "gpt2_ddp.tasks.command:start_job", default=classifier_default)
