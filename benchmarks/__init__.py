"""Benchmarks of each part, side by side with baselines. `scripts/benchmark.py NAME` runs the module NAME."""
