"""where.py: the steps of a run that trained on a text, and the texts that a step trained on.

    text ── TextSearch ──▶ occurrences in the streams of tokens
                              │ Windows.items_with
                              ▼
    steps ◀── History ──── positions in the order ◀── Order.uses_of ── items

The second line is the data's way in a training, backwards. No index is made: the shards are read
once, and the order is inverted.
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_ddp.checkpoint.format import list_checkpoints
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, verify
from gpt2_ddp.config.base import check_url
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.tools import WhereConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.corpus import Corpus, open_corpus
from gpt2_ddp.data.feed import interleaved
from gpt2_ddp.data.fetch import copy_missing
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.mixture import SOURCE_BITS, MixedOrder, recorded_mixture
from gpt2_ddp.data.order import Order, Permutation, Uses
from gpt2_ddp.data.search import Occurrences, TextSearch
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer, replace_surrogates
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import no_such_folder, regular, url_of_copy
from gpt2_ddp.output import text_table
from gpt2_ddp.preparation.progress import progress
from gpt2_ddp.records.rows import METRICS, Row, is_event, is_rollback
from gpt2_ddp.reports.positions import CHECK, History
from gpt2_ddp.reports.verify import Log, task_class
from gpt2_ddp.tasks.pretraining import Pretraining

INVERTED = (Permutation.items_at, MixedOrder.items_at)
"""What an order is inverted by its `uses_of` for."""
LONGEST = 2**20
"""Most bytes of a text."""
MOST = 1_000_000
"""Most occurrences that are listed."""
AT_ONCE = 2**21
"""Windows, of all shifts, whose positions are computed at once."""
SHOWN = 20
"""Steps, and lines of a table, that people see; JSON has all."""
QUOTED = 3
"""Occurrences that are quoted with the text around them."""
AROUND = 12
"""Tokens before and after a quoted occurrence."""
NEAR = 10
"""Rows before a step that a spike is compared with."""
FEWEST = 5
"""Fewest rows before a spike."""
SPIKE = 6.0
"""A spike is so many times the usual spread above the rows before it."""
SIGMA = 1.4826
"""The standard deviation of normal numbers, as a multiple of their median deviation."""
LEAST_SPREAD = 0.005
"""The smallest spread, as a share of the value: a curve without noise has no spikes of its last
digits."""


class Place(NamedTuple):
    """An occurrence of the text.

    Attributes:
        first, last: positions of its tokens in the split.
        seen: whether a step that counts has trained on it, or on a part of it.
        why: of training text that was not seen, the reason; else empty.
    """

    folder: str
    split: str
    first: int
    last: int
    seen: bool
    why: str = ""


class Use(NamedTuple):
    """A window with the text, or with a part of it, in a step.

    Attributes:
        epoch: pass over the folder, from 1 on.
        rank, micro_batch, row: its place in the step; None if no row has the number of ranks.
        window, first: number of the window in its folder, and position of its first token.
        times: how often the window has the whole text; 0: only a part of it.
        undone_at: the step that a rollback went back to; None for a step that counts.
        rest_left_out: whether no window of this pass has the rest of the text.
    """

    step: int
    epoch: int
    rank: int | None
    micro_batch: int | None
    row: int | None
    folder: str
    window: int
    first: int
    position: int
    times: int
    undone_at: int | None = None
    rest_left_out: bool = False


class Answer(NamedTuple):
    """When a run has seen a text.

    Attributes:
        reached: the last step of the run.
        places: where the text is in the data.
        uses: windows of the steps that count, by rising step.
        undone: windows of steps that a rollback has undone. Their positions are skipped since.
        quotes: the first places, with the text around.
        left_out: by folder, the complete passes that have left the text out, though others have it:
            only with `data.shift_windows`.
    """

    reached: int
    places: list[Place]
    uses: list[Use]
    undone: list[Use]
    quotes: list[str]
    left_out: dict[str, list[int]]

    @property
    def steps(self) -> list[int]:
        """The steps whose windows have the whole text."""
        return sorted({use.step for use in self.uses if use.times})

    @property
    def part_steps(self) -> list[int]:
        """The other steps whose windows have a part of it: the border of two windows cuts it."""
        return sorted({use.step for use in self.uses} - set(self.steps))

    @property
    def exposures(self) -> int:
        """How often the steps trained on the whole text."""
        return sum(use.times for use in self.uses)

    @property
    def part_exposures(self) -> int:
        """How many other windows with a part of it the steps trained on."""
        return sum(not use.times for use in self.uses)

    @property
    def text(self) -> str:
        """The answer in a line."""
        folders = {place.folder for place in self.places if place.split == "val"}
        of = f"in the validation split of {', '.join(sorted(folders))}"
        if self.steps:
            parts = [_steps(self.steps)]
        elif self.uses:
            parts = [f"{_steps(self.part_steps)}: only parts, in the windows that the text crosses"]
        elif self.undone:
            undone = _steps(sorted({use.step for use in self.undone}))
            parts = [f"in the data, but never trained on: a rollback has undone {undone}"]
        elif whys := [*dict.fromkeys(place.why for place in self.places if place.why)]:
            parts = [f"in the data, {'; '.join(whys)}"]
        elif folders:
            return f"{of}, which is never trained on"
        else:
            return "not in this data"
        return "; ".join([*parts, f"also {of}"] if folders else parts)

    def as_json(self) -> Row:
        """The answer in plain values."""
        return {
            "answer": self.text,
            "steps": self.steps,
            "part_steps": self.part_steps,
            "exposures": self.exposures,
            "part_exposures": self.part_exposures,
            "reached": self.reached,
            "places": [place._asdict() for place in self.places],
            "uses": [use._asdict() for use in self.uses],
            "undone": [use._asdict() for use in self.undone],
            "left_out": self.left_out,
        }


class WindowText(NamedTuple):
    """A window of a step, with the text of its T + 1 tokens."""

    step: int
    rank: int
    micro_batch: int
    row: int
    folder: str
    window: int
    position: int
    first: int
    text: str


class PastStep(NamedTuple):
    """A step as it was taken: the history up to it, and the step that a rollback went back to; None
    for a step that counts."""

    step: int
    history: History
    undone_at: int | None = None


class Spike(NamedTuple):
    """A step with a row, and how far its value is above the rows before it.

    Attributes:
        value: None if it is not finite.
        times: the value divided by the median of the rows before it; None for no finite value, and
            for fewer than `FEWEST` such rows.
        spreads: its distance from that median, in usual spreads; None likewise.
    """

    past: PastStep
    value: float | None
    times: float | None
    spreads: float | None

    @property
    def stands_out(self) -> bool:
        return self.value is None or (self.spreads is not None and self.spreads > SPIKE)


class RecordedRun(NamedTuple):
    """A run's rows, data and order.

    Attributes:
        history: all steps that count.
        undone: the histories before each rollback, and the step that it went back to.
    """

    log: Log
    config: TrainingConfig
    corpus: Corpus
    order: Order
    history: History
    undone: list[tuple[History, int]]

    @property
    def names(self) -> tuple[str, ...]:
        """The folders, or the URLs of which they are copies."""
        return tuple(map(url_of_copy, self.config.data.paths))


def answer_question(command: WhereConfig) -> int:
    """The command: prints the answer. Raises: UserError."""
    text = question(command)
    run = open_run(Path(command.run), command.data, command.trust_run_code)
    if text is not None:
        answer = find(run, text)
        print(json.dumps(answer.as_json()) if command.json else describe(answer))
        if not answer.places and command.file is None and "\\n" in text:
            hint = "bash writes a line break as $'one\\ntwo'; or name a file with --file"
            print(
                f"note: the text has a backslash and an n, no line break: {hint}", file=sys.stderr
            )
    elif command.step:
        _show_steps(run, command, [PastStep(command.step, run.history)], [])
    elif command.spike:
        rows = spikes(run, command.spike)
        found = [row for row in rows if row.stands_out][: command.spikes]
        if not found and not command.json:
            print(_no_spike(run, rows, command.spike))
        else:
            _show_steps(run, command, [spike.past for spike in found], found)
    return 0


def _show_steps(
    run: RecordedRun, command: WhereConfig, steps: list[PastStep], found: list[Spike]
) -> None:
    """Prints the texts of steps, which may be the spikes that were `found`."""
    content: list[Row] = []
    for number, past in enumerate(steps):
        windows = texts_of(run, past, command.rank)
        if command.json:
            of_step: Row = {"step": past.step, "undone_at": past.undone_at}
            if found:
                spike = found[number]
                of_step |= {"value": spike.value, "times": spike.times, "spreads": spike.spreads}
            content.append(of_step | {"windows": [window._asdict() for window in windows]})
            continue
        if found:
            print(_spike_line(found[number], str(command.spike)))
        for window in windows:
            print(f"{_window_line(window)}\n{window.text}\n")
    if command.json:
        print(json.dumps({"steps": content}))


def question(command: WhereConfig) -> str | None:
    """The text to find, if one is asked for. Raises: UserError for an unusable file."""
    if command.file is None:
        return command.text
    try:
        with open(regular(Path(command.file)), "rb") as file:
            data = file.read(LONGEST + 1)
        if len(data) > LONGEST:
            hint = f"is larger than {LONGEST:,} bytes; give a part of the document"
            raise UserError("file", command.file, hint)
        text = data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        hint = f"cannot be read ({error.strerror})"
        raise UserError("file", command.file, hint) from error
    except UnicodeDecodeError as error:
        raise UserError("file", command.file, "is no text in UTF-8") from error
    if not text:
        raise UserError("file", command.file, "is empty; give some words of the document")
    return text


def open_run(run: Path, data: Sequence[str], trust_code: bool) -> RecordedRun:
    """Reads a run's rows, and opens its data. Raises: UserError if the run is no GPT's, its rows
    are damaged, or the data are not those of the run."""
    name = url_of_copy(run)
    if not os.path.isfile(run / METRICS):
        hint = no_such_folder(run) or f"has no {METRICS}; name a run folder of train_gpt2.py"
        raise UserError("run", name, hint)
    log = Log(run / METRICS, ())
    if log.defects:
        raise UserError("rows", name, f"{log.defects[0]}; {CHECK}")
    starts = log.named("start")
    kind = str(starts[-1].get("kind"))
    config = read_config(kind, log.config_row["config"], METRICS)
    if not isinstance(config, TrainingConfig):
        hint = f"is a {kind} run, without a text; name a run of train_gpt2.py"
        raise UserError("run", name, hint)
    if data:
        folders = config.data.model_copy(update={"path": tuple(map(_checked, data))})
        config = config.model_copy(update={"data": folders})
    copy_missing(config)
    task = _task_class(run, starts, trust_code)
    recorded = recorded_mixture(starts[-1])
    hashes = [read_manifest(Path(folder), "data").hash for folder in config.data.paths]
    if not recorded or recorded.manifests != hashes:
        hint = "has other tokens than the run was trained on; name the run's data with --data"
        raise UserError("data", " ".join(config.data.paths), hint)
    corpus = open_corpus(config)
    order = task(config).make_order(corpus.sources)
    history = History(config.global_batch_windows)
    undone: list[tuple[History, int]] = []
    for row in log.events:
        before = history
        history = history.after(row)
        if is_rollback(row):
            undone.append((before._replace(step=row["from"]), row["step"]))
    newest = log.last or starts[-1]
    history = history._replace(step=newest["step"])
    return RecordedRun(log, config, corpus, order, history, undone)


def _checked(path: str) -> str:
    """A folder or URL of `--data`. Raises: UserError."""
    try:
        return check_url(path)
    except ValueError as error:
        raise UserError("data", path, str(error)) from error


def _task_class(run: Path, starts: list[Row], trust_code: bool) -> type[Pretraining]:
    """The class that made the run's order. Raises: UserError if it is not known."""
    newest = None
    has_code = any(row.get("code") for row in starts)
    for folder in reversed(list_checkpoints(run / "checkpoints") if has_code else []):
        try:
            newest = verify(folder)
            break
        except CorruptCheckpoint:
            continue
    task, problem = task_class(starts, newest, trust_code)
    if problem:
        hint = f"the order of its data is not known: {problem}"
        raise UserError("task", url_of_copy(run), hint)
    return task


