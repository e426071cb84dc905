"""The code of one's own class: what a resume does after
each change of its file; a stranger's code stays data."""

import copy
import os
import shutil
import sys
from contextlib import chdir, suppress
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
from commands import expect_error, expect_field, launch, run_script
from runs import train, training_config

from gpt2_ddp import api
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.cli import dump
from gpt2_ddp.errors import UserError
from gpt2_ddp.export import export
from gpt2_ddp.export.check import ExportMismatch
from gpt2_ddp.tasks import user_task
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.trained_model import read_settings
from gpt2_ddp.tasks.user_task import find, make, recorded, trust
from gpt2_ddp.training import loop

FILE = '''
"""A schedule of one's own."""
from gpt2_ddp import Pretraining

open("executed", "w").close()
RATE = 1e-3


class Mine(Pretraining):
    def schedule(self, step):
        return {"lr": RATE / step, "weight_decay": 0.1 / step}
'''


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory):
    """A folder with mine.py and a run of its class."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(FILE)
    with chdir(folder):
        trust(find("mine.py:Mine"))
        config = training_config(
            corpus, folder, {"task": "mine.py:Mine", "train.steps": 5, "checkpoint.every": 2}
        )
        assert train(config) == "completed"
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of the folder, which is the current one. Only this file is trusted."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trust(find("mine.py:Mine"))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("task_")]:
        del sys.modules[name]


def resumed(corpus, folder, task=None):
    """The task of the run when it is resumed."""
    config = training_config(
        corpus, folder, {"task": task, "train.steps": 5, "checkpoint.every": 2}
    )
    return make(Pretraining, config, SimpleNamespace(num_processes=1), checkpoint_of(folder))


def checkpoint_of(folder):
    return find_checkpoint(folder / "run", "run")


def edit(old, new):
    return lambda file: file.write_text(FILE.replace(old, new))


KEPT = [
    lambda file: None,
    lambda file: file.unlink(),
    lambda file: (file.unlink(), file.mkdir()),
    lambda file: (file.rename("other.py"), file.symlink_to("other.py")),
    lambda file: os.chdir("/"),
]
"""Changes after which a resume goes on with the recorded class."""
CHANGED = {
    "comment": edit("own.", "own!"),
    "constant": edit("1e-3", "2e-3"),
    "another method": edit("def schedule", "def unused(self):\n        ...\n\n    def schedule"),
    "an installed package": edit("RATE =", "import numpy\n\nRATE ="),
}
"""Changes that `--task` accepts."""
REFUSED = {
    "renamed class": edit("class Mine", "class Ours"),
    "no task": edit("(Pretraining)", ""),
    "a module beside it": edit("RATE =", "import helper\n\nRATE ="),
    "a module beside it, inside": edit(
        "        return", "        from helper import x\n\n        return"
    ),
    "a relative import": edit("RATE =", "from . import helper\n\nRATE ="),
    "a missing module": edit("RATE =", "import no_such_module\n\nRATE ="),
    "another Python": edit("RATE =", "print 'x'\nRATE ="),
    "no text": lambda file: file.write_bytes(b"\0\xff" * 9),
    "an exception": edit("RATE =", "RATE = 1 / 0 +"),
    "huge": lambda file: file.write_text(FILE + "#" * 2**20),
}
"""Changes that nothing accepts."""


@pytest.mark.parametrize("change", KEPT)
def test_a_resume_takes_the_recorded_class(corpus, here, change, capsys):
    change(here / "mine.py")
    task = resumed(corpus, here)
    assert task.schedule(2) == {"lr": 5e-4, "weight_decay": 0.05}
    assert (task.config.task, capsys.readouterr().err) == ("mine.py:Mine", "")


def test_a_recorded_name_without_its_file_is_the_recorded_class(corpus, here):
    """As in `--config RUN/config.yaml`."""
    (here / "mine.py").unlink()
    assert resumed(corpus, here, "mine.py:Mine").schedule(2)["lr"] == 5e-4


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_file_has_to_be_accepted(corpus, here, monkeypatch, change, capsys):
    """By name, on the command line, though another run may
    have made it trusted. The line has the file to compare."""
    CHANGED[change](here / "mine.py")
    trust(find("mine.py:Mine"))
    for task in (None, "mine.py:Mine"):
        expect_error(
            r"differs from the run's in .*/task\.py; .* give --task mine",
            resumed,
            corpus,
            here,
            task,
        )
    monkeypatch.setattr(sys, "argv", ["--task", "mine.py:Mine"])
    task = resumed(corpus, here, "mine.py:Mine")
    assert task.schedule(2)["lr"] == (1e-3 if change == "constant" else 5e-4)
    assert task.code.source == (here / "mine.py").read_bytes()
    errors = capsys.readouterr().err
    assert f"that of mine.py:Mine in {checkpoint_of(here).path}/task.py\n" in errors


def test_a_new_run_takes_no_code_that_only_a_file_names(corpus, here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "elsewhere"))
    config = training_config(corpus, here / "new", {"task": "mine.py:Mine"})
    expect_error("its code was never given on this machine", train, config)


@pytest.mark.parametrize("change", REFUSED)
def test_a_file_without_the_class_is_refused(corpus, here, monkeypatch, change):
    (here / "helper.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(here))
    REFUSED[change](here / "mine.py")
    monkeypatch.setattr(sys, "argv", ["--task", "mine.py:Mine"])
    for task in (None, "mine.py:Mine"):
        expect_field("task", "mine.py:Mine", resumed, corpus, here, task)


def test_a_class_is_not_exchanged_in_silence(corpus, here, monkeypatch, capsys):
    """Another class is named; a run without one takes none."""
    (here / "mine.py").write_text(FILE.replace("Mine", "Ours"))
    monkeypatch.setattr(sys, "argv", ["--task", "mine.py:Ours"])
    resumed(corpus, here, "mine.py:Ours")
    errors = capsys.readouterr().err
    assert "note: the code of mine.py:Ours differs from that of mine.py:Mine in " in errors
    plain = training_config(corpus, here / "plain", {"train.steps": 1})
    assert train(plain) == "completed"
    expect_error("the run was started without it", resumed, corpus, here / "plain", "mine.py:Ours")


@pytest.mark.parametrize("name", ["mine.py", "mine.py:", ":Mine", "a b:c d"])
def test_a_name_has_a_file_and_a_class(corpus, tmp_path, name):
    expect_error("task = ", training_config, corpus, tmp_path, {"task": name})


@pytest.mark.parametrize(
    "name", ["nothing.py:Mine", "no.such.module:Mine", "json.decoder:JSONDecoder"]
)
def test_a_name_of_no_task(name):
    expect_error(f"task = {name}: ", lambda: find(name).load(Pretraining))


def test_a_module_names_a_class(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    (here / "package").mkdir()
    (here / "mine.py").rename(here / "package/tasks.py")
    assert find("package.tasks:Mine").load(Pretraining).__name__ == "Mine"


@pytest.mark.parametrize(
    "name", ["evil.sub:Mine", "evil.deep.sub:Mine", "evil:Mine", "this.x:Mine", "this:Mine"]
)
def test_a_module_that_only_a_file_names_is_not_imported(corpus, here, monkeypatch, name):
    """Neither are the packages above it, by a new run or by the resume of a received one."""
    monkeypatch.syspath_prepend(str(here))
    for folder in (here / "evil", here / "evil/deep"):
        folder.mkdir()
        (folder / "__init__.py").write_text('open("executed", "w").close()')
        (folder / "sub.py").write_text(FILE.replace("own.", "own!"))
    (here / "executed").unlink()
    for folder in (here, here / "new"):
        expect_error(f"task = {name}: ", resumed, corpus, here, name)
        expect_error(f"task = {name}: ", train, training_config(corpus, folder, {"task": name}))
    assert not (here / "executed").exists()
    assert not {"evil", "this"} & sys.modules.keys()


def test_only_the_flag_names_a_class(corpus, here, monkeypatch):
    """Another word of the command line that is equal to it does not."""
    (here / "mine.py").write_text(FILE.replace("1e-3", "2e-3"))
    for words in (["--config", "mine.py:Mine"], ["mine.py:Mine"], ["--run_name=mine.py:Mine"]):
        monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *words])
        expect_error("if you trust it, give --task", resumed, corpus, here, "mine.py:Mine")


def test_modules_of_the_working_folder_are_not_imported(tmp_path):
    for name in ("yaml", "pydantic", "runpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f'open("executed {name}", "w").close()')
    done = launch([sys.executable, "-m", "gpt2_ddp", "status", str(tmp_path)], tmp_path)
    assert (done.returncode, done.stderr.count("error: runs = ")) == (2, 1), done.stderr
    assert not [*tmp_path.glob("executed*")]


def test_a_run_of_a_class_in_python_is_that_of_a_file(corpus, tmp_path, monkeypatch):
    """`train(config, Mine)` records its file."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    kind = import_module("mine").Mine
    config = training_config(corpus, tmp_path, {"train.steps": 2})
    assert loop.train(config, partial(make, Pretraining, given=kind)).outcome == "completed"
    code = recorded(checkpoint_of(tmp_path))
    assert code == find("mine.py:Mine")
    assert user_task.is_trusted(find("mine.py:Mine"))


