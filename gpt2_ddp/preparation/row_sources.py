"""Sources of rows that `datasets` reads: the Hub, and folders that it saved."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import user_folder


class RowSource(NamedTuple):
    """A kind of source.

    Args:
        rows: the values by column of each row. The source is read up to three times, in the same
            order.
        version: identity of the content, such as a commit; None: unknown.
    """

    rows: Callable[[PrepareConfig], Iterator[dict[str, Any]]]
    version: Callable[[PrepareConfig], str | None]


def _hub_info(config: PrepareConfig) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        user_folder("HF_HOME", ".cache")  # or the Hub's library would make a folder `~` here
        return HfApi().dataset_info(
            config.source_name.removeprefix("hub:"), revision=config.revision, timeout=10
        )
    except (OSError, ValueError, HTTPError) as error:
        hint = f"cannot be read from the Hub ({error}); local files, or stdlib, need no network"
        raise UserError("source", config.source_name, hint) from error


def hub_rows(config: PrepareConfig) -> Iterator[dict[str, Any]]:
    """A dataset on the Hub, as it arrives."""
    import datasets

    _hub_info(config)  # load_dataset alone retries for long
    name = config.source_name.removeprefix("hub:")
    yield from datasets.load_dataset(
        name, config.subset, split=config.split, revision=config.revision, streaming=True
    )


def hub_commit(config: PrepareConfig) -> str | None:
    """The dataset's commit; None without an answer from the Hub."""
    with suppress(UserError):
        return _hub_info(config).sha
    return None


def _saved(config: PrepareConfig) -> Any:
    """What `save_to_disk` wrote into a folder; of several splits, one."""
    import datasets

    try:
        saved = datasets.load_from_disk(os.path.expanduser(config.source_name))
    except Exception as error:  # of a damaged folder, any
        reason = f"cannot be read as a folder of save_to_disk ({type(error).__name__}: {error})"
        raise UserError(
            "source", config.source_name, f"{reason}; save it again, or name its files"
        ) from error
    if not isinstance(saved, dict):
        return saved
    if config.split not in saved:
        raise UserError(
            "split", config.split, f"{config.source_name} has only {', '.join(map(str, saved))}"
        )
    return saved[config.split]


ROW_SOURCES = {"hub": RowSource(hub_rows, hub_commit)}
SAVED = RowSource(lambda config: iter(_saved(config)), lambda config: _saved(config)._fingerprint)


def row_source(config: PrepareConfig) -> RowSource | None:
    """The source of rows that `config.source` names by a prefix, or a folder of `save_to_disk`;
    None for files, which several sources are."""
    return _row_source(config.source_name) if len(config.source) == 1 else None


def _row_source(source: str) -> RowSource | None:
    files = (
        os.path.join(os.path.expanduser(source), name)
        for name in ("dataset_dict.json", "state.json")
    )
    if any(map(os.path.isfile, files)):
        return SAVED
    prefix, colon, _ = source.partition(":")
    return ROW_SOURCES.get(prefix) if colon else None


def check_request(config: PrepareConfig) -> None:
    """Raises: UserError for sources that cannot be read together, and settings that this source
    does not have."""
    if len(config.source) > 1:
        for source in config.source:
            if source == "stdlib" or _row_source(source):
                raise UserError(
                    "source",
                    source,
                    "cannot be read with others, only files can; prepare it on its own",
                )
    source = row_source(config)
    unused = (
        {"subset", "revision"}
        if source is SAVED
        else {"split", "subset", "revision"}
        if source is None
        else set()
    )
    for field in sorted(unused):
        if getattr(config, field) != PrepareConfig.model_fields[field].default:
            hint = f"has no effect on {config.source_name}, only on a dataset (hub:OWNER/NAME); leave it out"
            raise UserError(field, getattr(config, field), hint)
