"""What preparing says of a source when it ends."""

import json
from pathlib import Path

from nasty import write_nasty

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import read_manifest, write_manifest
from gpt2_ddp.data.prepare import prepare


def account_of(printed: str, folder: Path) -> list[str]:
    """The lines of the account, with names instead of paths."""
    lines = printed.replace(f"{folder}/", "").splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith("  ")]


def test_the_account_says_what_became_of_every_file(tmp_path, capsys):
    source = write_nasty(tmp_path / "texts")
    values = {"source": str(source), "output": str(tmp_path / "out"), "tokenizer": "gpt2", "encoding": "cp1252"}
    config = PrepareConfig.model_validate(values | {"workers": 1})
    manifest = prepare(config)
    printed = capsys.readouterr().out
    (files, left_out, undecodable, documents, without_text, text, tokens, note) = account_of(printed, source)
    assert files == "files 19 (12 utf-8, 2 cp1252, 1 parquet, 1 utf-16-le, 2 utf-16, 1 utf-32)"
    assert left_out.startswith(
        "left out 7 files (archive.txt is not text; image.txt is not text; late.txt is not text; ...)"
    )
    assert undecodable == "undecodable 0 bytes"
    assert documents == "documents 21"
    assert without_text == "without text 7 rows (rows.jsonl, line 2; rows.jsonl, line 3; rows.jsonl, line 4; ...) of 13"
    train, val = manifest.tokens("train"), manifest.tokens("val")
    saved = manifest.recipe["account"]
    assert text == f"text {saved['characters']:,} characters, {saved['bytes']:,} bytes in UTF-8"
    assert tokens == f"tokens {train:,} train, {val:,} val; {saved['bytes'] / (train + val):.2f} bytes per token"
    assert note.startswith("note: <|endoftext|> stands in the text, 1 time, and")
    prepare(config)
    again = capsys.readouterr().out
    assert "is already prepared" in again
    assert account_of(again, source) == account_of(printed, source)


def test_a_folder_of_an_older_release_is_still_prepared(tmp_path, capsys):
    (tmp_path / "text").write_text("some text " * 100)
    values = {"source": str(tmp_path / "text"), "output": str(tmp_path / "out"), "tokenizer": "gpt2", "workers": 1}
    config = PrepareConfig.model_validate(values)
    manifest = prepare(config)
    for field in ("encoding", "on_bad_file", "document_separator", "account"):
        del manifest.recipe[field]
    write_manifest(tmp_path / "out", manifest)
    capsys.readouterr()
    assert prepare(config) == manifest == read_manifest(tmp_path / "out")
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert "account" not in json.loads((tmp_path / "out" / "manifest.json").read_text())["recipe"]


def test_a_separator_that_divides_nothing_is_noticed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\ntwo")
    for separator, said in (
        (r"\n", [r"note: \n (document_separator) stands nowhere between two documents"]),
        ("\n", []),
    ):
        values = {"source": str(tmp_path / "a.txt"), "output": str(tmp_path / str(len(said))), "tokenizer": "bytes"}
        values["val_fraction"] = 0
        prepare(PrepareConfig.model_validate(values | {"workers": 1, "document_separator": separator}))
        assert account_of(capsys.readouterr().out, tmp_path)[6:] == said
