"""Reading documents: every kind of file, separators, columns, cut into pieces, and the Hub."""

import http.server
import io
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import SCRIPTS, expect_error, last_of_each
from nasty import CL100K_PATTERN, config, library_texts, pieces, texts, write_nested

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.preparation import source_files, sources
from gpt2_ddp.preparation.sources import read_pieces, scan

PREPARE_DATA = [sys.executable, str(SCRIPTS / "prepare_data.py")]


def test_files_that_are_no_text_or_table_do_not_stop_the_others(tmp_path):
    bad = {
        "package.json": '{\n"name": "x"}',
        "line.json": '{"name": "x"}',
        "numbers.json": "[1, 2]",
        "broken.jsonl": '{"text": "x"}\n{"text": \n',
        "ragged.csv": "id,text\n0,one, two\n",
        "open.csv": 'id,text\n0,"one\n',
        "other.tsv": "id\tbody\n0\tone\n",
        "deep.jsonl": "[" * 100_000,
    }
    for name, content in bad.items():
        (tmp_path / name).write_text(content)
        expect_error(name, scan, config(tmp_path / name))
    (tmp_path / "words.txt").write_text("words")
    assert {Path(line.split()[0]).name for line in scan(config(tmp_path)).left_out} == {*bad}
    assert texts(tmp_path) == ["words"]


WRONG_ROWS = {
    "string.jsonl": (
        '{"text": "a"}\n\n"hello"\n',
        r'line 3 has a text instead of an object with columns: "hello"',
    ),
    "list.jsonl": ('{"text": "a"}\n[1, 2]\n', r"line 2 has a list instead of an object"),
    "quote.jsonl": (
        '{"text": "a"}\n' * 700 + '{"text": "b}\n',
        r'line 701, column 12: .*: "text": "b}|{"text": "b}',
    ),
    "pretty.json": (
        '{\n"text": "a"\n}\n',
        r"line 2, column 1: .*; write each object in one line, or all as one array",
    ),
    "array.json": ('[\n{"text": "a"},\n{"text": "b",}\n]', r"line 3, column 14?: .*b"),
    "digits.jsonl": (
        '{"text": "a", "id": ' + "9" * 5000 + "}\n",
        r"line 1: a number has too many digits; correct",
    ),
    "deep.jsonl": ('{"text": "a"}\n' + "[" * 100_000, r"line 2: is nested too deeply; correct"),
    "chat.jsonl": (
        '{"messages": [{"role": "user", "content": "hi"}]}\n',
        r"has chats, not text, in messages",
    ),
    "turns.jsonl": ('{"text": [{"from": "human", "value": "hi"}]}\n', r"has chats, not text"),
    "number.jsonl": ('{"text": 7}\n', r"has a number in column text, not text"),
    "flat.jsonl": (
        '{"text": "a"}\n',
        r"has no text in column body, only in text; choose another --column",
    ),
    "twice.csv": ("text,text\na,b\n", r"column text is named 2 times"),
    "more.csv": ("id,text\n1,a, b\n", r"line 2 has 3 fields, the first line has 2; put fields"),
    "open.csv": ('id,text\n1,a\n2,"b\n', r"line \d: .*; is a quotation mark missing"),
    "lines.tsv": (
        "id\ttext\n1\ta\nb\n",
        r"line 3 has 1 of 2 fields; a field of TSV has no line break",
    ),
    "tab.tsv": (
        "id\ttext\n1\ta\tb\n",
        r"line 2 has 3 fields, the first line has 2; a text has a tab",
    ),
}
"""Tables, and the place and the kind of what is wrong."""


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_named_by_its_line(tmp_path, name):
    content, words = WRONG_ROWS[name]
    (tmp_path / name).write_text(content)
    expect_error(
        f"{name}: .*(?:{words})",
        scan,
        config(tmp_path / name, column="body" if name[0] == "f" else "text"),
    )


def test_a_wrong_row_after_the_checked_ones_is_named_by_its_line_too(tmp_path, monkeypatch):
    """Of a file in parts: its own line, not that of the part."""
    for module in (source_files, sources):
        monkeypatch.setattr(module, "BLOCK", 1000)
    file = tmp_path / "late.jsonl"
    for row, words in (
        ('{"text": "b}', "column 13: "),
        ('{"text": 7}', "column text has a number"),
        ("7", "a number"),
    ):
        file.write_text('{"text": "a"}\n' * 5000 + f"{row}\n" + '{"text": "a"}\n' * 500)
        assert len(scan(config(file)).parts) > 5
        expect_error(f"late.jsonl: cannot be read .line 5,001\\b.*{words}", texts, file)


