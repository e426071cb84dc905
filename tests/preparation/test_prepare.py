"""Preparing data: what ends up in the shards, restarts,
the user's mistakes, the account, and shards of others."""

import csv
import dataclasses
import errno
import gzip
import hashlib
import json
import math
import os
import random
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import nasty
import numpy as np
import pyarrow.parquet
import pytest
from commands import expect_error, snapshot
from nasty import NOT_TEXT, library_texts, write_nasty
from ranks import run_ranks
from runs import edit_manifest, said

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import read_manifest, tokenizer_note
from gpt2_ddp.data.shards import TokenStream, verify_shards
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.output import locked_output
from gpt2_ddp.preparation import bpe, encode, progress, sources, split, text_files
from gpt2_ddp.preparation import prepare as prepare_module
from gpt2_ddp.preparation.bpe import suitable_vocab_size
from gpt2_ddp.preparation.prepare import prepare


@pytest.fixture(scope="module")
def library():
    return library_texts(300)


@pytest.fixture
def texts(tmp_path, library):
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    for number, text in enumerate(library):
        (folder / ("below" if number % 2 else "") / f"{number:03d}.txt").write_bytes(
            text[:2000].encode()
        )
    (folder / ".hidden").write_bytes(b"\0")
    return folder


def config(source, output, **changes):
    return nasty.config(
        source, **{"output": str(output), "tokenizer": "bytes", "workers": 1} | changes
    )


def tokens_of(folder, split):
    stream = TokenStream(folder, read_manifest(folder), split)
    return stream.read(np.array([0]), len(stream))[0]


def documents_of(folder, split):
    manifest = read_manifest(folder)
    own = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(own) if own.exists() else manifest.tokenizer)
    tokens = tokens_of(folder, split)
    starts = np.flatnonzero(tokens == tokenizer.eot)
    assert starts[0] == 0  # the end-of-text token comes first
    return [tokenizer.decode(part[1:]) for part in np.split(tokens, starts[1:])]


ROWS = ("a.jsonl", "b.JSONL.GZ", "c.json.zst", "d.json", "e.csv", "f.TSV", "g.parquet", "saved")
OPTIONS = json.loads(r"""{
"lines.txt": {"document_separator": "\n"},
"blank.txt": {"document_separator": "\n\n"},
"stories.txt": {"document_separator": "<|end|>"},
"stories.jsonl": {"document_separator": "<|end|>"},
"g.parquet": {"tokenizer": "gpt2"},
"files": {"tokenizer": "bpe"}
}""")
IN_PARTS = {"a.jsonl", "g.parquet", "lines.txt", "stories.txt", "files"}
ALONE = {"blank.txt": "\n\n\n", "lines.txt": "\r\n", "stories.txt": "\n<|end|>\r\n"}


def documents_for(kind):
    """Random documents that a file of this kind can hold. One is longer than a block."""
    draw = random.Random(0)
    words = ["one", " two", "é", " 漢字", "😀👩\u200d👧", "\t", "'s", ", ", "<|endoftext|>", "\x85"]
    words += (
        []
        if kind in ("lines.txt", "f.TSV")
        else ["\nx"]
        if kind in ALONE
        else ["\n", "\r\n", "\n\n", "\u2028"]
    )
    words = ['"', '""', *words[:5], *words[6:]] if kind == "f.TSV" else words  # instead of a tab
    documents = ["".join(draw.choices(words, k=draw.choice([0, 9, 60]))) for _ in range(150)]
    documents[70] = "".join(draw.choices(words, k=3000))
    return (
        [text.strip("\r\n\t ") or "x" for text in documents]
        if kind in ALONE or "stories" in kind
        else documents
    )


