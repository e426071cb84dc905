"""Which files a source is made of, in which order, and what they are: text in some encoding, not text, or damaged."""

import gzip
import os
from pathlib import Path

from commands import expect_error
from nasty import DECODABLE, NOT_TEXT, PROSE, RUSSIAN, write_decodable, write_nasty

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.preparation import source_files, sources
from gpt2_ddp.preparation.source_files import detect_encoding, find_files, library_files
from gpt2_ddp.preparation.sources import scan


def test_files_are_sorted_by_the_parts_of_their_names(tmp_path):
    for name in ("b/x", "b.txt", "a/z", "a/b/c", "a-b", "a.b/c", "c", ".git/x", "a/.hidden", "b/\udcff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("c")
    (tmp_path / "nothing").symlink_to("absent")
    (tmp_path / "round").symlink_to("round")
    visible = [path for path in tmp_path.rglob("*") if not path.is_dir() and not {".git", ".hidden"} & {*path.parts}]
    assert [*find_files(str(tmp_path))] == sorted(visible)
    assert len(visible) == 11
    assert [*find_files(f"{tmp_path}/**/*")] == [*find_files(str(tmp_path))]
    assert [*find_files(f"{tmp_path}/c")] == [tmp_path / "c"]
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert [*find_files(str(tmp_path))] == [*find_files(f"{tmp_path}/**")] == sorted(visible)


def test_globs_are_those_of_the_shell(tmp_path, monkeypatch):
    for name in ("x.txt/y.txt", "x.txt/z.md", "a/b/c.txt", "a/b/d.md", "a.txt", "a/.git/e.txt", "out/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for pattern, names in {
        "*.txt": "a.txt", "**/*.txt": "a/b/c.txt a.txt out/f.txt x.txt/y.txt", "a/**": "a/b/c.txt a/b/d.md",
        "[ax]*/**/?.txt": "a/b/c.txt x.txt/y.txt", f"{tmp_path}/**/b/**/*": "a/b/c.txt a/b/d.md",
    }.items():  # fmt: skip
        assert [tmp_path / path for path in find_files(pattern)] == [tmp_path / name for name in names.split()], pattern
    assert Path("out/f.txt") not in {*find_files("**/*", "out")}
    assert tmp_path / "out/f.txt" not in {*find_files(str(tmp_path), "out")}


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    real = __import__("os").scandir

    def scandir(folder: str):
        if folder.endswith("a"):
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr("os.scandir", scandir)
    assert [*find_files(str(tmp_path))] == [tmp_path / "a", tmp_path / "b"]


def test_the_library_is_code_and_no_tables():
    """Of every version of Python: its tables are found by their lines, and some of them come and go."""
    files = library_files()
    assert files == sorted(files)
    root = Path(os.__file__).parent
    names = {path.relative_to(root).as_posix() for path in files}
    assert {"argparse.py", "inspect.py", "typing.py", "keyword.py", "_compat_pickle.py", "html/__init__.py"} <= names
    tables = {"encodings/cp1252.py", "pydoc_data/topics.py", "html/entities.py", "re/_casefix.py", "stringprep.py"}
    assert not names & {*tables, "locale.py", "_opcode_metadata.py", *(path.name for path in root.glob("_sysconf*"))}


def config(source: Path, **changes) -> PrepareConfig:
    return PrepareConfig.model_validate({"source": str(source)} | changes)


def texts(source: Path, **changes) -> list[str]:
    """The documents, each whole."""
    documents: list[str] = []
    for text, first, _ in scan(config(source, **changes)).pieces():
        documents[-1:] = [*documents[-1:], text] if first else [documents[-1] + text]
    return documents


def test_what_can_be_decoded_is_read_byte_for_byte(tmp_path):
    write_decodable(tmp_path)
    tokenizer = load_tokenizer("gpt2")
    for name, (_, text) in DECODABLE.items():
        assert texts(tmp_path / name) == [text], name
        assert tokenizer.decode(tokenizer.encode(text)) == text, name
    assert texts(tmp_path) == [DECODABLE[name][1] for name in sorted(DECODABLE)]
    assert scan(config(tmp_path)).stats.encodings == {"utf-8": 9, "utf-16": 2, "utf-32": 1}


def test_what_is_not_text_is_left_out_whatever_its_name(tmp_path):
    write_decodable(tmp_path)
    for name, data in NOT_TEXT.items():
        (tmp_path / name).write_bytes(data)
    seen = scan(config(tmp_path))
    assert {Path(name).name for name, parts in seen.unusual.items() if not parts} == {*NOT_TEXT}
    assert seen.stats.left_out.count == len(NOT_TEXT)
    assert texts(tmp_path) == [DECODABLE[name][1] for name in sorted(DECODABLE)]
    for name in NOT_TEXT:
        # there is nothing else
        expect_error(rf"source = .*{name}: (is not text|cannot be read)", scan, config(tmp_path / name))
    expect_error(r"source = .*archive\.txt: is not text", scan, config(tmp_path, on_bad_file="stop"))


def test_text_in_another_encoding_is_asked_for(tmp_path):
    write_nasty(tmp_path)
    where = r"\(.*cp1252\.txt, line 1; .*latin\.txt, line 1\)"
    expect_error(f"encoding = auto: cannot decode 2 files {where} as UTF-8;", scan, config(tmp_path))
    account = scan(config(tmp_path, encoding="cp1252")).stats
    assert (account.encodings["cp1252"], account.encodings["utf-16"], account.undecodable.count) == (2, 2, 0)
    read = texts(tmp_path, encoding="cp1252")
    assert {PROSE, RUSSIAN, "“Où ?” – 5 €\n" * 50} <= {*read}  # what is UTF-8 or marked as UTF-16 stays that
    assert read.count(PROSE) == 5  # latin.txt like the others
    assert texts(tmp_path / "utf16-unmarked.txt", encoding="utf-16-le") == [PROSE]
    message = "encoding = shift_jis: cannot decode 2 files .* as UTF-8 or shift_jis"
    expect_error(message, scan, config(tmp_path, encoding="shift_jis"))


def test_a_trace_of_what_cannot_be_decoded_is_replaced_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "BLOCK", 1000)
    for size, garbled in ((20_000, False), (19_999, True)):
        path = tmp_path / f"{size}.txt"
        path.write_bytes(b"word\n" * 300 + b"\xe9\xe8" + b"x" * (size - 1502))
        assert detect_encoding(path, "auto")[:5] == ("utf-8", size, 2, 301, "")
        if garbled:
            expect_error("encoding = auto: cannot decode 1 file ", scan, config(path))
    account = scan(config(tmp_path / "20000.txt")).stats
    assert (account.undecodable.count, account.undecodable.where) == (2, [f"{tmp_path}/20000.txt, line 301"])
    assert texts(tmp_path / "20000.txt")[0].count("\ufffd") == 2


