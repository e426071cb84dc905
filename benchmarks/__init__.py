"""Benchmarks of each part, next to baselines. `scripts/benchmark.py NAME` runs the module NAME."""
