"""Sources of rows that are no files of text, by their prefix."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError


class RowSource(NamedTuple):
    """One row of ROW_SOURCES.

    Args:
        rows: name of each row, like `owner/name, row 5`, and its values by column. The source is read up to three
            times, in the same order. Raises: UserError if it cannot be read.
        version: identity of the content, such as a commit; None: unknown.
    """

    rows: Callable[[PrepareConfig], Iterator[tuple[str, dict[str, Any]]]]
    version: Callable[[PrepareConfig], str | None]


def hub_rows(config: PrepareConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """A dataset on the Hub, as it arrives."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    name = config.source.removeprefix("hub:")
    try:
        HfApi().dataset_info(name, revision=config.revision, timeout=10)  # load_dataset alone retries for long
        rows: Any = datasets.load_dataset(
            name, config.subset, split=config.split, revision=config.revision, streaming=True
        )
        for number, row in enumerate(rows):
            yield f"{name}, row {number}", row
    except (OSError, ValueError, HTTPError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = f"cannot be read from the Hub ({reason}); local files, or stdlib, need no network"
        raise UserError("source", config.source, hint) from error


def hub_commit(config: PrepareConfig) -> str | None:
    """The dataset's commit; None without an answer from the Hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    with suppress(OSError, ValueError, HTTPError):
        return HfApi().dataset_info(config.source.removeprefix("hub:"), revision=config.revision, timeout=10).sha
    return None


ROW_SOURCES = {"hub": RowSource(hub_rows, hub_commit)}


def row_source(config: PrepareConfig) -> RowSource | None:
    """The source of rows that `config.source` names by a prefix; None for files."""
    prefix, colon, _ = config.source.partition(":")
    return ROW_SOURCES.get(prefix) if colon else None
