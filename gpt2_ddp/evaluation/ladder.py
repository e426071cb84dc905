"""What a ladder of small runs on a text tells of other runs: `.ladder.json` of the data folder.

    ladder.py ─▶ Ladder.write ─▶ .ladder.json ─▶ find_ladder ─▶ Ladder ─▶ expect, answer
                                                                  └─▶ Expectation: in the start row
                                                                      of a run, for its report

The file has what was measured, and is bound to the data by their hash. The law is fitted again by
each reader: in a fraction of a second, always with the same result.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from gpt2_ddp.config.base import flat
from gpt2_ddp.config.own_text import CHOSEN, SHAPES, active_parameters, given_fields
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.evaluation.scaling import Interval, Law, Point, fit
from gpt2_ddp.files import read_json
from gpt2_ddp.output import write_json

FILE = ".ladder.json"
"""In a folder of shards."""
VERSION = 1
PROGRESS = (0.25, 0.5, 0.75)
"""Shares of a run at which the runs of a ladder are evaluated, besides its ends."""
LEAST_SPREAD = 0.004
"""Least standard deviation that is assumed of the curve's shape."""
SHAPE_FIELDS = {"model.n_layer", "model.n_embd", "model.n_head"}
"""Fields in which the runs of a ladder differ, and other runs from them."""
SHARE_OF_TIME = 0.93
"""Share of a run's time that it trains; the rest is start, evaluations, samples, checkpoints."""
FACTORS = [2 ** (half / 2) for half in range(-4, 5)]
"""Tokens for which an expectation is written down, as multiples of the planned ones."""
Z = 1.645
"""Standard deviations on both sides of a mean that hold `LEVEL` of a normal distribution, 90 %."""


