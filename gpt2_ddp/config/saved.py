"""The kinds of runs and their configuration classes."""

from typing import Any

from gpt2_ddp.config.help import complete
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError

CONFIGS: dict[str, type[RunConfig]] = {config.kind: config for config in (TrainingConfig, *JobConfig.__subclasses__())}


def read_config(kind: str, saved: dict[str, Any], place: object) -> RunConfig:
    """The configuration of a run, from its config.yaml. Missing fields get defaults, unknown fields are dropped.
    Raises: UserError, which names the file `place`, for an unknown kind or an invalid value."""
    if kind not in CONFIGS:
        hint = f"{place} holds an unknown kind of run; this release supports {', '.join(CONFIGS)}"
        raise UserError("kind", kind, hint)
    try:
        return CONFIGS[kind].model_validate(complete(CONFIGS[kind], saved))
    except UserError as error:
        mistakes = [f"in {place}: {mistake}; restore the run's original file" for mistake in error.mistakes]
        raise UserError.join(mistakes) from error
