"""Which configuration a training has where none is named with `--config`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import DataConfig
from gpt2_ddp.config.yaml_file import read_yaml

BUILT_IN = "configs/gpt2_stdlib.yaml"
"""Sized for the corpus that every machine has."""
OWN_TEXT = "configs/gpt2_small_corpus.yaml"
CLUSTERS = "configs/mlp_clusters.yaml"
OWN_IMAGES = "configs/images.yaml"

Flags = Mapping[str, Any]
"""What the command line sets, by dotted names."""


def training_default(flags: Flags) -> tuple[str, str]:
    """The file that stands in for `--config` in train_gpt2.py, and a line to say so, or "".

    The toy that suits the built-in corpus suits no other, so text of one's own has a configuration of its own.
    """
    own = DataConfig().paths[0]
    given = flags.get("data.path", own)
    data = " ".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    if os.path.normpath(data) == os.path.normpath(own):
        return _standing_in(BUILT_IN, flags)
    return _standing_in(OWN_TEXT, flags, data, "README.md has one for each size of text")


def classifier_default(flags: Flags) -> tuple[str, str]:
    """As `training_default`, for train_classifier.py: what suits the clusters teaches nobody to tell images apart."""
    data = flags.get("data.path") or flags.get("data.name") or "clusters"
    if data == "clusters":
        return _standing_in(CLUSTERS, flags)
    return _standing_in(OWN_IMAGES, flags, str(data), "docs/small-jobs.md has more")


def _standing_in(file: str, flags: Flags, data: str = "", more: str = "") -> tuple[str, str]:
    """The file, or that of a run which was begun otherwise, as an older release had it; and a line, where there is
    something to say: that `data` are trained on with it, and where there are `more`."""
    wanted = read_yaml(file)
    output_dir = flags.get("output_dir", RunConfig.model_fields["output_dir"].default)
    run = Path(str(output_dir), str(flags.get("run_name", wanted["run_name"])), "config.yaml")
    begun = read_yaml(str(run)) if run.is_file() else {}
    if _begun_otherwise(begun, wanted, flags):
        return str(run), f"note: no --config, so the run goes on with its own {run}, as it began; {file} is another"
    return file, f"note: no --config, so {data} is trained on with {file}; {more}" if data else ""


def _begun_otherwise(begun: dict[str, Any], wanted: dict[str, Any], flags: Flags) -> bool:
    """Whether a run was begun with another model or optimizer than a file has, where no flag says which."""
    parts = ("model", "optim")
    if not all(isinstance(begun.get(part), dict) for part in parts):
        return False
    values = [(part, name, value) for part in parts for name, value in wanted.get(part, {}).items()]
    return any(begun[part].get(name) != value for part, name, value in values if f"{part}.{name}" not in flags)
