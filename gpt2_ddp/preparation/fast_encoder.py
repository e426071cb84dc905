"""GPT-2's BPE by `gigatoken`, where that is installed (`pip install gpt2_ddp[fast]`): the same ids, many times sooner.

Nobody has to believe that they are the same: tiktoken encodes a sample of each piece of work again (`check`).
"""

import base64
import re
import tempfile
from typing import Any

import numpy as np

from gpt2_ddp.data.manifest import token_dtype
from gpt2_ddp.data.tokenizer import GPT2_PATTERN, Tokenizer
from gpt2_ddp.errors import truncate

SAMPLE, EVERY = 512, 2**18
"""Characters that tiktoken encodes, too, of so many: 0.2 % of them, for 3 % of the time."""
WORD_END = re.compile(r"(?<=\S)(?=[ \n])")
"""Where GPT-2's pattern divides every text, whatever stands around: no token reaches across."""


class EncodersDiffer(Exception):
    """gigatoken's ids are not tiktoken's, or there are none, as it has panicked."""


class FastEncoder:
    """What `Tokenizer.encode` does, for text without lone surrogates.

    Args:
        tokenizer: a byte-level BPE with GPT-2's pattern, whose ids but for the special tokens' are without a gap.
        encoder: gigatoken's. It knows no special tokens, or they would be found in the text; and ids from 0 on.
    """

    def __init__(self, tokenizer: Tokenizer, encoder: Any):
        self.tokenizer, self.encoder = tokenizer, encoder
        self.first, self.dtype = first_id(tokenizer), token_dtype(tokenizer.vocab_size)
        self._lengths = tokenizer.token_bytes()

    def encode(self, text: str) -> np.ndarray:
        """Ids [n], uint16, or uint32 for more than 65,536 ids.

        Raises:
            EncodersDiffer: gigatoken has panicked.
        """
        try:
            ids = self.encoder.encode(text.encode())
        except BaseException as error:  # a panic of Rust's is no Exception, and its class cannot be imported
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise EncodersDiffer(f"gigatoken panicked ({error}) at {truncate(text, 60)!r}") from None
        return (ids + np.uint32(self.first)).astype(self.dtype)

    def check(self, text: str, ids: np.ndarray) -> None:
        """Has tiktoken encode the text, too, or, of a long one, about `SAMPLE` characters from its middle.

        Args:
            ids: result of `encode`. The sample's ids are found in it by their bytes, between ends of words. Without
                such ends, both encode the sample alone.

        Raises:
            EncodersDiffer: they are not the same.
        """
        if len(text) > SAMPLE:
            start, stop = (len(text) - SAMPLE) // 2, (len(text) + SAMPLE) // 2
            ends = [found.start() for found in WORD_END.finditer(text, start, stop)]
            start, stop = (ends[0], ends[-1]) if len(ends) > 1 else (start, stop)
            places = [len(text[:place].encode()) for place in (start, stop)]
            text = text[start:stop]
            if len(ends) > 1:
                first, last = np.searchsorted(np.cumsum(self._lengths.take(ids, mode="clip")), places) + 1
                ids = ids[first:last]
            else:
                ids = self.encode(text)
        if not np.array_equal(ids, self.tokenizer.encode(text)):
            raise EncodersDiffer(f"gigatoken and tiktoken do not encode {truncate(text, 60)!r} alike")


def first_id(tokenizer: Tokenizer) -> int:
    """The smallest id that is no special token's."""
    return min(tokenizer.encoding._mergeable_ranks.values())


def fast_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    """None where gigatoken is not installed, or the tokenizer is not of its kind."""
    ranks, first = tokenizer.encoding._mergeable_ranks, first_id(tokenizer)
    if tokenizer.encoding._pat_str != GPT2_PATTERN or max(ranks.values()) - first + 1 != len(ranks):
        return None
    try:
        from gigatoken.gigatoken_rs import BPETokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            file.write(b"%b %d\n" % (base64.b64encode(token), rank - first))
        file.flush()
        return FastEncoder(tokenizer, BPETokenizer.from_tiktoken(file.name, "gpt2", {}))
