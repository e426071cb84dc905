"""Fixtures shared by the tests, runs that many tests look
at among them; and a count of what the suite starts."""

import fcntl
import gc
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FunctionType

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/gpt2_ddp_tests_state"  # of trusted code
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/gpt2_ddp_tests_cache"  # of imports
os.environ.setdefault("HF_DATASETS_CACHE", f"{tempfile.gettempdir()}/gpt2_ddp_tests_datasets")

import margins
import numpy as np
import pytest
import ranks

from gpt2_ddp.config.cli import dump

USUAL = {"ranks": 400, "commands": 80}
"""Processes that `make test` forks from the server with torch, and
Pythons that it starts, at most. A reminder to share runs, which fails
nothing; raise it where a new behaviour needs processes of its own."""
STARTED = Counter()


def pytest_configure(config):
    """Counts what tests start. One server forks the ranks of all of xdist's workers."""
    if hasattr(config, "workerinput"):
        ranks.use_server(config.workerinput["server"])
    start_ranks = ranks.start_ranks
    run = subprocess.Popen.__init__

    def counted_ranks(function, world, *args):
        STARTED["ranks"] += world
        return start_ranks(function, world, *args)

    def counted_command(self, *args, **kwargs):
        words = kwargs["args"] if "args" in kwargs else args[0]
        # Python, for a test: torch and platform ask each system for other things, and xdist starts
        # one worker per core
        is_python = sys.executable in map(str, words)
        STARTED["commands"] += "PYTEST_CURRENT_TEST" in os.environ and is_python
        run(self, *args, **kwargs)

    ranks.start_ranks = counted_ranks
    subprocess.Popen.__init__ = counted_command


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: the search for garbage leaves it out, now and later."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item, pytest.Function) and compares(
            inspect.unwrap(item.function).__code__, vars(item.module)
        ):
            item.add_marker("computes")


