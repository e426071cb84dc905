"""Metrics: rows for metrics.jsonl, the trackers and the terminal."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.records.rows import FIELDS, Row, finite, is_own, speed_of, time_left
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.records.trackers import Trackers


def describe(row: Row) -> list[str]:
    """A row's losses, own numbers of the task and speed as texts; missing fields and names with a /
    are left out."""
    unit, rate = speed_of(row)
    texts = {name: field.text for name, field in FIELDS.items()}
    for name in row:
        if not is_own(name) or "/" in name or name == unit:
            continue
        if name.endswith("_acc"):
            texts[name] = f"{name} {{:.1%}}"
        elif not name.endswith("_acc_norm"):
            texts[name] = f"{name} {{:.4g}}"
    parts = [
        text.format(row[name]) for name, text in texts.items() if text and row.get(name) is not None
    ]
    if unit:
        parts.append(f"{rate:,.0f} {unit}/s")
    return parts


T = TypeVar("T")
OnRow = Callable[[Row], object]


class Sample(NamedTuple):
    """A generated text."""

    prompt: str
    text: str  # generated, prompt included


class Metrics:
    """Rows of a run: the main process writes them to metrics.jsonl and the trackers,
    and prints them."""

    def __init__(self, log: RunLog, on_row: OnRow | None = None):
        self._log = log
        self._failed: set[str] = set()
        self.trackers: Trackers | None = None
        self._on_row = on_row if log.is_main else None

    def start_trackers(self, config: RunConfig, run_id: str) -> None:
        """Starts the trackers of `tracking.log_with` on the main process."""
        if self._log.is_main and config.tracking.log_with:
            self.trackers = Trackers(self.attempt, config, run_id, self._log.path)

    def log(self, row: Row, steps: int | None) -> None:
        """Writes and prints one row. JSON lacks numbers that are not finite; they become null.
        `steps`: of the whole run; None while unknown."""
        row = finite(row)
        self._log.append(row)
        if self.trackers:
            self.trackers.log({**row, "chain": self._log.chain})
        parts = [f"step {row['step']:>6}/{steps or '?'}", *describe(row)]
        left = time_left(row, steps) if steps else None
        if left:
            parts.append(f"{tqdm.format_interval(left)} left")
        self.print("  ".join(parts))
        if self._on_row:
            self._on_row(row)

    def print(self, text: str) -> None:
        """Prints a line on the main process, above a progress bar: warnings to stderr, others to
        standard output."""
        if self._log.is_main:
            stream = sys.stderr if text.startswith("warning") else sys.stdout
            # a log file on a full disk must not end the run
            with suppress(OSError), tqdm.external_write_mode(stream):
                print(text, file=stream, flush=True)

    def show_samples(self, step: int, samples: list[Sample] | None) -> None:
        """Prints the samples of a step and appends them to metrics.jsonl."""
        for sample in samples or ():
            self._log.append({"event": "sample", "step": step, **sample._asdict()})
            self.print(f"--- sample at step {step} ---\n{sample.text}\n---")

    def attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """The result of an optional action. After an exception: None, with one warning
        for each `what`."""
        try:
            return action()
        except Exception as error:  # of any library: the run matters more than a curve or sample
            if what not in self._failed:
                self._failed.add(what)
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                effect = "the training continues without it"
                self.print(f"warning: the {what} failed ({reason}); {effect}")
            return None

    def close(self) -> None:
        """Ends the trackers."""
        if self.trackers:
            self.trackers.finish()
