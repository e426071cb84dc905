"""Ladders of runs that were not trained, for tests: their losses follow a law."""

from gpt2_ddp.config.own_text import active_parameters
from gpt2_ddp.evaluation.forecast import worth_of
from gpt2_ddp.evaluation.ladder import VERSION, Ladder, Rung

CURVE = ((0.25, 1.2), (0.5, 1.1), (0.75, 1.03))
"""How far each run is above its end."""
SIZES = ((2, 96), (2, 128), (3, 160), (4, 192))


def make_ladder(base=1e-5, each=5e-11, text_tokens=1_200_000, **fields):
    """A ladder of 13 runs. `base` and `each`: seconds of a token, and of a parameter in it."""
    rungs = []
    for (layers, width), lengths in zip(SIZES, (4, 4, 3, 2), strict=True):
        shape = {"model.n_layer": layers, "model.n_embd": width}
        parameters = active_parameters(shape, 2048)
        for power in range(lengths):
            tokens = 250_000 * 2**power
            new = worth_of(tokens, text_tokens)
            bits = 0.7 + 0.4 * (parameters / 1e6) ** -0.4 + 0.5 * (new / 6e5) ** -0.4
            rungs.append(
                Rung(
                    name=f"book-{layers}x{width}-{tokens}",
                    layers=layers,
                    width=width,
                    parameters=parameters,
                    tokens=tokens,
                    seed=1,
                    bits=bits,
                    seconds_per_token=base + each * parameters,
                    curve=tuple((share, ratio * bits) for share, ratio in (*CURVE, (1.0, 1.0))),
                )
            )
    values = {
        "version": VERSION,
        "data_manifest": "0" * 64,
        "settings": {},
        "text_tokens": text_tokens,
        "vocab_size": 2048,
        "val_tokens": 50_000,
        "rungs": tuple(rungs),
    }
    return Ladder(**(values | fields))