def compares(code, names):
    """Whether the code, or a function of its module that it calls, calls `assert_close`."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    called = [name for name in code.co_names if isinstance(names.get(name), FunctionType)]
    others = {name: value for name, value in names.items() if name not in called}
    inner += [
        names[name].__code__ for name in called if names[name].__module__ == names["__name__"]
    ]
    return "assert_close" in code.co_names or any(compares(part, others) for part in inner)


@pytest.hookimpl(optionalhook=True)  # without xdist
def pytest_configure_node(node):
    node.workerinput["server"] = ranks.start_server()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})  # none of one that died
    STARTED.update(output.get("started", {}))
    margins.MARGINS.update(output.get("margins", {}))


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"started": dict(STARTED), "margins": margins.MARGINS}
        return
    if margins.report():
        print(
            f"in CI, that is more than {margins.MOST}: compare in float64, or at the scale of "
            "the whole"
        )
        session.exitstatus = 1
    started = ", ".join(f"{number} {name}" for name, number in STARTED.items())
    print(f"\nstarted by the tests: {started}")
    is_whole = session.config.args_source.name != "ARGS"
    is_whole &= session.config.option.markexpr.startswith("not slow")
    if is_whole and any(STARTED[name] > most for name, most in USUAL.items()):
        print(f"note: more than {USUAL}; can tests share a run, or test the unit?")


@pytest.fixture(scope="session", autouse=True)
def threads():
    """The tests' models are so small that a second thread
    mostly waits, and waits long when a core is busy."""
    import torch

    torch.set_num_threads(ranks.THREADS)
    # or a training in this process would take one per core
    os.environ["OMP_NUM_THREADS"] = str(ranks.THREADS)


def once(factory, name, make):
    """A folder that `make` fills, once for all of xdist's
    workers. Tests copy it before they change anything in it."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if lock.seek(0, os.SEEK_END) == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            lock.write("made")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Shards of some of the standard library's source, with a BPE of 512 tokens: about 60,000
    tokens, three shards."""
    return once(tmp_path_factory, "corpus", make_corpus)


def make_corpus(folder):
    from gpt2_ddp.preparation.prepare import train_bpe

    names = "abc bisect heapq keyword queue sched shlex stat string textwrap token"
    texts = [*map(module_text, names.split())]
    train_bpe(texts, 512, folder / "tokenizer.json")
    write_shards(folder, "stdlib", {"train": texts[:-2], "val": texts[-2:]})


def module_text(name):
    """The source of a module of the standard library."""
    return (Path(os.__file__).parent / f"{name}.py").read_text()


def write_shards(folder, source, documents, tokenizer_name=""):
    """Writes each split's documents, which are texts or
    tokens, and a manifest, beside a tokenizer.json."""
    from gpt2_ddp.data.manifest import Manifest
    from gpt2_ddp.data.tokenizer import load_tokenizer
    from gpt2_ddp.preparation.encode import ShardWriter, write_manifest

    tokenizer = load_tokenizer(tokenizer_name or str(folder / "tokenizer.json"))
    size = tokenizer.vocab_size
    splits = {}
    for split, parts in documents.items():
        writer = ShardWriter(folder, split, 20_000, size)
        for part in parts:
            tokens = tokenizer.encode(part) if isinstance(part, str) else part
            writer.add(np.concatenate([[tokenizer.eot], tokens]))
        splits[split] = writer.close()
    write_manifest(
        folder, Manifest(2, tokenizer.name, tokenizer.sha256, size, tokenizer.eot, source, splits)
    )


@pytest.fixture(scope="session")
def short_documents(corpus, tmp_path_factory):
    """Shards of documents of some 40 tokens each, with the
    tokenizer of `corpus`: in each window, about one begins."""
    return once(
        tmp_path_factory, "short_documents", lambda folder: make_short_documents(corpus, folder)
    )


def make_short_documents(corpus, folder):
    from gpt2_ddp.data.manifest import read_manifest
    from gpt2_ddp.data.shards import TokenStream

    shutil.copy(corpus / "tokenizer.json", folder)
    whole = read_manifest(corpus)
    documents = {}
    for split in ("train", "val"):
        stream = TokenStream(corpus, whole, split)
        tokens = stream.read(np.array([0]), min(len(stream), 3000))[0]
        parts = [tokens[begin : begin + 20 + begin % 18] for begin in range(0, len(tokens), 37)]
        documents[split] = [part[part != whole.eot] for part in parts]
    write_shards(folder, "short", documents)


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """The folder `run` of a run of 5 steps in one process and 5 more in two, with checkpoints at 5
    and 10. Beside it are its data, in `data`, and what rank 0 of the two called, in
    `calls.json`."""
    from runs import train, training_config

    def make(folder):
        (folder / "data").symlink_to(corpus)
        first, whole = (
            training_config(
                folder / "data", folder, {"train.steps": steps, "optim.decay_steps": 10}
            )
            for steps in (5, 10)
        )
        ranks.run_ranks(train, 1, first)
        calls, _ = ranks.run_ranks(ranks.first_calls, 2, train, whole)
        (folder / "calls.json").write_text(json.dumps(calls))

    return once(tmp_path_factory, "trained", make) / "run"


@pytest.fixture(scope="session")
def halfway(corpus, tmp_path_factory):
    """A folder with the run `run`, of 5 of 10 steps in one process."""
    from runs import train, training_config

    changes = {"train.steps": 5, "optim.decay_steps": 10, "eval.every": 5}

    def make(folder):
        return ranks.run_ranks(train, 1, training_config(corpus, folder, changes))

    return once(tmp_path_factory, "halfway", make)


@pytest.fixture(scope="session")
def trained_job(tmp_path_factory):
    """The folder `run` of a complete regression of two epochs in one process."""
    from runs import job_config, train

    def make(folder):
        return ranks.run_ranks(train, 1, job_config("regression", folder, {"train.epochs": 2}))

    return once(tmp_path_factory, "trained_job", make) / "run"


@pytest.fixture
def tiny_config(corpus, tmp_path):
    """Makes a configuration of a tiny training over
    `corpus`; dotted names in `changes` differ from it."""

    from runs import training_config

    def make(changes=None):
        return training_config(corpus, tmp_path / "runs", changes)

    return make


@pytest.fixture
def place(corpus, tmp_path):
    """A folder with shards of its own in `data`, and a configuration that trains on them into
    `runs/run`."""
    from runs import training_config

    shutil.copytree(corpus, tmp_path / "data")
    (tmp_path / "config.yaml").write_text(
        dump(training_config(tmp_path / "data", tmp_path / "runs"))
    )
    return tmp_path
