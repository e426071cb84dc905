"""Train a classifier: an MLP, LeNet or ResNet-18, on two clusters, CIFAR or your own images.

    python scripts/train_classifier.py                                        # the MLP, one process
    python scripts/train_classifier.py --config configs/jobs/cifar100_lenet.yaml --launch.processes 2
    python scripts/train_classifier.py --data.path FOLDER --data.image_size 64    # LeNet, images of your own
    torchrun --nproc_per_node 2 scripts/train_classifier.py --config configs/jobs/cifar100_lenet.yaml
    accelerate launch scripts/train_classifier.py --config configs/jobs/cifar100_resnet18.yaml --model.sync_batchnorm

The same command again resumes the run.
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.jobs import ClassifierConfig, classifier_default
from gpt2_ddp.distributed.environment import exit_code, is_main_process
from gpt2_ddp.distributed.spawn import run_processes


def train(config: ClassifierConfig) -> str:
    from gpt2_ddp.tasks.jobs import run_job

    result = run_job(config)
    if result.outcome == "completed" and is_main_process():
        scores = ", ".join(f"{name[4:]} {result.metrics[name]:.2%}" for name in result.metrics if name in ACCURACIES)
        print(f"{scores} of {result.metrics['val_samples']:,} test samples, {result.seconds:.1f} s")
    return result.outcome


ACCURACIES = ("val_accuracy", "val_top5")


def main(config: ClassifierConfig) -> int:
    return exit_code(run_processes(train, config.launch.processes, config))


if __name__ == "__main__":
    run_command(ClassifierConfig, main, default=classifier_default)
