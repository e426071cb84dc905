"""Commands for the tests: a script in this process, and launchers as people type them."""

import contextlib
import hashlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ranks import run_ranks

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
BIN = Path(sys.executable).parent
ACCELERATE = [str(BIN / "accelerate"), "launch"]
TORCHRUN = [str(BIN / "torchrun")]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "OMP_", "PET_"))}
    return kept | {"HF_HOME": str(Path(tempfile.gettempdir()) / "no_accelerate_config"), **more}


def launch(command: list[str], **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )


def run_script(name: str, arguments: list[str]) -> tuple[int, str]:
    """Runs a script as `python scripts/name.py arguments`; returns its exit code and what it wrote to stderr."""
    sys.argv = [f"{name}.py", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, errors.getvalue()


def run_scripts(commands: list[tuple[str, list[str]]]) -> list[tuple[int, str]]:
    """Runs scripts in turn in this process; `run_script` of each."""
    return [run_script(name, arguments) for name, arguments in commands]


def snapshot(folder: Path) -> dict[str, str]:
    not_counted = (".lock", ".prepare.lock", ".verified.jsonl")
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in not_counted)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def expect_mistake(folder: Path, script: str, arguments: list[str], *words: str, world: int = 1) -> None:
    """One `error:` line with all of `words`, exit code 2, no traceback, and no file of `folder` touched."""
    before = snapshot(folder)
    for rank, (code, errors) in enumerate(run_ranks(run_script, world, script, arguments)):
        lines = [line for line in errors.splitlines() if line.startswith("error:")]
        assert code == 2, errors
        assert "Traceback" not in errors
        assert len(lines) == (1 if rank == 0 else 0), errors
        for word in words if rank == 0 else ():
            assert word in lines[0], lines[0]
    assert {name: digest for name, digest in snapshot(folder).items() if name in before} == before


HOLD = """import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()"""


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds the lock meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        yield
        assert holder.stdin
        holder.stdin.close()
