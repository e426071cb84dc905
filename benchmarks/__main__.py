"""Measure the speed of a step and of a checkpoint next to baselines, in alternation.

    python -m benchmarks  # both
    python -m benchmarks step --nanogpt ../nanoGPT

docs/benchmarks.md explains each benchmark and has the newest tables.
"""

import sys

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks"
    run_command(BenchmarkConfig, "benchmarks.harness:run_benchmarks")
