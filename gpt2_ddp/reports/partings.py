"""Where the numbers of two recorded runs begin to differ: the order of the data, counts, learning
rates, losses, gradient norms, scores and tensors; and how far.

The rows of the steps that both have are compared as they were written, bit for bit. Numbers of two
tokenizers are not compared, as they are of other tokens; bits per byte are.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast

from safetensors import SafetensorError

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Checkpoint, Tensors
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, verify, verify_recorded
from gpt2_ddp.records.rows import Row, is_own
from gpt2_ddp.reports.conditions import Record

What = Literal["order", "counts", "learning rate", "loss", "gradient norm", "scores", "tensors"]
WHATS: dict[str, What] = {
    "order_digest": "order",
    "epoch": "counts",
    "tokens": "counts",
    "samples": "counts",
    "skipped": "counts",
    "not_finite": "counts",
    "lr": "learning rate",
    "loss": "loss",
    "loss_mean": "loss",
    "train_loss": "loss",
    "grad_norm": "gradient norm",
    "val_loss": "scores",
    "val_bits_per_byte": "scores",
    "val_accuracy": "scores",
    "val_top5": "scores",
    "val_tokens": "scores",
    "val_samples": "scores",
}
"""What each field of rows belongs to. The fields of sources (`val_loss/web`) belong to that of
their beginning, and those of the tasks of an evaluation to the scores."""
SINCE_ROW = ("loss_mean", "train_loss", "not_finite")
"""Numbers of the steps since the row before, which compare if both runs have that row."""
BITS = "val_bits_per_byte"
AMOUNTS = ("val_tokens", "val_samples")
"""How much an evaluation has scored. Losses of another amount do not compare."""
SHOWN = 6
"""Most rows that show how a difference grew."""


class Apart(NamedTuple):
    """A field of a row, in both runs."""

    step: int
    values: tuple[float | None, float | None]

    @property
    def difference(self) -> float:
        """How far apart the values are; infinite if one is no finite number."""
        one, other = self.values
        if one is None or other is None:
            return math.inf
        return abs(one - other)

    @property
    def share(self) -> float:
        """The difference as a share of the smaller value; infinite if one is 0, or no finite
        number."""
        one, other = self.values
        if one is None or other is None or not one or not other:
            return math.inf
        return self.difference / min(abs(one), abs(other))


class TensorDifference(NamedTuple):
    """How far a tensor of two checkpoints is apart.

    Attributes:
        share: norm of the difference, as a share of the tensor's norm; infinite for other shapes,
            and for a tensor that one checkpoint lacks.
        largest: largest difference of two elements.
    """

    name: str
    share: float
    largest: float


class Parting(NamedTuple):
    """What parts two runs.

    Attributes:
        field: of the rows, or the file of the tensors.
        step: the first step with different values.
        equal_until: the last step before it with equal ones; None if there is none.
        equal_again: the first step after the last different values with equal ones; None if there
            is none.
        apart: all rows with numbers that differ.
        tensors: those that differ, in the order of the network.
        compared: number of tensors of both checkpoints.
    """

    what: What
    field: str
    step: int
    equal_until: int | None
    equal_again: int | None = None
    apart: tuple[Apart, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    compared: int = 0

    @property
    def largest(self) -> Apart | None:
        """The row with the largest difference."""
        return max(self.apart, key=lambda row: row.difference, default=None)

    @property
    def growth(self) -> list[Apart]:
        """A few of the rows with different numbers, from the first to the last."""
        count = len(self.apart)
        if count <= SHOWN:
            return [*self.apart]
        chosen = {round((count - 1) ** (number / (SHOWN - 1))) for number in range(1, SHOWN)}
        return [self.apart[index] for index in sorted({0, *chosen})]

    @property
    def most(self) -> list[TensorDifference]:
        """The tensors, those that are farthest apart first."""
        return sorted(self.tensors, key=lambda tensor: -tensor.share)


def row_partings(first: Record, second: Record) -> list[Parting]:
    """The partings in the rows of the steps that both runs have, the earliest first: of each
    `What`, that of the field that parts first."""
    steps = sorted(first.rows.keys() & second.rows.keys())
    tasks = {*_tasks(first), *_tasks(second)}
    names = dict.fromkeys(name for step in steps for name in first.rows[step])
    of_fields: dict[str, What] = {name: what for name in names if (what := what_of(name, tasks))}
    if has_other_tokens(first, second):
        of_fields = {
            name: what
            for name, what in of_fields.items()
            if what == "learning rate" or name.startswith(BITS)
        }
    partings: dict[What, Parting] = {}
    for name in sorted(of_fields, key=_place_of):
        what = of_fields[name]
        parting = _parting(what, name, first.rows, second.rows, steps)
        if parting and (what not in partings or parting.step < partings[what].step):
            partings[what] = parting
    order = partings.get("order")
    if order and "counts" in partings and order.step <= partings["counts"].step:
        del partings["counts"]  # they follow from the order
    return sorted(partings.values(), key=lambda parting: parting.step)


def other_own_numbers(first: Record, second: Record) -> list[str]:
    """The numbers of a class of one's own that differ in a common step. They may be anything, times
    of the clock too."""
    tasks = {*_tasks(first), *_tasks(second)}
    names: dict[str, None] = {}
    for step in first.rows.keys() & second.rows.keys():
        for name in first.rows[step].keys() & second.rows[step].keys():
            is_compared = what_of(name, tasks) is not None
            if (
                is_own(name)
                and not is_compared
                and first.rows[step][name] != second.rows[step][name]
            ):
                names[name] = None
    return sorted(names)


def what_of(name: str, tasks: Collection[str]) -> What | None:
    """What a field of a row belongs to; None for a field that is not compared, such as a speed.
    `tasks`: names of the tasks of the evaluations."""
    if any(name.startswith(f"{task}_") for task in tasks):
        return "scores"
    return WHATS.get(name.partition("/")[0])


def _place_of(name: str) -> tuple[int, str]:
    """A key that sorts fields as `WHATS` has them."""
    names = [*WHATS]
    source = name.partition("/")[0]
    return names.index(source) if source in names else len(names), name


def _tasks(record: Record) -> Iterator[str]:
    """The names of the tasks that a run's evaluations score."""
    for stretch in record.stretches:
        tasks = stretch.conditions.get("tasks")
        if isinstance(tasks, dict):
            yield from cast(dict[str, object], tasks)


