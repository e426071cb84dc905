"""A folder that is made whole: whatever is refused or killed on the way, there is none or all of it."""

import os
from pathlib import Path

import pytest
from disk import interpose, refuse
from ranks import run_ranks

from gpt2_ddp.errors import UserError
from gpt2_ddp.export.check import ExportMismatch
from gpt2_ddp.export.export import atomic_directory

FILES = {"a": "one", "b": "two"}


def make(output: Path) -> None:
    with atomic_directory(output) as folder:
        for name, content in FILES.items():
            with open(folder / name, "w") as file:
                file.write(content)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_is_there_stays(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "full")
    for name in (tmp_path / "full", tmp_path / "full" / "mine", tmp_path / "dangling", Path("."), Path("/")):
        with pytest.raises(UserError, match="nothing is overwritten"):
            make(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "full"]
    assert content(tmp_path / "full") == {"mine": "x"}


def test_an_empty_folder_is_filled_and_what_a_killed_process_left_is_not_taken(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / ".made.tmp" / "half").mkdir(parents=True)
    (tmp_path / ".made.tmp" / "torn").write_text("t")
    make(tmp_path / "made")
    assert content(tmp_path / "made") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert sorted(os.listdir(tmp_path / "made")) == ["a", "b"]


def test_two_at_once(tmp_path):
    """The second is refused, and the first is not disturbed; nor by one who comes when it has just ended."""
    with atomic_directory(tmp_path / "made") as folder:
        (folder / "a").write_text("first")
        with pytest.raises(UserError, match="another process makes it"):
            make(tmp_path / "made")
    assert content(tmp_path / "made") == {"a": "first"}
    with pytest.raises(UserError, match="is there already"):
        make(tmp_path / "made")


def reject(output: Path, content: str) -> None:
    with atomic_directory(output) as folder:
        (folder / "a").write_text(content)
        raise ExportMismatch("it is wrong")


def test_rejected_ones_are_numbered(tmp_path):
    for number in "12":
        with pytest.raises(ExportMismatch) as caught:
            reject(tmp_path / "made", number)
    assert caught.value.left == tmp_path / "made.rejected-2"
    assert [content(path) for path in sorted(tmp_path.iterdir())] == [{"a": "1"}, {"a": "2"}]


def at_every_operation(output: Path, kill: bool) -> list[str]:
    """Lets the k-th operation that changes a file refuse, or kills there, for all k; returns what was left, each time,
    of a folder that is not whole."""
    count = 0

    def tell(operation: str, name: str) -> None:
        nonlocal count
        count -= 1
        if count == 0:
            os._exit(9) if kill else refuse()

    interpose(output.parent, tell)
    found, at = [], 0
    while True:
        at += 1
        if (child := os.fork()) == 0:
            count = at
            try:
                make(output)
            except UserError as error:
                os._exit(2 if "make room on that disk" in str(error) else 3)
            os._exit(0 if count > 0 else 4)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended == 0:
            return [*found, f"{at - 1} operations"]
        if ended != (9 if kill else 2):
            found.append(f"{at}: ended with {ended}")
        if output.exists():
            found += [f"{at}: {content(output)}"] if content(output) != FILES else []
            for path in output.iterdir():
                path.unlink()
            output.rmdir()
        elif not kill and os.listdir(output.parent):
            found.append(f"{at}: left {os.listdir(output.parent)}")


@pytest.mark.parametrize("kill", [False, True])
def test_refused_or_killed_anywhere(kill, tmp_path):
    (tmp_path / "exports").mkdir()
    (left,) = run_ranks(at_every_operation, 1, tmp_path / "exports" / "made", kill)
    assert left[:-1] == []
    assert int(left[-1].split()[0]) > 10
