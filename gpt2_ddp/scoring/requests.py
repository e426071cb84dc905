"""Items to tokens, by lm-eval's rules (`TemplateLM._encode_pair` and `loglikelihood` of lm_eval 0.4)."""

from collections.abc import Iterator

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.scoring.items import Item, ItemSet, Request, digest


def make_set(name: str, items: list[Item], most: int | None, tokenizer: Tokenizer, block_size: int) -> ItemSet:
    """A task of these items, or of `most` of them, evenly spread. Raises: UserError for one that cannot be scored."""
    count = min(most or len(items), len(items))
    items = [items[index * len(items) // count] for index in range(count)]
    whole = [request for item in items for request in _requests(item, tokenizer, block_size)]
    requests = [Request(request.tokens[-block_size - 1 :], request.scored) for request in whole]
    cut = sum(len(request.tokens) > block_size + 1 for request in whole)
    return ItemSet(name, items, requests, digest(items), cut)


def _requests(item: Item, tokenizer: Tokenizer, block_size: int) -> Iterator[Request]:
    for number, choice in enumerate(item.choices):
        before, continuation = encode_pair(item.context, item.delimiter + choice, tokenizer, item.place)
        if not 0 < len(continuation) <= block_size:
            hint = f"choice {number} is {len(continuation)} tokens behind its context, of model.block_size {block_size}"
            raise UserError("tasks", item.place, f"{hint}; 1 or more that fit can be scored")
        yield Request(before + continuation, len(continuation))


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer, place: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows it. Blanks at the context's end move to the continuation, which is what
    the two together have behind the context's own tokens. The end-of-text token stands for an empty context, and is
    never before another one."""
    kept = context.rstrip()
    before, both = (tokenizer.encode(text, place).tolist() for text in (kept, context + continuation))
    return (before, both[len(before) :]) if kept else ([tokenizer.eot], both)
