"""The built-in task, which needs no network: what follows here in the validation split?

Places are spread evenly over the split, 1,000 of them or as many as fit. From each, 64 tokens are the context and the
next 8 what follows it; the three other choices are what follows at the next places, where it is something else. A place
gives no item where a document begins in it, where the cut goes through a character, or where 8 blanks follow. The right
choice of item i is number i mod 4, so that guessing comes to 25%.
"""

from itertools import chain, islice

import numpy as np

from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.scoring.items import Item

PLACES, CONTEXT, CONTINUATION, CHOICES = 1000, 64, 8, 4
BROKEN = "\ufffd"
"""What bytes that are no whole character decode to."""


def cut_items(stream: TokenStream, tokenizer: Tokenizer) -> list[Item]:
    """The same items for the same tokens. Raises: UserError where the split has too few places."""
    length = CONTEXT + CONTINUATION
    count = min(PLACES, len(stream) // length)
    rows = stream.read(np.arange(count) * len(stream) // max(count, 1), length)
    cuts = [
        (tokenizer.decode(row[:CONTEXT]), tokenizer.decode(row[CONTEXT:])) for row in rows if tokenizer.eot not in row
    ]
    pairs = [(before.lstrip(BROKEN), after.rstrip(BROKEN)) for before, after in cuts]
    pairs = [(before, after) for before, after in pairs if BROKEN not in before + after and after.strip()]
    items = []
    for number, (before, right) in enumerate(pairs):
        following = chain(pairs[number + 1 :], pairs[:number])
        others = dict.fromkeys(after for _, after in following if after != right)
        choices = [*islice(others, CHOICES - 1)]
        if len(choices) < CHOICES - 1:
            items.clear()
            break
        choices.insert(number % CHOICES, right)
        items.append(Item(before, tuple(choices), number % CHOICES, "", f"cloze, item {number}"))
    if not items:
        hint = f"cuts items of {length} tokens, and the validation split has {len(stream):,}; prepare more text"
        raise UserError("tasks", "cloze", hint)
    return items
