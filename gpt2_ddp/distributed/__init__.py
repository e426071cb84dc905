"""Processes and ranks: launch, signals, collectives, the watchdog."""