def test_a_character_that_straddles_two_blocks_is_one(tmp_path, monkeypatch):
    for module in (source_files, sources):
        monkeypatch.setattr(module, "BLOCK", 7)
    for encoding in ("utf-8", "utf-16", "utf-32", "shift_jis", "gb18030", "iso2022_jp"):
        (tmp_path / "text").write_bytes(("仮名と漢字、" * 9).encode(encoding))
        named = encoding if encoding[:3] != "utf" else "auto"
        assert scan(config(tmp_path / "text", encoding=named)).stats.undecodable.count == 0, encoding
        assert texts(tmp_path / "text", encoding=named) == ["仮名と漢字、" * 9], encoding


def test_utf_8_with_damage_stays_utf_8_whatever_is_named(tmp_path):
    """latin-1 would decode every byte, to other characters. Files that are not UTF-8 are read in it and listed."""
    cut = ("他说：漢字\n" * 3000).encode()[:-2]  # in the middle of a character
    (tmp_path / "cut.txt").write_bytes(cut)
    (tmp_path / "latin.txt").write_bytes(b"plain\n" * 5000 + b"caf\xe9\n")  # a trace of what is not UTF-8
    seen = scan(config(tmp_path, encoding="latin-1"))
    assert {name: [part.encoding for part in parts] for name, parts in seen.unusual.items()} == {
        f"{tmp_path}/latin.txt": ["latin-1"]
    }
    assert seen.stats.undecodable.where == [f"{tmp_path}/cut.txt, line 3000"]
    assert texts(tmp_path, encoding="latin-1")[0] == cut[:-1].decode(errors="ignore") + "\ufffd"
    (tmp_path / "rotten.txt").write_bytes(cut[:592] + b"\n\xff\xfe\n" + cut[:592])
    fault = r"rotten\.txt: is UTF-8 with 2 undecodable bytes, the first in line 39"
    for encoding in ("auto", "latin-1"):
        expect_error(fault, scan, config(tmp_path, encoding=encoding, on_bad_file="stop"))
        assert scan(config(tmp_path, encoding=encoding)).stats.left_out.count == 1
        kept = texts(tmp_path / "rotten.txt", encoding=encoding, on_bad_file="keep")[0]
        assert kept.count("\ufffd") == 2


def test_control_characters_make_a_file_binary_by_their_share(tmp_path):
    for control, size, most in ((b"\0", 10_000, 100), (b"\x7f", 5000, 50)):
        for count in (most, most + 1):
            (tmp_path / "text").write_bytes(b"one\ntwo " + control * count + b"x" * (size - count - 8))
            found = detect_encoding(tmp_path / "text", "auto")
            assert found.fault == f"is not text (has {count} control characters)" * (count > most)
            (tmp_path / "text.gz").write_bytes(gzip.compress((tmp_path / "text").read_bytes()))
            assert detect_encoding(tmp_path / "text.gz", "auto") == found
    (tmp_path / "text").write_bytes(b"\x1b[1mbold\x1b[0m\x0c\r\n\t\a" * 100)  # a terminal's log
    assert not detect_encoding(tmp_path / "text", "auto").fault
    (tmp_path / "text").write_bytes(bytes([5, 0, 200, 0, 7, 0] * 1000))  # small numbers of 16 bits
    assert detect_encoding(tmp_path / "text", "auto").fault


def test_every_file_that_is_left_out_is_listed_and_an_option_keeps_them(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"beep\1" * 20)
    (tmp_path / "torn.txt.gz").write_bytes(NOT_TEXT["torn.txt.gz"])
    (tmp_path / "words.txt").write_text("words")
    left_out = scan(config(tmp_path)).stats.left_out
    assert (left_out.count, len(left_out.where)) == (6, 6)
    assert left_out.where[4] == f"{tmp_path}/4.txt is not text (has 20 control characters)"
    assert left_out.of("files").endswith("; ...)")
    assert left_out.of("files").count(".txt") == 3
    assert texts(tmp_path, on_bad_file="keep") == ["beep\1" * 20] * 5 + ["words"]
    assert scan(config(tmp_path, on_bad_file="keep")).stats.left_out.where == left_out.where[5:]


def test_an_encoding_is_one_of_pythons():
    for name, hint in (
        ("latin1x", "a text codec of Python"),
        ("base64", "a text codec of Python"),
        ("", "a text codec"),
    ):
        expect_error(f"encoding = {name}: should be .*{hint}", load, PrepareConfig, ["--encoding", name])
    for name in ("auto", "Latin-1", "cp1252", "utf-8", "GB18030"):
        assert load(PrepareConfig, ["--encoding", name]).encoding == name
