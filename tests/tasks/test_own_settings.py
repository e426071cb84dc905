"""Settings of a class of one's own: given, recorded, compared, and read without the class."""

import sys
from contextlib import chdir
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import yaml
from commands import expect_error, run_and_read, run_script
from pydantic import Field, PositiveInt, create_model, field_validator, model_validator
from runs import rows, train, training_config, verified

from gpt2_ddp import Section, load_config
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.own_settings import check_declared, recorded_settings, settle
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.plan.plan import make_plan
from gpt2_ddp.records.rows import read_lines
from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.tasks.pretraining import Pretraining, settings_of
from gpt2_ddp.tasks.trained_model import load_model
from gpt2_ddp.tasks.user_task import find, make, trust

FILE = '''
from typing import Literal

from gpt2_ddp import Pretraining, Section
from torch import nn

open("executed", "w").close()


class Wide(Pretraining):
    class Settings(Section):
        """A wider MLP"""

        times: int = 2
        """width of the MLP, in widths of the model"""
        rate: float = 1e-3
        """learning rate; a resume may change it from the step on at which it falls"""
        sizes: tuple[int, ...] = ()
        """numbers without an effect"""
        kind: Literal["flat", "steep"] = "flat"
        """form of the schedule"""
        frozen: bool = False
        """whether nothing is learned"""
        name: str | None = None
        """a name without an effect"""

        def may_change(self, name, before, step):
            return name == "rate" and step < 5

    def make_model(self, *arguments):
        model = super().make_model(*arguments)
        for block in model.h:
            width = self.config.model.n_embd
            hidden = self.settings.times * width
            block.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        return model

    def schedule(self, step):
        return {"lr": 0.0 if self.settings.frozen else self.settings.rate}


class Plain(Pretraining):
    pass
'''
OWN: dict[str, Any] = {"times": 3, "rate": 0.01}
"""Of the run that the tests share."""


