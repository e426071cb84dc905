"""Commands that read runs: they take URLs of runs, too, and read copies on this machine."""

import shutil
from pathlib import Path
from pkgutil import resolve_name

from gpt2_ddp import script
from gpt2_ddp.config.base import check_url
from gpt2_ddp.config.cli import C
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import local_copy, sha256_file
from gpt2_ddp.records.rows import RECORDS

RUN_FIELDS = {"checkpoint", "run", "runs"}
"""Fields of commands that name runs."""


def run_command_on_runs(command: type[C], main: str) -> None:
    """As `script.run_command`; `main` gets copies in place of runs that are named by URLs."""
    script.run_command(command, lambda config: resolve_name(main)(with_local_runs(config)))


def with_local_runs(config: C) -> C:
    """The configuration, with copies in place of runs that are named by URLs. Raises: UserError."""
    changes: dict[str, object] = {}
    for field in RUN_FIELDS & vars(config).keys():
        value = getattr(config, field)
        if isinstance(value, str):
            changes[field] = _local_run(value, field)
        else:
            whole = config.reads_checkpoints
            changes[field] = tuple(_local_run(path, field, whole) for path in value)
    return config.model_copy(update=changes)


def _local_run(path: str, field: str, whole: bool = True) -> str:
    """The path or, of a URL, the folder in the cache with a copy of the run: records and, if
    `whole`, checkpoints. Most commands with a field `runs` read only rows. Raises: UserError if
    there is no such run."""
    if "://" not in path:
        return path
    try:
        folder = Path(local_copy(check_url(path)))
    except ValueError as error:
        raise UserError(field, path, str(error)) from error
    from gpt2_ddp.remote.objects import (  # noqa: PLC0415  fsspec: not for --help and local runs
        MANIFEST,
        reading,
    )

    with reading(path, field) as bucket:
        for record in RECORDS:
            (folder / record).unlink(missing_ok=True)
        bucket.get("", folder, reversed(RECORDS))
        if not any((folder / record).exists() for record in RECORDS):
            bucket.get_checkpoint("", folder)
        manifests = bucket.checkpoints() if whole else {}
        for checkpoint in (folder / "checkpoints").glob("*"):
            if checkpoint.name not in manifests:
                shutil.rmtree(checkpoint)
        for name, sha256 in manifests.items():
            checkpoint = folder / "checkpoints" / name
            if not checkpoint.exists() or sha256_file(checkpoint / MANIFEST) != sha256:
                bucket.get_checkpoint(name, checkpoint)
    return str(folder)
