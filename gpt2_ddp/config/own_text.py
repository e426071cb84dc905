"""The rule for a text of one's own (`own_text: true`). What neither a file nor a flag gives follows
from the size of the text, the speed of the machine, and the time.

    time x speed ────▶ FLOPs of the run ─▶ shape: layers, width, heads, context
    FLOPs / shape ───▶ tokens to train on ─▶ passes over the text ─▶ dropout
    tokens ──────────▶ step: tokens of a batch, learning rates, warm-up, evaluations

docs/own-text.md has the measurements behind the constants.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from gpt2_ddp.config.base import Command, Section, flat, nested

# TrainingConfig, which imports this module, or a subclass
ConfigT = TypeVar("ConfigT", bound=Command)

MINUTES = 30.0
"""Time of a run whose length nothing gives."""
SHAPES = (
    (2, 128),
    (3, 160),
    (4, 192),
    (5, 256),
    (6, 320),
    (6, 384),
    (8, 512),
    (10, 640),
    (12, 768),
)
"""Layers and widths to choose from. The last is that of GPT-2 (124M)."""
HEAD = 64
"""Width of an attention head, if it divides the model's."""
CHOSEN = {
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "model.dropout",
    "model.tie_word_embeddings",
    "optim.lr",
    "optim.muon_lr",
    "optim.weight_decay",
    "optim.warmup_steps",
    "train.steps",
    "train.epochs",
    "train.minutes",
    "train.global_batch_tokens",
    "train.micro_batch_size",
    "eval.every",
    "checkpoint.every",
    "tracking.log_every",
    "tracking.sample_every",
}
"""The fields that the rule chooses."""


PARAMETERS = 2.2e6
WORK = 5e13
GROWTH = 0.45
"""Active parameters that suit a run of so many FLOPs, and their growth with those."""
CONTEXTS = (256, 512)
WIDE = 192
"""Context in tokens; the second for wider models. These are for longer runs: of 3 million tokens, a
model does not learn to use it."""
LEAST_WINDOWS = 64
"""Fewest windows of a text."""
TIED_PASSES = 5
TIED_KINDS = ("llama", "qwen3")
"""Most passes over the text with an embedding and a head of their own. Above, the head is the
embedding in these architectures, and the model overfits less."""
DROPOUTS = ((16, 0.0), (30, 0.1), (math.inf, 0.2))
"""Most passes over the text, and the dropout for them."""
MOST_PASSES = 40.0
"""Passes over the text after which a run ends, although time is left: it would learn the text by
heart."""
SMALLEST_BATCH = 4096
WORK_TOKENS = 4e6
BATCH_GROWTH = 0.5
"""Tokens of a step, and their growth with the tokens of a run above so many."""
LR = 0.02
"""AdamW's learning rate beside Muon, for a width of 192; inverse to the root of the width."""
MUON_LR = 0.012
MEMORY = 0.4
"""Weight decay is chosen so that it forgets. What it leaves of the weights of earlier steps falls
to 1/e in 1 / (rate x decay) steps: this share of the run, or of a pass over the text if that is
less. So text that is read often is forgotten in between (Wang and Aitchison, 2024, "How to set
AdamW's weight decay as you scale model and dataset size")."""
MOST_DECAY = 2.5
"""Largest weight decay."""
ADAMW_LR = 2e-3
ADAMW_DECAY = 0.6
"""AdamW's learning rate and weight decay without Muon."""
WARM_UP = 0.03
"""Warm-up, as a share of the steps."""
FEWEST_WARM_UP = 12
"""Fewest steps of the warm-up with `train.minutes`, which times steps of it."""
EVALUATIONS = 8
ROWS = 80
"""Evaluations and rows of a run."""


class Text(NamedTuple):
    """A text: the tokens of its training split, and the size of its vocabulary."""

    tokens: int
    vocab_size: int


class Machine(NamedTuple):
    """The speed of training of all ranks together, in FLOP/s, and their number."""

    speed: float
    ranks: int = 1


TYPICAL_TEXT = Text(1_000_000, 4096)
TYPICAL_MACHINE = Machine(2e11)
"""By these, a command line is checked before the data are known."""