READ = {
    "plain.tsv": ('id\ttext\n1\t"a\n2\tb\n3\tc"\n', ['"a', "b", 'c"'], ""),
    "marks.tsv": ('id\ttext\n1\t"a"\n', ['"a"'], "texts keep their quotation marks, as in TSV"),
    "quoted.tsv": ('"id"\t"text"\n"1"\t"a\nb"\n', ["a\nb"], ""),
    "semicolons.csv": (
        'id;text\n1;"a; b"\n',
        ["a; b"],
        "semicolons are read as the marks between fields",
    ),
    "tabs.csv": ('id\ttext\n1\t"a\nb"\n', ["a\nb"], "tabs are read"),
    "usual.csv": ("text,a;b\nx;y,1\n", ["x;y"], ""),
    "mac.csv": ("id,text\r1,a\r2,b\r", ["a", "b"], ""),
    "mac.jsonl": ('{"text": "a"}\r{"text": "b"}\r', ["a", "b"], ""),
    "joined.jsonl": ('\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n', ["a", "b"], ""),
    "short.csv": ("id,text\n1\n\n2,b\n", ["b"], ""),
    "page.html": (
        "<html><p>a</p></html>",
        ["<html><p>a</p></html>"],
        "HTML, whose markup becomes text",
    ),
    "feed.xml": ('<?xml version="1.0"?><a/>', ['<?xml version="1.0"?><a/>'], "XML, whose markup"),
    "wiki.txt": ("<mediawiki xml:lang=en>", ["<mediawiki xml:lang=en>"], "XML, whose markup"),
    "page.xhtml": (
        '<?xml version="1.0"?>\n<html>',
        ['<?xml version="1.0"?>\n<html>'],
        "HTML, whose markup",
    ),
    "late.md": ("see <html>", ["see <html>"], ""),
    "rich.doc": (r"{\rtf1 a}", [r"{\rtf1 a}"], "RTF, whose markup"),
    "book.ipynb": ('{\n "cells": []}', ['{\n "cells": []}'], "Jupyter notebooks, whose markup"),
}
"""Files, the documents that they are, and the note."""


@pytest.mark.parametrize("name", READ)
def test_what_is_read_in_an_unusual_way_has_a_note(tmp_path, name):
    content, documents, note = READ[name]
    (tmp_path / name).write_text(content, newline="")
    assert texts(tmp_path / name) == documents
    notes = scan(config(tmp_path / name)).notes
    assert [note in text for text in notes] == [True] * bool(note), notes


def test_a_note_of_many_files_is_one(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.html").write_text("<html>")
    (tmp_path / "a.csv").write_text("text;id\na;1\n")
    notes = scan(config(tmp_path)).notes
    assert [note.partition(":")[0] for note in notes] == [
        f"9 files, such as {tmp_path}/0.html",
        f"{tmp_path}/a.csv",
    ]


def test_separators_and_empty_documents_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("one|two|three")
    (tmp_path / "b.jsonl").write_text('{"text": "four|five"}\n{"text": ""}\n{"text": null}\n')
    counts = Counter()
    asked = config(tmp_path, document_separator="|")
    read = [piece.text for piece in read_pieces(asked, scan(asked).parts, counts)]
    assert (read, counts["separators"]) == (["one", "two", "three", "four", "five"], 3)
    counts = Counter()
    asked = config(tmp_path)
    assert len([*read_pieces(asked, scan(asked).parts, counts)]) == 2
    assert (counts["documents"], counts["empty"]) == (2, 2)


def test_a_mark_of_byte_order_is_left_out_at_the_beginning_alone(tmp_path, monkeypatch):
    """In a part of a file as in the whole."""
    (tmp_path / "a.txt").write_text("\n".join(["\ufefftext"] * 999))
    whole = texts(tmp_path, document_separator="\n")
    for module in (source_files, sources):
        monkeypatch.setattr(module, "BLOCK", 1000)
    assert len(scan(config(tmp_path, document_separator="\n")).parts) > 5
    assert texts(tmp_path, document_separator="\n") == whole == ["text", *["\ufefftext"] * 998]


def test_what_a_source_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    for alone in ("stdlib", "hub:owner/name"):
        expect_error(
            f"^source = {alone}: cannot be read with others", scan, config(["a.txt", alone])
        )
    for field in ("split", "subset", "revision"):
        expect_error(f"^{field} = x: has no effect on a.txt", scan, config("a.txt", **{field: "x"}))
    assert scan(config("a.txt", column="body")).notes == [
        "no file is a table, so --column body has no effect"
    ]


def test_settings_that_have_no_effect_or_no_content_are_refused():
    expect_error(
        "^vocab_size = 999: has an effect with --tokenizer bpe only",
        config,
        "a",
        vocab_size=999,
        tokenizer="x",
    )
    for source in ("", ["a", ""], []):
        expect_error("^source = ", config, source)


def test_a_split_that_was_not_saved_is_named(tmp_path):
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        tmp_path / "saved"
    )
    expect_error("^split = test: .* has only train", scan, config(tmp_path / "saved", split="test"))
    expect_error("^subset = x: has no effect", scan, config(tmp_path / "saved", subset="x"))


