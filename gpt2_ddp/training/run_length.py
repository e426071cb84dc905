"""`train.minutes`: times the first steps of a new run, and makes it a run of as many steps as fit.

What counts is a clock on the wall, from the evaluation before the first step to the checkpoint
after the last.
"""

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.cli import dump
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.training.start import Training

TIMED = 64
"""Steps that are timed, unless the warm-up is shorter. A checkpoint or a stop ends that earlier."""
SAMPLE = 0.12
"""Seconds of a layer in a sample of text (estimate): its 200 tokens come one after another, for all
prompts at once."""


def settle_minutes(config: Any, saved: Checkpoint | None, has_schedule: bool) -> Any:
    """The configuration of a GPT run; of a resumed one whose number of steps is known, with that
    number. Raises: UserError for a class that `has_schedule`, its own."""
    length = (
        {name: saved.config["train"].get(name) for name in ("steps", "epochs", "minutes")}
        if saved
        else {}
    )
    if saved and not length["minutes"]:  # else it was stopped before
        print_line(
            "note: the run keeps its number of steps; train.minutes counts in a new run only"
        )
        return config.model_copy(update={"train": config.train.model_copy(update=length)})
    if has_schedule:
        hint = "the class has a schedule of its own, which may depend on the number of steps; set train.steps"
        raise UserError("train.minutes", config.train.minutes, hint)
    return config


def settle_length(run: Training, begun: float) -> Training:
    """The run; once enough steps are timed, one of as many steps as fit, which is recorded. The
    learning rate does not depend on their number until then. `begun`: `time.monotonic()` before the
    first step. Collective. Raises: UserError if the time is over."""
    # the first ones are slower
    ends_early = (run.progress.pending.save or run.stop.is_agreed) and run.step > 4
    if run.step < min(TIMED, run.config.optim.decay_begins - 1) and not ends_early:
        return run
    found = on_main(partial(_measure, run, begun))
    task: Any = run.task
    length = task.config.train.model_copy(update={"steps": found["steps"], "minutes": None})
    task.config = task.config.model_copy(update={"train": length})
    task.resolve()
    run = replace(run, steps=found["steps"], config_yaml=dump(run.config))
    event = {"event": "length", "step": run.step, **found}
    run.log.append(event | {"config": run.config.model_dump(mode="json")})
    run.log.write_config(run.config)
    run.progress.pending.save = True
    figures = f"{found['steps']:,} steps at {found['step_seconds']:.3g} s each"
    run.metrics.print(
        f"train.minutes = {found['minutes']:g}: {figures}, evaluations and checkpoints included"
    )
    return run


def _saves_per_step(config: Any) -> float:
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


def _measure(run: Training, begun: float) -> dict[str, Any]:
    """The number of steps, and what it follows from. Raises: UserError if no further step fits."""
    config = run.config
    stop = run.stop
    task = run.task
    step_seconds = stop.typical("step") or stop.typical("first step")
    evaluation = stop.typical("evaluation")
    # the first evaluation may have compiled; forward passes are a third of a step's work
    if not config.eval.tasks:
        tokens = run.progress.scores.get("val_tokens") or 0.0
        share = tokens / (task.feed.step_size * task.units_per_item)  # of a step
        estimate = step_seconds * share / 2
        evaluation = min(evaluation or estimate, estimate)
    save = stop.typical("save")
    every = config.tracking.sample_every
    sample = SAMPLE * config.model.n_layer if every else 0.0
    each = (
        step_seconds
        + evaluation / config.eval.every
        + save * _saves_per_step(config)
        + sample / max(every, 1)
    )
    passed = passed_since(begun)
    steps = run.step + int((60 * config.train.minutes - passed - evaluation - save - sample) / each)
    if steps <= run.step:
        hint = f"{passed:.0f} s have passed at step {run.step}; choose a longer time, and the same command goes on"
        raise UserError("train.minutes", config.train.minutes, hint)
    return {
        "steps": steps,
        "minutes": config.train.minutes,
        "step_seconds": step_seconds,
        "evaluation_seconds": evaluation,
        "save_seconds": save,
    }
