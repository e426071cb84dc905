"""Which runs a ladder trains: they fill the time, and read the text not too often."""

import pytest
from close import distance
from commands import expect_error

from gpt2_ddp.config.own_text import MOST_PASSES, Text, batch_tokens
from gpt2_ddp.sweep.design import (
    CANDIDATES,
    EVALUATIONS,
    FEWEST_STEPS,
    SIZES,
    Cost,
    Request,
    design,
    seconds_of,
)

BOOK = Text(1_200_000, 2048)
CORES = Cost(1.2e11, 60_000)
REQUEST = Request(minutes=30, at_once=1, shapes=(), lengths=(), repeats=3, context=None, seed=1337)


def sizes_of(cells):
    return sorted({(cell.parameters, cell.layers, cell.width) for cell in cells})


@pytest.mark.parametrize(
    ("minutes", "speed"), [(22, 1.2e11), (30, 1.2e11), (60, 1.2e11), (30, 6e11), (20, 5e13)]
)
def test_the_runs_fill_the_time(minutes, speed):
    cost = CORES._replace(speed=speed)
    text = BOOK._replace(tokens=10**9)
    cells = design(REQUEST._replace(minutes=minutes), text, cost)
    assert distance(seconds_of(cells, cost), 60 * minutes) < 0.05
    sizes = sizes_of(cells)
    assert len(sizes) == SIZES
    shapes = [(layers, width) for _, layers, width in sizes]
    first = CANDIDATES.index(shapes[0])
    assert tuple(shapes) == CANDIDATES[first : first + SIZES]
    lengths = [
        len({cell.tokens for cell in cells if cell.parameters == parameters})
        for parameters, *_ in sizes
    ]
    assert lengths == [4, 4, 3, 2]
    assert len({cell.name for cell in cells}) == len(cells) == 15
    for cell in cells:
        assert cell.steps >= FEWEST_STEPS - EVALUATIONS
        assert cell.steps % EVALUATIONS == 0
        context = 512 if cell.width > 320 else 256
        near = {batch_tokens(factor * cell.tokens, context) for factor in (0.9, 1, 1.1)}
        assert cell.batch in near, "the rule would choose another"
    work = [cell.parameters * cell.tokens for cell in cells]
    assert work == sorted(work), "cheap runs first"
    seeds = sorted(cell.seed for cell in cells)
    assert seeds == [1337] * 13 + [1338, 1339]


def test_more_time_has_larger_sizes():
    text = BOOK._replace(tokens=10**9)
    largest = [
        sizes_of(design(REQUEST._replace(minutes=minutes), text, CORES))[-1]
        for minutes in (22, 30, 300, 3000)
    ]
    assert largest == sorted(largest)
    assert largest[0] < largest[-1]


def test_a_short_time_and_little_text_have_fewer_sizes():
    """As many as fit, two at least."""
    minutes = (7, 12, 22)
    counts = [len(sizes_of(design(REQUEST._replace(minutes=n), BOOK, CORES))) for n in minutes]
    assert counts == [2, 3, 4]
    little = BOOK._replace(tokens=60_000)
    assert len(sizes_of(design(REQUEST, little, CORES))) == 2


def test_several_at_once_have_as_much_more_time():
    text = BOOK._replace(tokens=10**9)
    cells = design(REQUEST._replace(minutes=10, at_once=3), text, CORES)
    assert cells == design(REQUEST, text, CORES)


def test_no_run_reads_the_text_too_often():
    text = BOOK._replace(tokens=150_000)
    cells = design(REQUEST._replace(minutes=300), text, CORES)
    longest = max(cell.tokens for cell in cells)
    assert longest <= MOST_PASSES * text.tokens + cells[0].batch * EVALUATIONS
    assert longest > 0.9 * MOST_PASSES * text.tokens


def test_given_sizes_and_lengths():
    request = REQUEST._replace(shapes=("3x64", "1x32", "3x64"), lengths=(2e5, 1e5), repeats=2)
    cells = design(request, BOOK, CORES)
    runs = {(cell.layers, cell.width, cell.steps, cell.seed) for cell in cells}
    assert runs == {
        *(
            (layers, width, steps, 1337)
            for layers, width in ((1, 32), (3, 64))
            for steps in (24, 48)
        ),
        (3, 64, 24, 1338),
    }
    by_time = design(REQUEST._replace(shapes=("1x32", "3x64"), minutes=9), BOOK, CORES)
    assert [shape for _, *shape in sizes_of(by_time)] == [[1, 32], [3, 64]]
    assert len(by_time) == 3 + 2 + 2


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        ({}, 30_000, r"data\.path = 30,000 tokens: are too little text for 2 sizes"),
        (
            {"lengths": (1e5, 9e5)},
            20_000,
            r"lengths = 900,000: is too long for 20,000 training tokens, .* 800,000 tokens is the",
        ),
        ({"lengths": (5e5, 5.01e5, 2e6)}, 10**6, r"lengths = 500,000 501,000 2,000,000: two of"),
        ({"lengths": (1e6, 1.001e6)}, 10**6, "nearly the same, 999,424 tokens in whole steps"),
        ({"context": 500_000}, 10**6, r"model\.block_size = 500000: is too long for runs of so"),
        (
            {"minutes": 2},
            10**6,
            r"minutes = 2: is too short for 7 runs of 2 sizes; give \d minutes at this machine's",
        ),
    ],
)
def test_too_little_of_anything_is_one_line(changes, tokens, message):
    request = REQUEST._replace(**changes)
    expect_error(message, design, request, BOOK._replace(tokens=tokens), CORES)
