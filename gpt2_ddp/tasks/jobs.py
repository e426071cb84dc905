"""The small jobs: each one's data, model and losses.

Shapes: B samples, T tokens, C = n_embd, V = vocabulary, K classes; images of H x W pixels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.tasks.supervised import Job, Samples, Supervised
from gpt2_ddp.training.loop import Result, train

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")
PADDING = 4


def run_job(config: JobConfig) -> Result:
    """Trains the job of a configuration in this process, or as one of a launcher's ranks. Raises:
    UserError."""
    return train(config, partial(Supervised, make_job))


def make_job(
    config: JobConfig, accelerator: Accelerator, facts: Mapping[str, Any] | None = None
) -> Job:
    """The job of a configuration: data equal on every rank, and a freshly initialised model.
    `facts`: of the data, from the checkpoint that the job is for; None: read from the data."""
    return JOBS[config.kind](config, accelerator, facts)


def regression_job(config: RegressionConfig, *_: object) -> Job:
    """Points on y = weight * x + bias, x and the noise normal; squared error."""
    data = config.data
    generator = torch.Generator().manual_seed(config.seed)

    def points(n: int) -> Samples:
        x, noise = torch.randn(2, n, generator=generator)
        return Samples(x, data.weight * x + data.bias + data.noise * noise)

    def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2

    return Job(Line(), points(data.points), points(data.test_points), squared_errors)


def classifier_job(
    config: ClassifierConfig, accelerator: Accelerator, facts: Mapping[str, Any] | None
) -> Job:
    """Images; or two clusters, uniform in the cubes [-1, 0] and [0, 1] of `features` dimensions,
    for an MLP."""
    data = config.data
    generator = torch.Generator().manual_seed(config.seed)
    if data.images:
        return image_job(config, accelerator, facts)

    def points(n: int) -> Samples:
        labels = torch.arange(n) % 2
        inputs = torch.rand(n, data.features, generator=generator) + (labels[:, None] - 1)
        return Samples(inputs, labels)

    train = points(data.points)
    test = points(data.test_points)
    return Job(MLP(data.features, config.model.hidden, 2), train, test, CROSS_ENTROPY, _hits)


def image_job(
    config: ClassifierConfig, accelerator: Accelerator, facts: Mapping[str, Any] | None = None
) -> Job:
    """Images of any number of classes, classified by LeNet or ResNet-18; pixels in [-1, 1]."""
    device = accelerator.device.type
    if config.model.sync_batchnorm and device != "cuda":
        hint = f"needs GPUs: PyTorch has no SyncBatchNorm on {device}; remove the flag"
        raise UserError("model.sync_batchnorm", "true", hint)
    from gpt2_ddp.tasks.images import load_images  # noqa: PLC0415  Pillow and pyarrow

    images = load_images(accelerator, config.data, config.seed, facts)
    model = image_model(config, images.facts)

    def transform(images: Tensor, positions: np.ndarray | None) -> Tensor:
        if positions is not None and config.data.augment:
            images = crop_and_flip(images, random_numbers(config.seed, positions))
        return normalise(images)

    return Job(model, images.train, images.test, CROSS_ENTROPY, _hits, transform, images.facts)


def image_model(config: ClassifierConfig, facts: Mapping[str, Any]) -> nn.Module:
    """The model for the classes and the size in `facts`, freshly initialised."""
    classes = len(facts["classes"])
    if config.model.name == "lenet":
        return LeNet(classes, facts["image_shape"][1:])
    model = ResNet18(classes)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if config.model.sync_batchnorm else model


def transformer_job(config: TransformerConfig, *_: object) -> Job:
    """Sequence i is token i, `length` times; the mean loss over the tokens to predict."""
    data = config.data
    tokens = torch.arange(data.sequences)[:, None].expand(-1, data.length)
    samples = Samples(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def losses(logits: Tensor, targets: Tensor) -> Tensor:  # [B, T, V], [B, T] -> [B]
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)

    return Job(TransformerLM(config), samples, samples, losses)


JOBS: dict[str, Callable[..., Job]] = {
    "regression": regression_job,
    "classifier": classifier_job,
    "transformer": transformer_job,
}
"""The function that makes each kind of job, called as `make_job` is."""


def _hits(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Whether the label is the likeliest class and, of more than five, one of the five likeliest:
    bool [B] each."""
    scores = {"accuracy": logits.argmax(1) == labels}
    if logits.size(1) > 5:
        scores["top5"] = (logits.topk(5, dim=1).indices == labels[:, None]).any(1)
    return scores