def write_documents(place, kind, documents):
    """Rows without a text are no documents."""
    import datasets  # for most of a second

    rows = [{"id": number, "body": text} for number, text in enumerate([*documents, None])]
    lines = "\r\n".join(map(json.dumps, rows)).encode()
    if kind in ALONE:
        place.write_bytes(ALONE[kind].join(documents).encode())
    elif kind == "files":
        place.mkdir()
        for number, text in enumerate(documents):
            (place / f"{number:03d}.txt").write_bytes(text.encode())
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(place)
    elif kind == "g.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place, row_group_size=7)
    elif kind in ("e.csv", "f.TSV"):
        with place.open("w", newline="", encoding="utf-8") as file:
            options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
            if kind == "e.csv":
                options = {}
            writer = csv.DictWriter(file, rows[0], **options)
            writer.writeheader()
            writer.writerows(rows)
    else:
        content = {
            "a.jsonl": lines,
            "b.JSONL.GZ": gzip.compress(lines),
            "c.json.zst": pyarrow.Codec("zstd").compress(lines, asbytes=True),
            "d.json": json.dumps(rows, indent=1).encode(),
            "stories.jsonl": json.dumps({"body": "<|end|>\n".join(documents)}).encode(),
        }
        place.write_bytes(content[kind])


HASHES = {
    "a.jsonl": "2e2b95e0cd13d601c3d9fd6e9ce272f6b487e0b377f9e5115676aa3c8d8ed87c",
    "lines.txt": "e7acb3262e7cb8a06639001fa0eee10f62767f063ad65e977d339883a45b8393",
}
"""Hashes of manifests, which hold those of the shards, as earlier releases wrote them."""


@pytest.mark.parametrize("kind", [*ROWS, *ALONE, "stories.jsonl", "files"])
def test_documents_in_are_documents_out(tmp_path, monkeypatch, kind):
    """In order, each in the split that its text decides; the
    same from parts of files, and with several workers."""
    documents = documents_for(kind)
    source = tmp_path / kind
    write_documents(source, kind, documents)
    asked = {
        "source": source,
        "column": "body",
        "val_fraction": 0.2,
        "shard_tokens": 5000,
    } | OPTIONS.get(kind, {})
    whole = prepare(config(output=tmp_path / "whole", **asked))
    verify_shards(tmp_path / "whole", whole)
    assert whole.hash == HASHES.get(kind, whole.hash), (
        "a source gives the tokens that it always gave"
    )
    assert {shard.tokens for split in whole.splits.values() for shard in split[:-1]} <= {5000}
    splits = {"train": [], "val": []}
    for text in filter(None, documents):
        unit = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
        splits["val" if unit < 0.2 else "train"].append(text)
    assert {split: documents_of(tmp_path / "whole", split) for split in splits} == splits
    assert whole.recipe["account"]["documents"] == len(documents) - documents.count("")
    for module, name, size in PARTED:
        monkeypatch.setattr(module, name, size)
    parts = config(output=tmp_path / "parts", **asked | {"workers": 2 if kind == "a.jsonl" else 1})
    assert (len(sources.scan(parts).parts) > 5) == (kind in IN_PARTS)
    assert prepare(parts) == whole
    assert not list((tmp_path / "parts").glob(".*.tmp"))


PARTED = [(module, "BLOCK", 1000) for module in (encode, text_files, sources)]
PARTED += [(module, "LARGEST", 4000) for module in (encode, text_files)]


def test_a_bpe_is_trained_and_another_folder_s_is_copied(texts, tmp_path, monkeypatch):
    """Without `vocab_size` the text decides its size, and any that is there will do."""
    # in a second less
    monkeypatch.setattr(bpe, "run_in_worker", lambda function, *given: function(*given))
    first = prepare(config(texts, tmp_path / "first", tokenizer="bpe", vocab_size=300))
    assert first.vocab_size == 300
    monkeypatch.chdir(tmp_path / "first")
    elsewhere = texts.rename(tmp_path / "moved")
    for number, tokenizer in enumerate((str(tmp_path / "first"), "tokenizer.json")):
        again = prepare(config(elsewhere, tmp_path / str(number), tokenizer=tokenizer))
        assert again.hash == first.hash
    found = prepare(config(elsewhere, tmp_path / "second", tokenizer="bpe"))
    trained_on = 0.95 * found.recipe["account"]["bytes"]
    assert found.vocab_size == suitable_vocab_size(trained_on) == 512
    monkeypatch.setattr(prepare_module, "_prepare", None)
    assert prepare(config(elsewhere, tmp_path / "second", tokenizer="bpe")) == found
    assert prepare(config(texts, tmp_path / "first", tokenizer="bpe")) == first
    assert [suitable_vocab_size(size) for size in (1, 10**6, 10**12)] == [512, 1024, 2**15]


