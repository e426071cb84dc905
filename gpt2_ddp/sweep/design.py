"""Which runs a ladder trains: sizes, lengths and seeds, so that they fill a time.

         lengths, each twice the one before ─▶
sizes  2x128   1   2   4   8
  │    3x160   1   2   4   8      small models are trained longer, as they are cheap; the shortest
  ▼    4x192   1   2   4          run of the second size, once more for each further seed
       5x256   1   2
"""

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from gpt2_ddp.config.own_text import (
    CONTEXTS,
    GROWTH,
    MOST_PASSES,
    PARAMETERS,
    SHAPES,
    SMALLEST_BATCH,
    WIDE,
    WORK,
    Text,
    active_parameters,
    batch_tokens,
)
from gpt2_ddp.errors import UserError

CANDIDATES = ((1, 64), (2, 96), *SHAPES)
"""Sizes of a ladder, if none are given: some in a row."""
SIZES = 4
FEWEST_SIZES = 2
"""So many of them, and so many at least."""
LENGTHS = 4
"""Most lengths of a size. The largest has two, the one before three."""
FEWEST_STEPS = 120
"""Steps of the shortest run: what a model learns first follows another law (a judgement)."""
EVALUATIONS = 4
"""Evaluations of a run after the first, at equal distances."""
MOST_VALIDATION = 2**15
"""Most validation tokens of an evaluation."""
START_SECONDS = 12.0
"""Seconds of a run besides training and evaluations, on two cores: to start, to draw its report."""
SMALL = 3e5
"""Parameters whose arithmetic takes as long as what a token costs in models of any size. On one
core: 1e5 on a busy machine, 4e5 on a free one."""


class Cell(NamedTuple):
    """A run of a ladder."""

    layers: int
    width: int
    parameters: int
    steps: int
    batch: int
    seed: int

    @property
    def tokens(self) -> int:
        """All that it trains on."""
        return self.steps * self.batch

    @property
    def name(self) -> str:
        """For the run's folder: size, tokens in three digits, seed."""
        size = f"{self.layers}x{self.width}"
        return f"{size}-{self.tokens / 1e6:.3g}M-seed_{self.seed}"


class Cost(NamedTuple):
    """What a run takes: FLOP/s of training, and the tokens of an evaluation."""

    speed: float
    val_tokens: int

    def seconds(self, parameters: float, tokens: float) -> float:
        """Seconds of a run (estimate)."""
        evaluated = (EVALUATIONS + 1) * self.val_tokens / 3  # forward alone
        return 6 * (parameters + SMALL) * (tokens + evaluated) / self.speed + START_SECONDS


Size = tuple[int, int]
"""Layers and width."""


def parse_shape(text: str) -> Size:
    """The size in `LAYERSxWIDTH`."""
    layers, _, width = text.partition("x")
    return int(layers), int(width)


class Request(NamedTuple):
    """What the user asks for.

    Attributes:
        minutes: of all runs, on machines that train `at_once` of them.
        shapes: sizes, two or more; none: some that suit the time.
        lengths: tokens of each size's runs; none: those that fill the time.
        repeats: seeds of one run.
        context: tokens of a window, if it is given.
        seed: of the first run; others have the next ones.
    """

    minutes: float
    at_once: int
    shapes: tuple[str, ...]
    lengths: tuple[float, ...]
    repeats: int
    context: int | None
    seed: int


