"""How fast each part is, side by side with its peers: A and B in turn, in one run.

    python scripts/benchmark.py                    # all that can be measured here
    python scripts/benchmark.py step data          # some of them

docs/benchmarks.md says what each one measures, and has the newest tables.
"""

from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.cli import run_command


def main(config: BenchmarkConfig) -> None:
    from gpt2_ddp.benchmark.benchmark import run_benchmarks

    run_benchmarks(config)


if __name__ == "__main__":
    run_command(BenchmarkConfig, main)