def normalise(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] -> fp32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def random_numbers(seed: int, positions: np.ndarray) -> np.ndarray:
    """A random number int64 [B] >= 0 of each position: the same on any number of processes."""
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    mixed = (positions.astype(np.uint64) + key) * 0x9E3779B97F4A7C15  # then splitmix64's finaliser
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) >> 1).astype(np.int64)


def crop_and_flip(images: Tensor, numbers: np.ndarray) -> Tensor:
    """Each image uint8 [B, 3, H, W] moved by up to 4 pixels each way, zeros coming in, and mirrored
    with probability 1/2, by its random number int64 [B]."""
    *_, H, W = images.shape
    device = images.device
    places = 2 * PADDING + 1
    number = torch.from_numpy(numbers).to(device, non_blocking=True)[:, None]  # [B, 1]
    top = number % places
    left = number // places % places
    flipped = number // places**2 % 2
    columns = torch.arange(W, device=device)
    columns = torch.where(flipped > 0, columns.flip(0), columns) + left  # [B, W]
    rows = torch.arange(H, device=device) + top  # [B, H]
    padded = F.pad(images, (PADDING,) * 4)
    return padded.take_along_dim(rows[:, None, :, None], 2).take_along_dim(
        columns[:, None, None, :], 3
    )


class Line(nn.Module):
    """y = weight * x + bias."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: fp32 [B] -> [B]."""
        return self.linear(x[:, None])[:, 0]


class MLP(nn.Sequential):
    """Linear layers with ReLUs between: [B, inputs] -> logits [B, K]."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int):
        layers: list[nn.Module] = []
        for width, following in pairwise([inputs, *hidden, classes]):
            layers += [nn.Linear(width, following), nn.ReLU()]
        super().__init__(*layers[:-1])


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al., 1998) for colour images, with ReLU and max-pooling, as today's
    tutorials have it. `size`: of the images, (H, W); at least 16 each."""

    def __init__(self, classes: int, size: Sequence[int] = (32, 32)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        rows, columns = (((length - 4) // 2 - 4) // 2 for length in size)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 3, H, W] -> logits [B, K]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)  # [B, 6, 14, 14] of 32 x 32
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # [B, 16, 5, 5]
        x = F.relu(self.fc1(x.flatten(1)))  # [B, 120]
        return self.fc3(F.relu(self.fc2(x)))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, and a shortcut (He et al., 2016). Twice the channels
    halve the size."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, inputs, H, W] -> [B, outputs, H / stride, W / stride], rounded up."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2016) with the stem for small images, one 3 x 3 convolution without
    pooling; 11.2M parameters. `width`: channels of its first block."""

    def __init__(self, classes: int, width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks = []
        for inputs, outputs in pairwise(width * times for times in (1, 1, 2, 4, 8)):
            blocks += [ResidualBlock(inputs, outputs), ResidualBlock(outputs, outputs)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 3, H, W] -> logits [B, K]."""
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))  # [B, 8 * width, H / 8, W / 8], rounded up
        return self.fc(x.mean((2, 3)))


class TransformerLM(nn.Module):
    """Embedding, sinusoidal positions, post-LayerNorm ReLU blocks (Vaswani et al., 2017) behind a
    causal mask."""

    positions: Tensor
    mask: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        model = config.model
        length = config.data.length  # of the longest sequence
        block = model.n_embd, model.n_head, model.d_ff, model.dropout
        self.embedding = nn.Embedding(model.vocab_size, model.n_embd)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*block, batch_first=True) for _ in range(model.n_layer)
        )
        self.head = nn.Linear(model.n_embd, model.vocab_size)
        self.register_buffer("positions", sinusoids(length, model.n_embd), persistent=False)
        mask = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)  # True: masked
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [B, T] -> logits [B, T, V]; those at t depend on tokens 0, ..., t alone."""
        T = tokens.size(1)
        # [B, T, C]
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions[:T]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, src_mask=self.mask[:T, :T])
        return self.head(x)


def sinusoids(length: int, width: int) -> Tensor:
    """Position encodings fp32 [length, width], sines in even columns and cosines in odd ones
    (Vaswani et al., 3.5)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = position * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)
