"""What a GPT is trained and validated on: the folders of shards that `data.path` names."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accelerate import Accelerator

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import MANIFEST, Manifest
from gpt2_ddp.data.mixture import read_manifests, source_weights
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from gpt2_ddp.distributed.process import run_script
from gpt2_ddp.errors import UserError

if TYPE_CHECKING:
    from gpt2_ddp.config.tools import PrepareConfig


class Corpus(NamedTuple):
    """The opened folders, in the order of `data.path`.

    Args:
        tokenizer: of all of them.
        windows: of their training splits.
        validation: of those that are validated on, by name: how much each counts, and its split.
    """

    manifests: list[Manifest]
    tokenizer: Tokenizer
    windows: list[Windows]
    validation: dict[str, tuple[float, TokenStream]]


def missing_data(config: TrainingConfig) -> "PrepareConfig | None":
    """The recipe of shards that are missing, where `data.prepare` names one. Raises: UserError."""
    missing = [path for path in config.data.paths if not os.path.exists(os.path.join(path, MANIFEST))]
    if not config.data.prepare or not missing:
        return None
    from gpt2_ddp.config.cli import load
    from gpt2_ddp.config.tools import PrepareConfig

    recipe = load(PrepareConfig, ["--config", config.data.prepare])
    for folder in missing:
        if os.path.realpath(recipe.folder) != os.path.realpath(folder):  # a mistyped path is not another corpus
            hint = f"has no {MANIFEST}, and data.prepare ({config.data.prepare}) writes to {recipe.folder}"
            raise UserError("data.path", folder, f"{hint}; prepare it first")
    return recipe


def prepare_missing_data(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Prepares missing shards by `prepare_data.py`, in one process per node. Raises: UserError."""
    if missing_data(config) and accelerator.is_local_main_process:
        run_script("prepare_data", "--config", str(config.data.prepare))


def open_corpus(config: TrainingConfig) -> Corpus:
    """Looks at the small files: nothing is hashed but the tokenizer.

    Raises:
        UserError: a folder holds no shards for such a training, or of another tokenizer than the others.
    """
    manifests = read_manifests(config.data.paths)
    both = [(Path(path), manifest) for path, manifest in zip(config.data.paths, manifests, strict=True)]
    for folder, manifest in both:
        if not manifest.tokens("train"):
            raise UserError("data.path", folder, "has no training split; prepare it with prepare_data.py")
    file = both[0][0] / manifests[0].tokenizer
    tokenizer = load_tokenizer(str(file) if os.path.exists(file) else manifests[0].tokenizer)
    if tokenizer.sha256 != manifests[0].tokenizer_sha256:
        hint = "is not the tokenizer that the shards were made with; put that one back or prepare the data again"
        raise UserError("tokenizer", file, hint)
    for folder, manifest in both:
        check_tokenizer(tokenizer, manifest, folder)
    for prompt in config.tracking.sample_prompt:
        tokenizer.encode(prompt, "tracking.sample_prompt")  # it may lack a character
    windows = [Windows(TokenStream(*one, "train"), config.model.block_size) for one in both]
    for (folder, _), source in zip(both, windows, strict=True):
        if not len(source):
            hint = f"a window needs {config.model.block_size + 1} tokens, the training split has {len(source.stream)}"
            raise UserError("data.path", folder, f"{hint}; use more text or a smaller model.block_size")
    names, weights = config.data.names, source_weights(config, manifests)
    validation = {names[number]: (weight, TokenStream(*both[number], "val")) for number, weight in weights.items()}
    return Corpus(manifests, tokenizer, windows, validation)
