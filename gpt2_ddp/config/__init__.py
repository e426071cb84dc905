"""Configuration: one description of the YAML keys, flags, `--help` and the snapshots in run
folders. No torch."""