def has_other_tokens(first: Record, second: Record) -> bool:
    """Whether the runs have different tokenizers. Then a loss of one is not a loss of the other."""
    one, other = (record.stretches[0].conditions.get("tokenizer") for record in (first, second))
    return one != other


def _parting(
    what: What, field: str, first: Mapping[int, Row], second: Mapping[int, Row], steps: list[int]
) -> Parting | None:
    """Where a field parts; None if it does not."""
    parted_at: int | None = None
    equal_until: int | None = None
    equal_again: int | None = None
    apart: list[Apart] = []
    for step in _comparable_steps(field, first, second, steps):
        one = first[step][field]
        other = second[step][field]
        if one == other:
            if parted_at is None:
                equal_until = step
            elif equal_again is None:
                equal_again = step
            continue
        equal_again = None
        if parted_at is None:
            parted_at = step
        if what != "order":
            apart.append(Apart(step, (_number(one), _number(other))))
    if parted_at is None:
        return None
    return Parting(what, field, parted_at, equal_until, equal_again, tuple(apart))


def _comparable_steps(
    field: str, first: Mapping[int, Row], second: Mapping[int, Row], steps: list[int]
) -> Iterator[int]:
    """The steps whose rows both have the field, of the same tokens or samples."""
    is_since_row = field in SINCE_ROW
    previous = [_steps_before(rows) if is_since_row else {} for rows in (first, second)]
    for step in steps:
        one = first[step]
        other = second[step]
        if field not in one or field not in other:  # a row without an evaluation
            continue
        if is_since_row and previous[0][step] != previous[1][step]:
            continue
        if _is_comparable(field, one, other):
            yield step


def _steps_before(rows: Mapping[int, Row]) -> dict[int, int]:
    """The step of the row before each row."""
    steps = sorted(rows)
    return dict(zip(steps, [0, *steps], strict=False))


def _is_comparable(field: str, one: Row, other: Row) -> bool:
    """Whether a field of two rows compares: scores other than bits per byte do if both are of as
    many tokens or samples."""
    if not field.startswith("val_") or field.startswith(BITS) or field in AMOUNTS:
        return True
    return all(one.get(name) == other.get(name) for name in AMOUNTS)


