"""What preparing says of a source when it ends."""

from pathlib import Path

from nasty import write_nasty

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.preparation.prepare import prepare


def config(source: Path, output: Path, **changes: object) -> PrepareConfig:
    values = {"source": str(source), "output": str(output), "tokenizer": "gpt2", "workers": 1}
    return PrepareConfig.model_validate(values | changes)


def account_of(printed: str, folder: Path) -> list[str]:
    lines = printed.replace(f"{folder}/", "").splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith("  ")]


def test_the_account_says_what_became_of_every_file(tmp_path, capsys):
    source = write_nasty(tmp_path / "texts")
    asked = config(source, tmp_path / "out", encoding="cp1252")
    manifest = prepare(asked)
    printed = capsys.readouterr().out
    (files, left_out, undecodable, documents, without_text, text, tokens, note) = account_of(printed, source)
    assert files == "files 19 (12 utf-8, 2 cp1252, 1 parquet, 1 utf-16-le, 2 utf-16, 1 utf-32)"
    left = "archive.txt is not text; image.txt is not text; late.txt is not text; ..."
    assert left_out.startswith(f"left out 7 files ({left})")
    assert undecodable == "undecodable 0 bytes"
    assert documents == "documents 21"
    assert without_text == "without text 7 rows (rows.jsonl, line 2; rows.jsonl, line 3; rows.jsonl, line 4; ...) of 13"
    train, val = manifest.tokens("train"), manifest.tokens("val")
    saved = manifest.recipe["account"]
    assert text == f"text {saved['characters']:,} characters, {saved['bytes']:,} bytes in UTF-8"
    assert tokens == f"tokens {train:,} train, {val:,} val; {saved['bytes'] / (train + val):.2f} bytes per token"
    assert note.startswith("note: <|endoftext|> stands in the text, 1 time, and")
    prepare(asked)
    again = capsys.readouterr().out
    assert "is already prepared" in again
    assert account_of(again, source) == account_of(printed, source)


def test_a_separator_that_divides_nothing_is_noticed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\ntwo")
    note = r"note: \n (document_separator) stands nowhere between two documents"
    for separator, said in ((r"\n", [note]), ("\n", [])):
        changes = {"tokenizer": "bytes", "val_fraction": 0, "document_separator": separator}
        prepare(config(tmp_path / "a.txt", tmp_path / str(len(said)), **changes))
        assert account_of(capsys.readouterr().out, tmp_path)[6:] == said
