"""Text to token shards, with their manifest: scripts/prepare_data.py.

    scan ──▶ find_cut ──▶ make_tokenizer ──▶ write_splits ──▶ write_manifest ──▶ publish
    sources  split        bpe, or a copy     encode           encode             output

The same source and settings give the same bytes with any number of workers. manifest.json is
written last and makes the folder usable; after a kill, a preparation starts over.
"""

import errno
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import MANIFEST, VERSION, Manifest, Shard, read_manifest, tokenizer_note
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    encoding_names,
    load_tokenizer,
)
from gpt2_ddp.data.tokenizer_file import END_OF_TEXT
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.distributed.workers import Pool, worker_pool
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.preparation.bpe import train_on_source
from gpt2_ddp.preparation.encode import write_manifest, write_splits
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.source_files import RECORD, check_unchanged, fingerprint, list_files
from gpt2_ddp.preparation.sources import MOST_NAMED, Source, scan
from gpt2_ddp.preparation.split import Cut, find_cut
from gpt2_ddp.preparation.tokenizer_check import check_tokenizer

LEFT = ("train_*.bin", "val_*.bin", TOKENIZER_FILE)
"""Files beside RECORD of a preparation that was killed at its end."""
LINE = 320  # most characters of the line of a file that is left out
NAMED = 3  # files that the summary names of those that are left out


def prepare(config: PrepareConfig) -> Manifest:
    """Creates a folder of token shards, and returns its manifest. Keeps a folder that is prepared
    already. Raises: UserError if source, tokenizer or output folder are unusable, or the folder has
    other content."""
    folder = Path(config.folder)
    config = config.model_copy(update={"output": str(folder)})
    # first without the lock, since the folder may be read-only
    manifest = _finished(folder, config)
    if manifest:
        return manifest
    waiting = f"another process is preparing {folder}; waiting for it"
    try:
        with locked_output(folder, waiting) as aside:
            manifest = _finished(folder, config)
            if manifest:
                return manifest
            _clear(folder)
            workers = config.workers or usable_cores(hyperthreads=True)
            with worker_pool(workers) if workers > 1 else nullcontext() as pool:
                return _prepare(aside, config, pool)
    except BrokenPipeError:  # of standard output: the data are right (`run_command`)
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; free space on that disk, and run the same command again" if is_full else ""
        raise UserError("output", folder, f"cannot be prepared ({error}){hint}") from error


def _finished(folder: Path, config: PrepareConfig) -> Manifest | None:
    """The manifest of a folder with this recipe; None if it is not prepared. Raises: UserError for
    another recipe, or a source that has changed; a deleted one may have."""
    if not os.path.exists(folder / MANIFEST):
        return None
    manifest = read_manifest(folder, "output")
    _check_recipe(folder, config, manifest)
    for split in manifest.splits:
        TokenStream(folder, manifest, split)  # checks the shards
    _check_tokenizer_file(folder, config, manifest)
    can_compare = row_source(config) or any(list_files(source) for source in config.source)
    missing = ""
    if can_compare:
        check_unchanged(folder, config, manifest.recipe.get("fingerprint"))
    else:
        missing = f" ({config.source_name} is not here any more, so it was not compared)"
    summary = f"{_summary(manifest)}{missing}"
    print(f"{folder} is already prepared: {summary}; delete it to prepare it again")
    note = tokenizer_note({str(folder): manifest})
    if note:
        print(f"  note: {note}")
    return manifest


def _check_recipe(folder: Path, config: PrepareConfig, manifest: Manifest) -> None:
    """Raises: UserError if the folder was prepared with other settings."""
    made_with = manifest.recipe
    differing = [
        f"{name} {made_with.get(name)}"
        for name, value in _recipe(config).items()
        if made_with.get(name) != value
    ]
    if differing:
        hint = f"has shards made with {', '.join(differing)}; choose another output, or delete it"
        raise UserError("output", folder, hint)


