"""Losses of windows, and scores of evaluation tasks."""
