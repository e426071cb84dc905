"""The feed: each item once per epoch, whatever the ranks, micro-batches, workers and restarts."""

import math
import multiprocessing
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import psutil
import pytest
import torch
from conftest import training_config
from ranks import run_ranks

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, contiguous, interleaved
from gpt2_ddp.data.manifest import Manifest, Shard, read_manifest, write_manifest
from gpt2_ddp.data.order import FIRST_DIGEST, Order, next_digest, passed_digest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.data.windows import Windows, count_windows, split_batch
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file

SHARES = {"interleaved": interleaved, "contiguous": contiguous}


def replay(n: int, step_size: int, by_epoch: bool = False, seed: int = 1) -> Feed:
    return Feed(range(n), seed, step_size, interleaved(1, step_size), by_epoch=by_epoch)


def state(feed: Feed) -> tuple[int, str, list[tuple[int, int]]]:
    """What a checkpoint keeps, and `seek` takes."""
    return feed.position, feed.order_digest, list(feed.passed)


# Shares


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "largest"), [(12, 100), (25, 4), (24, 5), (5, 1), (1, 5), (12, 2), (101, 7)])
def test_contiguous_shares(n, largest, processes):
    """Stretches of the step, one per rank, and equal numbers of micro-batches; sizes differ by at most one."""
    shares = contiguous(processes, largest)(n)
    assert all(len(ranks) == processes for ranks in shares)
    assert len(shares) == math.ceil(math.ceil(n / processes) / largest)
    of_rank = [[ranks[rank] for ranks in shares] for rank in range(processes)]
    assert [item for parts in of_rank for part in parts for item in part] == list(range(n))
    sizes = [sum(map(len, parts)) for parts in of_rank]
    assert max(sizes) - min(sizes) <= 1
    for parts in of_rank:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert max(map(len, parts)) <= largest


@pytest.mark.parametrize(
    ("processes", "batch", "accumulation"), [(1, 1, 1), (1, 4, 3), (2, 3, 1), (3, 2, 4), (4, 1, 2)]
)
def test_interleaved_shares(processes, batch, accumulation):
    """Micro-batch m of rank r: items (m·W + r)·b and the b - 1 after it."""
    shares = interleaved(processes, batch)(processes * batch * accumulation)
    assert len(shares) == accumulation
    for m, ranks in enumerate(shares):
        assert len(ranks) == processes
        for r, part in enumerate(ranks):
            start = (m * processes + r) * batch
            assert list(part) == list(range(start, start + batch))


@pytest.mark.parametrize(
    ("share", "limit", "expected"), [(8, 8, 8), (8, 5, 4), (7, 5, 1), (6, 100, 6), (1, 16, 1), (12, 5, 4)]
)
def test_micro_batch_is_the_largest_divisor(share, limit, expected):
    assert split_batch(share * 3, 3, limit) == expected


def test_processes_that_do_not_divide_the_batch_are_named_with_those_that_do():
    with pytest.raises(UserError, match=r"processes = 3: .*8 windows.*use 1, 2, 4, 8 processes"):
        split_batch(8, 3, 16)


@pytest.mark.parametrize(
    ("tokens", "block", "windows"), [(0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)]
)
def test_count_windows(tokens, block, windows):
    assert count_windows(tokens, block) == windows


# Steps


@pytest.mark.parametrize("by_epoch", [False, True])
def test_random_step_sizes_shares_and_restarts_consume_every_item_once(by_epoch):
    """Property test over random N, G, W and b; W and b change at each restart."""
    rng = random.Random(0)
    for _ in range(60):
        n, size, seed = rng.randint(1, 400), rng.choice([1, 2, 4, 6, 8, 12, 24]), rng.randrange(2**63)
        steps = 2 * math.ceil(n / size) + 1
        consumed, digest, saved = [], FIRST_DIGEST, (0, FIRST_DIGEST, [])
        while len(consumed) < steps:
            world = rng.choice([w for w in range(1, 9) if size % w == 0])
            largest = rng.randint(1, 8)
            batch = split_batch(size, world, largest)
            feed = Feed(
                range(n),
                seed,
                size,
                contiguous(world, largest) if by_epoch else interleaved(world, batch),
                None,
                by_epoch,
            )
            feed.seek(*saved)
            for _ in range(min(rng.randint(1, 10), steps - len(consumed))):  # until the next restart
                items = feed.next_step().items
                shares = feed.share(len(items))
                shared = [item for ranks in shares for part in ranks for item in items[part.start : part.stop]]
                assert sorted(shared) == sorted(items)
                consumed.append(items)
                digest = next_digest(digest, items)
                assert feed.order_digest == digest
                assert feed.consumed == feed.position == sum(map(len, consumed))
            saved = state(feed)
        if by_epoch:
            assert [len(items) for items in consumed[: math.ceil(n / size)]] == [
                min(size, n - start) for start in range(0, n, size)
            ]
        else:
            assert {len(items) for items in consumed} == {size}
        flat = np.concatenate(consumed)
        assert np.array_equal(flat, Order(seed, n).at(np.arange(len(flat))))
        for epoch in range(2):
            assert np.array_equal(np.sort(flat[epoch * n : (epoch + 1) * n]), np.arange(n))


