"""The rendezvous of a cluster check, the errors of ranks that do not reach it."""

import socket

import pytest
from ranks import free_port

from gpt2_ddp import cluster
from gpt2_ddp.errors import UserError

HOST = socket.gethostname()


def place(rank: int, address: str = "127.0.0.1", port: int = 0) -> cluster.RankEnv:
    return cluster.RankEnv(rank, 2, address, port or free_port())


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
ERRORS = [TimeoutError("timed out"), UNKNOWN, OSError(101, "Network is unreachable")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_why_a_rank_does_not_get_there_after_as_long_as_it_was_given(monkeypatch, rank, error):
    clock = Clock(error)
    monkeypatch.setattr(cluster, "time", clock)
    monkeypatch.setattr(cluster.socket, "create_connection", clock.create_connection)
    with pytest.raises(UserError, match="MASTER_ADDR") as found:
        cluster._await_answer(place(rank, "somewhere", 29500), 60)
    assert all(
        part in str(found.value)
        for part in (f"rank {rank} on {HOST} ", error.strerror or "timed out", "somewhere:29500")
    )
    assert 60 <= clock.now < 61
    assert len(clock.gave) > 50


def test_a_port_that_another_program_has():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UserError, match="cannot open this port"):
        cluster.connect(place(0, port=other.getsockname()[1]), 5)
