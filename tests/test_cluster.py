"""The cluster check on real processes: what it finds, and that it ends within its bound naming whom it waited for."""

import json
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist
from close import distance
from commands import ROOT, forked
from ranks import CONTEXT, free_port, rank_environment, write_to

SCRIPT = str(ROOT / "scripts/check_cluster.py")
BOUND = 3.0  # seconds that the ranks wait; they add five for what others find, and the machine may be busy
PATIENT = ["--timeout_seconds", "60"]  # where nobody is missing, so that no rank has to wait for so long
SIGNS = "check_cluster/0/watch/0/signs"  # heartbeats of the ranks
HOST = os.uname().nodename


class Ranks:
    """Ranks started one by one by hand, each with its stdout and stderr in a file."""

    def __init__(self, folder: Path, world: int):
        self.folder, self.world, self.port = folder, world, free_port()
        self.processes: dict[str, BaseProcess] = {}

    def start(self, rank: int, *flags: str, before: Callable[[], None] | None = None, name: str = "") -> None:
        env = rank_environment(rank, self.world, self.port) | {"OMP_NUM_THREADS": "1"}
        name = name or str(rank)
        arguments = [SCRIPT, "--timeout_seconds", str(BOUND), "--device", "cpu", *flags]
        process = CONTEXT.Process(target=_command, args=(self.folder / name, env, arguments, before), daemon=True)
        process.start()
        self.processes[name] = process

    def ended(self, within: float, but: str = "") -> dict[str, tuple[int | None, str]]:
        """Exit code and output of each rank `but` one; None for the code of those still running."""
        deadline = time.monotonic() + within
        expected = {name: process for name, process in self.processes.items() if name != but}
        for process in expected.values():
            process.join(max(deadline - time.monotonic(), 0))
        return {name: (p.exitcode, (self.folder / name).read_text()) for name, p in expected.items()}

    def wait_for_all_reduces(self) -> None:
        """Until every rank is at them, and knows it of every other."""
        options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=30)}
        signs = dist.PrefixStore(SIGNS, dist.TCPStore("127.0.0.1", self.port, **options))

        def turn(rank: int) -> int:
            return json.loads(signs.get(str(rank)))[1]

        for rank in range(self.world):
            while b"all-reduce" not in signs.get(str(rank)):
                time.sleep(0.05)
        # a rank reads the others' signs right after it has left its own: when the next but one is there, it has done so
        for rank, after in enumerate([turn(rank) for rank in range(self.world)]):
            while turn(rank) < after + 2:
                time.sleep(0.05)


def _command(output: Path, env: dict[str, str], arguments: list[str], before: Callable[[], None] | None) -> None:
    write_to([str(output)] * 2)
    os.environ.update(env)
    sys.argv = arguments
    if before:
        before()
    runpy.run_path(SCRIPT, run_name="__main__")


@pytest.fixture
def ranks(tmp_path: Path):
    made = []

    def make(world: int) -> Ranks:
        made.append(Ranks(tmp_path, world))
        return made[-1]

    yield make
    for process in (process for group in made for process in group.processes.values()):
        process.kill()
        process.join()


