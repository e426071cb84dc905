"""Measure the speed of each part next to baselines, in alternation.

    python -m benchmarks                    # lists the benchmarks
    python -m benchmarks step roofline      # runs two of them

docs/benchmarks.md explains each benchmark and has the newest tables.
"""

import sys

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.config.cli import run_command

if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks"
    run_command(BenchmarkConfig, "benchmarks.harness:run_benchmarks")
