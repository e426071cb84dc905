"""The kinds of runs, and their configurations as a run or a checkpoint recorded them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpt2_ddp.config.base import Command, Section, flat, nested, open_sections
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.own_settings import OWN
from gpt2_ddp.config.own_text import CHOSEN, given_fields
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError

TrainingT = TypeVar("TrainingT", bound=TrainingConfig)
SETTLED_AGAIN = "train.micro_batch_size"
"""The field of `CHOSEN` for which each start keeps the recorded number, if that fits its memory."""
CONFIGS: dict[str, type[RunConfig]] = {
    config.kind: config for config in (TrainingConfig, *JobConfig.__subclasses__())
}


def read_config(kind: str, saved: dict[str, Any], file: object) -> RunConfig:
    """The configuration of a run, from its config.yaml. Missing fields get defaults, unknown fields
    are dropped. Raises: UserError, which names `file`, for an unknown kind or an invalid value."""
    if kind not in CONFIGS:
        hint = f"{file} holds an unknown kind of run; this release supports {', '.join(CONFIGS)}"
        raise UserError("kind", kind, hint)
    try:
        return CONFIGS[kind].model_validate(complete(CONFIGS[kind], saved))
    except UserError as error:
        hint = "restore the run's original file"
        mistakes = [f"in {file}: {mistake}; {hint}" for mistake in error.mistakes]
        raise UserError.join(mistakes) from error


def complete(command: type[Command], saved: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of `command` in a saved configuration of any release, as `dump` writes them,
    without validation. Newer fields have defaults, and so have empty texts, which older releases
    took for null. Fields that no longer exist are left out. `saved` is parsed output of `dump`."""
    values = flat(command.model_construct().model_dump(mode="json"))
    given = flat(saved)
    kept = {
        name: default if given.get(name, "") == "" else given[name]
        for name, default in values.items()
    }
    any_names = open_sections(command)
    kept |= {name: value for name, value in given.items() if name.startswith(any_names)}
    return nested(kept)


def with_recorded(config: TrainingT, saved: Mapping[str, Any]) -> TrainingT:
    """The configuration of a text of one's own that goes on. Fields that neither a file nor a flag
    gives are the saved run's, if the rule chooses them or a resume keeps them. So the same command
    resumes a run that an earlier release began with another preset."""
    given = given_fields(config)
    before = flat(complete(type(config), saved))
    kept = tuple(f"{part}." for part in (*config.kept, OWN) if part != "seed")
    names = {name for name in before if name in CHOSEN or f"{name}.".startswith(kept)}
    names -= given.keys()
    lengths = set(config.alternatives[0])
    if not lengths.isdisjoint(given):  # one of three is given: the others stay null
        names -= lengths
    recorded = {name: before[name] for name in sorted(names)}
    if SETTLED_AGAIN in names:
        recorded[SETTLED_AGAIN] = "auto"
    recorded = nested(recorded)
    sections = {
        name: type(section).model_validate(section.model_dump() | recorded.get(name, {}))
        for name, section in config
        if isinstance(section, Section)
    }
    for name, section in sections.items():
        set_before = getattr(config, name).model_fields_set
        section.model_fields_set.intersection_update(set_before | recorded.get(name, {}).keys())
    return config.model_copy(update=sections | {"own_text": False})


def differences(
    config: Command, saved: Mapping[str, Any], parts: tuple[str, ...]
) -> list[tuple[str, Any, Any]]:
    """(field, value, saved value) of the fields in `parts` (sections and fields) that differ."""
    before = flat(complete(type(config), saved))
    now = flat(config.model_dump(mode="json"))
    inside = tuple(f"{part}." for part in parts)
    names = [name for name in now if f"{name}.".startswith(inside) and name != "data.path"]
    return [(name, now[name], before[name]) for name in names if now[name] != before[name]]


def check_resumable(config: RunConfig, kind: str, saved: dict[str, Any], step: int) -> None:
    """Checks that this configuration can resume a checkpoint with the configuration `saved`. The
    fields in `kept` must be equal, except as `may_change` allows. Fields missing in `saved` have
    their defaults there. Unknown ones are ignored. Raises: UserError, which names every field that
    differs."""
    if kind != config.kind:
        hint = f"the run folder holds a run of another kind, {kind}; choose another run_name"
        raise UserError("run_name", config.run_name, hint)
    mistakes: list[str] = []
    for name, now, before in differences(config, saved, config.kept):
        if not config.may_change(name, before, step):
            file = Path(config.output_dir, config.run_name, "config.yaml")
            hint = f"the run was started with {before}; restore it (--config {file})"
            mistakes += UserError(name, now, f"{hint}, or choose another run_name").mistakes
    if mistakes:
        raise UserError.join(mistakes)
