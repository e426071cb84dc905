"""Finds a text in a stream of tokens, whatever tokens it was cut into.

A text inside a document is cut into other tokens than alone: its first and its last bytes may be in
tokens of the text around it. So bytes are compared, without decoding the stream:

    anchor   one byte of the text; few tokens can hold it at its place in the text
    scan     the stream is compared with these tokens alone, in blocks
    walk     from each one that is there, token by token: each must continue the text's bytes

The anchor is the byte whose tokens are the rarest in a sample of the stream. A text has no special
token in it, so it ends at the end of its document.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from gpt2_ddp.data.shards import TokenStream, numbered

BLOCK = 2**20
"""Fewest tokens that are read at once."""
ANCHORS = 256
"""Bytes of the text that are considered as the anchor, evenly spread."""
SAMPLES, SAMPLE = 64, 2**14
"""Places in the stream, evenly spread, and tokens there, that tell how often tokens occur."""
FEW = 16
"""Up to so many tokens, comparing each with the stream is faster than a table (estimate)."""
HIT = 4000
"""A walk takes as long as comparing so many tokens with one (estimate)."""


class Occurrences(NamedTuple):
    """Where a text is in a stream, by rising position.

    Attributes:
        first, last: int64 [n], positions of the tokens with its first and its last byte.
        offsets: int64 [n], bytes of the first token before the text.
    """

    first: np.ndarray
    last: np.ndarray
    offsets: np.ndarray

    @classmethod
    def joined(cls, parts: "Iterable[Occurrences]") -> "Occurrences":
        """Those of all parts, in their order."""
        empty = np.empty(0, np.int64)
        return cls(*map(np.concatenate, zip((empty, empty, empty), *parts, strict=True)))


class Anchor(NamedTuple):
    """A byte of the text, and the tokens that can hold it there.

    Attributes:
        byte: its number in the text.
        ids: int64 [n], ascending; a token may be there several times, at several places.
        begins: int64 [n], the byte of the text at which the token begins; negative before it.
    """

    byte: int
    ids: np.ndarray
    begins: np.ndarray


Allowed = Callable[[int], np.ndarray]
"""A byte of the text -> the ids that can be there."""


class TextSearch:
    """The tokens that can hold parts of a text.

    Args:
        text: UTF-8, not empty.
        tokens: ids of all tokens but the special ones, by their bytes.
        vocab_size: number of ids.
    """

    def __init__(self, text: bytes, tokens: Mapping[bytes, int], vocab_size: int):
        self.text = text
        self._tokens = tokens
        self._sizes = sorted({len(token) for token in tokens})
        self._lengths = np.zeros(vocab_size, np.int64)
        self._lengths[[*tokens.values()]] = [*map(len, tokens)]
        # tokens that reach out of the text: [ids] by the byte where they enter or leave it
        self._entering: dict[int, list[int]] = {}
        self._leaving: dict[int, list[int]] = {}
        self._around: list[tuple[int, int]] = []  # ids, and where they begin
        for token, number in tokens.items():
            self._add_ends(token, number)
        places = np.linspace(0, len(text) - 1, min(ANCHORS, len(text))).astype(int)
        self._anchors = [self._at(place) for place in places.tolist()]
        self._next: dict[int, np.ndarray] = {}
        self._before: dict[int, np.ndarray] = {}

    def _add_ends(self, token: bytes, number: int) -> None:
        text = self.text
        for size in range(1, min(len(token) - 1, len(text)) + 1):
            if text.startswith(token[-size:]):
                self._entering.setdefault(size, []).append(number)
            if text.endswith(token[:size]):
                self._leaving.setdefault(len(text) - size, []).append(number)
        place = token.find(text, 1)
        while 0 < place < len(token) - len(text):
            self._around.append((number, -place))
            place = token.find(text, place + 1)

    def anchor(self, stream: TokenStream) -> Anchor:
        """The byte of the text with the cheapest search in a stream."""
        size = min(SAMPLE, len(stream))
        starts = np.linspace(0, len(stream) - size, SAMPLES).astype(np.int64)
        sample = stream.read(starts, size)
        share = np.bincount(sample.ravel(), minlength=len(self._lengths)) / sample.size

        def cost(anchor: Anchor) -> float:
            return min(len(anchor.ids), FEW) + HIT * float(share[anchor.ids].sum())

        return min(self._anchors, key=cost)

    def _at(self, byte: int) -> Anchor:
        """The tokens that can hold this byte of the text."""
        text = self.text
        found = list(self._around)
        for begin in range(max(byte + 1 - self._sizes[-1], 0), byte + 1):
            for size in self._sizes:
                number = self._tokens.get(text[begin : begin + size])
                if number is not None and byte < begin + size <= len(text):
                    found.append((number, begin))
        lengths = self._lengths
        for end, numbers in self._entering.items():
            if end > byte:
                found += [(number, end - int(lengths[number])) for number in numbers]
        for begin, numbers in self._leaving.items():
            if begin <= byte:
                found += [(number, begin) for number in numbers]
        ids, begins = np.array(sorted(found), np.int64).reshape(-1, 2).T
        return Anchor(byte, ids, begins)

    def blocks(self, stream: TokenStream) -> list[range]:
        """The stream in parts that are searched at once; longer texts take longer parts."""
        size = max(BLOCK, 4 * len(self.text))
        return [
            range(start, min(start + size, len(stream))) for start in range(0, len(stream), size)
        ]

    def find(self, stream: TokenStream, anchor: Anchor, block: range) -> Occurrences:
        """All occurrences whose anchor is in a block. Raises: UserError, as `TokenStream.read`."""
        # a token has a byte or more
        first = max(block.start - anchor.byte, 0)
        stop = min(block.stop + len(self.text) - anchor.byte, len(stream))
        ids: np.ndarray = stream.read(np.array([first]), stop - first)[0]
        before = block.start - first
        scanned = ids[before : before + len(block)]
        hits = np.flatnonzero(self._is_anchor(scanned, anchor)) + before
        found: np.ndarray = ids[hits]
        # each hit as often as its token can hold the anchor
        low: np.ndarray = np.searchsorted(anchor.ids, found, side="left")
        high: np.ndarray = np.searchsorted(anchor.ids, found, side="right")
        counts: np.ndarray = high - low
        begins = anchor.begins[numbered(low, counts)]
        at = np.repeat(hits, counts)
        occurrences = self._walk(ids, at, begins)
        return Occurrences(occurrences.first + first, occurrences.last + first, occurrences.offsets)

    def _is_anchor(self, ids: np.ndarray, anchor: Anchor) -> np.ndarray:
        """Whether each of the ids [n] is one of the anchor's: bool [n]."""
        numbers = np.unique(anchor.ids)
        if len(numbers) > FEW:
            table = np.zeros(len(self._lengths), bool)
            table[numbers] = True
            return table[ids]
        found = np.zeros(len(ids), bool)
        equal = np.empty(len(ids), bool)
        for number in numbers.tolist():
            np.equal(ids, number, out=equal)
            found |= equal
        return found

    def _walk(self, ids: np.ndarray, at: np.ndarray, begins: np.ndarray) -> Occurrences:
        """The occurrences among candidates: tokens `at` of the ids that begin at bytes `begins` of
        the text. Continues each to the end of the text, and then to its beginning."""
        size = len(self.text)
        lengths = self._lengths
        last = at
        ends = begins + lengths[ids[at]]
        while (moving := ends < size).any():
            last = last + moving
            follows = last < len(ids)
            follows[follows] = self._continues(ids[last[follows]], ends[follows], self._from)
            kept = follows | ~moving
            at, begins, last, ends, moving = (
                values[kept] for values in (at, begins, last, ends, moving)
            )
            ends = ends + np.where(moving, lengths[ids[last]], 0)
        first = at
        while (moving := begins > 0).any():
            first = first - moving
            precedes = first >= 0
            precedes[precedes] = self._continues(
                ids[first[precedes]], begins[precedes], self._up_to
            )
            kept = precedes | ~moving
            first, last, begins, moving = (values[kept] for values in (first, last, begins, moving))
            begins = begins - np.where(moving, lengths[ids[first]], 0)
        by_place = np.lexsort((-begins, first))
        return Occurrences(first[by_place], last[by_place], -begins[by_place])

    def _continues(self, ids: np.ndarray, places: np.ndarray, allowed: Allowed) -> np.ndarray:
        """Whether each of the ids [n] is allowed at its byte of the text `places` [n]: bool [n]."""
        found = np.zeros(len(ids), bool)
        for place in np.unique(places).tolist():
            here = places == place
            found[here] = np.isin(ids[here], allowed(place))
        return found

    def _from(self, byte: int) -> np.ndarray:
        """Ids of the tokens that can hold the text from this byte on."""
        if byte not in self._next:
            rest = (self.text[byte : byte + size] for size in self._sizes)
            self._next[byte] = self._ids(rest, len(self.text) - byte, self._leaving.get(byte, []))
        return self._next[byte]

    def _up_to(self, byte: int) -> np.ndarray:
        """Ids of the tokens that can hold the text just before this byte."""
        if byte not in self._before:
            parts = (self.text[max(byte - size, 0) : byte] for size in self._sizes)
            self._before[byte] = self._ids(parts, byte, self._entering.get(byte, []))
        return self._before[byte]

    def _ids(self, parts: Iterable[bytes], most: int, others: list[int]) -> np.ndarray:
        """The tokens among parts of up to `most` bytes, and others."""
        inside = {
            self._tokens[part]
            for part, size in zip(parts, self._sizes, strict=True)
            if size <= most and part in self._tokens
        }
        return np.array([*inside, *others], np.int64)
