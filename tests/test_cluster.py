"""The cluster check on real processes: what it finds, and that it ends within its bound naming whom it waited for."""

import os
import re
import runpy
import socket
import sys
import time

import pytest
import torch.distributed as dist
from close import distance
from commands import ROOT, forked
from ranks import CONTEXT, rank_environment, write_to

from gpt2_ddp.distributed.spawn import reserve_port

SCRIPT = str(ROOT / "scripts/check_cluster.py")
BOUND = 3.0  # seconds that the ranks wait; rank 0 serves the store for five more, and the machine may be busy
PATIENT = ["--timeout_seconds", "60"]  # where nobody is missing, so that no rank has to wait for so long
HOST = os.uname().nodename


def _command(output, env, flags, before):
    write_to([str(output)] * 2)
    os.environ.update(env, OMP_NUM_THREADS="1")
    sys.argv = [SCRIPT, "--device", "cpu", *flags]
    if before:
        before()
    runpy.run_path(SCRIPT, run_name="__main__")


@pytest.fixture
def check(tmp_path):
    """Starts ranks of a world by hand, and returns the exit code and the output of each. The last one calls `before`
    first."""
    processes = []

    def run(ranks, world, *flags, before=None, **env):
        port = reserve_port()
        for number, rank in enumerate(ranks):
            own = rank_environment(rank, world, port) | env
            words = ["--timeout_seconds", str(BOUND), *flags]
            first = before if number == len(ranks) - 1 else None
            args = (tmp_path / str(number), own, words, first)
            processes.append(CONTEXT.Process(target=_command, args=args, daemon=True))
            processes[-1].start()
        deadline, ended = time.monotonic() + 60, []
        for number, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 0))
            ended.append((process.exitcode, (tmp_path / str(number)).read_text()))
        return ended

    yield run
    for process in processes:
        process.kill()
        process.join()


def test_ranks_that_all_work(check):
    world, sizes = 3, [8, 4096, 1048576]
    flags = [*PATIENT, "--sizes", *map(str, sizes)]
    ended = check([0, 1, 2], world, *flags)
    assert [code for code, _ in ended] == [0] * world, ended
    assert ["bus_gb_per_s" in said for _, said in ended] == [True, False, False]
    _, _, table = ended[0][1].partition("wrong_ranks\n")
    for size, line in zip(sizes, table.splitlines(), strict=False):
        found, median, algorithm, bus, wrong = line.split()
        assert (int(found), wrong) == (size, "[]")
        assert distance(float(algorithm), size / float(median) / 1e3, 1) < 2e-4
        assert distance(float(bus), size / float(median) / 1e3 * 2 * (world - 1) / world, 1) < 2e-4


def _other_version():
    import accelerate

    accelerate.__version__ = "0.34.2"


def _wrong_sums():
    right = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        right(tensor, *args, **kwargs)
        tensor[-1] += 1

    dist.all_reduce = all_reduce


def _no_connection():
    dist.all_reduce = lambda tensor: time.sleep(100)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "world", "options", "expected"), [
    ([0, 2], 3, {}, [rf"ranks = 1: .* 3 s \(connected: 0 \({HOST}\), 2 \({HOST}\)\)"]),
    ([1], 2, {"MASTER_ADDR": "no.such.host"}, [r"MASTER_ADDR = no\.such\.host:\d+: rank 1 .* within 3 s"]),
    ([0, 1], 2, {"before": _other_version}, [rf"accelerate = \S+ on ranks 0 \({HOST}\); 0\.34\.2 on ranks 1 "]),
    ([0, 1], 2, {"before": _wrong_sums}, [r"all-reduce = 4096 bytes on ranks \[1\]"]),
    pytest.param([0, 1, 1], 3, {}, ["ranks = 2: ", "RANK = 1: a second process"], marks=SLOW),
    pytest.param([0, 1], 2, {"before": _no_connection}, [f"rank 1 on {HOST}: .* at all-reduce of 4,096"], marks=SLOW),
])  # fmt: skip
def test_the_error_names_the_rank(check, ranks, world, options, expected):
    all_work = options.get("before") in (_other_version, _wrong_sums)
    ended = check(ranks, world, "--sizes", "4096", *(PATIENT if all_work else []), **options)
    assert [code for code, _ in ended] == [2] * len(ranks), ended
    errors = [line for _, said in ended for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(expected), errors
    assert all(any(re.match(f"error: {part}", line) for line in errors) for part in expected), errors
    assert not any("Traceback" in said for _, said in ended)


def test_a_port_that_another_program_has(check):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ((code, said),) = check([0], 2, MASTER_PORT=str(other.getsockname()[1]))
    assert (code, "error: MASTER_PORT = " in said) == (2, True)


@pytest.mark.parametrize(("env", "code", "said"), [
    ({}, 0, "torchrun --nproc_per_node 2"), ({"SLURM_STEP_NUM_TASKS": "2"}, 2, "error: processes = 2: only 1 started"),
])  # fmt: skip
def test_one_process_says_what_to_type(env, code, said):
    found = forked([SCRIPT, "--device", "cpu"], ROOT, **env)
    assert (found.returncode, said in found.stdout + found.stderr) == (code, True)
