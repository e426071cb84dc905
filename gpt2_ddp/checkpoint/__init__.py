"""Checkpoints and the run folder: writing, verifying, keeping; metrics and trackers."""
