"""Standard streams: what they cannot show or write ends no command, and is told as nothing else."""

import os
import subprocess
import sys
import textwrap

import pytest
from commands import environment

SAYS = """
    import sys
    from pathlib import Path
    from gpt2_ddp.config.tools import StatusConfig
    from gpt2_ddp.distributed.spawn import start_processes
    from gpt2_ddp.errors import UserError
    from gpt2_ddp.files import writing
    from gpt2_ddp.script import run_command

    def say(word):
        print("größer 大 \\ud800", word, flush=True)
        print("größer 大", word, file=sys.stderr, flush=True)
        return word

    def main(config):
        try:
            with writing(Path("data.bin")):
                say("one")
                start_processes(say, 1, "two")
        except Exception as error:
            Path("blamed").write_text(repr(error))
            raise

    if __name__ == "__main__":
        run_command(StatusConfig, main)
"""


def run(folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **env):
    """The ended process of a command that prints while it writes data, in itself and in a rank."""
    script = folder / "says.py"
    script.write_text(textwrap.dedent(SAYS))
    return subprocess.run(
        [sys.executable, str(script)],
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=environment(**env),
    )


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("latin-1", "größer ? ?"),
        ("ascii", "gr??er ? ?"),
        ("gbk", "gr??er 大 ?"),
        ("utf-8", "größer 大 ?"),
    ],
)
def test_characters_that_the_terminal_lacks_become_question_marks(tmp_path, encoding, shown):
    done = run(tmp_path, PYTHONIOENCODING=encoding)
    expected = "".join(f"{shown} {word}\n" for word in ("one", "two"))
    assert (done.returncode, done.stdout.decode(encoding)) == (0, expected), done.stderr


def test_a_closed_pipe_is_no_damage_of_what_is_written(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(tmp_path, stdout=writer)
    assert (done.returncode, done.stderr) == (141, b"")
    assert not (tmp_path / "blamed").exists()


def test_a_full_disk_of_the_output_is_named(tmp_path):
    with open("/dev/full", "w") as full:
        done = run(tmp_path, stdout=full)
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
        assert done.stderr.startswith(
            b"error: standard output = this one: cannot be written (No space left"
        )
        assert not (tmp_path / "blamed").exists()
        assert run(tmp_path, stderr=full).returncode == 0, (
            "what cannot be told on stderr ends nothing"
        )


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_closed_stream_goes_nowhere(tmp_path, closed):
    """As by `>&-`. Its number is that of no file that the command opens."""
    opened = "import os; from gpt2_ddp.distributed.streams import standard_streams\n"
    opened += (
        f"with standard_streams():\n print('said', flush=True); os.write({closed[-1]}, b'by a "
        "library')\n"
    )
    opened += " file = open('data.bin', 'wb'); print(file.fileno(), file=open('number', 'w'))\n"
    redirections = " ".join(f"{number}>&-" for number in closed)
    command = f'"$0" -c "$1" {redirections}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, opened],
        capture_output=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"" if 1 in closed else b"said\n")
    assert int((tmp_path / "number").read_text()) > 2
    assert (tmp_path / "data.bin").read_bytes() == b""


def test_help_for_a_reader_that_has_left(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    for words in (["status", "--help"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "gpt2_ddp", *words], stdout=writer, stderr=subprocess.PIPE
        )
        assert (done.returncode, done.stderr) == (141, b""), words
