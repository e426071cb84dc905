"""The feed: each item once per epoch, whatever the ranks, micro-batches, workers and restarts."""

import math
import multiprocessing
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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

# Shares


def test_contiguous_shares():
    """Stretches of the step, one per rank, and equal numbers of micro-batches; sizes differ by at most one."""
    rng = random.Random(0)
    for _ in range(200):
        n, processes, largest = rng.randint(1, 60), rng.randint(1, 5), rng.randint(1, 12)
        of_rank = list(zip(*contiguous(processes, largest)(n), strict=True))
        assert [item for parts in of_rank for part in parts for item in part] == list(range(n))
        assert [len(parts) for parts in of_rank] == [math.ceil(math.ceil(n / processes) / largest)] * processes
        sizes = [[len(part) for part in parts] for parts in of_rank]
        assert all(max(one) - min(one) <= 1 and max(one) <= largest for one in sizes)
        totals = [sum(one) for one in sizes]
        assert max(totals) - min(totals) <= 1


def test_a_micro_batch_is_the_largest_divisor_or_has_the_least_padding():
    """Of sizes with at most twice the necessary micro-batches, by the definition."""
    found = {(512, 6, 16): 11, (512, 7, 16): 15, (480, 12, 16): 10, (5, 3, 1): 1, (3, 2, 16): 2}
    rng = random.Random(0)
    for windows in (rng.randint(1, 300) for _ in range(2000)):
        processes, limit = rng.randint(1, min(windows, 9)), rng.randint(1, 40)
        share = math.ceil(windows / processes)
        allowed = [size for size in range(1, limit + 1) if math.ceil(share / size) <= 2 * math.ceil(share / limit)]
        if windows % processes == 0:
            allowed = [size for size in range(1, limit + 1) if share % size == 0]
        rows = {size: math.ceil(share / size) * size * processes for size in allowed}
        fewest = [size for size in allowed if rows[size] == min(rows.values())]
        found[windows, processes, limit] = max(size for size in fewest if size <= share)
    for (windows, processes, limit), size in found.items():
        assert split_batch(windows, processes, limit) == size, (windows, processes, limit)
        rows = math.ceil(windows / processes / size) * size * processes
        assert padding_rows(windows, processes, size) == rows - windows
    expect_error(r"processes = 9: more than the 8 windows of a step", split_batch, 8, 9, 16)


