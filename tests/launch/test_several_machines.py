"""Two machines that share no disk, each a network namespace with a host name, processes and folders
of its own: each way of launching that docs/several-machines.md has, taken from there, and what goes
wrong between machines.

A run's order digest and weights are always those of two processes of one machine that nothing has
happened to.
"""

import json
import re
import shutil
import time
from contextlib import contextmanager

import pytest
from machines import WIRE, Machine, joined_machines, nothing_is_left  # noqa: F401
from pages import ROOT, commands, write_texts
from ranks import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_left")]

STEPS = 200
"""Enough of them for something to happen in their middle."""
TINY = (
    f"--train.steps {STEPS} --train.device cpu --train.global_batch_tokens 256"
    " --train.micro_batch_size 4"
    " --train.patience_seconds 5 --model.n_layer 1 --model.n_head 2 --model.n_embd 32"
    " --model.block_size 32"
    " --optim.lr 0.003 --optim.min_lr 0.0003 --optim.warmup_steps 5 --optim.decay_steps null"
    " --eval.tokens 512"
    " --eval.every 100 --eval.patience null --checkpoint.every 20 --checkpoint.background false"
    " --tracking.log_every 1 --tracking.sample_every 0"
)
PAGE = [command.text for command in commands(ROOT / "docs/several-machines.md")]
LONG = 25
"""Seconds without a cable that no run survives: a rank that says nothing is forgiven ten."""


def of_page(part):
    """The command of docs/several-machines.md that has `part` in it."""
    (found,) = [text for text in PAGE if part in text]
    return found


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two of them, each of which has prepared its own data."""
    with joined_machines(tmp_path_factory.mktemp("machines")) as both:
        for machine in both:
            write_texts(machine.folder)
            machine.start(f"{of_page('prepare_data.py')} --vocab_size 512")
        for machine in both:
            assert machine.started[-1].wait(300) == 0, machine.said
        first, second = [
            (machine.folder / "data/mine/manifest.json").read_bytes() for machine in both
        ]
        assert first == second
        yield both


@pytest.fixture(scope="module")
def alone(machines):
    """What two processes of one machine come to."""
    command = (
        f"torchrun --nproc_per_node 2 scripts/train_gpt2.py --data.path data/mine {TINY}"
        " --run_name alone"
    )
    assert machines[0].start(command).wait(300) == 0, machines[0].said
    return result(machines[0], "alone")


def rows(machine, run):
    file = machine.folder / f"runs/{run}/metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def step(machine, run):
    return max((row["step"] for row in rows(machine, run) if "loss" in row), default=0)


def result(machine, run):
    """Order digest and weights at the end."""
    last = [row for row in rows(machine, run) if "loss" in row][-1]
    assert last["step"] == STEPS
    weights = machine.folder / f"runs/{run}/checkpoints/step-{STEPS:08d}/model.safetensors"
    return last["order_digest"], weights.read_bytes()


def begin(machines, command, run, **env):
    """The command on both, each with its own rank where it has one."""
    for rank, machine in enumerate(machines):
        own = re.sub(r"(--machine_rank|--node_rank) 0", rf"\g<1> {rank}", command)
        machine.start(f"{own} {TINY} --run_name {run}", HF_HOME=str(machine.folder / "home"), **env)


def codes(machines, within=300):
    wait_until(lambda: all(machine.started[-1].poll() is not None for machine in machines), within)
    return [machine.started[-1].returncode for machine in machines]


def trained(machines, run, alone):
    """Both launchers end well, and the first machine, it alone, has what one machine comes to."""
    assert codes(machines) == [0, 0], "\n".join(machine.said for machine in machines)
    assert result(machines[0], run) == alone
    assert not (machines[1].folder / f"runs/{run}").exists()


PAGE = (ROOT / "docs/several-machines.md").read_text()
CONFIGURED = PAGE.partition("The file then has")[2].partition("##")[0]
"""What `accelerate config` has written, as the page says."""


@pytest.mark.parametrize(
    "way",
    [
        "accelerate launch scripts/",
        "multi_node.yaml --num",
        "--node_rank 0",
        "1 --rdzv_backend c10d",
    ],
)
def test_each_way_of_launching(machines, alone, way):
    for rank, machine in enumerate(machines):
        file = machine.folder / "home/accelerate/default_config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = re.findall(
            r"`(\w+: \S+)`", CONFIGURED.replace("machine_rank: 0", f"machine_rank: {rank}")
        )
        assert len(lines) == 6
        file.write_text("\n".join(lines))
    run = re.sub(r"\W", "", way)
    begin(machines, of_page(way), run)
    trained(machines, run, alone)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_started_again_and_the_run_goes_on(machines, alone, victim):
    """Rank 0 is the same machine's afterwards, which has the checkpoints."""
    run = f"killed{victim}"
    begin(machines, of_page("--max_restarts 3"), run)
    wait_until(lambda: step(machines[0], run) > 50, 300)
    (rank,) = machines[victim].ranks()
    rank.kill()
    trained(machines, run, alone)
    begun = [row["step"] for row in rows(machines[0], run) if row.get("event") == "start"]
    assert len(begun) == 2
    assert begun[1] >= 40


