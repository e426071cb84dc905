"""Configuration and command lines: precedence, mistakes, `--help`, and every shipped preset."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial

import pytest
import yaml
from close import assert_close, distance
from commands import ROOT, WITH_FLAGS, expect_error, launch

from benchmarks.config import BenchmarkConfig
from gpt2_ddp.config.base import Command, flat, kinds_of, leaves
from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.jobs import (
    CLUSTERS,
    OWN_IMAGES,
    ClassifierConfig,
    RegressionConfig,
    classifier_default,
)
from gpt2_ddp.config.saved import check_resumable, complete
from gpt2_ddp.config.tools import GenerateConfig, PrepareConfig
from gpt2_ddp.config.training import BUILT_IN, OWN_TEXT, TrainingConfig, training_default
from gpt2_ddp.errors import UserError

PRESETS = sorted(
    file for file in (ROOT / "configs").glob("[gl]*_*.yaml") if not file.stem.startswith("ladder_")
)
STEPS = ["--train.steps", "10"]


def train(*argv):
    return load(TrainingConfig, [*STEPS, *argv])


def mistakes(*argv):
    with pytest.raises(UserError) as caught:
        load(TrainingConfig, argv)
    return caught.value.mistakes


def printed(capsys, command, *argv, default=None):
    """What `--help` or `--print_config` writes before it ends the command."""
    with pytest.raises(SystemExit) as end:
        load(command, argv, default)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def write(tmp_path):
    def write_yaml(text):
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.yaml"
        file.write_text(text)
        return str(file)

    return write_yaml


@pytest.mark.parametrize("preset", PRESETS, ids=lambda file: file.stem)
def test_every_preset_loads_and_names_data_that_its_recipe_makes(preset):
    config = load(TrainingConfig, ["--config", str(preset)])
    assert config.run_name in (preset.stem, preset.stem.removeprefix("gpt2_"))
    assert config.optim.warmup_steps < config.train.steps
    recipe = load(PrepareConfig, ["--config", str(ROOT / config.data.prepare)])
    assert (recipe.output,) == config.data.path


PUBLISHED = [
    ("gpt2_124m", 6e-4, 10e9),
    ("gpt2_350m", 3e-4, 10e9),
    ("gpt2_774m", 2.5e-4, 10e9),
    ("gpt2_1558m", 2e-4, 10e9),
    ("llama_1b", 4e-4, 25e9),
    ("llama_7b", 3e-4, 100e9),
]
"""Presets, their learning rates and tokens."""


@pytest.mark.parametrize(("name", "lr", "tokens"), PUBLISHED)
def test_published_rates_and_tokens(name, lr, tokens):
    """test_plan.py has what follows from shapes."""
    config = load(TrainingConfig, ["--config", f"configs/{name}.yaml"])
    assert_close((config.optim.lr, config.optim.min_lr), (lr, lr / 10))
    assert distance(config.train.steps * config.train.global_batch_tokens, tokens) < 1e-4
    is_llama = name.startswith("llama")
    warmup_tokens = config.optim.warmup_steps * config.train.global_batch_tokens
    assert is_llama or distance(warmup_tokens, 375e6) < 1e-3


@pytest.mark.parametrize(
    ("command", "flags", "preset", "is_noted"),
    [
        (TrainingConfig, "", BUILT_IN, False),
        (TrainingConfig, "--data.path data/stdlib/", BUILT_IN, False),
        (TrainingConfig, "--data.path data/mine --train.steps 7", OWN_TEXT, True),
        (ClassifierConfig, "", CLUSTERS, False),
        (ClassifierConfig, "--data.name clusters", CLUSTERS, False),
        (ClassifierConfig, "--data.path photos", OWN_IMAGES, True),
        (ClassifierConfig, "--data.path x --data.name cifar10", OWN_IMAGES, True),
    ],
)
def test_the_preset_suits_the_data(command, flags, preset, is_noted, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    default = {TrainingConfig: training_default, ClassifierConfig: classifier_default}[command]
    suited = load(command, ["--config", preset, *flags.split()], default)
    assert capsys.readouterr().err == ""
    assert load(command, flags.split(), default) == suited
    note = f"note: no --config; the preset for these data is {preset}\n"
    assert capsys.readouterr().err == note * is_noted


def test_defaults_then_files_left_to_right_then_flags_wherever_they_stand(write):
    first = write("train: {steps: 5, micro_batch_size: 2}\noptim: {lr: 0.01, warmup_steps: 1}\n")
    second = write("optim: {lr: 0.02}\neval: {every: 7}\n")
    flags = ["--optim.lr=0.03", "--eval.every", "9"]
    files = ["--config", first, "--config", second]
    for argv in ([*flags, *files], [*files, *flags], [*files[:2], *flags, *files[2:]]):
        config = load(TrainingConfig, argv)
        assert (config.optim.lr, config.eval.every) == (0.03, 9)
    config = load(TrainingConfig, files)
    assert (config.optim.lr, config.optim.warmup_steps, config.eval.every) == (0.02, 1, 7)
    assert (config.train.steps, config.train.global_batch_tokens) == (5, 524_288)
    assert load(TrainingConfig, [*files[2:], *files[:2]]).optim.lr == 0.01


def test_a_section_knows_what_is_given_by_files_and_flags_without_the_default_preset(write):
    file = write("model: {n_layer: 3}\neval: {every: 9}\n")
    flags = ["--model.n_head", "6"]
    preset = load(TrainingConfig, flags, BUILT_IN)
    assert (preset.model.n_layer, preset.model.model_fields_set) == (2, {"n_head"})
    named = load(TrainingConfig, ["--config", file, *flags, "--train.steps", "1"], BUILT_IN)
    assert named.model.model_fields_set == {"n_layer", "n_head"}


def test_the_default_file_stands_in_only_when_no_file_is_named(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it is found from any folder
    default = "configs/gpt2_stdlib.yaml"
    assert load(TrainingConfig, ["--model.n_layer", "7"], default).model.n_embd == 192
    assert load(TrainingConfig, ["--config", "configs/gpt2_stdlib.yaml"]).model.n_embd == 192
    file = write("model:\n  # n_embd: 3\n")
    assert load(TrainingConfig, [*STEPS, "--config", file], default).model.n_embd == 768


VALUES = [
    ("model", "train.compile", "model"),
    ("blocks", "train.compile", "blocks"),
    ("off", "train.compile", "off"),
    ("no", "train.mixed_precision", "no"),
    ("false", "model.document_mask", False),
    ("yes", "model.document_mask", True),
    ("010", "model.n_layer", 10),
    ("1_000", "model.n_layer", 1000),
    ("5", "seed", 5),
    ("1e-3", "optim.lr", 0.001),
    ("+.5E-3", "optim.lr", 0.0005),
    ("[0.8,0.99]", "optim.betas", (0.8, 0.99)),
    ('"0.8, 0.99"', "optim.betas", (0.8, 0.99)),
    ("500", "eval.tokens", 500),
    ("null", "eval.tokens", None),
    ("none", "data.prepare", None),
    ("none", "tracking.log_with", ()),
    ("[]", "tracking.log_with", ()),
    ("wandb", "tracking.log_with", ("wandb",)),
    ('"wandb,trackio"', "tracking.log_with", ("wandb", "trackio")),
    ("'a, b'", "tracking.sample_prompt", ("a, b",)),
    ("''", "tracking.sample_prompt", ("",)),
    ("2026-01-02", "run_name", "2026-01-02"),
    ("007", "run_name", "007"),
    ("yes", "run_name", "yes"),
]
LISTS = [
    ("--optim.betas 0.8 0.99", (0.8, 0.99)),
    ("--tracking.log_with trackio wandb", ("trackio", "wandb")),
    ("--tracking.sample_prompt 'a, b' ''", ("a, b", "")),
    ("--data.path a b", ("a", "b")),
]


def test_a_value_in_yaml_is_that_of_the_same_flag(write):
    for text, name, value in VALUES:
        nested = text
        (word,) = shlex.split(text)
        for key in reversed(name.split(".")):
            nested = f"{key}: {nested}" if nested == text else f"{key}: {{{nested}}}"
        for argv in ([f"--{name}", word], [f"--{name}={word}"], ["--config", write(nested)]):
            assert repr(flat(train(*argv).model_dump())[name]) == repr(value), argv
    for text, value in LISTS:
        name, *_ = argv = shlex.split(text)
        assert flat(train(*argv).model_dump())[name[2:]] == value
    assert train("--config", write("eval: {tokens: }\noptim.lr: 1e-3")).optim.lr == 0.001
    assert load(ClassifierConfig, ["--model.hidden", "30", "20"]).model.hidden == (30, 20)


def test_what_a_command_sets_in_a_section_stays_when_another_key_of_it_is_set(write, capsys):
    for argv in (
        [],
        ["--tracking.log_with", "wandb"],
        ["--config", write("tracking: {log_with: [wandb]}")],
    ):
        assert load(ClassifierConfig, argv).tracking.log_every == 50
    file = write("tracking: {log_every: 5}")
    assert load(ClassifierConfig, ["--config", file]).tracking.log_every == 5
    text = " ".join(printed(capsys, ClassifierConfig, "--help").split())
    assert "steps between rows of metrics.jsonl (default: 50)" in text


def test_complete_fills_in_what_has_come_since_and_leaves_out_what_is_there_no_more():
    """It checks no values."""
    saved = yaml.safe_load(dump(train("--optim.lr", "1e-3", "--tracking.log_with", "wandb")))
    today = yaml.safe_load(dump(train("--optim.lr", "1e-3")))
    del saved["optim"]["betas"], saved["tracking"], saved["seed"]
    assert complete(TrainingConfig, saved) == complete(TrainingConfig, today) == today
    empty = {
        "train": {"init_from": "", "branch_from": ""},
        "output_dir": "",
        "data": {"prepare": ""},
    }
    assert complete(TrainingConfig, empty) == complete(TrainingConfig, {}), (
        "older releases took it for null"
    )
    for given in ({"tracking": {"log_with": ["wandb"]}}, {}):
        assert complete(ClassifierConfig, given)["tracking"]["log_every"] == 50
    old = {
        **today,
        "optim": {**today["optim"], "nesterov": True},
        "legacy": {"a": 1},
        "debug": 0,
        "eval": None,
    }
    assert complete(TrainingConfig, {**old, "seed": {"data": 1}}) == today
    assert complete(TrainingConfig, {"optim": {"betas": "x"}})["optim"]["betas"] == "x"


REPEATED = [
    ["--data.path", "a", "--data.path", "b"],
    ["--seed", "1", "--seed=1"],
    ["--nothing", "--nothing"],
]
BELOW_A_VALUE = [
    ["--task", "mine.py:Mine", "--task.weight", "3"],
    ["--seed", "3", "--seed.foo", "4"],
    ["--seed.foo", "4", "--seed", "3"],
    ["--optim.lr", "3", "--optim.lr.foo", "4"],
]


@pytest.mark.parametrize("flags", REPEATED)
def test_a_flag_is_given_once(flags):
    (found,) = [line for line in mistakes(*STEPS, *flags) if "give it once" in line]
    assert found.startswith(f"{flags[0]} = given 2 times: ")


@pytest.mark.parametrize("flags", BELOW_A_VALUE)
def test_a_value_has_no_keys_in_flags_and_files(flags, write):
    name = next(word for word in flags if word.endswith((".weight", ".foo")))[2:]
    above = name.rpartition(".")[0]
    lines = [f"{name[2:]}: {value}" for name, value in zip(flags[::2], flags[1::2], strict=True)]
    first, second = (["--config", write(line)] for line in lines)
    for argv in (
        flags,
        ["--config", write("\n".join(lines))],
        [*first, *second],
        [*first, *flags[2:]],
    ):
        (found,) = mistakes(*STEPS, *argv)
        assert re.match(rf"{name} = \d: unknown key; {above} takes a value and has no keys$", found)


def test_a_section_that_is_given_a_value_and_keys():
    (found,) = mistakes(*STEPS, "--optim", "3", "--optim.lr", "1")
    assert found == "optim = 3: is a section; set its keys, like optim.grad_clip"


def test_values_that_begin_with_a_dash():
    prompts = ["- item", "---", "--", "-1", "-- x", "-->"]
    assert load(GenerateConfig, ["runs/x", "--prompts", *prompts]).prompts == (*prompts,)
    for word in ("---", "-", "- item", "--"):
        assert load(PrepareConfig, ["--document_separator", word]).document_separator == word
    for word in ("--END--", "-x", "---"):
        assert load(PrepareConfig, [f"--document_separator={word}"]).document_separator == word
    for word in ("--END--", "-x"):
        with pytest.raises(
            UserError,
            match=r"(?s)write one that begins with - as --document_separator=VALUE.*=VALUE",
        ):
            load(PrepareConfig, ["--document_separator", word])


def all_commands(kind=Command):
    """The classes of all command lines of the package and of benchmarks."""
    found = [one for below in kind.__subclasses__() for one in (below, *all_commands(below))]
    folders = ("gpt2_ddp.config.", BenchmarkConfig.__module__)
    return [command for command in found if command.__module__.startswith(folders)]


MAY_BE_EMPTY = {"prompts", "document_separator", "tracking.sample_prompt", "text"}


@pytest.mark.parametrize("command", all_commands())
def test_a_path_a_url_and_a_name_are_not_empty(command, write):
    texts = [name for name, field in leaves(command) if str in kinds_of(field.annotation)]
    for name in {*texts} - MAY_BE_EMPTY:
        for word in ("", " "):
            text = f"{name}: '{word}'"
            for argv in ([f"--{name}", word], [f"--{name}={word}"], ["--config", write(text)]):
                with pytest.raises(UserError) as caught:
                    load(command, argv)
                assert [
                    line
                    for line in caught.value.mistakes
                    if line.startswith(f"{name} = '{word}': is empty, like")
                ]
    if "--config" not in texts:
        with pytest.raises(UserError, match=r"--config = : is empty"):
            load(command, ["--config", ""])


def test_a_url_names_one_storage():
    """`reference` of fsspec executes templates, and `::` chains to it."""
    for url in (
        "reference::file:///x",
        "simplecache::s3://b/x",
        "reference://x",
        "x y://z",
        "a/b://c",
    ):
        (mistake, *_) = mistakes(*STEPS, "--data.path", url)
        assert "should be a folder, or the URL of one storage" in mistake
    for url in ("s3://b/x", "file:///x", "a::b"):
        assert train("--data.path", url).data.path == (url,)
    assert load(GenerateConfig, ["--prompts", "reference::file:///x"]).prompts


LEFT_OVER = [
    (
        "prepare_data --tokenizer a.json b.json c.json",
        "b.json c.json",
        "--tokenizer takes one value; quote",
    ),
    ("prepare_data --tokenizer=a.json b.json", "b.json", "--tokenizer takes one value; quote"),
    ("train_gpt2 optim.lr=3e-4", "optim.lr=3e-4", "flags begin with --, like --optim.lr=3e-4"),
    (
        "train_gpt2 configs/gpt2_124m.yaml --seed 3",
        "configs/gpt2_124m.yaml",
        "a file of settings is given as --config configs/g",
    ),
    ("train_gpt2 a.txt 'b c'", "a.txt 'b c'", "no flag takes it"),
    ("train_gpt2 '' b", "'' b", "no flag takes it"),
    ("train_gpt2 --config a.yaml b.yaml", "b.yaml", "--config takes one file; repeat it"),
    (
        "train_gpt2 --data.path=a b",
        "b",
        "--data.path=VALUE takes one value; for several, write --data.path VALUE VALUE",
    ),
    ("generate runs/a --checkpoint runs/b --seed 3 4", "runs/a 4", "--seed takes one value"),
]
COMMANDS_BY_NAME = {
    "prepare_data": PrepareConfig,
    "train_gpt2": TrainingConfig,
    "generate": GenerateConfig,
}


@pytest.mark.parametrize(("command", "words", "hint"), LEFT_OVER)
def test_words_that_no_flag_takes(command, words, hint):
    name, *argv = shlex.split(command)
    with pytest.raises(UserError) as caught:
        load(COMMANDS_BY_NAME[name], argv)
    (found,) = [
        mistake for mistake in caught.value.mistakes if mistake.startswith("command line = ")
    ]
    assert found.startswith(f"command line = {words}: {hint}")


OTHER_FILES = [
    ("train_gpt2", "configs/data_own_text.yaml", "is a configuration of prepare_data.py"),
    ("train_gpt2", "configs/accelerate/multi_node.yaml", "is a configuration of Accelerate"),
    ("prepare_data", "configs/gpt2_124m.yaml", "is a configuration of a training"),
    ("generate", "configs/jobs/regression.yaml", "is a configuration of a training"),
]


@pytest.mark.parametrize(("command", "file", "hint"), OTHER_FILES)
def test_a_file_for_another_command_is_one_mistake(command, file, hint):
    with pytest.raises(UserError) as caught:
        load(COMMANDS_BY_NAME[command], ["--config", file])
    (found,) = caught.value.mistakes
    assert found.startswith(f"--config = {file}: {hint}")


def test_two_words_for_the_field_without_a_flag():
    with pytest.raises(
        UserError, match=r"^checkpoint = runs/a 'The law': takes one value; .*, such as --prompts$"
    ):
        load(GenerateConfig, ["runs/a", "The law"])


LIBRARY = re.compile(
    r"valid|Input|pattern|parsable|instance|Field required|True|False|None|\(\)|Error|constrained"
)
"""Words of pydantic and Python that no message has."""


@pytest.mark.parametrize("command", all_commands())
def test_every_wrong_value_is_refused_in_plain_words(command):
    """Of each field that has a type, a range, a choice or a form of text."""
    nasty = [
        (),
        ("x!",),
        ("-1e9",),
        ("nan",),
        ("1e30",),
        ("9" * 5000,),
        ("", "x!", "y!", "-2"),
        ("2.5",),
        ("1:2:x",),
    ]
    for name, field in leaves(command):
        refused = []
        for words in nasty:
            try:
                load(command, [f"--{name}", *words])
            except UserError as error:
                refused += [line for line in error.mistakes if line.startswith(f"{name} = ")]
        assert refused, name
        for line in refused:
            problem = line.partition(": ")[2]
            assert not LIBRARY.search(problem), line
            assert re.match(r"(\w+ )?(should|needs|takes|is|has|conflicts) ", problem), line
        for part in (field, *kinds_of(field.annotation)):
            pattern = [
                limit for limit in getattr(part, "metadata", ()) if getattr(limit, "pattern", None)
            ]
            assert not pattern or part.title, f"{name}: its form has no name"


YAML = {
    "a: [": "line 1, column 5: ",
    "seed: 1\ntrain: {a: *b}": (
        r"line 2, column 12: an alias; quote a text that begins with \*; .* train: {a: \*b}"
    ),
    "seed: 1\nseed: 2": "line 2, column 1: the key seed is there twice; the line is seed: 2",
    "seed: '\x01'": "has a character that YAML forbids, at position 7",
    "[" * 1000: "is nested more than 50 levels deep",
    "optim:\n\tlr: 1": (
        "line 2, column 1: a tab, @, ` or % begins this; indent by blanks, quote texts; .* lr: 1"
    ),
    "optim:\n  lr: 1\n name: x": (
        "line 3, column 2: the indentation differs from that of the lines above; .* name: x"
    ),
    "optim: {lr: 1\nseed: 3": (
        "line 2, column 5: a comma or a closing bracket is missing; the line is seed: 3"
    ),
    "run_name: a: b": "line 1, column 12: a second colon; quote a text that has one",
}


@pytest.mark.parametrize("text", YAML)
def test_a_file_that_is_no_yaml_is_refused_with_its_line(text, write):
    with pytest.raises(UserError, match=rf"^--config = .*: cannot be read as YAML \({YAML[text]}"):
        load(TrainingConfig, ["--config", write(text)])


def test_all_mistakes_at_once(write):
    file = write("optim: {lr: fast}\nmodel: {n_layers: 3}\ntrian: {}\n")
    found = mistakes(
        "stray",
        "--config",
        file,
        "--train.steps",
        "many",
        "--eval.evry",
        "3",
        "--model.dropout",
        "1.5",
    )
    parts = (
        "optim.lr = fast",
        "model.n_layers",
        "trian",
        "train.steps = many",
        "eval.evry = 3",
        "model.dropout = 1.5",
    )
    assert all(part in "\n".join(found) for part in (*parts, "command line = stray"))
    assert len(found) == 7
    assert len(mistakes("--model.n_embd", "100", "--optim.min_lr", "1")) == 3, (
        "train.steps is missing, too"
    )


def test_print_config_round_trips_through_config(write, capsys):
    argv = ["--config", "configs/gpt2_774m.yaml", "--seed", "5", "--eval.tokens", "null"]
    first = printed(capsys, TrainingConfig, *argv, "--print_config")
    assert printed(capsys, TrainingConfig, "--config", write(first), "--print_config") == first
    assert load(TrainingConfig, ["--config", write(first)]) == load(TrainingConfig, argv)


def test_help_names_what_a_field_takes_and_lists_few_fields_first(capsys):
    words = " ".join(printed(capsys, TrainingConfig, "--help", "all").split())
    kinds = (
        "checkpoint.background {true,false,auto}",
        "eval.tokens {INT,auto,null}",
        "data.prepare {TEXT,null}",
    )
    assert all(f"--{kind} " in words for kind in kinds)
    few = printed(capsys, TrainingConfig, "--seed", "1", "--help")
    assert few.count("\n  --") == len(TrainingConfig.first) + 2  # --config and --print_config


COMMANDS = [*WITH_FLAGS, ROOT / "benchmarks/__main__.py"]
"""The programs that have a configuration."""


def test_help_and_mistakes_import_no_torch_or_numpy(tmp_path):
    cases = [
        (str(file), argument, code)
        for file in COMMANDS
        for argument, code in (("--help", 0), ("--nothing", 2))
    ]
    cases.append((str(ROOT / "scripts/status.py"), str(tmp_path), 2))
    code = f"""
