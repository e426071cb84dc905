"""The command of a small job that has no script of its own. Imports no torch, as its processes do that."""

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.distributed.environment import exit_code, is_main_process
from gpt2_ddp.distributed.spawn import run_processes


def start_job(config: JobConfig) -> int:
    """Trains a small job in `launch.processes` processes; the exit code."""
    return exit_code(run_processes(_train, config.launch.processes, config))


def _train(config: JobConfig) -> str:
    from gpt2_ddp.tasks.jobs import run_job

    result = run_job(config)
    if result.outcome == "completed" and is_main_process():
        scores = [f"{name} {value:.4g}" for name, value in result.metrics.items() if name != "val_samples"]
        print(f"{', '.join(scores)}, {result.seconds:.1f} s")
    return result.outcome
