"""Files that survive a crash: on disk before they get their name, and their names on disk before anybody needs them."""

import os
from pathlib import Path

from gpt2_ddp.files import write_atomically


def test_content_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, Path.replace

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