import runpy, sys
for file, argument, code in {cases!r}:
    sys.argv = [file, argument]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        assert end.code == code, (file, argument, end.code)
    assert not {{"torch", "numpy"}} & sys.modules.keys(), (file, argument)
"""
    done = launch([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("usage: ") == len(COMMANDS)
    assert done.stderr.count("error: nothing = (no value): ") == len(COMMANDS)


@pytest.mark.parametrize(
    ("main", "code"), [("print(1)", 141), ("(_ for _ in ()).throw(BrokenPipeError)", 1)]
)
def test_a_command_whose_output_nobody_reads_ends_like_others(main, code):
    reader, writer = os.pipe()
    if code == 141:
        os.close(reader)
    imports = (
        "from gpt2_ddp.script import run_command; from gpt2_ddp.config.tools import StatusConfig"
    )
    command = f"{imports}; run_command(StatusConfig, lambda config: {main})"
    done = subprocess.run([sys.executable, "-c", command], stdout=writer, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n") > 0) == (code, code == 1)


@pytest.mark.parametrize(
    ("command", "default"), [(TrainingConfig, training_default), (RegressionConfig, None)]
)
def test_help_has_the_defaults_of_a_run_without_flags(command, default, capsys):
    config = flat(load(command, [], default).model_dump())
    config.pop("own", None)  # without a class, there are no settings of it
    text = " ".join(printed(capsys, command, "--help", "all", default=default).split())
    for name, value in config.items():
        (shown,) = re.findall(
            rf"--{re.escape(name)} \S+ .*?\(default: (.*?)\)(?: --| \w+: |$)", text
        )
        several = " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
        expected = json.dumps(value) if value is None or isinstance(value, bool) else several
        assert shown == expected or float(shown) == float(expected), name


def shown_default(text, name):
    """The default of a flag in the text of `--help`."""
    (shown,) = re.findall(rf"--{re.escape(name)} \S+ .*?\(default: (.*?)\)", text)
    return shown


def test_help_has_the_defaults_that_hold_beside_the_other_flags(write, capsys):
    """Those of the preset for these data, or of the given files."""

    def help_of(command, *flags, default):
        return " ".join(printed(capsys, command, *flags, default=default).split())

    flags = ["--data.path", "data/mine", "--help", "all"]
    text = help_of(TrainingConfig, *flags, default=training_default)
    assert f"(default: {OWN_TEXT})" in text
    assert shown_default(text, "optim.name") == "muon"
    assert shown_default(text, "model.n_layer") == "by the rule of own_text"
    images = help_of(ClassifierConfig, "--help", "--data.path", "x", default=classifier_default)
    assert f"(default: {OWN_IMAGES})" in images
    file = write("train: {steps: 5}")
    text = help_of(TrainingConfig, "--help", "all", "--config", file, default=training_default)
    assert shown_default(text, "train.steps") == "5"
    assert shown_default(text, "model.n_layer") == "12"
    assert (BUILT_IN in text, os.path.basename(file) in text) == (False, True)


@pytest.mark.parametrize(
    ("name", "now", "before", "is_refused"),
    [
        ("model.n_kv_head", None, 3, True),
        ("model.n_kv_head", 3, None, True),
        ("optim.embedding_lr", None, 3, True),
        ("optim.decay_steps", 3, None, True),
        ("optim.decay_steps", None, 3, False),
        ("eval.tokens", None, 3, False),
    ],
)
def test_a_resume_refuses_null_for_a_kept_value_and_a_value_for_a_kept_null(
    name, now, before, is_refused
):
    """Null for `optim.decay_steps` keeps the saved end of the schedule."""
    section, key = name.split(".")
    config = TrainingConfig.model_construct()
    parts = [getattr(config, section).model_copy(update={key: value}) for value in (now, before)]
    new, old = (config.model_copy(update={section: part}) for part in parts)
    resume = partial(check_resumable, new, "gpt2", old.model_dump(mode="json"), 10**6)
    if is_refused:
        expect_error(f"^{name} = {now}: the run was started with {before}", resume)
    else:
        resume()


def test_a_job_s_configuration_of_an_earlier_run_is_taken():
    """Its checkpoints had another name for the field that GPT-2's have, too."""
    config = load(RegressionConfig, ["--checkpoint.save_every", "7"])
    assert config.checkpoint.every == 7
    assert "save_every" not in dump(config)
    expect_error(
        "checkpoint.save_every = 7: unknown key",
        load,
        RegressionConfig,
        ["--checkpoint.save_every", "7", "--checkpoint.every", "8"],
    )
