"""What a run goes on from: its own newest checkpoint, or another run's, where it branches off; and what has to stay."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from gpt2_ddp.checkpoint.checkpoint import MANIFEST, Checkpoint, find_checkpoint
from gpt2_ddp.config.base import complete, flat
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file

BRANCHES = "branches.jsonl"
"""In a run's folder: a line for each run that began with one of its checkpoints."""


def resolve_start(
    config: RunConfig, own: Checkpoint | None, accelerator: Accelerator
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Checks that a run may go on with its `own` newest checkpoint; for one without, the checkpoint of another run that
    it begins with now (`find_parent`), if it branches off. Collective.

    Raises:
        UserError: on every rank; it would be another training.
    """
    for field in check_resumable(config, own) if own else ():
        accelerator.print(f"note: {field} of the run's configuration is not known any more, and ignored")
    if config.branch_from and not own:
        return on_main(accelerator, lambda: find_parent(config))
    if config.branch_from and own and config.branch_from != own.config["train"].get("branch_from"):
        accelerator.print("note: train.branch_from is for a new run; this one has checkpoints of its own")
    return None, None


def check_resumable(config: RunConfig, saved: Checkpoint) -> list[str]:
    """Checks that going on with a run continues the same training: what its configuration has to keep (`kept`) is what
    the run was started with. A field that has come since has its default there; null means the run's own value.

    Returns:
        Fields that are gone since, so that nothing is known about them.

    Raises:
        UserError: naming every field that differs.
    """
    if saved.kind != config.kind:
        hint = f"is a run of another kind, {saved.kind}; choose another run_name"
        raise UserError("run_name", config.run_name, hint)
    mistakes = []
    for name, now, before in _differences(config, saved, config.kept):
        if now is not None and not config.may_change(name, before, saved.state.get("step", 0)):
            own = Path(config.output_dir, config.run_name, "config.yaml")
            hint = f"the run was started with {before}; give that back (--config {own}), or choose another run_name"
            if name.startswith("optim.") and hasattr(config.train, "branch_from"):
                way, what = ("init_from", "weights") if name == "optim.name" else ("branch_from", "training")
                hint += f" (train.{way} takes this one's {what} along)"
            mistakes += UserError(name, now, hint).mistakes
    if mistakes:
        raise UserError.join(mistakes)
    return complete(type(config), saved.config)[1]


def find_parent(config: RunConfig) -> tuple[Checkpoint, Checkpoint]:
    """The checkpoint, every file of it hashed, that a new run of this configuration branches off (`branch_from`).

    Returns:
        It, and as what the new run begins with it.

    Raises:
        UserError: there is none, or it is of another training than one that `config` goes on with; naming every field.
    """
    field, path = "train.branch_from", Path(config.branch_from or "")
    parent = find_checkpoint(path, field, weights=False)
    if parent.kind != config.kind:
        raise UserError(field, config.branch_from, f"is of a {parent.kind} run, and one of the same kind is wanted")
    kept = (*(part for part in config.kept if part != "optim"), "optim.name")
    hint = "give that back: a branch goes on with its training, under another schedule"
    hints = {"optim.name": "give that back, or take its weights alone along, by train.init_from"}
    mistakes = [
        mistake
        for name, now, before in _differences(config, parent, kept)
        for mistake in UserError(
            name, now, f"{parent.path} was trained with {before}; {hints.get(name, hint)}"
        ).mistakes
    ]
    if mistakes:
        raise UserError.join(mistakes)
    parent = find_checkpoint(path, field)  # the long work: it may be an older one, of the same run
    return parent, branch_off(parent, config)


def branch_off(parent: Checkpoint, config: RunConfig) -> Checkpoint:
    """A new run's beginning: what it would have saved there, with the parent's weights and moments.

    Everything that the next step depends on is the parent's: the data's position, order digest and gaps, what the guard
    knows, the loss scaler, sums that are under way. Ids, rollbacks and what was owed or scored are the new run's own.
    """
    branched_from = {
        "from": str(parent.path),
        "run_id": parent.state.get("run_id"),
        "step": parent.state["step"],
        "checkpoint_sha256": sha256_file(parent.path / MANIFEST),
    }
    own = {"run_id": "", "rollbacks": 0, "owed": None, "branched_from": branched_from}
    own |= {"metrics_chain": None, "val_loss": None, "metrics": {}, "best_evaluation": None}
    return replace(parent, state=parent.state | own, config=config.model_dump(mode="json"))


def register_branch(parent: Checkpoint, run: Path, run_id: str) -> None:
    """Adds a line to the branches.jsonl of the parent's run, which may be running. Where that cannot be written, or the
    checkpoint stands in no run, only the branch knows of it."""
    checkpoints = parent.path.absolute().parent
    if checkpoints.name != "checkpoints":
        return
    row = {"step": parent.state["step"], "run": str(run), "run_id": run_id}
    try:
        with (checkpoints.parent / BRANCHES).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
    except OSError as error:
        file = checkpoints.parent / BRANCHES
        print(f"warning: {file} cannot be written ({error.strerror}): only {run} knows where it began", file=sys.stderr)


def describe_overrides(config: RunConfig, parent: Checkpoint) -> str:
    """Which settings of the optimizer and its schedule a branch has of its own, in words."""
    found = _differences(config, parent, ("optim",))
    return ", ".join(f"{name} {now} ({before} there)" for name, now, before in found) or "the same schedule"


def _differences(config: RunConfig, saved: Checkpoint, parts: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """The (field, value, saved value) that differ in these sections and fields."""
    before, now = flat(complete(type(config), saved.config)[0]), flat(config.model_dump(mode="json"))
    names = [name for name in now if any(name == part or name.startswith(f"{part}.") for part in parts)]
    return [(name, now[name], before[name]) for name in names if now[name] != before[name] and name != "data.path"]
