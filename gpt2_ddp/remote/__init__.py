"""Runs and data at URLs."""
