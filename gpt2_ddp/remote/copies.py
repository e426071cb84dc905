"""Commands that read runs: they take URLs of runs, too, and read copies on this machine."""

import shutil
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name

from gpt2_ddp import script
from gpt2_ddp.config.base import check_url
from gpt2_ddp.config.cli import C
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import local_copy, sha256_file
from gpt2_ddp.records.rows import METRICS, RECORDS, read_events

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
            changes[field] = _local_run(value, field, config.reads)
        else:
            changes[field] = tuple(_local_run(path, field, config.reads) for path in value)
    return config.model_copy(update=changes)


def _local_run(path: str, field: str, reads: str) -> str:
    """The path or, of a URL, the folder in the cache with a copy of what a command `reads` of the
    run (`Command.reads`). Raises: UserError if there is no such run."""
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
        needs_some = reads == "checkpoints" or (reads == "code" and _has_code(folder))
        manifests = bucket.checkpoints() if needs_some else {}
        if reads == "code":
            manifests = dict(islice(manifests.items(), 1))  # the newest
        for checkpoint in (folder / "checkpoints").glob("*"):
            if checkpoint.name not in manifests:
                shutil.rmtree(checkpoint)
        for name, sha256 in manifests.items():
            checkpoint = folder / "checkpoints" / name
            if not checkpoint.exists() or sha256_file(checkpoint / MANIFEST) != sha256:
                bucket.get_checkpoint(name, checkpoint)
    return str(folder)


def _has_code(run: Path) -> bool:
    """Whether a start of the run records a class of one's own."""
    return any(event.get("code") for event in read_events(run / METRICS)[0])
