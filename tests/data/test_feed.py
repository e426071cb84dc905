"""The feed: each item once per epoch, whatever the ranks, micro-batches, workers and restarts."""

import math
import random
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from commands import expect_error

from gpt2_ddp.data import feed as feed_module
from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved, split_batch
from gpt2_ddp.data.order import Permutation, next_digest, skipped_digest
from gpt2_ddp.data.shards import count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FeedState
from gpt2_ddp.tasks.supervised import contiguous


def test_a_micro_batch_is_the_largest_divisor_or_has_the_least_padding():
    """Of sizes with at most twice the necessary micro-batches, by the definition."""
    rng = random.Random(0)
    for windows in [512, *(rng.randint(1, 300) for _ in range(1000))]:
        processes = rng.randint(1, min(windows, 9))
        limit = rng.randint(1, 40)
        share = math.ceil(windows / processes)
        allowed = [
            size
            for size in range(1, limit + 1)
            if math.ceil(share / size) <= 2 * math.ceil(share / limit)
        ]
        if windows % processes == 0:
            allowed = [size for size in range(1, limit + 1) if share % size == 0]
        padding = {
            size: math.ceil(share / size) * size * processes - windows
            for size in allowed
            if size <= share
        }
        size = split_batch(windows, processes, limit)
        assert size == max(size for size in padding if padding[size] == min(padding.values()))
    expect_error("^processes = 9: ", split_batch, 8, 9, 16)


