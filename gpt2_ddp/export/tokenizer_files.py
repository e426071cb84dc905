"""A tokenizer as transformers reads it: tokenizer.json, run by the library `tokenizers`, and tokenizer_config.json."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt2_ddp.data.tokenizer import BYTES, CHARACTER_OF_BYTE, END_OF_TEXT, GPT2_PATTERN, TOKENIZER_FILE, Tokenizer


def write_tokenizer(tokenizer: Tokenizer, definition: bytes | None, context: int, folder: Path) -> None:
    """Writes the files of a tokenizer into `folder`.

    Args:
        definition: its own tokenizer.json, which is written as it is; None makes one from tiktoken's tables.
        context: tokens that the model sees, of which transformers warns where a text has more.
    """
    if definition:
        (folder / TOKENIZER_FILE).write_bytes(definition)
    else:
        (folder / TOKENIZER_FILE).write_text(json.dumps(tokenizer_json(tokenizer)), encoding="utf-8")
    config = {
        # by name: without it, transformers takes GPT-2's own class, which ignores what the file says of splitting text
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,  # a literal end-of-text in a text is text, here as in training
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The definition of a byte-level BPE for HuggingFace `tokenizers`, with the ids that tiktoken gives."""
    encoding = tokenizer.encoding
    ranks, pattern = encoding._mergeable_ranks, encoding._pat_str
    merged = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern.replace("}+", "}")}, "behavior": "Isolated", "invert": False}
    if pattern == GPT2_PATTERN:  # which the library has itself, in its own wording
        pre_tokenizer = byte_level | {"use_regex": True}
    elif tokenizer.name == BYTES:
        pre_tokenizer = byte_level
    else:
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    specials = sorted((rank, token) for token, rank in encoding._special_tokens.items())
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": rank, "content": token, **added} for rank, token in specials],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_characters(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": [[_characters(part) for part in _halves(token, ranks)] for _, token in merged],
        },
    }


def _characters(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that were merged to this one: what the merges before it make of its bytes."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        merges = [ranks.get(first + second, len(ranks)) for first, second in pairwise(parts)]
        first = merges.index(min(merges))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts
