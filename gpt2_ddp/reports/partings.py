"""Where the numbers of two recorded runs part: the order of the data, learning rates, losses,
gradient norms, scores and tensors; and how far.

The rows of the steps that both have are compared as they were written, bit for bit.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Checkpoint, Tensors
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, verify
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.conditions import Record

What = Literal["order", "learning rate", "loss", "gradient norm", "scores", "tensors"]
FIELDS: dict[What, tuple[str, ...]] = {
    "order": ("order_digest",),
    "learning rate": ("lr",),
    "loss": ("loss",),
    "gradient norm": ("grad_norm",),
    "scores": ("val_loss", "val_accuracy", "val_top5"),
}
"""The fields of rows that are compared. Means since the row before depend on `tracking.log_every`,
so they are not."""
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
        """The difference as a share of the smaller value; infinite if one is no finite number."""
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
        apart: all rows with numbers that differ.
        tensors: those that differ, in the order of the network.
        compared: number of tensors of both checkpoints.
    """

    what: What
    field: str
    step: int
    equal_until: int | None
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
    """The partings in the rows of the steps that both runs have, the earliest first."""
    steps = sorted(first.rows.keys() & second.rows.keys())
    partings: list[Parting] = []
    for what, fields in FIELDS.items():
        for field in fields:
            parting = _parting(what, field, first.rows, second.rows, steps)
            if parting:
                partings.append(parting)
                break
    return sorted(partings, key=lambda parting: parting.step)


def _parting(
    what: What, field: str, first: Mapping[int, Row], second: Mapping[int, Row], steps: list[int]
) -> Parting | None:
    """Where a field parts; None if it does not."""
    parted_at: int | None = None
    equal_until: int | None = None
    apart: list[Apart] = []
    for step in steps:
        one = first[step]
        other = second[step]
        if field not in one or field not in other:  # a row without an evaluation
            continue
        if one[field] == other[field]:
            if parted_at is None:
                equal_until = step
            continue
        if what == "scores" and _scored(one) != _scored(other):
            continue  # losses over other tokens do not compare
        if parted_at is None:
            parted_at = step
        if what != "order":
            apart.append(Apart(step, (_number(one[field]), _number(other[field]))))
    if parted_at is None:
        return None
    return Parting(what, field, parted_at, equal_until, tuple(apart))


def _scored(row: Row) -> object:
    """How much an evaluation scored."""
    return row.get("val_tokens", row.get("val_samples"))


def _number(value: object) -> float | None:
    """A finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


class Compared(NamedTuple):
    """The checkpoints of the steps that both runs have.

    Attributes:
        parting: the first that differ, if there are any.
        damages: damaged files of the first run and of the second.
        steps: of the checkpoints that were compared.
    """

    parting: Parting | None
    damages: tuple[list[str], list[str]]
    steps: list[int]


def compare_checkpoints(first: Record, second: Record) -> Compared:
    """Hashes the files of the checkpoints of common steps, and compares the tensors of the first
    pair with other hashes, one tensor at a time."""
    damages: tuple[list[str], list[str]] = ([], [])
    parting: Parting | None = None
    compared: list[int] = []
    for step in sorted(first.checkpoints.keys() & second.checkpoints.keys()):
        one = _verified(first, step, damages[0])
        other = _verified(second, step, damages[1])
        if not one or not other:
            continue
        if parting is None:
            equal_until = compared[-1] if compared else None
            parting = _tensor_parting(one, other, equal_until)
        compared.append(step)
    return Compared(parting, damages, compared)


def _verified(record: Record, step: int, damages: list[str]) -> Checkpoint | None:
    """The checkpoint, if its files are those of its manifest; else `damages` get the file."""
    path = record.checkpoints[step]
    try:
        return verify(path)
    except CorruptCheckpoint as damage:
        if path.is_dir():  # not deleted meanwhile by a running training
            damages.append(f"checkpoints/{path.name}/{damage.file.name}: {damage.reason}")
        return None


def _tensor_parting(one: Checkpoint, other: Checkpoint, equal_until: int | None) -> Parting | None:
    """Where the weights of two checkpoints part, or else their optimizer state."""
    for file in (MODEL, OPTIMIZER):
        if one.sha256(file) == other.sha256(file):
            continue
        tensors = (one.tensors(file), other.tensors(file))
        different = [*_tensor_differences(*tensors)]
        if different:
            count = len({*tensors[0], *tensors[1]})
            return Parting(
                "tensors", file, one.step, equal_until, tensors=tuple(different), compared=count
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
