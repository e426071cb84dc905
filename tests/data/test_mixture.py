"""Mixtures: one order of several sources, by its definition and by numbers that no release may
change; runs over them, stopped, killed, gone back and given other weights; and what is refused."""

import dataclasses
import hashlib
import math
import random
import re
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from close import assert_close
from commands import expect_field
from conftest import module_text, write_shards
from ranks import in_turn, run_ranks
from runs import (
    complete,
    edit_manifest,
    gpt_state,
    permuted,
    rows,
    train,
    training_config,
    verified,
)

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.corpus import open_corpus
from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.mixture import (
    MixedOrder,
    MixedWindows,
    Phase,
    check_distinct,
    check_resumed_data,
    normalized,
    phases_of,
    source_weights,
)
from gpt2_ddp.data.order import Permutation, next_digest
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.evaluation.evaluate import Evaluation, mixed
from gpt2_ddp.state import FIRST_DIGEST, FeedState, Mixture
from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint

WINDOWS = [997, 300, 50]
PHASES = [
    Phase(0, normalized([0.7, 0.2, 0.1])),
    Phase(3000, normalized([0, 0.5, 0.5])),
    Phase(5000, normalized([0.3, 1, 1e-4])),
]


def mixture(windows=WINDOWS, phases=PHASES, seed=1337, shifts=1):
    return MixedOrder(seed, windows, phases, [f"s{i}" for i in range(len(windows))], shifts)


