"""Gets shards that are not on this machine yet: prepares them by the recipe of `data.prepare`, or
copies them from a URL."""

import os
from pathlib import Path

from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.training import OWN_TEXT, ModelConfig, TrainingConfig, preset_for
from gpt2_ddp.data.manifest import missing_folders, read_manifest, text_bytes
from gpt2_ddp.distributed.process import run_module
from gpt2_ddp.errors import print_line


def get_data(config: TrainingConfig) -> None:
    """Copies the shards of URLs, and prepares missing ones. Raises: UserError."""
    for url, folder in config.data.urls.items():
        run_module(
            "gpt2_ddp.remote.transfer", "--action=data", f"--url={url}", f"--folder={folder}"
        )
    recipe = missing_data(config)
    if recipe:
        run_module("gpt2_ddp", "prepare_data", "--config", recipe)
        print_size_note(config)


def print_size_note(config: TrainingConfig) -> None:
    """Prints a note if the model is the one for small texts, and the text suits a larger preset.
    Raises: UserError."""
    if config.model != ModelConfig.model_validate(read_yaml(OWN_TEXT)["model"]):
        return
    size = sum(text_bytes(read_manifest(Path(folder))) for folder in config.data.paths)
    preset = preset_for(size)
    if preset:
        print_line(
            "note: this model is for up to 20 MB of text, and there are "
            f"{size / 1e6:,.0f} MB; on a GPU, --config {preset} learns more"
        )


def missing_data(config: TrainingConfig) -> str | None:
    """Recipe of `data.prepare` if shards are missing, else None. Raises: UserError for a folder
    without a manifest that the recipe does not write."""
    missing = [path for path in missing_folders(config) if path not in config.data.urls.values()]
    recipe = config.data.prepare
    output = ""
    if recipe and missing:
        output = str(read_yaml(recipe, "data.prepare").get("output"))
    for folder in missing:
        # a mistyped path must not start a preparation
        if os.path.realpath(output) != os.path.realpath(folder):
            read_manifest(Path(folder))
    return recipe if missing else None
