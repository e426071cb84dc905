"""Files that survive a crash: on disk before they get their
name, and their names on disk before anybody needs them."""

import json
import os
import pwd
from pathlib import Path

import pytest
from commands import expect_error
from disk import refuse

from gpt2_ddp.files import (
    free_name,
    local_copy,
    parse_json,
    url_of_copy,
    user_folder,
    write_atomically,
)


def test_content_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    fsync = os.fsync
    replace = Path.replace

    def note_fsync(descriptor):
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("fsync", place.name, place.read_text() if place.is_file() else None))
        fsync(descriptor)

    def note_replace(path, target):
        done.append(("rename", path.name, Path(target).name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    (tmp_path / "file").write_text("old")
    write_atomically(tmp_path / "file", "new")
    assert done == [
        ("fsync", ".file.tmp", "new"),
        ("rename", ".file.tmp", "file"),
        ("fsync", tmp_path.name, None),
    ]
    assert (tmp_path / "file").read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_what_a_disk_refuses_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: refuse())
    expect_error(
        "file = .*/file: .*No space left on device", write_atomically, tmp_path / "file", "new"
    )
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_planted_link_does_not_lead_a_write_elsewhere(tmp_path):
    (tmp_path / "diary").write_text("mine")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "diary")
    write_atomically(tmp_path / "file", "new")
    assert [(tmp_path / name).read_text() for name in ("diary", "file")] == ["mine", "new"]
    (tmp_path / "other").symlink_to(tmp_path / "nothing")  # it exists, and leads nowhere
    assert free_name(tmp_path / "other").name == "other-2"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1" * 400, "more than 64 bits"),
        (f'{{"a": -{"9" * 5000}}}', "limit"),
        ('{"a": 9223372036854775808}', "more than 64 bits"),
        ("[" * 60 + "]" * 60, "nested more than 50 levels"),
        ('{"a":' * 99999, "nested more than 50 levels"),
        ("{", "Expecting"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_json_that_is_not_taken(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_json_that_is_taken():
    nested = json.dumps({"a": [{"b": [2**63 - 1, -(2**63), 1.5, None, "\ud800"]}]})
    assert parse_json(nested) == parse_json(nested.encode()) == json.loads(nested)


def test_a_user_without_a_home(monkeypatch):
    """As a container has that runs with a number of its own."""

    def unknown(user):
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    expect_error(
        "^HOME = '': user .* has no home; set HOME or XDG_CACHE_HOME", local_copy, "hub:owner/name"
    )
    with pytest.raises(FileNotFoundError):
        user_folder("XDG_STATE_HOME", ".local/state")
    monkeypatch.setenv("XDG_CACHE_HOME", "/here")
    assert local_copy("s3://bucket/run") == "/here/gpt2_ddp/s3/bucket/run"


def test_a_copy_has_the_name_of_its_url(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for url in ("s3://bucket/runs/a", "file:///mnt/runs/a", "memory://a/b", "local:///a"):
        assert url_of_copy(local_copy(url)) == url
    folders = [local_copy("hub:owner/name"), "runs/a", f"{tmp_path}/gpt2_ddp", "/"]
    for folder in (*folders, f"{tmp_path}/other/s3/bucket"):
        assert url_of_copy(folder) == folder
