"""The small jobs: each one's data, model and losses."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.tasks.images.augment import crop_and_flip, normalise
from gpt2_ddp.tasks.samples import Samples
from gpt2_ddp.tasks.small_models import MLP, LeNet, Line, ResNet18, TransformerLM
from gpt2_ddp.tasks.supervised import Job, Supervised
from gpt2_ddp.training.loop import Result, train


def run_job(config: JobConfig) -> Result:
    """Trains the job that `config` describes, in this process or, under a launcher, as one of its ranks.

    Raises:
        UserError: for whatever the user has to mend.
    """
    return train(config, partial(Supervised, make_job))


def make_job(config: JobConfig, accelerator: Accelerator, facts: Mapping[str, Any] | None = None) -> Job:
    """The job of a configuration: data equal on every rank, and a freshly initialised model.

    Args:
        facts: what a checkpoint that the job is for keeps of its data; None: the data say it.
    """
    if isinstance(config, RegressionConfig):
        return regression_job(config)
    if isinstance(config, TransformerConfig):
        return transformer_job(config)
    assert isinstance(config, ClassifierConfig), "every job has a class of its own"
    return image_job(config, accelerator, facts) if config.data.images else cluster_job(config)


def regression_job(config: RegressionConfig) -> Job:
    """Points on y = weight * x + bias, x and the noise normal; squared error."""
    data = config.data
    generator = torch.Generator().manual_seed(config.seed)

    def points(n: int) -> Samples:
        x, noise = torch.randn(2, n, generator=generator)
        return Samples(x, data.weight * x + data.bias + data.noise * noise)

    return Job(Line(), points(data.points), points(data.test_points), lambda y, target: (y - target) ** 2)


def cluster_job(config: ClassifierConfig) -> Job:
    """Two clusters, uniform in the cubes [-1, 0] and [0, 1] of `features` dimensions, which an MLP tells apart."""
    data = config.data
    generator = torch.Generator().manual_seed(config.seed)

    def points(n: int) -> Samples:
        labels = torch.arange(n) % 2
        return Samples(torch.rand(n, data.features, generator=generator) + (labels[:, None] - 1), labels)

    train, test = points(data.points), points(data.test_points)
    return Job(MLP(data.features, config.model.hidden, 2), train, test, _cross_entropy, _top(1))


def image_job(config: ClassifierConfig, accelerator: Accelerator, facts: Mapping[str, Any] | None = None) -> Job:
    """Images of as many classes as there are by LeNet or ResNet-18, in [-1, 1]."""
    synced = config.model.sync_batchnorm
    if synced and accelerator.device.type != "cuda":
        hint = f"needs GPUs: PyTorch has no SyncBatchNorm on {accelerator.device.type}; leave it off"
        raise UserError("model.sync_batchnorm", "true", hint)
    from gpt2_ddp.tasks.images.load import load_images  # Pillow and pyarrow: not for those that read no images

    images = load_images(accelerator, config.data, config.seed, facts)
    model = image_model(config, images.facts)

    def transform(images: Tensor, training: bool) -> Tensor:
        return normalise(crop_and_flip(images) if training and config.data.augment else images)

    ranks = _top(1, 5) if len(images.classes) > 5 else _top(1)
    least_rows = model.least_rows(*images.facts["image_shape"][1:]) if isinstance(model, ResNet18) else 1
    return Job(model, images.train, images.test, _cross_entropy, ranks, transform, images.facts, least_rows)


def image_model(config: ClassifierConfig, facts: Mapping[str, Any]) -> nn.Module:
    """The model for the classes and the size that a checkpoint keeps, freshly initialised.

    Raises:
        UserError: it takes no images as small.
    """
    classes, (_, H, W) = len(facts["classes"]), facts["image_shape"]
    if config.model.name == "lenet" and min(H, W) < LeNet.least:
        hint = (
            f"takes images of {LeNet.least} pixels each way at least, not {W} x {H}; use resnet18, or data.image_size"
        )
        raise UserError("model.name", "lenet", hint)
    model = LeNet(classes, (H, W)) if config.model.name == "lenet" else ResNet18(classes)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if config.model.sync_batchnorm else model


def transformer_job(config: TransformerConfig) -> Job:
    """Sequence i is token i, `length` times; the mean loss over the tokens to predict."""
    data = config.data
    tokens = torch.arange(data.sequences)[:, None].expand(-1, data.length)
    samples = Samples(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def losses(logits: Tensor, targets: Tensor) -> Tensor:  # [B, T, V], [B, T] -> [B]
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)

    return Job(TransformerLM(config.model, data.length), samples, samples, losses)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _top(*ks: int):
    """Scores: whether the label is among the k likeliest classes; `accuracy` for k = 1, `top5` for k = 5."""

    def scores(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        ranked = logits.topk(max(ks), dim=1).indices == labels[:, None]  # [B, max k]
        return {"accuracy" if k == 1 else f"top{k}": ranked[:, :k].any(1) for k in ks}

    return scores