def text_of(folder, split):
    """The text of a split, without its documents' beginnings."""
    manifest = read_manifest(folder)
    tokens = tokens_of(folder, split)
    own = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(own) if own.exists() else manifest.tokenizer)
    return tokenizer.decode(tokens[tokens != tokenizer.eot])


def test_few_documents_are_divided_by_bytes(tmp_path, library, monkeypatch):
    """At a line break; the end of a document is none of another."""
    monkeypatch.setattr(encode, "BLOCK", 1000)
    text = "".join(library[:40])
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.txt").write_bytes(text.encode())
    (tmp_path / "few" / "two.txt").touch()
    changes = {"tokenizer": "gpt2", "val_fraction": 0.1, "shard_tokens": 20_000}
    manifest = prepare(config(tmp_path / "few", tmp_path / "out", **changes))
    training, validation = (text_of(tmp_path / "out", split) for split in ("train", "val"))
    assert training + validation == text
    assert training.endswith("\n")
    size = len(text.encode())
    assert 0 <= len(validation.encode()) - round(0.1 * size) < 200, "the last lines of a tenth"
    tokenizer = load_tokenizer("gpt2")
    assert [*tokens_of(tmp_path / "out", "train")] == [tokenizer.eot, *tokenizer.encode(training)]
    assert [*tokens_of(tmp_path / "out", "val")] == [*tokenizer.encode(validation)]
    by_two = prepare(config(tmp_path / "few", tmp_path / "two", **changes, workers=2))
    assert by_two.hash == manifest.hash
    expect_error(
        "source = .*few", prepare, config(tmp_path / "few", tmp_path / "less", val_fraction=1e-9)
    )


CUTS = [
    (["one\ntwo\nthree"], 10, "one\ntwo\n"),
    (["one two three"], 10, "one two"),
    (["onetwothree"], 10, "onetwothre"),
    (["ooé€eee"], 6, "ooé"),  # € has the bytes 4 to 7
    (["one\ntwo", "thr", "ee"], 8, "one\ntwo"),  # the piece `thr` begins in the searched part
    (["one\ntwo", " thr", "ee"], 7, "one\ntwo"),
    (["a\n" + "b" * 40], 40, "a\n" + "b" * 38),  # that line break is too early
]
"""Pieces of a text, the last byte of the training text, and that text."""


