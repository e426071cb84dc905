"""Seeded damage to files, for the tests that nothing
hostile is believed, hangs, or ends in a traceback."""

import json
import math
import os
import signal
from contextlib import contextmanager
from functools import partial

import pytest
from runs import training_config

from gpt2_ddp.config.base import MOST
from gpt2_ddp.data.shards import verify_shards
from gpt2_ddp.errors import FIELD, HINT, VALUE

CASES = [(0, 100), pytest.param(1, 1000, marks=pytest.mark.soak)]
"""Seeds, and how many cases of each."""
NASTY = [
    *(None, True, False, 0, 1, -1, 2, 255, 256, 65536),
    *(2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**400),
    *(0.5, 1e308, math.nan, math.inf),
    *("", " ", ".", "..", "/", "/dev/zero", "~", "../x"),
    *("nul\0", "line\nline", "\x1b[31m", "é" * 200, "a" * 5000, "\ud800", "1", "true"),
    *("gpt2", "tokenizer.json", "train_000000.bin"),
    *([], [[]], {}, {"": 0}, [1] * 1000, {"a": {"b": [None]}}, [[[[[[[[[["deep"]]]]]]]]]]),
]
"""Values that no field expects."""


def open_data(folder):
    """What a training does with its data before the first step; the identity that it finds."""
    from gpt2_ddp.data.corpus import open_corpus

    (manifest,), *_ = open_corpus(training_config(folder, folder / "runs"))
    verify_shards(folder, manifest)
    return manifest.hash


@contextmanager
def no_hang(seconds=60):
    """Raises where the block waits for what never comes;
    a refusal takes milliseconds, even on a busy core."""

    def stop(*_):
        raise TimeoutError(f"hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_told(error):
    """Each mistake is one short line that a terminal shows as it is, and they are few."""
    assert 0 < len(error.mistakes) <= MOST + 1
    for mistake in error.mistakes:
        assert mistake.isprintable(), mistake
        assert 0 < len(mistake) <= FIELD + VALUE + HINT + 10, mistake


def flip(content, rng):
    """One bit is another."""
    changed = bytearray(content)
    if changed:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def mangle(content, rng):
    """Some of the content is gone, there twice, or noise, maybe with all that follows it."""
    start, stop = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    part = rng.choice([b"", 2 * content[start:stop], rng.randbytes(stop - start)])
    return content[:start] + part + rng.choice([content[stop:], b""])


def change_value(values, rng):
    """Somewhere in nested values one is gone, another
    number, of another type, or has another key."""
    key = rng.choice(list(values) if isinstance(values, dict) else range(len(values)))
    value = values[key]
    action = rng.randrange(4)
    if isinstance(value, dict | list) and value and rng.random() > 0.2:
        change_value(value, rng)
    elif action == 0:
        del values[key]
    elif action == 1 and isinstance(values, dict):
        values[rng.choice(["", "x", "val", "test", "file", "a" * 300, "nul\0"])] = values.pop(key)
    elif action == 2 and isinstance(value, int):
        values[key] += rng.choice([-1, 1, 2**16, -(2**40)])
    else:
        values[key] = rng.choice(NASTY)


def change_json(file, rng):
    """`change_value` of a JSON file."""
    values = json.loads(file.read_text())
    change_value(values, rng)
    file.write_text(json.dumps(values))


def put_something_else(file, rng):
    """What is no file, or has no end, stands where the file stood."""
    file.unlink()
    kind = rng.randrange(6)
    links = partial(file.symlink_to, file), partial(file.symlink_to, "/dev/zero")
    # the last leaves nothing there
    makers = (file.mkdir, partial(os.mkfifo, file), *links, file.touch, lambda: None)
    makers[kind]()