@pytest.mark.parametrize(("n", "size"), [(10, 4), (10, 5), (3, 7), (1, 3), (24, 24)])
def test_epochs_end_and_items_are_counted(n, size):
    straddling, by_epoch = replay(n, size), replay(n, size, by_epoch=True)
    for step in range(1, 30):
        straddling.next_step()
        assert straddling.consumed == straddling.consumed_after(step) == step * size
        assert straddling.epochs == step * size // n
        assert straddling.ended_epoch == (step * size // n > (step - 1) * size // n)
        by_epoch.next_step()
        per_epoch = math.ceil(n / size)
        assert by_epoch.consumed == by_epoch.consumed_after(step)
        assert by_epoch.consumed == step // per_epoch * n + step % per_epoch * size
        assert by_epoch.epochs == step // per_epoch
        assert by_epoch.ended_epoch == (step % per_epoch == 0)


@pytest.mark.parametrize("n", [1, 2, 3, 12, 25, 26, 27, 28])
@pytest.mark.parametrize(("world", "size", "largest"), [(1, 12, 12), (1, 12, 5), (3, 12, 12), (2, 100, 3)])
def test_the_smallest_micro_batch_of_an_epoch(n, world, size, largest):
    """A stand-in, where a share is empty, is one row, too."""
    share = contiguous(world, largest)
    feed = Feed(range(n), 1, size, share, by_epoch=True)
    rows = []
    for _ in range(math.ceil(n / size)):
        rows += [max(len(own), 1) for ranks in share(len(feed.next_step().items)) for own in ranks]
    assert feed.ended_epoch
    assert feed.smallest_micro_batch == min(rows)
    assert Feed(range(n), 1, 12, interleaved(2, 3)).smallest_micro_batch == 3


def test_a_far_position_is_reached_without_visiting_others(monkeypatch):
    """Counted: the items of the one step are looked up, and no others."""
    counted, at = [], Order.at

    def counting(self, positions):
        counted.append(len(positions))
        return at(self, positions)

    monkeypatch.setattr(Order, "at", counting)
    feed = replay(10**9 + 7, 512)
    feed.seek(10**15, FIRST_DIGEST, [(10**14, 10**14 + 10**12)])
    feed.next_step()
    assert counted == [512]


# Positions passed over


def expected_steps(
    n: int, size: int, by_epoch: bool, passed: list[tuple[int, int]], position: int
) -> Iterator[list[int]]:
    """Positions of each step, one position at a time."""
    step: list[int] = []
    while True:
        if not any(start <= position < stop for start, stop in passed):
            if step and (len(step) == size or (by_epoch and position // n != step[0] // n)):
                yield step
                step = []
            step.append(position)
        position += 1


@pytest.mark.parametrize("by_epoch", [False, True])
def test_passed_positions_are_never_delivered(by_epoch):
    """Random ranges, adjacent ones and whole epochs among them, added between steps; with restarts."""
    rng = random.Random(0)
    for _ in range(60):
        n, size = rng.randint(1, 60), rng.randint(1, 20)
        feed, digest, taken = replay(n, size, by_epoch), FIRST_DIGEST, []
        end = 0  # of the last range
        for _ in range(25):
            if rng.random() < 0.3:
                start = max(end, feed.position) + rng.choice([0, 0, rng.randint(1, 2 * size)])
                end = start + rng.choice([1, rng.randint(1, 3 * size), n, 2 * n + 1])
                feed.pass_over(start, end)
                digest = passed_digest(digest, start, end)
                assert feed.order_digest == digest
            if rng.random() < 0.3:
                again = replay(n, size, by_epoch)
                again.seek(*state(feed))
                feed = again
            positions = next(expected_steps(n, size, by_epoch, feed.passed, feed.position))
            items = feed.next_step().items
            assert items.tolist() == Order(1, n).at(np.array(positions)).tolist()
            digest = next_digest(digest, items)
            taken += positions
            assert feed.order_digest == digest
            assert feed.position == taken[-1] + 1
            assert feed.consumed == len(taken)
            left = next(expected_steps(n, 1, by_epoch, feed.passed, feed.position))[0]
            assert feed.epochs == left // n
            assert feed.ended_epoch == (left // n > positions[0] // n)
        assert len(set(taken)) == len(taken)


@pytest.mark.parametrize(
    ("by_epoch", "passed", "expected"),
    [
        (False, [], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (False, [(0, 4)], [[4, 5, 6, 7], [8, 9, 10, 11]]),
        (False, [(2, 5)], [[0, 1, 5, 6], [7, 8, 9, 10]]),
        (False, [(1, 3), (4, 6)], [[0, 3, 6, 7], [8, 9, 10, 11]]),
        (False, [(2, 4), (4, 7)], [[0, 1, 7, 8], [9, 10, 11, 12]]),
        (False, [(8, 13)], [[0, 1, 2, 3], [4, 5, 6, 7], [13, 14, 15, 16]]),
        (False, [(9, 20)], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 20, 21, 22]]),
        (True, [], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]),
        (True, [(2, 5)], [[0, 1, 5, 6], [7, 8, 9], [10, 11, 12, 13]]),
        (True, [(8, 13)], [[0, 1, 2, 3], [4, 5, 6, 7], [13, 14, 15, 16], [17, 18, 19]]),
        (True, [(7, 20)], [[0, 1, 2, 3], [4, 5, 6], [20, 21, 22, 23]]),
        (True, [(0, 30)], [[30, 31, 32, 33]]),
    ],
)
def test_steps_around_passed_positions(by_epoch, passed, expected):
    """Ten items, four a step."""
    feed = replay(10, 4, by_epoch)
    for start, stop in passed:
        feed.pass_over(start, stop)
    for positions in expected:
        assert feed.next_step().items.tolist() == feed.order.at(np.array(positions)).tolist()
    assert feed.position == expected[-1][-1] + 1
    assert feed.consumed == sum(map(len, expected))


def test_passing_over_the_rest_of_an_epoch_ends_it():
    feed = replay(10, 4, by_epoch=True)
    feed.pass_over(4, 10)
    feed.next_step()
    assert (feed.position, feed.consumed, feed.epochs, feed.ended_epoch) == (4, 4, 1, True)
    feed.next_step()
    assert (feed.position, feed.consumed, feed.epochs, feed.ended_epoch) == (14, 8, 1, False)


def test_passing_over_changes_nothing_before_it():
    plain, feed = replay(50, 6), replay(50, 6)
    feed.pass_over(18, 30)
    before = feed.order_digest
    assert before == passed_digest(FIRST_DIGEST, 18, 30)
    for _ in range(3):
        assert np.array_equal(feed.next_step().items, plain.next_step().items)
        assert feed.order_digest != plain.order_digest
    plain.next_step(), plain.next_step()
    assert np.array_equal(feed.next_step().items, plain.next_step().items)
    assert (feed.position, feed.consumed) == (plain.position, plain.consumed - 12)


def test_what_was_trained_on_cannot_be_passed_over():
    feed = replay(50, 6)
    feed.next_step()
    before = state(feed)
    for start, stop in ((5, 9), (0, 3), (7, 7), (9, 8)):
        with pytest.raises(AssertionError):
            feed.pass_over(start, stop)
    assert state(feed) == before
    feed.pass_over(6, 7)


# Micro-batches, on real ranks


class Numbers:
    """A source whose items are their own numbers; keeps what was read in this process."""

    def __init__(self, n: int):
        self.n = n
        self.read_items: list[int] = []

    def __len__(self) -> int:
        return self.n

    def read(self, items: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        self.read_items += items.tolist()
        return torch.from_numpy(items), torch.from_numpy(-items)


class Way(NamedTuple):
    """A feed, and what is done with it: `step`, `first`, `seek` with a state and `pass` with a range."""

    n: int
    size: int
    kind: str
    batch: int
    by_epoch: bool = False
    workers: int = 0
    actions: tuple[tuple[Any, ...], ...] = (("step",),) * 3
    seed: int = 1


def go(ways: list[Way]) -> list[list[tuple[Any, ...]]]:
    """What each action gives on this rank: a micro-batch as (numbers, own, last), a step as (items, micro-batches)."""
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    found = []
    for n, size, kind, batch, by_epoch, workers, actions, seed in ways:
        source, share = Numbers(n), SHARES[kind](accelerator.num_processes, batch)
        feed = Feed(source, seed, size, share, accelerator, by_epoch, workers)
        given = []
        random_state = torch.get_rng_state()
        for action, *arguments in actions:
            source.read_items.clear()
            if action == "step":
                step = feed.next_step()
                micro_batches = [_plain(batch) for batch in step.micro_batches]
                given.append((step.items.tolist(), micro_batches, state(feed), list(source.read_items)))
            elif action == "first":
                given.append((_plain(feed.first_micro_batch()), list(source.read_items)))
            else:
                {"seek": feed.seek, "pass": feed.pass_over}[action](*arguments)
        assert torch.equal(torch.get_rng_state(), random_state), "loading must not draw what dropout draws"
        found.append(given)
        del feed, step
    return found


def _plain(batch) -> tuple[list[int], int, bool]:
    numbers, negated = batch.rows
    assert numbers.dtype == torch.int64
    assert torch.equal(numbers, -negated)
    return numbers.tolist(), batch.own, batch.last


def check_shares(way: Way, ranks: list[list[tuple[Any, ...]]]) -> None:
    """Each step's micro-batches, of all ranks, are what the feed's share says of the order's items."""
    world = len(ranks)
    feed = Feed(range(way.n), way.seed, way.size, SHARES[way.kind](world, way.batch), None, way.by_epoch)
    number = 0
    for action, *arguments in way.actions:
        if action == "step":
            items = feed.next_step().items.tolist()
            shares = feed.share(len(items))
            for rank, given in enumerate(ranks):
                assert given[number][0] == items
                assert given[number][2] == state(feed)
                parts = [own[rank] for own in shares]
                assert given[number][1] == [
                    ([items[i] for i in part] or items[:1], len(part), m == len(parts))
                    for m, part in enumerate(parts, 1)
                ]
        elif action != "first":
            {"seek": feed.seek, "pass": feed.pass_over}[action](*arguments)
        number += action in ("step", "first")


def check(ways: list[Way], worlds: tuple[int, ...]) -> list[list[list[tuple[Any, ...]]]]:
    """Goes these ways on so many ranks, and checks what each gets; returns it by world."""
    found = []
    for world in worlds:
        ranks = run_ranks(go, world, ways)
        for number, way in enumerate(ways):
            check_shares(way, [given[number] for given in ranks])
        found.append(ranks)
    return found


DIGEST = "5" * 64


def test_each_rank_gets_its_share_of_random_steps():
    """1, 2 and 3 ranks; random N, G and b, far and near positions, short steps in which ranks have nothing."""
    rng = random.Random(1)
    ways = []
    for _ in range(30):
        kind = rng.choice(list(SHARES))
        batch = rng.randint(1, 5)
        size = 6 * batch * rng.randint(1, 2) if kind == "interleaved" else rng.randint(1, 40)
        position = rng.choice([0, rng.randrange(1000), 10**9])
        actions = [("seek", position, DIGEST, [])] + [("step",)] * 5
        if rng.random() < 0.5:
            start = position + 2 * size + rng.randint(0, size)
            actions.insert(3, ("pass", start, start + rng.randint(1, 2 * size)))
        ways.append(Way(rng.randint(1, 100), size, kind, batch, kind == "contiguous", actions=tuple(actions)))
    assert {way.kind for way in ways} == set(SHARES)
    check(ways, (1, 2, 3))


def test_workers_change_nothing():
    actions = (
        ("step",),
        ("step",),
        ("seek", 10**9, DIGEST, [(10**9 + 7, 10**9 + 30)]),
        ("first",),
        ("step",),
        ("step",),
    )
    straddling = Way(100, 12, "interleaved", 2, workers=1, actions=actions)
    check([straddling, Way(100, 7, "contiguous", 3, True, 1, actions)], (2,))


@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_reads_only_its_own_items(world):
    """And nothing before the position it begins at; one micro-batch is fetched ahead."""
    way = Way(10**6, 12, "interleaved", 2, actions=(("seek", 10**9, DIGEST, []), *[("step",)] * 5))
    (ranks,) = check([way], (world,))
    of_ranks = []
    for (given,) in ranks:
        own = [number for _, micro_batches, _, _ in given for numbers, _, _ in micro_batches for number in numbers]
        read = [item for *_, items in given for item in items]
        assert read[: len(own)] == own
        assert len(read) == len(own) + 2
        of_ranks.append(set(read))
    assert sum(map(len, of_ranks)) == len(set.union(*of_ranks))


def test_the_first_micro_batch_is_given_in_advance_and_again():
    """At the start, between steps and after a seek; asking twice reads once."""
    actions = (
        *[("first",), ("first",), ("step",), ("first",), ("step",), ("step",), ("first",)],
        *[("seek", 40, DIGEST, []), ("first",), ("step",), ("first",), ("pass", 64, 70), ("first",), ("step",)],
    )
    way = Way(100, 12, "interleaved", 2, actions=actions)
    short = Way(10, 4, "contiguous", 100, True, actions=(("seek", 8, DIGEST, []), ("first",), ("step",), ("step",)))
    for ranks in check([way, short], (1, 2)):
        for given, of_short in ranks:
            for first, step in ((0, 2), (1, 2), (3, 4), (7, 8), (10, 11)):
                assert given[first][0] == given[step][1][0]
            assert given[1][1] == []
            assert of_short[0][0] == of_short[1][1][0]
            assert given[6][0] != given[7][0]  # before and after the seek


def test_seeking_in_the_middle_of_a_run_delivers_what_is_there():
    """Back, forth, and back to where it was, also inside what the loader has fetched."""
    actions = (
        *[("step",), ("step",), ("seek", 10**9 + 5, DIGEST, []), ("step",), ("step",)],
        *[("seek", 3, DIGEST, [(5, 8), (100, 120)]), ("step",), ("step",), ("pass", 40, 44), ("step",), ("step",)],
        *[("seek", 12, DIGEST, []), ("step",)],
    )
    ways = [Way(100, 12, "interleaved", 2, workers=workers, actions=actions) for workers in (0, 1)]
    ways.append(Way(100, 12, "contiguous", 4, True, actions=actions))
    check(ways, (1, 2))


def workers_of_a_moving_feed() -> list[int]:
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    feed = Feed(Numbers(100), 1, 4, interleaved(1, 2), accelerator, workers=1)
    counts = []
    for move in (lambda: None, lambda: feed.seek(40, DIGEST, []), lambda: feed.pass_over(60, 70)):
        move()
        assert len(list(feed.next_step().micro_batches)) == 2
        counts.append(len(multiprocessing.active_children()))
    return counts


class Vanished(Numbers):
    """Items whose file is gone."""

    workers = 1

    def read(self, items: np.ndarray) -> Any:
        raise UserError("data.path", "photos/1.png", "is not an image")


def mistakes_in_workers() -> list[str]:
    from gpt2_ddp.processes.launch import build_accelerator
    from gpt2_ddp.tasks.samples import score_each

    accelerator = build_accelerator("cpu", "no")
    source = Vanished(4)
    told = []
    for read in (
        lambda: Feed(source, 1, 4, interleaved(1, 4), accelerator, workers=1).first_micro_batch(),
        lambda: score_each(accelerator, torch.nn.Identity(), cast(Any, source), lambda *_: {}, 4),
    ):
        try:
            read()
        except UserError as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_a_mistake_in_a_loader_s_worker_stays_one():
    assert run_ranks(mistakes_in_workers, 1) == [["data.path = photos/1.png: is not an image"] * 2]


def test_seeking_ends_the_loader_s_workers():
    assert run_ranks(workers_of_a_moving_feed, 1) == [[1, 1, 1]]


WRONG = ("lost", "doubled", "swapped", "reversed", "short", "moved")
"""What can go wrong with the loader, or the feed's position, after three steps of two micro-batches."""


def deliver_wrongly() -> None:
    from gpt2_ddp.data import loader as module
    from gpt2_ddp.processes.launch import build_accelerator

    class Batches(list):
        def end(self) -> None: ...

    accelerator = build_accelerator("cpu", "no")
    prepare, world = module.prepare_data_loader, accelerator.num_processes
    for how in ("nothing", *WRONG):

        def prepare_wrongly(*given, how=how, **settings):
            prepared = prepare(*given, **settings)
            batches = Batches(batch for _, batch in zip(range(20), prepared, strict=False))
            rows, items = batches[6]
            if how == "lost":
                del batches[6]
            elif how == "doubled":
                batches.insert(6, batches[5])
            elif how == "swapped":
                batches[6:8] = batches[7], batches[6]
            elif how == "reversed":
                batches[6] = rows, items[::-1]
            elif how == "short":
                batches[6] = rows, items[:-1]
            return batches

        module.prepare_data_loader = prepare_wrongly
        feed = Feed(Numbers(100), 1, 4 * world, interleaved(world, 2), accelerator)
        for _ in range(3):
            assert len(list(feed.next_step().micro_batches)) == 2
        feed.position += how == "moved"
        if how == "nothing":
            assert len(list(feed.next_step().micro_batches)) == 2
            continue
        with pytest.raises(RuntimeError, match=r"micro-batch 1 holds items \[.*\], not the order's \["):
            list(feed.next_step().micro_batches)


@pytest.mark.parametrize("world", [1, 2])
def test_other_items_than_the_order_s_are_refused(world):
    run_ranks(deliver_wrongly, world)


def waits() -> list[float]:
    """Seconds waited after each of five steps, on a clock that moves while the source reads."""
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    source = Numbers(100)
    time.perf_counter = lambda: float(len(source.read_items))
    feed = Feed(source, 1, 4, interleaved(1, 2), accelerator)
    found = []
    for _ in range(5):
        list(feed.next_step().micro_batches)
        found.append(feed.waited)
    return found


def test_the_time_waited_for_the_loader_is_counted():
    """A second per item, two items a micro-batch, one micro-batch ahead."""
    assert run_ranks(waits, 1) == [[6.0, 10.0, 14.0, 18.0, 22.0]]


# Windows of real shards


def delivered(folder: Path, workers: int) -> list[list[int]]:
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    stream = TokenStream(folder, read_manifest(folder), "train")
    windows, world = Windows(stream, 32), accelerator.num_processes
    feed = Feed(windows, 1, 6 * world, interleaved(world, 3), accelerator, workers=workers)
    feed.seek(10**9, FIRST_DIGEST, [])
    found = []
    for _ in range(3):
        step = feed.next_step()
        for m, batch in enumerate(step.micro_batches):
            (tokens,) = batch.rows
            start = (m * world + accelerator.process_index) * 3
            items = step.items[start : start + 3].astype(np.int64)
            assert tokens.dtype == torch.int64
            assert np.array_equal(tokens.numpy(), stream.read(items * 32, 33))
            assert (batch.own, batch.last) == (3, m == 1)
            found.append(items.tolist())
    return found


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (2, 0), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_each_rank_gets_its_windows(corpus, world, workers):
    """Rank r gets, as micro-batch m of b windows, the positions p + (m W + r) b onwards."""
    n = len(Windows(TokenStream(corpus, read_manifest(corpus), "train"), 32))
    for rank, batches in enumerate(run_ranks(delivered, world, corpus, workers)):
        for micro, windows in enumerate(batches):
            start = 10**9 + (micro * world + rank) * 3
            assert windows == Order(1, n).at(np.arange(start, start + 3)).tolist()


def big_corpus(folder: Path, tokens: int, vocab_size: int = 512) -> Path:
    """Sparse shards of zeros with the tokenizer of another folder's name; they take no room on the disk."""
    per_shard = min(tokens, 100_000_000)
    name, count = "train_{:06d}.bin", tokens // per_shard
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, per_shard
    for index in range(count):
        with (folder / name.format(index)).open("wb") as file:
            file.write(header.tobytes())
            file.truncate(1024 + 2 * per_shard)
    sha256 = sha256_file(folder / name.format(0))
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    shards = [Shard(name.format(i), per_shard, 1024 + 2 * per_shard, sha256) for i in range(count)]
    write_manifest(
        folder, Manifest(1, "tokenizer.json", tokenizer.sha256, vocab_size, tokenizer.eot, "zeros", {"train": shards})
    )
    return folder


NAMES = ("us_per_batch", "us_per_step", "us_bare")


def loading(folder: Path, n_batches: int, batch_size: int, block_size: int) -> dict[str, float]:
    """Takes batches as a training does; returns what a batch, a step and a far seek cost this thread, and what bare
    reads of as many windows do in between."""
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    windows = Windows(TokenStream(folder, read_manifest(folder), "train"), block_size)
    feed = Feed(windows, 1, batch_size, interleaved(1, batch_size), accelerator)
    steps, batches, bare = [], [], []
    file = os.open(folder / "train_000000.bin", os.O_RDONLY)
    for number in range(n_batches + 2):
        start = time.thread_time()
        step = feed.next_step()
        taken = time.thread_time()
        (batch,) = step.micro_batches
        batches.append(time.thread_time() - taken)
        steps.append(taken - start)
        (tokens,) = batch.rows
        assert tokens.shape == (batch_size, block_size + 1)
        start = time.thread_time()
        offsets = [1024 + (number * 7919 + row * 104_729) * 2 * block_size % 190_000_000 for row in range(batch_size)]
        read = b"".join(os.pread(file, 2 * block_size + 2, offset) for offset in offsets)
        torch.from_numpy(np.frombuffer(read, "<u2").astype(np.int64)).view(batch_size, -1)
        bare.append(time.thread_time() - start)
    start = time.thread_time()
    feed.seek(10**6 * 512, FIRST_DIGEST, [])
    list(feed.next_step().micro_batches)
    seek = time.thread_time() - start
    median = {name: statistics.median(times[2:]) for name, times in zip(NAMES, (batches, steps, bare), strict=True)}
    return {name: 1e6 * seconds for name, seconds in median.items()} | {"seek_ms": 1e3 * seek}


@pytest.mark.timed
@pytest.mark.slow
def test_loading_costs_little(corpus, tmp_path):
    """A batch of 16 x 1024 at most eight times what bare reads cost (50 microseconds), and a step four times; a seek to
    step 1,000,000 within 10 ms."""
    shutil.copy(corpus / "tokenizer.json", tmp_path)
    folder = big_corpus(tmp_path, 300_000_000)
    found = [run_ranks(loading, 1, folder, 200, 16, 1024)[0] for _ in range(3)]
    print(found)
    assert min(run["us_per_batch"] / run["us_bare"] for run in found) <= 8, found
    assert min(run["us_per_step"] / run["us_bare"] for run in found) <= 4, found
    assert min(run["seek_ms"] for run in found) < 10, found


def resident_bytes_of_a_training(config: TrainingConfig) -> int:
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks.pretraining import Pretraining

    train(config, Pretraining)
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(corpus, tmp_path):
    """A training over 300 MB holds what one over 10 MB holds, the hashes of all shards checked in both."""
    resident = {}
    for tokens in (5_000_000, 150_000_000):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        shutil.copy(corpus / "tokenizer.json", folder)
        changes = {"run_name": str(tokens), "train.steps": 100, "train.global_batch_tokens": 64 * 32}
        config = training_config(big_corpus(folder, tokens), tmp_path / "runs", changes)
        (resident[tokens],) = run_ranks(resident_bytes_of_a_training, 1, config)
    small, big = resident.values()
    print(resident)
    assert big < 1.05 * small, resident


def test_a_new_feed_straddles_epochs_and_has_ended_none():
    feed = Feed(range(10), 1, 4, interleaved(1, 4))
    assert not feed.ended_epoch
    assert [len(feed.next_step().items) for _ in range(5)] == [4] * 5


def test_one_item_stands_in_for_an_empty_share():
    from gpt2_ddp.data.feed import _part

    positions = np.arange(7, 12)
    assert _part(positions, range(0)).tolist() == [7]
    assert _part(positions, range(1, 3)).tolist() == [8, 9]