def design(request: Request, text: Text, cost: Cost) -> list[Cell]:
    """The runs of a ladder, cheap ones first. Raises: UserError for too little time or text, and
    for lengths that are too near to each other."""
    sizes = sorted(map(parse_shape, dict.fromkeys(request.shapes)), key=partial(_parameters, text))
    if request.lengths:
        sizes = sizes or [*CANDIDATES[:SIZES]]
        grid = [(size, tokens) for size in sizes for tokens in sorted({*request.lengths})]
        repeated = grid[len(grid) // len(sizes)]
        _check_passes(max(request.lengths), text)
    else:
        grid, repeated = _fill(request, text, cost, sizes)
    runs = [(*pair, request.seed) for pair in grid]
    runs += [(*repeated, request.seed + number) for number in range(1, request.repeats)]
    cells = [_cell(request, text, *run) for run in runs]
    _check_names(request, cells)
    return sorted(cells, key=lambda cell: (cell.parameters * cell.tokens, cell.seed))


def _check_passes(longest: float, text: Text) -> None:
    """Raises: UserError for a given length that reads the text too often."""
    most = MOST_PASSES * text.tokens
    if longest > 1.001 * most:
        hint = f"is too long for {text.tokens:,} training tokens, as no run reads a text more than"
        hint += f" {MOST_PASSES:g} times; {most:,.0f} tokens is the longest"
        raise UserError("lengths", f"{longest:,.0f}", hint)


def _check_names(request: Request, cells: Sequence[Cell]) -> None:
    """Raises: UserError for two runs of one name: their lengths are the same, or nearly."""
    names: set[str] = set()
    for cell in cells:
        if cell.name not in names:
            names.add(cell.name)
        elif request.lengths:
            given = " ".join(f"{length:,.0f}" for length in sorted({*request.lengths}))
            hint = f"two of them are nearly the same, {cell.tokens:,} tokens in whole steps"
            raise UserError("lengths", given, f"{hint}; choose lengths that are further apart")
        else:
            hint = "is too long for runs of so few tokens; make it shorter, or give more --minutes"
            raise UserError("model.block_size", request.context, hint)


def seconds_of(cells: Sequence[Cell], cost: Cost) -> float:
    """Seconds of all runs, one after another (estimate)."""
    return sum(cost.seconds(cell.parameters, cell.tokens) for cell in cells)


def _parameters(text: Text, size: Size) -> int:
    names = {"model.n_layer": size[0], "model.n_embd": size[1]}
    return active_parameters(names, text.vocab_size)


def _fill(
    request: Request, text: Text, cost: Cost, given: Sequence[Size]
) -> tuple[list[tuple[Size, float]], tuple[Size, float]]:
    """Sizes and lengths that fill the time, and the pair that is repeated. Without given sizes,
    those in a row whose mean is nearest to what the rule chooses for a typical run: `SIZES` of
    them, or fewer in a short time."""
    fewest = FEWEST_STEPS * SMALLEST_BATCH
    rows = [given]
    fitting: list[tuple[float, Sequence[Size]]] = []
    counts = [len(given)] if given else range(SIZES, FEWEST_SIZES - 1, -1)
    for count in counts:
        # the shortest ladder, too, reads the text at most so often
        needed = fewest * 2 ** (_count(0, count) - 1) / MOST_PASSES
        if text.tokens < needed:
            if count == counts[-1]:
                raise _too_little(text, count, needed)
            continue
        rows = [given] if given else _rows(count)
        units = [_unit(request, text, cost, sizes) for sizes in rows]
        fitting = [(unit, sizes) for unit, sizes in zip(units, rows, strict=True) if unit >= fewest]
        if fitting:
            break
    if not fitting:
        seconds = _seconds(request, text, cost, rows[0], fewest) / request.at_once
        runs = len(_grid(rows[0], 1)) + request.repeats - 1
        hint = f"is too short for {runs} runs of {len(rows[0])} sizes"
        needed = f"{math.ceil(seconds / 60):,} minutes at this machine's present speed"
        others = ", or choose fewer and smaller --shapes" if given else ""
        raise UserError("minutes", f"{request.minutes:g}", f"{hint}; give {needed}{others}")
    work = 60 * request.minutes * request.at_once * cost.speed / len(_grid(rows[0], 1))
    wanted = math.log(PARAMETERS * (work / WORK) ** GROWTH)

    def distance(unit_and_sizes: tuple[float, Sequence[Size]]) -> float:
        _, sizes = unit_and_sizes
        return abs(fmean(math.log(_parameters(text, size)) for size in sizes) - wanted)

    unit, sizes = min(fitting, key=distance)
    longest = 2 ** (_count(0, len(sizes)) - 1)
    unit = min(unit, MOST_PASSES * text.tokens / longest)
    return _grid(sizes, unit), (sizes[1], unit)


def _rows(count: int) -> list[Sequence[Size]]:
    """All choices of so many candidates in a row."""
    return [CANDIDATES[first : first + count] for first in range(len(CANDIDATES) - count + 1)]


def _too_little(text: Text, sizes: int, needed: float) -> UserError:
    hint = f"are too little text for {sizes} sizes; {math.ceil(needed):,} training tokens suffice"
    reason = f"as no run reads a text more than {MOST_PASSES:g} times"
    return UserError("data.path", f"{text.tokens:,} tokens", f"{hint}, {reason}")


def _count(number: int, sizes: int) -> int:
    """Lengths of the size of this number."""
    return min(LENGTHS, sizes - number + 1)


def _grid(sizes: Sequence[Size], unit: float) -> list[tuple[Size, float]]:
    """Sizes and lengths; the shortest have `unit` tokens."""
    return [
        (size, unit * 2**power)
        for number, size in enumerate(sizes)
        for power in range(_count(number, len(sizes)))
    ]


def _seconds(request: Request, text: Text, cost: Cost, sizes: Sequence[Size], unit: float) -> float:
    """Seconds of all runs, whose shortest have `unit` tokens."""
    pairs = [*_grid(sizes, unit), *[(sizes[1], unit)] * (request.repeats - 1)]
    return sum(cost.seconds(_parameters(text, size), tokens) for size, tokens in pairs)


def _unit(request: Request, text: Text, cost: Cost, sizes: Sequence[Size]) -> float:
    """Tokens of the shortest runs that fill the time; negative if it is too short. The time is
    linear in them."""
    base = _seconds(request, text, cost, sizes, 0)
    each = _seconds(request, text, cost, sizes, 1) - base
    return (60 * request.minutes * request.at_once - base) / each


def _cell(request: Request, text: Text, size: Size, tokens: float, seed: int) -> Cell:
    """The run of about so many tokens, with the batch that the rule chooses for them."""
    context = request.context or CONTEXTS[size[1] > WIDE]
    batch = batch_tokens(tokens, context)
    steps = max(round(tokens / batch / EVALUATIONS), 1) * EVALUATIONS
    return Cell(*size, _parameters(text, size), steps, batch, seed)
