"""How fast each part is, side by side with its peers (scripts/benchmark.py)."""
