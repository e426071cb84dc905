"""The rendezvous of a cluster check, the errors of ranks that do not reach it."""

import socket
import types

import pytest
from ranks import free_port

from gpt2_ddp import cluster
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