def test_ranks_that_all_work(ranks, tmp_path):
    world = 3
    group = ranks(world)
    for rank in range(world):
        group.start(rank, *PATIENT, "--sizes", "8", "4096", "1048576", "--output", str(tmp_path / "found.json"))
    ended = group.ended(60)
    assert [code for code, _ in ended.values()] == [0] * world, ended
    assert "all-reduce" in ended["0"][1]
    assert "all-reduce" not in ended["1"][1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [facts["rank"] for facts in found["ranks"]] == list(range(world))
    assert found["ranks"][0]["ip"] == "127.0.0.1"
    assert [row["bytes"] for row in found["all_reduce"]] == [8, 4096, 1048576]
    for row in found["all_reduce"]:
        assert row["wrong_ranks"] == []
        assert distance(row["algorithm_gb_per_s"], row["bytes"] / row["median_us"] / 1e3, 1) < 2e-4
        assert distance(row["bus_gb_per_s"], row["algorithm_gb_per_s"] * 2 * (world - 1) / world, 1) < 2e-4


def test_a_rank_that_never_starts_is_named(ranks):
    group = ranks(3)
    group.start(0)
    group.start(2)
    ended = group.ended(BOUND + 15)
    assert [code for code, _ in ended.values()] == [2, 2], ended
    assert f"error: ranks = 1: did not connect within 3 s (connected: {HOST} on ranks 0, 2" in ended["0"][1]
    assert not any("Traceback" in text for _, text in ended.values())
    assert "error:" not in ended["2"][1], "rank 0 has said it"


def test_an_output_that_cannot_be_written_is_said_before_anybody_is_waited_for(ranks, tmp_path):
    group = ranks(2)
    group.start(0, *PATIENT, "--output", str(tmp_path / "none/found.json"))
    ((code, said),) = group.ended(30).values()
    assert (code, said.startswith(f"error: output = {tmp_path}/none/found.json: ")) == (2, True)


ENDLESS = ["--repeats", "100000000", "--sizes", "4096"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)])
def test_a_rank_lost_in_the_middle_is_named(ranks, number, victim):
    group = ranks(3)
    for rank in range(3):
        group.start(rank, *ENDLESS)
    group.wait_for_all_reduces()
    os.kill(group.processes[str(victim)].pid, number)
    ended = group.ended(BOUND + 30, but=str(victim))
    assert [code for code, _ in ended.values()] == [2, 2], ended
    speakers = [text for text in ended.values() if f"error: rank {victim} on {HOST}: " in text[1]]
    assert len(speakers) >= 1, ended
    assert all("last stage: all-reduce of 4,096 bytes" in text for _, text in speakers)


def _other_version() -> None:
    import accelerate

    accelerate.__version__ = "0.34.2"


def _wrong_sums() -> None:
    right = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        right(tensor, *args, **kwargs)
        tensor[-1] += 1

    dist.all_reduce = all_reduce


@pytest.mark.parametrize(("before", "line"), [
    (_other_version, rf"accelerate = \S+ on ranks 0 \({HOST}\), 0.34.2 on ranks 1"),
    (_wrong_sums, r"all-reduce = 4096 bytes on ranks \[1\]: wrong sums"),
])  # fmt: skip
def test_a_rank_that_differs_is_named(ranks, before, line):
    group = ranks(2)
    group.start(0, *PATIENT, "--sizes", "4096")
    group.start(1, *PATIENT, "--sizes", "4096", before=before)
    ended = group.ended(60)
    assert [code for code, _ in ended.values()] == [2, 2], ended
    assert len(re.findall(f"error: {line}", ended["0"][1])) == ended["0"][1].count("error:") == 1, ended


@pytest.mark.slow
def test_two_processes_with_one_rank(ranks):
    group = ranks(3)
    group.start(0)
    group.start(1)
    group.start(1, name="second")
    ended = group.ended(2 * BOUND + 20)
    assert all(code == 2 for code, _ in ended.values()), ended
    assert any("error: RANK = 1: a second process" in text for _, text in ended.values())
    assert "error: ranks = 2: did not connect" in ended["0"][1]


def _no_connection() -> None:
    dist.all_reduce = lambda tensor: time.sleep(100)


@pytest.mark.slow
def test_ranks_that_live_but_are_not_connected(ranks):
    group = ranks(2)
    group.start(0)
    group.start(1, before=_no_connection)
    ended = group.ended(BOUND + 20)
    assert [code for code, _ in ended.values()] == [2, 2], ended
    (line,) = [line for _, text in ended.values() for line in text.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: rank 1 on {HOST}: ")
    assert " s at all-reduce of 8 bytes" in line


def test_one_process_says_what_to_type():
    found = forked([SCRIPT, "--device", "cpu"], ROOT)
    assert found.returncode == 0, found.stderr
    assert all(part in found.stdout for part in ("only one process", "torchrun --nproc_per_node 2"))
    found = forked([SCRIPT, "--device", "cpu"], ROOT, SLURM_STEP_NUM_TASKS="2")
    assert found.returncode == 2
    assert "error: processes = 2: only 1 started" in found.stderr