@dataclass(frozen=True)
class Rung:
    """A completed run of a ladder.

    Attributes:
        layers, width: its shape.
        parameters: active ones.
        tokens: trained on.
        bits: per byte of the validation text, at the end.
        seconds_per_token: of training, without evaluations.
        curve: (share of the run, bits per byte there) of its evaluations, without the first.
    """

    name: str
    layers: int
    width: int
    parameters: int
    tokens: int
    seed: int
    bits: float
    seconds_per_token: float
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Ladder:
    """The runs of a ladder, and what they were trained on.

    Attributes:
        data_manifest: hash of the data.
        settings: fields that other runs must share, by dotted names.
        text_tokens: of the training split.
        val_tokens: of an evaluation.
    """

    version: int
    data_manifest: str
    settings: dict[str, Any]
    text_tokens: int
    vocab_size: int
    val_tokens: int
    rungs: tuple[Rung, ...]

    @cached_property
    def law(self) -> Law:
        """The law of the runs."""
        points = [
            Point(run.parameters, run.tokens, self.text_tokens, run.bits) for run in self.rungs
        ]
        return fit(points)

    @cached_property
    def shape_of_curve(self) -> list[tuple[float, float, float]]:
        """How far above its end a run is: (share of the run, log of the loss there over that at the
        end, its standard deviation between runs)."""
        found = [(share, self._ratios(share)) for share in PROGRESS]
        return [
            (share, fmean(ratios), max(stdev(ratios), LEAST_SPREAD))
            for share, ratios in found
            if len(ratios) > 1
        ]

    def _ratios(self, share: float) -> list[float]:
        """Of each run, the log of its loss at a share of it, over that at its end."""
        return [
            math.log(bits / run.bits)
            for run in self.rungs
            for at, bits in run.curve
            if abs(at - share) < 0.02  # the nearest step
        ]

    def seconds_per_token(self, parameters: float) -> float:
        """Seconds of training a token on the ladder's machine: a part that all models have, and one
        in proportion to their parameters."""
        of_runs = np.array([run.parameters for run in self.rungs], np.float64)
        seconds = np.array([run.seconds_per_token for run in self.rungs])
        sizes = np.unique(of_runs)
        each = np.array([np.median(seconds[of_runs == size]) for size in sizes])
        # relative errors count: small models are as important
        slope, base = np.linalg.lstsq(np.stack([sizes / each, 1 / each], 1), np.ones(len(each)))[0]
        if slope <= 0 or base < 0:
            return float(np.median(each / sizes) * parameters)
        return float(base + slope * parameters)

    def tokens_in(self, minutes: float, parameters: float) -> float:
        """Tokens that a run of this time has on the ladder's machine."""
        return SHARE_OF_TIME * 60 * minutes / self.seconds_per_token(parameters)

    def expect(self, parameters: float, tokens: float, text: float = 1.0) -> Interval | None:
        """What a run will reach; None beyond what is claimed. `text`: of so many times as much
        text."""
        if not self.law.claims(parameters, tokens):
            return None
        return self.law.predict(parameters, tokens, self.text_tokens * text)

    def expectation(self, parameters: float, tokens: float) -> "Expectation | None":
        """What a run may compare itself with, also if it becomes shorter or longer; None beyond
        what is claimed."""
        if not self.law.claims(parameters, tokens):
            return None
        by_tokens: list[tuple[float, float, float, float]] = []
        for count in (tokens * factor for factor in FACTORS):
            interval = self.expect(parameters, count)
            if interval:
                by_tokens.append((count, interval.bits, interval.low, interval.high))
        return Expectation(self.val_tokens, tokens, tuple(by_tokens), tuple(self.shape_of_curve))

    def answer(self, tokens_for: Callable[[float], float], text: float = 1.0) -> "Answer | None":
        """The shape of `SHAPES`, and of the ladder's, that reaches the lowest loss; None if nothing
        is claimed of any.

        Args:
            tokens_for: tokens that a time suffices for, by the number of active parameters.
            text: so many times as much text.
        """
        shapes = {*SHAPES, *((run.layers, run.width) for run in self.rungs)}
        answers: list[Answer] = []
        unknown: list[int] = []  # sizes of which nothing is claimed
        for layers, width in shapes:
            parameters = self.parameters_of(layers, width)
            tokens = tokens_for(parameters)
            interval = self.expect(parameters, tokens, text)
            if interval:
                answers.append(Answer(layers, width, parameters, tokens, interval))
            else:
                unknown.append(parameters)
        if not answers:
            return None
        best = min(answers, key=lambda answer: answer.interval.bits)
        is_largest = best.parameters == max(answer.parameters for answer in answers)
        return best._replace(is_limited=is_largest and max(unknown, default=0) > best.parameters)

    def parameters_of(self, layers: int, width: int) -> int:
        """Active parameters of a shape."""
        return active_parameters({"model.n_layer": layers, "model.n_embd": width}, self.vocab_size)

    def write(self, folder: Path) -> None:
        """Keeps the ladder in the data folder. Raises: UserError if that is not writable."""
        write_json(folder / FILE, TypeAdapter(Ladder).dump_python(self, mode="json"))


class Answer(NamedTuple):
    """The best shape for a time.

    Attributes:
        is_limited: whether a larger one may be better, of which nothing is claimed.
    """

    layers: int
    width: int
    parameters: int
    tokens: float
    interval: Interval
    is_limited: bool = False


class Expectation(NamedTuple):
    """What a run should reach, by a ladder.

    Attributes:
        val_tokens: of the evaluations of the ladder.
        tokens: planned.
        by_tokens: (tokens, bits per byte, low, high) for shorter and longer runs.
        by_progress: (share of the run, log of the loss there over that at the end, standard
            deviation).
    """

    val_tokens: int
    tokens: float
    by_tokens: tuple[tuple[float, float, float, float], ...]
    by_progress: tuple[tuple[float, float, float], ...]

    def at_end(self, tokens: float) -> Interval | None:
        """Bits per byte of a run of so many tokens; None outside of the table."""
        at = math.log(max(tokens, 1))
        for first, second in pairwise(self.by_tokens):
            begin, end = math.log(first[0]), math.log(second[0])
            if begin - 1e-6 <= at <= end + 1e-6:
                share = (at - begin) / (end - begin)
                return Interval(
                    *(a + share * (b - a) for a, b in zip(first[1:], second[1:], strict=True))
                )
        return None

    def during(self, tokens: float, share: float) -> Interval | None:
        """Bits per byte of a run of so many tokens when this share of it is over; None early in the
        run, and where the end is unknown."""
        end = self.at_end(tokens)
        if end is None:
            return None
        knots = [*self.by_progress, (1.0, 0.0, 0.0)]
        for (begin, *first), (after, *second) in pairwise(knots):
            if begin - 1e-6 <= share <= after + 1e-6:
                # a loss falls along the logarithm of the steps
                part = math.log(max(share, begin) / begin) / math.log(after / begin)
                ratio, deviation = (a + part * (b - a) for a, b in zip(first, second, strict=True))
                return _wider(end, ratio, deviation)
        return end if share > 1 else None

    def record(self) -> dict[str, Any]:
        """The value of a row, which `from_record` takes."""
        return self._asdict()


