"""How good a run's bits per byte are: those of compressors on the same validation text.

    print_comparison ── compressors.json of the run? ── no ─▶ python -m gpt2_ddp.tasks.comparison
          │                                                    the data's cache, or compress
          ◀────────────────── compressors.json ◀───────────────┘

The compressors run in a process of low priority, after the last checkpoint of a completed run. So
they slow no training, and their memory and their crashes are not the trainer's.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError

from gpt2_ddp.config.base import Command
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest, text_bytes
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed import process
from gpt2_ddp.distributed.environment import world_size
from gpt2_ddp.errors import UserError
from gpt2_ddp.evaluation.compressors import bits_per_byte, compressors, split_text
from gpt2_ddp.evaluation.forecast import from_record
from gpt2_ddp.evaluation.ladder import describe_interval, expectation_of
from gpt2_ddp.files import read_json
from gpt2_ddp.output import write_json
from gpt2_ddp.records.rows import (
    COMPRESSORS,
    METRICS,
    Row,
    compressor_scores,
    is_rollback,
    read_lines,
    valid_rows,
)
from gpt2_ddp.script import run_command

LARGEST_TEXT = 2**25
"""Bytes of text that compressors read in about a minute on two cores (estimate)."""
GPU = 50
"""Speed of a GPU for games, as a multiple of two cores of a CPU (estimate)."""
TOLERANCE = 0.2
"""Share of the planned tokens by which a run may miss them without a word."""
MOST_SECONDS = 180
"""Seconds after which the compressors are ended, without a result."""
CACHE = ".compressors.json"
"""In a folder of shards: the compressors' scores, for the next run."""


class ComparisonConfig(Command):
    """What to compress"""

    data: str = ""
    """folder of token shards"""
    run: str = ""
    """run folder, which gets compressors.json"""


def print_comparison(run: Path, config: TrainingConfig) -> None:
    """Prints the bits per byte of a completed run beside those of compressors on its validation
    text. Prints nothing for several processes or folders, for much text, and without a validation
    split."""
    manifest = _manifest_of_small_text(config)
    best = _best_row(run)
    if not manifest or not best:
        return
    scores = compressor_scores(run) or _compress(run, Path(config.data.paths[0]))
    if not scores:
        return
    tokens = manifest.tokens("val") - 1
    sample = f", by {best['val_tokens']:,} of its {tokens:,} tokens"
    of_sample = sample if best["val_tokens"] < tokens else ""
    score = f"{best['val_bits_per_byte']:.3f} bits per byte"
    theirs = ", ".join(f"{name} {bits:.3f}" for name, bits in scores.items())
    print(f"best evaluation: {score} of validation text{of_sample}")
    print(f"compressors on that text, after the training text: {theirs} (less is better)")


def print_forecast(run: Path) -> None:
    """Prints what was expected of a completed run, and how much more time, text or speed would
    help. Prints nothing if nothing was foretold."""
    start: Row = {}
    trained = 0
    reached = 0.0
    for line in read_lines(run / METRICS):
        if "forecast" in line.row:  # in the first start
            start = line.row
        trained = line.row.get("tokens", trained)
        reached = line.row.get("val_bits_per_byte", reached)
    if not start:
        return
    forecast = from_record(start["forecast"])
    words = f"expected: about {forecast.bits_per_byte:.1f} bits per byte"
    expectation = expectation_of(start)
    interval = expectation.at_end(trained) if expectation else None
    if interval:
        words = f"expected by the ladder: {describe_interval(interval)} bits per byte"
        words += f", reached {reached:.3f}"
    elif abs(trained / forecast.tokens - 1) > TOLERANCE:
        planned = f"{forecast.tokens / 1e6:.1f}M tokens"
        forecast = forecast._replace(tokens=trained)
        words += (
            f" by {planned}, {forecast.bits_per_byte:.1f} by the {trained / 1e6:.1f}M trained on"
        )
    more = {"4 times the time": forecast.with_work(4), "4 times the text": forecast.with_text(4)}
    if start["device"] == "cpu":
        more[f"a GPU, {GPU:g} times as fast,"] = forecast.with_work(GPU)
    changes = {
        name: other.bits_per_byte / forecast.bits_per_byte - 1 for name, other in more.items()
    }
    most_first = sorted(changes, key=lambda name: changes[name])
    help_ = ", ".join(f"{name} {changes[name]:+.0%}" for name in most_first)
    print(f"{words}; what would change it, by estimate: {help_}")


def _manifest_of_small_text(config: TrainingConfig) -> Manifest | None:
    """The manifest of a run's text, if compressors can read it in a short time."""
    path, *others = config.data.paths
    if others or world_size() > 1:
        return None
    try:
        manifest = read_manifest(Path(path))
    except UserError:  # a complete run needs no data
        return None
    has_both = manifest.tokens("train") > 0 and manifest.tokens("val") > 1
    return manifest if has_both and 0 < text_bytes(manifest) <= LARGEST_TEXT else None


def _best_row(run: Path) -> Row:
    """The row with the lowest bits per byte of as many tokens as the last; or an empty one."""
    lines = read_lines(run / METRICS)
    # the others, of which a long run has many, are not kept
    few = (line.row for line in lines if "val_bits_per_byte" in line.row or is_rollback(line.row))
    scored = [row for row in valid_rows(few) if isinstance(row["val_bits_per_byte"], float)]
    alike = [row for row in scored if row["val_tokens"] == scored[-1]["val_tokens"]]
    return min(alike, key=lambda row: row["val_bits_per_byte"], default={})


def _compress(run: Path, data: Path) -> dict[str, float]:
    """The compressors' scores, from a process of their own; none if it fails."""
    with suppress(UserError, CalledProcessError, OSError):
        process.run_module(__name__, f"--data={data}", f"--run={run}", stdout=DEVNULL)
    return compressor_scores(run)


def compare(config: ComparisonConfig) -> None:
    """The process: writes the compressors' scores into the run folder, and keeps them in the data
    folder, if that is writable. Raises: UserError."""
    os.nice(19)
    signal.alarm(MOST_SECONDS)  # ends this process
    folder = Path(config.data)
    manifest = read_manifest(folder)
    scores = _cached(folder, manifest)
    if not scores:
        scores = _score(folder, manifest)
        with suppress(UserError):
            write_json(folder / CACHE, {"data_manifest": manifest.hash, "bits_per_byte": scores})
    write_json(Path(config.run) / COMPRESSORS, {"bits_per_byte": scores})


def _cached(folder: Path, manifest: Manifest) -> dict[str, float]:
    """The scores of these data that an earlier run left, if all compressors have one."""
    with suppress(OSError, ValueError):
        cache = read_json(folder / CACHE)
        scores = cache.get("bits_per_byte")
        if cache.get("data_manifest") == manifest.hash and isinstance(scores, dict):
            return scores if scores.keys() >= compressors().keys() else {}
    return {}


def _score(folder: Path, manifest: Manifest) -> dict[str, float]:
    """The compressors' bits per byte of the validation text."""
    file = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(file) if file.exists() else manifest.tokenizer)
    training, validation = (
        split_text(folder, manifest, tokenizer, split) for split in ("train", "val")
    )
    return {
        name: bits_per_byte(compressor, training, validation)
        for name, compressor in compressors().items()
    }


if __name__ == "__main__":
    run_command(ComparisonConfig, compare)
