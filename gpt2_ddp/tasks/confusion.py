"""Which classes a classifier of images takes for which, each of its test images once; and those it takes wrongly."""

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from gpt2_ddp.files import write_atomically, writing
from gpt2_ddp.tasks.samples import SampleSet
from gpt2_ddp.tasks.supervised import Job

Counts = list[dict[int, int]]
"""Of each class, how many of it are taken for which: no more numbers than samples, however many classes there are."""
WORST = 10
"""Classes that are told."""
PICTURES, COLUMNS = 24, 6
"""Wrongly classified images that are drawn, and how many in a row."""


def with_predictions(job: Job) -> Job:
    """The same, whose last two scores are each sample's class, and the one that it is taken for."""

    def scores(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {**job.scores(outputs, targets), "class": targets, "taken for": outputs.argmax(1)}

    return replace(job, scores=scores)


def confusion(found: np.ndarray, classes: int) -> Counts:
    """How many of class i are taken for class j.

    Args:
        found: int64 [2, N], each sample's class and the one that it is taken for.
    """
    counts: Counts = [{} for _ in range(classes)]
    for (one, other), count in sorted(Counter(zip(*found.tolist(), strict=True)).items()):
        counts[one][other] = count
    return counts


def format_confusion(counts: Counts, names: Sequence[str]) -> str:
    """Lines on the classes that are taken wrongly most often, the worst first."""
    shares = {k: row.get(k, 0) / sum(row.values()) for k, row in enumerate(counts) if row}
    worst = sorted((k for k, share in shares.items() if share < 1), key=lambda k: shares[k])
    lines = []
    for k in worst[:WORST]:
        total, right = sum(counts[k].values()), counts[k].get(k, 0)
        other, most = max(((other, n) for other, n in counts[k].items() if other != k), key=lambda pair: pair[1])
        taken = f"mostly taken for {names[other]} ({most:,})"
        lines.append(f"  {names[k]}: {right:,} of {total:,} right, {right / total:.2%}; {taken}")
    if len(worst) > WORST:
        lines.append(f"  and {len(worst) - WORST:,} more classes that are not all right")
    return "\n".join(lines)


def save(folder: Path, step: int, found: np.ndarray, counts: Counts, names: Sequence[str], test: SampleSet) -> None:
    """Writes classes.json and, where there are some, the wrong ones as wrong.png; report.py shows both."""
    wrong = np.flatnonzero(found[0] != found[1])[:PICTURES]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": step, "classes": [*names], "confusion": counts}
        write_atomically(folder / "classes.json", json.dumps(content))
        if len(wrong):
            write_atomically(folder / "wrong.png", _draw(wrong, found, names, test))
        else:
            (folder / "wrong.png").unlink(missing_ok=True)


def _draw(items: np.ndarray, found: np.ndarray, names: Sequence[str], test: SampleSet) -> bytes:
    """A PNG of images, each with its class and the one that it is taken for."""
    from matplotlib.figure import Figure

    rows = -(-len(items) // COLUMNS)
    figure = Figure(figsize=(2 * COLUMNS, 2.4 * rows), layout="constrained")
    places = [*figure.subplots(rows, COLUMNS, squeeze=False).flat]
    images = test.read(items)[0].permute(0, 2, 3, 1).numpy()
    for place in places:
        place.axis("off")
    for place, item, image in zip(places, items, images, strict=False):
        place.imshow(image)
        one, other = (names[int(number)][:24] for number in found[:, item])
        place.set_title(f"{one}\ntaken for {other}", fontsize=8, parse_math=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()