def _wider(end: Interval, ratio: float, deviation: float) -> Interval:
    """The interval of a loss whose log is `ratio` above that of the end, up to a deviation."""
    middle = math.log(end.bits)
    below = math.hypot(middle - math.log(end.low), Z * deviation)
    above = math.hypot(math.log(end.high) - middle, Z * deviation)
    middle += ratio
    return Interval(math.exp(middle), math.exp(middle - below), math.exp(middle + above))


def expectation_of(start: Mapping[str, Any]) -> Expectation | None:
    """The expectation in a run's start row, which anybody may have written; None without a valid
    one."""
    forecast: object = start.get("forecast")
    if not isinstance(forecast, Mapping) or "ladder" not in forecast:
        return None
    try:
        found = TypeAdapter(Expectation).validate_python(forecast["ladder"])
    except ValidationError:
        return None
    numbers = [*(number for row in (*found.by_tokens, *found.by_progress) for number in row)]
    is_sound = all(math.isfinite(number) and abs(number) < 1e30 for number in numbers)
    rising = [[row[0] for row in rows] for rows in (found.by_tokens, found.by_progress)]
    is_sound &= all(0 < a < b for column in rising for a, b in pairwise(column))
    is_sound &= all(0 < row[2] <= row[1] <= row[3] for row in found.by_tokens)
    is_sound &= all(0 < row[0] < 1 and abs(row[1]) < 10 for row in found.by_progress)
    return found if is_sound and found.by_tokens else None


def settings_of(config: TrainingConfig) -> dict[str, Any]:
    """The fields that decide on the loss, besides shape, length and seed: those of model and
    optimizer, and of what the rule chooses those that are given."""
    given = given_fields(config)
    fields = flat(config.model_dump(mode="json"))
    return {
        name: value
        for name, value in fields.items()
        if (name.startswith(("model.", "optim.")) or name == "data.shift_windows")
        and name not in SHAPE_FIELDS
        and (name not in CHOSEN or name in given)
    }


def find_ladder(config: TrainingConfig, manifests: Sequence[Manifest]) -> Ladder | None:
    """The ladder of a run of the rule (`own_text`), whose configuration is not completed yet. None
    without one, for other settings than its own, for weights from elsewhere, and for a class of
    one's own. A note says why one that is there does not tell."""
    others = (config.train.init_from, config.train.branch_from, config.task)
    if len(manifests) > 1 or any(others):
        return None
    file = Path(config.data.paths[0]) / FILE
    ladder = read_ladder(file.parent, manifests[0])
    if not ladder:
        if file.exists():
            problem = "is damaged, or of other data or another version"
            print_line(f"note: {file} {problem}, and foretells nothing; run ladder.py again")
        return None
    settings = settings_of(config)
    names = sorted(settings.keys() | ladder.settings.keys())
    different = [name for name in names if settings.get(name) != ladder.settings.get(name)]
    if different:
        problem = f"is of other values of {', '.join(different)}"
        print_line(f"note: {file} {problem}, and foretells nothing of this run")
        return None
    return ladder


def read_ladder(folder: Path, manifest: Manifest | None = None) -> Ladder | None:
    """The ladder that a data folder keeps; None without a readable one of these data."""
    with suppress(OSError, ValueError, UserError):
        content = read_json(folder / FILE)
        ladder = TypeAdapter(Ladder).validate_python(content)
        manifest = manifest or read_manifest(folder)
        is_known = ladder.version == VERSION and ladder.data_manifest == manifest.hash
        if is_known and math.isfinite(ladder.law.noise):
            return ladder
    return None


def describe_interval(interval: Interval) -> str:
    """1.523 (1.492 to 1.551)."""
    return f"{interval.bits:.3f} ({interval.low:.3f} to {interval.high:.3f})"
