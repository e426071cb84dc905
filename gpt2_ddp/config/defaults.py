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


def training_default(flags: Mapping[str, Any]) -> tuple[str, str]:
    """The file that stands in for `--config` in train_gpt2.py, and a line to say so.

    The toy that suits the built-in corpus suits no other, so text of one's own has a configuration of its own. But a
    run that was begun with another one, as an older release had it, goes on with that.

    Args:
        flags: what the command line sets, by dotted names.

    Returns:
        the file, and the line; that is empty where there is nothing to say.
    """
    own = DataConfig().paths[0]
    given = flags.get("data.path", own)
    data = " ".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    file = BUILT_IN if os.path.normpath(data) == os.path.normpath(own) else OWN_TEXT
    wanted = read_yaml(file)
    output_dir = flags.get("output_dir", RunConfig.model_fields["output_dir"].default)
    run = Path(str(output_dir), str(flags.get("run_name", wanted["run_name"])), "config.yaml")
    begun = read_yaml(str(run)) if run.is_file() else {}
    if _begun_otherwise(begun, wanted, flags):
        return str(run), f"note: no --config, so the run goes on with its own {run}, as it began; {file} is another"
    if file == BUILT_IN:
        return BUILT_IN, ""
    table = "README.md has one for each size of text"
    return OWN_TEXT, f"note: no --config, so {data} is trained on with {OWN_TEXT}; {table}"


def _begun_otherwise(begun: dict[str, Any], wanted: dict[str, Any], flags: Mapping[str, Any]) -> bool:
    """Whether a run was begun with another model or optimizer than a file has, where no flag says which."""
    parts = ("model", "optim")
    if not all(isinstance(begun.get(part), dict) for part in parts):
        return False
    values = [(part, name, value) for part in parts for name, value in wanted[part].items()]
    return any(begun[part].get(name) != value for part, name, value in values if f"{part}.{name}" not in flags)
