"""Resume checks: whether a configuration continues the training of a checkpoint."""

from pathlib import Path

from accelerate import Accelerator

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.config.base import complete, differences
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError


def resolve_start(
    config: RunConfig, own: Checkpoint | None, accelerator: Accelerator
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Checks that a run may resume from `own`, its newest checkpoint. Collective. Raises: UserError, on every rank, if
    the configuration is of another training.

    Returns:
        For a new run with `train.branch_from`: the parent's checkpoint, and the branch's first one. Else (None, None).
    """
    for field in check_resumable(config, own) if own else ():
        accelerator.print(f"note: {field} of the run's configuration is not known any more, and ignored")
    if config.branch_from and own and config.branch_from != own.config["train"].get("branch_from"):
        accelerator.print("note: train.branch_from is for a new run; this one has checkpoints of its own")
    if not config.branch_from or own:
        return None, None
    from gpt2_ddp.training.branch import find_parent

    return on_main(accelerator, lambda: find_parent(config))


def check_resumable(config: RunConfig, saved: Checkpoint) -> list[str]:
    """Checks that `config` continues the training of `saved`: the fields in `kept` must be equal. A field newer than
    `saved` has its default there; null means the saved value. Returns the fields of the saved configuration that
    are unknown now. Raises: UserError, which names every field that differs."""
    if saved.kind != config.kind:
        hint = f"is a run of another kind, {saved.kind}; choose another run_name"
        raise UserError("run_name", config.run_name, hint)
    mistakes = []
    for name, now, before in differences(config, saved.config, config.kept):
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
