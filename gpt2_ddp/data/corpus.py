"""The corpus of a pretraining: the shard folders of `data.path`, opened, with their tokenizer."""

import os
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import AGAIN, MANIFEST, Manifest, read_manifest
from gpt2_ddp.data.mixture import MixedWindows, mix
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import Mixture


class Corpus(NamedTuple):
    """The opened shard folders, in the order of `data.path`, and their common tokenizer."""

    manifests: list[Manifest]
    tokenizer: Tokenizer
    sources: list[Windows]
    """Training split of each folder."""
    source: Windows | MixedWindows
    """All of them, as the order's items number them."""
    validation: dict[str, tuple[float, TokenStream]]
    """Weight in the loss, and validation split, by the name of the folder."""
    mixture: Mixture | None
    """Manifests and phases of several folders; None for one folder."""


def open_corpus(config: TrainingConfig, check: bool = True) -> Corpus:
    """Opens the folders by their small files; hashes only the tokenizer.

    `check`: read the headers of all shards. Raises: UserError if a folder has no usable shards, or
    another tokenizer than the first, or another's shards."""
    paths = config.data.paths
    size = config.model.block_size
    manifests = [read_manifest(Path(path)) for path in paths]
    folders = [(Path(path), manifest) for path, manifest in zip(paths, manifests, strict=True)]
    file = folders[0][0] / manifests[0].tokenizer
    tokenizer = load_tokenizer(str(file) if os.path.exists(file) else manifests[0].tokenizer)
    for folder, manifest in folders:
        if manifest.tokenizer_sha256 != tokenizer.sha256:
            cure = f"restore that file, or prepare all with --tokenizer {paths[0]}"
            raise UserError("data.path", folder, f"has another tokenizer than {file}; {cure}")
        if (manifest.vocab_size, manifest.eot) != (tokenizer.vocab_size, tokenizer.eot):
            hint = f"has another vocab_size or eot than its tokenizer; {AGAIN}"
            raise UserError("data.path", folder / MANIFEST, hint)
        if not manifest.tokens("train"):
            hint = "has no training split; prepare it with prepare_data.py"
            raise UserError("data.path", folder, hint)
    streams = [TokenStream(*folder, "train", check) for folder in folders]
    sources = [Windows(stream, size, config.shifts) for stream in streams]
    for (folder, _), source in zip(folders, sources, strict=True):
        if not len(source):
            problem = f"the training split has {len(source.stream)}"
            needed = f"{size + config.shifts} tokens"
            if config.data.shift_windows:
                needed += " with data.shift_windows"
            hint = f"a window needs {needed}, but {problem}"
            cure = "use more text or a smaller model.block_size"
            raise UserError("data.path", folder, f"{hint}; {cure}")
    if len(sources) == 1:
        weights = {0: 1.0} if manifests[0].tokens("val") > 1 else {}
        source = sources[0]
        mixture = None
    else:
        source, weights, mixture = mix(config, manifests, sources)
    names = config.data.names
    validation = {
        names[number]: (weight, TokenStream(*folders[number], "val", check))
        for number, weight in weights.items()
    }
    return Corpus(manifests, tokenizer, sources, source, validation, mixture)
