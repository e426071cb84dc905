"""Reads a byte-level BPE from the `tokenizer.json` of HuggingFace `tokenizers`."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import LFS_HINT, is_lfs_pointer, read_small

END_OF_TEXT = "<|endoftext|>"
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
"""GPT-2's pre-tokenizer, with possessive quantifiers: backtracks only in blanks."""

_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + at) for at, byte in enumerate(_OTHERS)
}
"""The printable character by which GPT-2 writes a byte, in the order of ids: '!' is itself, 'Ġ' the
blank."""
BYTE_OF_CHARACTER = {character: bytes([byte]) for byte, character in CHARACTER_OF_BYTE.items()}


class Definition(TypedDict):
    """Arguments of tiktoken's `Encoding`."""

    name: NotRequired[str]
    pat_str: str
    mergeable_ranks: dict[bytes, int]
    special_tokens: dict[str, int]
    explicit_n_vocab: NotRequired[int | None]


def to_bytes(token: str) -> bytes:
    """Bytes of a token that is written in GPT-2's printable characters."""
    return b"".join(BYTE_OF_CHARACTER[character] for character in token)


LARGEST = 2**25
"""Bytes that are read at most; a file of 250,000 ids has a quarter of them. Each of n nested merges
may be longer by a byte than the one before, so that a file of n² bytes takes seconds, and much
memory."""

OLD_FORM = ("vocab.json", "merges.txt")
CONVERT = (
    "make tokenizer.json of them, in Python: from transformers import GPT2TokenizerFast; "
    "GPT2TokenizerFast.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
"""Hint for the files that a tokenizer of GPT-2 had before tokenizer.json."""


def read_definition(path: Path, names: Sequence[str]) -> tuple[Definition, str]:
    """Arguments of tiktoken's `Encoding` for a `tokenizer.json`, and the file's SHA-256. `names`:
    of tokenizers without a file. Raises: UserError if the file cannot be read, or tiktoken would
    encode differently."""
    if is_lfs_pointer(path):
        raise UserError("tokenizer", path, LFS_HINT)
    has_old_form = all((path.parent / name).is_file() for name in OLD_FORM)
    if path.name in OLD_FORM or (not os.path.exists(path) and has_old_form):
        hint = f"has {' and '.join(OLD_FORM)}, an older form; {CONVERT}"
        raise UserError("tokenizer", path.parent, hint)
    try:
        data = read_small(path, LARGEST)
    except OSError as error:
        names_of_others = f"name bpe, a tokenizer.json or an encoding ({', '.join(names)})"
        hint = f"cannot be read ({error.strerror}); {names_of_others}"
        raise UserError("tokenizer", path, hint) from error
    try:
        return _definition(json.loads(data)), hashlib.sha256(data).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = f"is no byte-level BPE like GPT-2's ({error}); `bpe` trains one on the source"
        raise UserError("tokenizer", path, hint) from error


def _definition(definition: dict[str, Any]) -> Definition:
    """Arguments of tiktoken's `Encoding`. Raises: ValueError where it would encode differently."""
    model = definition["model"]
    splitter = definition["pre_tokenizer"]
    special_tokens = {token["content"]: token["id"] for token in definition["added_tokens"]}
    if definition["normalizer"] or END_OF_TEXT not in special_tokens:
        raise ValueError(f"it changes the text, or has no token {END_OF_TEXT}")
    ranks = {
        to_bytes(token): rank
        for token, rank in model["vocab"].items()
        if token not in special_tokens
    }
    splitting = splitter["type"], splitter["add_prefix_space"], splitter.get("use_regex", True)
    if splitting != ("ByteLevel", False, True) or not _in_order_of_merges(ranks, model["merges"]):
        raise ValueError("its pre-tokenizer, or the order of its ids, is another")
    ids = [*ranks.values(), *special_tokens.values()]
    # or tiktoken panics, or cannot decode
    if {*map(type, ids)} != {int} or sorted(ids) != [*range(len(ids))]:
        raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each of one token")
    if not all(token.encode() for token in special_tokens):
        raise ValueError("one of its added tokens has no text")
    return {"pat_str": GPT2_PATTERN, "mergeable_ranks": ranks, "special_tokens": special_tokens}


def _in_order_of_merges(ranks: dict[bytes, int], merges: list[Any]) -> bool:
    """Whether the tokens are 256 bytes and the result of each merge, whose ids ascend."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    merged = [ranks[to_bytes(first + second)] for first, second in pairs]
    is_whole = {*BYTE_OF_CHARACTER.values()} <= {*ranks} and len(ranks) == 256 + len(merged)
    return is_whole and merged == sorted(set(merged))
