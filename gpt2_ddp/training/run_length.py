"""`train.minutes`: times the first steps of a new run, and makes it a run of as many steps as fit.

What counts is a clock on the wall, from the evaluation before the first step to the checkpoint
after the last.
"""

import math
import time
from functools import partial
from typing import NamedTuple

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.training.start import Training

TIMED = 64
"""Steps that are timed, unless the warm-up is shorter. A checkpoint or a stop ends that earlier."""
SAMPLE = 0.12
"""Seconds of a layer in a sample of text (estimate): its 200 tokens come one after another, for all
prompts at once."""


class Length(NamedTuple):
    """The number of steps of a run, and what it follows from; the fields of the event `length`."""

    steps: int
    minutes: float
    step_seconds: float
    evaluation_seconds: float
    save_seconds: float


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


def settle_length(training: Training, begun: float) -> None:
    """Once enough steps are timed, sets the number of steps of the run, and records it. The
    learning rate does not depend on their number until then. `begun`: `time.monotonic()` before the
    first step. Collective. Raises: UserError if the time is over."""
    run = training.run
    config = _config_of(training)
    # the first steps are slower
    ends_early = (run.progress.pending.save or training.stop.is_agreed) and run.step > 4
    if run.step < min(TIMED, config.optim.decay_begins - 1) and not ends_early:
        return
    length = on_main(partial(_measure, training, begun))
    run.task.set_steps(length.steps)
    run.progress.steps = length.steps
    event = {"event": "length", "step": run.step, **length._asdict()}
    run.log.append(event | {"config": run.config.model_dump(mode="json")})
    run.log.write_config(run.config)
    run.progress.pending.save = True
    figures = f"{length.steps:,} steps at {length.step_seconds:.3g} s each"
    text = f"train.minutes = {length.minutes:g}: {figures}, evaluations and checkpoints included"
    training.metrics.print(text)


def _config_of(training: Training) -> TrainingConfig:
    config = training.run.config
    assert isinstance(config, TrainingConfig), "only a GPT has train.minutes"
    return config


def _saves_per_step(config: TrainingConfig) -> float:
    """The most checkpoints a step. With `eval.patience`, each evaluation may be the best, which is
    saved."""
    every = config.checkpoint.every
    evaluations = config.eval.every
    if config.eval.patience is None:
        return 1 / every
    return 1 / every + 1 / evaluations - 1 / math.lcm(every, evaluations)


def passed_since(begun: float) -> float:
    """Seconds since then."""
    return time.monotonic() - begun


def _measure(training: Training, begun: float) -> Length:
    """The number of steps, and what it follows from. Raises: UserError if no further step fits."""
    run = training.run
    config = _config_of(training)
    minutes = config.train.minutes
    assert minutes, "the length is settled once"
    stop = training.stop
    step = stop.typical("step") or stop.typical("first step")
    save = stop.typical("save")
    evaluation = stop.typical("evaluation")
    if not config.eval.tasks:
        # The first evaluation may have compiled. Forward passes are a third of a step's work, so
        # half a step's time an evaluated token is ample.
        tokens = run.progress.scores.get("val_tokens") or 0.0
        share = tokens / (run.task.feed.step_size * run.task.units_per_item)  # of a step
        estimate = step * share / 2
        evaluation = min(evaluation or estimate, estimate)
    every = config.tracking.sample_every
    sample = SAMPLE * config.model.n_layer if every else 0.0
    evaluations = evaluation / config.eval.every
    saves = save * _saves_per_step(config)
    samples = sample / max(every, 1)
    seconds_of_each = step + evaluations + saves + samples
    passed = passed_since(begun)
    left = 60 * minutes - passed - evaluation - save - sample
    steps = run.step + int(left / seconds_of_each)
    if steps <= run.step:
        state = f"{passed:.0f} s have passed at step {run.step}"
        hint = f"{state}; choose a longer time, and the same command goes on"
        raise UserError("train.minutes", minutes, hint)
    return Length(steps, minutes, step, evaluation, save)
