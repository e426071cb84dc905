"""The command of a small job. Imports no torch, as its processes do that."""

from collections.abc import Callable
from typing import Any

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.distributed.environment import exit_code, is_main_process
from gpt2_ddp.distributed.spawn import run_processes


def all_scores(result: Any) -> str:
    """The scores of a `training.loop.Result` as text."""
    return ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items() if name != "val_samples")


def start_job(config: JobConfig, summary: Callable[[Any], str] = all_scores) -> int:
    """Trains a small job in `launch.processes` processes, and prints the module's function `summary` of the result.
    Returns the exit code."""
    return exit_code(run_processes(_train, config.launch.processes, config, summary))


def _train(config: JobConfig, summary: Callable[[Any], str]) -> str:
    from gpt2_ddp.tasks.jobs import run_job

    result = run_job(config)
    if result.outcome == "completed" and is_main_process():
        print(f"{summary(result)}, {result.seconds:.1f} s")
    return result.outcome
