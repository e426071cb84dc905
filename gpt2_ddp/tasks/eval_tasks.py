"""Items of `eval.tasks`, which a training scores in each evaluation (docs/evaluation.md)."""

from collections.abc import Iterator, Mapping

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.scoring.items import ItemSet
from gpt2_ddp.scoring.sources import load_sets


def load_items(config: TrainingConfig, tokenizer: Tokenizer, streams: list[TokenStream]) -> list[ItemSet]:
    """Items of each task.

    Args:
        streams: validation splits; `cloze` items are cut from the first.

    Raises:
        UserError: a task cannot be read, or no folder has a validation split.
    """
    tasks = config.eval.tasks
    if not streams:
        where = " ".join(config.data.paths)
        hint = f"are scored where the validation split is, and {where} has none; leave them away"
        raise UserError("eval.tasks", ", ".join(tasks), hint)
    try:
        return load_sets(tasks, config.eval.task_items, tokenizer, config.model.block_size, lambda: streams[0])
    except UserError as error:
        raise UserError.join([f"eval.{mistake}" for mistake in error.mistakes]) from error


def describe_items(sets: list[ItemSet], saved: Mapping[str, str]) -> Iterator[str]:
    """Notes on each task: its items, and whether they changed since the saved run.

    Args:
        saved: SHA-256 of the saved run's items, by task.
    """
    for items in sets:
        chance = "" if items.chance is None else f", of which guessing gets {items.chance:.1%}"
        yield f"{items.name} is scored on {len(items.items):,} items{chance}"
        if saved.get(items.name, items.sha256) != items.sha256:
            yield f"the items of {items.name} are others than before; scores do not compare with earlier rows'"
