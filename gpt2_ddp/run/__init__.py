"""A training run: the loop, and what is kept of it."""
