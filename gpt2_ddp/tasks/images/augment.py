"""What is done to images a batch at a time, on the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4


def normalise(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] -> fp32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def crop_and_flip(images: Tensor) -> Tensor:
    """Each image moved by up to 4 pixels each way, zeros coming in, and mirrored with probability 1/2.

    Args:
        images: uint8 [B, 3, H, W]; torch's default generator of its device decides.
    """
    B, channels, H, W = images.shape
    device = images.device
    top, left = torch.randint(2 * PADDING + 1, (2, B, 1), device=device)
    flipped = torch.rand(B, 1, device=device) < 0.5
    columns = torch.arange(W, device=device).expand(B, W)
    columns = torch.where(flipped, W - 1 - columns, columns) + left  # [B, W]
    rows = torch.arange(H, device=device) + top  # [B, H]
    padded = F.pad(images, (PADDING,) * 4)
    sample = torch.arange(B, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
