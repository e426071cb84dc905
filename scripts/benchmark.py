"""Measure the speed of each part next to baselines, in alternation.

    python scripts/benchmark.py                    # all of them
    python scripts/benchmark.py step data          # some of them

docs/benchmarks.md explains each benchmark and has the newest tables.
"""

import sys

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.project import PROJECT

sys.path.insert(0, str(PROJECT))  # the folder of `benchmarks`

from benchmarks.config import BenchmarkConfig

if __name__ == "__main__":
    run_command(BenchmarkConfig, "benchmarks.harness:run_benchmarks")
