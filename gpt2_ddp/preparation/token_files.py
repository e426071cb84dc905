"""import_tokens.py: token files of llm.c, modded-nanogpt or nanoGPT as a folder of token shards.

| file | header | token ids |
|---|---|---|
| llm.c, GPT-2, and modded-nanogpt | 256 int32: 20240520, 1, number of tokens | uint16 |
| llm.c, Llama 3 | 256 int32: 20240801, 7, number of tokens | uint32 |
| nanoGPT | none | uint16 |

All numbers are little-endian. llm.c's shards are those of this project (`data/shards.py`).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_ddp.config.tools import ImportTokensConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, MANIFEST, Shard
from gpt2_ddp.data.shards import MAGIC_AND_VERSION
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE, Tokenizer, encoding_names, load_tokenizer
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.preparation.encode import ShardWriter, write_manifest
from gpt2_ddp.preparation.prepare import make_manifest, tokenizer_file
from gpt2_ddp.preparation.tokenizer_check import check_tokenizer

CHUNK = 2**24  # tokens that are read at a time
LLM_C = range(20240101, 20300101)  # first number of any file of llm.c: the date of its format
CHARACTERS = "meta.pkl"  # beside nanoGPT's files of characters
SHOWN = 32  # tokens that are shown as text


class TokenFile(NamedTuple):
    """A file of token ids whose size and header are right."""

    path: Path
    split: str
    dtype: np.dtype
    offset: int  # of the first token, in bytes
    tokens: int

    def read(self) -> Iterator[np.ndarray]:
        """Its tokens, in parts."""
        with open(regular(self.path), "rb") as file:
            file.seek(self.offset)
            for begin in range(0, self.tokens, CHUNK):
                yield np.fromfile(file, self.dtype, min(CHUNK, self.tokens - begin))


def import_tokens(config: ImportTokensConfig) -> Path:
    """Makes a folder of shards of the files' tokens, in the order of their names, and returns it.
    Prints how many there are, and the first ones as text. Raises: UserError for files or ids that
    are not those of a format and of the tokenizer, and for an output that exists."""
    output = Path(config.folder)
    if (output / MANIFEST).exists():
        raise UserError("output", output, "has data already; choose another output, or delete it")
    files = [open_file(path) for path in find_files(config.source)]
    name = config.tokenizer
    tokenizer = load_tokenizer(name)
    if name not in encoding_names():
        check_tokenizer(tokenizer_file(name))
    with locked_output(output) as aside:
        if name not in encoding_names():
            (aside / TOKENIZER_FILE).write_bytes(tokenizer_file(name).read_bytes())
            tokenizer = load_tokenizer(str(aside / TOKENIZER_FILE))
        splits: dict[str, list[Shard]] = {}
        for split in sorted({file.split for file in files}):
            writer = ShardWriter(aside, split, config.shard_tokens, tokenizer.vocab_size)
            for file in files:
                if file.split == split:
                    _copy(file, writer, tokenizer)
            splits[split] = writer.close()
        imported = [[file.path.name, file.tokens] for file in files]
        source = " ".join(config.source)
        recipe = {"imported": imported, "tokenizer": name}
        manifest = make_manifest(tokenizer, source, splits, recipe)
        write_manifest(aside, manifest)
        publish(aside, output, last=MANIFEST)
    counts = ", ".join(f"{manifest.tokens(split):,} {split} tokens" for split in splits)
    print(f"{output} is imported: {counts} of {len(files):,} files, tokenizer {tokenizer.name}")
    for split in splits:
        first = next(next(file for file in files if file.split == split).read())[:SHOWN]
        print(f"  {split} begins: {truncate(tokenizer.decode(first.tolist()), 200)!r}")
    if "val" not in splits:
        print("  note: no file has val in its name, so trainings have no validation loss")
    return output


def find_files(sources: tuple[str, ...]) -> list[Path]:
    """The files, and the `*.bin` files of the folders, sorted by name. Raises: UserError for a path
    without any, or for a folder of characters."""
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
        if not files:
            raise UserError("source", source, "has no .bin file; name a folder that has some")
        if any((file.parent / CHARACTERS).exists() for file in files):
            hint = (
                "its ids are nanoGPT's characters, as meta.pkl shows, which no tokenizer here has"
            )
            advice = "prepare its text: prepare_data.py --source input.txt --tokenizer bytes"
            raise UserError("source", source, f"{hint}; {advice}")
        found += files
    return sorted(dict.fromkeys(found), key=lambda path: path.name)


def split_of(path: Path) -> str:
    """The split in a file's name. Raises: UserError without one, or with both."""
    named = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
    words = re.split(r"[^a-z]+", path.stem.lower())
    splits = {named[word] for word in words if word in named}
    if len(splits) != 1:
        hint = "its name should have the split, train or val, as fineweb_train_000001.bin has"
        raise UserError("source", path, hint)
    return splits.pop()


def open_file(path: Path) -> TokenFile:
    """The format and the tokens of a file. Raises: UserError."""
    split = split_of(path)
    try:
        with open(regular(path), "rb") as file:
            header = file.read(HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UserError("source", path, f"cannot be read ({error.strerror})") from error
    numbers = np.frombuffer(header[: len(header) // 4 * 4], "<i4")[:3].tolist()
    for width, magic_and_version in MAGIC_AND_VERSION.items():
        if tuple(numbers[:2]) == tuple(magic_and_version):
            tokens = numbers[2] if len(numbers) > 2 else 0
            expected = HEADER_BYTES + tokens * width
            if tokens < 1 or size != expected:
                hint = f"its header has {tokens:,} tokens, for {expected:,} bytes; it has {size:,}"
                raise UserError("source", path, f"{hint}: copy it again")
            return TokenFile(path, split, np.dtype(f"<u{width}"), HEADER_BYTES, tokens)
    if numbers and numbers[0] in LLM_C:
        version = numbers[1] if len(numbers) > 1 else "none"
        hint = f"a file of llm.c with magic {numbers[0]} and version {version} holds no token shard"
        raise UserError("source", path, f"{hint}; token shards have 20240520, 1 or 20240801, 7")
    if size < 2 or size % 2:
        hint = f"has {size:,} bytes; nanoGPT's files have two for each token, and no header"
        raise UserError("source", path, hint)
    return TokenFile(path, split, np.dtype("<u2"), 0, size // 2)


def _copy(file: TokenFile, writer: ShardWriter, tokenizer: Tokenizer) -> None:
    """Adds the tokens of a file. Raises: UserError for ids that the tokenizer does not have."""
    copied = 0
    for tokens in file.read():
        copied += len(tokens)
        largest = int(tokens.max(initial=0))
        if largest >= tokenizer.vocab_size:
            known = f"{tokenizer.vocab_size:,} of the tokenizer {tokenizer.name}"
            hint = f"has the token id {largest:,}, outside of the {known}"
            raise UserError("source", file.path, f"{hint}; name its own by --tokenizer")
        writer.add(tokens)
    if copied < file.tokens:
        raise UserError("source", file.path, "became shorter while it was read; run it again")
