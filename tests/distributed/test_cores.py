"""Usable cores and free memory, on machines made of files."""

import importlib
import os
from types import SimpleNamespace

import psutil
import pytest
import torch
from commands import ROOT

import gpt2_ddp
from gpt2_ddp.distributed import environment as cores
from gpt2_ddp.distributed.environment import free_memory, usable_cores
from gpt2_ddp.distributed.launch import set_cpu_threads
from gpt2_ddp.distributed.spawn import start_processes


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of eight cores with two hyperthreads each,
    all of which may be used; writes further files."""
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)

    def write(file, text):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    for thread in range(16):
        write(
            f"sys/devices/system/cpu/cpu{thread}/topology/core_cpus_list",
            f"{thread % 8},{thread % 8 + 8}",
        )
    return write


@pytest.mark.parametrize(("mask", "expected"), [({3}, 1), ({0, 8, 1, 9}, 2), (set(range(16)), 8)])
def test_the_affinity_mask_counts(machine, monkeypatch, mask, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask)
    assert usable_cores() == expected
    assert usable_cores(hyperthreads=True) == len(mask)


def test_without_topology_the_systems_count_of_physical_cores_holds(tmp_path, monkeypatch, machine):
    monkeypatch.setattr(cores, "ROOT", tmp_path / "empty")
    assert usable_cores() == 8
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    assert usable_cores() == 16


GROUPS = [
    ("cores", 3, "0::/", {"cpu.max": "300000 100000"}),
    (
        "cores",
        1,
        "0::/user/job",
        {"user/job/cpu.max": "100000 100000", "user/cpu.max": "400000 100000"},
    ),
    (
        "cores",
        4,
        "0::/user/job",
        {"user/job/cpu.max": "500000 100000", "user/cpu.max": "400000 100000"},
    ),
    ("cores", 1, "0::/", {"cpu.max": "20000 100000"}),
    ("cores", 8, "", {}),
    ("memory", 9000, "", {}),
    (
        "memory",
        2600,
        "0::/job",
        {
            "job/memory.max": 3000,
            "job/memory.current": 2500,
            "job/memory.stat": "anon 9\nfile 2100\ninactive_file 1500\nactive_file 600",
        },
    ),
    (
        "memory",
        0,
        "0::/a/b",
        {
            "a/memory.max": 4000,
            "a/memory.current": 4100,
            "a/b/memory.max": 5000,
            "a/b/memory.current": 1,
        },
    ),
    ("memory", 6000, "0::/", {"memory.max": "max", "memory.high": 7000, "memory.current": 1000}),
]
"""What there is and how much of it, a process's control groups, and files below sys/fs/cgroup."""


@pytest.mark.parametrize(("kind", "expected", "groups", "files"), GROUPS)
def test_the_limits_of_control_groups_count(machine, monkeypatch, kind, expected, groups, files):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    machine("proc/self/cgroup", groups)
    for file, text in files.items():
        machine(f"sys/fs/cgroup/{file}", text)
    assert (usable_cores() if kind == "cores" else free_memory()) == expected


@pytest.mark.parametrize(
    ("quota", "processes", "threads"), [("max", 1, 8), ("max", 2, 4), ("100000", 2, 1)]
)
def test_threads_are_the_processes_shares(machine, monkeypatch, quota, processes, threads):
    """Of threads beyond a quota the kernel stops all for the rest of each period."""
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/cpu.max", f"{quota} 100000")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start_processes(os.getenv, processes, "OMP_NUM_THREADS") == str(threads)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that what is set below is undone
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    set_cpu_threads()
    assert chosen == [threads]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_leave_the_core_soon_unless_the_user_chose(monkeypatch, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what the package sets is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    importlib.reload(gpt2_ddp)
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_the_package_is_imported_before_torch():
    """By every script: what the package sets for torch's threads is there when torch is loaded."""
    for script in (ROOT / "scripts").glob("*.py"):
        if script.name.startswith("hello"):
            continue
        imports = [
            line.split()[1].partition(".")[0]
            for line in script.read_text().splitlines()
            if line.startswith(("import ", "from "))
        ]
        heavy = [name for name in imports if name in ("torch", "accelerate")]
        assert "gpt2_ddp" in imports
        assert not heavy or imports.index("gpt2_ddp") < imports.index(heavy[0]), script