def uses_by_definition(phases, block):
    """Of each source before a block, from docs/verify.md."""
    totals = [0] * len(phases[0].weights)
    for number, (begins, weights) in enumerate(phases):
        end = min(block, phases[number + 1].begins // 1000 if number + 1 < len(phases) else block)
        if (blocks := end - begins // 1000) > 0:
            counts = [math.floor(weight * 1000 * blocks) for weight in weights]
            counts[weights.index(max(weights))] += 1000 * blocks - sum(counts)
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
    return totals


def mixed_by_definition(seed, windows, phases, position, shifts=1):
    """The item at a position, in integers and fractions
    alone: a block's positions one after another."""
    block, offset = divmod(position, 1000)
    before = uses_by_definition(phases, block)
    after = uses_by_definition(phases, block + 1)
    uses = list(before)
    source = 0
    for place in range(offset + 1):
        slot = permuted(seed, f"block/{block}", 1000, place)
        source = 0
        while slot >= after[source] - before[source]:
            slot -= after[source] - before[source]
            source += 1
        uses[source] += 1
    epoch, index = divmod(uses[source] - 1, windows[source])
    key = f"{source}/{epoch}" if source else str(epoch)
    content = hashlib.shake_256(f"{seed}/shift/{key}".encode()).digest(8)
    shift = int.from_bytes(content, "little") % shifts
    return source * 2**48 + shift * windows[source] + permuted(seed, key, windows[source], index)


def test_the_order_follows_its_definition():
    rng = random.Random(0)
    for _ in range(12):
        n = rng.randint(2, 6)
        windows = [rng.choice([1, rng.randint(1, 50), rng.randint(1, 10**9)]) for _ in range(n)]
        begins = [0, *sorted({1000 * rng.randint(1, 10**9) for _ in range(rng.randint(0, 3))})]
        weights = [
            [rng.choice([0, 1e-9, 0.1, rng.random(), 7]) for _ in range(n - 1)] + [0.25]
            for _ in begins
        ]
        phases = [Phase(begin, normalized(one)) for begin, one in zip(begins, weights, strict=True)]
        shifts = rng.choice([1, 32, 1000])
        order = mixture(windows, phases, seed := rng.randrange(2**63), shifts)
        first = rng.choice([*begins, 10**12])
        positions = sorted({first + rng.randrange(1500) for _ in range(3)})
        expected = [
            mixed_by_definition(seed, windows, phases, position, shifts) for position in positions
        ]
        assert order.items_at(np.array(positions)).tolist() == expected, (
            seed,
            windows,
            phases,
            positions,
            shifts,
        )


@pytest.mark.parametrize(
    ("size", "shifts", "passed", "digest"),
    [
        (
            24,
            1,
            [(240, 360), (2390, 2410)],
            "bc17af5068ec0ad46fbabb8a85460e5c25f0edb8f2767b01f3170d9d238b3f4e",
        ),
        (
            72,
            1,
            [(240, 360), (2990, 3010)],
            "8d961a255e690c46ef28630e9f67d3932da5afc71b6ec7ce1413e0a64ef40b63",
        ),
        (
            72,
            1024,
            [(240, 360), (2990, 3010)],
            "ee58ebc8ba8609d68a74b977575553783e4da1776e8ae33812ed017375cd89c5",
        ),
    ],
)
def test_the_digest_of_100_steps_is_what_it_always_was(size, shifts, passed, digest):
    """On 1 to 4 ranks, whatever the micro-batch: of steps of 24 items of one source, or of 72 of
    three, which reach over both phases' beginnings, shifted or not."""
    order = Permutation(1337, 5000) if size == 24 else mixture(shifts=shifts)
    for world in (1, 2, 3, 4):
        feed = Feed(order, GlobalBatch(size, partial(interleaved, world, size // world // 2)))
        for start, stop in passed:
            feed.skip_range(start, stop)
        for _ in range(100):
            feed.next_step()
        assert feed.state.order_digest == digest


def test_each_window_once_per_epoch_of_its_source_in_order_of_time():
    """However its epochs lie to blocks and phases."""
    items = mixture().items_at(np.arange(12_000))
    sources = (items >> np.uint64(48)).astype(int)
    windows = items & np.uint64(2**48 - 1)
    for source, n in enumerate(WINDOWS):
        own = windows[sources == source]
        assert len(own) > 4 * n or source == 0
        for epoch in range(len(own) // n):
            assert np.array_equal(np.sort(own[epoch * n : (epoch + 1) * n]), np.arange(n)), (
                source,
                epoch,
            )


# Folders


@pytest.fixture(scope="module")
def sources(corpus, tmp_path_factory):
    """Three folders of one tokenizer, the last without a validation split."""
    place = tmp_path_factory.mktemp("sources")
    shutil.copytree(corpus, place / "web")
    for name, modules in (
        ("code", {"train": "argparse", "val": "cmd"}),
        ("poems", {"train": "this"}),
    ):
        (place / name).mkdir()
        shutil.copy(corpus / "tokenizer.json", place / name)
        write_shards(
            place / name, name, {split: [module_text(module)] for split, module in modules.items()}
        )
    return [str(place / name) for name in ("web", "code", "poems")]


CHANGES = {
    "model.block_size": 8,
    "model.n_embd": 16,
    "model.n_layer": 1,
    "train.global_batch_tokens": 1920,
    "train.micro_batch_size": 60,
    "train.steps": 10,
    "optim.decay_steps": 100,
    "eval.every": 5,
    "eval.tokens": 400,
    "checkpoint.every": 4,
    "data.weights": [0.6, 0.3, 0.1],
    "data.phases": ["8000:1:8:1"],
}
"""Steps are of 240 windows."""


def config_of(sources, output, changes=()):
    return training_config("", output, CHANGES | {"data.path": sources} | dict(changes))


def windows_of(sources, shifts=1):
    streams = [TokenStream(Path(path), read_manifest(Path(path)), "train") for path in sources]
    return [Windows(stream, 8, shifts) for stream in streams]


@pytest.mark.parametrize("shifts", [1, 8])
def test_windows_are_read_from_the_source_that_they_are_of(sources, shifts):
    windows = windows_of(sources, shifts)
    sizes = [len(one) for one in windows]
    items = mixture(sizes, shifts=shifts).items_at(np.arange(40)).astype(np.int64)
    (rows,) = MixedWindows(windows).read(items)
    for row, item in zip(rows, items.tolist(), strict=True):
        source, own = divmod(item, 2**48)
        shift, window = divmod(own, sizes[source])
        stream = windows[source].stream
        whole = stream.read(np.array([0]), len(stream))[0]
        assert row.tolist() == whole[window * 8 + shift :][:9].tolist()
    assert any(item % 2**48 >= sizes[item >> 48] for item in items.tolist()) == (shifts > 1)


def test_from_the_command_line():
    flags = (
        "--data.path a/v1 b/v1-2 c/v1 --data.weights 6 3 1 --data.phases 8000:1:8:1 20000:0:0:1"
        " --model.block_size 8"
    )
    config = load(TrainingConfig, [*flags.split(), "--train.steps", "1"])
    assert config.data.names == ("v1", "v1-2", "v1-2-2")


def test_what_a_source_weighs_in_validation(sources, tmp_path):
    """As data.weights say, else by its windows; one
    whose split has no window counts for nothing."""
    manifests = [read_manifest(Path(path)) for path in sources]
    config = config_of(sources, tmp_path, {"data.weights": [3, 1, 1]})
    # the third has no validation split
    assert source_weights(config, manifests) == {0: 0.75, 1: 0.25}
    for tokens, weights in ((2, {0: 0.75, 1: 0.25}), (1, {1: 1.0})):
        splits = {"val": [dataclasses.replace(manifests[0].splits["val"][0], tokens=tokens)]}
        first = dataclasses.replace(manifests[0], splits=manifests[0].splits | splits)
        assert source_weights(config, [first, *manifests[1:]]) == weights


def test_folders_that_do_not_go_together(sources, tmp_path):
    """A shard in two training splits, in a training split and a validation split, and another
    tokenizer. A validation split may be that of two folders."""
    validation = read_manifest(Path(sources[0])).splits["val"]
    cases = [
        (0, {}),
        (0, {"splits": {"train": [*map(dataclasses.asdict, validation)]}}),
        (1, {"tokenizer_sha256": ""}),
    ]
    for number, (source, changes) in enumerate(cases):
        again = Path(shutil.copytree(sources[source], tmp_path / str(number)))
        edit_manifest(again, **changes)
        config = config_of(
            [sources[0], str(again)], tmp_path, {"data.weights": [1, 1], "data.phases": []}
        )
        expect_field("data.path", str(again), open_corpus, config)
    edit_manifest(tmp_path / "0", splits={"val": [*map(dataclasses.asdict, validation)]})
    folders = sources[0], f"{tmp_path}/0"
    check_distinct(folders, [read_manifest(Path(path)) for path in folders])


def test_the_loss_of_a_mixture_is_that_of_tokens_in_its_shares():
    one = Evaluation(30.0, 10, 40)
    other = Evaluation(200.0, 100, 200)
    idle = Evaluation(9.0, 1, 1)
    whole = mixed([(0.25, one), (0.75, other), (0.0, idle)])
    assert_close(whole.loss, 0.25 * 3 + 0.75 * 2)
    assert_close(whole.bits_per_byte, (0.25 * 3 + 0.75 * 2) / math.log(2) / (0.25 * 4 + 0.75 * 2))
    assert whole.tokens == 110
    assert mixed([(1.0, one), (0.0, idle)]) == one


# Runs


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    """A run of 10 steps of 240 windows, with other weights from window 1,000 on."""
    place = tmp_path_factory.mktemp("runs")
    complete(config_of(sources, place))
    return place / "run"


def test_rows_say_what_each_source_had(whole, sources):
    config = config_of(sources, whole.parent)
    sizes = [*map(len, windows_of(sources))]
    order = MixedOrder(config.seed, sizes, phases_of(config, sizes), config.data.names)
    assert phases_of(config, sizes)[1].begins == 1000
    for row in rows(whole)[1:]:
        taken = np.bincount(
            (order.items_at(np.arange(row["step"] * 240)) >> np.uint64(48)).astype(int), minlength=3
        )
        assert [row[f"tokens/{name}"] for name in ("web", "code", "poems")] == (taken * 8).tolist()
        assert sum(taken) * 8 == row["tokens"]
        assert row["epoch/poems"] == round(taken[2] / sizes[2], 4)
    validated = [row for row in rows(whole) if "val_loss" in row]
    assert [row["step"] for row in validated] == [0, 5, 10]
    # the weights of web and code, in relation to each other; poems has no such split
    for row in validated:
        assert_close(
            row["val_loss"], (0.6 * row["val_loss/web"] + 0.3 * row["val_loss/code"]) / 0.9
        )
        assert "val_loss/poems" not in row
        assert row["val_tokens"] == 400


def test_a_mixture_of_shifted_windows(sources, tmp_path, capsys):
    """Stopped and resumed; its smallest source has several epochs. Without weights, those of
    validation are those of the windows, too."""
    changes = {"data.shift_windows": True, "data.weights": [1, 1, 1]}
    halves = [config_of(sources, tmp_path, changes | {"train.steps": steps}) for steps in (5, 10)]
    assert run_ranks(in_turn, 1, *[(train, config) for config in halves]) == [["completed"] * 2]
    run = tmp_path / "run"
    assert verified(run, capsys)[:2] == (0, [])
    config = halves[1]
    sizes = [*map(len, windows_of(sources, 8))]
    assert sizes != [*map(len, windows_of(sources))]
    order = MixedOrder(config.seed, sizes, phases_of(config, sizes), config.data.names, 8)
    digest = FIRST_DIGEST
    for row in rows(run)[1:]:
        step = row["step"]
        digest = next_digest(digest, order.items_at(np.arange(240 * step - 240, 240 * step)))
        assert row["order_digest"] == digest
    assert rows(run)[-1]["epoch/poems"] > 2
    unweighted = config_of(sources, tmp_path, {"data.weights": [], "data.phases": []})
    shifted = unweighted.model_copy(
        update={"data": unweighted.data.model_copy(update={"shift_windows": True})}
    )
    manifests = [read_manifest(Path(path)) for path in sources]
    web, code = sizes[:2]
    assert source_weights(shifted, manifests) == {0: web / (web + code), 1: code / (web + code)}


def test_the_shards_of_each_folder_are_hashed(whole, capsys):
    code, defects, others = verified(whole, capsys)
    assert (code, defects) == (0, [])
    assert any("shards unchanged in" in line and line.endswith("poems") for line in others)


def test_folders_that_have_moved(whole, sources, tmp_path, capsys):
    moved = [
        str(shutil.copytree(path, tmp_path / f"m{number}")) for number, path in enumerate(sources)
    ]
    assert verified(whole, capsys, data=moved)[:2] == (0, [])
    expect_field("data", moved[0], verified, whole, capsys, data=moved[:1])
    scores = []
    _ = capsys.readouterr()
    for folders in ((), moved, moved[1:]):
        evaluation = EvaluateConfig(checkpoint=str(whole), device="cpu", data=tuple(folders))
        assert evaluate_checkpoint(evaluation) == 0
        scores.append([line.partition("loss ")[2] for line in capsys.readouterr().out.splitlines()])
    own, as_many, fewer = scores
    assert as_many == own, "they have the run's weights"
    assert fewer == own[2:], "they have no mean"


BEFORE = Mixture(manifests=["a", "b"], phases=[(0, ["7/10", "3/10"]), (2000, ["1/2", "1/2"])])


class Continued(NamedTuple):
    """A run over two folders, and what its continuation is given."""

    position: int
    flags: str  # from the folders on
    error: str = ""  # none: the run goes on
    passed: int = 0  # end of what a rollback has passed over
    single: str = ""  # the run's data, if they are of one folder


GOES_ON = [
    Continued(position=900, flags="x y --data.weights 7 3 --data.phases 16000:1:1"),
    Continued(position=900, flags="x y --data.weights 0.7 0.3 --data.phases 8000:1:2"),
    Continued(position=2000, flags="x y --data.weights 7 3 --data.phases 8001:1:9"),
    Continued(
        position=2001,
        flags="x y --data.weights 7 3 --data.phases 16000:1:9",
        error="data.weights = 7/10 3/10 from token ... 24000 tokens",
    ),
    Continued(
        position=900,
        passed=2100,
        flags="x y --data.weights 7 3",
        error="data.weights = 7/10 3/10 from token 0 on: the run had ... 1/2 1/2 from",
    ),
    Continued(
        position=900,
        flags="x y --data.weights 6 3",
        error="data.weights = 2/3 1/3 from token 0 on: the run had 7/10 3/10 from",
    ),
    Continued(position=900, flags="x y", error="data.weights = 2/3 1/3"),
    Continued(position=900, flags="x y z --data.weights 7 3 0 --data.phases 8000:0:0:1"),
    Continued(
        position=1900,
        flags="x y z --data.weights 7 3 0 --data.phases 8000:0:0:1",
        error="data.weights =",
    ),
    Continued(
        position=900, flags="x y z --data.weights 7 3 1", error="data.weights = 7/11 3/11 1/11"
    ),
    Continued(position=900, flags="x", error="data.path = x: the run was started with 2 folders"),
    Continued(position=900, single="a", flags="x y --data.weights 1 0 --data.phases 8000:1:1"),
    Continued(
        position=9, single="a", flags="x y --data.weights 1 1", error="data.weights = 1/2 1/2"
    ),
    Continued(
        position=9,
        single="b",
        flags="x y --data.weights 1 0",
        error="data.path = x: its tokens differ",
    ),
    Continued(position=0, flags="x y --data.weights 1 0", error="data.weights"),
]


@pytest.mark.parametrize("case", GOES_ON, ids=lambda case: f"{case.position} {case.flags}")
def test_what_a_run_goes_on_with(case):
    """Other weights begin at the first block of 1,000 windows after so many tokens, behind what the
    run has been at, also before it went back; sources come at the end. 0.7 is seven tenths, not the
    binary number next to it."""
    flags = f"--train.steps 1 --model.block_size 8 --data.path {case.flags}"
    config = load(TrainingConfig, flags.split())
    count = len(config.data.paths)
    phases = phases_of(config, [100, 50, 20][:count])
    weights = [(one.begins, [str(w) for w in one.weights]) for one in phases]
    now = Mixture(manifests=["a", "b", "c"][:count], phases=weights)
    skipped = [(case.position, case.passed)] if case.passed else []
    saved = gpt_state(feed=FeedState(position=case.position, skipped_ranges=skipped))
    data = {"data_manifest": "a", "mixture": BEFORE}
    if case.single:
        data = {"data_manifest": case.single, "mixture": None}
    saved.task = saved.task.model_copy(update=data)
    pattern = "^" + re.escape(case.error).replace(r"\ \.\.\.\ ", ".* ")
    with pytest.raises(UserError, match=pattern) if case.error else nullcontext():
        check_resumed_data(config, saved, now)


def test_a_run_over_one_folder_goes_on_with_several(sources, tmp_path, capsys):
    """Its first windows are what they were; verify_run finds all of it intact, and other past
    weights are refused."""
    annealed = {"data.weights": [1, 0, 0], "data.phases": ["7000:0:0.5:0.5"]}
    configs = [
        config_of(sources[:1], tmp_path, {"data.weights": [], "data.phases": [], "train.steps": 4}),
        config_of(sources, tmp_path, {"data.weights": [1, 1, 0]}),
        config_of(sources, tmp_path, annealed),
    ]
    ((first, refused, outcome),) = run_ranks(in_turn, 1, *[(train, config) for config in configs])
    assert (first, outcome) == ("completed", "completed")
    assert refused.startswith(
        "data.weights = 1/2 1/2 0 from token 0 on: the run had 1 0 0 from token 0"
    )
    run = tmp_path / "run"
    assert verified(run, capsys)[:2] == (0, [])
    last = rows(run)[-1]
    assert last["tokens/web"] == 8000
    assert last["tokens/code"] + last["tokens/poems"] == 1400 * 8
    assert last["val_loss"] == last["val_loss/web"] != last["val_loss/code"]


def test_a_range_that_is_passed_over_counts_as_far_as_the_data_stand():
    order = mixture()
    row = order.by_source(
        FeedState(position=1500, skipped_ranges=[(1200, 1900), (4000, 4100)]), "tokens", 8
    )
    assert [row[f"tokens/s{i}"] for i in range(3)] == (order.uses(1200) * 8).tolist()
    assert row["epoch/s2"] == round(order.uses(1500)[2] / 50, 4)


def test_the_phase_of_a_position_is_that_of_the_window_before_it():
    phases = [Phase(0, normalized([1, 0])), Phase(1000, normalized([0, 1]))]
    order = MixedOrder(0, [50, 50], phases, ["a", "b"])
    assert [order.phase_at(position) for position in (0, 1000, 1001)] == [0, 0, 1]
    assert Permutation(0, 50).phase_at(99) == 0
