"""Reads a byte-level BPE or a character vocabulary from the `tokenizer.json` of HuggingFace `tokenizers`."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken

from gpt2_ddp.data.alphabet import BYTE_OF_CHARACTER, END_OF_TEXT, GPT2_PATTERN, to_bytes
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small

LARGEST = 2**28
"""Bytes that are read at most; a file of 250,000 ids has 3 % of them."""
CHARACTER = r"[\s\S]"
"""Pattern of a tokenizer whose ids are characters."""


def read_encoding(path: Path, names: Sequence[str]) -> tuple[tiktoken.Encoding, str]:
    """tiktoken's encoding of a `tokenizer.json`, and the file's SHA-256. `names`: of tokenizers without a file. Raises:
    UserError if the file cannot be read, or tiktoken would encode differently."""
    try:
        data = read_small(path, LARGEST)
    except OSError as error:
        known = f"name bpe, chars, a tokenizer.json or an encoding ({', '.join(names)})"
        raise UserError("tokenizer", path, f"cannot be read ({error.strerror}); {known}") from error
    try:
        encoding = tiktoken.Encoding(path.name, **_definition(json.loads(data)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = f"is neither a byte-level BPE like GPT-2's nor of characters ({error}); `bpe` trains one on the source"
        raise UserError("tokenizer", path, hint) from error
    return encoding, hashlib.sha256(data).hexdigest()


def _definition(definition: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tiktoken's `Encoding`. Raises: ValueError where it would encode differently."""
    model, pre_tokenizer = definition["model"], definition["pre_tokenizer"] or {}
    kinds = model["type"], pre_tokenizer.get("type")
    special_tokens = {token["content"]: token["id"] for token in definition["added_tokens"]}
    if definition["normalizer"]:
        raise ValueError("it changes the text")
    if END_OF_TEXT not in special_tokens:
        raise ValueError(f"it has no token {END_OF_TEXT}")
    if kinds == ("WordLevel", "Split"):
        ranks, pattern = _characters(model["vocab"], pre_tokenizer), CHARACTER
    elif kinds == ("BPE", "ByteLevel"):
        ranks, pattern = _ranks(model, pre_tokenizer, {*special_tokens}), GPT2_PATTERN
    else:
        raise ValueError(f"its model and pre-tokenizer are {kinds[0]} and {kinds[1]}")
    ids = [*ranks.values(), *special_tokens.values()]
    if {*map(type, ids)} != {int} or sorted(ids) != [*range(len(ids))]:  # or tiktoken panics, or cannot decode
        raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each of one token")
    if not all(isinstance(token, str) and token for token in special_tokens):
        raise ValueError("one of its added tokens has no text")
    return {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": special_tokens}


def _characters(vocab: dict[str, int], pre_tokenizer: dict[str, Any]) -> dict[bytes, int]:
    split = pre_tokenizer["pattern"], pre_tokenizer["behavior"], pre_tokenizer["invert"]
    if split != ({"Regex": CHARACTER}, "Isolated", False) or {*map(len, vocab)} != {1}:
        raise ValueError("its tokens are not characters")
    return {character.encode(): rank for character, rank in vocab.items()}


def _ranks(model: dict[str, Any], pre_tokenizer: dict[str, Any], special_tokens: set[str]) -> dict[bytes, int]:
    if pre_tokenizer["add_prefix_space"] or not pre_tokenizer.get("use_regex", True):
        raise ValueError("it adds a space before the text, or splits it differently")
    ranks = {to_bytes(token): rank for token, rank in model["vocab"].items() if token not in special_tokens}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = [ranks[to_bytes(first + second)] for first, second in merges]
    if merged != sorted(set(merged)) or {*BYTE_OF_CHARACTER.values()} - {*ranks} or len(ranks) != 256 + len(merged):
        raise ValueError("its ids are not in the order of its merges")
    return ranks
