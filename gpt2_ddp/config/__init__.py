"""What can be configured: the keys of YAML files, flags, `--help` and the snapshots in run folders all come from here
(`cli` and `yaml_file` read them, `mistakes` words what is wrong). `base` has what all configurations share, `run` what
all trainings share, `training` the main job, `jobs` the small ones, `tools` everything else; `kinds` knows whose
configuration is which. No torch: `--help` answers at once."""
