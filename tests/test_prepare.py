"""Preparing data: what ends up in the shards, restarts, the user's mistakes, the account, and shards of others."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from commands import expect_error
from nasty import NOT_TEXT, library_texts, write_nasty
from ranks import run_ranks
from runs import said

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, read_manifest
from gpt2_ddp.data.shards import RECORD, TokenStream, verify_shards
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.output import locked_output
from gpt2_ddp.preparation import encode, source_files, sources
from gpt2_ddp.preparation import prepare as prepare_module
from gpt2_ddp.preparation.prepare import prepare, suitable_vocab_size

PROJECT = Path(__file__).parents[1]
SCRIPT = [sys.executable, str(PROJECT / "scripts/prepare_data.py")]


@pytest.fixture
def helperless(monkeypatch) -> None:
    """A BPE is trained in this process: a fresh interpreter takes a second."""
    monkeypatch.setattr(prepare_module, "run_in_worker", lambda function, *arguments: function(*arguments))


@pytest.fixture(scope="module")
def library() -> list[str]:
    return library_texts(300)


@pytest.fixture
def texts(tmp_path, library) -> Path:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    for number, text in enumerate(library):
        (folder / ("below" if number % 2 else "") / f"{number:03d}.txt").write_bytes(text[:2000].encode())
    (folder / ".hidden").write_bytes(b"\0")
    return folder


def config(source: str | Path, output: Path, **changes) -> PrepareConfig:
    values = {"source": str(source), "output": str(output), "tokenizer": "bytes", "workers": 1} | changes
    return PrepareConfig.model_validate(values)


def tokens_of(folder: Path, split: str) -> np.ndarray:
    stream = TokenStream(folder, read_manifest(folder), split)
    return stream.read(np.array([0]), len(stream))[0]


def documents_of(folder: Path, split: str) -> list[str]:
    manifest = read_manifest(folder)
    own = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(own) if own.exists() else manifest.tokenizer)
    tokens = tokens_of(folder, split)
    starts = np.flatnonzero(tokens == tokenizer.eot)
    assert starts[0] == 0  # the end-of-text token comes first
    return [tokenizer.decode(part[1:]) for part in np.split(tokens, starts[1:])]


def documents_in(texts: Path) -> list[str]:
    return [path.read_bytes().decode() for path in sorted(texts.rglob("*.txt"))]


def test_splits_hold_every_document_once(texts, tmp_path):
    output = tmp_path / "out"
    manifest = prepare(config(texts, output, val_fraction=0.2, shard_tokens=10_000))
    verify_shards(output, manifest)
    assert manifest == read_manifest(output)
    assert {shard.tokens for split in manifest.splits.values() for shard in split[:-1]} == {10_000}
    train, val = documents_of(output, "train"), documents_of(output, "val")
    originals = documents_in(texts)
    assert [text for text in originals if text in set(train)] == train  # in the order of the source
    assert sorted(train + val) == sorted(text for text in originals if text)
    assert 30 < len(val) < 90
    assert not list(output.glob(".*.tmp"))


def test_a_document_keeps_its_split(texts, tmp_path):
    prepare(config(texts, tmp_path / "out", val_fraction=0.2))
    for path in list(texts.glob("*.txt"))[:40]:
        path.unlink()
    prepare(config(texts, tmp_path / "fewer", val_fraction=0.2))
    assert set(documents_of(tmp_path / "fewer", "val")) < set(documents_of(tmp_path / "out", "val"))
    manifest = prepare(config(texts, tmp_path / "none", val_fraction=0))
    assert list(manifest.splits) == ["train"]
    assert len(documents_of(tmp_path / "none", "train")) > 200


def test_any_number_of_workers_gives_the_same_bytes(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK", 10_000)
    rows = [{"text": text[:2000]} for text in documents_in(texts)[:100]]
    (texts / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bpe = {"tokenizer": "bpe", "vocab_size": 400, "shard_tokens": 50_000}
    one, two = (prepare(config(texts, tmp_path / name, **bpe, workers=n)) for name, n in (("one", 1), ("two", 2)))
    assert (one, one.hash) == (two, two.hash)
    for shard in one.splits["train"]:
        assert (tmp_path / "one" / shard.file).read_bytes() == (tmp_path / "two" / shard.file).read_bytes()
    elsewhere = texts.rename(tmp_path / "moved")
    moved = prepare(config(elsewhere, tmp_path / "three", tokenizer=str(tmp_path / "one"), shard_tokens=50_000))
    assert moved.hash == one.hash


PARTED = {  # files that are read in parts, and how
    "rows.jsonl": {}, "rows.parquet": {}, "lines.txt": {"documents": "line"}, "marked.txt": {"documents": "line"},
    "paragraphs.txt": {"documents": "paragraph"}, "stories.txt": {"document_separator": "<|endoftext|>"},
    "blank.txt": {"document_separator": "\n\n"}, "dashes.txt": {"document_separator": "---"},
}  # fmt: skip


def write_parted(folder: Path, library: list[str]) -> None:
    """Files with text of the library, some of it longer than others, and rows without text."""
    texts = [text[: 200 + 37 * number % 500] for number, text in enumerate(library[:80])]
    texts[50] = "".join(library)[:9000]
    rows: list[dict] = [{"text": text} for text in texts] + [{"text": None}, {"body": "x"}] * 3
    random.Random(0).shuffle(rows)
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\r\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
    for name, between in {"lines": "\r\n", "paragraphs": "\n \n", "blank": "\n\n\n", "dashes": "--\n-----"}.items():
        (folder / f"{name}.txt").write_bytes(between.join(texts).encode())
    (folder / "marked.txt").write_bytes("\ufeff".join(["", *texts, "\xe9" * 5000]).encode())
    (folder / "stories.txt").write_bytes("<|endoftext|>\n".join([*texts, ""]).encode()[:-1] + b"\xff")


@pytest.mark.parametrize("name", PARTED)
def test_files_in_parts_give_the_same_shards_and_statistics(tmp_path, library, monkeypatch, name):
    write_parted(tmp_path / "texts", library)
    values = {"source": tmp_path / "texts" / name, "shard_tokens": 10_000, **PARTED[name]}
    whole = prepare(config(output=tmp_path / "whole", **values))
    for module in (encode, source_files, sources):
        monkeypatch.setattr(module, "BLOCK", 1000)
    for module in (encode, source_files):
        monkeypatch.setattr(module, "LARGEST", 4000)
    assert len(list(sources.scan(config(output=tmp_path / "in parts", **values)).parts)) > 5 or name in (
        "blank.txt",
        "dashes.txt",
    )
    assert prepare(config(output=tmp_path / "in parts", **values)) == whole


def test_few_documents_are_divided_by_tokens(tmp_path, library, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK", 1000)
    text = "".join(library[:40])
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.txt").write_bytes(text.encode())
    (tmp_path / "few" / "two.txt").touch()
    changes = {"tokenizer": "gpt2", "val_fraction": 0.1, "shard_tokens": 20_000}
    manifest = prepare(config(tmp_path / "few", tmp_path / "out", **changes))
    total = manifest.tokens("train") + manifest.tokens("val")
    assert manifest.tokens("val") == round(0.1 * total)
    joined = np.concatenate([tokens_of(tmp_path / "out", "train"), tokens_of(tmp_path / "out", "val")])
    tokenizer = load_tokenizer("gpt2")
    np.testing.assert_array_equal(joined, [tokenizer.eot, *tokenizer.encode(text)])
    with pytest.raises(UserError, match=r"too little text for a val split"):
        prepare(config(tmp_path / "few", tmp_path / "less", val_fraction=1e-9))


@pytest.mark.usefixtures("helperless")
def test_standard_library(tmp_path, capsys, monkeypatch):
    files = {path: path.stat().st_size for path in source_files.library_files()}
    assert sum(files.values()) > 8e6
    assert suitable_vocab_size(sum(files.values())) == 8192
    assert not any("site-packages" in str(path) or "/test/" in str(path) for path in files)
    few = sorted(sorted((path for path, size in files.items() if size), key=files.__getitem__)[:300])
    monkeypatch.setattr(source_files, "library_files", lambda: few)
    manifest = prepare(PrepareConfig(output=str(tmp_path / "out"), workers=1))
    assert manifest.vocab_size == suitable_vocab_size(sum(map(files.get, few)))
    assert manifest.source == f"stdlib (Python {sys.version.split()[0]})"
    found = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")
    assert sorted(found) == sorted(path.read_bytes().decode("utf-8", "replace") for path in few)
    assert prepare(PrepareConfig(output=str(tmp_path / "out"))) == manifest
    assert "is already prepared" in capsys.readouterr().out


@pytest.mark.usefixtures("helperless")
def test_a_tokenizer_of_ones_own_is_copied(texts, tmp_path, monkeypatch):
    first = prepare(config(texts, tmp_path / "first", tokenizer="bpe", vocab_size=300))
    (tmp_path / "mine.json").write_bytes((tmp_path / "first" / "tokenizer.json").read_bytes())
    monkeypatch.chdir(tmp_path / "first")
    for number, tokenizer in enumerate((str(tmp_path / "mine.json"), "tokenizer.json")):
        assert prepare(config(texts, tmp_path / str(number), tokenizer=tokenizer)).hash == first.hash
        assert (tmp_path / str(number) / "tokenizer.json").exists()


def test_another_recipe_overwrites_nothing(texts, tmp_path):
    output = tmp_path / "out"
    prepare(config(texts, output))
    before = {path: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(UserError, match=r"output = .*made with val_fraction 0\.05; choose another output"):
        prepare(config(texts, output, val_fraction=0.1))
    os.truncate(output / "train_000000.bin", 5000)
    with pytest.raises(UserError, match=r"train_000000\.bin"):  # finished, but not whole any more
        prepare(config(texts, output))
    del before[output / "train_000000.bin"]
    assert before == {path: path.read_bytes() for path in before}


def test_folders_of_others_are_left_alone(texts, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train_000000.bin").write_bytes(b"precious")
    expect_error(r"has files that prepare_data\.py did not write", prepare, config(texts, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train_000000.bin"]
    (tmp_path / "file").write_bytes(b"")
    expect_error("cannot be written", prepare, config(texts, tmp_path / "file"))


@pytest.mark.slow
def test_killed_and_run_again(tmp_path):
    source = f"{Path(os.__file__).parent}/*.py"
    arguments = [*SCRIPT, "--source", source, *["--tokenizer", "gpt2", "--shard_tokens", "20000", "--workers", "2"]]
    output = tmp_path / "killed"
    process = subprocess.Popen([*arguments, "--output", str(output)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not list(tmp_path.glob(".killed.tmp/train_*.bin")):
        assert process.poll() is None
        time.sleep(0.02)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not output.exists()
    output.mkdir()
    for name in (".source.jsonl", "train_000999.bin"):  # of one that was killed while it published its files
        (output / name).touch()
    expect_error("has shards but no manifest", read_manifest, output)
    subprocess.run([*arguments, "--output", str(output)], check=True)
    alone = PrepareConfig(source=source, output=str(tmp_path / "whole"), tokenizer="gpt2", shard_tokens=20_000)
    whole = prepare(alone.model_copy(update={"workers": 1}))
    assert read_manifest(output) == whole
    assert {path.name for path in output.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    verify_shards(output, whole)
    assert not any(Path(f"/proc/{child}").exists() for child in children.split())  # none outlives its parent


def test_two_at_once(texts, tmp_path):
    found = run_ranks(said, 2, prepare, config(texts, tmp_path / "out"))
    assert sorted("is already prepared" in output for _, output, _ in found) == [False, True]
    verify_shards(tmp_path / "out", read_manifest(tmp_path / "out"))


FILES = {
    "words.txt": b"text", "empty.txt": b"", "image.png": b"\x89PNG\0\0", "rows.jsonl": b'{"body": "x", "n": 1}\n',
    "broken.jsonl": b'{"text": "x"}\n{"text": \n', "deep.jsonl": b"[" * 100_000, "torn.parquet": b"PAR1torn",
    "torn.txt.gz": gzip.compress(b"text" * 1000)[:30],
}  # fmt: skip


@pytest.mark.parametrize(("source", "changes", "field"), [
    ("absent.txt", {}, "source"), ("none/*.txt", {}, "source"), ("empty.txt", {}, "source"),
    ("image.png", {}, "source"), ("broken.jsonl", {}, "source"), ("deep.jsonl", {}, "source"),
    ("torn.parquet", {}, "source"),
    ("torn.txt.gz", {}, "source"), ("rows.jsonl", {}, "source"), ("rows.jsonl", {"column": "n"}, "source"),
    ("words.txt", {"tokenizer": "gpt5"}, "tokenizer"),
    ("words.txt", {"tokenizer": "words.txt"}, "tokenizer"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path, source, changes, field):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    asked = config(tmp_path / source, tmp_path / "new" / "out", **{"val_fraction": 0} | changes)
    expect_error(f"^{field} = [^\n]*$", prepare, asked)
    assert not (tmp_path / "new").exists()


def test_what_others_put_into_the_folder_stays(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "one/of/mine").mkdir(parents=True)
    (tmp_path / "one/of/notes.txt").write_text("precious")
    for output in ("one/of", "one/of/mine", "one/of/theirs/new"):
        with pytest.raises(UserError, match="too little text for a val split"):
            prepare(config(tmp_path / "text.txt", tmp_path / output, val_fraction=1e-9))
    assert {path.name for path in (tmp_path / "one").rglob("*")} == {"of", "mine", "notes.txt"}


@pytest.mark.parametrize("kind", ["files", "link", "disk"])
def test_into_a_folder_that_is_there(texts, tmp_path, monkeypatch, kind):
    """It has files of others, is behind a link, or is the root of a disk, where no folder beside it is on that disk."""
    folder = output = tmp_path / "place/out"
    folder.mkdir(parents=True)
    if kind == "link":
        output = tmp_path / "link"
        output.symlink_to(folder)
    else:
        (folder / "notes.txt").write_text("precious")
    if kind == "disk":
        (folder / ".train-000000001.tmp").touch()
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    made = prepare(config(texts, output))
    verify_shards(output, read_manifest(output), record=False)
    assert prepare(config(texts, output)) == made
    assert os.listdir(tmp_path / "place") == ["out"]
    found = {path.name for path in folder.iterdir()} - {shard.file for of in made.splits.values() for shard in of}
    expected = {".source.jsonl", "manifest.json"}
    others = {"files": {"notes.txt"}, "link": set(), "disk": {"notes.txt", ".train-000000001.tmp"}}
    assert found == expected | others[kind]


def test_many_who_fail_at_once_leave_nothing(tmp_path):
    folder, inside = tmp_path / "out", []

    def fail(_: int) -> None:
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


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
@pytest.mark.parametrize(
    "text", ["床前明月光，疑是地上霜。" * 200, "🙂👩\u200d👧🏳️❤️🇨🇭" * 200, "a\r\nb\u2028 <|endoftext|>"]
)
def test_bytes_and_characters_of_any_text(tmp_path, tokenizer, text):
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / f"texts/{number}.txt").write_bytes(text[number:].encode())
    manifest = prepare(config(tmp_path / "texts", tmp_path / "out", tokenizer=tokenizer, val_fraction=0))
    assert documents_of(tmp_path / "out", "train") == [text, text[1:], text[2:]]
    assert manifest.vocab_size == (257 if tokenizer == "bytes" else len({*text}) + 1)
    other = config(tmp_path / "texts", tmp_path / "out", tokenizer="gpt2", val_fraction=0)
    expect_error(f"tokenizer {tokenizer}", prepare, other)


def test_default_outputs():
    sources = ("stdlib", "texts/shakespeare.txt", "texts/**/*.txt", "*.txt", "hub:HuggingFaceFW/fineweb-edu")
    outputs = [PrepareConfig(source=source).folder.removeprefix("data/") for source in sources]
    assert outputs == ["stdlib", "shakespeare", "texts", "text", "fineweb-edu"]
    assert PrepareConfig(source="hub:a/b", subset="c").folder == "data/b-c"


def test_shipped_recipes(tmp_path):
    for path in (PROJECT / "configs").glob("data_*.yaml"):
        assert load(PrepareConfig, ["--config", str(path)]).output is not None
    stdlib = load(PrepareConfig, ["--config", "configs/data_stdlib.yaml"])
    assert stdlib == PrepareConfig(output=stdlib.folder, vocab_size=2048)


@pytest.mark.parametrize(("documents", "digest"), [
    ("file", "49da85cfb0dcc735eb94fd99f61089d93a03a7b39c2f1b413486ce45f6ef87cf"),
    ("line", "5d4180baf5f1a3b90b1e7aa469db18a638b4ddfbd7234fc12df99ee267c953ee"),
    ("paragraph", "6a21db73c0d3527ccc6739a702af88845cdac367d56682b21e198b8a4aea63e1"),
])  # fmt: skip
def test_a_source_gives_the_tokens_that_it_always_gave(tmp_path, documents, digest):
    draw = random.Random(0)
    words = ["one", "two ", "\n", "\r\n", "\n\n", "é", "漢字", " and", "\t", "😀", ", ", "\x0c", " \n"]
    (tmp_path / "texts").mkdir()
    for number in range(40):
        text = "".join(draw.choice(words) for _ in range(200))
        (tmp_path / "texts" / f"{number:02d}.txt").write_bytes(text.encode())
    rows = [{"id": number, "text": f"row {number} " * number} for number in range(30)] + [{"id": 1, "text": None}]
    (tmp_path / "texts" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"documents": documents, "tokenizer": "gpt2", "val_fraction": 0.2}
    assert prepare(config(tmp_path / "texts", tmp_path / "out", **changes)).hash == digest


@pytest.mark.parametrize(("size", "ids"), [
    (1, 512), (10**4, 512), (300_000, 2048), (10**6, 4096), (10**7, 8192), (10**8, 2**15), (10**12, 2**15),
])  # fmt: skip
def test_a_vocabulary_suits_the_size_of_the_text(size, ids):
    assert suitable_vocab_size(size) == ids


def test_a_bpe_of_much_text_is_trained_on_a_sample_from_all_of_it():
    sample = prepare_module.random_sample((str(number % 10) * 10 for number in range(10_000)), 10_000)
    assert sum(map(len, sample)) == 10_000
    assert sample == prepare_module.random_sample((str(number % 10) * 10 for number in range(10_000)), 10_000)
    assert {str(digit) * 10 for digit in range(10)} == {*sample}


@pytest.mark.usefixtures("helperless")
def test_without_a_vocab_size_the_text_decides_and_any_that_is_there_will_do(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"word{number} of many\n" for number in range(4000)))
    asked = config(tmp_path / "text.txt", tmp_path / "out", tokenizer="bpe")
    assert prepare(asked).vocab_size == suitable_vocab_size(os.path.getsize(tmp_path / "text.txt")) == 1024
    for size in (400, None):
        made = prepare(config(tmp_path / "text.txt", tmp_path / f"given{size}", tokenizer="bpe", vocab_size=size))
        assert "is already prepared" not in capsys.readouterr().out
        assert prepare(config(tmp_path / "text.txt", tmp_path / f"given{size}", tokenizer="bpe")) == made
        assert "is already prepared" in capsys.readouterr().out


def test_a_source_that_changes_while_it_is_read(texts, tmp_path, monkeypatch):
    file, make_tokenizer = texts / "below" / "001.txt", prepare_module.make_tokenizer
    for change, words in (
        (lambda: file.write_bytes(file.read_bytes()[1:]), "has changed .*: below/001.txt;"),
        (lambda: file.unlink(), "001.txt"),
        (lambda: texts.rename(tmp_path / "elsewhere"), "No such file"),
    ):
        changing = lambda *args, change=change: (make_tokenizer(*args), change())  # noqa: E731
        monkeypatch.setattr(prepare_module, "make_tokenizer", changing)
        expect_error(words, prepare, config(texts, tmp_path / "out", tokenizer="chars"))
        assert not (tmp_path / "out").exists()


def test_an_output_within_the_source(texts):
    expect_error("source = ", prepare, config(texts, texts))
    made = prepare(config(texts, texts / "out"))
    assert prepare(config(texts, texts / "out")) == made


def test_the_account_counts_and_lists_what_is_left_out(tmp_path):
    asked = config(write_nasty(tmp_path / "texts"), tmp_path / "out", encoding="cp1252", tokenizer="gpt2")
    manifest = prepare(asked)
    account = {**manifest.recipe["account"]}
    left_out = {Path(line.split()[0]).name for line in account.pop("left_out")}
    assert left_out == {*NOT_TEXT}
    assert account == {"documents": 19, "bytes": 1_270_385, "end_of_text": 1}
    assert prepare(asked) == manifest


def make_dump(folder: Path, **sizes: int) -> None:
    folder.mkdir()
    for name, tokens in sizes.items():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, tokens
        ids = np.random.default_rng(tokens).integers(0, 50_257, tokens).astype("<u2")
        (folder / f"{name}.bin").write_bytes(header.tobytes() + ids.tobytes())


def test_dumps_of_others_are_indexed_in_place(tmp_path, capsys):
    folder = tmp_path / "fineweb10B"
    make_dump(folder, fineweb_val_000000=300, fineweb_train_000002=100, fineweb_train_000001=200)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    indexing = PrepareConfig(source=f"bin:{folder}/*.bin", tokenizer="gpt2")
    manifest = prepare(indexing)
    assert [shard.file for shard in manifest.splits["train"]] == [
        "fineweb_train_000001.bin",
        "fineweb_train_000002.bin",
    ]
    assert (manifest.tokens("train"), manifest.tokens("val"), manifest.eot) == (300, 300, 50256)
    verify_shards(folder, read_manifest(folder))
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert {path.name for path in folder.iterdir()} == {*before, "manifest.json", RECORD}
    assert prepare(indexing) == manifest
    assert "is already indexed" in capsys.readouterr().out
    make_dump(tmp_path / "more", fineweb_train_000003=100)
    (tmp_path / "more" / "fineweb_train_000003.bin").rename(folder / "fineweb_train_000003.bin")
    with pytest.raises(UserError, match=r"manifest\.json of other shards; delete it"):
        prepare(indexing)


def test_dumps_that_are_wrong(tmp_path):
    folder = tmp_path / "dump"
    make_dump(folder, retrieval_train_0=300, edu_validation_0=200)
    file, mistakes = (
        folder / "retrieval_train_0.bin",
        [
            ({"source": f"bin:{tmp_path}/none/*.bin"}, "source"),
            ({"tokenizer": "bpe"}, "tokenizer"),
            ({"tokenizer": str(tmp_path / "tokenizer.json")}, "tokenizer"),
        ],
    )
    asked = {"source": f"bin:{folder}/*.bin", "tokenizer": "gpt2"}
    for changes, field in mistakes:
        expect_error(f"^{field} = ", prepare, PrepareConfig.model_validate(asked | changes))
    whole = file.read_bytes()
    wrong_id = whole[:HEADER_BYTES] + np.uint16(50_300).tobytes() + whole[HEADER_BYTES + 2 :]
    for content, name in ((wrong_id, file.name), (whole[:-100], file.name), (whole, "0_train_val.bin")):
        file.unlink()
        (folder / name).write_bytes(content)
        expect_error(f"^shard = .*{name}", prepare, PrepareConfig.model_validate(asked))
    assert not (folder / "manifest.json").exists()
    (folder / "0_train_val.bin").rename(file)
    manifest = prepare(PrepareConfig.model_validate(asked))
    assert (manifest.tokens("train"), manifest.tokens("val")) == (300, 200)