def test_numbers_of_windows():
    assert [count_windows(tokens, 4) for tokens in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


class Numbers:
    """A source whose items are their own numbers; keeps what was read in this process."""

    def __init__(self):
        self.read_items = []

    def read(self, items):
        self.read_items += items.tolist()
        return (torch.from_numpy(items),)


def rank_of(world, rank):
    """What a feed asks an accelerator for."""
    return SimpleNamespace(num_processes=world, process_index=rank, device=torch.device("cpu"))


def test_shares_are_a_partition_of_a_step():
    """In order of micro-batches, or of ranks for
    `contiguous`, whose ranks differ by an item at most."""
    rng = random.Random(0)
    for _ in range(300):
        n = rng.randint(1, 90)
        world = rng.choice([1, 2, 3, 5, 30])
        batch = rng.randint(1, 9)
        in_turn = interleaved(world, batch, n)
        by_rank = [*zip(*contiguous(world, batch, n), strict=True)]
        for parts in ([*chain(*in_turn)], [*chain(*by_rank)]):
            assert [*chain(*parts)] == [*range(n)]
            assert max(map(len, parts)) <= batch
        totals = [sum(map(len, parts)) for parts in by_rank]
        assert max(totals) - min(totals) <= 1


def step_by_definition(n, size, by_epoch, passed, position):
    """The positions of a step, one at a time."""
    step = []
    while len(step) < size:
        if not any(start <= position < stop for start, stop in passed):
            if step and by_epoch and position // n != step[0] // n:
                break
            step.append(position)
        position += 1
    return step


def walk(seed, accelerator, actions=25):
    """Random steps, looks at the next micro-batch, ranges passed over, moves and restarts on one
    rank. All that the feed returns is what the definition gives; a rank reads its own items alone,
    and at most one micro-batch ahead."""
    rng = random.Random(seed)
    n = rng.choice([rng.randint(1, 60), 10**6])
    size = rng.randint(3, 24)
    batch = rng.randint(1, 8)
    by_epoch = rng.random() < 0.5
    world = accelerator.num_processes
    rank = accelerator.process_index
    share, least = (
        (partial(contiguous, world, batch), 1)
        if by_epoch
        else (partial(interleaved, world, batch), batch)
    )
    order = Permutation(seed, n)
    source = Numbers()
    random_state = torch.get_rng_state()
    whole = GlobalBatch(size, share, by_epoch=by_epoch, rows=least)
    feed = Feed(order, whole, source, accelerator)
    state = FeedState()
    delivered = []

    def check(found, positions, number):
        """Micro-batch `number` of the step that takes `positions`."""
        shares = share(len(positions))
        own = [positions[i] for i in shares[number][rank]]
        rows = own or positions[:1]
        rows = rows + rows[-1:] * (least - len(rows))
        assert (found.positions.tolist(), found.n_valid, found.last) == (
            rows,
            len(own),
            number == len(shares) - 1,
        )
        (items,) = found.rows
        assert items.tolist() == order.items_at(found.positions).tolist()
        return items.tolist()

    for _ in range(actions):
        positions = step_by_definition(n, size, by_epoch, state.skipped_ranges, state.position)
        action = rng.choice(["step", "step", "step", "first", "pass", "move", "restart"])
        if action == "step":
            step = feed.next_step()
            items = order.items_at(np.array(positions))
            assert step.items.tolist() == items.tolist()
            assert feed.skipped_end == (positions[0] // n > state.position // n)
            for number, found in enumerate(step.micro_batches):
                delivered += check(found, positions, number)
            assert number + 1 == math.ceil(len(positions) / world / batch)
            digest = next_digest(state.order_digest, items)
            state = state.model_copy(update={"position": positions[-1] + 1, "order_digest": digest})
            (left,) = step_by_definition(n, 1, False, state.skipped_ranges, state.position)
            assert (feed.epochs, feed.ended_epoch) == (left // n, left // n > positions[0] // n)
            with pytest.raises(AssertionError):
                feed.skip_range(positions[-1], positions[-1] + 9)  # it was trained on
        elif action == "first":
            check(feed.first_micro_batch(), positions, 0)
            before = len(source.read_items)
            check(feed.first_micro_batch(), positions, 0)
            assert len(source.read_items) == before
        elif action == "pass":
            end = max([state.position, *(stop for _, stop in state.skipped_ranges)])
            start = end + rng.choice([0, rng.randint(1, 2 * size)])
            stop = start + rng.choice(
                [1, rng.randint(1, 3 * size), *([n, 2 * n + 1] if n < 99 else [])]
            )
            feed.skip_range(start, stop)
            digest = skipped_digest(state.order_digest, start, stop)
            passed = [*state.skipped_ranges, (start, stop)]
            state = state.model_copy(update={"skipped_ranges": passed, "order_digest": digest})
            for twice in ((start, stop), (stop, stop)):
                with pytest.raises(AssertionError):
                    feed.skip_range(*twice)
        else:
            at = rng.choice([state.position, rng.randrange(1000), 10**9])
            state = FeedState(position=at, skipped_ranges=[(at + 2, at + 5)], order_digest="5" * 64)
            if action == "restart":
                feed = Feed(order, whole, source, accelerator)
            feed.seek(state)
        assert feed.state == state
        if action in ("pass", "move", "restart"):
            source.read_items = []
            delivered = []
        else:
            assert source.read_items[: len(delivered)] == delivered
            assert len(source.read_items) <= len(delivered) + 2 * batch
    feed.seek(FeedState())
    assert torch.equal(torch.get_rng_state(), random_state), (
        "loading must not draw from the global generator"
    )


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_a_rank_gets_its_share_of_random_steps(world, rank):
    for seed in range(15):
        walk(seed, rank_of(world, rank))


class Vanished(Numbers):
    """Items whose file is gone."""

    def read(self, items):
        raise UserError("data.path", "photos/1.png", "is not an image")


def test_what_cannot_be_read_is_a_users_error():
    feed = Feed(
        Permutation(1, 4), GlobalBatch(4, partial(interleaved, 2, 2)), Vanished(), rank_of(2, 1)
    )
    expect_error("^data.path = photos/1.png: ", feed.first_micro_batch)


def test_a_step_is_taken_whole_before_the_next():
    """Two of three micro-batches. A move elsewhere needs no more of them."""
    feed = Feed(
        Permutation(1, 100), GlobalBatch(12, partial(interleaved, 2, 2)), Numbers(), rank_of(2, 1)
    )
    assert len([*islice(feed.next_step().micro_batches, 2)]) == 2
    with pytest.raises(AssertionError):
        feed.next_step()
    feed.seek(FeedState(position=40))
    assert [batch.last for batch in feed.next_step().micro_batches] == [False, False, True]


def test_the_time_waited_for_the_loader_is_counted(monkeypatch):
    """A second per item, two items a micro-batch, one
    micro-batch ahead. A new loader leaves Accelerate's state."""
    source = Numbers()
    known = len(GradientState().dataloader_references)
    monkeypatch.setattr(
        feed_module, "time", SimpleNamespace(perf_counter=lambda: float(len(source.read_items)))
    )
    feed = Feed(
        Permutation(1, 100), GlobalBatch(4, partial(interleaved, 1, 2)), source, rank_of(1, 0)
    )
    waited = []
    for _ in range(5):
        list(feed.next_step().micro_batches)
        waited.append(feed.waited)
    assert waited == [6.0, 10.0, 14.0, 18.0, 22.0]
    feed.seek(FeedState(position=40))
    list(feed.next_step().micro_batches)
    assert len(GradientState().dataloader_references) == known + 1