def own(**settings):
    """Changes of a configuration: the class and its settings."""
    named = {f"own.{name}": value for name, value in settings.items()}
    return {"task": "wide.py:Wide", "train.steps": 4, "checkpoint.every": 2} | named


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory):
    """A folder with wide.py and a run of its class, which has stopped at step 4."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "wide.py").write_text(FILE)
    with chdir(folder):
        trust(find("wide.py:Wide"))
        assert train(training_config(corpus, folder, own(**OWN))) == "completed"
    return folder


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--task", "wide.py:Wide"])
    yield made
    for name in [name for name in sys.modules if name.startswith("task_")]:
        del sys.modules[name]


def checkpoint_of(folder):
    return find_checkpoint(folder / "run", "run")


def made_task(corpus, folder, changes, saved=None):
    """The task of a run with these changes, new or resumed."""
    config = training_config(corpus, folder, changes)
    return make(Pretraining, config, SimpleNamespace(num_processes=1), saved)


COMPLETE = {"times": 3, "rate": 0.01, "sizes": [], "kind": "flat", "frozen": False, "name": None}


def test_config_and_start_have_all_settings(here):
    """With the defaults of those that were not given; the class has used them."""
    recorded = yaml.safe_load((here / "run/config.yaml").read_text())
    starts = [line.row for line in read_lines(here / "run/metrics.jsonl") if "config" in line.row]
    assert recorded["own"] == starts[0]["config"]["own"] == COMPLETE
    assert [row["lr"] for row in rows(here / "run") if "lr" in row] == [0.01] * 4
    model, _ = load_model(checkpoint_of(here))
    assert model.h[0].mlp[0].weight.shape == (96, 32)  # pyright: ignore


GIVEN = {
    "--own.times 5": {"times": 5},
    "--own.times=5 --own.rate 1e-2": {"times": 5, "rate": 0.01},
    "--own.sizes 1 2 3": {"sizes": (1, 2, 3)},
    "--own.sizes 7": {"sizes": (7,)},
    "--own.sizes 1,2": {"sizes": (1, 2)},
    "--own.sizes none": {},
    "--own.kind steep --own.frozen": {"kind": "steep", "frozen": True},
    "--own.frozen false": {},
    "--own.name 7": {"name": "7"},
    "--own.name null": {},
    "--config own.yaml": {"times": 7, "sizes": (1, 2)},
    "--config own.yaml --own.times 8": {"times": 8, "sizes": (1, 2)},
}


@pytest.mark.parametrize("line", GIVEN)
def test_flags_and_files_give_settings(here, line):
    (here / "own.yaml").write_text("own: {times: 7, sizes: [1, 2]}")
    config = load(TrainingConfig, [*line.split(), "--train.steps", "5"])
    kind = settings_of("wide.py:Wide")
    settings = settle(config.own, kind, "Wide").model_dump()
    assert settings == kind().model_dump() | GIVEN[line]


def test_python_gives_settings(here):
    for config in (load_config(own={"times": 5}), load_config(**{"own.times": 5})):
        assert settle(config.own, settings_of("wide.py:Wide"), "Wide").model_dump()["times"] == 5


WRONG = {
    "own.times": ["x", "should be a whole number; the default is 2"],
    "own.sizes": [["1", "x"], "should be one or several values; each is a whole number"],
    "own.kind": ["round", "should be flat or steep; the default is flat"],
    "own.rate": [True, "should be a number, not true or false; the default is 0.001"],
    "own.time": [3, "unknown key; Wide has own.times, own.rate, own.sizes, own.kind, own.frozen"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_one_line(corpus, here, name):
    value, hint = WRONG[name]
    expect_error(f"^{name} = .*: {hint}", made_task, corpus, here / "new", own() | {name: value})


def test_all_wrong_settings_are_named(corpus, here):
    with pytest.raises(UserError) as caught:
        made_task(corpus, here / "new", own(times="x", time=3, kind="y"))
    assert len(caught.value.mistakes) == 3


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        (None, "only a class of your own has settings; name yours by --task"),
        ("wide.py:Plain", "Plain has no settings"),
    ],
)
def test_no_settings(corpus, here, monkeypatch, task, hint):
    """The same line of a class without settings, and without a class."""
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--task", str(task)])
    config = training_config(corpus, here / "new", own(times=3) | {"task": task})
    expect_error(f"^own.times = 3: unknown key; {hint}", train, config)
    assert not (here / "new/run").exists()


def test_a_section_takes_no_value(corpus, here):
    expect_error("^own = 3: is a section; set its keys", training_config, corpus, here, {"own": 3})


CHANGES = {
    "times": ["times = 2: the run was started with 3; restore it", {"rate": 0.01}],
    "sizes": ["sizes = 1 2: the run was started with", {**OWN, "sizes": [1, 2]}],
    "rate, by rule": ["", {"times": 3, "rate": 0.5}],
    "nothing": ["", {**OWN, "kind": "flat"}],
    "texts": ["", {"times": "3", "rate": "1e-2"}],
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_resume_compares_settings(corpus, here, case):
    line, settings = CHANGES[case]
    resumed = partial(made_task, corpus, here, own(**settings), checkpoint_of(here))
    if line:
        expect_error(f"^own.{line}.*may_change in Settings", resumed)
    else:
        assert resumed().config.own.given == COMPLETE | {"rate": float(settings["rate"])}


def test_the_class_says_until_when_a_setting_may_change(corpus, here):
    saved = checkpoint_of(here)
    saved.state.progress.step = 5
    assert saved.step == 5
    changed = own(times=3, rate=0.5)
    expect_error(
        "^own.rate = 0.5: the run was started with 0.01", made_task, corpus, here, changed, saved
    )


def test_a_class_may_gain_and_lose_settings(corpus, here, capsys):
    """A new setting had its default; one that is gone is no error, also for other commands."""
    saved = checkpoint_of(here)
    saved.config["own"] = {"times": 3, "gone": 1}
    given = own(times=3, gone=1)
    assert made_task(corpus, here, given, saved).settings.rate == 1e-3
    expect_error("^own.gone = 1: unknown", made_task, corpus, here, own(times=3, gone=1))
    kind = find("wide.py:Wide").load(Pretraining)
    assert kind(training_config(corpus, here, given)).settings.times == 3  # pyright: ignore
    saved.config.pop("own")  # of an earlier release
    assert recorded_settings(saved.config) == {}
    assert made_task(corpus, here, own(), saved).settings.times == 2


def declared(kind, default):
    """A class of settings with one field."""
    return create_model("Settings", __base__=Section, x=(kind, default))


RIGHT = [
    (int, 4),
    (PositiveInt, 4),
    (Annotated[float, Field(gt=0, lt=1)], 0.5),
    (bool | Literal["auto"], "auto"),
    (tuple[float, float], (0.9, 0.95)),
    (tuple[str, ...], ("a",)),
    (str | None, None),
]


@pytest.mark.parametrize(("kind", "default"), RIGHT)
def test_types_of_settings(kind, default):
    settings = declared(kind, default)
    check_declared(settings, "Mine")
    given = load_config(own={"x": default}).own
    assert settle(given, settings, "Mine").model_dump()["x"] == default


NOT_DECLARED = {
    "list": [declared(list[int], [1]), "its setting x has another type than int, float"],
    "numbers": [declared(Literal[1, 2], 1), "its setting x has another type"],
    "a section": [declared(Section, Section()), "its setting x has another type"],
    "required": [declared(int, ...), "its setting x needs a default, like x: int = 4"],
    "a wrong default": [declared(int, "y"), "own.x = y: should be a whole number"],
    "no section": [type("Settings", (), {"x": 4}), "should extend gpt2_ddp.Section"],
    "no class": [{"x": 4}, "should extend gpt2_ddp.Section"],
}


@pytest.mark.parametrize("case", NOT_DECLARED)
def test_what_is_no_setting(case):
    settings, line = NOT_DECLARED[case]
    expect_error(line, check_declared, settings, "Mine")


class Ruled(Section):
    low: int = 1
    high: int = 2

    @field_validator("low")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("should be odd")
        return value

    @model_validator(mode="after")
    def _are_ordered(self) -> "Ruled":
        assert self.low < self.high, "low should be below high"
        return self


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"low": 4}, "own.low = 4: should be odd; the default is 1"),
        ({"low": 3}, "own = .*: low should be below high"),
    ],
)
def test_rules_of_ones_own(given, line):
    expect_error(f"^{line}", settle, load_config(own=given).own, Ruled, "Mine")


def test_a_branch_keeps_settings(corpus, here):
    """Those that its parent has; others are of the new class. The branch records its own."""
    begun = own() | {"train.branch_from": str(here / "run"), "train.steps": 5, "run_name": "b"}
    begun |= {"optim.decay_steps": 5}
    refused = training_config(corpus, here, begun)
    expect_error("^own.times = 2: the branch's parent was trained with 3", train, refused)
    taken = training_config(corpus, here, begun | {"own.times": 3, "own.rate": 0.02})
    assert train(taken) == "completed"
    assert yaml.safe_load((here / "b/config.yaml").read_text())["own"] == COMPLETE | {"rate": 0.02}


def test_initial_weights_bring_the_settings_of_their_class(corpus, here, capsys):
    """As the fields of the model; a run with another class takes none."""
    begun = {"train.init_from": str(here / "run"), "train.steps": 1, "run_name": "i"}
    assert train(training_config(corpus, here, own(rate=0.5) | begun)) == "completed"
    assert yaml.safe_load((here / "i/config.yaml").read_text())["own"] == COMPLETE | {"rate": 0.5}
    assert "note: settings from " in capsys.readouterr().err
    resumed = own(rate=0.5) | begun | {"train.steps": 2, "optim.decay_steps": None}
    assert train(training_config(corpus, here, resumed)) == "completed"


def test_reports_name_settings(corpus, here):
    """In the legend, without the section of runs that have no class."""
    plain = {"task": None, "train.steps": 1, "run_name": "plain"}
    assert train(training_config(corpus, here, plain)) == "completed"
    other = own(times=4) | {"train.steps": 1, "run_name": "other"}
    assert train(training_config(corpus, here, other)) == "completed"
    runs = read_runs([here / name for name in ("run", "other", "plain")])
    fields = [group.fields for group in group_runs(runs)]
    assert [group.get("own.times") for group in fields] == [3, 4, None]
    assert "own" not in fields[2]


def test_a_plan_counts_the_model_of_the_settings(corpus, here):
    """Also while the data are missing."""
    counts = []
    for times in (2, 4):
        for path in (corpus, "nothing-here"):
            config = training_config(path, here / "new", own(times=times))
            values = config.model_dump() | {"data": {"path": (str(path),)}}
            plan = make_plan(PlanConfig.model_validate(values))
            counts.append(plan.setting.parameters)
    widened = 2 * 2 * (2 * 32 * 32 + 32)  # in two layers
    assert (counts[2] - counts[0], counts[3] - counts[1]) == (widened, widened)


WITHOUT_TRUST = {
    "status run": 0,
    "report run": 0,
    "verify_run run": 0,
    "evaluate --checkpoint run": 2,
}


@pytest.mark.parametrize("line", WITHOUT_TRUST)
def test_a_run_with_settings_is_read_without_its_class(here, monkeypatch, line):
    """By all commands that need no model; none executes it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "elsewhere"))
    (here / "executed").unlink(missing_ok=True)
    script, *words = line.split()
    code, text = run_script(script, words)
    assert not (here / "executed").exists()
    assert (code, "Traceback" in text) == (WITHOUT_TRUST[line], False), text


