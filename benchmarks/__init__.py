"""Benchmarks of each part, next to baselines. `python -m benchmarks NAME` runs the module NAME."""
