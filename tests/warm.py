"""What the server of tests/ranks.py computes once, for all ranks."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from gpt2_ddp.tasks.user_task import installed_packages

installed_packages()
get_checkpoint_conversion_mapping("gpt2")  # compiles 900 patterns
