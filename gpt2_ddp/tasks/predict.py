"""predict.py: what a classifier takes images for."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2_ddp.checkpoint.checkpoint import CONFIG, Checkpoint, find_checkpoint
from gpt2_ddp.config.jobs import ClassifierConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.tools import PredictConfig, check_writable
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import write_atomically, writing
from gpt2_ddp.tasks.checkpoints import note_best
from gpt2_ddp.tasks.images.augment import normalise
from gpt2_ddp.tasks.images.decode import decode_image
from gpt2_ddp.tasks.images.sources import image_files
from gpt2_ddp.tasks.jobs import image_model
from gpt2_ddp.tasks.trained_model import load_weights

LONGEST_NAME = 4096
"""Characters of a file's, as systems allow them."""


def predict(config: PredictConfig) -> int:
    """The command: prints a line for each image; returns the exit code.

    Raises:
        UserError: the run is no classifier of images, or an image cannot be read or is of another size.
    """
    run, *named = config.run_and_images
    device = pick_device(config.device)
    checkpoint = find_checkpoint(Path(run), "run_and_images", kind="classifier")
    settings = read_config(checkpoint.kind, checkpoint.config, checkpoint.path / CONFIG)
    assert isinstance(settings, ClassifierConfig), "a classifier's"
    if not settings.data.images:
        raise UserError("run_and_images", run, "classifies points of clusters, and no images; name another run")
    if config.output:
        check_writable(config.output)
    print(note_best(run, checkpoint), end="", file=sys.stderr)
    facts = checkpoint.state
    files = [*image_files(named, "run_and_images")]
    lines = []
    for file, probabilities in zip(
        files, _probabilities(config, checkpoint, settings, facts, files, device), strict=True
    ):
        ranked = sorted(zip(facts["classes"], probabilities, strict=True), key=lambda pair: -pair[1])
        best = ", ".join(f"{name} {share:.2%}" for name, share in ranked[: config.top])
        print(f"{truncate(file, LONGEST_NAME)}: {best}")
        lines.append({"file": str(file), "class": ranked[0][0], "probabilities": dict(ranked)})
    if config.output:
        with writing(Path(config.output)):
            write_atomically(Path(config.output), "".join(f"{json.dumps(line)}\n" for line in lines))
    return 0


@torch.no_grad()
def _probabilities(
    config: PredictConfig,
    checkpoint: Checkpoint,
    settings: ClassifierConfig,
    facts: Mapping[str, Any],
    files: list[Path],
    device: torch.device,
) -> Iterator[list[float]]:
    """Of each file's classes, by their numbers."""
    model = image_model(settings, facts)
    load_weights(checkpoint, model)
    model.to(device).eval()
    for start in range(0, len(files), config.batch_size):
        found = [_image(file, settings, facts) for file in files[start : start + config.batch_size]]
        images = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).to(device)
        yield from model(normalise(images)).float().softmax(1).tolist()


def _image(file: Path, settings: ClassifierConfig, facts: Mapping[str, Any]) -> np.ndarray:
    """uint8 [H, W, 3] as the run took its images."""
    found = decode_image(file, str(file), settings.data.image_size, field="run_and_images")
    _, H, W = facts["image_shape"]
    if found.shape != (H, W, 3):
        hint = (
            f"is {found.shape[1]} x {found.shape[0]} pixels; the run was trained on {W} x {H}, without data.image_size"
        )
        raise UserError("run_and_images", file, f"{hint} to scale others to: scale it")
    return found
