"""`train.minutes`: times the first steps of a new run, and makes it a run of as many steps as fit.
If its speed changes later, the run becomes shorter or longer.

What counts is a clock on the wall, from the evaluation before the first step to the checkpoint
after the last. The main process measures; all ranks take its number after the same step. The
learning rates follow from the configuration, which has each number until now
(`OptimConfig.earlier_ends`).
"""

import math
import time
from bisect import bisect_right
from typing import NamedTuple

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.training.start import Training
from gpt2_ddp.training.step_rows import write_late_rows
from gpt2_ddp.training.stop import KEPT

TIMED = 64
"""Steps that are timed, unless the warm-up is shorter. A checkpoint or a stop ends that earlier."""
SAMPLE = 0.12
"""Seconds of a layer in a sample of text (estimate): its 200 tokens come one after another, for all
prompts at once."""
MISSED = 0.02
"""Share of the time by which a forecast of the end may miss it. That is less than the 5 % that
docs/optimizers.md promises, as what changes after the last settling comes on top."""
NOISE = 0.1
"""Share of the time that is left by which it may miss in addition. Steps do not all take the same,
and an early forecast is corrected in time."""
CHECKS = 200
"""How often a run looks at its forecast."""
SETTLINGS = 50
"""Most settlings of a run: one in each of so many parts, of `FEWEST` steps or more."""
WINDOWS = 16
"""The typical step is the median of so small a part of the run, of `FEWEST` to `KEPT` steps."""
FEWEST = 5
NEWEST = 3
"""Saves and samples whose median is typical: they are rare, and older ones are of another speed.
Steps before an evaluation with which it is compared."""
REST = 0.02
"""Share of the time for the rest of the decay, once the time is over."""


class Costs(NamedTuple):
    """What one of each takes, in seconds; fields of the event `length`."""

    step_seconds: float
    evaluation_seconds: float
    save_seconds: float
    sample_seconds: float


class Length(NamedTuple):
    """The number of steps of a run, and what it follows from."""

    steps: int
    passed_seconds: float
    costs: Costs


def settle_minutes(
    config: TrainingConfig, saved: Checkpoint | None, has_schedule: bool
) -> TrainingConfig:
    """The configuration of a GPT run; of a resumed one whose number of steps is known, with that
    number. Raises: UserError for a class that `has_schedule`, its own."""
    length = {}
    if saved:
        section = saved.config["train"]
        length = {name: section.get(name) for name in ("steps", "epochs", "minutes")}
    if saved and not length["minutes"]:  # else it was stopped before
        kept = "the run keeps its number of steps; train.minutes counts in a new run only"
        print_line(f"note: {kept}")
        return config.model_copy(update={"train": config.train.model_copy(update=length)})
    if has_schedule:
        reason = "the class has a schedule of its own, which may depend on the number of steps"
        raise UserError("train.minutes", config.train.minutes, f"{reason}; set train.steps")
    return config


