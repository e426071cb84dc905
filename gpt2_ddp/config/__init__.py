"""What can be configured: the keys of YAML files, flags, `--help` and the snapshots in run folders all come from here
(`cli` and `yaml_file` read them). `base` has what all configurations share, `training` the main job, `jobs` the small
ones, `tools` everything else; `kinds` knows whose configuration is which. No torch: `--help` answers at once."""
