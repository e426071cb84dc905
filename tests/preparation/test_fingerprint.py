"""A source that changed after its tokens were made is noticed."""

import json
import os
import platform
import shutil
from pathlib import Path

import pytest
from commands import expect_error, snapshot

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.preparation import row_sources, source_files
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.preparation.source_files import RECORD


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of six small files, named as in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "d/e", "d/f", "ü\n"):
        path = tmp_path / "texts" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    return Path("texts")


def config(source="texts", **changes):
    values = {
        "source": source,
        "output": "out",
        "tokenizer": "bytes",
        "val_fraction": 0,
        "workers": 1,
    }
    return PrepareConfig.model_validate(values | changes)


def rewrite(path, text):
    """Other content of the same size and time as a careless
    copy would leave it, but for the nanoseconds."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_a_change_is_noticed_and_nothing_is_lost(texts):
    made = prepare(config())
    before = snapshot(Path("out"))
    assert prepare(config()) == made
    rewrite(texts / "a.txt", "this is A\n")
    (texts / "d/f.txt").unlink()
    for name in ("1", "2", "3"):
        (texts / f"{name}.txt").write_text("new\n")
    expect_error("source = texts: has changed", prepare, config())
    assert snapshot(Path("out")) == before
    assert prepare(config(output="other")).hash != made.hash


def test_files_of_other_times_or_in_another_place_are_the_same(texts, monkeypatch):
    made = prepare(config())
    read = []
    sha256_file = source_files.sha256_file
    monkeypatch.setattr(
        source_files, "sha256_file", lambda path: read.append(path.name) or sha256_file(path)
    )
    prepare(config())
    assert read == []  # size and time are enough
    os.utime(texts / "b.txt", ns=(1, 1))
    prepare(config())
    assert read == ["b.txt"]
    shutil.copytree(texts, "copied/texts")
    monkeypatch.chdir("copied")
    assert prepare(config()).recipe == made.recipe
    shutil.copytree("../out", "again")
    assert prepare(config(output="again")) == made


def test_without_its_record_a_change_is_noticed_too(texts):
    prepare(config())
    record = Path("out") / RECORD
    names = [json.loads(line)[0] for line in record.read_text().splitlines()]
    assert names == ["a.txt", "b.txt", "c.txt", "d/e.txt", "d/f.txt", "ü\n.txt"]
    for damage in (record.unlink, lambda: record.write_text('["a.txt", 10, 1, "x"]\n')):
        damage()
        prepare(config())
        (texts / "c.txt").write_text("this is another\n")
        expect_error("source = texts: has changed", prepare, config())
        (texts / "c.txt").write_text("this is c\n")


def test_sources_that_cannot_be_compared_are_taken_as_they_were(texts):
    made = prepare(config())
    texts.rename("elsewhere")
    assert prepare(config()) == made
    expect_error("^output = .*made with column text;", prepare, config(column="body"))


@pytest.mark.parametrize("source", ["texts/*.txt", "texts/a.txt", "./texts/**/*.txt"])
def test_names_do_not_depend_on_where_the_source_is(texts, source):
    prepare(config(source))
    assert json.loads((Path("out") / RECORD).read_text().splitlines()[0])[0] == "a.txt"


def test_another_python_has_another_library(texts, monkeypatch):
    monkeypatch.setattr(source_files.sysconfig, "get_path", lambda _: "texts")
    (texts / "json.py").write_text("import this\n")
    assert prepare(config("stdlib")).source == f"stdlib (Python {platform.python_version()})"
    (texts / "tomllib.py").write_text("import that\n")
    expect_error("^source = stdlib: has changed", prepare, config("stdlib"))


def test_a_dataset_on_the_hub_has_a_commit(tmp_path, monkeypatch):
    commits = iter(["a" * 40, "a" * 40, None, "b" * 40])
    hub = row_sources.RowSource(row_sources.hub_rows, lambda _: next(commits))
    monkeypatch.setitem(row_sources.ROW_SOURCES, "hub", hub)
    here = config("hub:owner/name")
    was = source_files.fingerprint(here, [])
    assert was == {"commit": "a" * 40}
    for _ in ("the same", "nobody answers"):
        source_files.check_unchanged(tmp_path, here, was)
    expect_error("^source = hub:owner/name: ", source_files.check_unchanged, tmp_path, here, was)
