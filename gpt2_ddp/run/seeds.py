"""Random numbers that are a pure function of seed, step and rank, so that no generator has to be restored."""

import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch for what one step draws: dropout, augmentation."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93 % 2**64
    value = (mixed ^ (mixed >> 32)) % 2**63
    torch.default_generator.manual_seed(value)
    # not torch.manual_seed: where CUDA is not in use it queues a call with a stack trace for it, every time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(value)