def find(run: RecordedRun, text: str) -> Answer:
    """When a run has seen a text. Raises: UserError for a text that is too long or too frequent,
    or shards that cannot be read."""
    content = replace_surrogates(text).encode()
    if not 0 < len(content) <= LONGEST:
        hint = f"has {len(content):,} bytes; give 1 to {LONGEST:,}"
        raise UserError("text", truncate(text, 60), hint)
    tokenizer = run.corpus.tokenizer
    search = TextSearch(content, tokenizer.tokens, tokenizer.vocab_size)
    splits = _splits(run)
    found = _search(search, [stream for _, _, stream in splits], text)
    places: list[Place] = []
    quotes: list[str] = []
    uses: list[Use] = []
    undone: list[Use] = []
    left_out: dict[str, list[int]] = {}
    for number, (folder, split, stream) in enumerate(splits):
        occurrences = found[number]
        seen = np.zeros(len(occurrences.first), bool)
        whys = [""] * len(seen)
        if split == "train":
            seen, of_undone, passes = _add_uses(run, number, occurrences, uses, undone)
            if passes:
                left_out[folder] = passes
            whys = _whys(run, number, occurrences, seen, of_undone)
        columns = (occurrences.first.tolist(), occurrences.last.tolist(), seen.tolist(), whys)
        places += [Place(folder, split, *values) for values in zip(*columns, strict=True)]
        for place in places[len(quotes) : QUOTED]:
            quotes.append(_quote(stream, tokenizer, place))
    uses.sort(key=_place_of)
    undone.sort(key=_place_of)
    return Answer(run.history.step, places, uses, undone, quotes, left_out)