def test_numbers_of_windows_and_of_micro_batches_to_try():
    assert [count_windows(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert list(micro_batches(96, 8)) == [12, 6, 4, 3, 2, 1]
    assert list(micro_batches(512, 6)) == [86, 43, 29, 22, 11, 8, 4, 2, 1]


def test_the_smallest_micro_batch_of_an_epoch():
    """A stand-in, where a share is empty, is one row, too."""
    rng = random.Random(0)
    for _ in range(60):
        n, size, world, largest = (rng.randint(1, most) for most in (40, 30, 4, 12))
        share, rows = contiguous(world, largest), []
        feed = Feed(Order(1, n), GlobalBatch(size, share, by_epoch=True))
        while not feed.ended_epoch:
            rows += [max(len(own), 1) for ranks in share(len(feed.next_step().items)) for own in ranks]
        assert smallest_micro_batch(feed) == min(rows)
    assert smallest_micro_batch(Feed(Order(1, n), GlobalBatch(12, interleaved(2, 3)))) == 3


# Steps


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


def step_by_definition(n: int, size: int, by_epoch: bool, passed: list[tuple[int, int]], position: int) -> list[int]:
    """The positions of a step, one at a time."""
    step: list[int] = []
    while len(step) < size:
        if not any(start <= position < stop for start, stop in passed):
            if step and by_epoch and position // n != step[0] // n:
                break
            step.append(position)
        position += 1
    return step


def walk(seed: int, accelerator: Any, workers: int = 0, actions: int = 25) -> None:
    """Random steps, looks at the next micro-batch, ranges passed over, moves and restarts on one rank. All that the
    feed returns is what the definition gives; a rank reads its own items alone, and at most one micro-batch ahead."""
    rng = random.Random(seed)
    n, size, batch = rng.choice([rng.randint(1, 60), 10**6]), rng.randint(3, 24), rng.randint(1, 8)
    by_epoch, world, rank = rng.random() < 0.5, accelerator.num_processes, accelerator.process_index
    share, least = (contiguous(world, batch), 1) if by_epoch else (interleaved(world, batch), batch)
    order, source, random_state = Order(seed, n), Numbers(n), torch.get_rng_state()
    feed = Feed(order, GlobalBatch(size, share, by_epoch, least), source, accelerator, workers)
    state, saved, delivered = FeedState(), [FeedState()], list[int]()

    def expected() -> tuple[list[int], list[tuple[list[int], int, bool]]]:
        """Positions of the next step, and this rank's micro-batches: positions, how many count, whether it is last."""
        positions = step_by_definition(n, size, by_epoch, state.skipped_ranges, state.position)
        shares = share(len(positions))
        assert sorted(i for ranks in shares for part in ranks for i in part) == [*range(len(positions))]
        micro_batches = []
        for number, ranks in enumerate(shares, 1):
            own = [positions[i] for i in ranks[rank]]
            rows = own or positions[:1]
            rows = rows + rows[-1:] * (least - len(rows))
            micro_batches.append((rows, len(own), number == len(shares)))
        return positions, micro_batches

    def check(found: Any, wanted: tuple[list[int], int, bool]) -> list[int]:
        numbers, negated = found.rows
        assert (found.positions.tolist(), found.n_valid, found.last) == wanted
        assert numbers.dtype == torch.int64
        assert numbers.tolist() == (-negated).tolist() == order.items_at(found.positions).tolist()
        return numbers.tolist()

    for _ in range(actions):
        positions, wanted = expected()
        action = rng.choice(["step", "step", "step", "first", "pass", "move", "restart"])
        if action == "step":
            step = feed.next_step()
            items = order.items_at(np.array(positions))
            assert step.items.tolist() == items.tolist()
            for found, one in zip(step.micro_batches, wanted, strict=True):
                delivered += check(found, one)
            digest = next_digest(state.order_digest, items)
            state = state.model_copy(update={"position": positions[-1] + 1, "order_digest": digest})
            (left,) = step_by_definition(n, 1, False, state.skipped_ranges, state.position)
            assert (feed.epochs, feed.ended_epoch) == (left // n, left // n > positions[0] // n)
        elif action == "first":
            for again in (False, True):
                before = len(source.read_items)
                check(feed.first_micro_batch(), wanted[0])
                assert not again or len(source.read_items) == before
        elif action == "pass":
            end = max([state.position, *(stop for _, stop in state.skipped_ranges)])
            start = end + rng.choice([0, rng.randint(1, 2 * size)])
            stop = start + rng.choice([1, rng.randint(1, 3 * size), *([n, 2 * n + 1] if n < 99 else [])])
            feed.skip_range(start, stop)
            digest = skipped_digest(state.order_digest, start, stop)
            passed = [*state.skipped_ranges, (start, stop)]
            state = state.model_copy(update={"skipped_ranges": passed, "order_digest": digest})
        else:
            at = rng.choice([state.position, rng.randrange(1000), 10**9])
            far = FeedState(position=at, skipped_ranges=[(at + 2, at + 5)], order_digest="5" * 64)
            state = FeedState.model_validate_json(rng.choice([*saved, far]).model_dump_json())
            if action == "restart" and not workers:
                feed = Feed(order, GlobalBatch(size, share, by_epoch, least), source, accelerator, workers)
            feed.load_state_dict(state)
            assert len(multiprocessing.active_children()) <= workers, "a move ends the loader's workers"
        assert feed.state_dict() == state
        saved.append(state)
        if action in ("pass", "move", "restart"):
            source.read_items, delivered = [], []
        elif not workers:
            assert source.read_items[: len(delivered)] == delivered
            assert len(source.read_items) <= len(delivered) + 2 * batch
    feed.seek(0, FIRST_DIGEST, [])
    assert torch.equal(torch.get_rng_state(), random_state), "loading must not draw from the global generator"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_gets_its_share_of_random_steps(world):
    for seed in range(40):
        for rank in range(world):
            walk(seed, rank_of(world, rank))


@pytest.mark.parametrize("by_epoch", [False, True])
def test_every_item_once_per_epoch(by_epoch):
    rng = random.Random(0)
    for _ in range(30):
        n, size = rng.randint(1, 400), rng.randint(1, 24)
        feed = Feed(Order(1, n), GlobalBatch(size, interleaved(1, size), by_epoch))
        taken = np.concatenate([feed.next_step().items for _ in range(2 * math.ceil(n / size))])
        assert feed.consumed == len(taken)
        for epoch in range(2):
            assert np.array_equal(np.sort(taken[epoch * n : (epoch + 1) * n]), np.arange(n))


def test_what_was_trained_on_cannot_be_passed_over():
    feed = Feed(Order(1, 50), GlobalBatch(6, interleaved(1, 6)))
    feed.next_step()
    before = feed.state_dict()
    for start, stop in ((5, 9), (0, 3), (7, 7), (9, 8)):
        with pytest.raises(AssertionError):
            feed.skip_range(start, stop)
    assert feed.state_dict() == before
    feed.skip_range(6, 7)


class Vanished(Numbers):
    """Items whose file is gone."""

    workers = 1

    def read(self, items: np.ndarray) -> Any:
        raise UserError("data.path", "photos/1.png", "is not an image")


def walk_with_workers(folder: Path) -> None:
    """Through all moves and from real shards; an error in a worker is a user error."""
    from gpt2_ddp.distributed.launch import build_accelerator
    from gpt2_ddp.tasks.supervised import score_each

    accelerator = build_accelerator("cpu", "no")
    walk(246, accelerator, workers=1, actions=9)
    check_windows(folder, accelerator, 1)
    source, batch = Vanished(4), GlobalBatch(4, interleaved(2, 2))
    message = "data.path = photos/1.png: is not an image"
    expect_error(message, Feed(Order(1, 4), batch, source, accelerator, workers=1).first_micro_batch)
    expect_error(message, score_each, accelerator, torch.nn.Identity(), cast(Any, source), lambda *_: {}, 4)


def test_workers_of_two_ranks_deliver_the_same(corpus):
    run_ranks(walk_with_workers, 2, corpus)


WRONG = {
    "lost": lambda batches: batches[1:],
    "doubled": lambda batches: [batches[1], *batches],
    "swapped": lambda batches: [batches[1], batches[0], *batches[2:]],
    "reversed": lambda batches: [(batches[0][0], batches[0][1][::-1]), *batches[1:]],
    "short": lambda batches: [(batches[0][0], batches[0][1][:-1]), *batches[1:]],
    "moved": list,
}
"""What can go wrong with the loader, or the feed's position, after three steps of two micro-batches."""


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("how", WRONG)
def test_other_items_than_the_order_s_are_refused(monkeypatch, how, world, rank):
    class Delivered(list):
        def end(self) -> None: ...

    def prepare_wrongly(*given, **settings):
        prepared = prepare(*given, **settings)
        batches = Delivered(batch for _, batch in zip(range(20), prepared, strict=False))
        batches[6:] = WRONG[how](batches[6:])
        return batches

    prepare = feed_module.prepare_data_loader
    monkeypatch.setattr(feed_module, "prepare_data_loader", prepare_wrongly)
    feed = Feed(Order(1, 100), GlobalBatch(4 * world, interleaved(world, 2)), Numbers(100), rank_of(world, rank))
    for _ in range(3):
        assert len(list(feed.next_step().micro_batches)) == 2
    feed.position += how == "moved"
    with pytest.raises(RuntimeError, match=r"micro-batch 1 holds items"):
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
