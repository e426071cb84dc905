"""The rendezvous of a cluster check, the errors of ranks that do not reach it, and what the measured speed means."""

import socket
import types

import pytest
from ranks import free_port

from gpt2_ddp import cluster
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import CheckClusterConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError

HOST = socket.gethostname()


def place(rank: int, address: str = "127.0.0.1", port: int = 0) -> cluster.RankEnv:
    return cluster.RankEnv(rank, 0, 2, address, port or free_port())


class Clock:
    """Instead of `time` and `socket.create_connection`: an attempt takes a second, and fails."""

    def __init__(self, error: OSError):
        self.now, self.error, self.gave = 0.0, error, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def create_connection(self, address: tuple[str, int], timeout: float) -> socket.socket:
        self.gave.append(timeout)
        self.now += min(1.0, timeout)
        raise self.error


UNKNOWN = socket.gaierror(-2, "Name or service not known")
ERRORS = [
    (1, ConnectionRefusedError("refused"), "got no answer from rank 0 there within 60 s; is"),
    (1, TimeoutError("timed out"), "and can this machine reach the port?"),
    *((rank, UNKNOWN, "cannot resolve this name (Name or") for rank in (0, 1)),
    (0, OSError(101, "Network is unreachable"), "serves this port, but this address does not reach it"),
    (0, ConnectionRefusedError("refused"), "10.0.0.7 (eth9); give one of these to all ranks"),
]


@pytest.mark.parametrize(("rank", "error", "message"), ERRORS)
def test_why_a_rank_does_not_get_there_after_as_long_as_it_was_given(monkeypatch, rank, error, message):
    clock = Clock(error)
    monkeypatch.setattr(cluster, "time", clock)
    monkeypatch.setattr(cluster.socket, "create_connection", clock.create_connection)
    own = [types.SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")]
    monkeypatch.setattr(cluster.psutil, "net_if_addrs", lambda: {"lo": own, "eth9": own})
    with pytest.raises(UserError, match="MASTER_ADDR") as found:
        cluster._await_answer(place(rank, "somewhere", 29500), 60)
    assert all(part in str(found.value) for part in (f"rank {rank} on {HOST} ", message, "somewhere:29500"))
    assert 60 <= clock.now < 61
    assert len(clock.gave) > 50


def test_a_port_that_another_program_has():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UserError, match="cannot open this port"):
        cluster.connect(place(0, port=other.getsockname()[1]), 5)


def facts(host: str, link: float) -> cluster.Facts:
    return {"host": host, "device_type": "cpu", "link_gb_per_s": link}


ROWS = [
    {"bytes": 8, "algorithm_gb_per_s": 0.001, "bus_gb_per_s": 0.001},
    {"bytes": 2**26, "algorithm_gb_per_s": 0.25, "bus_gb_per_s": 0.125},
]


def test_what_the_gradients_of_a_training_take():
    training = load(TrainingConfig, ["--config", "configs/gpt2_124m.yaml"])
    config = CheckClusterConfig(training="gpt2_124m.yaml", step_seconds=3)
    assert cluster.gradient_bytes(training) == 4 * 124_475_904
    (line,) = cluster.network_notes(config, training, [facts("a", 0), facts("b", 0)], ROWS)
    assert line.startswith("gpt2_124m.yaml: 498 MB of gradients take 1.99 s of each step on this network: 0% of it")
    assert "40% at most" in line
    config = CheckClusterConfig(training="x", step_seconds=0.6)  # 1.99 - 2/3 * 0.6 s are exposed at least
    (line,) = cluster.network_notes(config, training, [facts("a", 0)], ROWS)
    assert line.endswith(": 73% of it if they overlap with the backward pass, 77% at most")
    (line,) = cluster.network_notes(CheckClusterConfig(training="x"), training, [facts("a", 0)], ROWS)
    assert line.endswith("on this network")


@pytest.mark.parametrize(
    ("hosts", "link", "times"), [("ab", 1.25, 10), ("ab", 0.4, None), ("aa", 1.25, None), ("ab", 0, None)]
)
def test_a_network_slower_than_its_interface(hosts, link, times):
    said = list(cluster.network_notes(CheckClusterConfig(), None, [facts(host, link) for host in hosts], ROWS))
    assert [line[:35] for line in said] == ([f"the network is {times} times slower than"[:35]] if times else [])


def test_a_step_of_no_training():
    with pytest.raises(UserError, match="step_seconds"):
        load(CheckClusterConfig, ["--step_seconds", "2"])


def test_sizes():
    sizes = (4, 1020, 1024, 2**20 - 4, 3 * 2**19, 2**42)
    assert ", ".join(map(cluster.spell_bytes, sizes)) == "4 B, 1020 B, 1.0 KiB, 1024.0 KiB, 1.5 MiB, 4096.0 GiB"
