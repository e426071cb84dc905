"""The tasks that a user names, to items: `cloze`, `hellaswag` and `lambada` from the Hub, or a jsonl file."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.scoring.cloze import cut_items
from gpt2_ddp.scoring.items import Item, ItemSet, check_items, read_items
from gpt2_ddp.scoring.requests import make_set

HUB = {
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
}
"""Dataset, configuration and split of a task, as lm-eval has them (there, `lambada` is lambada_openai)."""


def load_sets(
    tasks: Sequence[str],
    most: int | None,
    tokenizer: Tokenizer,
    block_size: int,
    validation: Callable[[], TokenStream],
) -> list[ItemSet]:
    """The tasks, in their order, as requests to a model of this context.

    Args:
        tasks: names or files. A file's task is called by its name without the suffix.
        most: items of each, evenly spread; None for all.
        validation: opens the split that `cloze` is cut from.

    Raises:
        UserError: a task is not there, an item of it is none, or two tasks have one name.
    """
    sets: dict[str, ItemSet] = {}
    for task in tasks:
        name = task if task in HUB else re.sub(r"[^\w.-]", "_", Path(task).stem)
        if name in sets:
            raise UserError("tasks", task, f"there are two of the name {name}; rename the file, or leave one away")
        if task == "cloze":
            items = cut_items(validation(), tokenizer)
        else:
            items = _fetch(task) if task in HUB else read_items(Path(task))
        sets[name] = make_set(name, items, most, tokenizer, block_size)
    return [*sets.values()]


def _fetch(task: str) -> list[Item]:
    """From the Hub, or from what `datasets` has kept of it."""
    import datasets
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    dataset, subset, split = HUB[task]
    try:
        rows = datasets.load_dataset(dataset, subset, split=split)
    except (OSError, ValueError, HTTPError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = f"{dataset} cannot be read from the Hub ({reason}); a jsonl file of its rows needs no network"
        raise UserError("tasks", task, hint) from error
    return check_items(dataset, ((f"{dataset}, row {number}", dict(row)) for number, row in enumerate(rows)))
