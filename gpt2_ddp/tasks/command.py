"""The command of a small job. Imports no torch, as its processes do that."""

from pathlib import Path

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.distributed.environment import exit_code
from gpt2_ddp.distributed.spawn import run_processes
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.tasks.ending import print_end


def start_job(config: JobConfig) -> int:
    """Trains a small job in `launch.processes` processes, and prints its scores and, of a
    regression, the line. Returns the exit code."""
    outcome = run_processes(_train, config.launch.processes, config)
    if outcome == "completed":
        print_end(Path(config.output_dir, config.run_name), "evaluate")
    return exit_code(outcome)


def _train(config: JobConfig) -> str:
    # torch, which the process that starts the ranks does not load
    from safetensors.torch import load_file  # noqa: PLC0415

    from gpt2_ddp.tasks.jobs import run_job  # noqa: PLC0415

    result = run_job(config)
    if result.outcome == "completed" and is_main_process():
        scores = {name: value for name, value in result.metrics.items() if name != "val_samples"}
        if config.kind == "regression" and result.checkpoint:
            weights = load_file(result.checkpoint / "model.safetensors")
            line = {name.removeprefix("linear."): value.item() for name, value in weights.items()}
            scores = line | scores
        texts = [f"{name} {value:.5g}" for name, value in scores.items()]
        print(", ".join([*texts, f"{result.seconds:.1f} s"]))
    return result.outcome