def _place_of(use: Use) -> tuple[int, int]:
    return use.step, use.position


def _splits(run: RecordedRun) -> list[tuple[str, str, TokenStream]]:
    """Folder, split and tokens: the training splits first."""
    sources = zip(run.names, run.corpus.sources, strict=True)
    training = [(folder, "train", source.stream) for folder, source in sources]
    folder_of = dict(zip(run.config.data.names, run.names, strict=True))
    validation = run.corpus.validation.items()
    return [*training, *((folder_of[name], "val", stream) for name, (_, stream) in validation)]


def _search(search: TextSearch, streams: Sequence[TokenStream], text: str) -> list[Occurrences]:
    """The occurrences in each of the streams, while stderr shows how much is read."""
    anchors = [search.anchor(stream) for stream in streams]
    blocks = [(n, block) for n, stream in enumerate(streams) for block in search.blocks(stream)]
    total = sum(map(len, streams))
    parts: list[list[Occurrences]] = [[] for _ in streams]
    n_found = 0
    for n, block in progress(blocks, "searching", "tokens", total, lambda item: len(item[1])):
        if not len(anchors[n].ids):
            continue
        occurrences = search.find(streams[n], anchors[n], block)
        n_found += len(occurrences.first)
        if n_found > MOST:
            hint = f"is in the data more than {MOST:,} times; give a longer part of the document"
            raise UserError("text", truncate(text, 60), hint)
        parts[n].append(occurrences)
    return [Occurrences.joined(of_stream) for of_stream in parts]


