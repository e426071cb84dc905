"""Files to documents: separators, columns, rows without text."""

import json
import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import expect_error
from nasty import write_nested

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.preparation import sources
from gpt2_ddp.preparation.sources import divide, scan, without_line_breaks


def config(source: Path, **changes) -> PrepareConfig:
    return PrepareConfig.model_validate({"source": str(source)} | changes)


def texts(source: Path, **changes) -> list[str]:
    return [piece.text for piece in scan(config(source, **changes)).pieces()]


@pytest.mark.parametrize("separator", ["|", "<|e|>", "aab"])
def test_splitting_a_stream_is_splitting_its_text(separator, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 20)
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choice(["a", "b", "<|e", "|>", separator, "x" * 9, "y" * 50]) for _ in range(40))
        blocks, at = [], 0
        while at < len(text):
            blocks.append(text[at : at + draw.randint(1, 30)])
            at += len(blocks[-1])
        expected = text.removesuffix(separator).split(separator)
        assert ["".join(document) for document in divide(blocks, separator)] == expected
        assert len([None for _ in divide(blocks, separator)]) == len(expected)  # none of them taken


def test_line_breaks_around_a_separator_belong_to_it():
    blocks = ["\n", "\r", "\n", "a\n", "\n", "b\n", "\r\n", "\n"]
    assert "".join(without_line_breaks(blocks)) == "a\n\nb"
    assert "".join(without_line_breaks(["\n\n"])) == ""


def test_a_separator_divides_files_lines_and_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 10)
    text = "\n\nOnce upon a time.\n<|endoftext|>\n\n\nOne day,\n\na dog.\n<|endoftext|>\n"
    (tmp_path / "stories.txt").write_text(text)
    (tmp_path / "stories.jsonl").write_text(json.dumps({"text": text}) + "\n")
    pa.parquet.write_table(pa.table({"text": [text]}), tmp_path / "stories.parquet")
    for name in ("stories.txt", "stories.jsonl", "stories.parquet"):
        stories = texts(tmp_path / name, document_separator="<|endoftext|>")
        assert stories == ["Once upon a time.", "One day,\n\na dog."], name
        seen = scan(config(tmp_path / name))
        assert [piece.text for piece in seen.pieces()] == [text]
        assert seen.stats.end_of_text == 2


def test_lines_end_where_python_ends_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 3)
    (tmp_path / "text").write_bytes(b"one\r\ntwo\rthree\n\n\r\nfour\x0c\x0b\xc2\x85four\r")
    assert texts(tmp_path / "text", documents="line") == ["one", "two", "three", "four\x0c\x0b\x85four"]


def test_a_column_may_be_inside_another(tmp_path):
    write_nested(tmp_path)
    for name in ("a.jsonl", "b.parquet"):
        seen = scan(config(tmp_path / name, column="meta.text"))
        assert [piece.text for piece in seen.pieces()] == ["inside one", "inside"]
        assert (seen.stats.rows, seen.stats.without_text.count) == (3, 1)
        [where] = seen.stats.without_text.where
        assert where.endswith({"a.jsonl": "a.jsonl, line 2", "b.parquet": "b.parquet, row 2"}[name])
        expect_error(r"column = text: none of 3 rows has text there; .* has id, meta\.text$", texts, tmp_path / name)
        expect_error(r"column = id: .* holds int, not text", texts, tmp_path / name, column="id")
    (tmp_path / "dotted.jsonl").write_text('{"meta.text": "by its name", "meta": {"text": "inside"}}\n')
    assert texts(tmp_path / "dotted.jsonl", column="meta.text") == ["by its name"]
    pa.parquet.write_table(pa.table({"meta.text": ["by its name"]}), tmp_path / "dotted.parquet")
    assert texts(tmp_path / "dotted.parquet", column="meta.text") == ["by its name"]


def test_rows_without_text_are_counted_and_a_column_that_is_not_there_is_found_early(tmp_path):
    rows = [{"body": "x"}] * (sources.MANY - 1)
    (tmp_path / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "here"}]))
    assert texts(tmp_path / "late.jsonl") == ["here"]
    (tmp_path / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]) + "not JSON")
    expect_error(r"column = text: none of 1,000 rows .*none\.jsonl, line 1, has body", texts, tmp_path / "none.jsonl")
    (tmp_path / "null.jsonl").write_text('{"text": null}\n' * 1500 + '{"text": "here"}\n')
    assert texts(tmp_path / "null.jsonl") == ["here"]


def test_parquet_text_that_is_not_utf8_is_named(tmp_path):
    column = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pa.parquet.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
    expect_error(r"x\.parquet: holds text after row 0 that is not UTF-8", texts, tmp_path / "x.parquet")


@pytest.mark.parametrize("changes", [{}, {"documents": "line"}, {"document_separator": "<|endoftext|>"}])
def test_a_document_of_any_length_takes_little_memory(tmp_path, changes):
    (tmp_path / "long.txt").write_text("a long line of words " * 2_000_000)
    tracemalloc.start()
    characters = sum(len(piece.text) for piece in scan(config(tmp_path / "long.txt", **changes)).pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters == 42_000_000
    assert peak < 20e6
