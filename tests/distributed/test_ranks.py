"""What a rank draws, and what ranks agree on."""

import sys
from threading import Event

import pytest
import torch
from ranks import in_turn, run_ranks

from gpt2_ddp.distributed import launch, peers
from gpt2_ddp.errors import UserError
from gpt2_ddp.training.loop import seed_micro_batch


def drawn(seed, step, number):
    seed_micro_batch(seed, step, number)
    return torch.rand(4).tolist()


def test_what_is_drawn_depends_on_seed_micro_batch_and_rank_alone():
    torch.rand(3)
    first = drawn(1, 2, 3)
    torch.rand(7)
    assert drawn(1, 2, 3) == first
    others = [
        drawn(*key) for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 1, 4), (0, 0, 0))
    ]
    assert len({tuple(values) for values in [first, *others]}) == 7
    seed_micro_batch(1, 2, 3)
    assert torch.initial_seed() == 4063502498695272493


def test_seeding_leaves_nothing_behind():
    """torch.manual_seed would queue a call, with a stack trace, at every step."""
    queued = len(torch.cuda._queued_calls)
    for step in range(10):
        seed_micro_batch(1, step, 0)
    assert len(torch.cuda._queued_calls) == queued


def one_rank_fails(failing):
    from gpt2_ddp.distributed.launch import build_accelerator
    from gpt2_ddp.distributed.ranks import on_every_rank, on_main

    accelerator = build_accelerator("cpu", "no")
    assert on_main(lambda: accelerator.process_index) == 0

    def work():
        if accelerator.process_index == failing:
            raise UserError("field", failing, "of one rank")
        return accelerator.process_index

    try:
        return str(on_every_rank(work))
    except UserError as error:
        return str(error)


def sums_that_are_read_late():
    from gpt2_ddp.distributed.ranks import LateSum

    rank = launch.build_accelerator("cpu", "no").process_index
    sums = LateSum()
    sums.start([1, rank])
    sums.start([rank, 5])
    return [sums.result(), sums.result()]


def test_the_oldest_sum_is_read_first():
    assert run_ranks(sums_that_are_read_late, 1) == [[[1, 0], [0, 5]]]
    assert run_ranks(sums_that_are_read_late, 2) == [[[2, 1], [1, 10]]] * 2


def test_a_limit_of_open_files_is_raised(monkeypatch):
    limits = [1024, 4358]
    monkeypatch.setattr(launch.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(
        launch.resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new)
    )
    launch.allow_open_files()
    assert limits == [4358, 4358]


def test_a_rank_ends_if_the_ranks_do_not_connect_in_time(monkeypatch, capfd):
    monkeypatch.setattr(peers.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        peers._watch_connecting(Event(), -peers.AFTERMATH)
    errors = capfd.readouterr().err
    assert "cannot connect to the others (one of them has not answered within -5 s)" in errors


def compared(here):
    """What check_ranks_agree says where each rank has its own of `here`."""
    import os

    from gpt2_ddp.distributed.launch import build_accelerator
    from gpt2_ddp.distributed.ranks import check_ranks_agree

    build_accelerator("cpu", "no")
    try:
        check_ranks_agree(here[int(os.environ["RANK"])])
    except UserError as error:
        return str(error)
    return ""


def test_what_one_rank_finds_is_raised_on_all_and_what_ranks_differ_in_is_named():
    same = {"seed": 1, "optim.lr": 1e-3, "data": None}
    others = [same, same | {"optim.lr": 2e-3}, same | {"optim.lr": 3e-3, "data": "x", "more": 7}]
    many = [{str(number): rank for number in range(9)} for rank in range(3)]
    calls = [
        (one_rank_fails, 2),
        (one_rank_fails, 9),
        *[(compared, one) for one in ([same] * 3, others, many)],
    ]
    message = (
        "optim.lr = 0.001: rank 1 has 0.002; give all ranks the same\n"
        "data = None: rank 2 has x; give all ranks the same\n"
        "more = None: rank 2 has 7; give all ranks the same"
    )
    for rank, (failed, own, agreed, named, cut) in enumerate(run_ranks(in_turn, 3, *calls)):
        assert (failed, own) == ("field = 2: of one rank", str(rank))
        assert (agreed, named) == ("", message)
        assert cut.splitlines() == [
            f"{number} = 0: rank 1 has 1; give all ranks the same" for number in range(9)
        ]