def cannot_connect(machine, rank):
    """The one line in which a rank says so, once it has ended."""
    wait_until(lambda: machine.errors, 300)
    (line,) = machine.errors
    assert line.startswith(
        f"error: processes = 2: rank {rank} on {machine.name} cannot connect to the others ("
    )
    assert 'Traceback (most recent call last):\n  File "scripts' not in machine.said
    return line


@pytest.mark.parametrize("interfaces", [(WIRE, "eth7"), ("lo", "lo")])
def test_interfaces_that_do_not_join_the_machines(machines, interfaces):
    """One that is not there, and two that have one address, as docker0 has on all machines."""
    command = f"{of_page('--node_rank 0')} {TINY} --run_name interface"
    for rank, (machine, interface) in enumerate(zip(machines, interfaces, strict=True)):
        machine.start(
            command.replace("--node_rank 0", f"--node_rank {rank}"), GLOO_SOCKET_IFNAME=interface
        )
    begun = time.monotonic()
    lines = [cannot_connect(machine, rank) for rank, machine in enumerate(machines)]
    assert time.monotonic() - begun < 90, "30 s, five more, and what starting takes"
    assert any("eth7" in line for line in lines) == ("eth7" in interfaces)
    assert not (machines[0].folder / "runs/interface").exists()


@contextmanager
def firewall(machine, rule):
    """One that drops what comes over the cable, without a word."""
    if not shutil.which("iptables"):
        pytest.skip("no command `iptables` (of the package iptables)")
    machine.exec(f"iptables -A INPUT -i {WIRE} -p tcp --syn {rule} -j DROP")
    yield
    machine.exec("iptables -F INPUT")


def test_a_firewall_on_all_ports_but_the_launchers(machines):
    with firewall(machines[0], "! --dport 29500"), firewall(machines[1], ""):
        begin(machines, of_page("--node_rank 0"), "firewall")
        for rank, machine in enumerate(machines):
            cannot_connect(machine, rank)


def test_a_firewall_on_the_port_is_named_by_the_check(machines):
    """A launcher waits for fifteen minutes without a word; the check is started without one."""
    env = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    with firewall(machines[0], "--dport 29500"):
        for rank, machine in enumerate(machines):
            machine.start(
                "python scripts/check_cluster.py --device cpu --timeout_seconds 30",
                RANK=str(rank),
                **env,
            )
        assert codes(machines) == [2, 2]
    for machine, field in zip(machines, ("ranks = 1", "MASTER_ADDR = 10.0.0.1:29500"), strict=True):
        (line,) = machine.errors
        assert line.startswith(f"error: {field}: ")


def cut(machines, run, seconds):
    """Takes the cable out in the middle of the run, and puts it back."""
    wait_until(lambda: step(machines[0], run) > 50, 300)
    machines[1].ip(f"link set {WIRE} down")
    time.sleep(seconds)
    machines[1].ip(f"link set {WIRE} up")


def test_a_short_cut_is_lived_through(machines, alone):
    begin(machines, of_page("--node_rank 0"), "short")
    cut(machines, "short", 3)
    trained(machines, "short", alone)
    assert [row["step"] for row in rows(machines[0], "short") if row.get("event") == "start"] == [0]


def test_a_long_cut_ends_both_and_the_same_command_goes_on(machines, alone):
    begin(machines, of_page("--node_rank 0"), "long")
    cut(machines, "long", LONG)
    assert codes(machines) == [1, 1]
    for machine, other in zip(machines, ("rank 1 on node-b", "rank 0 on node-a"), strict=True):
        assert machine.errors[0].startswith(f"error: {other}: no heartbeat for "), machine.said
    begin(machines, of_page("--node_rank 0"), "long")
    trained(machines, "long", alone)
