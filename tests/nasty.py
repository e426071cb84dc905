"""A folder of files such as people have, for the tests of
what text goes in, and for the table of docs/data.md."""

import bz2
import gzip
import json
import random
from collections import Counter
from itertools import islice

import pyarrow as pa
import pyarrow.parquet

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.preparation.source_files import library_files
from gpt2_ddp.preparation.sources import read_pieces, scan

ALPHABET = [*"aZ \n\t'é漢\u00a0\u30001!😀\u200b\0\x1c\x85ß_\u2028", "  ", "\r\n", "'s", "e\u0301"]
PROSE = "Le café de la gare était fermé à dix heures. Où aller ?\n" * 20
RUSSIAN = "Съешь ещё этих мягких французских булок, да выпей чаю.\n" * 20
EMOJI = "👩‍👩‍👧 e\u0301 漢字 \U0001f600\u2028\x0c end"
LONG_LINE = "a long line of words " * 60_000
ROWS = b"""{"text": "row one"}
{"text": null}
{"other": 1}
{"text": ""}
{"text": "row five"}
"""
NESTED = """{"id": 1, "meta": {"text": "inside one"}}
{"id": 2, "meta": null}
{"id": 3, "meta": {"text": "inside"}}
"""
HTML = "<!DOCTYPE html>\n<html lang=en><p>A page.</p></html>\n"
SKIPPED = bytes.fromhex("502a4d18 03000000") + b"any"  # a frame of zstd that readers skip
NOISE = random.Random(0).randbytes(20_000)


def zstd(text):
    """A frame of zstd."""
    return pa.Codec("zstd").compress(text.encode(), asbytes=True)


DECODABLE = {
    "utf8.txt": (PROSE.encode(), PROSE),
    "bom.txt": (PROSE.encode("utf-8-sig"), PROSE),
    "russian.txt": (RUSSIAN.encode(), RUSSIAN),
    "crlf.txt": (b"one\r\ntwo\r\n\r\nthree\rfour\n", "one\r\ntwo\r\n\r\nthree\rfour\n"),
    "emoji.txt": (EMOJI.encode(), EMOJI),
    "long-line.txt": (LONG_LINE.encode(), LONG_LINE),
    "short.txt": (b"x" * 300, "x" * 300),
    "n" * 247 + ".txt": (b"a file of a long name", "a file of a long name"),
    "end-of-text.txt": (b"a story<|endoftext|>another", "a story<|endoftext|>another"),
    "text.txt.gz": (gzip.compress(PROSE.encode(), mtime=0), PROSE),
    "members.txt.gz": (
        gzip.compress(b"one ", mtime=0) + gzip.compress(b"two", mtime=0) + bytes(512),
        "one two",
    ),
    "streams.txt.bz2": (bz2.compress(b"one ") + bz2.compress(b"two"), "one two"),
    "frames.txt.zst": (zstd("one ") + SKIPPED + zstd("two") + SKIPPED, "one two"),
    "nul.txt": (b"x" * 1000 + bytes(9), "x" * 1000 + "\0" * 9),
    "mac.txt": (b"one\rtwo\r", "one\rtwo\r"),
    "page.html": (HTML.encode(), HTML),
}
"""Files with the text that they hold."""
NOT_TEXT = {
    "image.txt": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + NOISE,
    "program.txt": b"\x7fELF\x02\x01\x01" + bytes(9) + NOISE,
    "utf32.txt": PROSE.encode("utf-32"),
    "archive.txt": b"PK\x03\x04\x14\0\0\0\x08\0" + NOISE,
    "utf16.txt": RUSSIAN.encode("utf-16"),
    "utf16-unmarked.txt": PROSE.encode("utf-16-le"),
    "latin.txt": PROSE.encode("latin-1"),
    "cp1252.txt": "“Où ?” – 5 €\n".encode("cp1252") * 50,
    "late.txt": b"text at first\n" * 1000 + NOISE,
    "rest.txt.gz": gzip.compress(b"text", mtime=0) + b"others warn of this",
    "wide.txt.zst": bytes.fromhex("28b52ffd 00 a0") + (4 * 8 + 1).to_bytes(3, "little") + b"text",
    "pointer.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"a" * 64
    + b"\nsize 9999\n",
    "pointer.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"a" * 64
    + b"\nsize 9999\n",
    "paper.txt": b"%PDF-1.4\n" + b"1 0 obj <</Length 9>>\nstream\nendstream\n" * 9,
    "tree.txt": bytes(257) + b"ustar" + b"text\n" * 9999,
    "torn.txt.gz": gzip.compress(NOISE, mtime=0)[:100],
    "torn.parquet": b"PAR1 and no more",
}
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
)
CL100K_PATTERN += r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"


def config(source, **changes):
    return PrepareConfig.model_validate(
        {"source": source if isinstance(source, list) else str(source)} | changes
    )


def pieces(source, **changes):
    asked = config(source, **changes)
    return read_pieces(asked, scan(asked).parts, Counter())


def texts(source, **changes):
    """The documents, each whole."""
    documents = []
    for text, first, _ in pieces(source, **changes):
        documents[-1:] = [*documents[-1:], text] if first else [documents[-1] + text]
    return documents


def write_nasty(folder):
    """All kinds of files."""
    folder.mkdir()
    files = {name: data for name, (data, _) in DECODABLE.items()} | NOT_TEXT
    files |= {
        "empty.txt": b"",
        "rows.jsonl": b"\xef\xbb\xbf" + ROWS,
        "rows.jsonl.gz": gzip.compress(ROWS),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    pa.parquet.write_table(pa.table({"text": ["a", None, "b"]}), folder / "rows.parquet")
    return folder


def write_nested(folder):
    """Rows whose text is inside a column."""
    (folder / "a.jsonl").write_text(NESTED)
    pa.parquet.write_table(
        pa.Table.from_pylist([*map(json.loads, NESTED.splitlines())]), folder / "b.parquet"
    )


def difficult_texts():
    rng = random.Random(0)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randint(0, 40))) for _ in range(3000)]
    texts += [rng.randbytes(rng.randint(0, 200)).decode("utf-8", "replace") for _ in range(500)]
    texts += [rng.randbytes(rng.randint(0, 200)).decode("latin-1") for _ in range(500)]
    return [*texts, "", " " * 1000, "\n" * 1000, "x" + " " * 1000 + "y", "a" * 5000]


def library_texts(count):
    """The first files of Python's standard library, as a
    preparation reads them; empty ones are left out."""
    texts = (path.read_bytes().decode("utf-8", "replace") for path in library_files())
    return list(islice((text for text in texts if text), count))
