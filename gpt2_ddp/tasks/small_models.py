"""The models of the small jobs: MLP, LeNet, ResNet-18 for small images, and a transformer of torch.nn's own layers.

Shapes: B samples, T tokens, C = n_embd, V = vocabulary, K classes.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_ddp.config.jobs import TransformerModelConfig


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
    """LeNet-5 (LeCun et al., 1998) for colour images, with ReLU and max-pooling, as today's tutorials have it.

    Args:
        size: of the images, (H, W); at least `least` each.
    """

    least = 16

    def __init__(self, classes: int, size: tuple[int, int] = (32, 32)):
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
    """Two 3 x 3 convolutions with BatchNorm, and a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, inputs, S, S] -> [B, outputs, S / stride, S / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2016) with the stem for small images, one 3 x 3 convolution without pooling; 11.2M."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        blocks = []
        for stage, (inputs, outputs) in enumerate(pairwise(widths)):
            blocks += [ResidualBlock(inputs, outputs, 1 if stage == 0 else 2), ResidualBlock(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 3, H, W] -> logits [B, K]."""
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))  # [B, 512, H / 8, W / 8], rounded up
        return self.fc(x.mean((2, 3)))

    @staticmethod
    def least_rows(H: int, W: int) -> int:
        """Images that it can be trained on at a time: BatchNorm needs two values, and the last layers may have one."""
        return 2 if max(H, W) <= 8 else 1


class TransformerLM(nn.Module):
    """Embedding, sinusoidal positions, post-LayerNorm ReLU blocks (Vaswani et al., 2017) behind a causal mask.

    Args:
        max_length: the longest sequence it will see.
    """

    positions: Tensor
    mask: Tensor

    def __init__(self, config: TransformerModelConfig, max_length: int):
        super().__init__()
        block = config.n_embd, config.n_head, config.d_ff, config.dropout
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(*block, batch_first=True) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size)
        self.register_buffer("positions", sinusoids(max_length, config.n_embd), persistent=False)
        mask = torch.ones(max_length, max_length, dtype=torch.bool).triu(diagonal=1)  # True: must not be seen
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [B, T] -> logits [B, T, V]; those at t depend on tokens 0, ..., t alone."""
        T = tokens.size(1)
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions[:T]  # [B, T, C]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, src_mask=self.mask[:T, :T])
        return self.head(x)


def sinusoids(length: int, width: int) -> Tensor:
    """Position encodings fp32 [length, width], sines in even columns and cosines in odd ones (Vaswani et al., 3.5)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    table = torch.empty(length, width)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * frequency), torch.cos(position * frequency)
    return table
