"""Where the numbers go: metrics.jsonl, trackers, the terminal."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.run.folder import RunFolder
from gpt2_ddp.run.layout import METRICS, SAMPLES
from gpt2_ddp.run.rows import finite
from gpt2_ddp.run.task import Sample
from gpt2_ddp.run.terminal import describe, duration, time_left

if TYPE_CHECKING:
    from gpt2_ddp.run.trackers import Trackers

T = TypeVar("T")


class Metrics:
    """On the main process: writes rows to metrics.jsonl and the trackers, and shows them. On the others: nothing.

    A terminal gets a progress bar, a log file a line for each row.
    """

    def __init__(self, run: RunFolder | None, step: int, steps: int):
        self.run = run
        self.steps = steps
        self._failed: set[str] = set()
        self.trackers: Trackers | None = None
        self._bar = tqdm(
            total=steps, initial=step, unit="step", dynamic_ncols=True, disable=run is None or not sys.stderr.isatty()
        )

    def start_trackers(self, config: RunConfig, run_id: str) -> None:
        """Starts the trackers of `tracking.log_with` on the main process (`Trackers.start`)."""
        if self.run and config.tracking.log_with:
            from gpt2_ddp.run.trackers import Trackers

            self.trackers = Trackers(self.attempt)
            self.trackers.start(config, run_id, self.run.path)

    def log(self, row: dict[str, Any]) -> None:
        """Writes one row; numbers that are not finite become null, as JSON has none."""
        if self.run is None:
            return
        row = finite(row)
        self.run.append(METRICS, row)
        if self.trackers:
            self.trackers.log(row)
        said, left = describe(row), time_left(row, self.steps)
        if self._bar.disable or "val_loss" in row:
            self.say(f"step {row['step']:>6}/{self.steps}  {said}{f'  {duration(left)} left' if left else ''}")
        self._bar.set_postfix_str(said, refresh=False)

    def advance(self) -> None:
        """Counts a step on the progress bar."""
        self._bar.update()

    def say(self, text: str) -> None:
        """Prints on the main process, above the bar."""
        if self.run is not None:
            with suppress(OSError):  # a log file on a full disk is not worth the run
                tqdm.write(text, file=sys.stderr)

    def go_back(self, event: dict[str, Any]) -> None:
        """Records that the run goes on behind the step that a rollback names."""
        if self.run is not None:
            for name in (METRICS, SAMPLES):
                if (self.run.path / name).exists():
                    self.run.append(name, event)
        if self.trackers:
            self.trackers.go_back(event["step"])
        self._bar.update(event["step"] - self._bar.n)

    def show_samples(self, step: int, samples: list[Sample] | None) -> None:
        """Prints and keeps the samples of this step, if there are any."""
        for sample in samples or ():
            if self.run is not None:
                self.run.append(SAMPLES, {"step": step, **sample._asdict()})
            self.say(f"--- sample at step {step} ---\n{sample.text}\n---")

    def attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """Calls what a training can do without. If it raises, that is one warning."""
        try:
            return action()
        except Exception as error:  # whatever other people's code may raise: no curve and no sample is worth the run
            if what not in self._failed:
                self._failed.add(what)
                said = " ".join(f"{type(error).__name__}: {error}".split())
                self.say(f"warning: the {what} failed ({said}); the training goes on without it")
            return None

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()

    def finish(self) -> None:
        """Ends the trackers."""
        if self.trackers:
            self.trackers.finish()