@pytest.mark.parametrize("state", ["{", "[]", '{"_data_files": [{"filename": "../../no"}]}'])
def test_a_saved_dataset_that_is_damaged(tmp_path, state):
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text(state)
    expect_error(
        "^source = .*saved: cannot be read as a folder of save_to_disk",
        scan,
        config(tmp_path / "saved"),
    )


def test_broken_text_becomes_replacement_characters(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") + b"x" * 9999)
    (tmp_path / "surrogate.jsonl").write_text('{"text": "lone \\ud800"}\n')
    assert texts(tmp_path) == ["\ufffd" + "x" * 9999, "lone \ufffd"]


def test_the_first_documents(tmp_path):
    """Empty ones count."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(
            f'{{"text": "1{name}"}}\n{{"text": ""}}\n{{"text": "3{name}"}}\n'
        )
    assert [texts(tmp_path, max_documents=most) for most in (2, 4)] == [["1a"], ["1a", "3a", "1b"]]


@pytest.mark.parametrize("pattern", ["gpt2", CL100K_PATTERN])
def test_pieces_of_a_document_encode_as_the_whole(tmp_path, monkeypatch, pattern):
    library = library_texts(15)
    library += [
        "(word)\n" * 300,
        "word \n" * 100 + "a b",
        "words  of text! " * 100,
        "漢字、仮名。\n" * 300,
    ]
    monkeypatch.setattr(sources, "PIECE", 200)
    monkeypatch.setattr(sources, "LONGEST_PIECE", 50_000)
    tokenizer = load_tokenizer("gpt2")
    if pattern != "gpt2":
        ranks = tokenizer.tokens | {b")\n": 50256}  # a token that GPT-2's pattern cannot give
        tables = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 50257}}
        tokenizer = Tokenizer("x", tables | {"pat_str": pattern})
    for text in library:
        (tmp_path / "text").write_bytes(text.encode())
        found = [*pieces(tmp_path / "text")]
        assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
        assert "".join(piece.text for piece in found) == text
        assert max(len(piece.text) for piece in found) < 2000
        encoded = np.concatenate([tokenizer.encode(piece.text) for piece in found])
        np.testing.assert_array_equal(encoded, tokenizer.encode(text))


def test_text_without_a_place_to_cut_is_cut_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 100)
    monkeypatch.setattr(sources, "LONGEST_PIECE", 1000)
    (tmp_path / "text").write_text("a" * 3500)
    assert [len(piece.text) for piece in pieces(tmp_path / "text")] == [1000, 1000, 1000, 500]


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a stream of one parquet file, of the dataset `owner/name`, needs."""

    protocol_version = "HTTP/1.1"
    file = "train-00000-of-00001.parquet"
    texts = tuple(f"document {number} of the hub" for number in range(300))

    @cached_property
    def data(self):
        buffer = io.BytesIO()
        pa.parquet.write_table(pa.table({"body": self.texts}), buffer)  # imports pandas
        return buffer.getvalue()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if "/tree/" in path:
            self.answer(
                json.dumps(
                    [{"type": "file", "path": self.file, "size": len(self.data), "oid": "b" * 40}]
                )
            )
        elif path.startswith("/api/datasets/owner/name"):
            self.answer(
                json.dumps(
                    {"id": "owner/name", "sha": "a" * 40, "siblings": [{"rfilename": self.file}]}
                )
            )
        elif path.endswith(self.file):
            first, _, last = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
            self.answer(self.data[int(first) : int(last or len(self.data)) + 1], 206)
        else:
            self.answer(
                "",
                404,
                {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"},
            )

    do_HEAD = do_GET

    def answer(self, body, code=200, headers=None):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in {
            "Content-Length": str(len(body)),
            "X-Repo-Commit": "a" * 40,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *arguments):
        pass


def prepare_with_hub(endpoint, folder, *arguments):
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")}
    arguments = (
        "--source",
        "hub:owner/name",
        "--tokenizer",
        "gpt2",
        "--output",
        str(folder / "out"),
        *arguments,
    )
    words = [*PREPARE_DATA, *last_of_each(arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


@contextmanager
def served(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def hub():
    with served(Hub) as endpoint:
        yield endpoint


@pytest.mark.slow
def test_hub_dataset(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for flag, value, source in (
        ("--source", "hub:owner/other", "owner/other"),
        ("--column", "text", "owner/name"),
    ):
        result = prepare_with_hub(hub, tmp_path, flag, value)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False)
        assert f"error: source = hub:{source}: " in result.stderr
    result = prepare_with_hub(hub, tmp_path, "--column", "body", "--val_fraction", "0")
    assert result.returncode == 0, result.stderr
    stream = TokenStream(tmp_path / "out", read_manifest(tmp_path / "out"), "train")
    text = load_tokenizer("gpt2").decode(stream.read(np.array([0]), len(stream))[0])
    assert text.split("<|endoftext|>") == ["", *Hub.texts]


class BusyHub(http.server.BaseHTTPRequestHandler):
    """Asks everybody to try again."""

    def do_GET(self):
        self.asked.append(self.path)
        self.send_error(503)

    do_HEAD = do_GET


@pytest.mark.slow
def test_hub_without_a_network_is_asked_once_at_most(tmp_path, monkeypatch):
    for offline in (0, 1):
        monkeypatch.setenv("HF_HUB_OFFLINE", str(offline))
        BusyHub.asked = []
        with served(BusyHub) as endpoint:
            result = prepare_with_hub(endpoint, tmp_path)
        assert sum("owner/name" in path for path in BusyHub.asked) == 1 - offline
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert line.startswith("error: source = hub:owner/name: ")


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet"])
def test_a_column_may_be_inside_another(tmp_path, name):
    file = tmp_path / name
    write_nested(tmp_path)
    assert texts(file, column="meta.text") == ["inside one", "inside"]
    for column in ("text", "id"):
        expect_error(f"^source = .*{file.name}: ", texts, file, column=column)


def test_a_column_whose_name_has_a_dot(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"meta.text": "by its name", "meta": {"text": "inside"}}\n')
    pa.parquet.write_table(pa.table({"meta.text": ["by its name"]}), tmp_path / "b.parquet")
    assert texts(tmp_path, column="meta.text") == ["by its name"] * 2


def test_the_first_rows_show_whether_a_table_has_the_column(tmp_path):
    rows = '{"body": "x"}\n' * (sources.CHECKED - 1)
    (tmp_path / "late.jsonl").write_text(rows + '{"text": "here"}\n')
    (tmp_path / "none.jsonl").write_text(rows * 2 + "not JSON")
    assert texts(tmp_path / "late.jsonl") == ["here"]
    expect_error(
        "none.jsonl: has no text in column text, only in body", texts, tmp_path / "none.jsonl"
    )
    for bad in ('{"text": ', "7", '{"text": 7}'):
        (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' * 2000 + bad)
        expect_error("^source = .*bad.jsonl: ", texts, tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    "changes", [{}, {"document_separator": "\n"}, {"document_separator": "<|endoftext|>"}]
)
def test_a_document_of_any_length_takes_little_memory(tmp_path, changes):
    (tmp_path / "long.txt").write_text("a long line of words " * 2_000_000)
    tracemalloc.start()
    characters = sum(len(piece.text) for piece in pieces(tmp_path / "long.txt", **changes))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters == 42_000_000
    assert peak < 20e6


def test_row_groups_are_read_one_by_one(tmp_path):
    table = pa.table({"text": [random.Random(row).randbytes(50_000).hex() for row in range(200)]})
    pyarrow.parquet.write_table(
        table, tmp_path / "x.parquet", row_group_size=10, compression="none"
    )
    del table
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() for _ in pieces(tmp_path / "x.parquet"))
    assert most - before < 8e6  # of 20 MB
