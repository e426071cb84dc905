"""A training run: the loop, its state, the guard and the stop request."""