def _check_tokenizer_file(folder: Path, config: PrepareConfig, manifest: Manifest) -> None:
    """Raises: UserError if the tokenizer's file has changed; a deleted one may have."""
    name = config.tokenizer
    if name in ("bpe", *encoding_names()) or not os.path.exists(name):
        return
    if load_tokenizer(name).sha256 != manifest.tokenizer_sha256:
        hint = (
            "has changed since the text was encoded with it; choose another output, "
            f"or delete {folder}"
        )
        raise UserError("tokenizer", name, hint)


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings that determine the tokens."""
    unused = {"output", "workers"}
    if config.tokenizer != "bpe" or not config.vocab_size:
        unused.add("vocab_size")
    recipe = config.model_dump(mode="json", exclude=unused)
    if len(config.source) == 1:
        recipe["source"] = config.source_name  # the form of earlier releases
    return recipe


def _clear(folder: Path) -> None:
    """Removes the files of a killed preparation. Raises: UserError for other files."""
    left = [file for pattern in LEFT for file in folder.glob(pattern)]
    if left and not (folder / RECORD).exists():
        hint = "has files that prepare_data.py did not write; choose another output"
        raise UserError("output", folder, hint)
    for file in left:
        file.unlink()


def _prepare(aside: Path, config: PrepareConfig, pool: Pool) -> Manifest:
    """Fills the folder `aside`, which then becomes the output."""
    folder = Path(config.folder)
    start = time.perf_counter()
    if config.tokenizer not in ("bpe", *encoding_names()):
        check_tokenizer(tokenizer_file(config.tokenizer))
    source = scan(config, pool)
    for note in source.notes:
        print(f"note: {note}", flush=True)
    (aside / RECORD).write_text("".join(f"{json.dumps(entry)}\n" for entry in source.entries))
    before = fingerprint(config, source.entries)
    source.entries.clear()  # of a million files, they take much memory
    cut = find_cut(source)
    tokenizer = config.tokenizer
    if tokenizer not in encoding_names():
        tokenizer = str(aside / TOKENIZER_FILE)
        make_tokenizer(source, cut, Path(tokenizer))
    splits, counts = write_splits(aside, source, tokenizer, cut, pool)
    check_unchanged(aside, config, before, "prepare it again when its files are at rest")
    account = counts | {"left_out": source.left_out[:MOST_NAMED]}
    recipe = _recipe(config) | {"fingerprint": before, "account": account}
    description = config.source_name
    if description == "stdlib":
        description = f"stdlib (Python {platform.python_version()})"
    manifest = make_manifest(load_tokenizer(tokenizer), description, splits, recipe)
    write_manifest(aside, manifest)
    publish(aside, folder, last=MANIFEST)
    print(f"{folder} is prepared: {_summary(manifest)}, in {time.perf_counter() - start:.0f} s")
    _print_account(folder, source, counts)
    for note in _notes(config, manifest, counts):
        print(f"  note: {note}")
    return manifest


def _print_account(folder: Path, source: Source, counts: Counter[str]) -> None:
    """Prints how much text there was, and which files were left out."""
    documents = f"{counts['documents']:,} documents"
    print(f"  {documents}, {counts['bytes']:,} bytes, {counts['replaced']:,} U+FFFD")
    print(f"  left out: {len(source.left_out):,} files")
    for file in source.left_out[:NAMED]:
        print(f"    {truncate(file, LINE)}")
    if len(source.left_out) > NAMED:
        print(f"    and {len(source.left_out) - NAMED:,} more; {folder / MANIFEST} names them")


def _notes(config: PrepareConfig, manifest: Manifest, counts: Counter[str]) -> Iterator[str]:
    """What the user may not expect of the finished data."""
    if counts["end_of_text"]:
        cure = "if it ends documents, set --document_separator"
        yield f"the text has {END_OF_TEXT} as plain text; {cure}"
    if counts["empty"]:
        yield f"{counts['empty']:,} documents or rows without text were skipped"
    if config.document_separator and not counts["separators"]:
        yield _unused_separator(config.document_separator)
    if config.vocab_size and manifest.vocab_size < config.vocab_size:
        tokens = f"{manifest.vocab_size:,} of {config.vocab_size:,} tokens"
        yield f"the text gives only {tokens}; the rest would not occur"


def _unused_separator(separator: str) -> str:
    """Note on a separator that no text has."""
    quoted = json.dumps(separator, ensure_ascii=False)
    note = f"the separator {quoted} never occurs in the text, so no document was divided"
    if "\\" in separator:
        line_break = "write a line break as $'\\n' in bash, or as \"\\n\" in YAML"
        return f"{note}; a backslash is itself: {line_break}"
    if "\n" in separator:
        others = "in bash, CRLF is $'\\r\\n', and CR is $'\\r'"
        return f"{note}; the text may have other line ends: {others}"
    return note


def make_manifest(
    tokenizer: Tokenizer, source: str, splits: dict[str, list[Shard]], recipe: dict[str, Any]
) -> Manifest:
    """The manifest of shards of this tokenizer's ids."""
    return Manifest(
        VERSION,
        tokenizer.name,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eot,
        source,
        splits,
        recipe,
    )


def _summary(manifest: Manifest) -> str:
    tokens = [f"{manifest.tokens(split):,} {split} tokens" for split in manifest.splits]
    return ", ".join([*tokens, f"vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"])


def make_tokenizer(source: Source, cut: Cut | None, path: Path) -> None:
    """Trains the source's own tokenizer, `bpe`, or copies one, to `path`. `cut`: the result of
    `find_cut`."""
    name = source.config.tokenizer
    if name == "bpe":
        train_on_source(source, cut, path)
    else:
        path.write_bytes(tokenizer_file(name).read_bytes())


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that `name`, a file or its folder, means. Raises: UserError."""
    return Path(name, TOKENIZER_FILE) if os.path.isdir(name) else Path(name)