def _number(value: object) -> float | None:
    """A finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


class LastScores(NamedTuple):
    """The last score of both runs.

    Attributes:
        field: of the rows, such as `val_bits_per_byte`.
        values: of the first run and of the second.
        steps: of these rows.
        is_of_one_text: whether both scored the same validation data.
    """

    field: str
    values: tuple[float, float]
    steps: tuple[int, int]
    is_of_one_text: bool

    @property
    def difference(self) -> float:
        """The second less the first."""
        return self.values[1] - self.values[0]

    @property
    def better(self) -> str:
        """A or B; empty for equal scores, and for those that do not compare."""
        if not self.is_of_one_text or not self.difference:
            return ""
        is_lower_better = "accuracy" not in self.field
        return "A" if (self.difference > 0) == is_lower_better else "B"


def last_scores(first: Record, second: Record) -> LastScores | None:
    """The last bits per byte of both runs; of runs without, the last loss of an evaluation, or
    accuracy; None if they share no such score."""
    is_same_data = all(
        first.stretches[-1].conditions.get(name) == second.stretches[-1].conditions.get(name)
        for name in ("data", "data_hash", "tokenizer")
    )
    for field in (BITS, "val_loss", "val_accuracy"):
        found = [_last_with(field, record.rows) for record in (first, second)]
        one, other = found
        if one is None or other is None:
            continue
        values = (_number(one[field]), _number(other[field]))
        if values[0] is None or values[1] is None:
            continue
        is_of_one_text = is_same_data and all(one.get(name) == other.get(name) for name in AMOUNTS)
        steps = (one["step"], other["step"])
        return LastScores(field, (values[0], values[1]), steps, is_of_one_text)
    return None


def _last_with(field: str, rows: Mapping[int, Row]) -> Row | None:
    """The last row with a field."""
    return next((rows[step] for step in sorted(rows, reverse=True) if field in rows[step]), None)


class Compared(NamedTuple):
    """The checkpoints of the steps that both runs have.

    Attributes:
        parting: the first that differ, if there are any.
        damages: damaged files of the first run and of the second.
        steps: of the checkpoints that were compared.
        left_out: steps of damaged checkpoints that cannot be compared.
    """

    parting: Parting | None
    damages: tuple[list[str], list[str]]
    steps: list[int]
    left_out: list[int]


def compare_checkpoints(first: Record, second: Record) -> Compared:
    """Hashes the files of the checkpoints of common steps, and compares the tensors of the first
    pair with other hashes, one tensor at a time. Damaged ones are compared, too, if their tensors
    can be read."""
    damages: tuple[list[str], list[str]] = ([], [])
    parting: Parting | None = None
    compared: list[int] = []
    left_out: list[int] = []
    for step in sorted(first.checkpoints.keys() & second.checkpoints.keys()):
        one = _verified(first, step, damages[0])
        other = _verified(second, step, damages[1])
        if not one.path.is_dir() or not other.path.is_dir():
            continue  # deleted meanwhile by a running training
        is_damaged = not (one.checkpoint and other.checkpoint)
        try:
            mine = one.checkpoint or verify(one.path, weights=False)
            theirs = other.checkpoint or verify(other.path, weights=False)
            if parting is None:
                equal_until = compared[-1] if compared else None
                parting = _tensor_parting(mine, theirs, equal_until, is_damaged)
        except (CorruptCheckpoint, SafetensorError, OSError):
            left_out.append(step)
            continue
        compared.append(step)
    return Compared(parting, damages, compared, left_out)


class Verified(NamedTuple):
    """A checkpoint's folder; and the checkpoint, if its files are what the run wrote."""

    path: Path
    checkpoint: Checkpoint | None


def _verified(record: Record, step: int, damages: list[str]) -> Verified:
    """A checkpoint, if its files are those of its manifest, and the rows record that manifest. Else
    `damages` get what was changed."""
    path = record.checkpoints[step]
    try:
        return Verified(path, verify_recorded(path))
    except CorruptCheckpoint as damage:
        if path.is_dir():  # not deleted meanwhile by a running training
            place = f"checkpoints/{path.name}"
            if damage.file != path:
                place += f"/{damage.file.name}"
            damages.append(f"{place}: {damage.reason}")
        return Verified(path, None)


def _tensor_parting(
    one: Checkpoint, other: Checkpoint, equal_until: int | None, is_damaged: bool
) -> Parting | None:
    """Where the weights of two checkpoints part, or else their optimizer state. The manifest of
    a damaged one does not have the hashes of its files. Raises: SafetensorError, OSError."""
    for file in (MODEL, OPTIMIZER):
        if one.sha256(file) == other.sha256(file) and not is_damaged:
            continue
        before = one.tensors(file)
        after = other.tensors(file)
        different = tuple(_tensor_differences(before, after))
        if different:
            count = len({*before, *after})
            return Parting(
                "tensors", file, one.step, equal_until, tensors=different, compared=count
            )
    return None


def _tensor_differences(one: Tensors, other: Tensors) -> Iterator[TensorDifference]:
    """The tensors that differ, in the order of the network."""
    for name in sorted({*one, *other}, key=_in_network):
        if one.shapes.get(name) != other.shapes.get(name):
            yield TensorDifference(name, math.inf, math.inf)
            continue
        before = one[name].double()
        after = other[name].double()
        difference = (before - after).abs()
        if difference.any() or before.isnan().any() or after.isnan().any():
            norm = min(before.norm().item(), after.norm().item())
            share = difference.norm().item() / norm if norm else math.inf
            yield TensorDifference(name, share, difference.max().item())


def _in_network(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """A key that sorts tensors as the network has them: embeddings, blocks by number, the rest."""
    parts = re.split(r"(\d+)", name)
    is_block = len(parts) > 1
    is_last = not is_block and ("ln_f" in name or "head" in name)
    numbered = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return is_last, [(int(is_block), ""), *numbered]
