"""The functions that are imported from gpt2_ddp, and docs/python.md, block by block."""

import os
import re
import signal
import sys
import threading
import types
from functools import partial

import pytest
import torch
from close import assert_close
from commands import ROOT, expect_error, forked, launch
from pages import write_texts
from ranks import run_ranks
from runs import rows as rows_of
from runs import status, training_config

import gpt2_ddp
from gpt2_ddp import load_config, load_rows

PAGE = ROOT / "docs/python.md"


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    code = (
        "import sys, gpt2_ddp; print(dir(gpt2_ddp)); from gpt2_ddp import UserError, train, "
        "prepare, load_config;"
    )
    heavy = "('torch', 'accelerate', 'pandas', 'datasets', 'matplotlib')"
    command = [
        sys.executable,
        "-c",
        f"{code} print([name for name in {heavy} if name in sys.modules])",
    ]
    names, loaded = launch(command, tmp_path).stdout.splitlines()
    assert loaded == "[]"
    assert set(gpt2_ddp.__all__) <= set(re.findall(r"'(\w+)'", names))


def test_every_public_name_is_there_and_says_what_it_is():
    for name in gpt2_ddp.__all__:
        assert getattr(gpt2_ddp, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        gpt2_ddp.trian  # noqa: B018


def test_a_configuration_is_files_and_then_changes(tmp_path):
    assert load_config(train={"steps": 7}).run_name == "stdlib"
    assert load_config(data={"path": "elsewhere"}).own_text
    file = tmp_path / "own.yaml"
    file.write_text("optim: {lr: 0.5}\ntrain: {steps: 3}\n")
    config = load_config(
        "configs/gpt2_stdlib.yaml", str(file), train={"micro_batch_size": 2}, **{"eval.every": 9}
    )
    assert (config.optim.lr, config.train.steps) == (0.5, 3)
    assert (config.train.micro_batch_size, config.eval.every) == (2, 9)
    assert (config.run_name, config.model.n_embd) == ("stdlib", 192), "the rest of the first file"
    assert load_config(data={"path": ["a", "b"]}).data.path == ("a", "b")


def in_a_cell():
    """A class of a notebook's `__main__`, which has no file."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"])["Cell"] = cell = type("Cell", (), {"__module__": "__main__"})
    return cell


MISTAKES = [
    ("load_config", {"optim": {"lr": -1}, "train": {"stps": 5}}, "train.stps = 5"),
    ("prepare", {"vocab_sise": 512}, "vocab_sise = 512"),
    ("load_rows", {"run": "nowhere"}, "runs ="),
    ("verify", {"run": "nowhere"}, "run = nowhere"),
    ("load_model", {"checkpoint": "nowhere"}, "checkpoint ="),
    ("load_model", {"checkpoint": "nowhere", "device": "nix"}, "device = nix"),
    ("generate", {"model": None, "tokenizer": None, "temperature": -1}, "temperature = -1"),
    ("train", {"config": "the default", "processes": 0}, "processes = 0"),
    (
        "train",
        {"config": "the default", "processes": 2, "on_row": "a function"},
        "on_row = <lambda>",
    ),
    ("train", {"config": "the default", "processes": 2, "task": "a class"}, "task = Cell"),
]
"""A function, its arguments, and the error."""


@pytest.mark.parametrize(("name", "arguments", "field"), MISTAKES)
def test_a_mistake_is_a_user_error_with_field_and_value(
    name, arguments, field, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # restores it
    own = {"config": load_config(), "on_row": lambda row: None, "task": in_a_cell()}
    given = arguments | {key: own[key] for key in own.keys() & arguments.keys()}
    expect_error(re.escape(field), getattr(gpt2_ddp, name), **given)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def train_again_and_again(corpus, place):
    """What one process comes to that trains: in another
    precision, in a thread, stopped, beside an Accelerator."""
    from accelerate import Accelerator
    from accelerate.state import PartialState

    from gpt2_ddp.training import loop

    found = {"rows": []}
    train_step = loop.train_step

    def run(name, on_row=None, **changes):
        return gpt2_ddp.train(
            training_config(corpus, place, {"run_name": name, "train.steps": 6, **changes}),
            on_row=on_row,
        )

    refused = partial(expect_error, "train =", run)
    found["first"] = run("one", found["rows"].append)
    found["second"] = run("two", **{"train.mixed_precision": "bf16"})
    thread = threading.Thread(target=lambda: found.update(thread=run("three")))
    thread.start()
    thread.join()
    handler = signal.getsignal(signal.SIGINT)
    loop.train_step = lambda trainer: (
        trainer.run.step == 2 and os.kill(os.getpid(), signal.SIGINT),
        train_step(trainer),
    )[1]
    found["stopped"] = run("four")
    assert signal.getsignal(signal.SIGINT) == handler, "signals are again whose they were"
    loop.train_step = train_step
    found["after"] = run("four")
    loop.train_step = lambda run: (refused("five"), train_step(run))[1]
    run("six")
    with pytest.raises(ZeroDivisionError):
        run("seven", lambda row: 1 / (3 - row["step"]))
    assert not PartialState._shared_state, "Accelerate's state is gone"
    Accelerator(cpu=True)
    refused("eight")
    return found


def test_training_again_in_one_process(corpus, tmp_path):
    (found,) = run_ranks(train_again_and_again, 1, corpus, tmp_path)
    assert [found[name].outcome for name in ("first", "second", "thread", "after")] == [
        "completed"
    ] * 4
    assert (
        found["first"].metrics
        == found["thread"].metrics
        == found["after"].metrics
        != found["second"].metrics
    )
    assert (found["stopped"].outcome, found["stopped"].step) == ("stopped", 3)
    assert found["rows"] == rows_of(tmp_path / "one")
    assert "ZeroDivisionError" in status(tmp_path / "seven")["reason"]
    rows = load_rows(tmp_path / "one")
    scored = {row["step"]: "val_loss" in row for row in rows}
    assert scored == {0: True, **dict.fromkeys(range(1, 6), False), 6: True}
    assert not any({"chain", "event"} & row.keys() for row in rows)
    assert gpt2_ddp.load_model(tmp_path / "one/checkpoints/step-00000005")[0].training is False

    newest, tokenizer = gpt2_ddp.load_model(tmp_path / "one", "cpu")
    assert_close(gpt2_ddp.evaluate(newest, tokenizer, corpus, tokens=500).loss, rows[6]["val_loss"])
    scores = [
        gpt2_ddp.evaluate(newest, tokenizer, corpus, stride=stride) for stride in (None, 32, 8)
    ]
    assert scores[0] == scores[1]
    assert scores[2].tokens == scores[0].tokens
    assert scores[2].loss != scores[0].loss
    expect_error("^stride = 33", gpt2_ddp.evaluate, newest, tokenizer, corpus, stride=33)
    text = "def f(self):\n    return None\n" * 9  # longer than the context
    whole = torch.tensor([tokenizer.eot, *tokenizer.encode(text).tolist()])
    scored = gpt2_ddp.score(newest, tokenizer, text)
    expected = 0.0
    for x in (whole[begin : begin + 33] for begin in range(0, len(whole) - 1, 32)):
        expected += torch.nn.functional.cross_entropy(
            newest(x[None, :-1])[0].double(), x[1:], reduction="sum"
        ).item()
    assert (scored.tokens, scored.bytes) == (len(whole) - 1, len(text))
    assert_close(scored.loss, expected / scored.tokens, 1e-6)
    expect_error("text =", gpt2_ddp.score, newest, tokenizer, "")
    one, two = gpt2_ddp.generate(newest, tokenizer, ["def ", "import "], 5)
    assert ((one[:4], two[:7]), gpt2_ddp.generate(newest, tokenizer, "def ", 5)) == (
        ("def ", "import "),
        [one],
    )


def train_twice(corpus, place):
    config = training_config(corpus, place, {"train.steps": 3})
    outcome = gpt2_ddp.train(config).outcome
    expect_error("train =", gpt2_ddp.train, config.model_copy(update={"run_name": "two"}))
    return outcome


@pytest.mark.slow
def test_ranks_of_a_launcher_train_once(corpus, tmp_path):
    assert run_ranks(train_twice, 2, corpus, tmp_path) == ["completed"] * 2


SCRIPT = """
from gpt2_ddp import prepare
print(prepare("texts/*.txt", "data", vocab_size=300, workers=2).vocab_size, "ids")
"""


@pytest.mark.slow
def test_a_script_is_not_run_again_by_its_helpers(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    found = launch([sys.executable, "script.py"], tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("300 ids") == 1


FORK = """
from commands import forked
fork = lambda words, check: forked(words[1:], ".").check_returncode()
"""
"""In place of `subprocess.run`: the page's Python has torch loaded."""


@pytest.mark.slow
def test_the_page_runs_block_by_block(tmp_path):
    """As a notebook runs it, and nothing on the page is left out."""
    write_texts(tmp_path)
    page = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```python")
    code = FORK + "".join(blocks).replace("subprocess.run(", "fork(")
    found = forked(["-c", code], tmp_path)
    assert found.returncode == 0, found.stderr
    for said in ("completed 10", "did you mean train.steps?", "\nstopped 5 "):
        assert said in found.stdout
    assert {place.name for place in (tmp_path / "runs").iterdir()} == {
        "first",
        "early",
        "lr-0.001",
        "lr-0.01",
        "two",
    }
