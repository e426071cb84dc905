"""What a rank draws, and what ranks agree on."""

import pytest
import torch
from ranks import RankError, run_ranks

from gpt2_ddp.errors import UserError
from gpt2_ddp.run.seeds import seed_step


def drawn(seed: int, step: int, rank: int) -> list[float]:
    seed_step(seed, step, rank)
    return torch.rand(4).tolist()


def test_what_is_drawn_depends_on_seed_step_and_rank_alone():
    torch.rand(3)
    first = drawn(1, 2, 3)
    torch.rand(7)
    assert drawn(1, 2, 3) == first
    others = [drawn(*key) for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 1, 4), (0, 0, 0))]
    assert len({tuple(values) for values in [first, *others]}) == 7


def test_seeding_leaves_nothing_behind():
    """torch.manual_seed would queue a call, with a stack trace, at every step."""
    queued = len(torch.cuda._queued_calls)
    for step in range(10):
        seed_step(1, step, 0)
    assert len(torch.cuda._queued_calls) == queued


def one_rank_fails(failing: int) -> str:
    from gpt2_ddp.processes.launch import build_accelerator
    from gpt2_ddp.processes.ranks import on_every_rank, on_main

    accelerator = build_accelerator("cpu", "no")
    assert on_main(accelerator, lambda: accelerator.process_index) == 0

    def work() -> int:
        if accelerator.process_index == failing:
            raise UserError("field", failing, "of one rank")
        return accelerator.process_index

    try:
        return str(on_every_rank(accelerator, work))
    except UserError as error:
        return str(error)


def test_a_mistake_found_by_one_rank_is_raised_on_all():
    assert run_ranks(one_rank_fails, 3, 2) == ["field = 2: of one rank"] * 3
    assert run_ranks(one_rank_fails, 3, 9) == ["0", "1", "2"]


def other_configuration() -> None:
    import os

    from gpt2_ddp.processes.launch import build_accelerator
    from gpt2_ddp.processes.ranks import check_ranks_agree

    build_accelerator("cpu", "no")
    check_ranks_agree("configuration", "", f"seed: {os.environ['RANK']}")


def test_ranks_with_other_configurations_are_named():
    with pytest.raises(RankError, match="rank 1 has another"):
        run_ranks(other_configuration, 2)