class Choice(NamedTuple, Generic[ConfigT]):
    """A configuration that the rule has completed.

    Attributes:
        parameters: those that take part in each token: of the matrices and the head.
        tokens: to train on, if training is as fast as was assumed.
    """

    config: ConfigT
    parameters: int
    tokens: float


def given_fields(config: Command) -> dict[str, Any]:
    """The values of the fields of sections that a file or a flag gives, by dotted names, without
    null."""
    values: dict[str, Any] = {}
    for name, section in config:
        if isinstance(section, Section):
            given = section.model_dump(include=section.model_fields_set)
            values |= {f"{name}.{field}": value for field, value in given.items()}
    return {name: value for name, value in values.items() if value is not None}


def choose(config: ConfigT, text: Text, machine: Machine) -> Choice[ConfigT]:
    """The configuration with plain numbers in the fields of `CHOSEN` that neither a file nor a flag
    gives, and `own_text` off: later commands need no rule. Raises: UserError if the given fields
    contradict each other."""
    given = given_fields(config)
    length = _length(given)
    if not length["train.minutes"]:
        tokens = _known_tokens(given, length, text)
        shape = _shape(given, text, lambda count: 6 * count * tokens)
    else:
        work = 60 * length["train.minutes"] * machine.speed
        shape = _shape(given, text, lambda _: work)
        tokens = work / (6 * active_parameters(shape, text.vocab_size))
        if tokens > MOST_PASSES * text.tokens and "train.minutes" not in given:
            tokens = MOST_PASSES * text.tokens
            length = {"train.steps": None, "train.epochs": MOST_PASSES, "train.minutes": None}
    values = flat(config.model_dump())
    chosen: dict[str, Any] = shape | length | {"model.dropout": _dropout(tokens / text.tokens)}
    if tokens > TIED_PASSES * text.tokens and values["model.architecture"] in TIED_KINDS:
        chosen["model.tie_word_embeddings"] = True
    chosen |= _step(given, shape, tokens, machine.ranks, bool(length["train.minutes"]))
    if values["optim.name"] == "muon":
        rate = given.get("optim.muon_lr", MUON_LR)
        batch = chosen["train.global_batch_tokens"]
        chosen["optim.weight_decay"] = _weight_decay(rate, tokens / batch, text.tokens / batch)
    else:
        chosen |= {"optim.lr": ADAMW_LR, "optim.muon_lr": values["optim.muon_lr"]}
        chosen["optim.weight_decay"] = ADAMW_DECAY
    values |= chosen | given | {"own_text": False}
    sections = {name for name, section in config if isinstance(section, Section)}
    single = type(config).model_fields.keys() - sections
    complete = type(config).model_validate(nested(values, single))
    return Choice(complete, active_parameters(shape, text.vocab_size), tokens)


def describe_shape(layers: int, width: int) -> str:
    """1 layer of 64, 4 layers of 192."""
    return f"{layers} layer{'s' if layers > 1 else ''} of {width}"


def active_parameters(shape: Mapping[str, int], vocab_size: int) -> int:
    """Parameters that take part in each token: 12·C² in a layer, and the head."""
    width = shape["model.n_embd"]
    return 12 * shape["model.n_layer"] * width**2 + vocab_size * width


def _length(given: Mapping[str, Any]) -> dict[str, Any]:
    """The run's length, one of three: as it is given, or else up to the end of a decay that is
    given, or else `MINUTES`."""
    names = ("train.steps", "train.epochs", "train.minutes")
    length = {name: given.get(name) for name in names}
    if any(length.values()):
        return length
    if given.get("optim.decay_steps"):
        return length | {"train.steps": given["optim.decay_steps"]}
    return length | {"train.minutes": MINUTES}


def _known_tokens(given: Mapping[str, Any], length: Mapping[str, Any], text: Text) -> float:
    """Tokens to train on, of a length in passes or steps."""
    if length["train.epochs"]:
        return length["train.epochs"] * text.tokens
    steps = length["train.steps"]
    if "train.global_batch_tokens" in given:
        return float(steps * given["train.global_batch_tokens"])
    tokens = float(steps * SMALLEST_BATCH)
    # a batch grows with the root of the tokens, so this ends
    while (more := float(steps * batch_tokens(tokens, context=1))) > tokens:
        tokens = more
    return tokens


