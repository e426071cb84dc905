"""Measure the speed of a step and of a checkpoint next to baselines, in alternation; or what
trainers and compressors make of a text.

    python -m benchmarks  # both speeds
    python -m benchmarks step --nanogpt ../nanoGPT
    python -m benchmarks own_text book.txt --nanogpt ../nanoGPT --minutes 4.67

docs/benchmarks.md explains each benchmark and has the newest tables.
"""

import sys

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks"
    if sys.argv[1:2] == ["own_text"]:
        from benchmarks.own_text import OwnTextConfig

        sys.argv[0:2] = ["python -m benchmarks own_text"]
        run_command(OwnTextConfig, "benchmarks.own_text:compare_trainers")
    run_command(BenchmarkConfig, "benchmarks.harness:run_benchmarks")
