"""Checkpoints: written, verified, kept, loaded."""
