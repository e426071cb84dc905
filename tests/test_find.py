"""Which files a source is made of, and in which order."""

import re
from pathlib import Path

from gpt2_ddp.preparation.source_files import find_files, library_files

ENTRY = re.compile(r"""\s*(?:b?'[^']*'|b?"[^"]*"|[\[({]*-?0?x?[0-9a-fA-F]+)[\])}]*\s*(?:[:,)]|$)""")


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
    files = library_files()
    assert files == sorted(files)
    assert {"argparse.py", "inspect.py", "typing.py"} <= {path.name for path in files}
    for path in (path for path in files if path.stat().st_size > 4000):
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()[:1] not in ("", "#")]
        entries = [line for line in lines if ENTRY.match(line)]
        assert len(entries) < 0.6 * len(lines), path
    names = {Path(*path.parts[-2:]).as_posix() for path in files}
    assert not names & {"encodings/cp1252.py", "pydoc_data/topics.py", "html/entities.py", "re/_casefix.py"}
