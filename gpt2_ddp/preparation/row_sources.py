"""Sources of rows that are no files here: a dataset on the Hub, `hub:OWNER/NAME`, and what
`save_to_disk` of the library `datasets` wrote into a folder.

A new prefix is a row of `ROW_SOURCES`.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# (datasets has no types)

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import user_folder
from gpt2_ddp.preparation.columns import Row

if TYPE_CHECKING:
    from datasets import Dataset
    from huggingface_hub import DatasetInfo


class RowSource(NamedTuple):
    """A kind of source.

    Args:
        rows: the values by column of each row. The source is read up to three times, in the same
            order.
        version: identity of the content, such as a commit; None: unknown.
        settings: the fields among split, subset and revision that have an effect.
    """

    rows: Callable[[PrepareConfig], Iterator[Row]]
    version: Callable[[PrepareConfig], str | None]
    settings: tuple[str, ...] = ()


def _hub_info(config: PrepareConfig) -> "DatasetInfo":
    # heavy: few sources are on the Hub
    from huggingface_hub import HfApi  # noqa: PLC0415  heavy
    from huggingface_hub.errors import HTTPError  # noqa: PLC0415  heavy # pyright: ignore[reportPrivateImportUsage]

    name = config.source_name.removeprefix("hub:")
    try:
        user_folder("HF_HOME", ".cache")  # or the Hub's library would make a folder `~` here
        return HfApi().dataset_info(name, revision=config.revision, timeout=10)
    except (OSError, ValueError, HTTPError) as error:
        hint = f"cannot be read from the Hub ({error}); local files, or stdlib, need no network"
        raise UserError("source", config.source_name, hint) from error


def hub_rows(config: PrepareConfig) -> Iterator[Row]:
    """A dataset on the Hub, as it arrives."""
    import datasets  # noqa: PLC0415  heavy: few sources are on the Hub

    _hub_info(config)  # load_dataset alone retries for long
    name = config.source_name.removeprefix("hub:")
    rows = datasets.load_dataset(
        name, config.subset, split=config.split, revision=config.revision, streaming=True
    )
    yield from cast(Iterator[Row], rows)


def hub_commit(config: PrepareConfig) -> str | None:
    """The dataset's commit; None without an answer from the Hub."""
    with suppress(UserError):
        return _hub_info(config).sha
    return None


def _saved(config: PrepareConfig) -> "Dataset":
    """What `save_to_disk` wrote into a folder; of several splits, one."""
    import datasets  # noqa: PLC0415  heavy: few sources are such folders

    try:
        saved = datasets.load_from_disk(os.path.expanduser(config.source_name))
    except Exception as error:  # of a damaged folder, any
        reason = f"cannot be read as a folder of save_to_disk ({type(error).__name__}: {error})"
        hint = f"{reason}; save it again, or name its files"
        raise UserError("source", config.source_name, hint) from error
    if not isinstance(saved, dict):
        return saved
    if config.split not in saved:
        splits = ", ".join(map(str, saved))
        raise UserError("split", config.split, f"{config.source_name} has only {splits}")
    return saved[config.split]


def saved_rows(config: PrepareConfig) -> Iterator[Row]:
    """The rows of a folder of `save_to_disk`."""
    return cast(Iterator[Row], iter(_saved(config)))


def saved_version(config: PrepareConfig) -> str:
    """The hash that `datasets` keeps of the rows."""
    return _saved(config)._fingerprint  # pyright: ignore[reportPrivateUsage]  (it has no public name)


SETTINGS = ("split", "subset", "revision")
"""Settings of some sources of rows; files have none of them."""
ROW_SOURCES = {
    "hub": RowSource(hub_rows, hub_commit, SETTINGS),
}
"""The sources by their prefix: `--source hub:OWNER/NAME`."""
SAVED_FILES = ("dataset_dict.json", "state.json")
"""Files by which a folder of `save_to_disk` is known."""
SAVED = RowSource(saved_rows, saved_version, ("split",))


def row_source(config: PrepareConfig) -> RowSource | None:
    """The source of rows that `config.source` names by a prefix, or a folder of `save_to_disk`;
    None for files, which several sources are."""
    return _row_source(config.source_name) if len(config.source) == 1 else None


def _row_source(source: str) -> RowSource | None:
    folder = os.path.expanduser(source)
    if any(os.path.isfile(os.path.join(folder, name)) for name in SAVED_FILES):
        return SAVED
    prefix, colon, _ = source.partition(":")
    return ROW_SOURCES.get(prefix) if colon else None


def check_request(config: PrepareConfig) -> None:
    """Raises: UserError for sources that cannot be read together, and settings that this source
    does not have."""
    if len(config.source) > 1:
        for name in config.source:
            if name == "stdlib" or _row_source(name):
                hint = "cannot be read with others, only files can; prepare it on its own"
                raise UserError("source", name, hint)
    source = row_source(config)
    used = source.settings if source else ()
    for field in sorted({*SETTINGS} - {*used}):
        value = getattr(config, field)
        if value != PrepareConfig.model_fields[field].default:
            hint = (
                f"has no effect on {config.source_name}, only on a dataset (hub:OWNER/NAME); "
                "leave it out"
            )
            raise UserError(field, value, hint)
