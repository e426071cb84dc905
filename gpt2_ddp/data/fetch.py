"""Gets shards that are not on this machine yet: prepares them by the recipe of `data.prepare`, or
copies them from a URL."""

import os
from pathlib import Path

from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import missing_folders, read_manifest
from gpt2_ddp.distributed.process import run_module


def get_data(config: TrainingConfig) -> None:
    """Copies the shards of URLs, and prepares missing ones. Raises: UserError."""
    for url, folder in config.data.urls.items():
        _copy(url, folder)
    recipe = missing_data(config)
    if recipe:
        run_module("gpt2_ddp", "prepare_data", "--config", recipe)


def copy_missing(config: TrainingConfig) -> None:
    """Copies the shards of URLs that have no copy on this machine yet. Raises: UserError."""
    missing = {*missing_folders(config)}
    for url, folder in config.data.urls.items():
        if folder in missing:
            _copy(url, folder)


def _copy(url: str, folder: str) -> None:
    """Copies the shards of a URL, in a process of its own. Raises: UserError."""
    run_module("gpt2_ddp.remote.transfer", "--action=data", f"--url={url}", f"--folder={folder}")


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