COMMANDS = [
    "train_gpt2 --config plain.yaml",
    "train_gpt2 --config run/config.yaml --train.steps 9",
    "evaluate --checkpoint run",
    "generate --checkpoint run",
    "export_hf --checkpoint run",
    "verify_run run",
    "verify_run run --replay 2:5",
    "report run",
    "status run",
    "plan --config run/config.yaml",
]
"""Commands on the run; plain.yaml does not name its class."""


@pytest.mark.parametrize("line", COMMANDS)
def test_a_strangers_class_stays_data(here, monkeypatch, line):
    """The code of a run folder that nobody gave on this machine, though its file is there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "elsewhere"))
    (here / "executed").unlink()
    (here / "plain.yaml").write_text(dump(training_config(here, here, {"train.steps": 9})))
    script, *words = line.split()
    run_script(script, words)
    with suppress(UserError):
        api.load_model(here / "run")
    assert not (here / "executed").exists()
    api.load_model(here / "run", trust_run_code=True)
    assert (here / "executed").exists()


@pytest.mark.parametrize("command", ["generate", "evaluate", "export_hf", "verify_run"])
def test_a_file_does_not_trust_the_code_of_a_run(here, monkeypatch, command):
    """Whoever gives a run may give a YAML file with
    it. What `--print_config` writes is taken again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "elsewhere"))
    (here / "executed").unlink()
    field = "run" if command == "verify_run" else "checkpoint"
    (here / "theirs.yaml").write_text(f"{field}: run\ntrust_run_code: true\n")
    code, line = run_script(command, ["--config", "theirs.yaml"])
    assert (code, line.count("error: trust_run_code = True: is in theirs.yaml")) == (2, 1), line
    assert not (here / "executed").exists()
    (here / "theirs.yaml").write_text("trust_run_code: false\n")
    code, line = run_script(command, ["--config", "theirs.yaml", "--print_config"])
    assert (code, line) == (0, "")


@pytest.mark.slow
def test_the_export_of_a_model_of_ones_own(here, monkeypatch):
    """It is refused without a method that makes a plain GPT of it, whose logits are compared."""

    class Own(Pretraining):
        def make_model(self, *arguments):
            return super().make_model(*arguments)

    monkeypatch.setattr(
        export, "own_task", lambda checkpoint, trust: Own(read_settings(checkpoint))
    )
    checkpoint = checkpoint_of(here)
    expect_error(
        r"task = mine\.py:Mine: .*to_transformers", export.export, checkpoint, here / "exported"
    )
    Own.to_transformers = lambda self, model: model  # pyright: ignore
    assert "logits" in export.export(checkpoint, here / "exported")

    def other(self, model):
        changed = copy.deepcopy(model)
        changed.wte.weight.data += 1
        return changed

    Own.to_transformers = other  # pyright: ignore
    with pytest.raises(ExportMismatch, match="logits differ"):
        export.export(checkpoint, here / "again")
