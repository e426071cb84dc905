"""Reading documents: from every kind of file, cut into pieces, and from the Hub."""

import gzip
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tiktoken
from nasty import CL100K_PATTERN, library_texts

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation import sources
from gpt2_ddp.preparation.sources import scan

PREPARE_DATA = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "prepare_data.py")]


def config(source: Path, **changes) -> PrepareConfig:
    return PrepareConfig.model_validate({"source": str(source)} | changes)


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    documents = ["one\r\nline é", "two\n\n  words", "", "漢字\t\u2028😀", "<|endoftext|>", " \n"]
    rows = [{"id": number, "body": text} for number, text in enumerate([*documents, None])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json.zst").write_bytes(pa.Codec("zstd").compress(lines.encode(), asbytes=True))
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    (tmp_path / "e").mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "e" / f"{number}.txt").write_bytes(text.encode())
    for name in ("a.jsonl", "b.jsonl.gz", "c.json.zst", "d.parquet", "e", "e/*.txt", "[a].jsonl"):
        pieces = list(scan(config(tmp_path / name, column="body")).pieces())
        assert [piece.text for piece in pieces] == [text for text in documents if text], name
        assert all(piece.first for piece in pieces)
    everything = list(scan(config(tmp_path, column="body")).pieces())
    assert len(everything) == 5 * 5
    assert len(list(scan(config(tmp_path, column="body", max_documents=4)).pieces())) == 3  # the third is empty


def test_paragraphs(tmp_path):
    (tmp_path / "text").write_bytes(b"one\ntwo\r\n\n \nthree\n\n\nfour\nfive")
    pieces = scan(config(tmp_path / "text", documents="paragraph")).pieces()
    assert [piece.text for piece in pieces] == ["one\ntwo", "three", "four\nfive"]


def test_broken_text_becomes_replacement_characters(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") + b"x" * 9999)
    (tmp_path / "surrogate.jsonl").write_text('{"text": "lone \\ud800"}\n')
    pieces = scan(config(tmp_path)).pieces()
    assert [piece.text for piece in pieces] == ["\ufffd" + "x" * 9999, "lone \ufffd"]


@pytest.mark.parametrize("pattern", ["gpt2", CL100K_PATTERN])
def test_pieces_of_a_document_encode_as_the_whole(tmp_path, monkeypatch, pattern):
    library = library_texts(15)
    library += ["(word)\n" * 300, "word \n" * 100 + "a b", "words  of text! " * 100, "漢字、仮名。\n" * 300]
    monkeypatch.setattr(sources, "PIECE", 200)
    monkeypatch.setattr(sources, "LONGEST_PIECE", 50_000)
    tokenizer = load_tokenizer("gpt2")
    if pattern != "gpt2":
        ranks = tokenizer.encoding._mergeable_ranks | {b")\n": 50256}  # a token that GPT-2's pattern cannot give
        tables = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 50257}}
        tokenizer = Tokenizer("x", tiktoken.Encoding("x", pat_str=pattern, **tables))
    for text in library:
        (tmp_path / "text").write_bytes(text.encode())
        pieces = list(scan(config(tmp_path / "text")).pieces())
        assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert "".join(piece.text for piece in pieces) == text
        assert max(len(piece.text) for piece in pieces) < 2000
        encoded = np.concatenate([tokenizer.encode(piece.text) for piece in pieces])
        np.testing.assert_array_equal(encoded, tokenizer.encode(text))


def test_text_without_a_place_to_cut_is_cut_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 100)
    monkeypatch.setattr(sources, "LONGEST_PIECE", 1000)
    (tmp_path / "text").write_text("a" * 3500)
    assert [len(piece.text) for piece in scan(config(tmp_path / "text")).pieces()] == [1000, 1000, 1000, 500]


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a stream of one parquet file, of the dataset `owner/name`, needs."""

    protocol_version = "HTTP/1.1"
    file = "data/train-00000-of-00001.parquet"
    texts = tuple(f"document {number} of the hub" for number in range(300))
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.table({"body": texts}), buffer)
    data = buffer.getvalue()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        commit = "a" * 40
        entry = {"type": "file", "path": self.file, "size": len(self.data), "oid": "b" * 40}
        if "/tree/" in path:
            inside = path.endswith("/data") or "recursive=true" in query
            self.answer(json.dumps([entry if inside else {"type": "directory", "path": "data", "oid": "c" * 40}]))
        elif path.startswith("/api/datasets/owner/name"):
            self.answer(json.dumps({"id": "owner/name", "sha": commit, "siblings": [{"rfilename": self.file}]}))
        elif path.endswith(self.file):
            first, _, last = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
            self.answer(self.data[int(first) : int(last or len(self.data)) + 1], 206)
        else:
            self.answer("", 404, {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, body: str | bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        body = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": "a" * 40, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *arguments: object) -> None:
        pass


def prepare_with_hub(endpoint: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")}
    arguments = ("--source", "hub:owner/name", "--tokenizer", "gpt2", "--output", str(folder / "out"), *arguments)
    return subprocess.run([*PREPARE_DATA, *arguments], env=environment, capture_output=True, text=True)


@contextmanager
def served(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def hub() -> Iterator[str]:
    with served(Hub) as endpoint:
        yield endpoint


@pytest.mark.slow
def test_hub_dataset(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    no_column = "error: column = text: none of 300 rows has text there; the first, owner/name, row 0, has body"
    no_source = "error: source = hub:owner/other: cannot be read from the Hub"
    for arguments, message in ((("--source", "hub:owner/other"), no_source), (("--column", "text"), no_column)):
        result = prepare_with_hub(hub, tmp_path, *arguments)
        found = result.returncode, message in result.stderr, "Traceback" in result.stderr
        assert found == (2, True, False), result.stderr
    result = prepare_with_hub(hub, tmp_path, "--column", "body", "--val_fraction", "0")
    assert result.returncode == 0, result.stderr
    stream = TokenStream(tmp_path / "out", read_manifest(tmp_path / "out"), "train")
    text = load_tokenizer("gpt2").decode(stream.read(np.array([0]), len(stream))[0])
    assert text.split("<|endoftext|>") == ["", *Hub.texts]


class BusyHub(http.server.BaseHTTPRequestHandler):
    """Asks everybody to try again."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(503)

    do_HEAD = do_GET


@pytest.mark.slow
def test_hub_without_a_network_is_asked_once_at_most(tmp_path, monkeypatch):
    for offline in (0, 1):
        monkeypatch.setenv("HF_HUB_OFFLINE", str(offline))
        monkeypatch.setattr(BusyHub, "asked", [])
        with served(BusyHub) as endpoint:
            result = prepare_with_hub(endpoint, tmp_path)
        assert sum("owner/name" in path for path in BusyHub.asked) == 1 - offline
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert line.startswith("error: source = hub:owner/name: cannot be read from the Hub")


def test_hub_without_a_network():
    with pytest.raises(UserError, match=r"source = hub:owner/name: cannot be read from the Hub .*local"):
        list(scan(PrepareConfig(source="hub:owner/name")).pieces())


def test_suffixes_in_capitals(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"text": "one"}\n')
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    pa.parquet.write_table(pa.Table.from_pylist([{"text": "three"}]), tmp_path / "C.PARQUET")
    (tmp_path / "D.TXT.Gz").write_bytes(gzip.compress(b"four"))
    assert [piece.text for piece in scan(config(tmp_path)).pieces()] == ["one", "two", "three", "four"]