@pytest.mark.parametrize(("pieces", "latest", "training"), CUTS)
def test_the_training_text_ends_at_a_break(pieces, latest, training):
    """What follows `latest` does not matter."""
    given = [
        sources.DocumentChunk(text, number == 0, "train") for number, text in enumerate(pieces)
    ]
    cut = split.Cut(latest // 2, latest)
    for after in ("", "\n \n", "é"):
        *before, last = [piece.text for piece in given]
        room = latest - sum(len(text.encode()) for text in before)
        end = len(last.encode()[:room].decode(errors="ignore"))
        changed = [*given[:-1], given[-1]._replace(text=last[: end + 1] + after + last[end + 1 :])]
        made = [*split.divide_pieces(changed, cut)]
        assert "".join(piece.text for piece in made if piece.split == "train") == training
        assert "".join(piece.text for piece in made) == "".join(piece.text for piece in changed)
        assert [piece.first for piece in made] == [True] + [False] * (len(made) - 1)
        assert [piece.split for piece in made] == sorted(piece.split for piece in made)


def test_a_second_preparation_in_one_process_has_its_own_tokenizer(tmp_path, library, monkeypatch):
    """Although the files of both tokenizers have one name."""
    monkeypatch.setattr(bpe, "run_in_worker", lambda function, *given: function(*given))
    for text in ("one two three\n" * 100, library[3]):
        (tmp_path / "text.txt").write_text(text)
        prepare(config(tmp_path / "text.txt", tmp_path / "out", tokenizer="bpe", vocab_size=300))
        assert "".join(text_of(tmp_path / "out", name) for name in ("train", "val")) == text
        shutil.rmtree(tmp_path / "out")


def is_validation(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48 < 0.05


@pytest.mark.parametrize("is_whole", [True, False])
def test_another_validation_text_gives_the_same_tokenizer(tmp_path, library, monkeypatch, is_whole):
    """And the same training shards: neither the merges nor the number of them depend on it. In one
    file it has as many bytes; in documents it is much longer than all of the training text."""
    monkeypatch.setattr(bpe, "run_in_worker", lambda function, *given: function(*given))
    texts = [text[:2000] for text in library]
    training = [text for text in texts if not is_validation(text)]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        if is_whole:
            text = "".join(texts[:150]).encode()
            ending = b"\n" + b"zq xj\n" * (len(text) // 120 - 10) if name == "second" else b""
            (tmp_path / name / "all.txt").write_bytes(text[: len(text) - len(ending)] + ending)
        else:
            numbers = range(5000)
            other = [
                text
                for text in (f"{number} zq xj " * 500 for number in numbers)
                if is_validation(text)
            ]
            validation = [text for text in texts if is_validation(text)]
            if name == "second":
                validation = other
            rows = [
                json.dumps({"text": text}) for text in [*validation[:3], *training, *validation[3:]]
            ]
            (tmp_path / name / "all.jsonl").write_text("\n".join(rows))
        prepare(config(tmp_path / name, tmp_path / f"{name}-out", tokenizer="bpe"))
    first, second = (tmp_path / f"{name}-out" for name in ("first", "second"))
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert np.array_equal(tokens_of(first, "train"), tokens_of(second, "train"))
    assert "zq xj" in text_of(second, "val")
    assert "zq xj" not in text_of(first, "val")


def test_a_bpe_of_the_first_rows_counts_training_text_alone():
    chunks = [
        sources.DocumentChunk("é" * 10, True, name)
        for name in ("val", "train", "val", "train", "train")
    ]
    counts = Counter()
    assert [*bpe._training_texts(chunks, 30, counts)] == ["é" * 10] * 2
    assert counts == {"bytes": 40}


def test_a_folder_of_an_earlier_release_stays(texts, tmp_path, capsys):
    """With a note, if its BPE has seen the validation text."""
    asked = config(texts, tmp_path / "out", tokenizer="bpe", vocab_size=300)
    made = prepare(asked)
    capsys.readouterr()
    assert made.version == 3
    assert not tokenizer_note({"out": made})
    encode.write_manifest(tmp_path / "out", old := dataclasses.replace(made, version=2))
    assert prepare(asked) == old
    assert f"note: an earlier release prepared {tmp_path / 'out'}" in capsys.readouterr().out
    assert old.hash == made.hash
    for recipe in ({"tokenizer": "gpt2"}, {}):
        assert not tokenizer_note({"out": dataclasses.replace(old, recipe=recipe)})
    assert not tokenizer_note(
        {"out": dataclasses.replace(old, splits={"train": old.splits["train"]})}
    )


def test_another_recipe_or_other_files_are_left_alone(texts, tmp_path):
    output = tmp_path / "out"
    prepare(config(texts, output))
    os.truncate(output / "train_000000.bin", 5000)
    (tmp_path / "bins").mkdir()
    (tmp_path / "bins" / "train_000000.bin").write_bytes(b"precious")
    (tmp_path / "file").write_bytes(b"")
    before = snapshot(tmp_path)
    expect_error(
        "output = .*made with val_fraction 0.05;", prepare, config(texts, output, val_fraction=0.1)
    )
    # finished, but not whole any more
    expect_error("shard = .*train_000000.bin", prepare, config(texts, output))
    expect_error("output = .*bins", prepare, config(texts, tmp_path / "bins"))
    expect_error(
        "output = .*file: cannot be written .it is a file.",
        prepare,
        config(texts, tmp_path / "file"),
    )
    assert snapshot(tmp_path) == before


def test_two_at_once(texts, tmp_path):
    found = run_ranks(said, 2, prepare, config(texts, tmp_path / "out"))
    assert sorted("is already prepared" in output for _, output, _ in found) == [False, True]
    verify_shards(tmp_path / "out", read_manifest(tmp_path / "out"))


MISTAKES = [
    ("*.none", "bytes", "source"),
    ("empty.txt", "bytes", "source"),
    ("empty.txt", "bpe", "source"),
    ("words.txt", "gpt5", "tokenizer"),
    ("words.txt", "words.txt", "tokenizer"),
]
"""The source, the tokenizer, and the field of the error."""


@pytest.mark.parametrize(("source", "tokenizer", "field"), MISTAKES)
def test_mistakes_are_named_and_leave_nothing(tmp_path, source, tokenizer, field):
    (tmp_path / "words.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "one/mine").mkdir(parents=True)
    for output in ("new/out", "one", "one/mine"):
        asked = config(tmp_path / source, tmp_path / output, tokenizer=tokenizer, val_fraction=0)
        expect_error(f"^{field} = [^\n]*$", prepare, asked)
    assert not (tmp_path / "new/out").exists()
    assert [*(tmp_path / "one").rglob("*")] == [tmp_path / "one/mine"]


@pytest.mark.parametrize("output", ["words.txt", "words.txt/below"])
def test_an_output_that_cannot_be_a_folder_is_refused_before_any_work(
    tmp_path, monkeypatch, output
):
    (tmp_path / "words.txt").write_text("text")
    monkeypatch.setattr(prepare_module, "_prepare", lambda *_: pytest.fail("it began"))
    asked = config(tmp_path / "words.txt", tmp_path / output)
    expect_error(
        rf"^output = {tmp_path / output}: cannot be written \([^\n]*; name another folder$",
        prepare,
        asked,
    )
    assert [*tmp_path.iterdir()] == [tmp_path / "words.txt"]


EMPTY = {
    "a.txt": b"",
    "mark.txt": b"\xef\xbb\xbf",
    "a.txt.gz": gzip.compress(b""),
    "a.jsonl": b'{"text": ""}\n' * 300,
}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_source_without_text_for_a_split_is_refused(tmp_path, tokenizer):
    for name, content in EMPTY.items():
        (tmp_path / name).write_bytes(content)
        for fraction in (0, 0.05):
            asked = config(
                tmp_path / name, tmp_path / "out", tokenizer=tokenizer, val_fraction=fraction
            )
            expect_error("source = .*: has no text; choose another source", prepare, asked)
    (tmp_path / "same.jsonl").write_bytes(b'{"text": "one"}\n' * 300)
    for fraction, name in ((0.05, "val"), (0.95, "train")):
        asked = config(
            tmp_path / "same.jsonl", tmp_path / "out", tokenizer=tokenizer, val_fraction=fraction
        )
        expect_error(f"has too few different documents for a {name} split", prepare, asked)


@pytest.mark.parametrize("is_disk", [False, True])
def test_into_a_folder_that_is_there(texts, tmp_path, monkeypatch, is_disk):
    """It has files of others, and is behind a link, or the root
    of a disk, where no folder beside it is on that disk."""
    folder = tmp_path / "place/out"
    output = tmp_path / "link"
    folder.mkdir(parents=True)
    (folder / ".train-000000001.tmp").write_text("precious")
    # of one that was killed while it published its files
    for name in (".source.jsonl", "train_000999.bin"):
        (folder / name).touch()
    expect_error("create it with prepare_data.py", read_manifest, folder)
    (left := (folder if is_disk else folder.parent) / ".out.tmp").mkdir()
    (left / "val_000999.bin").touch()  # and of one that was killed before
    output.symlink_to(folder)
    if is_disk:
        output = folder
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    made = prepare(config(texts, output))
    verify_shards(output, read_manifest(output), record=False)
    assert not [*folder.glob("*_000999.bin")]
    assert prepare(config(texts, output)) == made
    assert os.listdir(tmp_path / "place") == ["out"]
    expected = {".source.jsonl", "manifest.json", ".train-000000001.tmp"}
    assert {path.name for path in folder.iterdir() if path.suffix != ".bin"} == expected


RECORDS = [
    lambda file: file.write_text("[1]"),
    lambda file: file.write_text("{"),
    lambda file: file.write_text("[" * 10**5),
    lambda file: file.write_bytes(b"\xff"),
    lambda file: file.write_text('[["a"], 1, 2, "b"]'),
    lambda file: (file.unlink(), os.mkfifo(file)),
]


@pytest.mark.parametrize("spoil", RECORDS)
def test_the_record_of_a_received_folder_may_hold_anything(texts, tmp_path, spoil):
    """Then the files are read again."""
    made = prepare(config(texts, tmp_path / "out"))
    spoil(tmp_path / "out/.source.jsonl")
    assert prepare(config(texts, tmp_path / "out")) == made
    edit_manifest(tmp_path / "out", recipe={**made.recipe, "fingerprint": 3})
    expect_error("has changed since it was read", prepare, config(texts, tmp_path / "out"))
    edit_manifest(
        tmp_path / "out",
        recipe={name: made.recipe[name] for name in made.recipe if name != "fingerprint"},
    )
    expect_error("has changed since it was read", prepare, config(texts, tmp_path / "out"))


def test_many_who_fail_at_once_leave_nothing(tmp_path):
    folder = tmp_path / "out"
    inside = []

    def fail(_):
        with suppress(ZeroDivisionError), locked_output(folder, "waiting") as aside:
            inside.append(1)
            assert inside == [1]
            assert list(aside.iterdir()) == []
            inside.pop()
            raise ZeroDivisionError

    with ThreadPoolExecutor(8) as pool:
        for _ in range(100):
            list(pool.map(fail, range(8)))
            assert list(tmp_path.iterdir()) == []


OUTPUTS = {
    "stdlib": "data/stdlib",
    "texts/shakespeare.txt": "data/shakespeare",
    "texts/**/*.txt": "data/texts",
    "*.txt": "data/text",
    "../*.txt": "data/text",
    "hub:HuggingFaceFW/fineweb-edu": "data/fineweb-edu",
}


def test_default_outputs():
    for source, output in OUTPUTS.items():
        assert PrepareConfig(source=source).folder == output
    assert PrepareConfig(source="hub:a/b", subset="c").folder == "data/b-c"
    assert PrepareConfig(source=["texts/a.txt", "texts/b.txt"]).folder == "data/texts"
    assert PrepareConfig(source=["texts/a.txt", "/b.txt"]).folder == "data/text"


def test_a_bpe_of_much_text_is_trained_on_a_sample_from_all_of_it():
    texts = [str(number % 10) * 10 for number in range(10_000)]
    sample, again = (bpe.random_sample(texts, 10_000) for _ in range(2))
    assert sum(map(len, sample)) == 10_000
    assert sample == again
    assert {*sample} == {*texts}


def test_a_source_that_changes_while_it_is_read(texts, tmp_path, monkeypatch):
    file = texts / "below" / "001.txt"
    make_tokenizer = prepare_module.make_tokenizer
    for change, words in (
        (
            lambda: file.write_bytes(file.read_bytes()[1:]),
            r"has changed since it was read; prepare it again .* at rest$",
        ),
        (lambda: file.unlink(), "001.txt"),
    ):

        def changing(*args, change=change):
            return (make_tokenizer(*args), change())

        monkeypatch.setattr(prepare_module, "make_tokenizer", changing)
        expect_error(
            words, prepare, config(texts, tmp_path / "out", tokenizer="bpe", vocab_size=300)
        )
        assert not (tmp_path / "out").exists()


def test_an_output_within_the_source(texts):
    expect_error("source = ", prepare, config(texts, texts))
    made = prepare(asked := config(texts, texts / "out"))
    assert prepare(asked) == made


def test_the_account_counts_and_lists_what_is_left_out(tmp_path):
    asked = config(write_nasty(tmp_path / "texts"), tmp_path / "out", tokenizer="gpt2")
    manifest = prepare(asked)
    account = {**manifest.recipe["account"]}
    left_out = {Path(line.split()[0]).name for line in account.pop("left_out")}
    assert left_out == {*NOT_TEXT}
    assert account == {"documents": 22, "bytes": 1_267_175, "end_of_text": 1, "empty": 8}
    assert prepare(asked) == manifest


NOTES = {
    "none": ("one two", "\n", "never occurs in the text.*CR is"),
    "typed": ("one\ntwo", r"\n", "never occurs in the text.* write a line break as"),
    "crlf": ("one\r\n\r\ntwo", "\n\n", "never occurs in the text.* CRLF is"),
    "found": ("one\ntwo", "\n", ""),
    "story": ("one<|endoftext|>two", None, r"<\|endoftext\|> as plain text"),
    "empty": ("one", None, "1 documents or rows without text were skipped"),
}
"""A text, the separator, and the note."""


@pytest.mark.parametrize("case", NOTES)
def test_the_summary_has_notes(tmp_path, capsys, case):
    text, separator, words = NOTES[case]
    (tmp_path / "a.txt").write_text(text, newline="")
    if case == "empty":
        (tmp_path / "b.txt").touch()
    prepare(config(tmp_path, tmp_path / "out", document_separator=separator, val_fraction=0))
    notes = [line for line in capsys.readouterr().out.splitlines() if "note: " in line]
    assert len(notes) == bool(words), notes
    assert re.search(words, "".join(notes))


def test_the_summary_counts_what_it_does_not_name(tmp_path, capsys):
    """And a vocabulary that the text does not fill."""
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "b.html").write_text("<html>")
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(bytes(9))
    prepare(config(tmp_path, tmp_path / "out", tokenizer="bpe", vocab_size=9999, val_fraction=0))
    lines = capsys.readouterr().out.splitlines()
    note = "HTML, whose markup becomes text; extract the text first"
    assert lines[0] == f"note: {tmp_path}/b.html: {note}"
    at = lines.index("  left out: 5 files")
    assert lines[at + 4] == f"    and 2 more; {tmp_path}/out/manifest.json names them"
    assert lines[at + 5].startswith("  note: the text gives only ")


def test_several_sources_are_the_glob_that_gives_them(texts, tmp_path):
    """The recipe of one source is as earlier releases wrote it."""
    glob = prepare(config(f"{texts}/*.txt", tmp_path / "glob"))
    assert glob.recipe["source"] == f"{texts}/*.txt"
    names = sorted(map(str, texts.glob("*.txt")), reverse=True)
    listed = prepare(config(names, tmp_path / "list"))
    assert listed.hash == glob.hash
    assert listed.recipe["fingerprint"] == glob.recipe["fingerprint"]
    assert listed.recipe["source"] == names
    assert prepare(config(names, tmp_path / "list")) == listed
    expect_error("has shards made with source", prepare, config(names[1:], tmp_path / "list"))
    Path(names[0]).write_text("another")
    expect_error("source = .*has changed", prepare, config(names, tmp_path / "list"))
    Path(names[0]).unlink()
    expect_error(f"source = {names[0]}: no such files", prepare, config(names, tmp_path / "list"))


@pytest.mark.parametrize("source", ["[D]", "**/*.txt"])
def test_a_change_is_noticed_whatever_the_name(tmp_path, source):
    """A folder that is named like a pattern, and files that `**` has in the folder itself."""
    (tmp_path / "in/[D]").mkdir(parents=True)
    file = tmp_path / "in" / ("[D]" if source == "[D]" else "") / "a.txt"
    file.write_text("text")
    asked = config(tmp_path / "in" / source, tmp_path / "out", val_fraction=0)
    prepare(asked)
    file.write_text("another")
    expect_error("has changed since it was read", prepare, asked)


def test_a_source_that_is_gone_is_named(texts, tmp_path, capsys):
    asked = config(texts, tmp_path / "out")
    made = prepare(asked)
    texts.rename(tmp_path / "moved")
    assert prepare(asked) == made
    assert f"({texts} is not here any more, so it was not compared)" in capsys.readouterr().out


def test_another_tokenizer_of_the_same_name_is_noticed(texts, tmp_path):
    for number in range(2):
        prepare(config(texts, tmp_path / str(number), tokenizer="bpe", vocab_size=300 + number))
    asked = config(texts, tmp_path / "out", tokenizer=str(tmp_path / "0"))
    made = prepare(asked)
    assert prepare(asked) == made
    (tmp_path / "1").rename(tmp_path / "2")
    (tmp_path / "0").rename(tmp_path / "1")
    assert prepare(asked) == made  # there is nothing to compare
    (tmp_path / "2").rename(tmp_path / "0")
    expect_error("tokenizer = .*0: has changed since the text was encoded with it", prepare, asked)


@pytest.mark.parametrize(("tty", "total"), [(False, 400.0), (False, math.inf), (True, 400.0)])
def test_progress_in_a_file_is_a_line_a_minute(monkeypatch, capsys, tty, total):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.tqdm, "__init__", lambda bar, **options: None)
    monkeypatch.setattr(progress.tqdm, "close", lambda bar: None)
    monkeypatch.setattr(progress.tqdm, "update", lambda bar, size: updates.append(size))
    monkeypatch.setattr(progress.tqdm, "disable", not tty, raising=False)
    updates = []
    for _ in progress.progress(range(4), "encoding", "bytes", total, lambda _: 100):
        now[0] += 40
    known = [
        "encoding: 200 of 400 bytes (50%), 0:01:20 left",
        "encoding: 400 of 400 bytes (100%), 0:00:00 left",
    ]
    unknown = ["encoding: 200 bytes, for 0:01:20", "encoding: 400 bytes, for 0:02:40"]
    assert capsys.readouterr().err.splitlines() == (
        [] if tty else known if total == 400 else unknown
    )
    assert updates == [100] * 4


def test_the_sizes_of_what_is_encoded_add_up(texts, tmp_path, monkeypatch):
    """The share that is done ends at 100 %."""
    seen = {}

    def noted(items, action, unit, total, size):
        seen[action] = [total, 0]
        for item in items:
            yield item
            seen[action][1] += size(item)

    for module in (encode, sources, bpe):
        monkeypatch.setattr(module, "progress", noted)
    monkeypatch.setattr(bpe, "run_in_worker", lambda function, *given: function(*given))
    prepare(config(texts, tmp_path / "out", tokenizer="bpe"))
    size = sum(file.stat().st_size for file in texts.rglob("*.txt"))
    assert seen == {
        "looking at files": [size, size],
        "reading": [size, size],
        "encoding": [size, size],
    }


def test_a_full_disk_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("text")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_module, "_prepare", full)
    asked = config(tmp_path / "words.txt", tmp_path / "out")
    expect_error(
        r"^output = .*No space left on device\); free space on that disk, and run the same",
        prepare,
        asked,
    )


def test_a_closed_output_is_no_damage_of_the_data(texts, tmp_path, monkeypatch):
    """`| head` ends the command as a pipe does, and the data are there."""

    def closed(text, **options):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(prepare_module, "print", closed, raising=False)
    with pytest.raises(BrokenPipeError):
        prepare(config(texts, tmp_path / "out"))
    verify_shards(tmp_path / "out", read_manifest(tmp_path / "out"))