def _shape(given: Mapping[str, Any], text: Text, work: Callable[[int], float]) -> dict[str, int]:
    """Layers, width, heads and context. Of `SHAPES`, that whose active parameters are nearest to
    the number that suits the run. `work`: FLOPs of training so many of them."""

    def distance(shape: dict[str, int]) -> float:
        count = active_parameters(shape, text.vocab_size)
        wanted = PARAMETERS * (work(count) / WORK) ** GROWTH
        return abs(math.log(count / wanted))

    candidates = [_complete_shape(given, layers, width) for layers, width in SHAPES]
    shape = min(candidates, key=distance)
    return shape | {"model.block_size": _context(given, shape, text)}


def _complete_shape(given: Mapping[str, Any], layers: int, width: int) -> dict[str, int]:
    """A shape with the fields that are given, and heads that divide its width."""
    layers = given.get("model.n_layer", layers)
    heads = given.get("model.n_head")
    key_heads = given.get("model.n_kv_head") or 1
    if "model.n_embd" in given:
        width = given["model.n_embd"]
    elif heads:
        width = max(1, round(width / (2 * heads))) * 2 * heads
    if not heads:
        # the number of heads nearest to width / HEAD, each of an even width
        fitting = [n for n in range(key_heads, width + 1, key_heads) if width % (2 * n) == 0]
        heads = min(fitting or [key_heads], key=lambda n: abs(width / n - HEAD))
    return {"model.n_layer": layers, "model.n_embd": width, "model.n_head": heads}


def _context(given: Mapping[str, Any], shape: Mapping[str, int], text: Text) -> int:
    """Tokens of a window: a divisor of the batch that is given, and of little text a part."""
    if "model.block_size" in given:
        return given["model.block_size"]
    longest = min(CONTEXTS[shape["model.n_embd"] > WIDE], max(text.tokens // LEAST_WINDOWS, 1))
    any_power = 2**20  # without a given batch, a power of two divides all that the rule chooses
    batch = given.get("train.global_batch_tokens", any_power)
    return max(size for size in range(1, longest + 1) if batch % size == 0)


def _dropout(passes: float) -> float:
    """Dropout by the passes over the text."""
    return next(rate for most, rate in DROPOUTS if passes <= most)


def _weight_decay(rate: float, steps: float, steps_of_pass: float) -> float:
    """Muon's weight decay at this learning rate."""
    remembered = MEMORY * min(steps, steps_of_pass)
    return round(min(1 / (rate * remembered), MOST_DECAY), 2)


def _step(
    given: Mapping[str, Any], shape: Mapping[str, int], tokens: float, ranks: int, has_time: bool
) -> dict[str, Any]:
    """Batch, learning rates, warm-up, and the steps between evaluations, checkpoints, rows and
    samples."""
    context = shape["model.block_size"]
    batch = given.get("train.global_batch_tokens", batch_tokens(tokens, context, ranks))
    steps = tokens / batch
    scale = (192 / shape["model.n_embd"]) ** 0.5
    every = _round(steps / EVALUATIONS)
    fewest = FEWEST_WARM_UP if has_time else 1
    return {
        "train.global_batch_tokens": batch,
        "train.micro_batch_size": "auto",
        "optim.lr": LR * scale,
        "optim.muon_lr": MUON_LR,
        "optim.warmup_steps": max(round(steps * WARM_UP), fewest),
        "eval.every": every,
        "checkpoint.every": every,
        "tracking.log_every": _round(steps / ROWS),
        "tracking.sample_every": every * EVALUATIONS // 2,
    }


def batch_tokens(tokens: float, context: int, ranks: int = 1) -> int:
    """Tokens of a step of a run of so many tokens: windows of `context` tokens, one for each rank
    or more."""
    power = round(math.log2(SMALLEST_BATCH * max(tokens / WORK_TOKENS, 1) ** BATCH_GROWTH))
    return max(2**power // context, ranks, 1) * context


def _round(number: float) -> int:
    """A round number near to it: 1, 2, 5, 10, 20 ..."""
    power = 10 ** math.floor(math.log10(max(number, 1)))
    return min(
        (power, 2 * power, 5 * power, 10 * power), key=lambda n: abs(math.log(n / max(number, 1)))
    )
