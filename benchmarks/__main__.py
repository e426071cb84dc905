"""Measure the speed of a step and of a checkpoint next to baselines, in alternation; or what
trainers and compressors make of a text.

    python -m benchmarks  # both speeds
    python -m benchmarks step --nanogpt ../nanoGPT
    python -m benchmarks own_text book.txt --nanogpt ../nanoGPT --minutes 4.67

docs/benchmarks.md explains each benchmark and has the newest tables.
"""

import runpy
import sys

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    if sys.argv[1:2] == ["own_text"]:
        del sys.argv[1]
        runpy.run_module("benchmarks.own_text", run_name="__main__")
    sys.argv[0] = "python -m benchmarks"
    run_command(BenchmarkConfig, "benchmarks.harness:run_benchmarks")
