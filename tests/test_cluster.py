"""The cluster check on real processes: what it finds, and
that it ends within its bound naming whom it waited for."""

import os
import re
import runpy
import socket
import sys
import time

import pytest
import torch.distributed as dist
from commands import ROOT, forked, last_of_each
from ranks import CONTEXT, rank_environment, write_to

from gpt2_ddp import cluster
from gpt2_ddp.config.tools import CheckClusterConfig
from gpt2_ddp.distributed.spawn import reserve_port

SCRIPT = str(ROOT / "scripts/check_cluster.py")
# seconds that the ranks wait; rank 0 serves the store for five more, and the machine may be busy
BOUND = 3.0
# where nobody is missing, so that no rank has to wait for so long
PATIENT = ["--timeout_seconds", "60"]
HOST = os.uname().nodename


def _command(output, env, flags, before):
    write_to([str(output)] * 2)
    os.environ.update(env, OMP_NUM_THREADS="1")
    sys.argv = last_of_each([SCRIPT, "--device", "cpu", *flags])
    if before:
        before()
    runpy.run_path(SCRIPT, run_name="__main__")


@pytest.fixture
def check(tmp_path):
    """Starts ranks of a world by hand, and returns the exit code and the output of each. The last
    one calls `before` first."""
    processes = []

    def run(ranks, world, *flags, before=None, **env):
        port = reserve_port()
        for number, rank in enumerate(ranks):
            own = rank_environment(rank, world, port) | env
            words = last_of_each(["--timeout_seconds", str(BOUND), *flags])
            first = before if number == len(ranks) - 1 else None
            args = (tmp_path / str(number), own, words, first)
            processes.append(CONTEXT.Process(target=_command, args=args, daemon=True))
            processes[-1].start()
        deadline = time.monotonic() + 60
        ended = []
        for number, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 0))
            ended.append((process.exitcode, (tmp_path / str(number)).read_text()))
        return ended

    yield run
    for process in processes:
        process.kill()
        process.join()


def test_ranks_that_all_work(check):
    ended = check([0, 1, 2], 3, *PATIENT)
    assert [code for code, _ in ended] == [0] * 3, ended
    assert ["bus bandwidth" in said for _, said in ended] == [True, False, False]


def test_the_bandwidth_is_that_of_nccl_tests(monkeypatch, capsys):
    """Of the slowest rank, for what each rank sends and receives."""
    facts = dict.fromkeys(
        ("rank", "host", "device", "python", "torch", "accelerate", "cuda", "nccl"), "-"
    )
    for name in ("connect", "rendezvous", "gather_facts", "pick_device"):
        monkeypatch.setattr(cluster, name, lambda *_: [facts] * 4)
    monkeypatch.setattr(
        cluster, "_measure", lambda *_: [(0.05, False), (0.1, False), (0.02, False), (0.1, False)]
    )
    monkeypatch.setattr(cluster, "world_size", lambda: 4)
    monkeypatch.setenv("RANK", "0")
    cluster.check_cluster(CheckClusterConfig())
    assert "bus bandwidth 1.007 GB/s" in capsys.readouterr().out  # 2**26 bytes / 0.1 s * 2 * 3 / 4


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


@pytest.mark.parametrize(
    ("ranks", "world", "options", "expected"),
    [
        ([0, 2], 3, {}, [rf"ranks = 1: .* 3 s \(connected: 0 \({HOST}\), 2 \({HOST}\)\)"]),
        (
            [1],
            2,
            {"MASTER_ADDR": "no.such.host"},
            [r"MASTER_ADDR = no\.such\.host:\d+: rank 1 .* within 3 s"],
        ),
        (
            [0, 1],
            2,
            {"before": _other_version},
            [rf"accelerate = \S+ on ranks 0 \({HOST}\); 0\.34\.2 on ranks 1 "],
        ),
        ([0, 1], 2, {"before": _wrong_sums}, [r"all-reduce = ranks \[1\]: wrong sums"]),
        pytest.param([0, 1, 1], 3, {}, ["ranks = 2: ", "RANK = 1: a second process"], marks=SLOW),
        pytest.param(
            [0, 1],
            2,
            {"before": _no_connection},
            [f"rank 1 on {HOST}: .* at all-reduce of 67,"],
            marks=SLOW,
        ),
    ],
)
def test_the_error_names_the_rank(check, ranks, world, options, expected):
    all_work = options.get("before") in (_other_version, _wrong_sums)
    ended = check(ranks, world, *(PATIENT if all_work else []), **options)
    assert [code for code, _ in ended] == [2] * len(ranks), ended
    errors = [line for _, said in ended for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(expected), errors
    assert all(any(re.match(f"error: {part}", line) for line in errors) for part in expected), (
        errors
    )
    assert not any("Traceback" in said for _, said in ended)


def test_a_port_that_another_program_has(check):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ((code, said),) = check([0], 2, MASTER_PORT=str(other.getsockname()[1]))
    assert (code, "error: MASTER_PORT = " in said) == (2, True)


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({}, 0, "torchrun --nproc_per_node 2"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 2, "error: processes = 2: only 1 started"),
    ],
)
def test_one_process_says_what_to_type(env, code, said):
    found = forked([SCRIPT, "--device", "cpu"], ROOT, **env)
    assert (found.returncode, said in found.stdout + found.stderr) == (code, True)
