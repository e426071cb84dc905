"""Training and validation data of a GPT: the shard folders of `data.path`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate import Accelerator

from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import MANIFEST, Manifest, read_manifest
from gpt2_ddp.data.order import Order
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from gpt2_ddp.distributed.process import run_script
from gpt2_ddp.errors import UserError

if TYPE_CHECKING:
    from gpt2_ddp.data.mixture import Identity, MixedOrder, MixedWindows


class Corpus(NamedTuple):
    """The opened shard folders, in the order of `data.path`.

    Args:
        manifests: one per folder.
        tokenizer: the same for all folders.
        source: windows of the training splits.
        order: training order of these windows.
        validation: loss weight and validation split, by the name of the folder.
        mixture: manifests and phases of several folders; None for one folder.
    """

    manifests: list[Manifest]
    tokenizer: Tokenizer
    source: "Windows | MixedWindows"
    order: "Order | MixedOrder"
    validation: dict[str, tuple[float, TokenStream]]
    mixture: "Identity | None"


def missing_data(config: TrainingConfig) -> str | None:
    """Recipe of `data.prepare` if shards are missing, else None. Raises: UserError."""
    missing = [path for path in config.data.paths if not os.path.exists(os.path.join(path, MANIFEST))]
    if not config.data.prepare or not missing:
        return None
    output = str(read_yaml(config.data.prepare, "data.prepare").get("output"))
    for folder in missing:
        if os.path.realpath(output) != os.path.realpath(folder):  # a mistyped path must not start a preparation
            hint = f"has no {MANIFEST}, and data.prepare ({config.data.prepare}) writes to {output}"
            raise UserError("data.path", folder, f"{hint}; prepare it first")
    return config.data.prepare


def prepare_missing_data(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Runs `prepare_data.py` for missing shards, in one process per node. Raises: UserError."""
    if (recipe := missing_data(config)) and accelerator.is_local_main_process:
        run_script("prepare_data", "--config", recipe)


def open_corpus(config: TrainingConfig) -> Corpus:
    """Opens the folders by their small files; hashes only the tokenizer.

    Raises:
        UserError: a folder has no usable shards, or its tokenizer differs from the first folder's.
    """
    paths, size = config.data.paths, config.model.block_size
    if len(paths) == 1:
        manifests = [read_manifest(Path(paths[0]))]
    else:
        from gpt2_ddp.data.mixture import read_manifests

        manifests = read_manifests(paths)
    folders = [(Path(path), manifest) for path, manifest in zip(paths, manifests, strict=True)]
    for folder, manifest in folders:
        if not manifest.tokens("train"):
            raise UserError("data.path", folder, "has no training split; prepare it with prepare_data.py")
    file = folders[0][0] / manifests[0].tokenizer
    tokenizer = load_tokenizer(str(file) if os.path.exists(file) else manifests[0].tokenizer)
    if tokenizer.sha256 != manifests[0].tokenizer_sha256:
        hint = "is not the tokenizer that the shards were made with; put that one back or prepare the data again"
        raise UserError("tokenizer", file, hint)
    for folder, manifest in folders:
        check_tokenizer(tokenizer, manifest, folder)
    for prompt in config.tracking.sample_prompt:
        tokenizer.encode(prompt, "tracking.sample_prompt")  # raises where the tokenizer has no such character
    windows = [Windows(TokenStream(folder, manifest, "train"), size) for folder, manifest in folders]
    for (folder, _), source in zip(folders, windows, strict=True):
        if not len(source):
            hint = f"a window needs {size + 1} tokens, the training split has {len(source.stream)}"
            raise UserError("data.path", folder, f"{hint}; use more text or a smaller model.block_size")
    if len(windows) == 1:
        order, weights = Order(config.seed, len(windows[0])), {0: 1.0} if manifests[0].tokens("val") > 1 else {}
        source, mixture = windows[0], None
    else:
        from gpt2_ddp.data.mixture import mix

        source, order, weights, mixture = mix(config, manifests, windows)
    names = config.data.names
    validation = {names[number]: (weight, TokenStream(*folders[number], "val")) for number, weight in weights.items()}
    return Corpus(manifests, tokenizer, source, order, validation, mixture)


def check_same_data(config: TrainingConfig, corpus: Corpus, state: Mapping[str, Any]) -> None:
    """Compares the data with those of the saved run. Raises: UserError where they differ."""
    now, saved = corpus.manifests[0].hash, state.get("data_manifest")
    if corpus.mixture or state.get("mixture") or saved not in (None, now):
        from gpt2_ddp.data.mixture import Identity, check_goes_on

        check_goes_on(config, state, corpus.mixture or Identity([now], []))