class RunLength:
    """The length of a new run of `train.minutes`. It is settled once enough steps are timed, and
    again where the forecast of the end misses the time."""

    def __init__(self, training: Training):
        config = training.run.config
        assert isinstance(config, TrainingConfig), "only a GPT has train.minutes"
        assert config.train.minutes, "a run without a number of steps has them"
        self._training = training
        self._minutes = config.train.minutes
        self._begun = time.monotonic()
        self._settled_at: int | None = None
        self._step_seconds = 0.0  # what a step took before the newest evaluation

    def follow(self) -> None:
        """Settles the length after a step, if it is time. Collective. Raises: UserError if the time
        was over before the length was known."""
        run = self._training.run
        if run.progress.pending.evaluate:
            self._step_seconds = self._training.stop.typical("step", NEWEST)
        is_first = self._settled_at is None
        if not self._is_timed() if is_first else not self._is_checked():
            return
        if is_first:
            run.progress.pending.save = True
        length = on_main(self._first_length if is_first else self._better_length)
        if length is None:
            return
        write_late_rows(self._training)  # they are of steps before
        before = run.progress.steps
        run.task.set_steps(length.steps, run.step)
        run.progress.steps = length.steps
        self._settled_at = run.step
        self._record(length, before)

    def _is_timed(self) -> bool:
        """Whether the first length can be settled: the learning rate does not depend on it yet."""
        run = self._training.run
        pending = run.progress.pending
        # the first steps are slower
        ends_early = (pending.save or self._training.stop.is_agreed) and run.step > 4
        return ends_early or run.step >= min(TIMED, self._config.optim.decay_begins - 1)

    def _is_checked(self) -> bool:
        """Whether all ranks look at the forecast after this step."""
        run = self._training.run
        steps = run.progress.steps
        assert steps, "the length was settled"
        return run.step < steps and run.step % max(steps // CHECKS, 1) == 0

    @property
    def _config(self) -> TrainingConfig:
        config = self._training.run.config
        assert isinstance(config, TrainingConfig)
        return config

    def _first_length(self) -> Length:
        """Raises: UserError if no further step fits."""
        run = self._training.run
        length = self._longest()
        if length.steps <= run.step:
            state = f"{length.passed_seconds:.0f} s have passed at step {run.step}"
            hint = f"{state}; choose a longer time, and the same command goes on"
            raise UserError("train.minutes", self._minutes, hint)
        return length

    def _better_length(self) -> Length | None:
        """Another length, if the forecast misses the time and the last change is long enough ago.
        None if the length stays."""
        step = self._training.run.step
        steps = self._training.run.progress.steps
        assert steps is not None
        assert self._settled_at is not None
        time_of_run = 60 * self._minutes
        length = self._longest()
        left = self._seconds_until(steps, length.costs)
        missed = length.passed_seconds + left - time_of_run
        is_late = length.passed_seconds > time_of_run
        # negative after a rollback
        is_recent = 0 <= step - self._settled_at < max(steps // SETTLINGS, FEWEST)
        if abs(missed) <= MISSED * time_of_run + NOISE * left or (is_recent and not is_late):
            return None
        # the rest of the decay needs some steps even if no time is left
        newest = self._training.stop.typical("step", NEWEST)
        rest = max(int(REST * time_of_run / newest), 1)
        end = max(length.steps, min(step + rest, steps))
        return length._replace(steps=end) if end != steps else None

    def _longest(self) -> Length:
        """The most steps that fit: at least those that were taken."""
        costs = self._costs()
        step = self._training.run.step
        passed = time.monotonic() - self._begun
        left = 60 * self._minutes - passed
        ends = range(step + 1, step + 2 + max(int(left / costs.step_seconds), 0))
        fitting = bisect_right(ends, left, key=lambda end: self._seconds_until(end, costs))
        return Length(step + fitting, passed, costs)

    def _seconds_until(self, end: int, costs: Costs) -> float:
        """Seconds from now to the end of a run of so many steps: what is pending, the steps, and
        what follows them."""
        config = self._config
        pending = self._training.run.progress.pending
        step = self._training.run.step
        checkpoints = config.checkpoint.every
        if self._training.interval:
            checkpoints = min(checkpoints, self._training.interval.every or checkpoints)
        evaluations = config.eval.every

        def due(every: int) -> int:
            """How often work is due that follows each `every`-th step, and the last one."""
            return (end - 1) // every - step // every + 1

        saves = due(checkpoints)
        if config.eval.patience is not None:  # each evaluation may be the best, which is saved
            saves += due(evaluations) - due(math.lcm(checkpoints, evaluations))
        samples = config.tracking.sample_every
        return (
            costs.step_seconds * (end - step)
            + costs.evaluation_seconds * (due(evaluations) + pending.evaluate)
            + costs.save_seconds * (saves + pending.save)
            + costs.sample_seconds * ((due(samples) if samples else 0) + pending.sample)
        )

    def _costs(self) -> Costs:
        """What was measured, and estimates of what was not."""
        run = self._training.run
        config = self._config
        stop = self._training.stop
        step = self._typical_step()
        evaluation = stop.typical("evaluation", 1)
        if evaluation and self._step_seconds:  # a slower machine is slower there, too
            evaluation *= step / self._step_seconds
        else:
            evaluation = stop.typical("first evaluation")
            if not config.eval.tasks:
                # It may have compiled. Forward passes are a third of a step's work, so half a
                # step's time an evaluated token is ample.
                tokens = run.progress.scores.get("val_tokens") or 0.0
                share = tokens / (run.task.feed.step_size * run.task.units_per_item)  # of a step
                estimate = step * share / 2
                evaluation = min(evaluation or estimate, estimate)
        sample = stop.typical("sample", NEWEST) or SAMPLE * config.model.n_layer
        return Costs(step, evaluation, stop.typical("save", NEWEST), sample)

    def _typical_step(self) -> float:
        """Seconds of a recent step."""
        steps = self._training.run.progress.steps
        newest = min(max(steps // WINDOWS, FEWEST), KEPT) if steps else KEPT
        stop = self._training.stop
        return stop.typical("step", newest) or stop.typical("first step")

    def _record(self, length: Length, before: int | None) -> None:
        run = self._training.run
        event = {"event": "length", "step": run.step, "steps": length.steps}
        event |= {"minutes": self._minutes, "passed_seconds": length.passed_seconds}
        event |= length.costs._asdict()
        run.log.append(event | {"config": run.config.model_dump(mode="json")})
        run.log.write_config(run.config)
        instead = f" instead of {before:,}" if before else ""
        figures = f"{length.steps:,} steps{instead} at {length.costs.step_seconds:.3g} s each"
        minutes = f"train.minutes = {self._minutes:g}"
        included = "evaluations and checkpoints included"
        self._training.metrics.print(f"{minutes}: {figures}, {included}")