def test_a_run_with_settings_is_verified(here, capsys):
    """Its schedule follows from them."""
    code, _, lines = verified(here / "run", capsys)
    assert code == 0, lines
    assert any("learning rates: recomputed" in line for line in lines), lines


def test_help_lists_the_settings_of_a_class(here):
    for script in ("train_gpt2", "plan", "sweep"):
        code, text, _ = run_and_read(script, ["--help", "--task", "wide.py:Wide"])
        assert code == 0
        assert "own: A wider MLP" in text
        assert (
            "--own.times INT\n        width of the MLP, in widths of the model (default: 2)" in text
        )
        assert "--own.kind {flat,steep}" in text
    code, text = run_script("train_gpt2", ["--help", "--task", "wide.py:Nothing"])
    assert (code, text.count("error: task = wide.py:Nothing: ")) == (2, 1)
    for name in ("wide.py", "wide.py:"):
        code, text = run_script("train_gpt2", ["--help", "--task", name])
        assert (code, text) == (2, f"error: task = {name}: names no class; write wide.py:CLASS\n")
    code, text = run_script("train_gpt2", ["--help", "--task", "Wide"])
    assert "names no class; write FILE.py:CLASS, or MODULE:CLASS\n" in text
    _, text, _ = run_and_read("train_gpt2", ["--help"])
    assert "own" not in text.replace("own_text", "")


