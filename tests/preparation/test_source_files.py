"""Which files a source is made of, in which order, and what
they are: text in some encoding, not text, or damaged."""

import bz2
import gzip
import lzma
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import expect_error
from nasty import DECODABLE, NOT_TEXT, config, texts

from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation import source_files, sources
from gpt2_ddp.preparation.source_files import find_files, library_files, list_files
from gpt2_ddp.preparation.sources import scan


def test_files_are_sorted_by_the_parts_of_their_names(tmp_path):
    for name in (
        "b/x",
        "b.txt",
        "a/z",
        "a/b/c",
        "a-b",
        "a.b/c",
        "c",
        ".git/x",
        "a/.hidden",
        "b/\udcff",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("c")
    (tmp_path / "nothing").symlink_to("absent")
    (tmp_path / "round").symlink_to("round")
    visible = [
        path
        for path in tmp_path.rglob("*")
        if not path.is_dir() and not {".git", ".hidden"} & {*path.parts}
    ]
    assert len(visible) == 11
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    for pattern in ("", "/**", "/**/*"):
        assert list_files(f"{tmp_path}{pattern}") == sorted(visible)
    assert list_files(f"{tmp_path}/c") == [tmp_path / "c"]


GLOBS = {
    "*.txt": ["a.txt"],
    "**/*.txt": ["a/b/c.txt", "a.txt", "out/f.txt", "x.txt/y.txt"],
    "a/**": ["a/b/c.txt", "a/b/d.md"],
    "[ax]*/**/?.txt": ["a/b/c.txt", "x.txt/y.txt"],
    "PLACE/**/b/*.md": ["a/b/d.md"],
}


def test_globs_are_those_of_the_shell(tmp_path, monkeypatch):
    for name in (
        "x.txt/y.txt",
        "x.txt/z.md",
        "a/b/c.txt",
        "a/b/d.md",
        "a.txt",
        "a/.git/e.txt",
        "out/f.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for pattern, names in GLOBS.items():
        files = list_files(pattern.replace("PLACE", str(tmp_path)))
        assert [tmp_path / path for path in files] == [tmp_path / name for name in names], pattern
    assert Path("out/f.txt") not in {*list_files("**/*", "out")}
    assert tmp_path / "out/f.txt" not in {*list_files(str(tmp_path), "out")}


def test_several_sources_are_one_list(tmp_path, monkeypatch):
    """The same as that of a glob. A file has one place in it, and each source has files."""
    for name in ("b.txt", "a.txt", "c/d.txt", "c/e.txt", "B.txt", "f.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for names in (
        ["b.txt", "a.txt", "B.txt"],
        ["*.txt"],
        ["b.txt", "[aB].txt", f"{tmp_path}/b.txt"],
    ):
        found = find_files(config(names))
        assert sorted(path.name for path in found) == ["B.txt", "a.txt", "b.txt"], names
    assert [*map(str, find_files(config(["c", "f.md", "**/e.txt"])))] == [
        "c/d.txt",
        "c/e.txt",
        "f.md",
    ]
    for missing in ("g.txt", "*.rst"):
        expect_error(
            f"source = {re.escape(missing)}: no such files", find_files, config(["b.txt", missing])
        )


ODD = {
    "gzip.txt": (gzip.compress(b"text"), "gzip: name it .gz"),
    "text.txt.gz": (b"text", "is no gzip"),
    "rest.txt.gz": (gzip.compress(b"text") + b"rest", "other bytes follow its end; gzip -dc"),
    "rest.txt.bz2": (bz2.compress(b"text") + b"rest", "cannot be read .bz2 decompress failed"),
    "cut.txt.gz": (gzip.compress(b"text " * 9)[:-9], "Truncated"),
    "flipped.txt.gz": (gzip.compress(b"text")[:-8] + bytes(8), "is no gzip, or damaged: CRC"),
    "text.txt.xz": (lzma.compress(b"text " * 99), "xz -d"),
    "a.txt": ("two".encode("utf-16"), "is UTF-16 by its first bytes; convert it: iconv -f UTF-16"),
    "b.txt": ("a long text".encode("utf-16-be"), "UTF-16BE, it seems"),
    "a.csv": ("id,text\n1,x\n".encode("utf-16"), "is UTF-16"),
    "wide.txt.zst": (NOT_TEXT["wide.txt.zst"], "zstd -d --long=31"),
    "pointer.parquet": (NOT_TEXT["pointer.parquet"], "git lfs pull"),
    "pointer.txt": (NOT_TEXT["pointer.txt"], "git lfs pull"),
    "tree.txt": (NOT_TEXT["tree.txt"], "is a tar archive"),
    "paper.txt": (NOT_TEXT["paper.txt"], "is PDF; extract"),
    "book.epub": (
        b"PK\x03\x04\x14\0\0\0\x08\0" + b"text " * 99_999,
        "is zip or an Office document; unpack it",
    ),
    "small.docx": (
        b"PK\x03\x04" + bytes(range(128, 256)),
        "is zip or an Office document; unpack it",
    ),
    "notes.sqlite": (b"SQLite format 3\0" + b"text " * 99_999, "is SQLite; export"),
    "small.gz.txt": (b"\x1f\x8b" + bytes(range(128, 256)), "is not UTF-8 .*; gzip: name it .gz"),
}
"""Content that is not what the name says, and the error."""


@pytest.mark.parametrize("name", ODD)
def test_what_a_file_is_instead(tmp_path, name):
    content, words = ODD[name]
    (tmp_path / name).write_bytes(content)
    expect_error(words, scan, config(tmp_path / name))


def test_dates_in_the_future(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.utime(tmp_path / "a.txt", (4e9, 4e9))
    assert texts(tmp_path) == ["text"]


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    real = Path.iterdir

    def iterdir(folder):
        if folder.name == "a":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    expect_error(f"source = {tmp_path}/a: ", list_files, str(tmp_path))


def test_the_library_is_code_and_no_tables():
    """Of every version of Python: its tables are found
    by their lines, and some of them come and go."""
    files = library_files()
    assert files == sorted(files)
    root = Path(os.__file__).parent
    names = {path.relative_to(root).as_posix() for path in files}
    assert {
        "argparse.py",
        "typing.py",
        "keyword.py",
        "_compat_pickle.py",
        "html/__init__.py",
    } <= names
    tables = {
        "encodings/cp1252.py",
        "pydoc_data/topics.py",
        "html/entities.py",
        "stringprep.py",
        "locale.py",
    }
    assert not names & {*tables, *(path.name for path in root.glob("_sysconf*"))}


def test_what_can_be_decoded_is_read_byte_for_byte(tmp_path):
    for name, (data, text) in DECODABLE.items():
        (tmp_path / name).write_bytes(data)
        assert texts(tmp_path / name) == [text], name
    assert texts(tmp_path) == [DECODABLE[name][1] for name in sorted(DECODABLE)]


@pytest.mark.parametrize(("size", "good"), [(20_000, True), (19_999, False)])
def test_a_trace_of_what_cannot_be_decoded_is_replaced_and_counted(
    tmp_path, monkeypatch, size, good
):
    monkeypatch.setattr(source_files, "BLOCK", 1000)
    path = tmp_path / "text"
    path.write_bytes(b"word\n" * 300 + b"\xe9\xe8" + b"x" * (size - 1502))
    if good:
        assert texts(path)[0].count("\ufffd") == 2
    else:
        expect_error("cannot decode 2 characters", scan, config(path))


def test_a_character_that_straddles_two_blocks_is_one(tmp_path, monkeypatch):
    for module in (source_files, sources):
        monkeypatch.setattr(module, "BLOCK", 7)
    (tmp_path / "text").write_bytes(("仮名と漢字、" * 9).encode())
    assert texts(tmp_path / "text") == ["仮名と漢字、" * 9]


def test_control_characters_make_a_file_binary_by_their_share(tmp_path):
    for control in (b"\0", b"\x7f"):
        for count in (100, 101):
            content = b"one\ntwo " + control * count + b"x" * (9992 - count)
            (tmp_path / "text").write_bytes(content)
            (tmp_path / "text.gz").write_bytes(gzip.compress(content))
            for name in ("text", "text.gz"):
                with (
                    nullcontext()
                    if count == 100
                    else pytest.raises(UserError, match="101 control characters")
                ):
                    assert scan(config(tmp_path / name)).parts
    (tmp_path / "text").write_bytes(b"\x1b[1mbold\x1b[0m\x0c\r\n\t\a" * 100)  # a terminal's log
    assert texts(tmp_path / "text")
