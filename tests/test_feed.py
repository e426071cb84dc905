"""The feed: each item once per epoch, whatever the ranks, micro-batches, workers and restarts."""

import math
import multiprocessing
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import psutil
import pytest
import torch
from accelerate.state import GradientState
from commands import expect_error
from ranks import run_ranks
from runs import edit_manifest, train, training_config

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data import feed as feed_module
from gpt2_ddp.data.feed import Batches, Feed, GlobalBatch, interleaved, make_loader, padding_rows, split_batch
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Order, next_digest, skipped_digest
from gpt2_ddp.data.shards import TokenStream, Windows, count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.model.memory import micro_batches
from gpt2_ddp.state import FIRST_DIGEST, FeedState
from gpt2_ddp.tasks.supervised import contiguous, smallest_micro_batch

SHARES = {"interleaved": interleaved, "contiguous": contiguous}


def replay(n: int, step_size: int, by_epoch: bool = False, seed: int = 1) -> Feed:
    return Feed(Order(seed, n), GlobalBatch(step_size, interleaved(1, step_size), by_epoch))


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
    ("windows", "processes", "limit", "batch", "padding"),
    [(512, 6, 16, 11, 16), (512, 7, 16, 15, 13), (512, 6, 64, 43, 4), (512, 7, 64, 37, 6), (512, 3, 16, 9, 1)]
    + [(480, processes, 16, batch, 0) for processes, batch in ((5, 16), (6, 16), (12, 10), (15, 16))]
    + [(5, 3, 1, 1, 1), (3, 2, 16, 2, 1), (7, 7, 4, 1, 0), (21, 3, 5, 1, 0), (18, 3, 100, 6, 0)],
)
def test_a_micro_batch_is_the_largest_divisor_or_has_the_least_padding(windows, processes, limit, batch, padding):
    assert (split_batch(windows, processes, limit), padding_rows(windows, processes, batch)) == (batch, padding)
    for other in range(limit, 0, -1):  # no size of at most twice as many micro-batches has less
        fewest = -(-windows // (processes * limit))
        if -(-windows // (processes * other)) <= 2 * fewest and windows % processes:
            assert padding_rows(windows, processes, other) >= padding


def test_more_processes_than_windows_are_refused():
    expect_error(r"processes = 9: more than the 8 windows of a step", split_batch, 8, 9, 16)


def test_numbers_of_windows_and_of_micro_batches_to_try():
    assert [count_windows(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert list(micro_batches(96, 8)) == [12, 6, 4, 3, 2, 1]
    assert list(micro_batches(512, 6)) == [86, 43, 29, 22, 11, 8, 4, 2, 1]


# Steps


@pytest.mark.parametrize("by_epoch", [False, True])
def test_random_step_sizes_shares_and_restarts_consume_every_item_once(by_epoch):
    """Property test over random N, G, W and b; W and b change at each restart."""
    rng = random.Random(0)
    for _ in range(60):
        n, size, seed = rng.randint(1, 400), rng.choice([1, 2, 4, 6, 8, 12, 24]), rng.randrange(2**63)
        steps = 2 * math.ceil(n / size) + 1
        consumed, digest, saved = [], FIRST_DIGEST, FeedState()
        while len(consumed) < steps:
            world = rng.randint(1, min(size, 8))
            largest = rng.randint(1, 8)
            batch = split_batch(size, world, largest)
            share = contiguous(world, largest) if by_epoch else interleaved(world, batch)
            feed = Feed(Order(seed, n), GlobalBatch(size, share, by_epoch))
            feed.load_state_dict(saved)
            for _ in range(min(rng.randint(1, 10), steps - len(consumed))):  # until the next restart
                items = feed.next_step().items
                shares = feed.share(len(items))
                shared = [item for ranks in shares for part in ranks for item in items[part.start : part.stop]]
                assert sorted(shared) == sorted(items)
                consumed.append(items)
                digest = next_digest(digest, items)
                assert feed.order_digest == digest
                assert feed.consumed == feed.position == sum(map(len, consumed))
            saved = feed.state_dict()
        if by_epoch:
            assert [len(items) for items in consumed[: math.ceil(n / size)]] == [
                min(size, n - start) for start in range(0, n, size)
            ]
        else:
            assert {len(items) for items in consumed} == {size}
        flat = np.concatenate(consumed)
        assert np.array_equal(flat, Order(seed, n).items_at(np.arange(len(flat))))
        for epoch in range(2):
            assert np.array_equal(np.sort(flat[epoch * n : (epoch + 1) * n]), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 12, 25, 26, 27, 28])
@pytest.mark.parametrize(("world", "size", "largest"), [(1, 12, 12), (1, 12, 5), (3, 12, 12), (2, 100, 3)])
def test_the_smallest_micro_batch_of_an_epoch(n, world, size, largest):
    """A stand-in, where a share is empty, is one row, too."""
    share = contiguous(world, largest)
    feed = Feed(Order(1, n), GlobalBatch(size, share, by_epoch=True))
    rows = []
    for _ in range(math.ceil(n / size)):
        rows += [max(len(own), 1) for ranks in share(len(feed.next_step().items)) for own in ranks]
    assert feed.ended_epoch
    assert smallest_micro_batch(feed) == min(rows)
    assert smallest_micro_batch(Feed(Order(1, n), GlobalBatch(12, interleaved(2, 3)))) == 3


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
                feed.skip_range(start, end)
                digest = skipped_digest(digest, start, end)
                assert feed.order_digest == digest
            if rng.random() < 0.3:
                again = replay(n, size, by_epoch)
                again.load_state_dict(FeedState.model_validate_json(feed.state_dict().model_dump_json()))
                feed = again
            positions = next(expected_steps(n, size, by_epoch, feed.skipped_ranges, feed.position))
            items = feed.next_step().items
            assert items.tolist() == Order(1, n).items_at(np.array(positions)).tolist()
            digest = next_digest(digest, items)
            taken += positions
            assert feed.order_digest == digest
            assert feed.position == taken[-1] + 1
            assert feed.consumed == len(taken)
            left = next(expected_steps(n, 1, by_epoch, feed.skipped_ranges, feed.position))[0]
            assert feed.epochs == left // n
            assert feed.ended_epoch == (left // n > positions[0] // n)
        assert len(set(taken)) == len(taken)


def test_what_was_trained_on_cannot_be_passed_over():
    feed = replay(50, 6)
    feed.next_step()
    before = feed.state_dict()
    for start, stop in ((5, 9), (0, 3), (7, 7), (9, 8)):
        with pytest.raises(AssertionError):
            feed.skip_range(start, stop)
    assert feed.state_dict() == before
    feed.skip_range(6, 7)


# Micro-batches


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


def rank_of(world: int, rank: int) -> Any:
    """What a feed asks an accelerator for."""
    return SimpleNamespace(num_processes=world, process_index=rank, device=torch.device("cpu"))


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


def global_batch(way: Way, world: int) -> GlobalBatch:
    """A step's shares; those of `interleaved` are padded to equal sizes."""
    return GlobalBatch(
        way.size, SHARES[way.kind](world, way.batch), way.by_epoch, way.batch if way.kind == "interleaved" else 1
    )


def padded(own: list[int], rows: int) -> list[int]:
    return own + own[-1:] * (rows - len(own))


def go(ways: list[Way], accelerator: Any = None) -> list[list[tuple[Any, ...]]]:
    """What each action gives on this rank: a micro-batch as (numbers, own, last), a step as (items, micro-batches)."""
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator = accelerator or build_accelerator("cpu", "no")
    found = []
    for way in ways:
        source, given = Numbers(way.n), []
        batch = global_batch(way, accelerator.num_processes)
        feed = Feed(Order(way.seed, way.n), batch, source, accelerator, way.workers)
        random_state = torch.get_rng_state()
        for action, *arguments in way.actions:
            source.read_items.clear()
            if action == "step":
                step = feed.next_step()
                micro_batches = [_plain(batch) for batch in step.micro_batches]
                given.append((step.items.tolist(), micro_batches, feed.state_dict(), list(source.read_items)))
            elif action == "first":
                given.append((_plain(feed.first_micro_batch()), list(source.read_items)))
            else:
                {"seek": feed.seek, "pass": feed.skip_range}[action](*arguments)
            assert len(multiprocessing.active_children()) <= way.workers, "a seek ends the loader's workers"
        assert torch.equal(torch.get_rng_state(), random_state), "loading must not draw from the global generator"
        feed.seek(0, FIRST_DIGEST, [])
        found.append(given)
    return found


def _plain(batch) -> tuple[list[int], int, bool]:
    numbers, negated = batch.rows
    assert numbers.dtype == torch.int64
    assert torch.equal(numbers, -negated)
    return numbers.tolist(), batch.n_valid, batch.last


def check_shares(way: Way, ranks: list[list[tuple[Any, ...]]]) -> None:
    """Each step's micro-batches, of all ranks, are what the feed's share says of the order's items."""
    world = len(ranks)
    feed = Feed(Order(way.seed, way.n), global_batch(way, world))
    number = 0
    for action, *arguments in way.actions:
        if action == "step":
            items = feed.next_step().items.tolist()
            shares = feed.share(len(items))
            for rank, given in enumerate(ranks):
                assert given[number][0] == items
                assert given[number][2] == feed.state_dict()
                parts = [own[rank] for own in shares]
                assert given[number][1] == [
                    (padded([items[i] for i in part] or items[:1], feed.rows), len(part), m == len(parts))
                    for m, part in enumerate(parts, 1)
                ]
        elif action != "first":
            {"seek": feed.seek, "pass": feed.skip_range}[action](*arguments)
        number += action in ("step", "first")


def check(ways: list[Way], worlds: tuple[int, ...]) -> list[list[list[tuple[Any, ...]]]]:
    """Goes these ways on each rank of these worlds, and checks what it gets; returns it by world."""
    found = []
    for world in worlds:
        ranks = [go(ways, rank_of(world, rank)) for rank in range(world)]
        for number, way in enumerate(ways):
            check_shares(way, [given[number] for given in ranks])
        found.append(ranks)
    return found


DIGEST = "5" * 64


def test_each_rank_gets_its_share_of_random_steps():
    """1, 2 and 3 ranks; random N, G and b, far and near positions, short steps in which ranks have nothing; and moves
    in the middle of a run."""
    rng = random.Random(1)
    ways = []
    for _ in range(30):
        kind = rng.choice(list(SHARES))
        batch = rng.randint(1, 5)
        size = rng.randint(3, 40)
        position = rng.choice([0, rng.randrange(1000), 10**9])
        actions = [("seek", position, DIGEST, [])] + [("step",)] * 5
        if rng.random() < 0.5:
            start = position + 2 * size + rng.randint(0, size)
            actions.insert(3, ("pass", start, start + rng.randint(1, 2 * size)))
        ways.append(Way(rng.randint(1, 100), size, kind, batch, kind == "contiguous", actions=tuple(actions)))
    assert {way.kind for way in ways} == set(SHARES)
    ways += [Way(100, 12, "interleaved", 2, actions=MOVES), Way(100, 7, "contiguous", 3, True, actions=MOVES)]
    check(ways, (1, 2, 3))


def test_a_rank_reads_only_its_own_items():
    """And nothing before the position it begins at; one micro-batch is fetched ahead."""
    way = Way(10**6, 12, "interleaved", 2, actions=(("seek", 10**9, DIGEST, []), *[("step",)] * 5))
    (ranks,) = check([way], (3,))
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


MOVES = (
    *[("step",), ("step",), ("seek", 10**9 + 5, DIGEST, []), ("first",), ("step",), ("step",)],
    *[("seek", 3, DIGEST, [(5, 8), (100, 120)]), ("step",), ("step",), ("pass", 40, 44), ("step",), ("step",)],
    *[("seek", 12, DIGEST, []), ("step",)],
)
"""Back, forth, and back to where it was, also inside what the loader has fetched."""


class Vanished(Numbers):
    """Items whose file is gone."""

    workers = 1

    def read(self, items: np.ndarray) -> Any:
        raise UserError("data.path", "photos/1.png", "is not an image")


def with_workers(ways: list[Way], folder: Path) -> tuple[list[list[tuple[Any, ...]]], list[str]]:
    """What `go` gives on this rank, and the mistakes that reading in a worker comes upon."""
    from gpt2_ddp.distributed.launch import build_accelerator
    from gpt2_ddp.tasks.supervised import score_each

    found = go(ways)
    accelerator = build_accelerator("cpu", "no")
    check_windows(folder, accelerator, 1)
    source, batch = Vanished(4), GlobalBatch(4, interleaved(2, 2))
    told = []
    for read in (
        lambda: Feed(Order(1, 4), batch, source, accelerator, workers=1).first_micro_batch(),
        lambda: score_each(accelerator, torch.nn.Identity(), cast(Any, source), lambda *_: {}, 4),
    ):
        try:
            read()
        except UserError as error:
            told.append(str(error))
    return found, told


def test_workers_of_two_ranks_deliver_the_same(corpus):
    """Through all moves and from real shards; a mistake in a worker is told as one."""
    way = Way(100, 12, "interleaved", 2, workers=1, actions=MOVES)
    ranks = run_ranks(with_workers, 2, [way], corpus)
    check_shares(way, [given for (given,), _ in ranks])
    assert [told for _, told in ranks] == [["data.path = photos/1.png: is not an image"] * 2] * 2


def change_first(change):
    """A change of the micro-batches whose first one gets other items."""
    return lambda batches: [(batches[0][0], change(batches[0][1])), *batches[1:]]


WRONG = {
    "lost": lambda batches: batches[1:], "doubled": lambda batches: [batches[1], *batches],
    "swapped": lambda batches: [batches[1], batches[0], *batches[2:]],
    "reversed": change_first(lambda items: items[::-1]),
    "short": change_first(lambda items: items[:-1]), "moved": None,
}  # fmt: skip
"""What can go wrong with the loader, or the feed's position, after three steps of two micro-batches."""


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("how", ["nothing", *WRONG])
def test_other_items_than_the_order_s_are_refused(monkeypatch, how, world, rank):
    class Batches(list):
        def end(self) -> None: ...

    def prepare_wrongly(*given, **settings):
        prepared = prepare(*given, **settings)
        batches = Batches(batch for _, batch in zip(range(20), prepared, strict=False))
        if change := WRONG.get(how):
            batches[6:] = change(batches[6:])
        return batches

    prepare = feed_module.prepare_data_loader
    monkeypatch.setattr(feed_module, "prepare_data_loader", prepare_wrongly)
    feed = Feed(Order(1, 100), GlobalBatch(4 * world, interleaved(world, 2)), Numbers(100), rank_of(world, rank))
    for _ in range(3):
        assert len(list(feed.next_step().micro_batches)) == 2
    feed.position += how == "moved"
    if how == "nothing":
        assert len(list(feed.next_step().micro_batches)) == 2
        return
    with pytest.raises(RuntimeError, match=r"micro-batch 1 holds items \[.*\], not the order's \["):
        list(feed.next_step().micro_batches)


def test_the_time_waited_for_the_loader_is_counted(monkeypatch):
    """A second per item, two items a micro-batch, one micro-batch ahead."""
    source = Numbers(100)
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(perf_counter=lambda: float(len(source.read_items))))
    feed = Feed(Order(1, 100), GlobalBatch(4, interleaved(1, 2)), source, rank_of(1, 0))
    waited = []
    for _ in range(5):
        list(feed.next_step().micro_batches)
        waited.append(feed.waited)
    assert waited == [6.0, 10.0, 14.0, 18.0, 22.0]


def test_a_loader_that_is_dropped_leaves_accelerate_s_state():
    feed = Feed(Order(1, 100), GlobalBatch(4, interleaved(1, 2)), Numbers(100), rank_of(1, 0))
    known = len(GradientState().dataloader_references)
    for position in (0, 40, 12):
        feed.seek(position, FIRST_DIGEST, [])
        list(feed.next_step().micro_batches)
        assert len(GradientState().dataloader_references) == known + 1


# Windows of real shards


def check_windows(folder: Path, accelerator: Any, workers: int) -> None:
    """Rank r gets, as micro-batch m of b windows, the positions p + (m W + r) b onwards, and the shards' tokens."""
    stream = TokenStream(folder, read_manifest(folder), "train")
    windows, world = Windows(stream, 32), accelerator.num_processes
    batch = GlobalBatch(6 * world, interleaved(world, 3))
    feed = Feed(Order(1, len(windows)), batch, windows, accelerator, workers)
    feed.seek(10**9, FIRST_DIGEST, [])
    found = []
    for _ in range(3):
        for m, batch in enumerate(feed.next_step().micro_batches):
            (tokens,) = batch.rows
            start = 10**9 + (len(found) * world + accelerator.process_index) * 3
            items = Order(1, len(windows)).items_at(np.arange(start, start + 3)).astype(np.int64)
            assert tokens.dtype == torch.int64
            assert np.array_equal(tokens.numpy(), stream.read(items * 32, 33))
            assert (batch.n_valid, batch.last) == (3, m == 1)
            found.append(items)
    assert len(found) == 6


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(corpus, tmp_path):
    """A training over 300 MB of zeros holds what one over 10 MB holds, the hashes of all shards checked in both."""
    resident = {}
    for tokens in (5_000_000, 150_000_000):
        folder = Path(shutil.copytree(corpus, tmp_path / str(tokens)))
        file = folder / "train_000000.bin"
        with file.open("r+b") as shard:
            header = np.frombuffer(shard.read(1024), "<i4").copy()
            header[2] = tokens
            shard.seek(0)
            shard.write(header.tobytes())
            shard.truncate(1024)
            shard.truncate(1024 + 2 * tokens)  # sparse
        shard = {"file": file.name, "tokens": tokens, "bytes": file.stat().st_size, "sha256": sha256_file(file)}
        edit_manifest(folder, splits={"train": [shard]})
        changes = {"run_name": str(tokens), "train.steps": 40, "train.global_batch_tokens": 64 * 32}
        (resident[tokens],) = run_ranks(resident_bytes, 1, training_config(folder, tmp_path / "runs", changes))
    small, big = resident.values()
    print(resident)
    assert big < 1.05 * small, resident


def resident_bytes(config: TrainingConfig) -> int:
    train(config)
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_gets_its_windows(corpus, world):
    for rank in range(world):
        check_windows(corpus, rank_of(world, rank), 0)


def test_a_loader_has_the_processes_that_were_asked_for():
    loader = make_loader(Batches(list), [[0]], 2)
    assert [make_loader(Batches(list), [[0]], 0).num_workers, loader.num_workers] == [0, 2]
    assert loader.multiprocessing_context.get_start_method() == "forkserver", "the training has threads"
