"""Branching: a new run that starts from a checkpoint of another run (`train.branch_from`)."""

from dataclasses import replace
from pathlib import Path

from gpt2_ddp.checkpoint.format import MANIFEST, Checkpoint, list_checkpoints, step_of
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.own_settings import OWN, recorded_settings
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.saved import differences
from gpt2_ddp.config.training import OptimConfig, TrainingConfig
from gpt2_ddp.distributed.ranks import runs_on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.state import LogEnd, Parent, Progress


@runs_on_main
def find_parent(config: TrainingConfig) -> Checkpoint:
    """The checkpoint of `train.branch_from`, every file hashed. Collective. Raises: UserError if
    there is none, or if fields that a branch must keep differ; names each of them. Or if no step is
    left after the parent's."""
    field = "train.branch_from"
    assert config.train.branch_from
    path = Path(config.train.branch_from)
    parent = find_checkpoint(path, field, weights=False)
    if parent.kind != config.kind:
        raise UserError(field, path, f"is of a {parent.kind} run; name one of a {config.kind} run")
    kept = (*(part for part in config.kept if part != "optim"), "optim.name")  # its own decay
    mistakes: list[str] = []
    for name, now, before in differences(config, parent.config, kept):
        hint = f"{parent.path} was trained with {before}, which a branch keeps; restore it"
        mistakes += UserError(name, now, hint).mistakes
    if mistakes:
        raise UserError.join(mistakes)
    # hashes all files; may find an older checkpoint of the run
    parent = find_checkpoint(path, field)
    steps = config.total_steps(parent.state.setup.epoch_size)
    if steps is not None and steps <= parent.step:
        field = "steps" if config.train.epochs is None else "epochs"
        hint = f"{parent.path} is at step {parent.step}, which counts; choose a larger value"
        raise UserError(f"train.{field}", getattr(config.train, field), hint)
    return parent


def advise_branch(run: Path, optim: OptimConfig) -> str:
    """The advice for a run whose learning rate stays 0: a branch, from before the decay if such a
    checkpoint is there."""
    begins = "with a decay of its own"
    parent = run
    for checkpoint in list_checkpoints(run / "checkpoints"):  # the newest is the last
        if 0 < step_of(checkpoint) <= optim.decay_begins:
            begins = "from before the decay"
            parent = checkpoint
    flags = f"--run_name NEW --train.branch_from {parent} --train.steps N --optim.decay_steps N"
    return f"to train further, start a branch {begins}: {flags}"


def branch_off(parent: Checkpoint, config: RunConfig) -> Checkpoint:
    """The first checkpoint of a new run, with the parent's weights and optimizer state.

    The state that the next step depends on is the parent's: position, order digest and skipped
    ranges, the guard's state, the loss scaler, unfinished sums. Ids, rollbacks, scores and pending
    work are the new run's.
    """
    sha256 = sha256_file(parent.path / MANIFEST)
    run_id = parent.state.progress.run_id
    branched_from = Parent(
        parent=str(parent.path), run_id=run_id, step=parent.step, checkpoint_sha256=sha256
    )
    progress = Progress(step=parent.step, branched_from=branched_from)
    state = parent.state.model_copy(update={"progress": progress, "log": LogEnd()})
    # the class compares its settings with the parent's
    own = recorded_settings(parent.config)
    return replace(parent, state=state, config=config.model_dump(mode="json") | {OWN: own})