def _add_uses(
    run: RecordedRun, number: int, occurrences: Occurrences, uses: list[Use], undone: list[Use]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Adds the uses of the windows of folder `number` that have one of the occurrences.

    Returns:
        Which occurrences are in a step that counts, and which in one that a rollback has undone:
        bool [n] both. And the passes without any of them, from 1 on.
    """
    found = _positions(run, number, occurrences)
    skipped = run.history.is_skipped(found.positions)
    counts = _chosen(found, ~skipped & (found.positions < run.history.end))
    uses += _uses(run, number, occurrences, counts, run.history)
    of_undone = np.zeros(len(occurrences.first), bool)
    for history, step in run.undone:
        # what this rollback has undone, and no rollback before it
        begin = history.end_of(step)
        in_undone = (found.positions >= begin) & (found.positions < history.end)
        mine = _chosen(found, in_undone & ~history.is_skipped(found.positions))
        undone += _uses(run, number, occurrences, mine, history, step)
        of_undone |= _has_window(run, number, occurrences, mine)
    return _has_window(run, number, occurrences, counts), of_undone, _left_out(run, number, found)


def _left_out(run: RecordedRun, number: int, found: Uses) -> list[int]:
    """The complete passes over folder `number` that have no window of `found`, from 1 on. Without
    shifted windows, all passes have the same; of an order of one's own, passes are not known."""
    is_known = type(run.order).items_at in INVERTED and run.corpus.sources[number].shifts > 1
    if not len(found.positions) or not is_known:
        return []
    having = {int(epoch) + 1 for epoch in found.epochs}
    return [each for each in range(1, _passes(run, number) + 1) if each not in having]


def _has_window(run: RecordedRun, number: int, occurrences: Occurrences, uses: Uses) -> np.ndarray:
    """Which of the occurrences in folder `number` are in a window of these uses, or a part of
    them: bool [n]."""
    source = run.corpus.sources[number]
    begins, ends = _overlaps(occurrences, source.starts(_own_items(uses)), source.block_size)
    changes = np.zeros(len(occurrences.first) + 1, np.int64)
    np.add.at(changes, begins, 1)
    np.add.at(changes, ends, -1)
    return np.cumsum(changes)[:-1] > 0


def _overlaps(
    occurrences: Occurrences, starts: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first occurrence that overlaps each window, and the one after the last: int64 [n] both.
    Those that overlap a window are neighbours."""
    begins = np.searchsorted(occurrences.last, starts, side="left")
    return begins, np.searchsorted(occurrences.first, starts + size, side="right")


def _whys(
    run: RecordedRun,
    number: int,
    occurrences: Occurrences,
    seen: np.ndarray,
    of_undone: np.ndarray,
) -> list[str]:
    """Why no step that counts has trained on each of the occurrences; empty for one that was
    seen."""
    source = run.corpus.sources[number]
    end = len(source) * source.block_size + source.shifts  # of the windows of all shifts
    passes = _passes(run, number)
    later = f"not reached by step {run.history.step}"
    if passes:
        times = "the first pass" if passes == 1 else f"each of the {passes} passes"
        later = f"but {times} over {run.names[number]} left these tokens out"
        if source.shifts > 1:
            most = source.block_size - 1
            later += (
                f": with data.shift_windows, the windows of a pass begin 0 to {most} tokens later,"
                " so some of the first and last tokens are in none of them"
            )
    whys: list[str] = []
    columns = zip(occurrences.first.tolist(), seen.tolist(), of_undone.tolist(), strict=True)
    for first, is_seen, is_undone in columns:
        why = "" if is_seen else later
        if not is_seen and is_undone:
            why = "but a rollback has undone the step that trained on it"
        elif not is_seen and first >= end:
            rest = "the folder's last tokens, which fill no window, are left out"
            why = f"but in no window: {rest}"
        whys.append(why)
    return whys


def _passes(run: RecordedRun, number: int) -> int:
    """Complete passes over folder `number` up to the run's last step; 0 where a class of one's own
    mixes folders by an order that does not tell."""
    order = run.order
    end = run.history.end
    if isinstance(order, MixedOrder):
        return int(order.uses(end)[number]) // len(run.corpus.sources[number])
    return end // len(order) if len(run.names) == 1 else 0


def _positions(run: RecordedRun, number: int, occurrences: Occurrences) -> Uses:
    """Where the order has the windows with one of the occurrences, up to the run's last step."""
    source = run.corpus.sources[number]
    reached = max([run.history.end, *(history.end for history, _ in run.undone)])
    at_once = max(AT_ONCE // source.shifts, 1)
    parts: list[np.ndarray] = [np.empty(0, np.int64)]
    for begin in range(0, len(occurrences.first), at_once):
        part = slice(begin, begin + at_once)
        parts.append(source.items_with(occurrences.first[part], occurrences.last[part]))
    items = np.unique(np.concatenate(parts)).astype(np.uint64)
    order = run.order
    uses_of = order.uses_of
    if type(order).items_at not in INVERTED:  # of a class of one's own: all positions are read
        uses_of = partial(Order.uses_of, order)
    return uses_of(items | np.uint64(number << SOURCE_BITS), reached)


def _own_items(uses: Uses) -> np.ndarray:
    """The items, without the number of their source: int64 [n]."""
    return (uses.items & np.uint64(2**SOURCE_BITS - 1)).astype(np.int64)


def _chosen(uses: Uses, chosen: np.ndarray) -> Uses:
    return Uses(*(column[chosen] for column in uses))


def _uses(
    run: RecordedRun,
    number: int,
    occurrences: Occurrences,
    found: Uses,
    history: History,
    undone_at: int | None = None,
) -> Iterator[Use]:
    source = run.corpus.sources[number]
    folder = run.names[number]
    items = _own_items(found)
    starts = source.starts(items)
    # both ends of the occurrences ascend
    whole = np.searchsorted(occurrences.last, starts + source.block_size, side="right")
    whole = (whole - np.searchsorted(occurrences.first, starts, side="left")).clip(0)
    begins, ends = _overlaps(occurrences, starts, source.block_size)
    windows = items % len(source)
    is_first = (windows == 0) & (occurrences.first[begins] < starts)
    is_last = windows == len(source) - 1
    is_last &= occurrences.last[ends - 1] > starts + source.block_size
    rest_left_out = (whole == 0) & (is_first | is_last)
    steps, places = history.steps_of(found.positions)
    for n, (step, place) in enumerate(zip(steps.tolist(), places.tolist(), strict=True)):
        rank, micro_batch, row = _place_in_step(history, step, place)
        yield Use(
            step=step,
            epoch=int(found.epochs[n]) + 1,
            rank=rank,
            micro_batch=micro_batch,
            row=row,
            folder=folder,
            window=int(windows[n]),
            first=int(starts[n]),
            position=int(found.positions[n]),
            times=int(whole[n]),
            undone_at=undone_at,
            rest_left_out=bool(rest_left_out[n]),
        )


def _place_in_step(
    history: History, step: int, place: int
) -> tuple[int, int, int] | tuple[None, None, None]:
    """Rank, micro-batch and row of a window in its step, as `interleaved` has them."""
    layout = history.layout(step)
    if layout is None:
        return None, None, None
    part, row = divmod(place, layout.micro_batch)
    micro_batch, rank = divmod(part, layout.processes)
    return rank, micro_batch, row


def texts_of(run: RecordedRun, past: PastStep, rank: int | None = None) -> Iterator[WindowText]:
    """The windows of a step, of one rank or of all. Raises: UserError for a step or a rank that
    the run does not have."""
    step = past.step
    history = past.history
    if step > history.step:
        raise UserError("step", step, f"the run has reached step {history.step}")
    layout = history.layout(step)
    if layout is None:
        hint = "no row tells how this step was divided; the parent run of this branch is missing"
        raise UserError("step", step, hint)
    if rank is not None and rank >= layout.processes:
        last = layout.processes - 1
        raise UserError("rank", rank, f"step {step} had the ranks 0 to {last}")
    positions = history.positions(step)
    items = run.order.items_at(positions)
    shares = interleaved(layout.processes, layout.micro_batch, history.size)
    names = run.names
    for micro_batch, of_ranks in enumerate(shares):
        for of_rank, share in enumerate(of_ranks):
            if rank not in (None, of_rank):
                continue
            for row, place in enumerate(share):
                number, item = divmod(int(items[place]), 2**SOURCE_BITS)
                source = run.corpus.sources[number]
                first = int(source.starts(np.array([item]))[0])
                (tokens,) = source.stream.read(np.array([first]), source.block_size + 1)
                yield WindowText(
                    step=step,
                    rank=of_rank,
                    micro_batch=micro_batch,
                    row=row,
                    folder=names[number],
                    window=item % len(source),
                    position=int(positions[place]),
                    first=first,
                    text=run.corpus.tokenizer.decode(tokens),
                )


def spikes(run: RecordedRun, name: str) -> list[Spike]:
    """The rows after the warm-up by how far their value is above the rows before them, the farthest
    first; rows that are not finite are before all others. Those that a rollback undid are among
    them. Raises: UserError without rows.

    A row is compared with the median of the finite ones before it, of `NEAR` at most. The usual
    spread is that of these rows or of all rows after the warm-up, whichever is larger.
    """
    rows = _rows_with(run, name)
    if not rows:
        raise UserError("spike", name, "no row has this value yet; wait for a row of a step")
    warm_up = run.config.optim.warmup_steps
    usual = _usual_spread(_finite([row for row, _ in rows if row.past.step > warm_up]))
    found: list[Spike] = []
    for row, rows_before in rows:
        before = _finite(rows_before)
        if row.value is None:
            found.append(row)
        elif row.past.step > warm_up and len(before) >= FEWEST:
            median = statistics.median(before)
            near = SIGMA * statistics.median(abs(value - median) for value in before)
            spread = max(usual, near, LEAST_SPREAD * abs(median))
            spreads = (row.value - median) / spread if spread else 0.0
            times = row.value / median if median > 0 else None
            found.append(row._replace(times=times, spreads=spreads))
    return sorted(found, key=_farthest_first)


def _farthest_first(spike: Spike) -> float:
    """A key that sorts rows by their distance; those that are not finite first."""
    return -math.inf if spike.spreads is None else -spike.spreads


def _finite(rows: Sequence[Spike]) -> list[float]:
    return [row.value for row in rows if row.value is not None]


def _usual_spread(values: Sequence[float]) -> float:
    """The median distance of a value from the median of those on both sides of it, which follows a
    curve that falls; as a standard deviation."""
    half = NEAR // 2
    distances = [
        abs(value - statistics.median(values[max(index - half, 0) : index + half + 1]))
        for index, value in enumerate(values)
    ]
    return SIGMA * statistics.median(distances) if distances else 0.0


def _rows_with(run: RecordedRun, name: str) -> list[tuple[Spike, list[Spike]]]:
    """Each row with the value `name`, in the file's order, and the rows before it that counted
    then."""
    history = History(run.history.size)
    ends = iter(run.undone)
    rows: list[tuple[Spike, list[Spike]]] = []
    counting: list[Spike] = []
    undone_at: dict[int, int] = {}  # by index in `rows`
    for row in run.log.rows():
        if is_rollback(row):
            _, back_to = next(ends)
            counting = [spike for spike in counting if spike.past.step <= back_to]
            for index, (spike, _) in enumerate(rows):
                if spike.past.step > back_to:
                    undone_at.setdefault(index, back_to)
        history = history.after(row)
        if not is_event(row) and name in row:
            spike = Spike(PastStep(row["step"], history), row[name], None, None)
            rows.append((spike, counting[-NEAR:]))
            counting.append(spike)
    for index, step in undone_at.items():
        spike, before = rows[index]
        rows[index] = spike._replace(past=spike.past._replace(undone_at=step)), before
    return rows


def _no_spike(run: RecordedRun, rows: list[Spike], name: str) -> str:
    """The answer if no row stands out."""
    if not rows:
        few = f"no row after the warm-up has {FEWEST} rows before it"
        return f"no step stands out: {few}; --step N prints the texts of a step"
    farthest = rows[0]
    step = farthest.past.step
    spreads = farthest.spreads or 0.0
    value = f"{farthest.value:.4g}, {abs(spreads):.1f} times that spread"
    value += " above" if spreads > 0 else " below"
    every = run.config.tracking.log_every
    lines = [
        f"no step stands out: none of {len(rows):,} rows after the warm-up is more than"
        f" {SPIKE:.0f} times the usual spread of {name} above the {NEAR} rows before it",
        f"the farthest is step {step} ({value}); --step {step} prints its texts",
    ]
    if every > 1:
        lines.append(f"one step in {every} has a row (tracking.log_every); others are not known")
    return "\n".join(lines)


def describe(answer: Answer) -> str:
    """The answer for people: the line, then where and when."""
    lines = [answer.text]
    if answer.uses:
        parts = f", {answer.part_exposures:,} to a part of it" if answer.part_exposures else ""
        lines.append(f"exposures: {answer.exposures:,} to the whole text{parts}")
    at_ends = sorted({use.step for use in answer.uses if use.rest_left_out} - {*answer.steps})
    at_borders = [step for step in answer.part_steps if step not in at_ends]
    if answer.steps and at_borders:
        lines.append(f"only a part of it, at the border of two windows: {_steps(at_borders)}")
    if at_ends:
        rest = "the rest is in no window of that pass"
        lines.append(f"only a part of it, {rest}: {_steps(at_ends)}")
    for folder, passes in answer.left_out.items():
        why = "data.shift_windows leaves out other first and last tokens in each epoch"
        lines.append(f"{_epochs(passes)} of {truncate(folder)} left it out: {why}")
    if answer.uses and answer.undone:
        undone = _steps(sorted({use.step for use in answer.undone}))
        lines.append(f"undone by a rollback, and skipped since: {undone}")
    lines += _counts(answer.places)
    lines += [f"  {quote}" for quote in answer.quotes]
    if answer.uses:
        header = ("step", "epoch", "rank", "micro-batch", "row", "folder", "window", "whole text")
        rows = [header, *(_cells(use) for use in islice(answer.uses, SHOWN))]
        lines += ["", text_table(rows)]
        if len(answer.uses) > SHOWN:
            lines.append(f"{len(answer.uses) - SHOWN:,} more; --json has all")
    return "\n".join(lines)


def _counts(places: list[Place]) -> Iterator[str]:
    """A line for each split with the text: how often, and how often it was not seen, and why."""
    for (folder, split), group in groupby(places, lambda place: (place.folder, place.split)):
        whys = [place.why for place in group]
        times = "once" if len(whys) == 1 else f"{len(whys):,} times"
        yield f"{folder} ({split}): {times}"
        is_partly_seen = "" in whys
        for why in dict.fromkeys(whys):
            if why and is_partly_seen:
                yield f"  {whys.count(why):,} of them: {why.removeprefix('but ')}"


def _cells(use: Use) -> tuple[str, ...]:
    numbers = (use.step, use.epoch, use.rank, use.micro_batch, use.row)
    cells = ["?" if number is None else str(number) for number in numbers]
    whole = f"{use.times} x" if use.times else "a part"
    return (*cells, truncate(use.folder), str(use.window), whole)


def _epochs(epochs: list[int]) -> str:
    """Ascending epochs in words: `epochs 2, 5 to 8`."""
    groups = groupby(enumerate(epochs), lambda pair: pair[1] - pair[0])
    ranges = [[epoch for _, epoch in group] for _, group in groups]
    shown = [
        f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges[:SHOWN]
    ]
    more = " and more" if len(ranges) > SHOWN else ""
    return f"{'epoch' if len(epochs) == 1 else 'epochs'} {', '.join(shown)}{more}"


def _steps(steps: list[int]) -> str:
    """Steps in words: `steps 12, 345`."""
    shown = ", ".join(map(str, steps[:SHOWN]))
    more = f" and {len(steps) - SHOWN:,} more" if len(steps) > SHOWN else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {shown}{more}"


def _quote(stream: TokenStream, tokenizer: Tokenizer, place: Place) -> str:
    """A line with the beginning of an occurrence, and the text before it."""
    first = max(place.first - AROUND, 0)
    last = min(place.last, place.first + AROUND) + AROUND
    (tokens,) = stream.read(np.array([first]), min(last, len(stream) - 1) + 1 - first)
    text = truncate(tokenizer.decode(tokens), 200)
    return f"token {place.first:,} of {place.folder} ({place.split}): {text}"


def _window_line(window: WindowText) -> str:
    place = f"rank {window.rank}, micro-batch {window.micro_batch}, row {window.row}"
    of = f"window {window.window} of {truncate(window.folder)}, from token {window.first:,} on"
    return f"--- step {window.step}, {place}: {of}"


def _spike_line(spike: Spike, name: str) -> str:
    past = spike.past
    value = "not finite" if spike.value is None else f"{spike.value:.4g}"
    times = "" if spike.times is None else f", {spike.times:.2f} times the rows before it"
    undone = "" if past.undone_at is None else f"; undone by the rollback to {past.undone_at}"
    return f"=== step {past.step}: {name} {value}{times}{undone}"