UNKNOWN = {
    "--task wide.py:Wide --own.time 2": "error: own.time = 2: unknown key; Wide has own.times",
    "--task wide.py:Wide --own.times x": "error: own.times = x: should be a whole number",
    "--task wide.py:Nothing": "error: task = wide.py:Nothing: wide.py has no such class",
    "--task missing.py:Wide": "error: task = missing.py:Wide: cannot be read (No such file",
    "--own.times 2": "error: own.times = 2: unknown key; only a class of your own has settings",
    "--config wide.yaml": "error: own.time = 2: unknown key; Wide has own.times",
    "--config stranger.yaml": "error: task = stranger.py:Wide: its code was never given on this",
}
"""Command lines, and the beginning of the one line that they cause."""


@pytest.mark.parametrize("line", UNKNOWN)
def test_a_configuration_is_printed_if_a_training_would_take_it(here, line):
    (here / "wide.yaml").write_text("train: {steps: 5}\ntask: wide.py:Wide\nown: {time: 2}")
    (here / "stranger.yaml").write_text("train: {steps: 5}\ntask: stranger.py:Wide")
    stranger = FILE.replace("executed", "strange")
    (here / "stranger.py").write_text(stranger)
    words = [*line.split(), "--run_name", "unused", "--output_dir", str(here)]
    code, text = run_script("train_gpt2", [*words, "--print_config"])
    assert (code, text.count("\n")) == (2, 1), text
    assert text.startswith(UNKNOWN[line]), text
    assert not (here / "strange").exists()


def test_a_configuration_with_settings_is_printed(here):
    """Also that of a run that is resumed, whose class the training finds."""
    words = ["--print_config", "--output_dir", str(here), "--own.times", "3"]
    for more in (["--task", "wide.py:Wide", "--run_name", "new"], ["--run_name", "run"]):
        code, text, errors = run_and_read("train_gpt2", [*words, *more])
        assert (code, errors) == (0, "")
        assert yaml.safe_load(text)["own"] in ({"times": 3}, {"times": "3"})


def test_a_sweep_refuses_wrong_settings(here):
    """Before any run starts."""
    words = ["--dry_run", "--task", "wide.py:Wide", "--vary"]
    code, text, _ = run_and_read("sweep", [*words, "own.times=2,4", "own.kind=flat,steep"])
    assert (code, text.count("--own.kind steep")) == (0, 2)
    assert "--run_name stdlib-times_2-kind_flat-seed_1337" in text
    for value, line in {
        "own.time=2,4": "own.time = 2: unknown",
        "own.times=x": "own.times = x",
    }.items():
        code, text = run_script("sweep", [*words, value])
        assert (code, text.count(f"error: {line}")) == (2, 1)
    code, text = run_script("sweep", ["--dry_run", "--vary", "own.times=2,4"])
    assert (code, text.count("only a class of your own")) == (2, 1)
