"""A trained GPT and its tokenizer, from a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from gpt2_ddp.checkpoint.checkpoint import MODEL, Checkpoint, find_checkpoint, fit_weights
from gpt2_ddp.config.base import complete
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT, without_init


def find_gpt(path: Path, field: str, weights: bool = True) -> Checkpoint:
    """Checkpoint of a GPT at `path` (`find_checkpoint`).

    Raises:
        UserError: no intact checkpoint, or one of another kind of training; names `field`.
    """
    return find_checkpoint(path, field, weights, kind="gpt2")


def load_model(checkpoint: Checkpoint) -> tuple[GPT, Tokenizer]:
    """The model (fp32, on the CPU, in evaluation mode) and the tokenizer of a GPT's checkpoint.

    Raises:
        UserError: the tokenizer cannot be loaded, or the weights do not fit the configuration.
    """
    settings, _ = complete(TrainingConfig, checkpoint.config)
    name = checkpoint.state["tokenizer"]
    file = checkpoint.path / name
    tokenizer = load_tokenizer(str(file) if file.is_file() else name)
    with without_init():
        model = GPT(ModelConfig(**settings["model"]), checkpoint.state["vocab_size"], tokenizer.eot)
    load_weights(checkpoint, model)
    return model.eval(), tokenizer


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copies a checkpoint's weights into the plain module.

    Raises:
        UserError: names or shapes differ, or the checkpoint was removed since it was verified.
    """
    with still_there(checkpoint):
        weights = load_file(checkpoint.path / MODEL)
    fit_weights(weights, model, checkpoint.path)


@contextmanager
def still_there(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises: UserError if a file of a verified checkpoint was removed since."""
    try:
        yield
    except FileNotFoundError as error:
        hint = "is gone; a run that goes on removes old checkpoints: give the same command again"
        raise UserError("checkpoint", checkpoint.path, hint) from error
